"""Each limit on what a client may send: at it, one beyond it, and that nothing was spent on what is beyond it."""

import dataclasses
import threading

import pytest
from kit import GatedRunner, error_of, wait_until

from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ConfigError
from tiercel.engine.client import EngineClient
from tiercel.protocol import params
from tiercel.text.tokenizer import Tokenizer

CHAT, COMPLETE, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}

# What is promised, setting by setting.
DEFAULTS = {
    "body_bytes_max": 64 << 20,
    "json_depth_max": 64,
    "n_messages_max": 10_000,
    "n_parts_max": 1_000,
    "n_stop_max": 16,
    "n_bad_words_max": 128,
    "n_logit_bias_max": 1024,
    "n_tools_max": 128,
    "tools_bytes_max": 1 << 20,
    "n_outputs_max": 128,
    "n_prompts_max": 1024,
    "header_bytes_max": 64 << 10,
    "n_headers_max": 256,
    "n_open_max": 1024,
    "n_connections_max": 4096,
    "n_prompt_logprobs_max": 1 << 20,
    "tokenize_chars_max": 4 << 20,
    "n_detokenize_max": 1 << 20,
    "keep_alive_s": 5,
    "read_stall_s": 60,
    "write_stall_s": 60,
}


@pytest.fixture
def spent(monkeypatch):
    """What work was done: prompts sent to the engine, and texts cut into tokens."""
    done = []
    submit, encode = EngineClient.submit, Tokenizer.encode
    monkeypatch.setattr(EngineClient, "submit", lambda *a, **k: done.append("submit") or submit(*a, **k))
    monkeypatch.setattr(Tokenizer, "encode", lambda *a, **k: done.append("encode") or encode(*a, **k))
    return done


@pytest.fixture
def small(make_rig):
    """A server whose limits are small, so that one beyond is cheap."""
    return make_rig(
        limits={"max_len_tokens": 2048, "n_pages": 4096},
        settings={
            "body_bytes_max": 20_000,
            "json_depth_max": 6,
            "n_messages_max": 3,
            "n_parts_max": 2,
            "n_stop_max": 2,
            "n_bad_words_max": 2,
            "n_logit_bias_max": 2,
            "n_tools_max": 2,
            "tools_bytes_max": 600,
            "n_outputs_max": 2,
            "n_prompts_max": 2,
            "n_prompt_logprobs_max": 60,
            "tokenize_chars_max": 3000,
            "n_detokenize_max": 3,
        },
    )


def test_the_limits_are_settings_with_the_promised_defaults():
    by_default = ServerSettings(served_names=("a",))
    assert {name: getattr(by_default, name) for name in DEFAULTS} == DEFAULTS
    assert params.STOP_CHARS_MAX == 1024
    assert params.LOGIT_BIAS_LIMIT == 100


def test_every_limit_of_the_settings_is_promised_here():
    limits = {field.name for field in dataclasses.fields(ServerSettings) if field.name.endswith("_max")}
    # Those of stored responses have tests of their own.
    assert {name for name in limits if "store" not in name and "background" not in name and "event" not in name} <= set(
        DEFAULTS
    )


@pytest.mark.parametrize(
    ("name", "value"), [("n_threads", 0), ("n_messages_max", -1), ("body_bytes_max", -1), ("n_stop_max", 17)]
)
def test_a_limit_that_could_not_be_kept_is_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        ServerSettings(served_names=("a",), **{name: value})


def tool(name="f", **parameters):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def nested(depth):
    value = {}
    for _ in range(depth - 2):
        value = {"a": value}
    return value


