"""The log: its form, whose request a line is about, what is told of requests, and that no key is in it."""

import io
import json
import logging
from datetime import datetime, timedelta

import pytest
from live import http_post, read_until

from tiercel.api.http.logs import JsonFormatter, RequestIdFilter, current_request_id, set_up_logging
from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ConfigError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEYS = ("first-secret", "second-secret")


class Log:
    """Everything this process logs as a server, as text lines or as JSON's objects."""

    def __init__(self, settings):
        self._saved = logging.root.handlers[:], logging.root.level
        set_up_logging(settings)
        (self._handler,) = logging.root.handlers
        self._handler.setStream(io.StringIO())
        self._handler.addFilter(lambda record: not record.name.startswith("http"))  # the tests' own client

    @property
    def text(self):
        return self._handler.stream.getvalue()

    @property
    def objects(self):
        return [json.loads(line) for line in self.text.splitlines()]

    def of(self, logger):
        return [one for one in self.objects if one["logger"].endswith(logger)]

    def close(self):
        logging.root.handlers[:], level = self._saved
        logging.root.setLevel(level)


@pytest.fixture
def make_log(make_rig):
    """Make a served engine, and the log as its settings make it."""
    logs = []

    def make(make_one=make_rig, **settings):
        rig = make_one(settings=settings)
        logs.append(Log(ServerSettings(served_names=("tiny",), **settings)))
        return rig, logs[-1]

    yield make
    for log in logs:
        log.close()


def test_a_line_of_json_holds_time_level_logger_message_and_request(make_log):
    rig, log = make_log(log_format="json")
    rig.ask("GET", "/v1/models", headers={"x-request-id": "mine"})
    (line,) = log.of("access")
    assert datetime.fromisoformat(line.pop("time")).utcoffset() == timedelta(0)
    assert line.pop("duration_s") >= 0
    assert line.pop("message").startswith("GET /v1/models 200 in ")
    assert line == {
        "level": "INFO",
        "logger": "tiercel.api.http.request_log.access",
        "request_id": "mine",
        "method": "GET",
        "path": "/v1/models",
        "status": 200,
    }


def test_a_line_of_text_holds_the_request_too(make_log):
    rig, log = make_log()
    rig.ask("GET", "/v1/models", headers={"x-request-id": "mine"})
    assert "tiercel.api.http.request_log.access [mine]: GET /v1/models 200 in " in log.text


def test_an_error_and_its_trace_are_one_line_of_json():
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "it %s", ("failed",), (type(error), error, None))
    RequestIdFilter().filter(record)
    (line,) = JsonFormatter().format(record).splitlines()
    told = json.loads(line)
    assert told["message"] == "it failed"
    assert "ValueError: two\nlines" in told["exception"]
    assert "request_id" not in told


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_line_that_a_request_causes_has_its_id(make_log, path, monkeypatch):
    settings = {"log_format": "json", "log_level": "debug", "enable_log_requests": True, "enable_log_outputs": True}
    rig, log = make_log(**settings)
    prepare = rig.service._submit

    def loud(*args):
        logging.getLogger("some.library").warning("on a thread")
        return prepare(*args)

    monkeypatch.setattr(rig.service, "_submit", loud)
    ask = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    for is_stream in (False, True):
        body = ask | {"max_tokens": 3, "stream": is_stream}
        rig.ask("POST", path, json=body, headers={"x-request-id": f"mine-{is_stream}"})
    rig.ask("POST", path, json={"temperature": 9}, headers={"x-request-id": "bad"})
    of_server = [one for one in log.objects if one["logger"].startswith(("tiercel.api", "some"))]
    assert {one.get("request_id") for one in of_server} == {"mine-False", "mine-True", "bad"}
    assert {one["logger"].rpartition(".")[2] for one in of_server} >= {"library", "access", "request_log", "app"}
    assert current_request_id.get() == ""


def test_a_request_is_logged_with_its_parameters_and_without_its_prompt(make_log):
    rig, log = make_log(log_format="json", enable_log_requests=True)
    rig.complete(prompt=["private words", "more"], max_tokens=3, temperature=0.5, stop=["x"])
    first, second = log.of("request_log")
    assert first["params"] == {"temperature": 0.5, "max_tokens": 3, "seed": 3, "stop": ["x"], "ignore_eos": True}
    assert (first["n_prompt_tokens"], second["n_prompt_tokens"]) == (13, 4)
    assert "private" not in log.text


def test_a_prompt_is_logged_at_debug_cut_to_the_length_that_is_set(make_log):
    rig, log = make_log(log_level="debug", enable_log_requests=True, max_log_len=7)
    rig.complete(prompt="private words\nFORGED LINE", max_tokens=3)
    assert '"private"..., token ids [' in log.text
    assert log.text.count(", ") > 5
    assert "words" not in log.text
    assert not any(line.startswith("FORGED") for line in log.text.splitlines())


