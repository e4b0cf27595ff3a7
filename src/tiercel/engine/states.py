"""Where recurrent states are saved and which one a prompt goes on from: the scheduler's policy for models that have
such a state. Knows no pages but their keys and number, no clock and no runner. Owner: `engine.scheduler`.

A state stands after the last token that was computed and cannot be taken back, so one that is to be found again must be
copied while it stands where a page ends. These are a sequence's stops, and its chunks end exactly there:

- where others that share its pages left it: pages are known further than any state, so the next one finds a state too;
- every spacing of tokens, which bounds what a restart computes again;
- the last page boundary of its known tokens: the end of its prompt, or of what it had before a preemption.

Behind its stops it grows by single tokens, and whenever that fills a page a state is saved: the end of its output is
not known before it comes. The two newest of these are kept, as the newest may turn out to lie behind the end.

A step with drafts may pass the end of a page, and which of them are right is known when it has run. So it is told where
to save on its way (`PlannedStep.saves_inside`), and what came of that is seen when its tokens were taken (`taken`).

A state may be found once its step has ended well and its tokens are known (`collected`). Until then a sequence that
could use it waits, as it does for one that a running sequence still has before it (`is_awaited`).
"""

import math
from typing import TYPE_CHECKING

from msgspec import Struct

from tiercel.engine.request import Sequence, State
from tiercel.kv.page_keys import PageKey
from tiercel.kv.snapshots import Snapshot, SnapshotStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiercel.engine.scheduler import PlannedStep
    from tiercel.protocol.step import RunnerLimits, StepResult


class Stop(Struct, frozen=True, eq=False):
    """A place in a sequence's known tokens where a chunk ends and its state is saved."""

    n_tokens: int
    key: PageKey
    n_uses: int  # sequences known to have come by, beside its own


class PlannedSave(Struct, frozen=True, eq=False):
    """A state that is saved when its step has run."""

    sequence: Sequence
    slot: int
    snapshot: Snapshot
    is_stop: bool  # else it may give way to the sequence's next one
    epoch: int