# path, what is in bounds, what is one beyond, the field at fault, the status
ROWS = {
    "json depth": (COMPLETE, {"metadata": nested(6)}, {"metadata": nested(7)}, None, 400),
    "messages": (CHAT, {"messages": HI * 3}, {"messages": HI * 4}, "messages", 400),
    "messages of Anthropic": (MESSAGES, {"messages": HI * 3}, {"messages": HI * 4}, None, 400),
    "messages to be cut": ("/tokenize", {"messages": HI * 3}, {"messages": HI * 4}, "messages", 400),
    "messages to be counted": (f"{MESSAGES}/count_tokens", {"messages": HI * 3}, {"messages": HI * 4}, None, 400),
    "items of a response": (RESPONSES, {"input": HI * 3}, {"input": HI * 4}, "input", 400),
    "parts of an item": (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 2}]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 3}]},
        "input[0].content",
        400,
    ),
    "parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 3}]},
        "messages[0].content",
        400,
    ),
    "parts of Anthropic": (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 3}]},
        None,
        400,
    ),
    "stop strings": (COMPLETE, {"stop": ["a", "b"]}, {"stop": ["a", "b", "c"]}, "stop", 400),
    "characters of a stop string": (COMPLETE, {"stop": "x" * 1024}, {"stop": "x" * 1025}, "stop", 400),
    "an empty stop string": (COMPLETE, {"stop": ["a"]}, {"stop": ["a", ""]}, "stop", 400),
    "stop strings of Anthropic": (MESSAGES, {"stop_sequences": ["a"]}, {"stop_sequences": ["a", "b", "c"]}, None, 400),
    "bad words": (COMPLETE, {"bad_words": ["a", "b"]}, {"bad_words": ["a", "b", "c"]}, "bad_words", 400),
    "biases": (
        COMPLETE,
        {"logit_bias": {"1": 1, "2": 1}},
        {"logit_bias": {"1": 1, "2": 1, "3": 1}},
        "logit_bias",
        400,
    ),
    "a bias": (COMPLETE, {"logit_bias": {"1": 100}}, {"logit_bias": {"1": 100.5}}, "logit_bias", 400),
    "a bias' token": (COMPLETE, {"logit_bias": {"263": 1}}, {"logit_bias": {"264": 1}}, "logit_bias", 400),
    "tools": (CHAT, {"tools": [tool()] * 2}, {"tools": [tool()] * 3}, "tools", 400),
    "bytes of tools": (CHAT, {"tools": [tool(title="x" * 100)]}, {"tools": [tool(title="x" * 600)]}, "tools", 400),
    "characters of a tool's name": (
        CHAT,
        {"tools": [tool("x" * 64)]},
        {"tools": [tool("x" * 65)]},
        "tools[0].function.name",
        400,
    ),
    "letters of a tool's name": (
        CHAT,
        {"tools": [tool("aZ9_.-")]},
        {"tools": [tool("a b")]},
        "tools[0].function.name",
        400,
    ),
    "answers": (COMPLETE, {"n": 2}, {"n": 3}, "n", 400),
    "prompts": (COMPLETE, {"prompt": ["a", "b"]}, {"prompt": ["a", "b", "c"]}, "prompt", 400),
    "logprobs": (COMPLETE, {"logprobs": 20}, {"logprobs": 21}, "logprobs", 400),
    "logprobs of a chat": (
        CHAT,
        {"logprobs": True, "top_logprobs": 20},
        {"logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        400,
    ),
    "logprobs of a prompt": (
        COMPLETE,
        {"prompt": "x" * 20, "prompt_logprobs": 2},
        {"prompt": "x" * 21, "prompt_logprobs": 2},
        "prompt_logprobs",
        400,
    ),
    "logprobs of an echo": (
        COMPLETE,
        {"prompt": ["x" * 10] * 2, "logprobs": 2, "echo": True},
        {"prompt": ["x" * 10, "x" * 11], "logprobs": 2, "echo": True},
        "prompt_logprobs",
        400,
    ),
    "characters to be cut": ("/tokenize", {"prompt": "x" * 3000}, {"prompt": "x" * 3001}, "prompt", 400),
    "characters of what is shortened": (
        COMPLETE,
        {"prompt": "x" * 3000, "truncate_prompt_tokens": 5},
        {"prompt": "x" * 3001, "truncate_prompt_tokens": 5},
        "prompt",
        400,
    ),
    "tokens to be put together": ("/detokenize", {"tokens": [1, 2, 3]}, {"tokens": [1, 2, 3, 4]}, "tokens", 400),
    "a seed": (COMPLETE, {"seed": 2**63 - 1}, {"seed": 2**63}, "seed", 400),
    "a seed below zero": (COMPLETE, {"seed": -(2**63)}, {"seed": -(2**63) - 1}, "seed", 400),
    "a truth value": (COMPLETE, {"top_k": 1}, {"top_k": True}, "top_k", 400),
    "a number as text": (COMPLETE, {"top_p": 0.5}, {"top_p": "0.5"}, "top_p", 400),
}
BASES = {
    CHAT: {"messages": HI, "max_tokens": 2},
    COMPLETE: {"prompt": "x", "max_tokens": 2},
    MESSAGES: {"messages": HI, "max_tokens": 2},
    RESPONSES: {"max_output_tokens": 16, "store": False},
}
# What can only be known when the text is cut.
NEEDS_TOKENS = {"logprobs of a prompt", "logprobs of an echo", "logprobs", "logprobs of a chat", "a bias' token"}


@pytest.mark.parametrize("row", ROWS)
def test_a_limit_holds_at_it_and_one_beyond_before_work_is_spent(small, spent, row):
    path, good, bad, param, status = ROWS[row]
    base = BASES.get(path, {})
    answer = small.post(path, base | good)
    assert answer
    small.assert_idle()
    spent.clear()
    refused = small.post(path, base | bad, status)
    if path.startswith(MESSAGES):
        assert refused["type"] == "error"
    else:
        assert error_of(refused, status)["param"] in (param, param and param.removeprefix("top_"))
    assert not spent or (row in NEEDS_TOKENS and spent in (["encode"], ["encode", "encode"], ["encode", "submit"]))
    assert small.core.snapshot.n_running == 0
    small.assert_idle()


def test_a_body_is_read_to_its_limit_and_no_further(small, spent):
    head = b'{"max_tokens":1,"user":"'
    for n_bytes, status in ((20_000, 200), (20_001, 413)):
        body = head + b"x" * (n_bytes - len(head) - len(b'","prompt":"x"}')) + b'","prompt":"x"}'
        assert len(body) == n_bytes
        spent.clear()
        assert small.ask("POST", COMPLETE, content=body, headers=JSON).status_code == status
    assert not spent


