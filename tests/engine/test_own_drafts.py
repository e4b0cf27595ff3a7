"""Speculation with a runner that drafts by itself: no token changes, steps stay planned ahead, a loss ends it."""

import math
from itertools import pairwise

import pytest
import test_random_traces as traces
from engine_kit import Bench
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_speculation import answers_of

from tiercel.engine.own_drafts import OwnDrafts
from tiercel.protocol.params import SamplingParams
from tiercel.spec.settings import SpeculationSettings
from tiercel.testing.fake_drafts import half_right
from tiercel.testing.fake_runner import FakeRunner, expected_tokens, make_limits

PROMPT = [3, 1, 4, 1, 5]
WANT = expected_tokens(PROMPT, 2500, SamplingParams(temperature=0.0))


def knowing(answers):
    """What may follow some tokens, for `half_right`: of all that prompts may be answered, one that fits."""
    known = [[*prompt, *answer] for prompt, each in answers.items() for answer in each]

    def follow(tokens):
        n = len(tokens)
        return next((one[n:] for one in known if one[:n] == list(tokens) and len(one) > n), [])

    return follow


def right(tokens, n):
    """Drafts of PROMPT's greedy answer that all come, and said to."""
    found = [*PROMPT, *WANT][len(tokens) : len(tokens) + n]
    return found, [0.9] * len(found)


def wrong(tokens, n):
    """Drafts that never come, and said to."""
    ids, chances = right(tokens, n)
    return [(i + 1) % 97 for i in ids], chances


def own(n_draft_max, *, tell=lambda seconds, chances: None, **changes):
    return OwnDrafts(SpeculationSettings(**changes), n_draft_max=n_draft_max, tell=tell)


class Timed(FakeRunner):
    """A runner whose steps take what their rows and their drafting say."""

    def __init__(self, limits, *, row_ns=0, draft_ns=0, **options):
        super().__init__(limits, **options)
        self.row_ns, self.draft_ns, self.plans = row_ns, draft_ns, []

    def submit(self, plan):
        super().submit(plan)
        self.plans.append(plan)

    def collect(self):
        result = super().collect()
        plan = self.plans[result.step_id - self.plans[0].step_id]
        n_rows = len(plan.seq_slot) + (0 if result.seq_drafted is None else int(result.seq_drafted.sum()))
        draft_ns = self.draft_ns if plan.n_draft else 0
        return replace(result, compute_ns=1_000_000 + self.row_ns * n_rows, draft_ns=draft_ns)


def bench_of(drafter, *, n=3, rows=20, row_ns=0, draft_ns=0, **changes):
    limits = make_limits(
        max_logits_rows=64 + rows,
        max_step_tokens=64 + rows,
        n_draft_max=n,
        draft_reach_tokens=n,
        max_len_tokens=4000,
        n_pages=4000,
    )
    runner = Timed(limits, row_ns=row_ns, draft_ns=draft_ns, drafter=drafter)
    speculation = own(n, tell=runner.set_draft_policy, **changes)
    return Bench(runner=runner, speculation=speculation, max_draft_rows=rows), speculation


def kinds(runner):
    """Whether each step drafts."""
    return [plan.n_draft > 0 for plan in runner.plans]


drafting = st.fixed_dictionaries(
    {"n": st.integers(1, 5), "rows": st.sampled_from([1, 3, 8, 20]), "is_adaptive": st.booleans()}
)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(traces.setups, st.lists(traces.events, min_size=1, max_size=14), drafting)
def test_every_request_gets_the_tokens_it_gets_without_drafts(setup, trace, how):
    """Mixed batches, preemption, prefix hits, chunks, aborts, stops inside what was drafted, log-probabilities."""
    speculation = own(how["n"], is_adaptive=how["is_adaptive"])
    bench = traces.make_bench(
        setup,
        speculation=speculation,
        max_draft_rows=how["rows"],
        n_draft_max=how["n"],
        drafter=half_right(knowing(answers_of(trace))),
    )
    sent = traces.play(bench, setup, trace)
    bench.assert_idle()
    speculation.check()
    assert not speculation._confidences
    traces.assert_right(bench, setup, sent)
    traces.assert_what_is_cached_is_what_its_keys_say(bench, sent)
    counts = speculation.counts
    assert counts.n_accepted_tokens == sum(counts.n_accepted_by_position) <= counts.n_draft_tokens
    assert counts.n_failures == 0