class StateKeeper:
    """Decides; see the module's docstring."""

    def __init__(self, limits: "RunnerLimits") -> None:
        self.store = SnapshotStore(limits.n_snapshots, limits.state_bytes, limits.page_size_tokens)
        self._page_size = limits.page_size_tokens
        self._spacing = limits.snapshot_spacing_tokens
        self._has_kv = limits.has_kv
        self._coming: dict[Stop, None] = {}  # before running sequences
        self._epoch = 0  # of `reset`
        self._held: list[tuple[float, Snapshot]] = []  # until when

    def longest(self, keys: list[PageKey], n_pages: int) -> Snapshot | None:
        """Find the state of the longest prefix whose `n_pages` pages are there as well, or need not be."""
        for i in range(n_pages if self._has_kv else len(keys), 0, -1):
            found = self.store.find(keys[i - 1])
            if found is not None:
                return found
        return None

    def reach(self, keys: list[PageKey]) -> int:
        """Return how many pages could be used if all of them were there."""
        return next((i for i in range(len(keys), 0, -1) if self.store.find(keys[i - 1]) is not None), 0)

    def is_awaited(self, keys: list[PageKey], found: Snapshot | None) -> bool:
        """Whether a state of a longer prefix than `found` is on its way."""
        first, last = 0 if found is None else found.n_tokens, len(keys) * self._page_size

        def is_wanted(n_tokens: int, key: PageKey | None) -> bool:
            return first < n_tokens <= last and keys[n_tokens // self._page_size - 1] == key

        reserved = self.store.reserved()
        return any(is_wanted(stop.n_tokens, stop.key) for stop in self._coming) or any(
            is_wanted(snapshot.n_tokens, snapshot.coming_key) for snapshot in reserved
        )

    def begin(self, sequence: Sequence, n_pages_known: int) -> None:
        """Choose the stops of a sequence that starts at its n_computed; pages are known up to `n_pages_known`."""
        size, start = self._page_size, sequence.n_computed
        last = (len(sequence.token_ids) - 1) // size * size
        fork = n_pages_known * size
        wanted = {fork, last, *range((start // self._spacing + 1) * self._spacing, last, self._spacing)}
        keys = sequence.page_keys.extend(sequence.token_ids)
        for n_tokens in sorted(wanted, reverse=True):
            if start < n_tokens <= last:
                stop = Stop(n_tokens, keys[n_tokens // size - 1], int(n_tokens == fork))
                sequence.stops.append(stop)
                self._coming[stop] = None
        sequence.saved_at = start
        sequence.newest_states = []

    def cut(self, sequence: Sequence, n_tokens: int) -> int:
        """Shorten the sequence's next chunk so that it ends at the next stop."""
        stops = sequence.stops
        while stops and stops[-1].n_tokens < sequence.n_computed + n_tokens:
            stop = stops[-1]
            if self.store.is_known(stop.key):
                sequence.saved_at = stop.n_tokens
            elif self.store.can_reserve(stop.n_tokens - sequence.saved_at, n_uses=stop.n_uses):
                return stop.n_tokens - sequence.n_computed
            self._pop_stop(sequence)
        return n_tokens

    def plan_saves(self, step: "PlannedStep") -> None:
        """Take places for what the step's sequences are to save behind it."""
        size = self._page_size
        for place, sequence in enumerate(step.sequences):
            if place in step.foretold:
                self._plan_inside(step, place)
                continue
            if sequence.n_computed % size:
                continue
            if not sequence.stops:
                self._plan_newest(step, sequence, sequence.n_computed)
            elif sequence.stops[-1].n_tokens == sequence.n_computed:
                stop = self._pop_stop(sequence)
                if self.store.is_known(stop.key):
                    sequence.saved_at = stop.n_tokens
                else:
                    self._reserve(step, sequence, stop.n_tokens, stop)

    def _plan_inside(self, step: "PlannedStep", place: int) -> None:
        """Have the first page boundary saved that a step with drafts may come by."""
        sequence, size = step.sequences[place], self._page_size
        start = sequence.n_computed - step.counts[place]
        n_tokens = (start // size + 1) * size
        if n_tokens <= sequence.n_computed and not sequence.stops:
            self._plan_newest(step, sequence, n_tokens, place)

    def _plan_newest(self, step: "PlannedStep", sequence: Sequence, n_tokens: int, place: int | None = None) -> None:
        newest, store = sequence.newest_states, self.store
        while len(newest) > 1:
            older = newest.pop(0)
            if store.is_superseded(older):
                store.drop(older)
        self._reserve(step, sequence, n_tokens, None, place)

    def _reserve(
        self, step: "PlannedStep", sequence: Sequence, n_tokens: int, stop: Stop | None, place: int | None = None
    ) -> None:
        key, n_uses = (None, 0) if stop is None else (stop.key, stop.n_uses)
        snapshot = self.store.reserve(n_tokens, n_tokens - sequence.saved_at, key=key, n_uses=n_uses)
        if snapshot is None:
            return
        is_stop = stop is not None or n_tokens % self._spacing == 0
        save = PlannedSave(sequence, sequence.slot, snapshot, is_stop, self._epoch)
        if place is not None:
            step.saves_inside[place] = save
            return
        if is_stop:
            sequence.saved_at = n_tokens
        step.saves.append(save)

    def collected(self, step: "PlannedStep", *, is_failed: bool) -> list[tuple[Sequence, Snapshot]]:
        """Note that a step has ended: what it saved can be found, if its tokens are those that are known.

        Returns: the states that can be found now, and whose they are.
        """
        for _, snapshot in step.loads:
            self.store.unpin(snapshot)
        if is_failed:
            for save in (*step.saves, *step.saves_inside.values()):
                self.store.give_up(save.snapshot)
            return []
        return [(save.sequence, kept) for save in step.saves if (kept := self._keep(step, save)) is not None]

    def taken(self, step: "PlannedStep", result: "StepResult") -> list[tuple[Sequence, Snapshot]]:
        """Note that a step's tokens are known, and so where its states went.

        Returns: as `collected`.
        """
        found = []
        spans: dict[int, tuple[int, int]] = {}  # of positions that were computed rightly, by place
        for place, position in zip(result.row_seq.tolist(), result.row_pos.tolist(), strict=True):
            spans[place] = spans.get(place, (position, 0))[0], position + 1
        for place, save in step.saves_inside.items():
            start, end = spans.get(place, (0, 0))
            if not start < save.snapshot.n_tokens <= end:
                self.store.give_up(save.snapshot)
                continue
            kept = self._keep(step, save)
            if kept is not None:
                found.append((save.sequence, kept))
                if save.is_stop:
                    save.sequence.saved_at = kept.n_tokens
        return found

    def _keep(self, step: "PlannedStep", save: PlannedSave) -> Snapshot | None:
        """Make a state findable that was saved, unless it is in doubt."""
        sequence, snapshot = save.sequence, save.snapshot
        # What an ended sequence's last token left is not in a page that can be found.
        n_known = len(sequence.token_ids) - (sequence.state is State.FINISHED)
        is_doubtful = sequence.is_spoilt or sequence in step.discarded or save.epoch != self._epoch
        if is_doubtful or snapshot.n_tokens > n_known:
            self.store.give_up(snapshot)
            return None
        kept = self.store.keep(snapshot, sequence.page_keys.extend(sequence.token_ids))
        if not save.is_stop and kept is snapshot:
            sequence.newest_states.append(kept)
        return kept

    def leave(self, sequence: Sequence) -> None:
        """Note that a sequence does not run any more."""
        while sequence.stops:
            self._pop_stop(sequence)

    def hold(self, sequence: Sequence, until_s: float) -> None:
        """Keep the state of a sequence's prompt for a while, as `engine.pins` does its pages."""
        keys = sequence.page_keys.extend(sequence.token_ids)[: sequence.n_prompt // self._page_size]
        n_pages = self.reach(keys)
        found = self.store.find(keys[n_pages - 1]) if n_pages else None
        if found is not None and self.store.hold(found):
            self._held.append((until_s, found))

    def expire(self, now_s: float) -> None:
        """Let go of what was to be kept until now."""
        for held in [held for held in self._held if held[0] <= now_s]:
            self._held.remove(held)
            self.store.let_go(held[1])

    def reset(self) -> None:
        """Make all states unfindable, and those that steps under way will save."""
        self.expire(math.inf)
        self.store.reset()
        self._epoch += 1

    def _pop_stop(self, sequence: Sequence) -> Stop:
        stop = sequence.stops.pop()
        del self._coming[stop]
        return stop

    def counts(self) -> tuple[int, int, int, int, int, int]:
        """Give what `EngineSnapshot` tells of snapshots, in its order."""
        store = self.store
        return store.n_places, store.n_kept, store.n_reserved, store.n_saved, store.n_hits, store.n_evicted

    def check_idle(self, n_loads: int = 0) -> None:
        """Raise AssertionError when nothing runs and yet something is held, but by loads. Cost: O(snapshots)."""
        store = self.store
        assert not self._coming, f"engine.states: {len(self._coming)} stops are before nobody"
        assert store.n_reserved == n_loads, f"engine.states: {store.n_reserved} places are reserved, {n_loads} loaded"
        assert store.n_pinned == 0, f"engine.states: {store.n_pinned} snapshots are pinned by nobody"

    def check(self, running: "Iterable[Sequence]") -> None:
        """Raise AssertionError when the stops are not those of the running sequences, or the store is in disorder."""
        self.store.check()
        found: list[Stop] = []
        for sequence in running:
            ends = [stop.n_tokens for stop in sequence.stops]
            assert ends == sorted(set(ends), reverse=True), f"{sequence.sequence_id}: its stops are not in order"
            assert not ends or ends[-1] > sequence.n_computed, f"{sequence.sequence_id}: a stop was passed"
            found += sequence.stops
        assert len(found) == len(self._coming), "engine.states: stops that nobody has"
        assert all(stop in self._coming for stop in found), (
            "engine.states: stops that nobody has, or that are not known"
        )
