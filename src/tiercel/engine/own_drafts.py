"""Speculation with a runner that drafts by itself, in its steps: when to let it, and what came of it.

Owner: the engine's thread. The runner makes drafts at the end of a step and decides in the next one how many of them
to compute; steps are planned ahead all the while. What is decided here: whether a step of so many sequences drafts at
all, how many rows it may have, and what the runner is told of costs and chances to choose by.

Whether drafting pays is measured for loads apart, by powers of two: what steps that draft take, the drafter's time
included, against what plain steps would have taken for as many tokens. What is won is credit, up to a bound. Where a
load has lost its credit and a stake, drafting stops for a while, longer each time, and is tried again with a new stake.
A drafter that gives no numbers is stopped for good.

Invariants (`check`): drafts are remembered of sequences that have not ended; acceptance by position does not grow.
"""

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from tiercel.engine.request import State
from tiercel.engine.stats import SpeculationCounts
from tiercel.spec.budget import N_PROMPT_TOKENS_ALONE, StepCosts, n_for_batch
from tiercel.spec.settings import SpeculationSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Many

    from tiercel.engine.request import Sequence
    from tiercel.engine.scheduler import PlannedStep
    from tiercel.protocol.step import StepResult

_log = logging.getLogger(__name__)

_N_PLAIN: Final = 8  # steps without drafts before a load drafts: what is to be beaten
# In plain steps of one sequence, whose tokens a step scatter by about one: what drafting may lose before it stops, and
# what it may have won at most. A gain of a tenth loses such a stake once in some thirty tries, by chance.
_STAKE: Final = 12.0
_CREDIT_MAX: Final = 48.0
# Steps for which it then does not draft: at first, and at most. A stake is two hundredths of the first, and it halves.
_N_HELD, _N_HELD_MAX = 512, 16384
_N_TOLD: Final = 16  # steps between two tellings of costs and chances
_N_COSTS: Final = 128  # rows of the table
_FADES: Final = 0.97
_PRIOR: Final = 8.0  # tests that a confidence counts for by itself
_N_BROKEN_MAX: Final = 64  # steps whose drafts were no numbers, before the drafter is given up


class _Load(msgspec.Struct):
    """Steps of about as many sequences."""

    n_plain: int = 0
    credit: float = _STAKE  # in plain steps; times the root of the number of sequences, as their mean scatters less
    n_held: int = 0  # steps yet to come without
    hold: int = _N_HELD


