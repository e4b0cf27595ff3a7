import json
import sys

import fake_servers
import pytest
from bench_fakes import continue_ids
from fake_servers import FakeServer

from tiercel.base.errors import RequestFailed
from tiercel.bench import burst, ours, served
from tiercel.bench.contest import Request
from tiercel.bench.http_client import read_url
from tiercel.cli import main

BODY = b'{"prompt": [1, 2]}'


async def goes_away_at_once(writer, n):
    writer.transport.abort()


@pytest.mark.parametrize(
    ("behave", "kind"),
    [
        (fake_servers.stalls, "stalled"),
        (fake_servers.dies, "died"),
        (fake_servers.dies_at_once, "died"),
        (goes_away_at_once, "died"),
        (fake_servers.no_http, "garbage"),
        (fake_servers.no_json, "garbage"),
        (fake_servers.no_completion, "garbage"),
        (fake_servers.busy, "status"),
        (fake_servers.empty, "none"),
        (fake_servers.error_in_stream, "died"),
        (fake_servers.no_end, "died"),
    ],
)
def test_a_burst_ends_with_the_kind_of_what_went_wrong(behave, kind):
    with FakeServer(behave) as server:
        try:
            burst.send(read_url(server.url), served.PATH, [BODY] * 2, timeout_s=0.3 if kind == "stalled" else 20)
            found = "none"
        except burst.BurstFailed as failure:
            found = failure.kind
    assert found == kind


def test_a_burst_at_no_server_is_refused(closed_url):
    with pytest.raises(burst.BurstFailed, match="refused"):
        burst.send(read_url(closed_url), served.PATH, [BODY], timeout_s=0.3)


def test_a_burst_reads_every_answer():
    with FakeServer(fake_servers.good) as server:
        found = burst.send(read_url(server.url), served.PATH, [BODY] * 5, timeout_s=20)
        assert [body for _, body in server.asked] == [{"prompt": [1, 2]}] * 5
    assert [one.text for one in found.answers] == [" t0 t1 t2"] * 5
    assert found.client_cpu_s > 0
    assert found.elapsed_s > 0


class RuleServer:
    """Answers by the rule that the fake engine has, but where `spoil` says otherwise: n-th request -> token ids."""

    def __init__(self, spoil=lambda n, ids: ids):
        self.spoil = spoil

    def serve(self):
        server = FakeServer(self._answer)
        self.asked = server.asked
        return server

    async def _answer(self, writer, n):
        asked = self.asked[n - 1][1]
        ids = self.spoil(n, continue_ids(asked["prompt"], asked["max_tokens"]))
        told = [
            {
                "index": 0,
                "text": f" {one}",
                "finish_reason": None,
                **({"token_ids": [one]} if "return_token_ids" in asked else {}),
            }
            for one in ids
        ]
        told.append({"index": 0, "text": "", "finish_reason": "length"})
        await fake_servers.chunks(
            writer, [*(fake_servers.event({"choices": [one]}) for one in told), fake_servers.event("[DONE]")]
        )


REQUESTS = [Request((1, 2), 3), Request((4,), 3)]


def test_a_round_tells_what_is_left_of_the_offline_rate(engine):
    with RuleServer().serve() as server:
        url = read_url(server.url)
        _, texts = served.check(engine, url, REQUESTS, 20)
        found = served.take_turns(engine, url, REQUESTS, texts, is_served_first=True, timeout_s=20)
        asked = [body for _, body in server.asked]
    assert found["offline_tok_s"] == 12.0
    assert found["served_frac"] == found["served_tok_s"] / 12.0
    assert [body["prompt"] for body in asked[2:]] in ([[1, 2], [4]], [[4], [1, 2]])
    assert all(body["stream"] and body["ignore_eos"] and body["temperature"] == 0 for body in asked)


def test_served_tokens_that_are_not_the_offline_ones_are_no_measurement(engine):
    spoilt = RuleServer(lambda n, ids: (7, *ids[1:]) if n == 2 else ids)
    with spoilt.serve() as server, pytest.raises(RequestFailed, match="1 of 2 served answers"):
        served.check(engine, read_url(server.url), REQUESTS, 20)


def test_a_served_text_that_changes_is_no_measurement(engine):
    spoilt = RuleServer(lambda n, ids: (7, *ids[1:]) if n == 3 else ids)
    with spoilt.serve() as server:
        url = read_url(server.url)
        _, texts = served.check(engine, url, REQUESTS, 20)
        with pytest.raises(RequestFailed, match="changed"):
            served.take_turns(engine, url, REQUESTS, texts, is_served_first=False, timeout_s=20)


def script(text):
    return [sys.executable, "-c", text]


def tells(url):
    """Return a program that says what a server says, and stays."""
    said = f"tiercel serve: m at {url}/v1"
    return script(f"import sys, time; print({said!r}, file=sys.stderr, flush=True); time.sleep(600)")


def test_a_server_is_known_by_what_it_says_and_ends_with_its_use():
    with served.running_server(tells("http://127.0.0.1:7"), deadline_s=20) as server:
        assert (server.host, server.port) == ("127.0.0.1", 7)


def test_a_server_that_dies_is_told_with_its_last_words():
    with (
        pytest.raises(RequestFailed, match=r"died: exit code 3.*out of luck"),
        served.running_server(script("import sys; print('out of luck', file=sys.stderr); sys.exit(3)"), deadline_s=20),
    ):
        pass


def test_a_server_that_never_says_where_it_is_is_stalled():
    with (
        pytest.raises(RequestFailed, match="stalled"),
        served.running_server(script("import time; time.sleep(600)"), deadline_s=0.2),
    ):
        pass


def test_a_server_gets_the_options_of_the_engine_it_is_compared_with():
    words = served.serve_words("m.gguf", ours.with_defaults({"threads": 1}))
    assert words[3:] == (
        ["serve", "m.gguf", "--port", "0", "--no-enable-prefix-caching", "--speculative", "off", "--threads", "1"]
    )
    asked = ours.with_defaults({"speculative_config": {"method": "ngram"}})
    assert "speculative" not in asked


def test_served_writes_a_row(engine, capsys, no_checkout, monkeypatch):
    rule = RuleServer()
    with rule.serve() as server:
        monkeypatch.setattr(served, "serve_words", lambda model, options: tells(server.url))
        words = ["--num-prompts", "3", "--input-len", "4", "--output-len", "5", "--num-iters", "2", "--json"]
        assert main.main(["bench", "served", *words]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["config"]["work"]["num_prompts"] == 3
    measures = row["contestants"]["tiercel"]["measures"]
    assert measures["served_frac"]["n"] == 2
    assert 0 <= measures["client_cpu_frac"]["min"] <= 1
    assert engine.is_closed


def test_served_has_no_peers(engine, capsys, no_checkout, tmp_path):
    assert main.main(["bench", "served", "--peer", "x=python", "--peers-dir", str(tmp_path)]) == 2
    assert "leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("has_page", [True, False])
def test_the_address_is_read_from_what_our_server_says(has_page):
    code = (
        "from tiercel.api.http.address import take_address\n"
        "from tiercel.api.http.server import _announce\n"
        "from tiercel.api.http.settings import ServerSettings\n"
        f"settings = ServerSettings(served_names=('tiny',), port=0, has_page={has_page})\n"
        "_announce(settings, take_address(settings))\n"
        "import time; time.sleep(600)\n"
    )
    with served.running_server([sys.executable, "-c", code], deadline_s=60.0) as server:
        assert server.port > 0
