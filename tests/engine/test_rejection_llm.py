"""Drafts verified by rejection through `LLM`: greedy text stays what it is, sampled text has the model's chances."""

import itertools
import re

import numpy as np
import pytest
from test_model_drafters_llm import DENSE, IDS, MTP, of_few_tokens
from test_more_models_llm import LFM2
from test_speculation_llm import CASES, PROMPTS, SMALL, SUFFIX, all_of

from tiercel import LLM, SamplingParams
from tiercel.testing.tiny_drafter import KINDS, write_tiny_drafter
from tiercel.testing.tiny_model import write_tiny_model

GREEDY = [name for name, case in CASES.items() if case["temperature"] == 0.0]
SAMPLED = [name for name in CASES if name not in GREEDY]
# Each kind on a dense model; a block and a chain of two modules beside recurrent states; and drafts that are certain.
PAIRS = [*KINDS, "dflash2-lfm2", "qwen3.5-2", "suffix"]
FEW = [97, 98, 99, 100]
N_TOKENS = 3


@pytest.fixture(scope="module", params=PAIRS)
def pair(request, tmp_path_factory):
    """A model's folder, and what is said of its drafter."""
    root, kind = tmp_path_factory.mktemp("pair"), request.param
    if kind in MTP:
        return str(of_few_tokens(write_tiny_model(root / "model", config=MTP[kind]), MTP[kind])), {"method": "mtp"}
    folder = write_tiny_model(root / "model", config=LFM2 if kind.endswith("lfm2") else DENSE)
    if kind == "suffix":
        return str(folder), SUFFIX
    drafter = write_tiny_drafter(root / "drafter", kind.split("-")[0], folder, IDS)
    return str(folder), {"model": str(drafter), "adaptive": False}


@pytest.fixture(scope="module")
def plain(pair):
    with LLM(pair[0], speculative="off", **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module", params=["standard", "block"])
def rejecting(request, pair):
    with LLM(pair[0], speculative_config=pair[1] | {"rejection_sample_method": request.param}, **SMALL) as llm:
        yield llm


def test_greedy_requests_beside_sampled_ones_are_those_without_drafts(plain, rejecting):
    handles = [rejecting.client.submit(prompt, SamplingParams(max_tokens=60, seed=1)) for prompt in PROMPTS[:2]]
    for name in GREEDY:
        assert all_of(rejecting, CASES[name]) == all_of(plain, CASES[name]), name
    for handle in handles:
        handle.close()


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_requests_get_what_they_asked_for(rejecting, name):
    case = CASES[name]
    outputs = rejecting.generate(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True, **case), use_tqdm=False)
    for one in itertools.chain.from_iterable(output.outputs for output in outputs):
        assert len(one.token_ids) == 40 or one.finish_reason == "stop"
        if "allowed_token_ids" in case and "thinking_token_budget" not in case:
            assert set(one.token_ids) <= set(case["allowed_token_ids"])
        if one.finish_reason == "stop" and "stop" in case:
            assert one.stop_reason in case["stop"]
        if name == "formed":
            assert re.fullmatch("(ab|cab|ac)*(c|a|ca)?", one.text)
        if name == "bounded":
            assert not re.search("<[^<>]{4}", one.text)
    if "logprobs" in case:
        assert_logprobs_are_the_models(rejecting, outputs)
    assert rejecting.stats()["n_failures"] == 0


def assert_logprobs_are_the_models(llm, outputs):
    """What is told of an emitted token, accepted or drawn in place of a draft, is what scoring the text tells."""
    texts = [{"prompt_token_ids": [*o.prompt_token_ids, *o.outputs[0].token_ids]} for o in outputs]
    scored = llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    for output, score in zip(outputs, scored, strict=True):
        of_text = score.prompt_logprobs[len(output.prompt_token_ids) :]
        for token, told, expected in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, of_text, strict=True):
            assert told[token].logprob == expected[token].logprob
            assert told[token].rank == expected[token].rank


