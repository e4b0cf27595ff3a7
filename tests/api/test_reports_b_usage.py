"""Public reports about usage, finish reasons and log-probabilities elsewhere; `docs/reports.md` lists the rows."""

import math

import pytest
from kit import DEADLINE_S
from live import LiveServer
from openai import OpenAI
from scripted import CHAT, COMPLETE, HI, MARKS, STEPS, TOOLS, Scripted, both_texts

from tiercel.testing.fake_runner import FakeRunner

CALL = '<tool_call>{"name": "get_time", "arguments": {"n": 1}}</tool_call>'
USAGE = {"include_usage": True}


def test_v8625_running_usage_of_a_call_grows_to_the_wholes(monkeypatch):
    model = Scripted(f"<think>a</think>Well.{CALL}", special=MARKS)
    whole = model.whole(tools=TOOLS)["usage"]
    for n_tokens in STEPS:
        options = USAGE | {"continuous_usage_stats": True}
        chunks = model.stream(monkeypatch, n_tokens, tools=TOOLS, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert chunks[-1]["usage"] == chunks[-2]["usage"] == whole
        assert all(
            c["usage"]["total_tokens"] == c["usage"]["prompt_tokens"] + n for c, n in zip(chunks, counts, strict=True)
        )


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("n_tokens", STEPS)
def test_v6083_s954_usage_comes_last_and_alone(monkeypatch, path, n_tokens):
    model = Scripted("Hello there.")
    *others, last = model.stream(monkeypatch, n_tokens, path=path, stream_options=USAGE)
    assert last["choices"] == []
    assert last["usage"] == model.whole(path=path)["usage"]
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in others)


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {}}])
def test_s5451_a_chunk_without_a_choice_comes_only_when_asked_for(monkeypatch, path, options):
    chunks = Scripted("Hello there.").stream(monkeypatch, 2, path=path, **options)
    assert all(len(chunk["choices"]) == 1 and chunk.get("usage") is None for chunk in chunks)


def test_s5451_the_official_client_takes_the_chunk_without_a_choice(make_rig):
    rig = make_rig(settings={"port": 0, "shutdown_s": 0.0})
    live = LiveServer(rig)
    try:
        with OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0, timeout=DEADLINE_S) as client:
            ask = {"model": "tiny", "messages": HI, "max_tokens": 4, "stream": True, "stream_options": USAGE}
            chunks = list(client.chat.completions.create(**ask))
        assert [len(chunk.choices) for chunk in chunks][-2:] == [1, 0]
        assert chunks[-1].usage.completion_tokens > 0
    finally:
        live.close()


def test_t2211_completions_tell_logprobs_and_the_reason_of_the_end(monkeypatch):
    model = Scripted("abcdef")
    cut, _ = both_texts(monkeypatch, model, logprobs=1, max_tokens=3)
    assert cut["finish_reason"] == "length"
    assert len(cut["logprobs"]["token_logprobs"]) == 3
    ended, _ = both_texts(monkeypatch, model, logprobs=1)
    assert ended["finish_reason"] == "stop"
    assert ended["logprobs"]["tokens"] == [*"abcdef", "<|endoftext|>"]


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_t2466_an_answer_that_max_tokens_cuts_says_length(monkeypatch, path):
    model = Scripted("abcdefgh")
    assert model.whole(path=path, max_tokens=5)["choices"][0]["finish_reason"] == "length"
    assert model.whole(path=path, max_tokens=8)["choices"][0]["finish_reason"] == "length"
    assert model.whole(path=path, max_tokens=9)["choices"][0]["finish_reason"] == "stop"
    for n_tokens in STEPS:
        chunks = model.stream(monkeypatch, n_tokens, path=path, max_tokens=5)
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["length"]


def test_d2802_logprobs_alone_give_each_tokens_own(rig):
    entries = rig.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert len(entries) == 8
    assert all(entry["top_logprobs"] == [] and entry["logprob"] < 0 and entry["bytes"] for entry in entries)


def test_v3707_logprobs_zero_gives_the_sampled_tokens_value(rig):
    entries = rig.complete(logprobs=0)["choices"][0]["logprobs"]
    assert len(entries["token_logprobs"]) == 8
    assert [list(top.values()) for top in entries["top_logprobs"]] == [[value] for value in entries["token_logprobs"]]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"logprobs": True, "top_logprobs": 0}, 200),
        ({"logprobs": True, "top_logprobs": 1}, 200),
        ({"logprobs": False, "top_logprobs": 0}, 200),
        ({"logprobs": False, "top_logprobs": 1}, 400),
        ({"logprobs": False, "top_logprobs": -1}, 400),
        ({"logprobs": True, "top_logprobs": -2}, 400),
        ({"logprobs": True, "top_logprobs": -1}, 400),  # more than this server allows
        ({"top_logprobs": -1}, 400),
        ({"logprobs": True, "top_logprobs": 21}, 400),
    ],
)
def test_d4121_logprobs_and_their_number_are_refused_only_where_they_contradict(rig, fields, status):
    answer = rig.chat(status, **fields)
    assert status == 200 or answer["error"]["param"] == "top_logprobs"


