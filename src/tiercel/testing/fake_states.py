"""The recurrent states of a runner without a model: each slot's is a digest of the values it went through.

What `FakeRunner` computes depends on it, so a state that is saved, loaded or left at a wrong time changes the output.
Copies are made as late as the contract allows: right before the next step runs.
"""

from collections import deque
from copy import copy
from dataclasses import dataclass, field
from hashlib import blake2b

from tiercel.base.errors import ShapeError
from tiercel.protocol.step import RunnerLimits


@dataclass(slots=True)
class FakeState:
    """What one slot, or one place, holds."""

    n_tokens: int = 0
    history: "blake2b" = field(default_factory=lambda: blake2b(digest_size=8))
    has_nan: bool = False

    def add(self, value: bytes, *, is_nan: bool) -> None:
        """Go on by a token."""
        self.history.update(value)
        self.n_tokens += 1
        self.has_nan |= is_nan

    def copied(self) -> "FakeState":
        """Give another of the same content."""
        other = copy(self)
        other.history = self.history.copy()
        return other


class FakeStates:
    """Slots' states and the places they are saved in. Owner: a fake runner."""

    def __init__(self, limits: RunnerLimits, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._slots = [FakeState(-1) for _ in range(limits.n_slots)]
        self._places: list[FakeState | None] = [None] * limits.n_snapshots
        self._is_written = [False] * limits.n_snapshots  # or will be, once the copies that wait are made
        self._asked: deque[tuple[int, int, int, bool]] = deque()

    def ask_copy(self, n_steps_before: int, slot: int, place: int, *, is_save: bool) -> None:
        """Queue a copy behind the first `n_steps_before` steps."""
        if not 0 <= place < len(self._places) or not (is_save or self._is_written[place]):
            raise ShapeError(f"fake: place {place} of {len(self._places)}; one that was saved in is needed; choose one")
        self._is_written[place] = True
        self._asked.append((n_steps_before, slot, place, is_save))

    def copy_before(self, n_steps_run: int) -> None:
        """Make the copies that come before the step after the first `n_steps_run`."""
        while self._asked and self._asked[0][0] <= n_steps_run:
            _, slot, place, is_save = self._asked.popleft()
            if is_save:
                self._places[place] = self._slots[slot].copied()
                continue
            saved = self._places[place]
            assert saved is not None, f"fake: place {place} is loaded before it is saved"
            self._slots[slot] = saved.copied()

    def saved(self, place: int, n_steps_run: int) -> FakeState:
        """Give what a place holds after that many steps."""
        self.copy_before(n_steps_run)
        saved = self._places[place]
        assert saved is not None, f"fake: nothing was saved in place {place}"
        return saved

    def begin(self, slot: int, start: int) -> FakeState:
        """Give the slot's state for a step that begins at `start`: a fresh one at 0."""
        if start == 0:
            self._slots[slot] = FakeState()
        state = self._slots[slot]
        stands_right = state.n_tokens == start
        assert stands_right or not self._is_strict, f"fake: slot {slot} is at {state.n_tokens}; {start} was asked"
        return state