@pytest.mark.parametrize("how", ["matching", "standard"])
def test_the_likeliest_drafts_change_nothing(pair, plain, how):
    """Certain drafts are accepted by matching as often as by rejection, so that is how they are verified."""
    drawn = {} if pair[1] == SUFFIX else {"draft_sample_method": "greedy"}
    with LLM(pair[0], speculative_config=pair[1] | drawn | {"rejection_sample_method": how}, **SMALL) as llm:
        for name in ("greedy", *SAMPLED):
            assert all_of(llm, CASES[name]) == all_of(plain, CASES[name]), name
        assert llm.stats()["n_accepted_tokens"] > 0


def chances_of(llm, prompt, temperature):
    """What each text of three of the few tokens should come with, from the log-probabilities of all of them."""
    texts = [[*prompt, *ids] for ids in itertools.product(FEW, repeat=N_TOKENS)]
    scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    scored = llm.generate([{"prompt_token_ids": ids} for ids in texts], scoring, use_tqdm=False)
    logprobs = np.array(
        [
            [
                position[token].logprob
                for position, token in zip(one.prompt_logprobs[-N_TOKENS:], ids[-N_TOKENS:], strict=True)
            ]
            for one, ids in zip(scored, texts, strict=True)
        ]
    ).reshape(*[len(FEW)] * N_TOKENS, N_TOKENS)
    found = np.ones([len(FEW)] * N_TOKENS)
    for i in range(N_TOKENS):
        p = np.exp(logprobs[..., i] / temperature)
        one_of_each = p[(..., *[slice(1)] * (N_TOKENS - 1 - i))]
        found = found * p / one_of_each.sum(axis=i, keepdims=True)
    return found


# Times of steps with which only likely drafts are computed, and of many sequences some.
SECONDS = [1.0 + 0.02 * n for n in range(128)]
# Drafters in the step, whose rows the runner chooses, that are sure of some drafts.
CHOOSING = [name for name in PAIRS if name not in MTP and name != "suffix"]


def compare_texts(pair, plain, how, policy):
    """Hold four thousand texts of three tokens to the chances that the model has for them; return the counts."""
    n, temperature, prompt = 4000, 0.9, list(range(97, 103)) * 2
    expected = n * chances_of(plain, prompt, temperature)
    counts = np.zeros_like(expected)
    few = {"max_tokens": N_TOKENS + 3, "ignore_eos": True, "allowed_token_ids": FEW}
    params = [SamplingParams(temperature=temperature, seed=seed, **few) for seed in range(n)]
    options = pair[1] | {"rejection_sample_method": how, "adaptive": False}
    with LLM(pair[0], speculative_config=options, **SMALL | {"max_num_seqs": 32, "max_num_batched_tokens": 256}) as llm:
        if policy:
            llm.client.core._runner.set_draft_policy(policy, [])
        outputs = llm.generate([{"prompt_token_ids": prompt}] * n, params, use_tqdm=False)
        stats = llm.stats()
    for output in outputs:
        counts[tuple(FEW.index(token) for token in output.outputs[0].token_ids[:N_TOKENS])] += 1
    n_free = counts.size - 1
    assert ((counts - expected) ** 2 / expected).sum() < n_free + 4.5 * (2 * n_free) ** 0.5
    assert stats["n_accepted_tokens"] > n / 20
    return stats


@pytest.mark.parametrize("how", ["standard", "block"])
def test_sampled_text_has_the_models_distribution(pair, plain, how):
    compare_texts(pair, plain, how, [])


@pytest.mark.parametrize("how", ["standard", "block"])
@pytest.mark.parametrize("pair", CHOOSING, indirect=True, scope="module")
def test_sampled_text_has_it_where_only_some_drafts_are_computed(pair, plain, how):
    """Those that the early stop chooses, by confidences of this same step."""
    stats = compare_texts(pair, plain, how, SECONDS)
    assert stats["n_draft_tokens"] < 1.5 * stats["n_drafts"]
