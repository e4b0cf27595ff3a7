"""Speculation through `LLM`, on the native runner: every output is the one without, down to its log-probabilities."""

import re

import httpx
import pytest

from tiercel import LLM, SamplingParams
from tiercel.api.http.app import make_app
from tiercel.api.http.facade import EngineFacade
from tiercel.api.http.settings import ServerSettings
from tiercel.protocol.structured import StructuredOutputsParams
from tiercel.testing.tiny_model import LATENT_CONFIG, write_tiny_model

REASONING = {"reasoning_start_str": "<", "reasoning_end_str": ">"}
SMALL = {
    "threads": 1,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 16,
    "reasoning_config": REASONING,
}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 7, "adaptive": False}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
    "adaptive": False,
}
PROMPTS = ["abcabcabcabc", "the cat sat on the mat and the cat sat on the ", "of " * 30, "z", "abcabcabcabc"]
CASES = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 3},
    "filtered": {"temperature": 1.2, "seed": 4, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "penalised sampled": {"temperature": 0.7, "seed": 9, "repetition_penalty": 1.2, "frequency_penalty": -0.3},
    "biased": {"temperature": 0.0, "logit_bias": {97: 3.0, 98: 3.0, 99: 2.5}, "bad_words": ["ab", "c"]},
    "allowed": {"temperature": 0.9, "seed": 1, "allowed_token_ids": [97, 98, 99]},
    "told": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    "told sampled": {"temperature": 0.6, "seed": 2, "logprobs": 2, "allowed_token_ids": list(range(97, 103))},
    "held": {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": list(range(90, 200))},
    "stopped": {"temperature": 0.6, "seed": 2, "allowed_token_ids": [97, 98, 99], "stop": ["cab", "bb"]},
    "formed": {"temperature": 0.8, "seed": 5, "structured_outputs": StructuredOutputsParams(regex="(ab|cab|ac){3,20}")},
    # Reasoning begins by chance, again and again, and is ended by force inside of what was drafted.
    "bounded": {"temperature": 0.8, "seed": 7, "allowed_token_ids": [60, 62, 97, 98], "thinking_token_budget": 3},
    "two": {"temperature": 0.8, "seed": 6, "n": 2},
}


@pytest.fixture(scope="module", params=["dense", "latent"])
def folder(request, tmp_path_factory):
    config = {"dense": {}, "latent": LATENT_CONFIG}[request.param]
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / request.param, config=config))


def all_of(llm, case, max_tokens=40):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **case)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [
        [(one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs) for one in output.outputs]
        + [output.prompt_logprobs]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def plain(folder):
    with LLM(folder, speculative="off", **SMALL) as llm:
        found = {name: all_of(llm, case) for name, case in CASES.items()}
        assert "n_drafts" not in llm.stats()
    return found


@pytest.mark.parametrize("config", [SUFFIX, NGRAM], ids=["suffix", "ngram"])
def test_every_output_is_the_one_without_drafts(folder, plain, config):
    """Mixed batches, prompts in chunks, and prefixes that were cached by the cases before."""
    with LLM(folder, speculative_config=config, **SMALL) as llm:
        for name, case in CASES.items():
            assert all_of(llm, case) == plain[name], name
        stats = llm.stats()
        assert stats["n_accepted_tokens"] > 100
        assert stats["n_draft_tokens"] > stats["n_accepted_tokens"]
        assert stats["n_failures"] == 0


@pytest.mark.parametrize("case", ["greedy", "told sampled"])
def test_a_pool_that_preempts_changes_nothing(folder, case):
    """Little more than one sequence of the longest fits, and four run."""
    with LLM(folder, speculative="off", max_model_len=192, **SMALL) as roomy:
        want = all_of(roomy, CASES[case], max_tokens=80)
        page_bytes = roomy._engine.plan.capacity.page_bytes
    small = {"kv_cache_memory_bytes": 14 * page_bytes, "max_model_len": 192}
    with LLM(folder, speculative_config=SUFFIX, **SMALL, **small) as llm:
        assert all_of(llm, CASES[case], max_tokens=80) == want
        assert llm.stats()["n_total_preemptions"] > 0
        assert llm.stats()["n_accepted_tokens"] > 0


def test_the_default_drafts_when_that_pays_and_changes_nothing(folder, plain):
    with LLM(folder, **SMALL) as llm:
        for name in ("greedy", "sampled", "told"):
            assert all_of(llm, CASES[name]) == plain[name], name
        assert "n_drafts" in llm.stats()


@pytest.mark.anyio
async def test_metrics_tell_what_was_drafted_and_accepted_where(folder):
    with LLM(folder, speculative_config=NGRAM, **SMALL) as llm:
        all_of(llm, CASES["greedy"])
        facade = EngineFacade(client=llm.client, tokenizer=llm.engine.tokenizer, fingerprint="f")
        app = make_app(facade, ServerSettings(served_names=("tiny",)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            text = (await client.get("/metrics")).text
        app.service.close()
        stats = llm.stats()
    lines = [line for line in text.splitlines() if "{" in line]
    told = {line.split("{")[0] + position_of(line): float(line.split()[-1]) for line in lines}
    assert told["vllm:spec_decode_num_drafts_total"] == stats["n_drafts"] > 0
    assert told["vllm:spec_decode_num_draft_tokens_total"] == stats["n_draft_tokens"]
    assert told["vllm:spec_decode_num_accepted_tokens_total"] == stats["n_accepted_tokens"]
    by_position = [told[f"vllm:spec_decode_num_accepted_tokens_per_pos_total {i}"] for i in range(4)]
    assert by_position == stats["n_accepted_by_position"]
    assert sum(by_position) == stats["n_accepted_tokens"]
    found = dict(re.findall(r"^tiercel:spec_decode_(\S+?)\{.*\} (\S+)$", text, re.MULTILINE))
    assert float(found["steps_total"]) == stats["n_verify_steps"] > 0
    assert float(found["budget"]) == stats["n_chosen_rows"] > 0
    assert float(found["active"]) == stats["is_drafting"]
    assert float(found["switched_off_total"]) == stats["n_switched_off"]
    assert float(found["passed_over_total"]) == stats["n_passed_over"]
    assert re.search(r"^tiercel:drafter_failures_total\{.*\} 0\.0$", text, re.MULTILINE)
    seconds = dict(re.findall(r'^tiercel:spec_decode_seconds_total\{.*part="(\w+)"\} (\S+)$', text, re.MULTILINE))
    assert float(seconds["draft"]) == stats["drafter_s"] > 0.0
    assert float(seconds["verify"]) == stats["verify_s"] > 0.0


def position_of(line):
    found = re.search(r'position="(\d+)"', line)
    return f" {found[1]}" if found else ""
