"""What bad requests get: a status, one shape, the field's name; and the engine lives, idle."""

import json
import re

import pytest
from kit import FakeRunner, error_of

from tiercel.api.http.completions import read_prompts
from tiercel.api.http.reading import parse
from tiercel.api.http.schema import NO_OPS, ChatRequest, CompletionRequest
from tiercel.base.errors import RequestError

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def raw(rig, content, status=400, path=COMPLETE, kind="application/json"):
    response = rig.ask("POST", path, content=content, headers={"content-type": kind})
    assert response.status_code == status, response.text
    return error_of(response.json(), status)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": "x"} x',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b"\xef\xbb\xbf{}",
        b"[1]",
        b'"text"',
        b"null",
        b"1",
        b"true",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"seed": ' + b"9" * 10_000 + b"}",
        b"\x1f\x8b\x08\x00",
    ],
    ids=range(21),
)
def test_a_body_that_is_no_json_object_is_refused(rig, body):
    assert raw(rig, body)["type"] == "BadRequestError"


def test_a_body_nested_too_deep_is_refused_wherever_it_is(rig):
    for levels, status in ((60, 200), (64, 400), (100_000, 400)):
        body = b'{"prompt": "x", "max_tokens": 1, "metadata": ' + b"[" * levels + b"]" * levels + b"}"
        response = rig.ask("POST", COMPLETE, content=body, headers={"content-type": "application/json"})
        assert response.status_code == status
    assert "deep" in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "", "application/jsonx", "multipart/form-data; boundary=x"])
def test_another_content_type_is_refused(rig, kind):
    assert "application/json" in raw(rig, b'{"prompt": "x"}', kind=kind)["message"]


def test_the_content_types_case_and_parameters_do_not_matter(rig):
    raw_ok = rig.ask(
        "POST",
        COMPLETE,
        content=b'{"prompt":"x","max_tokens":1}',
        headers={"content-type": "Application/JSON; charset=utf-8"},
    )
    assert raw_ok.status_code == 200


def test_of_a_field_given_twice_the_last_counts(rig):
    response = rig.ask(
        "POST",
        COMPLETE,
        content=b'{"prompt":"x","max_tokens":"bad","max_tokens":2,"ignore_eos":true}',
        headers={"content-type": "application/json"},
    )
    assert response.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "1"}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 257}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": [264]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": {"264": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"nonsense": True}}, "stream_options"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 250}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "prompt"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"echo": "yes"}, "echo"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [[1], ["a"]]}, "prompt"),
        ({"prompt": {"prompt": "x"}}, "prompt"),
        ({"prompt": [264]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**64]}, "prompt"),
        ({"prompt": "x" * 256}, "prompt"),
        ({"prompt": "x" * 1_000_000}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 1024, "n": 5}, "n"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"tempratur": 1}, "tempratur"),
        ({"extra_body": {}}, "extra_body"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
def test_a_wrong_field_is_refused_by_its_name(rig, fields, param):
    error = rig.refused(COMPLETE, {"prompt": "hello", "max_tokens": 8} | fields)
    assert error["param"] == param
    assert error["type"] == "BadRequestError"
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0]"),
        ({"messages": HI * 10_001}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 300}, "max_completion_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": -2, "logprobs": True}, "top_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": {}}, "guided_json"),
        ({"logprob_token_ids": []}, "logprob_token_ids"),
        ({"logprob_token_ids": [264]}, "logprob_token_ids"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids"),
        ({"logprob_token_ids": [1], "logprobs": False}, "logprobs"),
        ({"logprob_token_ids": [1], "logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ messages }}"}}, "chat_template_kwargs"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
def test_a_wrong_chat_is_refused_by_its_field(rig, fields, param):
    assert rig.refused(CHAT, {"messages": HI} | fields)["param"] == param


def test_a_missing_field_is_named(rig):
    assert rig.refused(CHAT, {})["param"] == "messages"
    assert rig.refused("/detokenize", {})["param"] == "tokens"
    assert rig.refused("/tokenize", {})["param"] == "prompt"


def test_an_unknown_field_names_its_nearest(rig):
    assert "temperature" in rig.refused(COMPLETE, {"prompt": "x", "tempratur": 1})["message"]


def test_fields_that_change_nothing_are_taken(rig):
    idle = {name: values[0] if values else None for name, (values, _) in NO_OPS.items()}
    rig.chat(**idle, user="me", metadata={"a": "b"}, safety_identifier="x", session_id="s")
    rig.complete(**dict.fromkeys(NO_OPS), user="me")


def test_a_bool_is_not_taken_for_the_number_that_changes_nothing(rig):
    assert rig.refused(COMPLETE, {"prompt": "x", "best_of": True})["param"] == "best_of"


def test_no_field_is_both_served_and_refused():
    for kind in (ChatRequest, CompletionRequest):
        assert not set(kind.__struct_fields__) & set(NO_OPS)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("POST", "/v1/audio/transcriptions", 501),
        ("POST", "/v2/embed", 501),
    ],
)
def test_routes_that_are_not_there_answer_in_the_same_shape(rig, method, path, status):
    response = rig.ask(method, path)
    assert response.status_code == status
    error_of(response.json(), status)
    if status == 405:
        assert response.headers["allow"]


