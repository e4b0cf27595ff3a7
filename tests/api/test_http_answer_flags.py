"""What the server's settings put into answers, or leave out."""

import pytest
from kit import byte_tokenizer

from tiercel import __version__
from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ConfigError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
METRICS = {"queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second"}


def ask_of(path):
    return {"messages": HI} if path == CHAT else {"prompt": "hello"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_can_be_forced_into_every_chunk_of_a_stream(make_rig, path):
    rig = make_rig(settings={"enable_force_include_usage": True})
    chunks = rig.stream(path, **ask_of(path), max_tokens=5)
    assert all("usage" in chunk for chunk in chunks)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_metrics_of_a_request_are_told_when_the_server_says_so(make_rig, path):
    rig = make_rig(settings={"enable_per_request_metrics": True})
    ask = ask_of(path) | {"max_tokens": 6, "ignore_eos": True}
    told = rig.post(path, ask)["metrics"]
    assert set(told) == METRICS
    assert all(value >= 0 for value in told.values())
    assert told["time_to_first_token_ms"] >= told["queue_time_ms"]
    # Of five gaps, so that they and the time to the first token make up the rest.
    total_ms = told["time_to_first_token_ms"] - told["queue_time_ms"] + 5 * told["mean_itl_ms"]
    assert told["generation_time_ms"] == pytest.approx(total_ms, abs=0.01)
    assert told["tokens_per_second"] == pytest.approx(6000 / told["generation_time_ms"], rel=0.01)
    chunks = rig.stream(path, **ask, stream_options={"include_usage": True})
    assert set(chunks[-1]["metrics"]) == METRICS
    assert not any("metrics" in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_metrics_of_several_outputs_are_not_told(make_rig, path):
    rig = make_rig(settings={"enable_per_request_metrics": True})
    assert "metrics" not in rig.post(path, ask_of(path) | {"n": 2, "max_tokens": 3})
    assert "metrics" not in rig.post(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 3})


def test_metrics_of_one_token_have_no_gaps(make_rig):
    rig = make_rig(settings={"enable_per_request_metrics": True})
    assert "mean_itl_ms" not in rig.complete(max_tokens=1)["metrics"]


def test_metrics_are_not_told_unless_the_server_says_so(rig):
    assert "metrics" not in rig.chat()
    assert "metrics" not in rig.complete()


@pytest.mark.parametrize("asked", [None, True, False])
def test_tokens_are_written_as_ids_by_default_where_the_server_says_so(make_rig, asked):
    rig = make_rig(settings={"return_tokens_as_token_ids": True})
    more = {} if asked is None else {"return_tokens_as_token_ids": asked}
    token = rig.chat(logprobs=True, **more)["choices"][0]["logprobs"]["content"][0]["token"]
    assert token.startswith("token_id:") is (asked is not False)
    tokens = rig.complete(logprobs=1, **more)["choices"][0]["logprobs"]["tokens"]
    assert all(one.startswith("token_id:") for one in tokens) is (asked is not False)


def test_the_role_that_answers_is_the_servers_to_name(make_rig):
    rig = make_rig(settings={"response_role": "bot"})
    assert rig.chat()["choices"][0]["message"]["role"] == "bot"
    assert rig.stream(CHAT, messages=HI, max_tokens=3)[0]["choices"][0]["delta"]["role"] == "bot"
    with pytest.raises(ConfigError, match="response_role"):
        ServerSettings(served_names=("a",), response_role=" ")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, f"tiercel-{__version__}-f00d"),
        ({"fingerprint_mode": "hash"}, "f00d"),
        ({"fingerprint_mode": "custom", "fingerprint": "ours-7"}, "ours-7"),
        ({"fingerprint_mode": "none"}, None),
    ],
)
def test_a_fingerprint_tells_as_much_as_it_is_told_to(make_rig, settings, told):
    rig = make_rig(settings=settings)
    for answer in (rig.chat(), rig.complete(), rig.stream(CHAT, messages=HI, max_tokens=2)[0]):
        assert answer.get("system_fingerprint") == told
        assert ("system_fingerprint" in answer) is (told is not None)


@pytest.mark.parametrize(
    "settings",
    [{"fingerprint_mode": "custom"}, {"fingerprint": "x"}, {"fingerprint_mode": "short"}],
)
def test_a_fingerprint_that_cannot_be_told_is_refused(settings):
    with pytest.raises(ConfigError, match="fingerprint"):
        ServerSettings(served_names=("a",), **settings)


@pytest.mark.parametrize("is_excluded", [False, True])
def test_tools_that_must_not_be_called_are_shown_unless_the_server_hides_them(make_rig, is_excluded):
    template = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{{ messages[-1].content }}"
    settings = {"exclude_tools_when_tool_choice_none": is_excluded}
    rig = make_rig(tokenizer=lambda: byte_tokenizer(template), settings=settings)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    shown = rig.chat(tools=tools, tool_choice="none", return_prompt_text=True)["prompt_text"]
    assert ("<weather>" in shown) is not is_excluded


def test_the_id_is_always_in_the_answers_head_and_details_in_its_usage(rig):
    """vLLM has flags for both; here there is nothing to switch on."""
    response = rig.ask("POST", COMPLETIONS, json={"prompt": "x", "max_tokens": 2}, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
