"""Real models through the whole engine, against what transformers makes of the same weights
(tools/make_real_fixtures.py), and as a person would ask them.
"""

import itertools
import json
from pathlib import Path

import pytest
from real_models import need_model

from tiercel import LLM, SamplingParams
from tiercel.loaders.checkpoint import open_checkpoint

pytestmark = pytest.mark.slow

FIXTURES = {"smollm2-135m": "smollm2", "gemma3-270m": "gemma3"}
CLOSE = 1e-3  # logits nearer than this may fall either way
SIZE = {"max_model_len": 512, "max_num_seqs": 20}


def greedy(**changes):
    return SamplingParams(temperature=0.0, **({"max_tokens": 32, "ignore_eos": True} | changes))


@pytest.fixture(scope="module", params=FIXTURES)
def model(request):
    """A real model's file and what transformers answered; one model is loaded at a time."""
    path = need_model(request.param)
    fixture = json.loads((Path(__file__).parent / f"real/{FIXTURES[request.param]}.json").read_text(encoding="utf-8"))
    return request.param, path, fixture


@pytest.fixture(scope="module")
def exact(model):
    """The model computed in float32 throughout, and the fixture's cases."""
    _, path, fixture = model
    with LLM(str(path), compute_dtype="float32", kv_cache_dtype="float32", **SIZE) as llm:
        yield llm, fixture["cases"]


@pytest.fixture(scope="module")
def packed(model, exact):
    """The model as a person gets it. (`exact` is named so that it is used up, and one fixture order holds.)"""
    name, path, _ = model
    with LLM(str(path), **SIZE) as llm:
        yield name, llm


def test_the_fixture_is_of_this_file(model):
    _, path, fixture = model
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.digest() == fixture["digest"]
    assert len(fixture["cases"]) == 20
    assert all(len(case["tokens"]) == 32 for case in fixture["cases"])


def test_prompts_are_cut_into_the_fixtures_tokens(exact):
    llm, cases = exact
    assert [llm.get_tokenizer().encode(case["prompt"]) for case in cases] == [case["prompt_ids"] for case in cases]


def test_free_running_gives_transformers_tokens_up_to_a_close_call(exact):
    llm, cases = exact
    outputs = llm.generate([case["prompt_ids"] for case in cases], greedy(), use_tqdm=False)
    n_whole = 0
    for case, output in zip(cases, outputs, strict=True):
        n = sum(1 for _ in itertools.takewhile(lambda margin: margin >= CLOSE, case["margins"]))
        assert output.outputs[0].token_ids[:n] == case["tokens"][:n], case["prompt"]
        n_whole += n == 32
    assert n_whole >= 15, "the fixture has so many close calls that it proves little"


def test_each_of_transformers_tokens_is_the_likeliest_after_those_before_it(exact):
    llm, cases = exact
    outputs = llm.generate(
        [case["prompt_ids"] + case["tokens"] for case in cases],
        greedy(max_tokens=1, prompt_logprobs=1),
        use_tqdm=False,
    )
    for case, output in zip(cases, outputs, strict=True):
        positions = output.prompt_logprobs[len(case["prompt_ids"]) :]
        for i, found in enumerate(positions):
            best = next(token for token, entry in found.items() if entry.rank == 1)
            allowed = {case["tokens"][i]}
            if case["margins"][i] < CLOSE:
                allowed.add(case["runners_up"][i])
            assert best in allowed, (case["prompt"], i)


def test_log_probabilities_of_the_generated_tokens_are_those_of_reading_them(exact):
    """Decoding step by step and reading as a prompt are the same numbers: design 1.1, on a real model."""
    llm, cases = exact
    case = cases[1]
    written = llm.generate(case["prompt_ids"], greedy(logprobs=1), use_tqdm=False)[0].outputs[0]
    read = llm.generate(case["prompt_ids"] + written.token_ids, greedy(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    after = read[0].prompt_logprobs[len(case["prompt_ids"]) :]
    for token, at_writing, at_reading in zip(written.token_ids, written.logprobs, after, strict=True):
        assert at_writing[token].logprob == at_reading[token].logprob


def test_the_capital_of_france_is_paris(packed):
    name, llm = packed
    # Gemma is a base model: it goes on with a text, and answers when the text is questions and answers.
    prompt = (
        "The capital of France is"
        if name == "smollm2-135m"
        else ("Q: What is the capital of Italy?\nA: Rome\nQ: What is the capital of France?\nA:")
    )
    output = llm.generate(prompt, greedy(max_tokens=8), use_tqdm=False)[0].outputs[0]
    assert "Paris" in output.text


def test_a_chat_gets_an_answer_that_ends(packed):
    _, llm = packed
    if not llm.has_chat_template:
        pytest.skip("a base model: it has no chat template")
    # Not France: whether this model begins that answer with "The" or with "L'" is decided by 0.08 nats.
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    output = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=100), use_tqdm=False)[0].outputs[0]
    assert "4" in output.text
    assert output.finish_reason == "stop"
    assert "<|im_end|>" not in output.text


def test_a_stream_is_the_whole_in_pieces(packed):
    _, llm = packed
    params = greedy(max_tokens=24)
    whole = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text
    pieces = list(llm.stream("Once upon a time", params))
    assert "".join(pieces) == whole
    assert len(pieces) > 1