class OwnDrafts:
    """See the module's docstring. `tell` is the runner's `set_draft_policy`."""

    def __init__(
        self,
        settings: SpeculationSettings,
        *,
        n_draft_max: int,
        tell: "Callable[[Many[float], Many[float]], None]",
    ) -> None:
        self._n_max = min(settings.n_tokens_max, n_draft_max)
        self.counts = SpeculationCounts(n_accepted_by_position=[0] * self._n_max)
        self._settings = settings
        self._tell_runner = tell
        self._costs = StepCosts()
        self._loads: dict[int, _Load] = {}
        self._right = [0.0] * self._n_max
        self._expected = [0.0] * self._n_max
        self._confidences: dict[Sequence, list[float]] = {}
        self._told = self.counts.copy()
        self._n_untold = 0
        self._n_broken = 0
        self.is_given_up = False
        self.n_draft = 0  # of each sequence, at the end of the next step

    waits: Final = False  # a step never needs the one before to be seen

    def set_wake(self, wake: "Callable[[], None]") -> None:
        """Nothing changes while nothing runs."""

    def told(self) -> SpeculationCounts:
        """Give a copy of the counts, the same one until they change."""
        self.counts.is_drafting = self.n_draft > 0
        if self._told.changed_by(self.counts):
            self._told = self.counts.copy()
        return self._told

    def prepare(self, running: "Iterable[Sequence]", n_begun: int = 0) -> None:
        """Say of which sequences the next step may compute drafts, and set `n_draft`: how many it makes of each.

        `n_begun`: tokens of a prompt that it may begin.
        """
        ready: list[Sequence] = []
        for sequence in running:
            sequence.n_drafts_wanted = 0
            n_missing = sequence.n_total - sequence.n_computed
            if n_missing == 1 and sequence.pools is None:
                if sequence.n_total < sequence.max_total_tokens:
                    ready.append(sequence)
            else:
                n_begun += n_missing
        if ready and n_begun > N_PROMPT_TOKENS_ALONE:
            self.n_draft = 0
            return
        # The step may begin sequences as well, so one that decodes none drafts.
        self.n_draft = self._n_wanted(max(len(ready), 1))
        for sequence in ready:
            sequence.n_drafts_wanted = self.n_draft

    def _n_wanted(self, n_sequences: int) -> int:
        if self.is_given_up:
            return 0
        n = n_for_batch(self._settings.n_tokens_by_batch, n_sequences, self._n_max)
        if not self._settings.is_adaptive:
            return n
        load = self._load(n_sequences)
        return n if load.n_held == 0 and load.n_plain >= _N_PLAIN else 0

    def _load(self, n_sequences: int) -> _Load:
        return self._loads.setdefault(n_sequences.bit_length(), _Load())

    def collected(self, step: "PlannedStep", result: "StepResult") -> None:
        """Take note of what a step computed, accepted and drafted, before its tokens are taken."""
        drafted = result.seq_drafted.tolist() if result.seq_drafted is not None else None
        n_rows, n_sequences = sum(step.counts), len(step.counts)
        is_decode = not step.admitted and n_rows == n_sequences + step.n_draft_rows and all(step.samples)
        if drafted is not None:
            n_rows -= sum(step.counts[place] - 1 - drafted[place] for place in step.foretold)
            self._count(step, result, drafted)
        if is_decode:
            self._weigh(step, result, n_rows)
        self._remember(step, result)
        self.counts.drafter_s += result.draft_ns * 1e-9
        self._n_untold += 1
        if self._settings.is_adaptive and self._n_untold >= _N_TOLD and self._costs.is_known:
            self._n_untold = 0
            seconds = [self._costs.seconds(n) for n in range(1, _N_COSTS + 1)]
            self._tell_runner(seconds, [self._chance(position) for position in range(self._n_max)])

    def _count(self, step: "PlannedStep", result: "StepResult", drafted: "list[int]") -> None:
        counts, n_emitted = self.counts, dict.fromkeys(step.foretold, 0)
        counts.note_step(sum(drafted), result.compute_ns)
        for place in result.row_seq.tolist():
            if place in n_emitted:
                n_emitted[place] += 1
        for place, n in n_emitted.items():
            sequence = step.sequences[place]
            if n == 0 or sequence.state is State.FINISHED:
                continue
            if not drafted[place]:
                counts.n_passed_over += self._settings.is_adaptive and bool(self._confidences.get(sequence))
                continue
            counts.n_drafts += 1
            counts.n_draft_tokens += drafted[place]
            counts.n_accepted_tokens += n - 1
            for position in range(n - 1):
                counts.n_accepted_by_position[position] += 1
            self._learn(self._confidences.get(sequence, []), drafted[place], n - 1)

    def _learn(self, confidences: list[float], n_drafted: int, n_right: int) -> None:
        """Compare what was expected of drafts with what came: of those accepted, and the first that was not."""
        for position in range(min(n_right + 1, n_drafted, len(confidences))):
            self._right[position] = _FADES * self._right[position] + (position < n_right)
            self._expected[position] = _FADES * self._expected[position] + confidences[position]

    def _chance(self, position: int) -> float:
        """Give the factor on a confidence at a position that makes it come true as often as it says."""
        return (self._right[position] + _PRIOR) / (self._expected[position] + _PRIOR)

    def _weigh(self, step: "PlannedStep", result: "StepResult", n_rows: int) -> None:
        """See whether drafting is worth it for a load."""
        n, compute_s = len(step.counts), result.compute_ns * 1e-9
        self._costs.observe(n_rows, compute_s)
        load = self._load(n)
        load.n_plain += step.n_draft == 0 and n_rows == n
        load.n_held = max(load.n_held - 1, 0)
        if step.n_draft == 0 or not self._settings.is_adaptive:
            return
        plain_s = self._costs.seconds(n)
        # One slow step is somebody else's work on this machine.
        spent_s = min(compute_s, 2.0 * self._costs.seconds(n_rows)) + min(result.draft_ns * 1e-9, 2.0 * plain_s)
        load.credit += (len(result.row_seq) / n - spent_s / plain_s) * n**0.5
        if load.credit < 0.0:
            load.credit = _STAKE
            self.counts.n_switched_off += 1
            _log.info(
                "speculation: off in %d steps of about %d sequences, as it brought less than it took", load.hold, n
            )
            load.n_held, load.hold = load.hold, min(2 * load.hold, _N_HELD_MAX)
        elif load.credit >= _CREDIT_MAX:
            load.credit, load.hold = _CREDIT_MAX, _N_HELD

    def _remember(self, step: "PlannedStep", result: "StepResult") -> None:
        """Keep what the step drafted: masks need the tokens, and what comes next is compared with the confidences."""
        if result.seq_drafts is None or result.seq_confidence is None:
            return
        last = dict(zip(result.row_seq.tolist(), result.row_pos.tolist(), strict=True))
        drafts = zip(result.seq_drafts.tolist(), result.seq_confidence.tolist(), strict=True)
        for place, (ids, confidences) in enumerate(drafts):
            sequence = step.sequences[place]
            if place not in last or sequence.state is State.FINISHED:
                continue
            n = next((i for i, token in enumerate(ids) if token < 0), len(ids))
            sequence.foretold, sequence.foretold_from = ids[:n], last[place] + 2
            self._confidences[sequence] = confidences[:n]
        if result.n_drafts_broken:
            self._break(result.n_drafts_broken)

    def _break(self, n_broken: int) -> None:
        self.counts.n_failures += n_broken
        self._n_broken += 1
        if self._n_broken == 1:
            _log.warning("speculation: the drafter's confidences are no numbers; such drafts are left out")
        if self._n_broken == _N_BROKEN_MAX and not self.is_given_up:
            self.is_given_up = True
            _log.warning("speculation: off, as the drafter's confidences were no numbers in %d steps", self._n_broken)

    def end(self, sequence: "Sequence") -> None:
        """Forget a sequence, whatever became of it."""
        self._confidences.pop(sequence, None)

    def close(self) -> None:
        """Nothing is held: the drafter is the runner's."""

    def check(self) -> None:
        """Raise AssertionError when an invariant of the module's docstring does not hold."""
        self._costs.check()
        for sequence in self._confidences:
            assert sequence.state is not State.FINISHED, (
                f"speculation: {sequence.sequence_id} has ended and is followed"
            )
        by_position = self.counts.n_accepted_by_position
        assert by_position == sorted(by_position, reverse=True), "speculation: later drafts accepted more often"
