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


def mtp(name="deepseek_v3_experts", format=Format.Q8_0, n_modules=1):
    """A model whose own head drafts: latent attention, and experts; its weights are random, so little comes.

    Those of Qwen3.5 and Ling have recurrent layers, whose states go over what is right only.
    """
    field = "mtp_num_hidden_layers" if "qwen" in name else "num_nextn_predict_layers"
    model = build_model(json.loads((MTP / f"{name}.json").read_text())["config"] | {field: n_modules})
    assert model.n_mtp_modules == n_modules
    shapes = model.expected_weights() | model.mtp_weights()
    weights = {n: fill_by_name(n, shape, norms_add_one=model.norms_add_one) for n, shape in shapes.items()}
    tensors = described(weights, format)
    modules = tuple(model.record_mtp(tensors, module=module) for module in range(n_modules))
    return Pair(model.record(tensors, keeps_hidden=True), modules, weights, "chain")


PAIRS = {"chain": chain, "block": block, "block-of-masks": lambda: block(first_logits_row=1), "mtp": mtp}
PAIRS |= {f"mtp-{name}": partial(mtp, name) for name in ("qwen3_5", "ling")}
MODULES = {
    "mtp-2": partial(mtp, n_modules=2),
    "mtp-3": partial(mtp, n_modules=3),
    "mtp-qwen3_5-2": partial(mtp, "qwen3_5", n_modules=2),
    "mtp-ling-3": partial(mtp, "ling", n_modules=3),
}
PAIRS |= MODULES


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


class TestMtpOfTwoModules(TestMtp):
    pair = mtp(n_modules=2)


class TestMtpOfThreeModulesOfAModelWithState(TestMtpOfAModelWithState):
    pair = mtp("qwen3_5", n_modules=3)


def generated(runner, n_tokens, *, slot=0, params=GREEDY, n_draft=3, edges=(4, 9)):
    """Prefill in pieces, then draft and verify until there are so many tokens.

    Gives the driver, all tokens, and what the last step told.
    """
    driver = Driver(runner)
    driver.admit(slot, PROMPT, 64, params=params)
    bounds = [0, *edges, len(PROMPT)]
    for start, end in itertools.pairwise(bounds):
        samples = [slot] if end == len(PROMPT) else []
        result = driver.step((slot, start, end - start), samples=samples, n_draft=n_draft)
    tokens = [*PROMPT, *result.row_token.tolist()]
    while len(tokens) < n_tokens:
        plan = (slot, len(tokens) - 1, n_draft + 1)
        result = driver.step(plan, samples=[slot], drafts={slot: OWN}, n_draft=n_draft)
        tokens += result.row_token.tolist()
    return driver, tokens, result


@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
def test_pages_hold_the_same_bytes_whether_filled_row_by_row_or_at_once(drafter, kv_dtype):
    """Of the drafter's layers too, wherever drafts had been that did not come."""
    first, second = (drafter.runner(kv_dtype=kv_dtype) for _ in range(2))
    driver, tokens, _ = generated(first, 36)
    at_once = Driver(second)
    at_once.admit(2, tokens, 64)
    at_once.step((2, 0, len(tokens) - 1))
    pages = [r.read_pages(d.page_ids[s][:2]) for r, d, s in ((first, driver, 0), (second, at_once, 2))]
    assert pages[0] == pages[1]
    n_layers = {layer.index for program in (drafter.target, *drafter.drafts) for layer in program.kv_layers}
    assert first.page_group.counts == (len(n_layers),)
    first.close()
    second.close()


def test_a_runner_that_drafts_gives_the_tokens_of_one_that_does_not(drafter):
    for params in (GREEDY, RANDOM):
        plain, drafting = drafter.runner(drafts=False), drafter.runner()
        driver = Driver(plain)
        driver.admit(0, PROMPT, 64, params=params)
        want = [*PROMPT, *driver.generate(0, len(PROMPT), 30)]
        _, got, _ = generated(drafting, 36, params=params)
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