def test_v5334_each_echoed_token_has_its_string_and_its_place(monkeypatch):
    model = Scripted("applés, d")
    ask = {"path": COMPLETE, "prompt": "\n1. Carol has 20 é", "echo": True, "logprobs": 1}
    choice = model.whole(**ask)["choices"][0]
    text, entries = choice["text"], choice["logprobs"]
    assert text == "\n1. Carol has 20 éapplés, d"
    n_tokens = len(text.encode()) + 1  # and the end of sequence
    assert {len(values) for values in entries.values()} == {n_tokens}
    offsets = [*entries["text_offset"], len(text)]
    whole_letters = [i for i in range(n_tokens - 1) if not entries["tokens"][i].startswith("bytes:")]
    assert "".join(entries["tokens"][i] for i in whole_letters) == text
    assert all(text[offsets[i] :].startswith(entries["tokens"][i]) for i in whole_letters)
    assert offsets == sorted(offsets)
    for n_tokens in STEPS:
        parts = [chunk["choices"][0]["logprobs"] for chunk in model.stream(monkeypatch, n_tokens, **ask)]
        for name, values in entries.items():
            assert [value for part in parts if part for value in part[name]] == values


def test_v9336_zero_tokens_score_the_prompt(rig):
    choice = rig.complete(prompt="hello", max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["token_logprobs"]) == 5
    assert rig.complete(prompt="hello", max_tokens=0, echo=True)["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_vllmmetal680_every_token_of_the_prompt_is_scored(rig, path):
    ask = {"prompt_logprobs": 1, "max_tokens": 2, "return_token_ids": True}
    answer = rig.complete(**ask) if path == COMPLETE else rig.chat(**ask)
    holder = answer["choices"][0] if path == COMPLETE else answer
    ids, scores = holder["prompt_token_ids"], holder["prompt_logprobs"]
    assert len(scores) == len(ids) > 1
    assert scores[0] is None
    assert all(str(i) in one for i, one in zip(ids[1:], scores[1:], strict=True))


def test_v18908_a_prompt_that_is_cached_is_scored_again_and_the_same(rig):
    ask = {"prompt": "a prompt of some length, over several pages", "max_tokens": 2}
    rig.complete(**ask)
    assert rig.complete(**ask)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    first, second = (rig.complete(**ask, prompt_logprobs=2) for _ in range(2))
    assert first["choices"][0]["prompt_logprobs"] == second["choices"][0]["prompt_logprobs"]
    assert len(first["choices"][0]["prompt_logprobs"]) == len(ask["prompt"])
    for answer in (first, second):
        assert (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0) == 0


@pytest.mark.parametrize("n_tokens", STEPS)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_imp1588_a_stream_has_each_tokens_logprobs_once_whatever_is_held_back(monkeypatch, path, n_tokens):
    model = Scripted("one STO… two ST")
    ask = {"path": path, "stop": ["STOP!"], "logprobs": 2} if path == COMPLETE else {"stop": ["STOP!"]}
    ask |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {}
    whole = model.whole(**ask)["choices"][0]["logprobs"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in model.stream(monkeypatch, n_tokens, **ask)]
    for name, values in whole.items():
        if values is not None:
            assert [value for part in parts if part for value in part[name]] == values
    n = len(model.script) + 1
    assert {len(values) for values in whole.values() if values is not None} == {n}


class Even(FakeRunner):
    """Finds every token equally likely."""

    def _run(self, plan):
        result = super()._run(plan)
        if result.row_logprob is not None:
            result.row_logprob[:] = result.top_logprobs[:] = -math.log(self.limits.vocab_size)
        return result


def test_p349_what_the_runner_calls_a_logprob_reaches_the_client_as_it_is(make_rig):
    """That it is the log-softmax is tested on real kernels (`tests/engine`); nothing above may scale it again."""
    rig = make_rig(runner=Even)
    for position in rig.complete(logprobs=20)["choices"][0]["logprobs"]["top_logprobs"]:
        assert all(value == pytest.approx(-math.log(264)) for value in position.values())
