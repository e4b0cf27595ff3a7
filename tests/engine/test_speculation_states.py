"""Drafts of models with recurrent state, on the fake runner: which states are kept, none of them of a wrong draft.

Random histories are in `test_speculation`, whose models have states too.
"""

import pytest
from engine_kit import Bench
from speculation_kit import KnowingDrafter, always
from test_states import kept, words
from tier_bench import TierBench, disk

from tiercel.protocol.params import SamplingParams
from tiercel.testing.fake_runner import FakeRunner, expected_tokens, make_limits

GREEDY = SamplingParams(temperature=0.0)
PROMPT = words(10)
WANT = expected_tokens(PROMPT, 40, GREEDY)
ROWS = 20


def make_bench(*makers, p_right=1.0, n=5, is_ahead=False, answers=None, spacing=1000, runner=None, drafts=True):
    limits = make_limits(
        state_bytes=100,
        n_snapshots=24,
        snapshot_spacing_tokens=spacing,
        n_pages=80,
        max_len_tokens=160,
        max_logits_rows=64 + ROWS,
        max_step_tokens=64 + ROWS,
    )
    drafter = KnowingDrafter(answers or {tuple(PROMPT): [WANT]}, p_right=p_right)
    options = {"max_draft_rows": ROWS, "max_num_batched_tokens": 32}
    options["speculation"] = always(drafter, n, is_ahead=is_ahead) if drafts else None
    fake = FakeRunner(limits, **(runner or {}))
    return TierBench(*makers, runner=fake, **options) if makers else Bench(runner=fake, **options)


def ask(bench, name, prompt, n, **more):
    bench.add(name, prompt, max_tokens=n, temperature=0.0, **more)
    bench.run()
    bench.assert_idle()
    return bench.firsts[name].n_cached_tokens, bench.tokens[name]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("p_right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("n_output", [9, 15, 30])
def test_the_states_of_an_output_are_kept_where_they_are_without_drafts(n, p_right, n_output):
    plain, bench = make_bench(drafts=False), make_bench(n=n, p_right=p_right)
    assert ask(bench, "a", PROMPT, n_output) == ask(plain, "a", PROMPT, n_output) == (0, WANT[:n_output])
    if p_right == 1.0:
        assert bench.core._speculation.counts.n_accepted_tokens > 0
    assert set(kept(bench)) >= {8, kept(plain)[-1]}
    prompt = PROMPT + WANT[:n_output] + words(7, 3)
    assert ask(bench, "b", prompt, 6) == ask(plain, "b", prompt, 6)


@pytest.mark.parametrize("n", [5, 11])
@pytest.mark.parametrize("n_output", [9, 15, 30])
def test_a_step_that_passes_several_page_boundaries_keeps_the_first(n, n_output):
    plain, bench = make_bench(drafts=False), make_bench(n=n)
    assert ask(bench, "a", PROMPT, n_output) == ask(plain, "a", PROMPT, n_output)
    assert kept(plain)[-1] - n <= kept(bench)[-1] <= kept(plain)[-1]


@pytest.mark.parametrize("n", [3, 9])
def test_spacings_hold_in_an_output_that_was_drafted(n):
    bench = make_bench(n=n, spacing=16)
    ask(bench, "a", PROMPT, 40)
    assert {16, 32} <= set(kept(bench))


@pytest.mark.parametrize("at", range(3, 14))
def test_a_state_behind_a_stop_inside_what_was_drafted_is_not_kept(at):
    bench = make_bench(n=11)
    _, tokens = ask(bench, "a", PROMPT, 30, stop_token_ids=[WANT[at]])
    assert tokens == WANT[: WANT.index(WANT[at]) + 1]
    assert max(kept(bench)) < len(PROMPT) + len(tokens)
    prompt = PROMPT + tokens + words(5, 3)
    assert ask(bench, "b", prompt, 4)[1] == expected_tokens(prompt, 4, GREEDY)


@pytest.mark.parametrize("failing", range(1, 7))
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_failed_step_with_drafts_gives_its_places_back(failing, is_ahead):
    bench = make_bench(runner={"fail_steps": [failing], "is_strict": False}, is_ahead=is_ahead)
    bench.add("a", PROMPT, max_tokens=30, temperature=0.0)
    bench.run()
    bench.assert_idle()
    assert ask(bench, "b", PROMPT, 30)[1] == WANT[:30]


def test_a_number_that_is_none_among_drafts_leaves_no_state_that_can_be_found():
    bench = make_bench(n=9, runner={"nan_token_id": WANT[4]})
    bench.add("a", PROMPT, max_tokens=20, temperature=0.0)
    bench.run()
    bench.assert_idle()
    assert bench.finals["a"].error is not None
    assert bench.tokens["a"] == WANT[:5]
    assert not kept(bench)


@pytest.mark.parametrize("n_steps", range(1, 9))
@pytest.mark.parametrize("is_ahead", [False, True])
def test_an_abort_among_drafts_gives_every_place_back(n_steps, is_ahead):
    bench = make_bench(is_ahead=is_ahead, p_right=0.9)
    for name in "ab":
        bench.add(name, PROMPT, max_tokens=30, temperature=0.0)
    for _ in range(n_steps):
        bench.step()
    bench.core.finish(["a"])
    bench.run()
    bench.assert_idle()
    assert bench.tokens["b"] == WANT[:30]
    store = bench.scheduler.states.store
    assert store.n_free + store.n_kept == 24


def test_a_state_that_drafts_came_by_is_found_in_a_tier_after_a_restart(tmp_path):
    first = make_bench(disk(tmp_path), n=9)
    ask(first, "a", PROMPT, 30)
    assert first.core._speculation.counts.n_accepted_tokens > 10
    first.close()
    second = make_bench(disk(tmp_path), n=9)
    prompt = PROMPT + WANT[:30] + words(5, 3)
    n_cached, tokens = ask(second, "b", prompt, 4)
    assert n_cached >= 28
    assert tokens == expected_tokens(prompt, 4, GREEDY)
    second.close()