def test_nothing_of_a_request_but_that_it_was_answered_is_logged_unless_told(make_log):
    rig, log = make_log(log_format="json", log_level="debug")
    rig.complete(prompt="private words")
    assert log.of("request_log") == []
    assert "private" not in log.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_output_is_logged_once_and_whole_when_told(make_log, is_stream):
    rig, log = make_log(log_format="json", enable_log_requests=True, enable_log_outputs=True)
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 6, "seed": 3, "ignore_eos": True}
    choices = rig.post(COMPLETIONS, body)["choices"] if not is_stream else None
    if is_stream:
        rig.stream(COMPLETIONS, **body)
    told = [one for one in log.of("request_log") if "output" in one]
    assert sorted(one["output"] for one in told) == ["0.0", "0.1", "1.0", "1.1"]
    assert {(one["finish_reason"], one["n_tokens"]) for one in told} == {("length", 6)}
    if choices is not None:
        assert all(any(json.dumps(one["text"]) in line["message"] for line in told) for one in choices)


def test_pieces_of_a_stream_are_logged_when_told(make_log):
    settings = {"enable_log_requests": True, "enable_log_outputs": True, "enable_log_deltas": True}
    rig, log = make_log(log_format="json", **settings)
    rig.stream(COMPLETIONS, prompt="a", max_tokens=30)
    *pieces, last = [one for one in log.of("request_log") if "output" in one]
    assert all(one["finish_reason"] is None for one in pieces)
    assert (last["finish_reason"], last["n_tokens"]) == ("length", 30)


def test_no_key_is_ever_logged(make_log):
    rig, log = make_log(
        api_keys=KEYS, log_level="debug", log_format="json", enable_log_requests=True, enable_log_outputs=True
    )
    body = {"prompt": "x", "max_tokens": 2}
    for key in (*KEYS, "wrong-secret"):
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}, {"authorization": f"Basic {key}"}):
            rig.ask("POST", COMPLETIONS, json=body, headers=headers)
            rig.ask("GET", f"/v1/models?api_key={key}", headers=headers)
            rig.ask("POST", COMPLETIONS, json={"api_key": key}, headers=headers)
    logging.getLogger("tiercel").info("%r %s", rig.settings, rig.settings)
    assert log.of("access")
    assert "secret" not in log.text


def test_a_path_cannot_forge_a_line(make_log, make_live):
    live, log = make_log(make_live)
    with live.connection() as raw:
        raw.sendall(b"GET /a%0aERROR%20forged HTTP/1.1\r\nhost: x\r\n\r\n")
        read_until(raw, b" 404 ")
        raw.sendall(http_post(COMPLETIONS, b'{"prompt": "x", "max_tokens": 2}'))
        read_until(raw, b'"usage"')
    assert "/a\\nERROR forged 404" in log.text
    assert not any(line.startswith("ERROR") for line in log.text.splitlines())


def test_probes_are_not_logged_unless_told(make_log):
    rig, log = make_log(log_format="json")
    for path in ("/health", "/ping", "/ready", "/metrics", "/version"):
        rig.ask("GET", path)
    assert [one["path"] for one in log.of("access")] == ["/version"]
    rig, log = make_log(log_format="json", unlogged_paths=("/version",))
    for path in ("/health", "/version"):
        rig.ask("GET", path)
    assert [one["path"] for one in log.of("access")] == ["/health"]


def test_the_lines_of_answers_can_be_left_out(make_log):
    rig, log = make_log(has_access_log=False)
    rig.complete()
    assert log.text == ""


def test_the_level_is_the_one_that_is_set(make_log):
    rig, log = make_log(log_level="error")
    rig.complete()
    assert log.text == ""


def test_a_file_can_say_how_to_log(make_rig, tmp_path):
    file = tmp_path / "log.json"
    out = tmp_path / "out.log"
    wanted = {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"request": {"()": "tiercel.api.http.logs.RequestIdFilter"}},
        "formatters": {"json": {"()": "tiercel.api.http.logs.JsonFormatter"}},
        "handlers": {
            "file": {"class": "logging.FileHandler", "filename": str(out), "formatter": "json", "filters": ["request"]}
        },
        "root": {"level": "INFO", "handlers": ["file"]},
    }
    file.write_text(json.dumps(wanted))
    saved = logging.root.handlers[:], logging.root.level
    try:
        set_up_logging(ServerSettings(served_names=("a",), log_config_file=str(file)))
        make_rig().complete()
        (handler,) = logging.root.handlers
        handler.close()
    finally:
        logging.root.handlers[:] = saved[0]
        logging.root.setLevel(saved[1])
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["path"] for one in told if one["logger"].endswith("access")] == [COMPLETIONS]


@pytest.mark.parametrize(
    "text", [None, "{", "[]", '{"version": 7}', '{"version": 1, "handlers": {"a": {"class": "no.X"}}}']
)
def test_a_file_that_says_nothing_usable_is_refused(tmp_path, text):
    file = tmp_path / "log.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="log_config_file"):
        set_up_logging(ServerSettings(served_names=("a",), log_config_file=str(file)))


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_log_outputs": True},
        {"enable_log_requests": True, "enable_log_deltas": True},
        {"log_level": "loud"},
        {"log_format": "xml"},
        {"max_log_len": -1},
    ],
)
def test_settings_of_the_log_that_cannot_be_are_refused(settings):
    with pytest.raises(ConfigError, match="log_"):
        ServerSettings(served_names=("a",), **settings)
