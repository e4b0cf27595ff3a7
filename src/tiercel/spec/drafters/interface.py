"""What a drafter is. One object for an engine, which makes one for each sequence.

A proposal is a guess and never an answer: the runner computes what follows whether it is right or not. So a drafter may
be late, wrong or silent. What it must not do is wait: it is called on the engine's thread, between two steps (one from
outside the tree is called on a thread of its own, see `spec.drafters.guarded`). One that computes with a model takes
time from the steps, so it is asked for all sequences at once (`BatchDrafter`).
"""

import math
from collections.abc import Sequence
from itertools import islice
from typing import Protocol, SupportsFloat

import msgspec

from tiercel.protocol.params import SamplingParams


class Proposal(msgspec.Struct, frozen=True):
    """Tokens that may come next.

    `probabilities[i]` is the drafter's own estimate that token_ids[0 .. i] all come; it does not grow with i.
    `n_matched` says how much the guess rests on, in tokens of context; guesses of like grounds are judged together.
    """

    token_ids: list[int]
    probabilities: list[float]
    n_matched: int = 1

    def plain(self, n_max: int) -> "Proposal":
        """Copy the first `n_max` tokens into lists and numbers of our own, whatever the drafter's are.

        Raises: ValueError: it is no guess. And whatever the drafter's objects raise.
        """
        if len(self.token_ids) != len(self.probabilities):
            raise ValueError(
                f"{len(self.token_ids)} tokens and {len(self.probabilities)} probabilities were proposed; "
                "as many are needed"
            )
        ids, probabilities = [*islice(self.token_ids, n_max)], [*islice(self.probabilities, n_max)]
        if not ids or len(ids) != len(probabilities):
            raise ValueError(f"{len(ids)} tokens and {len(probabilities)} probabilities were proposed; one at least")
        for token in ids:
            if type(token) is not int or token < 0:
                raise ValueError(f"token {token!r:.80} was proposed; an int from 0 on is needed")
        if type(self.n_matched) is not int or self.n_matched < 0:
            raise ValueError(f"n_matched {self.n_matched!r:.80} was proposed; an int from 0 on is needed")
        return Proposal(ids, _falling(probabilities), self.n_matched)


def _falling(probabilities: Sequence[SupportsFloat]) -> list[float]:
    numbers: list[float] = []
    last = 1.0
    for p in probabilities:
        # float() by itself would read a string. That it is a float is seen at once; the protocol is slow to ask.
        number = float(p) if isinstance(p, float | SupportsFloat) else math.nan
        if not 0.0 < number <= last:
            raise ValueError(
                f"probability {p!r:.80} behind {last!r} was proposed; it may not grow, and none is 0 or NaN"
            )
        numbers.append(number)
        last = number
    return numbers


class SequenceDrafter(Protocol):
    """One sequence's."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens: they are the sequence's, and stay so."""
        ...

    def propose(self, n_max: int) -> Proposal | None:
        """Guess at most `n_max` tokens that follow; None: nothing to say."""
        ...

    def end(self) -> None:
        """Forget the sequence. Called once, whatever became of it: after another call threw as well."""
        ...


class Drafter(Protocol):
    """An engine's."""

    def begin(self, prompt_ids: Sequence[int], *, shares: bool) -> SequenceDrafter:
        """Begin a sequence. Unless it `shares`, nothing of it may help, or be told by, another sequence."""
        ...

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold. One from outside is asked before it is closed."""
        ...

    def close(self) -> None:
        """Give back what it holds; no sequence is asked for any more, and each that began was ended."""
        ...


class Sampling(msgspec.Struct, frozen=True):
    """How a sequence's tokens are chosen. A drafter that draws with the same noise foretells what is drawn."""

    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()  # what min_tokens forbids


class BatchDrafter(Drafter, Protocol):
    """One whose guesses take time: it is asked for those of all sequences together, while no step runs."""

    def begin_sampled(self, prompt_ids: Sequence[int], sampling: Sampling, *, shares: bool) -> SequenceDrafter:
        """Begin a sequence, as `begin`, and say how its tokens will be chosen."""
        ...

    def propose_all(
        self, asked: Sequence[tuple[SequenceDrafter, int]], *, token_s: float = 0.0, row_s: float = 0.0
    ) -> list[Proposal | Exception | None]:
        """Guess for each sequence at most so many tokens that follow.

        `token_s` is what a token takes without drafts, and `row_s` what a draft adds to a step: a guess ends where one
        more costs more than it can bring. Without token_s, it goes on to what was asked for.

        Returns: one for each; an exception ends the drafting of that sequence only.
        Raises: whatever it likes, which ends it for all of them.
        """
        ...
