"""Speculation as the engine sees it: asks a drafter, decides what is worth computing, and learns from what came of it.

Owner: the engine's thread. Knows neither runner nor scheduler; it writes `foretold`, `foretold_from` and
`n_drafts_wanted` of running sequences, which the scheduler reads.

Two states. While it does not `wait`, steps are planned ahead as without speculation, and guesses are only compared with
what comes: that costs no step anything, and tells what drafting would bring. When it would bring more than waiting
for each step takes, it waits: every guess is then made of the newest token, and computed. Back when it no longer
does, or when the clock says that the tokens came slower than plain steps would have made them; then for a while,
longer each time. A drafter that fails is no longer asked for that sequence, and the request goes on without it. What
it proposes is copied and looked at before anything else sees it: no object of a drafter's goes further than here.

A drafter whose guesses take time (`spec.drafters.interface.BatchDrafter`) is asked only while it waits, for all
sequences at once. What it would bring cannot be seen without paying for it: so it waits from the first step on, and
what the clock says decides alone.

Invariants (`check`): it follows the sequences that began and have not ended; what is foretold of one agrees with its
known tokens; acceptance by position does not grow.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Final, cast

import msgspec

from tiercel.engine.request import State
from tiercel.engine.stats import SpeculationCounts
from tiercel.spec.budget import N_PROMPT_TOKENS_ALONE, Acceptance, StepCosts, choose, n_for_batch
from tiercel.spec.drafters.guarded import GuardedDrafter, GuardedSequence
from tiercel.spec.drafters.interface import BatchDrafter, Drafter, Proposal, Sampling, SequenceDrafter
from tiercel.spec.settings import SpeculationSettings

if TYPE_CHECKING:
    from tiercel.engine.request import Sequence
    from tiercel.engine.scheduler import PlannedStep
    from tiercel.protocol.step import StepResult

_log = logging.getLogger(__name__)

# What a round of the engine takes that a step under way would have hidden, until it was measured.
_WAIT_S: Final = 2e-4
_ENTERS, _LEAVES = 1.05, 1.0  # gain at which it begins to wait, and below which it no longer does
_NEWEST: Final = 0.1
_LEAST: Final = 0.03  # a draft that comes so seldom costs more than it brings, however cheap a row is
_N_ROWS_FIRST: Final = 4
_N_ROWS_MAX: Final = 64  # drafts of a step that are thought about; no more have room (`SpeculationSettings.n_rows_max`)
# What waiting may lose, by the clock, against plain steps: a hundredth of the time of those. It begins with half of
# what it may save up, in steps; begins to wait with so many; and ends when nothing is left. What it earns is credit. It
# is lent a stake again after so many steps, twice as many each time, until it has earned all that it may save.
_MAY_LOSE: Final = 0.01
_N_CREDIT: Final = 8
_N_CREDIT_OF_BATCH: Final = 16  # each guess costs a part of a step
_N_STAKE: Final = 2
_N_HELD, _N_HELD_MAX = 96, 6144
_N_UNMEASURED: Final = 4  # of so many plain steps one is measured, as each takes time from the next
# Steps between two looks while nothing is waited for, beside one for each sequence: at first, and at most, when looks
# bring nothing. Each takes a core from the kernels, and walks over memory that is not theirs.
_N_BETWEEN, _N_BETWEEN_MAX = 2, 24


class _Followed(msgspec.Struct):
    """One sequence. `n_seen` of its tokens are known to the drafter, `n_right` of its guess have come."""

    drafter: SequenceDrafter
    acceptance: Acceptance
    n_seen: int
    guess: Proposal | None = None
    n_right: int = 0
    is_stale: bool = True  # tokens came since it was asked


class Speculation:
    """See the module's docstring."""

    def __init__(
        self,
        drafter: Drafter,
        settings: SpeculationSettings,
        *,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.counts = SpeculationCounts(n_accepted_by_position=[0] * settings.n_tokens_max)
        self._drafter = drafter
        self._batch = cast("BatchDrafter", drafter) if hasattr(drafter, "propose_all") else None
        self._guarded = drafter if isinstance(drafter, GuardedDrafter) else None
        self._settings = settings
        self._vocab_size = vocab_size
        self._costs = StepCosts()
        self._acceptance = Acceptance()
        self._followed: dict[Sequence, _Followed] = {}
        self._failed: set[Sequence] = set()
        self._told = self.counts.copy()
        self._is_paused = False
        self._gain = 1.0
        self._is_waiting = False
        self._clock = clock
        self._collected_s: float | None = None  # when the step before was
        self._wait_s = _WAIT_S
        self._n_credit = _N_CREDIT if self._batch is None else _N_CREDIT_OF_BATCH
        self._n_plain = 0  # steps without drafts since one with them
        self._credit_s: float | None = None  # what waiting may lose; None: no step was measured
        self._is_reading = False  # a text, which pays over all of its answer
        self._n_between = _N_BETWEEN
        self._n_unseen = 0  # steps since guesses were looked at
        self._n_held, self._hold = 0, _N_HELD  # steps yet to come without, and those after the next failure

    n_draft: Final = 0  # what a runner is to draft by itself

    @property
    def waits(self) -> bool:
        """Whether the next step is to be planned only when the one before was seen."""
        if self._is_paused:
            return False
        if not self._settings.is_adaptive:
            return not self._settings.is_ahead
        return self._is_waiting

    def pause(self, *, is_paused: bool) -> None:
        """Look at no sequence, and draft none, until told otherwise: for benchmarks, while nothing runs."""
        self._is_paused = is_paused

    def set_wake(self, wake: Callable[[], None]) -> None:
        """Name what has `told` asked again, from any thread, when the counts changed while nothing ran."""
        if self._guarded is not None:
            self._guarded.wake = wake

    def told(self) -> SpeculationCounts:
        """Give a copy of the counts, the same one until they change."""
        self._take_late_errors()
        self.counts.is_drafting = self.waits
        if self._told.changed_by(self.counts):
            self._told = self.counts.copy()
        return self._told

    def prepare(self, running: "Iterable[Sequence]", n_begun: int = 0) -> None:
        """Say which drafts the next step should compute. `n_begun`: tokens of a prompt that it may begin."""
        ready: list[tuple[Sequence, _Followed]] = []
        n_rows = 0
        for sequence in running:
            sequence.n_drafts_wanted = 0
            if self._is_paused:
                continue
            n_missing = sequence.n_total - sequence.n_computed
            if n_missing != 1 or sequence.n_total >= sequence.max_total_tokens:
                n_begun += n_missing
                continue
            n_rows += 1
            followed = self._follow(sequence)
            if followed is not None:
                ready.append((sequence, followed))
        if n_begun > N_PROMPT_TOKENS_ALONE:
            return
        if self._batch is not None:
            self._prepare_batch(ready, n_rows)
            return
        # While nothing is waited for, less than one sequence a step is looked at: a look takes time from steps.
        self._n_unseen += 1
        n_between = min(self._n_held, 16) + self._n_between if self._settings.is_adaptive else 0
        if not ready or not (self.waits or self._n_unseen >= len(ready) + n_between):
            return
        self._n_unseen = 0
        begun_s = self._clock()
        for sequence, followed in ready:
            self._tell_tokens(sequence, followed)
        ready = [(sequence, followed) for sequence, followed in ready if sequence in self._followed]
        if not ready or not (self.waits or any(followed.is_stale for _, followed in ready)):
            return
        n_max = n_for_batch(self._settings.n_tokens_by_batch, n_rows, self._settings.n_tokens_max)
        stale = [(sequence, followed) for sequence, followed in ready if followed.is_stale]
        if self._guarded is not None:
            drafters = [cast("GuardedSequence", followed.drafter) for _, followed in stale]
            self._guarded.ask_all(drafters, self._n_asked)
        for sequence, followed in stale:
            self._guess(sequence, followed)
        self.counts.drafter_s += max(self._clock() - begun_s, 0.0)
        self._want(ready, n_rows, n_max)

    def _prepare_batch(self, ready: "list[tuple[Sequence, _Followed]]", n_rows: int) -> None:
        """Ask for guesses of all sequences at once, if it waits and all that was computed is seen."""
        assert self._batch is not None
        if not ready:
            return
        if self._settings.is_adaptive:
            self._is_waiting = self._is_waiting or self._may_wait(n_rows)
            if not self._is_waiting:
                return
        ready = [(s, followed) for s, followed in ready if s.n_total == len(s.token_ids)]
        n_max = n_for_batch(self._settings.n_tokens_by_batch, n_rows, self._settings.n_tokens_max)
        if not ready or not n_max:
            return
        begun_s = self._clock()
        for sequence, followed in ready:
            self._tell_tokens(sequence, followed)
        ready = [(s, followed) for s, followed in ready if s in self._followed]
        stale = [(s, followed) for s, followed in ready if followed.is_stale]
        asked = [(followed.drafter, max(min(n_max, s.max_total_tokens - s.n_total - 1), 0)) for s, followed in stale]
        token_s = row_s = 0.0
        if self._settings.is_adaptive:
            plain_s = self._costs.seconds(n_rows)
            token_s, row_s = plain_s / n_rows, max(self._costs.seconds(2 * n_rows) - plain_s, 0.0) / n_rows
        answers: Many[Proposal | Exception | None]
        try:
            answers = self._batch.propose_all(asked, token_s=token_s, row_s=row_s) if asked else []
        except Exception as error:  # noqa: BLE001  a drafter's boundary
            answers = [error] * len(asked)
        for (sequence, followed), answer in zip(stale, answers, strict=True):
            self._take_guess(sequence, followed, answer)
        self._is_reading = any(answer is None for answer in answers)
        self.counts.drafter_s += max(self._clock() - begun_s, 0.0)
        self._want([(s, followed) for s, followed in ready if s in self._followed], n_rows, n_max)

    def _want(self, ready: "list[tuple[Sequence, _Followed]]", n_rows: int, n_max: int) -> None:
        """Say how much of what is foretold is to be computed."""
        if not self._settings.is_adaptive:
            for sequence, _ in ready:
                left = sequence.foretold_from + len(sequence.foretold) - sequence.n_total
                sequence.n_drafts_wanted = min(max(left, 0), n_max)
        elif self._costs.is_known and n_max:
            self._choose(ready, n_rows, n_max)

    def _choose(self, ready: "list[tuple[Sequence, _Followed]]", n_rows: int, n_max: int) -> None:
        chances = [self._chances(sequence, followed, n_max) for sequence, followed in ready]
        numbers, gain = choose(
            chances,
            self._costs.seconds,
            n_rows=n_rows,
            # Steps of many rows may cost more than is thought: no more than twice what was measured.
            n_drafts_max=min(n_max * len(ready), max(2 * self._costs.n_rows_most - n_rows, _N_ROWS_FIRST), _N_ROWS_MAX),
            wait_s=0.0 if self._batch is not None else self._wait_s,  # guesses that took time are paid for
        )
        if self._batch is None:
            self._decide(gain, n_rows)
        if self._is_waiting:
            for (sequence, _), n in zip(ready, numbers, strict=True):
                if sequence.n_total == len(sequence.token_ids):  # what was planned ahead is seen first
                    sequence.n_drafts_wanted = n
                    self.counts.n_passed_over += not n and bool(sequence.foretold)

    def _decide(self, gain: float, n_rows: int) -> None:
        """Decide whether to wait, by what drafts would bring."""
        if gain == 1.0 and self._is_waiting:  # a plain step, but it was waited for
            cost = self._costs.seconds(n_rows)
            gain = cost / (cost + self._wait_s)
        self._n_between = _N_BETWEEN if gain > 1.0 else min(self._n_between + 2, _N_BETWEEN_MAX)
        self._gain += _NEWEST * (gain - self._gain)
        was_waiting = self._is_waiting
        if was_waiting:
            self._is_waiting = self._gain > _LEAVES
        else:
            self._is_waiting = self._gain > _ENTERS and self._may_wait(n_rows)

    def _may_wait(self, n_rows: int) -> bool:
        """Whether so much may be lost as it takes to see whether waiting pays."""
        if self._n_held or self._credit_s is None:
            return False
        return self._credit_s >= _N_STAKE * self._costs.seconds(n_rows)

    def _chances(self, sequence: "Sequence", followed: _Followed, n_max: int) -> list[float]:
        """Estimate for each draft behind the known tokens that it and all before it come."""
        guess = followed.guess
        if guess is None:
            return []
        rate = followed.acceptance.rate(guess.n_matched)
        n_past = len(sequence.token_ids) - sequence.foretold_from
        n_max = min(n_max, sequence.max_total_tokens - len(sequence.token_ids) - 1)
        before = guess.probabilities[n_past - 1] if n_past else 1.0
        return [
            chance
            for i, p in enumerate(guess.probabilities[n_past : n_past + max(n_max, 0)])
            if (chance := p / before * rate ** (i + 1)) > _LEAST
        ]

    def _follow(self, sequence: "Sequence") -> _Followed | None:
        followed = self._followed.get(sequence)
        if followed is None and sequence not in self._failed and sequence.pools is None:
            known = sequence.token_ids
            try:
                followed = _Followed(self._begin(sequence), Acceptance(self._acceptance), len(known))
                self._followed[sequence] = followed
                if len(known) > sequence.n_prompt:
                    followed.drafter.extend(known[sequence.n_prompt :])
            except Exception as error:  # noqa: BLE001  a drafter's boundary: the request goes on without it
                self._fail(sequence, error)
                return None
            self._n_between = _N_BETWEEN
        return followed

    def _begin(self, sequence: "Sequence") -> SequenceDrafter:
        prompt_ids, shares = sequence.token_ids[: sequence.n_prompt], not sequence.is_private
        if self._batch is None:
            return self._drafter.begin(prompt_ids, shares=shares)
        sampling = Sampling(sequence.params, sequence.seed, sequence.stop_ids)
        return self._batch.begin_sampled(prompt_ids, sampling, shares=shares)

    @property
    def _n_asked(self) -> int:
        """Tokens of a guess that are of use: those that may be drafted, and one that may come before they are."""
        return self._settings.n_tokens_max + 1

    def _guess(self, sequence: "Sequence", followed: _Followed) -> None:
        """Ask the drafter what follows the known tokens."""
        answer: Proposal | Exception | None
        try:
            answer = followed.drafter.propose(self._n_asked)
        except Exception as error:  # noqa: BLE001  a drafter's boundary
            answer = error
        self._take_guess(sequence, followed, answer)

    def _take_guess(self, sequence: "Sequence", followed: _Followed, answer: Proposal | Exception | None) -> None:
        followed.is_stale = False
        self._judge(followed)
        guess: Proposal | None = None
        try:
            if isinstance(answer, Exception):
                self._fail(sequence, answer)
            elif answer is not None:
                guess = self._checked(answer)
        except Exception as error:  # noqa: BLE001  a drafter's boundary
            self._fail(sequence, error)
        followed.guess, followed.n_right = guess, 0
        sequence.foretold = guess.token_ids if guess is not None else []
        sequence.foretold_from = len(sequence.token_ids)

    def _checked(self, answer: Proposal) -> Proposal:
        """Copy a guess that can be believed to be one."""
        guess = Proposal.plain(answer, self._n_asked)
        highest = max(guess.token_ids)
        if highest >= self._vocab_size:
            raise ValueError(f"token {highest} was proposed; ids from 0 to {self._vocab_size - 1} are needed")
        return guess

    def collected(self, step: "PlannedStep", result: "StepResult") -> None:
        """Take note of what a step computed and accepted, before its tokens are taken."""
        drafted = result.seq_drafted.tolist() if result.seq_drafted is not None else None
        n_rows = n_most = sum(step.counts)
        if drafted is not None:
            n_rows -= sum(step.counts[place] - 1 - drafted[place] for place in step.foretold)
        if self._is_paused:
            self._collected_s = None
            return
        if not step.admitted and n_most == len(step.counts) + step.n_draft_rows and all(step.samples):
            compute_s = result.compute_ns * 1e-9
            self._n_plain = 0 if self._is_waiting or drafted is not None else self._n_plain + 1
            if self._n_plain % _N_UNMEASURED == 0 or not self._costs.is_known:
                self._costs.observe(n_rows, compute_s)
            if self._is_waiting and self._collected_s is not None and self._costs.is_known:
                self._weigh(len(step.counts), n_rows, len(result.row_seq), compute_s)
            else:
                self._rest(compute_s)
        self._collected_s = self._clock()
        if drafted is None:
            return
        counts, n_emitted = self.counts, dict.fromkeys(step.foretold, 0)
        counts.note_step(sum(drafted), result.compute_ns)
        for place in result.row_seq.tolist():
            if place in n_emitted:
                n_emitted[place] += 1
        for place, n in n_emitted.items():
            if not drafted[place] or step.sequences[place].state is State.FINISHED:
                continue
            counts.n_drafts += 1
            counts.n_draft_tokens += drafted[place]
            counts.n_accepted_tokens += n - 1
            for position in range(n - 1):
                counts.n_accepted_by_position[position] += 1

    def _weigh(self, n_sequences: int, n_rows: int, n_tokens: int, compute_s: float) -> None:
        """See whether waiting is worth it: by the clock, against what plain steps compute for as many tokens."""
        assert self._collected_s is not None
        plain_s = self._costs.seconds(n_sequences)
        most_s = plain_s * self._n_credit
        if self._credit_s is None:
            self._credit_s = most_s / 2.0
        # All that is decoded was running when the step before was collected: nothing else was waited for. A step that
        # was under way when waiting began comes sooner than it computes.
        took_s = compute_s if self._is_reading else max(self._clock() - self._collected_s, compute_s)
        late_s = took_s - compute_s
        self._wait_s += _NEWEST * (min(late_s, compute_s) - self._wait_s)
        # One slow step is somebody else's work on this machine.
        spent_s = min(compute_s, 2.0 * self._costs.seconds(n_rows)) + min(late_s, 3.0 * compute_s)
        self._credit_s += n_tokens / n_sequences * plain_s - spent_s
        if self._credit_s < 0.0:
            self._is_waiting = False
            self.counts.n_switched_off += 1
            _log.info("speculation: off for %d steps, as it brought less than it took", self._hold)
            self._credit_s = _N_STAKE * plain_s
            self._n_held, self._hold = self._hold, min(2 * self._hold, _N_HELD_MAX)
        elif self._credit_s >= most_s:
            self._credit_s, self._hold = most_s, _N_HELD

    def _rest(self, compute_s: float) -> None:
        """Save up by a step that did not wait."""
        self._n_held = max(self._n_held - 1, 0)
        most_s = compute_s * self._n_credit
        self._credit_s = min(most_s / 2.0 if self._credit_s is None else self._credit_s + _MAY_LOSE * compute_s, most_s)

    def _tell_tokens(self, sequence: "Sequence", followed: _Followed) -> None:
        """Tell a drafter what came since it was told last, and see how much of its guess has."""
        new = sequence.token_ids[followed.n_seen :]
        if not new:
            return
        followed.n_seen = len(sequence.token_ids)
        followed.is_stale = True
        self._compare(followed, new)
        try:
            followed.drafter.extend(new)
        except Exception as error:  # noqa: BLE001  a drafter's boundary
            self._fail(sequence, error)

    def _compare(self, followed: _Followed, new: Many[int]) -> None:
        """See how much of a guess has come."""
        for token in new:
            guess, n = followed.guess, followed.n_right
            if guess is None:
                return
            if n == len(guess.token_ids) or guess.token_ids[n] != token:
                self._judge(followed, is_wrong=n < len(guess.token_ids))
                return
            followed.n_right += 1

    def _judge(self, followed: _Followed, *, is_wrong: bool = False) -> None:
        """Learn from a guess, and drop it."""
        guess, n_right = followed.guess, followed.n_right
        followed.guess = None
        if guess is None or not (n_right or is_wrong):
            return
        # What the drafter said of each tested token, given those before it.
        expected, before = 0.0, 1.0
        for p in guess.probabilities[: n_right + is_wrong]:
            expected += p / before
            before = p
        followed.acceptance.observe(guess.n_matched, n_right, expected)

    def end(self, sequence: "Sequence") -> None:
        """Forget a sequence, whatever became of it."""
        followed = self._followed.get(sequence)
        if followed is not None:
            self._tell_tokens(sequence, followed)
        self._failed.discard(sequence)
        followed = self._followed.pop(sequence, None)
        if followed is not None:
            try:
                followed.drafter.end()
            except Exception as error:  # noqa: BLE001  a drafter's boundary
                self._tell(sequence.sequence_id, error)

    def _fail(self, sequence: "Sequence", error: Exception) -> None:
        """Go on without a drafter that failed, which may still give back what it holds for the sequence."""
        self._tell(sequence.sequence_id, error)
        sequence.foretold, sequence.n_drafts_wanted = [], 0
        followed = self._followed.pop(sequence, None)
        self._failed.add(sequence)
        if followed is not None:
            with contextlib.suppress(Exception):  # it has failed already, and is counted
                followed.drafter.end()

    def _take_late_errors(self) -> None:
        for error in self._guarded.take_errors() if self._guarded is not None else ():
            self._tell("a sequence that has ended", error)

    def _tell(self, whom: str, error: Exception) -> None:
        self.counts.n_failures += 1
        _log.warning("speculation: the drafter failed on %s, which goes on without: %r", whom, error)

    def close(self) -> None:
        """Give back what the drafter holds."""
        for followed in self._followed.values():
            with contextlib.suppress(Exception):
                followed.drafter.end()
        self._followed.clear()
        try:
            self._drafter.close()
        except Exception as error:  # noqa: BLE001  a drafter's boundary
            _log.warning("speculation: the drafter failed when it was closed: %r", error)
        self._take_late_errors()

    def check(self) -> None:
        """Raise AssertionError when an invariant of the module's docstring does not hold."""
        self._drafter.check()
        self._costs.check()
        for sequence, followed in self._followed.items():
            name = sequence.sequence_id
            assert sequence.state is not State.FINISHED, f"speculation: {name} has ended and is followed"
            assert followed.n_seen <= len(sequence.token_ids), f"speculation: {name} was told what did not come"
            if followed.guess is not None:
                n = followed.n_right
                came = sequence.token_ids[sequence.foretold_from : followed.n_seen]
                assert came == followed.guess.token_ids[:n], f"speculation: {name} is not as its guess is taken to be"
        by_position = self.counts.n_accepted_by_position
        assert by_position == sorted(by_position, reverse=True), "speculation: later drafts accepted more often"
