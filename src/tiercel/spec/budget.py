"""How many drafts are worth computing: what steps cost, how often drafts come true, and the choice. Knows no request.

The choice (`choose`) is a pure function: of all drafts that are there, likeliest first, as many as make the most tokens
a second, or none where plain steps do. The two that learn are small tables of measurements, and are handed in.

A longer draft costs what its row costs, whether it is right or not: four rows take some 1.1 times the time of one where
memory is the limit, and 1.6 times where arithmetic is (`docs/log.md`), so no fixed number is right.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

# Until steps of two sizes were measured: what each further row costs, in steps of one row. Between the two above.
_ROW_COST = 0.15
_N_ROWS_MAX = 512
_NEWEST = 0.15  # weight of a new measurement


class StepCosts:
    """What a step of so many rows takes: measured where it was, else in proportion to what was.

    Invariant (`check`): `seconds` is positive and does not fall as rows are added.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds: dict[int, float] = {}

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._rows)

    def observe(self, n_rows: int, seconds: float) -> None:
        """Take note of a step's time."""
        if seconds <= 0.0 or not 1 <= n_rows <= _N_ROWS_MAX:
            return
        before = self._seconds.get(n_rows)
        if before is None:
            self._rows.insert(bisect_left(self._rows, n_rows), n_rows)
            self._seconds[n_rows] = seconds
        else:
            # One slow step is somebody else's work on this machine.
            self._seconds[n_rows] = before + _NEWEST * (min(seconds, 2.0 * before) - before)

    def seconds(self, n_rows: int) -> float:
        """Estimate a step's time.

        Requires: something was measured.
        """
        rows, seconds = self._rows, self._seconds
        at = bisect_left(rows, n_rows)
        if at < len(rows) and rows[at] == n_rows:
            return max(seconds[n] for n in rows[: at + 1])
        slope = self._slope()
        if at == 0:
            return seconds[rows[0]] * (1.0 + slope * (n_rows - 1)) / (1.0 + slope * (rows[0] - 1))
        below = max(seconds[n] for n in rows[:at])
        if at == len(rows):
            return below * (1.0 + slope * (n_rows - 1)) / (1.0 + slope * (rows[-1] - 1))
        above = max(below, seconds[rows[at]])
        return below + (above - below) * (n_rows - rows[at - 1]) / (rows[at] - rows[at - 1])

    def _slope(self) -> float:
        """Give what a row costs beside the first, in steps of one row."""
        first, last = self._rows[0], self._rows[-1]
        if first == last:
            return _ROW_COST
        a_row = (self._seconds[last] - self._seconds[first]) / (last - first)
        one = self._seconds[first] - a_row * (first - 1)
        return min(max(a_row / one, 0.0), 1.0) if one > 0.0 else 1.0

    def check(self) -> None:
        """Raise AssertionError when the invariant does not hold."""
        if self._rows:
            costs = [self.seconds(n) for n in range(1, self._rows[-1] + 8)]
            assert costs[0] > 0.0, "budget: a step that takes no time"
            assert all(a <= b * (1 + 1e-9) for a, b in pairwise(costs)), "budget: costs that fall"


class Acceptance:
    """How often a drafter's tokens come, beside what it says itself, by what its guess rests on.

    A token's chance is the drafter's probability times `rate`. Old observations fade, and `whole`, what is known of all
    sequences, counts for as much as a few tokens.
    """

    # What a guess on 1, 2, 3-4, 5-8 and more tokens of context is worth before anything is known.
    _FIRST = (0.3, 0.5, 0.65, 0.8, 0.9)
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
    offers = sorted(((-chance, i, s) for s, own in enumerate(chances) for i, chance in enumerate(own)), key=_first_two)
    plain = n_rows / seconds(n_rows)
    best, n_best, expected = plain, 0, float(n_rows)
    for n, (negative, _, _) in enumerate(offers[:n_drafts_max], 1):
        expected -= negative
        rate = expected / (seconds(n_rows + n) + wait_s)
        if rate > best:
            best, n_best = rate, n
    numbers = [0] * len(chances)
    for _, _, s in offers[:n_best]:
        numbers[s] += 1
    return numbers, best / plain


def _first_two(offer: tuple[float, int, int]) -> tuple[float, int]:
    return offer[0], offer[1]


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
