"""Drafts made inside the native step: with two kinds of drafters written by hand, and a model's own head."""

import itertools
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from draft_models import Pair, block, chain, described
from hypothesis import given
from hypothesis import strategies as st

from tiercel import _native
from tiercel.base.errors import ShapeError
from tiercel.models.registry import build_model
from tiercel.ops.passes import lower_and_fuse
from tiercel.quant.formats import Format
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.testing.draft_kit import DraftingRunnerContract, drafted
from tiercel.testing.fake_drafts import chosen
from tiercel.testing.fill import fill_by_name
from tiercel.testing.runner_kit import GREEDY, OWN, PROMPT, RANDOM, Driver
from tiercel.testing.state_kit import StatefulRunnerContract

MTP = Path(__file__).parent.parent / "model/mtp_fixtures"


def mtp(name="deepseek_v3_experts", format=Format.Q8_0):
    """A model whose own head drafts: latent attention, and experts; its weights are random, so little comes.

    Those of Qwen3.5 and Ling have recurrent layers, whose states go over what is right only.
    """
    model = build_model(json.loads((MTP / f"{name}.json").read_text())["config"])
    shapes = model.expected_weights() | model.mtp_weights()
    weights = {n: fill_by_name(n, shape, norms_add_one=model.norms_add_one) for n, shape in shapes.items()}
    tensors = described(weights, format)
    return Pair(model.record(tensors, keeps_hidden=True), model.record_mtp(tensors), weights, "chain")


PAIRS = {"chain": chain, "block": block, "block-of-masks": lambda: block(first_logits_row=1), "mtp": mtp}
PAIRS |= {f"mtp-{name}": partial(mtp, name) for name in ("qwen3_5", "ling")}


@pytest.fixture(scope="module", params=PAIRS)
def drafter(request):
    return PAIRS[request.param]()


class TestChain(DraftingRunnerContract):
    pair = chain()

    def make_runner(self):
        return self.pair.runner()


class TestBlock(DraftingRunnerContract):
    pair = block()

    def make_runner(self):
        return self.pair.runner()


class TestBlockOfMasks(DraftingRunnerContract):
    pair = block(first_logits_row=1)
    some_come = False

    def make_runner(self):
        return self.pair.runner()


class TestMtp(DraftingRunnerContract):
    pair = mtp()
    some_come = False

    def make_runner(self):
        return self.pair.runner()


class TestMtpOfAModelWithState(StatefulRunnerContract, TestMtp):
    pair = mtp("qwen3_5")


def generated(runner, n_tokens, *, slot=0, params=GREEDY, n_draft=3, edges=(4, 9)):
    """Prefill in pieces, then draft and verify until there are so many tokens; give the driver and all tokens."""
    driver = Driver(runner)
    driver.admit(slot, PROMPT, 64, params=params)
    bounds = [0, *edges, len(PROMPT)]
    for start, end in itertools.pairwise(bounds):
        samples = [slot] if end == len(PROMPT) else []
        result = driver.step((slot, start, end - start), samples=samples, n_draft=n_draft)
    tokens = [*PROMPT, *result.row_token.tolist()]
    while len(tokens) < n_tokens:
        plan = (slot, len(tokens) - 1, n_draft + 1)
        tokens += driver.step(plan, samples=[slot], drafts={slot: OWN}, n_draft=n_draft).row_token.tolist()
    return driver, tokens


@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
def test_pages_hold_the_same_bytes_whether_filled_row_by_row_or_at_once(drafter, kv_dtype):
    """Of the drafter's layers too, wherever drafts had been that did not come."""
    first, second = (drafter.runner(kv_dtype=kv_dtype) for _ in range(2))
    driver, tokens = generated(first, 36)
    at_once = Driver(second)
    at_once.admit(2, tokens, 64)
    at_once.step((2, 0, len(tokens) - 1))
    pages = [r.read_pages(d.page_ids[s][:2]) for r, d, s in ((first, driver, 0), (second, at_once, 2))]
    assert pages[0] == pages[1]
    n_layers = {layer.index for layer in (*drafter.target.kv_layers, *drafter.draft.kv_layers)}
    assert first.page_group.counts == (len(n_layers),)
    first.close()
    second.close()


