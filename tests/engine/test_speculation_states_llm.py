"""Speculation of models with recurrent state, through `LLM` on the native runner: every output is the one without."""

import pytest
from speculation_kit import KnowingDrafter
from test_kimi_llm import KIMI_K3, KIMI_LINEAR
from test_more_models_llm import LFM2, LING
from test_recurrent_llm import TEXT as QWEN3_5
from test_speculation_llm import CASES, NGRAM, PROMPTS, SMALL, SUFFIX, all_of

from tiercel import LLM, SamplingParams
from tiercel.testing.tiny_model import ATTENTION_FREE_CONFIG, write_tiny_model

QWEN3_NEXT = QWEN3_5 | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MODELS = {
    "qwen3.5": QWEN3_5,
    "qwen3-next": QWEN3_NEXT,
    "kimi-linear": KIMI_LINEAR,
    "kimi-k3": KIMI_K3,
    "ling": LING,
    "mamba2": ATTENTION_FREE_CONFIG,
    "lfm2": LFM2,
}
TURN = SamplingParams(temperature=0.7, seed=2, max_tokens=45, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / request.param, config=MODELS[request.param]))


@pytest.fixture(scope="module")
def plain(folder):
    with LLM(folder, speculative="off", **SMALL) as llm:
        return {name: all_of(llm, case) for name, case in CASES.items()}


@pytest.mark.parametrize("config", [SUFFIX, NGRAM], ids=["suffix", "ngram"])
def test_every_output_is_the_one_without_drafts(folder, plain, config):
    """Mixed batches, prompts in chunks, and states that were kept by the cases before."""
    with LLM(folder, speculative_config=config, **SMALL) as llm:
        for name, case in CASES.items():
            assert all_of(llm, case) == plain[name], name
        stats = llm.stats()
        assert stats["n_accepted_tokens"] > 100
        assert stats["n_draft_tokens"] > stats["n_accepted_tokens"]
        assert stats["n_failures"] == 0


def scripted(llm, outputs, p_right):
    """Have an engine draft what `outputs` say, right with `p_right`."""
    answers = {}
    for output in outputs:
        answers.setdefault(tuple(output.prompt_token_ids), []).extend(list(o.token_ids) for o in output.outputs)
    llm.client.core._speculation._drafter = KnowingDrafter(answers, p_right=p_right, seed=1)


def asked(llm, name, max_tokens=40, prompts=PROMPTS):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **CASES[name])
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("n", [3, 20])
def test_drafts_that_are_right_wrong_and_partly_right_change_nothing(folder, plain, n):
    """Of all lengths up to more rows than a kernel takes at once, and more than a step has room for."""
    names = ("greedy", "sampled", "penalised", "told sampled", "formed", "two")
    with LLM(folder, speculative="off", **SMALL) as llm:
        wanted = [output for name in names for output in asked(llm, name, max_tokens=48)]
    config = {"method": "ngram", "num_speculative_tokens": n, "adaptive": False}
    with LLM(folder, speculative_config=config, **SMALL) as llm:
        for p_right in (1.0, 0.85, 0.0):
            scripted(llm, wanted, p_right)
            for name in names:
                assert all_of(llm, CASES[name]) == plain[name], (name, p_right)
            counts = llm.stats()
            if p_right == 1.0:
                assert counts["n_accepted_tokens"] > 0.8 * counts["n_draft_tokens"]
                assert sum(counts["n_accepted_by_position"][min(n, 12) - 1 :]) > 0  # far into windows


def turns(llm, script=None):
    """A chat of four turns, each of which goes on from what the one before left."""
    ids, found = list(range(5, 45)), []
    for i in range(4):
        if script is not None:
            scripted(llm, script[i : i + 1], 0.9)
        (output,) = llm.generate([{"prompt_token_ids": ids}], TURN, use_tqdm=False)
        found.append(output)
        ids = ids + list(output.outputs[0].token_ids) + list(range(60 + i, 67 + i))
    return found


def told(outputs):
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def test_turns_of_a_chat_find_what_they_find_without_drafts(folder):
    """A state is kept at every end of a page, also where drafts go beyond it."""
    with LLM(folder, speculative="off", **SMALL) as llm:
        wanted = turns(llm)
    config = {"method": "ngram", "num_speculative_tokens": 6, "adaptive": False}
    with LLM(folder, speculative_config=config, **SMALL) as llm:
        found = turns(llm, wanted)
        assert llm.stats()["n_accepted_tokens"] > 60
    assert told(found) == told(wanted)
    assert [one.num_cached_tokens for one in found] == [one.num_cached_tokens for one in wanted]
    assert found[-1].num_cached_tokens > 150


def test_a_pool_that_preempts_changes_nothing(folder):
    with LLM(folder, speculative="off", max_model_len=192, **SMALL) as llm:
        if not llm.engine.plan.info.kv_bytes_per_token():
            pytest.skip("without pages nothing is preempted")
        wanted = asked(llm, "told sampled", max_tokens=80)
        memory = int(1.3 * 192 * llm.engine.plan.info.kv_bytes_per_token())
    small = {"kv_cache_memory_bytes": memory, "max_model_len": 192}
    with LLM(folder, speculative_config=SUFFIX, **SMALL, **small) as llm:
        for p_right in (1.0, 0.7):
            scripted(llm, wanted, p_right)
            assert told(asked(llm, "told sampled", max_tokens=80)) == told(wanted)
        assert llm.stats()["n_total_preemptions"] > 0
        assert llm.stats()["n_accepted_tokens"] > 0


def test_requests_that_are_left_in_the_middle_of_drafts_harm_no_other(folder, plain):
    with LLM(folder, speculative_config=SUFFIX, **SMALL) as llm:
        wanted = asked(llm, "greedy")
        scripted(llm, wanted, 0.9)
        params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
        for n_read in (1, 3, 9):
            handles = [llm.client.submit(prompt, params) for prompt in PROMPTS[:3]]
            for handle in handles[:2]:
                for _ in range(n_read):
                    next(handle, None)  # it may have ended: what nobody read meanwhile comes in one piece
                handle.close()
            assert all_of(llm, CASES["greedy"]) == plain["greedy"]
            handles[2].close()


def test_the_default_drafts_when_that_pays_and_changes_nothing(folder, plain):
    with LLM(folder, **SMALL) as llm:
        for name in ("greedy", "sampled", "told"):
            assert all_of(llm, CASES[name]) == plain[name], name
        assert "n_drafts" in llm.stats()


def test_beams_change_no_more_than_outputs_do(folder):
    from tiercel.protocol.beams import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    found = []
    for options in ({"speculative": "off"}, {"speculative_config": SUFFIX}):
        with LLM(folder, **SMALL, **options) as llm:
            outputs = llm.beam_search([PROMPTS[0]], params)[0].sequences
            found.append([(one.tokens, one.cum_logprob) for one in outputs])
    assert found[0] == found[1]