def test_a_body_said_to_be_too_long_is_not_waited_for(small):
    async def never():
        raise AssertionError("it was read")
        yield b""

    response = small.ask("POST", COMPLETE, content=never(), headers={**JSON, "content-length": "20001"})
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"prompt":"x","max_tokens":1,"max_tokens":2,"ignore_eos":true}', 200),
        (b'{"prompt":"\\ud83d\\ude00","max_tokens":1}', 200),
        (b'{"prompt":"\\ud83d","max_tokens":1}', 400),
        (b'{"prompt":"\\ude00\\ud83d","max_tokens":1}', 400),
        (b'{"prompt":"\xff","max_tokens":1}', 400),
        (b'{"prompt":"x","temperature":NaN}', 400),
        (b'{"prompt":"x","temperature":-Infinity}', 400),
        (b'{"prompt":"x","temperature":1e999}', 400),
        (b'["prompt"]', 400),
    ],
)
def test_json_is_read_strictly(small, spent, body, status):
    response = small.ask("POST", COMPLETE, content=body, headers=JSON)
    assert response.status_code == status, response.text
    assert bool(spent) == (status == 200)
    if b'"max_tokens":2' in body:
        assert response.json()["usage"]["completion_tokens"] == 2


def test_a_text_that_cannot_fit_is_not_cut(make_rig, spent):
    rig = make_rig()
    n_most = rig.facade.max_model_len * rig.tokenizer.max_chars_per_token
    rig.refused(COMPLETE, {"prompt": "x" * n_most})  # it might have fitted, so it was cut to see
    assert spent == ["encode", "submit"]
    spent.clear()
    error = rig.refused(COMPLETE, {"prompt": "x" * (n_most + 1)})
    assert str(n_most) in error["message"]
    rig.refused(CHAT, {"messages": [{"role": "user", "content": "x" * (n_most + 1)}]})
    assert not spent


def test_a_prompt_of_the_contexts_length_is_refused_before_it_waits(make_rig):
    rig = make_rig()
    assert rig.complete(prompt=[1] * 255, max_tokens=1)["usage"]["prompt_tokens"] == 255
    rig.assert_idle()
    n_steps = rig.core.snapshot.n_total_steps
    assert rig.refused(COMPLETE, {"prompt": [1] * 256, "max_tokens": 1})["param"] == "prompt"
    rig.refused(COMPLETE, {"prompt": [1] * 100_000})
    assert rig.core.snapshot.n_total_steps == n_steps


@pytest.mark.parametrize(
    ("n_headers", "n_bytes", "status"), [(20, 100, 200), (21, 100, 431), (5, 2000, 200), (5, 2001, 431)]
)
def test_headers_are_taken_to_their_limits(make_rig, n_headers, n_bytes, status):
    rig = make_rig(settings={"n_headers_max": 20, "header_bytes_max": 2000})
    # What the client adds by itself.
    own = rig.ask("GET", "/v1/models").request.headers.raw
    names = [f"x-{i:03}" for i in range(n_headers - len(own))]
    n_left = n_bytes - sum(len(name) + len(value) for name, value in own)
    headers = dict.fromkeys(names, "")
    if n_bytes >= 2000:
        headers = {"x-a": "y" * (n_left - 3)} if n_headers == 5 else headers
    assert rig.ask("GET", "/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("a" * 128, True), ("a" * 129, False), ("a b", False), ("a\tb", False), (b"\xe9", False), ("", False)],
)
def test_a_request_id_is_kept_or_replaced(rig, given, is_kept):
    answered = rig.ask("GET", "/v1/models", headers={"x-request-id": given}).headers["x-request-id"]
    assert (answered == given) == is_kept
    assert answered


def test_waiting_requests_are_bounded_and_told_when_to_come_back(make_rig):
    rig = make_rig(runner=GatedRunner, max_num_seqs=1, max_waiting=1, limits={"n_slots": 1})
    first = rig.client.submit("x")
    wait_until(lambda: rig.core._n_waiting == 0)
    second = rig.client.submit("x")
    response = rig.ask("POST", COMPLETE, json={"prompt": "x"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    rig.runner.open()
    for handle in (first, second):
        assert list(handle)


def test_open_requests_are_bounded_before_their_bodies_are_read(make_rig):
    rig = make_rig(settings={"n_open_max": 1})
    rig.service.n_open = 1

    async def never():
        raise AssertionError("it was read")
        yield b""

    response = rig.ask("POST", COMPLETE, content=never(), headers=JSON)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    rig.service.n_open = 0
    rig.complete()


def test_what_is_too_much_is_refused_on_a_thread_and_not_on_the_loop(small, monkeypatch):
    """Rendering and cutting happen where they hold nobody up."""
    seen = []
    encode = Tokenizer.encode

    def noted(*args, **kwargs):
        seen.append(threading.current_thread().name)
        return encode(*args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    small.chat()
    small.complete()
    small.post("/tokenize", {"prompt": "x"})
    assert seen
    assert all(name.startswith("tiercel-api") for name in seen)
