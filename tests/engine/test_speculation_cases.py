"""Speculation in cases by hand: drafters that fail, forms, bounded reasoning, and when it pays."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from engine_kit import Bench, LetterTokenizer
from msgspec.structs import replace
from speculation_kit import KnowingDrafter, adaptive, always

from tiercel.base.errors import EngineDead
from tiercel.engine.masks import fill_masks
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.structured import StructuredOutputsParams
from tiercel.sampling.budget_constraint import BudgetConstraint
from tiercel.sampling.constraint import MaskRows
from tiercel.sampling.grammars import Grammars
from tiercel.spec.drafters.guarded import GuardedDrafter
from tiercel.spec.drafters.interface import Proposal
from tiercel.testing.fake_runner import FakeRunner, expected_tokens, make_limits
from tiercel.text.thinking_budget import ReasoningMarkers, ThinkingBudget

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5]
WANT = expected_tokens(PROMPT, 30, GREEDY)


def bench_of(speculation, *, rows=20, compute_ns=0, **limits):
    limits = make_limits(max_logits_rows=64 + rows, max_step_tokens=64 + rows, **limits)
    runner = FakeRunner(limits, compute_ns=compute_ns)
    return Bench(runner=runner, speculation=speculation, max_draft_rows=rows)


def knowing(p_right=1.0):
    return KnowingDrafter({tuple(PROMPT): [WANT]}, p_right=p_right)


class Saying:
    """A drafter, and its sequences, that does as it is told."""

    def __init__(self, *, begin=None, extend=None, propose=None, end=None):
        self.calls = {"begin": begin, "extend": extend, "propose": propose, "end": end}
        self.n_begun = self.n_ended = 0

    def _do(self, name):
        call = self.calls[name]
        return call() if call is not None else None

    def begin(self, prompt_ids, *, shares):
        self._do("begin")
        self.n_begun += 1
        return self

    def extend(self, token_ids):
        self._do("extend")

    def propose(self, n_max):
        return self._do("propose")

    def end(self):
        self.n_ended += 1
        self._do("end")

    def check(self):
        pass

    def close(self):
        pass


def throw():
    raise ZeroDivisionError("a drafter's bug")


WRONG_GUESSES = [
    Proposal([97], [1.0]),
    Proposal([1 << 70], [1.0]),
    Proposal([-1], [1.0]),
    Proposal([True], [1.0]),
    Proposal(["a"], [1.0]),
    Proposal(np.array([1, 2]), [0.9, 0.8]),
    Proposal(None, None),
    Proposal(iter([1]), [1.0]),
    Proposal([1, 2], [1.0]),
    Proposal([1], [float("nan")]),
    Proposal([1], [0.0]),
    Proposal([1], [1.5]),
    Proposal([1], ["0.5"]),
    Proposal([1], [10**400]),
    Proposal([1, 2], [0.5, 0.6]),
    Proposal([], []),
    Proposal([1], [0.9], None),
    Proposal([1], [0.9], "4"),
    Proposal([1], [0.9], -1),
    Proposal([1], [0.9], float("nan")),
    7,
]
WRONGS = [{"begin": throw}, {"extend": throw}, {"propose": throw}, {"end": throw}] + [
    {"propose": lambda guess=guess: guess} for guess in WRONG_GUESSES
]


def fails(drafter, speculation, **options):
    """Play two requests with a drafter that fails, and return how often it was counted."""
    bench = bench_of(speculation, **options)
    bench.add("a", PROMPT, max_tokens=25, temperature=0.0)
    bench.add("b", PROMPT, max_tokens=25, temperature=0.0)
    bench.run()
    bench.assert_idle()
    assert bench.tokens == {"a": WANT[:25], "b": WANT[:25]}
    assert all(final.error is None for final in bench.finals.values())
    if isinstance(drafter, GuardedDrafter):
        flush(drafter)
        bench.step()  # as it wakes an engine with a thread to do
        drafter.check()
        inner = drafter.inner
    else:
        inner = drafter
    assert inner.n_ended == inner.n_begun
    return bench.core.snapshot.speculation.n_failures


def flush(drafter):
    done = threading.Event()
    drafter.put(done.set)
    assert done.wait(60.0)


@pytest.mark.parametrize("wrong", WRONGS)
def test_a_request_goes_on_without_a_drafter_that_fails(wrong, caplog):
    drafter = Saying(**wrong)
    assert fails(drafter, always(drafter)) == 2
    assert "drafter failed on a" in caplog.text


@pytest.mark.parametrize("wrong", WRONGS)
def test_and_so_it_does_where_guesses_are_only_looked_at(wrong):
    """Where drafting is decided by what it would bring, guesses are judged that are not computed."""
    drafter = Saying(**wrong)
    assert fails(drafter, adaptive(drafter, 5), compute_ns=2_000_000) == 2


@pytest.mark.parametrize("wrong", [*WRONGS, *({name: sys.exit} for name in ("begin", "extend", "propose", "end"))])
@pytest.mark.parametrize("is_adaptive", [False, True])
def test_and_so_it_does_where_the_drafter_has_a_thread_of_its_own(wrong, is_adaptive):
    drafter = GuardedDrafter(Saying(**wrong), waits_s=60.0, clock=lambda: 0.0)
    speculation = adaptive(drafter, 5) if is_adaptive else always(drafter)
    assert fails(drafter, speculation, compute_ns=2_000_000) == 2
    speculation.close()


def test_sequences_that_are_left_when_the_engine_ends_are_ended():
    drafter = Saying()
    bench = bench_of(always(drafter))
    bench.add("a", PROMPT, max_tokens=25, temperature=0.0)
    while not drafter.n_begun:
        bench.step()
    bench.runner.collect = throw
    bench.core.run_loop()
    assert isinstance(bench.finals["a"].error, EngineDead)
    assert drafter.n_ended == drafter.n_begun == 1


def test_more_proposed_than_asked_for_is_cut():
    speculation = always(Saying(propose=lambda: Proposal([5] * 60, [1.0] * 60)), n=3)
    bench = bench_of(speculation)
    bench.add("a", PROMPT, max_tokens=12, temperature=0.0)
    bench.run()
    assert bench.tokens["a"] == WANT[:12]
    assert speculation.counts.n_draft_tokens <= 3 * speculation.counts.n_drafts


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_inside_of_what_was_drafted_ends_there(max_tokens):
    bench = bench_of(always(knowing(), n=5))
    bench.add("a", PROMPT, max_tokens=max_tokens, temperature=0.0)
    bench.run()
    assert bench.tokens["a"] == WANT[:max_tokens]
    assert bench.finals["a"].finish_reason == "length"


@pytest.mark.parametrize("place", range(10))
def test_a_stop_token_inside_of_what_was_drafted_ends_there(place):
    bench = bench_of(always(knowing(), n=5))
    bench.add("a", PROMPT, max_tokens=25, temperature=0.0, stop_token_ids=[WANT[place]])
    bench.run()
    assert bench.tokens["a"] == WANT[: WANT.index(WANT[place]) + 1]
    assert bench.finals["a"].stop_reason == WANT[place]
    bench.assert_idle()


def test_a_chunk_of_a_prompt_is_as_long_as_without_drafts():
    """Draft rows come beside the budget of tokens."""
    counts = {}
    for rows in (0, 12):
        bench = bench_of(always(knowing(), n=12), rows=rows)
        bench.add("a", PROMPT, max_tokens=30, temperature=0.0)
        for _ in range(3):
            bench.step()
        seen = []
        submit = bench.runner.submit
        bench.runner.submit = lambda plan, seen=seen, submit=submit: (seen.append(plan), submit(plan))
        bench.add("b", range(40), max_tokens=1, temperature=0.0)
        bench.run()
        counts[rows] = [
            n
            for plan in seen
            for n, samples in zip(plan.seq_tokens.tolist(), plan.seq_samples.tolist(), strict=True)
            if not samples
        ]
    assert counts[0]
    assert counts[0][0] <= counts[12][0]
    assert len(counts[12]) <= len(counts[0])


def test_no_draft_takes_the_last_pages():
    """One sequence drafts, another grows: nobody is preempted who would not have been."""
    for speculation in (None, always(knowing(), n=12)):
        bench = bench_of(speculation, n_pages=16)
        for name in "abc":
            bench.add(name, PROMPT, max_tokens=14, temperature=0.0)
        bench.run()
        assert all(bench.tokens[name] == WANT[:14] for name in "abc")
        assert bench.scheduler.n_preemptions == 0


def test_a_model_that_takes_no_drafts_gets_none():
    speculation = always(knowing(), n=5)
    bench = bench_of(speculation, takes_drafts=False)
    bench.add("a", PROMPT, max_tokens=12, temperature=0.0)
    bench.run()
    assert bench.tokens["a"] == WANT[:12]
    assert speculation.counts.n_drafts == 0
    assert bench.core.snapshot.speculation is None


class Timed(FakeRunner):
    """A step takes 2 ms, and `slope` of it more for each further row; the clock goes on by `late_s` more."""

    slope = 0.1
    late_s = 0.0
    now_s = 0.0

    def __init__(self, limits):
        super().__init__(limits)
        self.plans = []

    def _run(self, plan):
        self.plans.append(plan)
        result = super()._run(plan)
        n_rows = sum(plan.seq_tokens.tolist())
        if result.seq_drafted is not None:
            n_rows = len(plan.seq_tokens) + sum(result.seq_drafted.tolist())
        took_s = 2e-3 * (1 + self.slope * (n_rows - 1))
        self.now_s += took_s + self.late_s
        return replace(result, compute_ns=int(1e9 * took_s))


def play_timed(slope, p_right, n_tokens=200, late_s=0.0):
    limits = make_limits(max_logits_rows=96, max_step_tokens=96, max_len_tokens=1024, n_pages=400)
    runner = Timed(limits)
    runner.slope, runner.late_s = slope, late_s
    answers = {tuple(PROMPT): [expected_tokens(PROMPT, n_tokens + 20, GREEDY)]}
    speculation = adaptive(KnowingDrafter(answers, p_right=p_right), 8, clock=lambda: runner.now_s)
    bench = Bench(runner=runner, speculation=speculation, max_draft_rows=24)
    bench.add("a", PROMPT, max_tokens=n_tokens, temperature=0.0)
    bench.run()
    assert bench.tokens["a"] == answers[tuple(PROMPT)][0][:n_tokens]
    return speculation, runner


def test_it_drafts_where_that_pays():
    speculation, runner = play_timed(0.05, 1.0)
    assert speculation.counts.n_accepted_tokens > 100
    assert runner.n_steps_run < 110


@pytest.mark.parametrize(("slope", "p_right"), [(0.05, 0.0), (1.0, 0.3), (3.0, 0.8)])
def test_it_leaves_alone_what_does_not_pay(slope, p_right):
    """Guesses that are wrong, or rows that cost as much as steps."""
    speculation, _ = play_timed(slope, p_right)
    assert speculation.counts.n_draft_tokens < 100  # of 1,600: what it takes to learn that


def test_a_request_whose_guesses_are_wrong_goes_without_beside_one_whose_come():
    class Half(KnowingDrafter):
        def begin(self, prompt_ids, *, shares):
            if prompt_ids == PROMPT:
                return super().begin(prompt_ids, shares=shares)
            self.n_begun += 1
            return Wrong(self)

    class Wrong:
        def __init__(self, drafter):
            self.drafter, self.n = drafter, 0

        def extend(self, token_ids):
            self.n += len(token_ids)

        def propose(self, n_max):
            came = (other_answer[self.n : self.n + n_max] + [0] * n_max)[:n_max]
            return Proposal([(i + 1) % 97 for i in came], [0.9] * n_max, 12)

        def end(self):
            self.drafter.n_ended += 1

    other = [2, 7, 1, 8]
    other_answer = expected_tokens(other, 320, GREEDY)
    runner = Timed(make_limits(max_logits_rows=96, max_step_tokens=96, max_len_tokens=1024, n_pages=400))
    runner.slope = 0.05
    answers = {tuple(PROMPT): [expected_tokens(PROMPT, 820, GREEDY)]}
    speculation = adaptive(Half(answers, p_right=1.0), 8, clock=lambda: runner.now_s)
    bench = Bench(runner=runner, speculation=speculation, max_draft_rows=24)
    bench.add("a", PROMPT, max_tokens=800, temperature=0.0)
    bench.add("b", other, max_tokens=300, temperature=0.0)
    bench.run()
    assert (bench.tokens["a"], bench.tokens["b"]) == (answers[tuple(PROMPT)][0][:800], other_answer[:300])
    counts = speculation.counts
    assert counts.n_accepted_tokens > 0.8 * counts.n_draft_tokens > 100  # a's
    assert counts.n_passed_over > 100  # of 300 steps of b's
    assert bench.core.snapshot.speculation.n_passed_over == counts.n_passed_over


def test_it_gives_up_where_the_clock_says_that_waiting_costs_more_than_it_brings():
    """Whatever its estimates say: right drafts, cheap rows, and an engine that takes twenty milliseconds a step."""
    speculation, runner = play_timed(0.05, 1.0, n_tokens=900, late_s=0.02)
    assert speculation.counts.n_drafts < 100  # three tries of 24
    assert runner.n_steps_run > 450


@pytest.mark.parametrize(("n_prompt", "n_long"), [(300, 3), (120, 0)])
@pytest.mark.parametrize("is_adaptive", [True, False])
def test_no_drafts_are_computed_beside_a_long_prompt(n_prompt, n_long, is_adaptive):
    runner = Timed(make_limits(max_logits_rows=96, max_step_tokens=96, max_len_tokens=1024, n_pages=400))
    runner.slope = 0.01
    want, late = expected_tokens(PROMPT, 320, GREEDY), [(7 * i) % 97 for i in range(n_prompt)]
    drafter = KnowingDrafter({tuple(PROMPT): [want]}, p_right=1.0)
    speculation = adaptive(drafter, 8, clock=lambda: runner.now_s) if is_adaptive else always(drafter, 8)
    bench = Bench(runner=runner, speculation=speculation, max_draft_rows=24, max_num_batched_tokens=64)
    bench.add("a", PROMPT, max_tokens=300, temperature=0.0)
    while len(bench.tokens.get("a", [])) < 100:
        bench.step()
    assert speculation.counts.n_accepted_tokens > 20
    n_before = len(runner.plans)
    bench.add("late", late, max_tokens=4, temperature=0.0)
    bench.run()
    beside = [plan for plan in runner.plans[n_before:] if len(plan.seq_slot) == 2 and max(plan.seq_tokens[1:]) > 10]
    assert sum(int(plan.seq_tokens[1]) for plan in beside) >= n_prompt - 16
    kinds = [(n_prompt - int(plan.seq_start[1]) > 128, plan.drafts is not None) for plan in beside]
    assert sum(is_long for is_long, _ in kinds) == n_long
    assert not any(drafts for is_long, drafts in kinds if is_long)
    assert any(drafts for is_long, drafts in kinds if not is_long)
    assert bench.tokens == {"a": want[:300], "late": expected_tokens(late, 4, GREEDY)}


class Gapped(Timed):
    """A step that is sent while none is under way waits for a tenth of a step first."""

    def submit(self, plan):
        if not self._waiting and not self._done:
            self.now_s += 2e-4
        super().submit(plan)


@pytest.mark.parametrize("n_streams", [1, 3])
@pytest.mark.parametrize("slope", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("p_right", [0.0, 0.3, 0.7, 1.0])
def test_drafting_never_costs_more_than_a_hundredth_and_what_it_begins_with(slope, p_right, n_streams):
    """However often drafts are right and whatever rows cost: that much may be lost to see whether they pay."""
    took_s = {}
    for is_drafting in (False, True):
        runner = Gapped(make_limits(max_logits_rows=96, max_step_tokens=96, max_len_tokens=512, n_pages=600))
        runner.slope = slope
        prompts = [[*PROMPT, i] for i in range(n_streams)]
        answers = {tuple(prompt): [expected_tokens(prompt, 320, GREEDY)] for prompt in prompts}
        speculation = adaptive(KnowingDrafter(answers, p_right=p_right), 8, clock=lambda runner=runner: runner.now_s)
        speculation.pause(is_paused=not is_drafting)
        bench = Bench(runner=runner, speculation=speculation, max_draft_rows=24)
        for i, prompt in enumerate(prompts):
            bench.add(str(i), prompt, max_tokens=300, temperature=0.0)
        bench.run()
        assert all(bench.tokens[str(i)] == answers[tuple(prompt)][0][:300] for i, prompt in enumerate(prompts))
        took_s[is_drafting] = runner.now_s
    step_s = 2e-3 * (1 + slope * (n_streams - 1))
    assert took_s[True] < 1.01 * took_s[False] + 8 * step_s
    if p_right == 1.0 and slope < 0.1:
        assert took_s[True] < 0.7 * took_s[False]


def test_positions_are_told_before_anything_was_drafted():
    bench = bench_of(always(knowing(), n=5))
    assert bench.core.snapshot.speculation.n_accepted_by_position == [0] * 5


def test_paused_speculation_looks_at_nothing():
    drafter = knowing()
    speculation = always(drafter, n=5)
    bench = bench_of(speculation)
    speculation.pause(is_paused=True)
    bench.add("a", PROMPT, max_tokens=9, temperature=0.0)
    bench.run()
    assert bench.tokens["a"] == WANT[:9]
    assert drafter.n_begun == 0
    speculation.pause(is_paused=False)
    bench.add("b", PROMPT, max_tokens=9, temperature=0.0)
    bench.run()
    assert bench.tokens["b"] == WANT[:9]
    assert speculation.counts.n_accepted_tokens > 0


FORMS = [{"regex": "[a-c]+x?"}, {"choice": ["one", "other"]}, {"regex": "[ -~]{2,9}"}, {"regex": "(ab|cd){1,6}"}]


class Letters(LetterTokenizer):
    special_tokens = {}  # noqa: RUF012  a fake's


@pytest.fixture(scope="module")
def compiled():
    grammars = Grammars(Letters(), 97, [])
    return [grammars.compile(StructuredOutputsParams(**form)) for form in FORMS]


def formed(compiled, form, speculation, seed, state_bytes=0):
    bench = bench_of(speculation, state_bytes=state_bytes)
    constraint = compiled[form].start(stop_ids=[], ignores_eos=False, thinking=None)
    bench.add("a", PROMPT, max_tokens=12, seed=seed, constraint=constraint)
    bench.run()
    bench.assert_idle()
    return bench.tokens["a"], bench.finals["a"].finish_reason


@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("state_bytes", [0, 100])
def test_a_form_gives_the_tokens_it_gives_without_drafts(compiled, form, seed, is_ahead, state_bytes):
    want = formed(compiled, form, None, seed)
    for p_right in (0.0, 0.6, 1.0):
        drafter = KnowingDrafter({tuple(PROMPT): [want[0], want[0] + [50, 51, 52]]}, p_right=p_right, seed=seed)
        speculation = always(drafter, n=5, is_ahead=is_ahead)
        assert formed(compiled, form, speculation, seed, state_bytes) == want
    if len(want[0]) > 4:
        assert speculation.counts.n_accepted_tokens > 0


class Unruly(KnowingDrafter):
    """Knows what comes, and says it in tuples, or in one list that it writes over when it is told more."""

    def __init__(self, *args, says, **options):
        super().__init__(*args, **options)
        self.says, self.ids = says, []

    def begin(self, prompt_ids, *, shares):
        sequence = super().begin(prompt_ids, shares=shares)
        propose, extend = sequence.propose, sequence.extend

        def say(n_max):
            guess = propose(n_max)
            if guess is None or self.says == "tuples":
                return guess and replace(
                    guess, token_ids=tuple(guess.token_ids), probabilities=tuple(guess.probabilities)
                )
            self.ids[:] = guess.token_ids
            return replace(guess, token_ids=self.ids)

        def overwrite(token_ids):
            self.ids[:] = [1 << 40] * len(self.ids)
            extend(token_ids)

        sequence.propose, sequence.extend = say, overwrite
        return sequence


@pytest.mark.parametrize("says", ["tuples", "one list"])
@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_whatever_objects_a_guess_is_made_of_a_form_is_kept(compiled, says, is_guarded, is_ahead):
    for form in range(len(FORMS)):
        want = formed(compiled, form, None, seed=1)
        drafter = inner = Unruly({tuple(PROMPT): [want[0]]}, p_right=0.9, says=says)
        if is_guarded:
            drafter = GuardedDrafter(inner, waits_s=60.0, clock=lambda: 0.0)
        speculation = always(drafter, n=5, is_ahead=is_ahead)
        assert formed(compiled, form, speculation, seed=1) == want
        assert speculation.counts.n_failures == 0
        if len(want[0]) > 4:
            assert speculation.counts.n_accepted_tokens > 0
        speculation.close()


@pytest.mark.parametrize("foretold", [(5, [1, 3, 4]), (5, []), (7, [2]), (5, [50, 1, 1])])
def test_rows_behind_drafts_that_a_form_does_not_know_allow_nothing(compiled, foretold):
    """If the runner took them for right all the same, the request ends and does not leave its form."""
    rows = MaskRows(4, 97)
    rows.words[:] = 0xFFFFFFFF  # of a step before
    constraint = compiled[0].start(stop_ids=[], ignores_eos=False, thinking=None)
    sequence = SimpleNamespace(token_ids=[*PROMPT, ord("a") - 32], constraint=constraint)
    constraint.accept(sequence.token_ids[-1])
    fill_masks(rows.rows, sequence, foretold)
    assert rows.words[0].any()
    assert not rows.words[1:].any()


MARKERS = ReasoningMarkers((chr(33 + 60),), (chr(33 + 61),), chr(33 + 70) + chr(33 + 61))


def bounded(speculation, n_max, state_bytes=0):
    tokenizer = Letters()
    budget = ThinkingBudget.start(
        MARKERS, n_max, tokenizer.encode(MARKERS.begins[0]), encode=tokenizer.encode, token_bytes=tokenizer.token_bytes
    )
    bench = bench_of(speculation, state_bytes=state_bytes)
    bench.add("a", PROMPT, max_tokens=14, temperature=0.0, constraint=BudgetConstraint(budget))
    bench.run()
    return bench.tokens["a"]


@pytest.mark.parametrize("n_max", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("state_bytes", [0, 100])
def test_reasoning_ends_where_it_ends_without_drafts(n_max, state_bytes):
    """Inside of what was drafted: a draft that goes on beyond the bound is refused."""
    want = bounded(None, n_max)
    assert want != WANT[:14]
    for p_right in (0.0, 0.7, 1.0):
        for answer in (want, WANT):
            speculation = always(KnowingDrafter({tuple(PROMPT): [answer]}, p_right=p_right), n=6)
            assert bounded(speculation, n_max, state_bytes) == want


class Stalling:
    """A plug-in that is called on a thread of its own, and never answers `call`."""

    def __init__(self, call):
        self.call = call
        self.is_reached, self.may_go_on = threading.Event(), threading.Event()

    def _wait(self, name):
        if name == self.call:
            self.is_reached.set()
            self.may_go_on.wait()

    def begin(self, prompt_ids, *, shares):
        self._wait("begin")
        return self

    def extend(self, token_ids):
        self._wait("extend")

    def propose(self, n_max):
        self._wait("propose")

    def end(self):
        self._wait("end")

    def check(self):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("call", ["begin", "extend", "propose"])
def test_a_plug_in_that_never_answers_is_given_up_and_the_requests_go_on(call, caplog):
    inner, now = Stalling(call), [0.0]
    drafter = GuardedDrafter(inner, waits_s=0.0, stalls_s=2.0, clock=lambda: now[0])
    speculation = always(drafter, n=4)
    bench = bench_of(speculation)
    bench.add("a", PROMPT, max_tokens=25, temperature=0.0)
    for _ in range(6):
        bench.step()
    assert inner.is_reached.wait(60.0)  # the clock that decides is the test's
    now[0] = 3.0
    bench.add("b", [*PROMPT, 9], max_tokens=10, temperature=0.0)
    bench.run()
    bench.assert_idle()
    assert bench.tokens == {"a": WANT[:25], "b": expected_tokens([*PROMPT, 9], 10, GREEDY)}
    assert speculation.counts.n_failures == 2
    assert "no answer for 3.0 s" in caplog.text
    inner.may_go_on.set()
