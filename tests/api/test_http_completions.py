"""/v1/completions and the tokenizer's routes against the fake runner's known tokens."""

import pytest
from kit import ScriptedRunner

from tiercel.protocol.params import SamplingParams
from tiercel.testing.fake_runner import expected_tokens

COMPLETE = "/v1/completions"


def expected(ids, n=8, seed=3):
    return expected_tokens(ids, n, SamplingParams(seed=seed), seed=seed, vocab_size=264)


def test_a_text_is_continued(rig):
    answer = rig.complete(return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected(list(b"hello"))
    assert choice["text"] == rig.tokenizer.decode(choice["token_ids"])
    assert choice["prompt_token_ids"] == list(b"hello")
    assert (answer["object"], answer["id"][:5]) == ("text_completion", "cmpl-")


@pytest.mark.parametrize(
    ("prompt", "as_ids"),
    [
        ("hello", [b"hello"]),
        (["hello", "bye"], [b"hello", b"bye"]),
        (list(b"hello"), [b"hello"]),
        ([list(b"hello"), list(b"bye")], [b"hello", b"bye"]),
    ],
)
def test_every_shape_of_prompt_is_taken(rig, prompt, as_ids):
    answer = rig.complete(prompt=prompt, return_token_ids=True)
    assert [choice["token_ids"] for choice in answer["choices"]] == [expected(list(ids)) for ids in as_ids]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, as_ids))


