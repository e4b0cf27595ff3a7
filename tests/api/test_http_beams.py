"""Beam search over HTTP: what it answers, and what it refuses."""

import pytest
from scripted import CHAT, COMPLETE, HI, TOOLS

BEAMS = {"use_beam_search": True, "max_tokens": 6}


def post(rig, path, status=200, **fields):
    body = {"messages": HI} if path == CHAT else {"prompt": "hello"}
    return rig.post(path, body | BEAMS | fields, status)


def text_of(choice):
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_search_gives_n_choices_the_best_first(rig, path):
    wants = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    answer = post(rig, path, n=3, ignore_eos=True, return_token_ids=True, **wants)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    assert answer["usage"]["completion_tokens"] == 18
    sums = []
    for choice in answer["choices"]:
        told = choice["logprobs"]
        of_tokens = [one["logprob"] for one in told["content"]] if path == CHAT else told["token_logprobs"]
        tops = [one["top_logprobs"] for one in told["content"]] if path == CHAT else told["top_logprobs"]
        assert len(of_tokens) == 6
        assert all(len(top) == 2 if path == CHAT else len(top) in (2, 3) for top in tops)
        sums.append(sum(of_tokens))
        assert choice["finish_reason"] == "length"
    assert sums == sorted(sums, reverse=True)
    assert post(rig, path, n=3, ignore_eos=True, return_token_ids=True, **wants)["choices"] == answer["choices"]


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_search_of_width_one_answers_as_a_greedy_request(rig, path):
    found = post(rig, path, max_tokens=20)
    plain = post(rig, path, max_tokens=20, use_beam_search=False, temperature=0)
    assert found["choices"] == plain["choices"]
    assert {k: v for k, v in found["usage"].items() if k != "prompt_tokens_details"} == {
        k: v for k, v in plain["usage"].items() if k != "prompt_tokens_details"
    }


def test_each_prompt_has_its_own_search(rig):
    together = rig.post(COMPLETE, BEAMS | {"prompt": ["hello", "world"], "n": 2, "echo": True})
    apart = [post(rig, COMPLETE, prompt=prompt, n=2, echo=True)["choices"] for prompt in ("hello", "world")]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    assert [text_of(one) for one in together["choices"]] == [text_of(one) for two in apart for one in two]
    assert together["choices"][0]["text"].startswith("hello")


def test_a_models_recommended_values_change_nothing(make_rig):
    plain, other = make_rig(), make_rig(defaults={"temperature": 0.6, "top_k": 3, "repetition_penalty": 1.3})
    assert post(plain, CHAT, n=2)["choices"] == post(other, CHAT, n=2)["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"stop": "x"}, "stop"),
        ({"stop": ["x"]}, "stop"),
        ({"stop_token_ids": [1]}, "stop_token_ids"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 2}}, "repetition_detection"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True}, "stream"),
        ({"stream_interval": 2}, "stream_interval"),
        ({"length_penalty": 101}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"length_penalty": 2, "use_beam_search": False}, "length_penalty"),
        ({"n": 11}, "beam_width"),
        ({"n": 0}, "n"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_what_a_search_cannot_keep_to_is_refused_by_its_name(rig, path, fields, param):
    body = {"messages": HI} if path == CHAT else {"prompt": "hello"}
    assert rig.refused(path, body | BEAMS | fields)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_chat_that_a_search_cannot_answer_is_refused(rig, fields, param):
    assert rig.refused(CHAT, {"messages": HI} | BEAMS | fields)["param"] == param


def test_a_search_has_no_token_parameters(rig):
    assert rig.refused(CHAT + "/render", {"messages": HI} | BEAMS)["param"] == "use_beam_search"
    assert rig.refused(COMPLETE, {"prompt": "x", "echo": True, "logprobs": 1} | BEAMS)["param"] == "logprobs"


@pytest.mark.parametrize("neutral", [{"temperature": 0}, {"temperature": 1.0}, {"top_p": 1}, {"stop": []}, {"seed": 4}])
def test_what_changes_nothing_in_a_search_is_taken(rig, neutral):
    assert post(rig, CHAT, n=2, **neutral)["choices"] == post(rig, CHAT, n=2)["choices"]


def test_a_length_penalty_below_zero_favours_short_answers(make_rig):
    rig = make_rig(eos_ids=tuple(range(0, 264, 5)))
    short = post(rig, COMPLETE, n=4, length_penalty=-3, max_tokens=12)
    long = post(rig, COMPLETE, n=4, length_penalty=3, max_tokens=12)
    assert short["usage"]["completion_tokens"] < long["usage"]["completion_tokens"]
    assert {choice["finish_reason"] for choice in short["choices"]} == {"stop"}
    assert all(choice["stop_reason"] is None for choice in short["choices"])
