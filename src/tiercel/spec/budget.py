"""How many drafts are worth computing: what steps cost, how often drafts come true, and the choice. Knows no request.

The choice (`choose`) is a pure function: of all drafts that are there, likeliest first, as many as make the most tokens
a second, or none where plain steps do. `n_worth` and `share` are the same in two parts, for verification that must not
look at all of them (`share` says when). The two that learn are small tables of measurements, and are handed in.

A longer draft costs what its row costs, whether it is right or not: four rows take some 1.1 times the time of one where
memory is the limit, and 1.6 times where arithmetic is (`docs/log.md`), so no fixed number is right.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

# Until steps of two sizes were measured: what each further row costs, in steps of one row. Between the two above.
_ROW_COST = 0.15
_N_ROWS_MAX = 512
# Tokens of prompts with which a step has no drafts: arithmetic is its limit, so a draft takes as long as a prompt's
# token, which is not in doubt, and comes after a drafter's pass.
N_PROMPT_TOKENS_ALONE = 128
_FADES = 0.99  # of what was measured, for each step since
_OF_FIT = 2.0  # steps that the straight line counts for, beside those of just that size


class StepCosts:
    """What a step of so many rows takes: a straight line through all that was measured lately, and what steps of just
    that size took. Processors have steps of their own in it, such as rows that are computed four at a time.

    Old measurements fade, so a size that was slow once, for reasons that have passed, is tried again.

    Invariant (`check`): `seconds` is positive.
    """

    def __init__(self) -> None:
        self.n_rows_most = 0  # of a step that was measured
        self._n_steps = 0
        self._own: dict[int, tuple[float, float, int]] = {}  # by rows: seconds, weight, and the step when it was so
        self._weight = self._mean_rows = self._mean_s = self._var_rows = self._cov = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._n_steps > 0

    def observe(self, n_rows: int, seconds: float) -> None:
        """Take note of a step's time."""
        if seconds <= 0.0 or not 1 <= n_rows <= _N_ROWS_MAX:
            return
        if self._n_steps > 8:
            seconds = min(seconds, 2.0 * self.seconds(n_rows))  # one slow step is somebody else's work on this machine
        self._n_steps += 1
        self.n_rows_most = max(self.n_rows_most, n_rows)
        before, weight = self._of_own(n_rows)
        self._own[n_rows] = (before * weight + seconds) / (weight + 1.0), min(weight + 1.0, 16.0), self._n_steps
        # Weighted mean, variance and covariance, all faded alike (West 1979).
        w = self._weight = self._weight * _FADES + 1.0
        by_rows, by_s = n_rows - self._mean_rows, seconds - self._mean_s
        self._mean_rows += by_rows / w
        self._mean_s += by_s / w
        self._var_rows = self._var_rows * _FADES + by_rows * (n_rows - self._mean_rows)
        self._cov = self._cov * _FADES + by_rows * (seconds - self._mean_s)

    def _of_own(self, n_rows: int) -> tuple[float, float]:
        seconds, weight, when = self._own.get(n_rows, (0.0, 0.0, 0))
        return seconds, weight * _FADES ** (self._n_steps - when)

    def seconds(self, n_rows: int) -> float:
        """Estimate a step's time.

        Requires: something was measured.
        """
        first = self._mean_s / (1.0 + _ROW_COST * (self._mean_rows - 1.0))
        slope = max((self._cov + _ROW_COST * first) / (self._var_rows + 1.0), 0.0)
        line = max(self._mean_s + slope * (n_rows - self._mean_rows), 0.1 * self._mean_s)
        seconds, weight = self._of_own(n_rows)
        return (seconds * weight + line * _OF_FIT) / (weight + _OF_FIT)

    def check(self) -> None:
        """Raise AssertionError when the invariant does not hold."""
        assert not self.is_known or all(self.seconds(n) > 0.0 for n in range(1, 64)), (
            "budget: a step that takes no time"
        )


class Acceptance:
    """How often a drafter's tokens come, beside what it says itself, by what its guess rests on.

    A token's chance is the drafter's probability times `rate`. Old observations fade, and `whole`, what is known of all
    sequences, counts for as much as a few tokens.
    """

    # What a guess on 1, 2, 3-4, 5-8 and more tokens of context is worth before anything is known.
    _FIRST = (0.25, 0.4, 0.6, 0.75, 0.9)
    _EDGES = (1, 2, 4, 8)
    _FADES = 0.95
    _PRIOR = 4.0

    def __init__(self, whole: "Acceptance | None" = None) -> None:
        self._whole = whole
        self._right = [0.0] * len(self._FIRST)
        self._tested = [0.0] * len(self._FIRST)

    def observe(self, n_matched: int, n_right: int, expected: float) -> None:
        """Take note that of a guess `n_right` tokens came, of which its drafter expected `expected` of those tested.

        Tested are those that came, and the first that did not.
        """
        i = bisect_left(self._EDGES, n_matched)
        self._right[i] = self._right[i] * self._FADES + n_right
        self._tested[i] = self._tested[i] * self._FADES + expected
        if self._whole is not None:
            self._whole.observe(n_matched, n_right, expected)

    def rate(self, n_matched: int) -> float:
        """Estimate it for a guess, from 0 to 1."""
        i = bisect_left(self._EDGES, n_matched)
        before = self._FIRST[i] if self._whole is None else self._whole.rate(n_matched)
        return min((self._right[i] + self._PRIOR * before) / (self._tested[i] + self._PRIOR), 1.0)