def test_right_drafts_are_accepted_and_make_fewer_steps_while_steps_are_planned_ahead():
    """Or all of the above could be true of an engine that never drafts."""
    bench, speculation = bench_of(right, is_adaptive=False)
    n_most = 0
    bench.add("a", PROMPT, max_tokens=41, temperature=0.0)
    while bench.step():
        n_most = max(n_most, len(bench.core._in_flight))
    assert bench.tokens["a"] == WANT[:41]
    assert n_most >= 1  # what is left when a round ends was planned before the step before it was seen
    assert speculation.counts.n_accepted_tokens == speculation.counts.n_draft_tokens >= 28
    assert bench.runner.n_steps_run <= 14


def test_a_load_is_first_measured_without_drafts_and_then_drafts_if_that_pays():
    bench, speculation = bench_of(right, draft_ns=100_000)
    bench.add("a", PROMPT, max_tokens=400, temperature=0.0)
    seen = []
    while bench.step():
        seen.append(bench.core.snapshot.speculation)
    assert bench.tokens["a"] == WANT[:400]
    drafts = kinds(bench.runner)
    assert not any(drafts[:8])
    assert all(drafts[12:-4])
    assert speculation.counts.n_accepted_tokens > 250
    assert speculation.counts.n_switched_off == 0
    assert any(told.is_drafting for told in seen)


def test_a_small_gain_is_kept_though_some_tokens_come_slower_than_plain_ones():
    """A draft that comes three times of four, and costs seven tenths of a step."""
    half = half_right(lambda tokens: [*PROMPT, *WANT][len(tokens) :])
    bench, speculation = bench_of(half, n=1, row_ns=50_000, draft_ns=610_000)
    bench.add("a", PROMPT, max_tokens=2400, temperature=0.0)
    bench.run()
    counts = speculation.counts
    assert 0.7 < counts.n_accepted_tokens / counts.n_drafts < 0.8
    drafts = kinds(bench.runner)
    assert sum(drafts) > 0.9 * len(drafts)


def test_drafting_that_does_not_pay_stops_and_is_tried_again_more_and_more_seldom():
    bench, speculation = bench_of(wrong, row_ns=300_000, draft_ns=400_000)
    bench.add("a", PROMPT, max_tokens=2400, temperature=0.0)
    bench.run()
    assert bench.tokens["a"] == WANT[:2400]
    drafts = kinds(bench.runner)
    tried = [i for i in range(1, len(drafts)) if drafts[i] and not drafts[i - 1]]
    waits = [later - earlier for earlier, later in pairwise(tried)]
    assert len(waits) >= 2
    assert waits == sorted(waits)
    assert waits[1] > 1.5 * waits[0]
    assert sum(drafts) < 0.07 * len(drafts)
    assert speculation.counts.n_accepted_tokens == 0
    n_left = sum(before and not now for before, now in pairwise(drafts))
    told = bench.core.snapshot.speculation
    assert told.n_switched_off in (n_left, n_left - 1)  # the last step may be the end of a try
    assert told.n_switched_off >= 2
    assert not told.is_drafting


def test_a_request_whose_drafts_do_not_pay_goes_without_beside_one_whose_do():
    other = [2, 7, 1, 8]
    answer = expected_tokens(other, 2500, SamplingParams(temperature=0.0))

    def drafts(tokens, n):
        if tokens[: len(other)] != other:
            return right(tokens, n)
        ids = [*other, *answer][len(tokens) : len(tokens) + n]
        return [(i + 1) % 97 for i in ids], [0.02] * len(ids)

    bench, speculation = bench_of(drafts, row_ns=100_000, draft_ns=50_000)
    bench.add("a", PROMPT, max_tokens=400, temperature=0.0)
    bench.add("b", other, max_tokens=120, temperature=0.0)
    bench.run()
    assert (bench.tokens["a"], bench.tokens["b"]) == (WANT[:400], answer[:120])
    counts = speculation.counts
    assert counts.n_passed_over > 40  # of some 110 steps of b's
    assert counts.n_accepted_tokens > 0.9 * counts.n_draft_tokens  # a's
    assert counts.n_switched_off == 0
    assert bench.core.snapshot.speculation.n_passed_over == counts.n_passed_over


