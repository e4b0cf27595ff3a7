"""Where a sequence's reasoning ends and its answer begins, told from its tokens as they come.

The one place for it: constrained output begins behind reasoning, and whoever counts or bounds reasoning asks here too.
Marks are texts, found in the tokens' bytes, so they may be one token or many, and begin or end inside of one. Which
marks a model has is `parsers.registry`'s to say; text parsers find the same marks in the finished text.

States of a `ThinkingTracker`:

    UNDECIDED   nothing but blanks has come; a mark may open reasoning, anything else is the answer
    OPENING     tokens so far are the beginning of an opening mark
    THINKING    made so by an opening mark, or by the prompt
    ANSWERING   made so by a closing mark, or by text that opens none; final
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass


class Thinking(enum.Enum):
    """Where a sequence stands."""

    UNDECIDED = 0
    OPENING = 1
    THINKING = 2
    ANSWERING = 3


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """What opens reasoning and what closes it. `is_open`: the prompt has opened it."""

    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    is_open: bool = False


class ThinkingTracker:
    """One sequence's reasoning. `token_bytes` gives the bytes of a token, special ones included."""

    def __init__(self, marks: ThinkingMarks, token_bytes: Callable[[int], bytes]) -> None:
        self._begins = tuple(text.encode() for text in marks.begins)
        self._ends = tuple(text.encode() for text in marks.ends)
        self._n_held_max = max(map(len, self._ends), default=1) - 1
        self._token_bytes = token_bytes
        self._tail = b""  # of THINKING: what may be the beginning of a closing mark; before: all that came
        self.state = Thinking.ANSWERING
        if self._ends:
            self.state = Thinking.THINKING if marks.is_open else Thinking.UNDECIDED

    @property
    def openers(self) -> tuple[bytes, ...]:
        """What is left of each opening mark that the tokens so far begin; none once it is decided."""
        if self.state not in (Thinking.UNDECIDED, Thinking.OPENING):
            return ()
        begun = self._tail.lstrip()
        return tuple(mark[len(begun) :] for mark in self._begins if mark.startswith(begun))

    def answer(self) -> None:
        """Take it that the answer has begun: whoever reads the tokens knows that none opens reasoning."""
        self._answer(b"")

    def feed(self, token_id: int) -> bytes:
        """Take the next token; return its bytes that belong to the answer, blanks behind a closing mark left out."""
        data = self._token_bytes(token_id)
        if self.state is Thinking.ANSWERING:
            return data
        self._tail += data
        if self.state is not Thinking.THINKING:
            return self._open()
        return self._think()

    def _open(self) -> bytes:
        begun = self._tail.lstrip()
        for mark in self._begins:
            if begun.startswith(mark):
                self._tail = begun[len(mark) :]
                self.state = Thinking.THINKING
                return self._think()
        if any(mark.startswith(begun) for mark in self._begins):
            self.state = Thinking.OPENING if begun else Thinking.UNDECIDED
            return b""
        return self._answer(self._tail)

    def _think(self) -> bytes:
        found = [(at, len(mark)) for mark in self._ends if (at := self._tail.find(mark)) >= 0]
        if not found:
            self._tail = self._tail[-self._n_held_max :] if self._n_held_max else b""
            return b""
        at, length = min(found)
        return self._answer(self._tail[at + length :].lstrip())

    def _answer(self, data: bytes) -> bytes:
        self.state = Thinking.ANSWERING
        self._tail = b""
        return data