def choose(
    chances: Sequence[Sequence[float]],
    seconds: Callable[[int], float],
    *,
    n_rows: int,
    n_drafts_max: int,
    wait_s: float = 0.0,
) -> tuple[list[int], float]:
    """Choose how many drafts of each sequence to compute in a step that has `n_rows` rows without any.

    `chances[s][i]`: that drafts 0 .. i of sequence s all come; it does not grow with i. `seconds(n)`: time of a step of
    n rows. `wait_s`: what a step takes longer if the one before must be seen first.

    Returns: the numbers, 0 where a draft costs more than it brings, and the gain: tokens a second of such a step, in
    those of a plain one; 1.0 when nothing is chosen.
    """
    offers = _likeliest(chances)
    n, gain = _n_worth(offers[:n_drafts_max], seconds, n_rows=n_rows, wait_s=wait_s, stops_early=False)
    return _shares(offers[:n], len(chances)), gain


def n_worth(
    chances: Sequence[Sequence[float]],
    seconds: Callable[[int], float],
    *,
    n_rows: int,
    n_drafts_max: int,
    stops_early: bool = False,
) -> int:
    """Give how many drafts in all a step of `n_rows` rows should compute; arguments as `choose`'s.

    `stops_early`: at the first draft that makes the step no better, even if later ones would. Only then may the numbers
    come from this same step's confidences where drafts are accepted by rejection (`share`).

    Source: DSpark (Cheng et al. 2026, arXiv:2607.05147), confidence-scheduled verification.
    """
    offers = _likeliest(chances)[:n_drafts_max]
    return _n_worth(offers, seconds, n_rows=n_rows, wait_s=0.0, stops_early=stops_early)[0]


def share(chances: Sequence[Sequence[float]], n_drafts: int) -> list[int]:
    """Give the `n_drafts` likeliest drafts to their sequences; with fewer there are, all of them.

    What is computed of a sequence is a prefix of its drafts, as its chances do not grow.

    **When acceptance by rejection stays lossless.** Whether a draft is computed may depend on what was drafted before,
    and not on itself or what is behind it. Chances that fall come in order, so when `share` or an early stop takes a
    draft in, it has not looked at later ones of that sequence; its own chance must not be read off its own token
    (DSpark's confidence reads the token before). The number handed in must come from an early stop, or know
    nothing of this step's drafts, as confidences two steps old do. The best number by this step's own, `choose`'s,
    biases the output. Verification by matching, the engine's, needs none of this: its output does not depend on what is
    computed (decision 0008). `tests/unit/spec/test_budget_lossless.py` has the counter-example for all of them.

    Source: as `n_worth`'s.
    """
    return _shares(_likeliest(chances)[:n_drafts], len(chances))


_Offer = tuple[float, int, int]  # chance, negative; place in its sequence; sequence


def _likeliest(chances: Sequence[Sequence[float]]) -> list[_Offer]:
    return sorted((-chance, i, s) for s, own in enumerate(chances) for i, chance in enumerate(own))


def _n_worth(
    offers: list[_Offer], seconds: Callable[[int], float], *, n_rows: int, wait_s: float, stops_early: bool
) -> tuple[int, float]:
    plain = n_rows / seconds(n_rows)
    best, n_best, expected = plain, 0, float(n_rows)
    for n, (negative, _, _) in enumerate(offers, 1):
        expected -= negative
        rate = expected / (seconds(n_rows + n) + wait_s)
        if rate > best:
            best, n_best = rate, n
        elif stops_early:
            break
    return n_best, best / plain


def _shares(offers: list[_Offer], n_sequences: int) -> list[int]:
    numbers = [0] * n_sequences
    for _, _, s in offers:
        numbers[s] += 1
    return numbers


def n_for_batch(ranges: Sequence[tuple[int, int, int]], n_sequences: int, n_default: int) -> int:
    """Give the most drafts a sequence may have beside so many others; a range is (first, last, number).

    Between and behind the ranges the number of the one before holds. Source: vLLM's
    num_speculative_tokens_per_batch_size.
    """
    found = n_default
    for first, _, n in ranges:
        if n_sequences < first:
            break
        found = n
    return min(found, n_default)
