"""The recurrent states of a runner without a model: each slot's is a digest of the values it went through.

What `FakeRunner` computes depends on it, so a state that is saved, loaded or left at a wrong time changes the output.
Copies are made as late as the contract allows: right before the next step runs.
"""

from collections import deque
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b

from tiercel.base.errors import ShapeError
from tiercel.protocol.step import RunnerLimits


@dataclass(slots=True)
class FakeState:
    """What one slot, or one place, holds: the values that its sequence went through."""

    n_tokens: int = 0
    values: bytes = b""
    has_nan: bool = False

    @property
    def history(self) -> "blake2b":
        """A digest of the values, which can be gone on with."""
        return blake2b(self.values, digest_size=8)

    def cut(self, n_tokens: int) -> "FakeState":
        """Give what it was after its first `n_tokens`."""
        values = self.values[: 8 * n_tokens]
        has_nan = any(not any(values[i : i + 8]) for i in range(0, len(values), 8))
        return FakeState(n_tokens, values, has_nan)

    def add(self, value: bytes, *, is_nan: bool) -> None:
        """Go on by a token."""
        self.values += value
        self.n_tokens += 1
        self.has_nan |= is_nan


class FakeStates:
    """Slots' states and the places they are saved in. Owner: a fake runner."""

    def __init__(self, limits: RunnerLimits, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._slots = [FakeState(-1) for _ in range(limits.n_slots)]
        self._places: list[FakeState | None] = [None] * limits.n_snapshots
        self._is_written = [False] * limits.n_snapshots  # or will be, once the copies that wait are made
        self.state_bytes = 8 * limits.max_len_tokens + 1
        self._asked: deque[tuple[int, int, int, bool]] = deque()

    def ask_copy(self, n_steps_before: int, slot: int, place: int, *, is_save: bool) -> None:
        """Queue a copy behind the first `n_steps_before` steps."""
        if not 0 <= place < len(self._places) or not (is_save or self._is_written[place]):
            raise ShapeError(f"fake: place {place} of {len(self._places)}; one that was saved in is needed; choose one")
        self._is_written[place] = True
        self._asked.append((n_steps_before, slot, place, is_save))

    def will_save(self, place: int) -> None:
        """Note that a submitted step may save a state in a place."""
        if not 0 <= place < len(self._places):
            raise ShapeError(f"fake: place {place}; there are {len(self._places)}; choose one of them")
        self._is_written[place] = True

    def go_back(self, slot: int, n_tokens: int) -> None:
        """Take a slot's state back to an earlier token."""
        self._slots[slot] = self._slots[slot].cut(n_tokens)

    def save(self, slot: int, place: int, n_tokens: int) -> None:
        """Keep what a slot's state was after `n_tokens`."""
        self._places[place] = self._slots[slot].cut(n_tokens)

    def copy_before(self, n_steps_run: int) -> None:
        """Make the copies that come before the step after the first `n_steps_run`."""
        while self._asked and self._asked[0][0] <= n_steps_run:
            _, slot, place, is_save = self._asked.popleft()
            if is_save:
                self._places[place] = copy(self._slots[slot])
                continue
            saved = self._places[place]
            assert saved is not None, f"fake: place {place} is loaded before it is saved"
            self._slots[slot] = copy(saved)

    def saved(self, place: int, n_steps_run: int) -> FakeState:
        """Give what a place holds after that many steps."""
        self.copy_before(n_steps_run)
        saved = self._places[place]
        assert saved is not None, f"fake: nothing was saved in place {place}"
        return saved

    def read(self, place: int) -> bytes:
        """Give a place's bytes."""
        assert all(not (named == place and is_save) for _, _, named, is_save in self._asked), "fake: still to be saved"
        saved = self._places[place]
        assert saved is not None, f"fake: nothing was saved in place {place}"
        return saved.values.ljust(self.state_bytes - 1, b"\0") + bytes([bool(saved.has_nan)])

    def write(self, place: int, n_tokens: int, data: bytes) -> None:
        """Fill a place with what `read` gave."""
        if not 0 <= place < len(self._places):
            raise ShapeError(f"fake: place {place}; there are {len(self._places)}; choose one of them")
        assert all(named != place for _, _, named, _ in self._asked), f"fake: place {place} is still to be copied"
        self._places[place] = FakeState(n_tokens, data[: 8 * n_tokens], bool(data[-1]))
        self._is_written[place] = True

    def begin(self, slot: int, start: int) -> FakeState:
        """Give the slot's state for a step that begins at `start`: a fresh one at 0."""
        if start == 0:
            self._slots[slot] = FakeState()
        state = self._slots[slot]
        stands_right = state.n_tokens == start
        assert stands_right or not self._is_strict, f"fake: slot {slot} is at {state.n_tokens}; {start} was asked"
        return state
