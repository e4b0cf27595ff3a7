"""Drafters that are models where `test_model_drafters_llm` does not go: beams, a target without pages of its own, and a
small draft model for a hybrid."""

from pathlib import Path

import pytest
from test_draft_model_llm import config_of
from test_model_drafters_llm import IDS, MTP, of_few_tokens
from test_speculation_llm import CASES, SMALL, all_of
from test_speculation_states_llm import MODELS

from tiercel import LLM
from tiercel.base.config import EngineOptions
from tiercel.boot.plan import make_plan
from tiercel.ops import lowered as ops
from tiercel.protocol.beams import BeamSearchParams
from tiercel.runner.draft_memory import trial_row_bytes
from tiercel.testing.tiny_drafter import write_tiny_drafter
from tiercel.testing.tiny_model import ATTENTION_FREE_CONFIG, write_tiny_model

NAMES = ("greedy", "sampled", "told sampled", "formed", "two")
BEAMS = BeamSearchParams(beam_width=3, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A hybrid with a draft head of its own, which says little but IDS."""
    config = MTP["qwen3.5"]
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "hybrid", config=config)
    return str(of_few_tokens(folder, config))


def outputs_of(llm, names=NAMES):
    return {name: all_of(llm, CASES[name]) for name in names}


@pytest.fixture(scope="module")
def plain(hybrid):
    with LLM(hybrid, speculative="off", **SMALL) as llm:
        return outputs_of(llm), beams_of(llm)


def beams_of(llm):
    prompts = [{"prompt_token_ids": list(range(first, first + 40))} for first in (5, 60)]
    return [
        [(one.tokens, one.cum_logprob) for one in found.sequences]
        for _ in range(2)  # the second time from the prefix cache
        for found in llm.beam_search(prompts, BEAMS)
    ]


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_beams_are_those_without_drafts(hybrid, plain, tmp_path, kind):
    config = {"method": "mtp"}
    if kind != "mtp":
        config = {"model": str(write_tiny_drafter(tmp_path / "drafter", kind, Path(hybrid), IDS))}
    with LLM(hybrid, speculative_config=config | {"adaptive": False}, **SMALL) as llm:
        assert beams_of(llm) == plain[1]
        assert all_of(llm, CASES["greedy"]) == plain[0]["greedy"]
        assert beams_of(llm) == plain[1]
        assert llm.stats()["n_failures"] == 0


def test_a_small_draft_model_drafts_for_a_hybrid(hybrid, plain, tmp_path):
    """Which takes its state back behind wrong drafts, while the draft model takes back pages."""
    draft = write_tiny_model(tmp_path / "draft", config={"num_hidden_layers": 1})
    of_few_tokens(draft, {"num_hidden_layers": 1})
    with LLM(hybrid, speculative_config=config_of(str(draft)), **SMALL) as llm:
        assert outputs_of(llm) == plain[0]
        stats = llm.stats()
    assert stats["n_failures"] == 0
    assert stats["n_draft_tokens"] > stats["n_accepted_tokens"] > 20


def test_a_pool_that_holds_a_drafters_layers_only_is_a_pool(tmp_path):
    """A state without its pages would leave the drafter to read what another request wrote there."""
    folder = write_tiny_model(tmp_path / "model", config=ATTENTION_FREE_CONFIG | {"num_hidden_layers": 4})
    drafter = write_tiny_drafter(tmp_path / "drafter", "eagle3", folder, IDS)
    with LLM(str(folder), speculative="off", **SMALL) as llm:
        wanted = outputs_of(llm)
        assert not llm.engine.runner.limits.has_kv
    small = {"kv_cache_memory_bytes": 200_000, "max_model_len": 192}
    with LLM(str(folder), speculative_config={"model": str(drafter), "adaptive": False}, **SMALL, **small) as llm:
        assert llm.engine.runner.limits.has_kv
        assert outputs_of(llm) == wanted
        assert outputs_of(llm) == wanted
        stats = llm.stats()
    assert stats["n_failures"] == 0
    assert stats["n_accepted_tokens"] > 20


def inputs_of(op):
    """Columns that a recurrent op reads of a row, as the core keeps them."""
    if isinstance(op, ops.ShortConv):
        return [op.y.width]
    if isinstance(op, ops.DeltaLayer):
        return [op.channels, op.dt_bias.shape[0], op.value_heads]
    if isinstance(op, ops.DeltaRule):
        return [op.qkv.width, op.dt_bias.shape[0], op.value_heads]
    return [op.xbc.width, op.heads] if isinstance(op, ops.Ssd) else []


@pytest.mark.parametrize("name", MODELS)
def test_what_is_counted_of_a_row_to_take_back_is_what_the_program_keeps_or_a_little_more(name, tmp_path):
    """Counted before there is a program, from the layers' sizes."""
    plan = make_plan(EngineOptions(model=str(write_tiny_model(tmp_path, config=MODELS[name]))))
    kept = 4 * sum(-(-width // 16) * 16 for op in plan.lowered.ops for width in inputs_of(op))
    counted = trial_row_bytes(plan.info.state_layers)
    plan.close()
    assert 0 < kept <= counted <= 2.5 * kept