@pytest.mark.parametrize(("n_prompt", "is_adaptive"), [(300, True), (300, False), (100, True)])
def test_no_drafts_are_made_or_computed_beside_a_long_prompt(n_prompt, is_adaptive):
    """The prompt would wait for them."""
    bench, _ = bench_of(right, is_adaptive=is_adaptive)
    bench.add("a", PROMPT, max_tokens=400, temperature=0.0)
    while len(bench.tokens.get("a", [])) < 100:
        bench.step()
    late = [(7 * i) % 97 for i in range(n_prompt)]
    bench.add("late", late, max_tokens=4, temperature=0.0)
    bench.run()
    beside = [plan for plan in bench.runner.plans if len(plan.seq_slot) == 2 and plan.seq_tokens[1] > 10]
    long = [plan for plan in beside if n_prompt - plan.seq_start[1] > 128]
    assert len(long) == (12 if n_prompt > 128 else 0)
    assert not any(plan.seq_tokens[0] > 1 or plan.n_draft for plan in long)
    assert any(plan.seq_tokens[0] > 1 and plan.n_draft for plan in beside)
    assert bench.tokens["a"] == WANT[:400]
    assert bench.tokens["late"] == expected_tokens(late, 4, SamplingParams(temperature=0.0))


def test_the_runner_learns_how_often_drafts_come_and_what_rows_cost():
    told = []
    bench, _ = bench_of(wrong, row_ns=300_000)
    bench.core._speculation._tell_runner = lambda seconds, chances: told.append((seconds, chances))
    bench.add("a", PROMPT, max_tokens=60, temperature=0.0)
    bench.run()
    seconds, chances = told[-1]
    assert len(seconds) >= 64
    assert all(s > 0 for s in seconds)
    assert chances[0] < 0.6  # of a confidence of 0.9 that never came true
    assert chances[2] == 1.0  # nothing is known of those behind


def test_where_no_row_pays_none_is_computed_and_that_costs_no_token():
    bench, speculation = bench_of(wrong, row_ns=5_000_000, draft_ns=1)
    bench.add("a", PROMPT, max_tokens=300, temperature=0.0)
    bench.run()
    assert bench.tokens["a"] == WANT[:300]
    assert speculation.counts.n_draft_tokens < 90


def test_fewer_drafts_beside_more_sequences_as_the_person_says():
    bench, _ = bench_of(right, n=4, is_adaptive=False, n_tokens_by_batch=((1, 1, 4), (2, 2, 2), (3, 9, 0)))
    for i in range(3):
        bench.add(f"s{i}", PROMPT, max_tokens=20 + 10 * i, temperature=0.0)
    bench.run()
    numbers = {}
    for plan in bench.runner.plans:
        numbers.setdefault(len(plan.seq_slot), set()).add(plan.n_draft)
    assert max(numbers[3]) == 0 or numbers[3] <= {0, 2, 4}
    assert 4 in numbers[1]
    assert bench.tokens["s2"] == WANT[:40]


def test_confidences_that_are_no_numbers_are_counted_and_in_the_end_the_drafter_is_given_up(caplog):
    def broken(tokens, n):
        ids, chances = right(tokens, n)
        return ids, [math.nan] * len(chances)

    bench, speculation = bench_of(broken, is_adaptive=False)
    bench.add("a", PROMPT, max_tokens=200, temperature=0.0)
    bench.run()
    assert bench.tokens["a"] == WANT[:200]
    assert speculation.is_given_up
    assert bench.core.snapshot.speculation.n_failures >= 64
    assert not any(kinds(bench.runner)[80:])
    assert "no numbers" in caplog.text


def test_a_sequence_without_room_for_drafts_is_decoded_and_nobody_is_preempted_for_them():
    limits = make_limits(
        max_logits_rows=84, max_step_tokens=84, n_draft_max=5, draft_reach_tokens=5, n_pages=14, n_slots=2
    )
    runner = Timed(limits, drafter=right)
    bench = Bench(runner=runner, speculation=own(5, is_adaptive=False), max_draft_rows=20)
    for name in ("a", "b"):
        bench.add(name, PROMPT, max_tokens=20, temperature=0.0)
    bench.run()
    assert bench.tokens == {"a": WANT[:20], "b": WANT[:20]}
    assert bench.core.snapshot.n_total_preemptions == 0