def test_a_runner_that_drafts_gives_the_tokens_of_one_that_does_not(drafter):
    for params in (GREEDY, RANDOM):
        plain, drafting = drafter.runner(drafts=False), drafter.runner()
        driver = Driver(plain)
        driver.admit(0, PROMPT, 64, params=params)
        want = [*PROMPT, *driver.generate(0, len(PROMPT), 30)]
        _, got = generated(drafting, 36, params=params)
        assert got == want[: len(got)]
        plain.close()
        drafting.close()


def test_threads_change_no_draft(drafter):
    alone = drafter.runner()
    want = drafted(admitted(alone).step((0, 0, len(PROMPT)), samples=[0], n_draft=3))
    for n_threads in (2, 3):
        runner = drafter.runner(n_threads=n_threads)
        assert drafted(admitted(runner).step((0, 0, len(PROMPT)), samples=[0], n_draft=3)) == want
        runner.close()
    alone.close()


def admitted(runner):
    driver = Driver(runner)
    driver.admit(0, PROMPT, 32)
    return driver


@pytest.mark.parametrize("name", ["chain", "mtp"])
def test_a_chain_drafts_what_its_definition_says(name):
    """The numpy definitions: the first pass over all rows, each with the token after it; then one row at a time."""
    pair = mtp(format=Format.F32) if name == "mtp" else chain(format=Format.F32)
    target, head = (ReferenceExecutor(program, pair.weights, max_tokens=100) for program in (pair.target, pair.draft))
    runner = pair.runner()
    _, tokens = generated(runner, 20, n_draft=4)
    logits = target.step([Chunk(0, tokens[:-1])])
    assert int(logits[-1].argmax()) == tokens[-1]
    logits, want, sure = head.step([Chunk(0, tokens[1:], given=target.last_hidden)])[-1:], [], []
    for _ in range(4):
        odds = np.exp(logits[-1] - logits[-1].max())
        want.append(int(logits[-1].argmax()))
        sure.append(float(odds.max() / odds.sum()))
        logits = head.step([Chunk(0, want[-1:], given=head.last_hidden[-1:])])
    fresh = Driver(runner)
    fresh.admit(1, tokens[:-1], 64)
    ((got, confidence),) = drafted(fresh.step((1, 0, len(tokens) - 1), samples=[1], n_draft=4))
    assert got == want
    assert confidence == pytest.approx(sure, rel=1e-4)
    runner.close()


def test_a_drafter_that_does_not_fit_its_target_is_refused():
    with pytest.raises(ShapeError, match="gives out 0"):
        chain().drafting().check(lower_and_fuse(block().target))
    with pytest.raises(ShapeError, match="5 drafts in 4 rows"):
        block(n_draft_max=5).runner()
    plain = chain().runner(drafts=False)
    with pytest.raises(ShapeError, match="makes no drafts"):
        plain.set_draft_policy([1.0], [])
    driver = admitted(plain)
    for options in ({"n_draft": 1}, {"drafts": {0: OWN}}):
        with pytest.raises(ShapeError):
            driver.step((0, 0, len(PROMPT)), samples=[0], **options)
    plain.close()


OFFERS = st.lists(st.lists(st.floats(0, 1, width=32), max_size=5), min_size=1, max_size=5)
TIMES = st.lists(st.floats(0.01, 10), min_size=1, max_size=12)


@given(OFFERS, st.integers(0, 9), TIMES, st.lists(st.floats(0, 1.5), max_size=4))
def test_a_step_chooses_as_the_budget_does(confidence, n_more, step_seconds, chances):
    n = len(confidence)
    want = chosen(confidence, n_rows=n + n_more, policy=(step_seconds, chances))
    assert _native.choose_drafts(confidence, n + n_more, step_seconds, chances) == want


def test_equal_chances_are_taken_by_position_and_then_by_sequence():
    flat = [1.0, 1.0, 1.0, 1.0, 9.0, 9.0]
    assert _native.choose_drafts([[1.0, 1.0], [1.0]], 2, flat, []) == [1, 1]
    assert _native.choose_drafts([[1.0, 1.0], [0.5]], 2, flat, []) == [2, 0]
    assert _native.choose_drafts([[1.0, 1.0], [0.5]], 2, [], []) == [2, 1]