def test_a_body_over_the_limit_is_not_read_to_its_end(make_rig):
    rig = make_rig(settings={"body_bytes_max": 1000})
    n_read = 0

    async def pieces():
        nonlocal n_read
        for _ in range(1000):
            n_read += 100
            yield b"x" * 100

    response = rig.ask("POST", COMPLETE, content=pieces(), headers={"content-type": "application/json"})
    error_of(response.json(), 413)
    assert n_read < 2000
    assert rig.refused(COMPLETE, {"prompt": "x" * 2000}, 413)


def test_a_large_body_is_read_on_a_thread_and_served(rig):
    message = {"role": "user", "content": "x" * 40_000}
    answer = rig.chat(messages=[message], truncate_prompt_tokens=5)
    assert answer["usage"]["prompt_tokens"] == 5


def test_too_many_headers_are_refused(make_rig):
    rig = make_rig(settings={"n_headers_max": 20, "header_bytes_max": 2000})
    for headers in ({f"x-{i}": "1" for i in range(30)}, {"x-long": "y" * 3000}):
        response = rig.ask("GET", "/v1/models", headers=headers)
        error_of(response.json(), 431)


def test_a_full_queue_is_told_with_a_time_to_come_back(make_rig):
    rig = make_rig(max_waiting=1)
    response = rig.ask("POST", COMPLETE, json={"prompt": "x", "n": 2})
    assert response.status_code == 400  # it could never be taken
    crowded = make_rig(settings={"n_open_max": 0})
    response = crowded.ask("POST", COMPLETE, json={"prompt": "x"})
    error_of(response.json(), 429)
    assert response.headers["retry-after"] == "1"


def test_a_request_whose_numbers_overflow_fails_alone(make_rig):
    rig = make_rig(runner=lambda limits: FakeRunner(limits, nan_token_id=ord("!")))
    error = rig.refused(COMPLETE, {"prompt": "a!"}, 500)
    assert error["type"] == "InternalServerError"
    assert rig.complete()["usage"]["completion_tokens"] == 8
    chunks = rig.stream(COMPLETE, prompt="a!", max_tokens=4)
    assert error_of(chunks[-1], 500)
    several = rig.stream(COMPLETE, prompt=["fine", "a!"], max_tokens=4)
    assert error_of(several[-1], 500)
    rig.assert_idle()


def test_an_error_nobody_foresaw_is_answered_without_its_words(make_rig, monkeypatch, caplog):
    rig = make_rig()

    def fails(*args, **kwargs):
        raise KeyError("secret of the machine")

    monkeypatch.setattr(rig.client, "submit", fails)
    error = rig.refused(COMPLETE, {"prompt": "x"}, 500)
    assert "secret" not in error["message"]
    assert "secret" in caplog.text


def test_an_error_in_a_stream_nobody_foresaw_is_told_in_it(make_rig, monkeypatch):
    rig = make_rig()

    def fails(self, *args):
        raise KeyError("secret of the machine")

    monkeypatch.setattr("tiercel.api.http.chat._ChatAnswer._of_output", fails)
    chunks = rig.stream(CHAT, messages=HI, max_tokens=4)
    assert "secret" not in error_of(chunks[-1], 500)["message"]
    rig.assert_idle()


def test_the_engines_death_is_told_and_seen(make_rig):
    rig = make_rig()
    rig.client.close()
    assert rig.ask("GET", "/health").status_code == 503
    assert rig.ask("GET", "/ready").status_code == 503
    rig.refused(COMPLETE, {"prompt": "x"}, 500)


def test_messages_of_the_schema_say_what_was_expected():
    with pytest.raises(RequestError, match=re.escape("max_tokens: expected int | null, got str")):
        parse(b'{"max_tokens": "1"}', CompletionRequest)


def test_a_list_of_many_ids_is_one_prompt():
    assert read_prompts(list(range(5000)), 1024) == [list(range(5000))]