def test_choices_are_numbered_by_prompt_then_by_output(rig):
    answer = rig.complete(prompt=["aa", "bb"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    alone = rig.complete(prompt="bb", n=2)
    assert [c["text"] for c in answer["choices"][2:]] == [c["text"] for c in alone["choices"]]


def test_streams_of_several_prompts_say_what_the_whole_says(rig):
    ask = {"prompt": ["aa", "bb", "cc"], "n": 2, "max_tokens": 6}
    whole = [choice["text"] for choice in rig.complete(**ask)["choices"]]
    chunks = rig.stream(COMPLETE, stream_options={"include_usage": True}, **ask)
    streamed = [""] * 6
    for chunk in chunks[:-1]:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == whole
    assert chunks[-1]["usage"]["completion_tokens"] == 36
    assert sum(c["choices"][0]["finish_reason"] is not None for c in chunks[:-1]) == 6


def test_sixteen_tokens_are_the_default(rig):
    assert rig.complete(max_tokens=None)["usage"]["completion_tokens"] == 16


def test_zero_tokens_score_the_prompt_only(rig):
    answer = rig.complete(max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
    entries = choice["logprobs"]
    assert entries["tokens"] == ["h", "e", "l", "l", "o"]
    assert entries["token_logprobs"][0] is None
    assert entries["top_logprobs"][0] is None
    assert all(value < 0 for value in entries["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0
    streamed = rig.stream(COMPLETE, prompt="hello", max_tokens=0, echo=True, logprobs=1)
    assert [chunk["choices"][0]["text"] for chunk in streamed] == ["hello", ""]
    assert streamed[0]["choices"][0]["logprobs"] == entries
    assert rig.refused(COMPLETE, {"prompt": "hello", "max_tokens": 0})["param"] == "max_tokens"


@pytest.mark.parametrize("script", ["plain text", "é👩‍👧 ü"])
def test_echoed_logprobs_have_a_string_a_token_and_offsets_that_add_up(make_rig, script):
    rig = make_rig(runner=lambda limits: ScriptedRunner(limits, list(script.encode())))
    prompt = "\n1. Ça va 20"
    choice = rig.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=40, ignore_eos=False)["choices"][0]
    text, entries = choice["text"], choice["logprobs"]
    assert text == prompt + script
    n_tokens = len((prompt + script).encode()) + 1  # and the end of sequence
    assert {len(entries[name]) for name in entries} == {n_tokens}
    offsets = [*entries["text_offset"], len(text)]
    for token, start, end in zip(entries["tokens"], offsets, offsets[1:], strict=False):
        if not token.startswith("bytes:") and token != "<|endoftext|>":
            assert text[start : max(end, start + 1)] == token


def test_streamed_logprobs_are_those_of_the_whole(rig):
    ask = {"prompt": "hello", "max_tokens": 8, "logprobs": 2, "echo": True}
    whole = rig.complete(**ask)["choices"][0]["logprobs"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in rig.stream(COMPLETE, **ask)]
    for name, values in whole.items():
        assert [value for part in parts if part for value in part[name]] == values


def test_logprobs_zero_gives_the_chosen_token(rig):
    entries = rig.complete(logprobs=0)["choices"][0]["logprobs"]
    assert all(len(top) == 1 for top in entries["top_logprobs"])
    assert len(entries["tokens"]) == 8


def test_tokens_in_the_map_of_likeliest_are_told_apart(rig):
    entries = rig.complete(logprobs=20)["choices"][0]["logprobs"]
    assert {len(top) for top in entries["top_logprobs"]} <= {20, 21}
    for token, value, top in zip(*(entries[n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert top[token] == value


def test_prompt_logprobs_come_with_their_choice(rig):
    choice = rig.complete(prompt_logprobs=0)["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert list(choice["prompt_logprobs"][1]) == [str(ord("e"))]


def test_a_stop_string_is_told(make_rig):
    rig = make_rig(runner=lambda limits: ScriptedRunner(limits, list(b"a\nb [end] c")))
    choice = rig.complete(stop=["\n[end]", " [end]"], max_tokens=20)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a\nb", "stop", " [end]")


def test_min_tokens_holds_the_end_back(make_rig):
    rig = make_rig(runner=lambda limits: ScriptedRunner(limits, list(b"xx")))
    answer = rig.complete(min_tokens=6, max_tokens=6, ignore_eos=False)
    assert answer["usage"]["completion_tokens"] == 6


def test_token_ids_serve_a_model_without_a_tokenizer(make_rig):
    rig = make_rig(tokenizer=None)
    choice = rig.complete(prompt=[1, 2, 3], return_token_ids=True, logprobs=0)["choices"][0]
    assert choice["token_ids"] == expected([1, 2, 3])
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert rig.refused(COMPLETE, {"prompt": "text"})["param"] == "prompt"
    assert rig.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})["param"] == "messages"
    assert rig.refused("/tokenize", {"prompt": "text"})["param"] == "prompt"


def test_texts_and_chats_are_tokenised_as_they_would_be_served(rig):
    text = rig.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
    assert (text["count"], text["tokens"], text["max_model_len"]) == (3, list("hé".encode()), 256)
    assert text["token_strs"][0] == "h"
    messages = [{"role": "user", "content": "hi"}]
    chat = rig.post("/tokenize", {"messages": messages})
    served = rig.chat(messages=messages, return_token_ids=True)["prompt_token_ids"]
    assert chat["tokens"] == served
    assert rig.post("/detokenize", {"tokens": served})["prompt"].startswith("<|im_start|>user")
    assert rig.post("/tokenize", {"prompt": "x" * 5000})["count"] == 5000


def test_ids_outside_the_vocabulary_have_no_text(rig):
    for bad in ([264], [-1], [2**63]):
        assert rig.refused("/detokenize", {"tokens": bad})["param"] == "tokens"


def test_every_served_name_is_listed_and_found(rig):
    listed = rig.ask("GET", "/v1/models").json()
    assert [one["id"] for one in listed["data"]] == ["tiny", "also/tiny"]
    assert rig.ask("GET", "/v1/models/also/tiny").json()["max_model_len"] == 256
    assert rig.ask("GET", "/v1/models/other").status_code == 404
    assert rig.complete(model="also/tiny")["model"] == "tiny"
    assert rig.complete(model="")["model"] == "tiny"
    error = rig.refused(COMPLETE, {"prompt": "x", "model": "gpt-4"}, 404)
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
