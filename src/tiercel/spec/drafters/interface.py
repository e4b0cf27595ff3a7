"""What a drafter is. One object for an engine, which makes one for each sequence.

A proposal is a guess and never an answer: the runner computes what follows whether it is right or not. So a drafter may
be late, wrong or silent. What it must not do is wait: it is called on the engine's thread, between two steps (one from
outside the tree is called on a thread of its own, see `spec.drafters.guarded`).
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Proposal(msgspec.Struct, frozen=True):
    """Tokens that may come next.

    `probabilities[i]` is the drafter's own estimate that token_ids[0 .. i] all come; it does not grow with i.
    `n_matched` says how much the guess rests on, in tokens of context; guesses of like grounds are judged together.
    """

    token_ids: list[int]
    probabilities: list[float]
    n_matched: int = 1


class SequenceDrafter(Protocol):
    """One sequence's."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens: they are the sequence's, and stay so."""
        ...

    def propose(self, n_max: int) -> Proposal | None:
        """Guess at most `n_max` tokens that follow; None: nothing to say."""
        ...

    def end(self) -> None:
        """Forget the sequence. Called once, whatever became of it."""
        ...


class Drafter(Protocol):
    """An engine's."""

    def begin(self, prompt_ids: Sequence[int], *, shares: bool) -> SequenceDrafter:
        """Begin a sequence. Unless it `shares`, nothing of it may help, or be told by, another sequence."""
        ...

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        ...

    def close(self) -> None:
        """Give back what it holds; no sequence is asked for any more."""
        ...
