"""The own drafts of a runner without a model: what its slots' last steps left, and how many of them a step computes.

Whoever makes the runner gives the drafter, a pure function of a sequence's tokens, so that drafts made beside others,
or after another history of the slot, are known not to differ. What the native step decides, `chosen` defines.
"""

import math
from collections.abc import Callable, Sequence

from tiercel.base.errors import ShapeError
from tiercel.spec.budget import choose, n_worth, share

# Tokens so far and how many drafts are wanted; gives as many drafts or fewer, and how likely each comes if those before
# it do.
FakeDrafter = Callable[[Sequence[int], int], tuple[Sequence[int], Sequence[float]]]


class FakeDrafts:
    """Drafts by slot. Owner: a fake runner."""

    def __init__(self, drafter: FakeDrafter | None, n_draft_max: int, vocab_size: int) -> None:
        assert (drafter is not None) == (n_draft_max > 0), "fake: a drafter, and n_draft_max: both or none are needed"
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._of_slot: dict[int, tuple[int, list[int], list[float]]] = {}
        self._policy: tuple[list[float], list[float]] = ([], [])
        self.n_broken = 0  # times that a confidence was no number

    def set_policy(self, step_seconds: Sequence[float], chances: Sequence[float]) -> None:
        """Take note of what steps take and how often drafts come."""
        numbers = [*step_seconds, *chances]
        if not all(map(math.isfinite, numbers)) or any(s <= 0 for s in step_seconds):
            raise ShapeError(f"fake: a policy of {list(step_seconds)} and {list(chances)}; finite times are needed")
        self._policy = list(step_seconds), list(chances)

    @property
    def policy(self) -> tuple[list[float], list[float]]:
        """What steps submitted now know."""
        return self._policy

    def forget(self, slot: int) -> None:
        """Drop what is there of a slot."""
        self._of_slot.pop(slot, None)

    def make(self, slot: int, tokens: Sequence[int], n: int) -> tuple[list[int], list[float]]:
        """Draft what comes after `tokens`, n at most, and leave it in the slot; a confidence that is NaN ends it."""
        assert self._drafter is not None, "fake: drafts are asked for, and there is no drafter"
        ids, confidence = self._drafter(tokens, n)
        n_good = next((i for i, c in enumerate(confidence) if math.isnan(c)), len(confidence))
        self.n_broken += n_good < len(confidence)
        n_good = min(n, n_good)
        made = [int(i) for i in ids[:n_good]], [float(c) for c in confidence[:n_good]]
        assert all(0 <= i < self._vocab_size for i in made[0]), f"fake: drafts {made[0]} are outside the vocabulary"
        self._of_slot[slot] = (len(tokens), *made)
        return made

    def at(self, slot: int, n_known: int) -> tuple[list[int], list[float]]:
        """Give the slot's drafts, if they begin at its end."""
        first, ids, confidence = self._of_slot.get(slot, (-1, [], []))
        return (ids, confidence) if first == n_known else ([], [])


def chosen(
    confidences: Sequence[Sequence[float]],
    *,
    n_rows: int,
    policy: tuple[Sequence[float], Sequence[float]],
    stops_early: bool = False,
) -> list[int]:
    """Choose how many drafts of each sequence a step computes that has `n_rows` rows without any."""
    step_seconds, factors = policy
    if not step_seconds:
        return [len(own) for own in confidences]
    chances = [_chances(own, factors) for own in confidences]
    n_all = sum(map(len, chances))

    def seconds(n: int) -> float:
        return seconds_of(step_seconds, n)

    if stops_early:
        n = n_worth(chances, seconds, n_rows=n_rows, n_drafts_max=n_all, stops_early=True)
        return share(chances, n)
    return choose(chances, seconds, n_rows=n_rows, n_drafts_max=n_all)[0]


def seconds_of(table: Sequence[float], n_rows: int) -> float:
    """Give the time of a step; beyond the table it goes on by the table's mean slope."""
    if n_rows <= len(table):
        return table[max(n_rows, 1) - 1]
    slope = (table[-1] - table[0]) / (len(table) - 1) if len(table) > 1 else 0.0
    return table[-1] + max(slope, 0.0) * (n_rows - len(table))


def _chances(confidence: Sequence[float], factors: Sequence[float]) -> list[float]:
    """Give how likely each draft and all before it come."""
    chances, survival = [], 1.0
    for i, c in enumerate(confidence):
        factor = factors[min(i, len(factors) - 1)] if factors else 1.0
        survival *= min(max(c * factor, 0.0), 1.0)
        chances.append(survival)
    return chances


def half_right(answers: Callable[[Sequence[int]], Sequence[int]], vocab_size: int = 97) -> FakeDrafter:
    """Give a drafter that knows what follows some tokens, and spoils every draft whose position and token say so."""

    def draft(tokens: Sequence[int], n: int) -> tuple[Sequence[int], Sequence[float]]:
        ids = list(answers(tokens)[:n])
        is_wrong = [(3 * i + len(tokens) + k) % 4 == 0 for k, i in enumerate(ids)]
        return (
            [(i + wrong) % vocab_size for i, wrong in zip(ids, is_wrong, strict=True)],
            [0.5 + 0.25 * ((i + k) % 2) for k, i in enumerate(ids)],
        )

    return draft