@pytest.mark.parametrize("name", ["chain", "mtp", *MODULES])
def test_a_chain_drafts_what_its_definition_says(name):
    """The numpy definitions over the whole text at once: a pass of each module over all rows, the tokens one further on
    each time and what the pass before gave out; then the last module's, one row at a time. And the same after a prompt
    in chunks and many steps.
    """
    pair = PAIRS[name](format=Format.F32)
    programs = (pair.target, *pair.drafts)
    target, *heads = (ReferenceExecutor(program, pair.weights, max_tokens=100) for program in programs)
    runner = pair.runner()
    _, tokens, last = generated(runner, 20, n_draft=4)
    logits = target.step([Chunk(0, tokens[:-1])])
    assert int(logits[-1].argmax()) == tokens[-1]
    ids, given, want, sure = tokens[1:], target.last_hidden, [], []
    for head in heads + heads[-1:] * (4 - len(heads)):
        logits = head.step([Chunk(0, ids, given=given)])
        odds = np.exp(logits[-1] - logits[-1].max())
        want.append(int(logits[-1].argmax()))
        sure.append(float(odds.max() / odds.sum()))
        is_last = len(want) >= len(heads)
        ids, given = ([], head.last_hidden[-1:]) if is_last else (ids[1:], head.last_hidden)
        ids = [*ids, want[-1]]
    fresh = Driver(runner)
    fresh.admit(1, tokens[:-1], 64)
    found = drafted(fresh.step((1, 0, len(tokens) - 1), samples=[1], n_draft=4))
    ((got, confidence),) = found
    assert got == want
    assert confidence == pytest.approx(sure, rel=1e-4)
    assert found == drafted(last)
    runner.close()


@pytest.mark.parametrize("n_rejected", range(5))
@pytest.mark.parametrize("name", MODULES)
def test_what_is_drafted_after_rejected_drafts_is_what_a_fresh_runner_drafts(name, n_rejected):
    """To the last bit, whether all four came or none; and again one token on, when what was kept is of two steps."""
    pair = PAIRS[name]()
    plain, runner = pair.runner(drafts=False), pair.runner()
    alone, driver = Driver(plain), Driver(runner)
    alone.admit(0, PROMPT, 64)
    want = [*PROMPT, *alone.generate(0, len(PROMPT), 12)]
    driver.admit(0, PROMPT, 64)
    driver.step((0, 0, 4), n_draft=4)
    driver.step((0, 4, len(PROMPT) - 4), samples=[0], n_draft=4)
    n = len(PROMPT) + 1
    for n_foretold in (4, 1, 0, 2):
        n_right = min(4 - n_rejected, n_foretold)
        foretold = [*want[n : n + n_right], *((t + 1) % 100 for t in want[n + n_right : n + n_foretold])]
        step = driver.step((0, n - 1, n_foretold + 1), samples=[0], drafts={0: (n, foretold)}, n_draft=4)
        n += n_right + 1
        assert step.row_token.tolist() == want[n - n_right - 1 : n]
        fresh = Driver(runner)
        fresh.admit(1, want[: n - 1], 64, n_prompt=len(PROMPT))
        assert drafted(step) == drafted(fresh.step((1, 0, n - 1), samples=[1], n_draft=4))
    plain.close()
    runner.close()


@pytest.mark.parametrize("name", ["mtp-2", "mtp-3"])
def test_a_sequence_that_goes_on_from_pages_of_its_own_text_drafts_as_if_it_had_read_it(name):
    """Behind which as many tokens are known as their last places take in: `n_unsettled_tokens`."""
    runner = PAIRS[name]().runner()
    n_more = runner.limits.n_unsettled_tokens
    assert n_more == int(name[-1])
    driver, tokens, _ = generated(runner, 32 + n_more)
    before = runner.read_pages(driver.page_ids[0][:2])
    tokens = tokens[: 32 + n_more]
    found = []
    for slot, shared in ((1, driver.page_ids[0][:2]), (2, [])):
        driver.admit(slot, tokens, 64, n_prompt=len(PROMPT), shared=shared)
        start = 16 * len(shared)
        found.append(driver.step((slot, start, len(tokens) - start), samples=[slot], n_draft=4))
    assert drafted(found[0]) == drafted(found[1])
    assert runner.read_pages(driver.page_ids[0][:2]) == before
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


@given(OFFERS, st.integers(0, 9), TIMES, st.lists(st.floats(0, 1.5), max_size=4))
def test_a_step_that_verifies_by_rejection_stops_as_the_budget_does(confidence, n_more, step_seconds, chances):
    n = len(confidence)
    want = chosen(confidence, n_rows=n + n_more, policy=(step_seconds, chances), stops_early=True)
    assert _native.choose_drafts(confidence, n + n_more, step_seconds, chances, stops_early=True) == want


def test_equal_chances_are_taken_by_position_and_then_by_sequence():
    flat = [1.0, 1.0, 1.0, 1.0, 9.0, 9.0]
    assert _native.choose_drafts([[1.0, 1.0], [1.0]], 2, flat, []) == [1, 1]
    assert _native.choose_drafts([[1.0, 1.0], [0.5]], 2, flat, []) == [2, 0]
    assert _native.choose_drafts([[1.0, 1.0], [0.5]], 2, [], []) == [2, 1]
