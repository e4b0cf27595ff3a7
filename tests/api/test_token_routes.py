"""Rendering a request computes the same as asking it; token ids in, token ids out."""

import json

import pytest
from kit import byte_tokenizer, read_frames
from scripted import CHAT, HI, LIMITS, MARKS, TEMPLATE, TOOLS

from tiercel.api.http.token_routes import params_of_json, params_to_json
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.repetition import RepetitionDetectionParams
from tiercel.protocol.structured import StructuredOutputsParams

COMPLETE = "/v1/completions"
GENERATE = "/inference/v1/generate"


@pytest.fixture
def big(make_rig):
    return make_rig(tokenizer=lambda: byte_tokenizer(TEMPLATE, MARKS), limits=LIMITS, max_num_batched_tokens=1024)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 5},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
        {"reasoning_effort": "low", "chat_template_kwargs": {"opens": True}},
        {"chat_template_kwargs": {"opens": True}, "response_format": {"type": "json_object"}},
        {"chat_template_kwargs": {"opens": True}, "thinking_token_budget": 3},
        {"truncate_prompt_tokens": 7, "truncation_side": "right"},
        {"temperature": 0.5, "logit_bias": {"70": 4}, "stop": ["x"], "logprobs": True, "top_logprobs": 2, "n": 2},
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}, "allowed_token_ids": [65, 66]},
        {
            "messages": [*HI, {"role": "assistant", "content": "So"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_what_a_chat_renders_computes_what_the_chat_does(big, fields):
    body = {"messages": HI, "max_tokens": 40, "seed": 5} | fields
    rendered = big.post(f"{CHAT}/render", body)
    asked = big.post(CHAT, body | {"return_token_ids": True})
    assert rendered["token_ids"] == asked["prompt_token_ids"]
    computed = big.post(GENERATE, rendered)
    assert [one["token_ids"] for one in computed["choices"]] == [one["token_ids"] for one in asked["choices"]]
    assert computed["usage"]["completion_tokens"] == asked["usage"]["completion_tokens"]
    big.assert_idle()


def test_each_prompt_of_a_completion_is_rendered(rig):
    body = {"prompt": ["hello", "hi"], "max_tokens": 6, "seed": 2, "cache_salt": "s"}
    rendered = rig.post(f"{COMPLETE}/render", body)
    asked = rig.post(COMPLETE, body | {"return_token_ids": True})["choices"]
    assert [one["token_ids"] for one in rendered] == [one["prompt_token_ids"] for one in asked]
    assert {one["cache_salt"] for one in rendered} == {"s"}
    for one, wanted in zip(rendered, asked, strict=True):
        assert rig.post(GENERATE, one)["choices"][0]["token_ids"] == wanted["token_ids"]


def test_a_rendering_says_what_may_be_left_unsaid(rig):
    rendered = rig.post(f"{CHAT}/render", {"messages": HI, "return_prompt_text": True})
    assert rendered["sampling_params"]["max_tokens"] == 256 - len(rendered["token_ids"])
    assert rendered["prompt_text"].endswith("assistant\n")
    assert rendered["model"] == "tiny"


def _with(name, value):
    return {"token_ids": [1], "sampling_params": {name: value}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (f"{CHAT}/render", {"messages": []}, "messages"),
        (f"{CHAT}/render", {"messages": HI, "use_beam_search": True}, "use_beam_search"),
        (f"{CHAT}/render", {"messages": HI * 60}, "prompt"),
        (f"{COMPLETE}/render", {"prompt": ""}, "prompt"),
        (f"{COMPLETE}/render", {"prompt": []}, "prompt"),
        (GENERATE, {}, "token_ids"),
        (GENERATE, {"token_ids": []}, "prompt"),
        (GENERATE, {"token_ids": [-1]}, "prompt"),
        (GENERATE, {"token_ids": [1 << 40]}, "prompt"),
        (GENERATE, {"token_ids": ["a"]}, "token_ids[0]"),
        (GENERATE, {"token_ids": [1], "sampling_params": []}, "sampling_params"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"top_p": "x"}}, "top_p"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"n": 9}}, "sampling_params.n"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"output_kind": 1}}, "sampling_params"),
        (GENERATE, _with("structured_outputs", 1), "sampling_params.structured_outputs"),
        (GENERATE, _with("repetition_detection", {"x": 1}), "sampling_params.repetition_detection"),
        (GENERATE, {"token_ids": [1], "stream_options": {}}, "stream_options"),
        (GENERATE, {"token_ids": [1], "cache_salt": ""}, "cache_salt"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(rig, path, body, param):
    assert rig.refused(path, body)["param"] == param


def test_an_unknown_parameter_names_its_nearest(rig):
    error = rig.refused(GENERATE, {"token_ids": [1], "sampling_params": {"temprature": 1}})
    assert "temperature" in error["message"]


def test_without_max_tokens_the_context_is_filled(rig):
    answer = rig.post(GENERATE, {"token_ids": [65, 66], "sampling_params": {"ignore_eos": True}})
    (choice,) = answer["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (254, "length")


def test_a_stream_gives_the_same_ids_with_usage_and_log_probabilities(rig):
    params = {"max_tokens": 9, "seed": 4, "logprobs": 2, "ignore_eos": True, "n": 2}
    whole = rig.post(GENERATE, {"token_ids": [65, 66, 67], "sampling_params": params})
    body = {
        "token_ids": [65, 66, 67],
        "sampling_params": params,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, last = read_frames(rig.ask("POST", GENERATE, json=body).text)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for wanted in whole["choices"]:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == wanted["index"]]
        assert [i for one in mine for i in one["token_ids"]] == wanted["token_ids"]
        entries = [entry for one in mine for entry in one["logprobs"]["content"]]
        assert entries == wanted["logprobs"]["content"]
        assert entries[0]["token"] == f"token_id:{wanted['token_ids'][0]}"
        assert mine[-1]["finish_reason"] == "length"


def test_a_model_without_a_tokenizer_generates_too(make_rig):
    rig = make_rig(tokenizer=None)
    assert (
        len(rig.post(GENERATE, {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}})["choices"][0]["token_ids"])
        == 3
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(detokenize=False),
        SamplingParams(stop=["a", "b"], stop_token_ids=[3], temperature=0.3, seed=-4, max_tokens=None, logprobs=-1),
        SamplingParams(logit_bias={3: 1.5}, allowed_token_ids=[1, 2], bad_words=["x"], detokenize=False),
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"), detokenize=False),
        SamplingParams(
            structured_outputs=StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True),
            thinking_token_budget=0,
            repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=2),
            detokenize=False,
        ),
    ],
)
def test_parameters_come_back_from_json_as_they_were(params):
    assert params_of_json(json.loads(json.dumps(params_to_json(params)))) == params
