"""Log-probabilities of tokens that a request names, whole and streamed."""

import pytest
from scripted import CHAT, COMPLETE, STEPS, Scripted

NAMED = [ord("z"), ord("a"), 256, ord("Q")]
TEXTS = ["z", "a", "<|endoftext|>", "Q"]


def entries_of(choices, path):
    """Give each place's token and what is told of there."""
    found = []
    for choice in choices:
        told = choice["logprobs"]
        if told is None:
            continue
        if path == CHAT:
            found += [
                (one["token"], [(top["token"], top["logprob"]) for top in one["top_logprobs"]])
                for one in told["content"]
            ]
        else:
            found += list(zip(told["tokens"], [list(top.items()) for top in told["top_logprobs"]], strict=True))
    return found


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("n_tokens", STEPS)
def test_each_place_tells_of_the_named_tokens_however_many_come_at_once(monkeypatch, path, n_tokens):
    model = Scripted("A quiz: zebra")
    named = model._tokenizer.encode("zaQ", add_special_tokens=False)
    ask = {"logprob_token_ids": [*named[:2], 256, named[2]], "path": path}
    whole = entries_of(model.whole(**ask)["choices"], path)
    chunks = model.stream(monkeypatch, n_tokens, **ask)
    assert entries_of([one for chunk in chunks for one in chunk["choices"]], path) == whole
    assert [token for token, _ in whole[:13]] == list("A quiz: zebra")
    for token, tops in whole:
        texts = [text for text, _ in tops]
        if path == CHAT:
            assert texts == TEXTS
        else:
            assert texts == list(dict.fromkeys([token, *TEXTS]))


def test_a_chat_may_say_how_many_it_named(rig):
    plain = rig.chat(logprob_token_ids=NAMED)
    assert rig.chat(logprob_token_ids=NAMED, logprobs=True)["choices"] == plain["choices"]
    assert rig.chat(logprob_token_ids=NAMED, logprobs=True, top_logprobs=4)["choices"] == plain["choices"]
    assert (
        rig.complete(logprob_token_ids=NAMED, logprobs=4)["choices"] == rig.complete(logprob_token_ids=NAMED)["choices"]
    )
    rig.complete(400, logprob_token_ids=NAMED, logprobs=3)


def test_named_tokens_go_with_a_prompt_that_is_scored(rig):
    choice = rig.complete(logprob_token_ids=NAMED, logprobs=4, echo=True)["choices"][0]
    tops = choice["logprobs"]["top_logprobs"]
    assert tops[0] is None
    assert len(tops) == len("hello") + 8
    assert all(len(top) in (4, 5) for top in tops[1:])


def test_a_rendered_request_names_them_too(rig):
    rendered = rig.post(COMPLETE + "/render", {"prompt": "hi", "logprob_token_ids": NAMED})[0]
    assert rendered["sampling_params"]["logprob_token_ids"] == NAMED
    body = {key: rendered[key] for key in ("token_ids", "sampling_params")}
    assert rig.post("/inference/v1/generate", body)["choices"][0]["logprobs"]
