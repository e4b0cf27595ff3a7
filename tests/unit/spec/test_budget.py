"""The choice of drafts as a pure function, and the two tables it reads."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.spec.budget import Acceptance, StepCosts, choose, n_for_batch

falling = st.lists(st.floats(0.01, 1.0), max_size=6).map(
    lambda each: list(itertools.accumulate(each, lambda a, b: a * b))
)
lines = st.tuples(st.floats(1e-4, 1e-1), st.floats(0.0, 2.0))


def by_line(line):
    base, slope = line
    return lambda n: base * (1.0 + slope * (n - 1))


@settings(deadline=None, derandomize=True)
@given(st.lists(falling, min_size=1, max_size=5), lines, st.integers(0, 12), st.floats(0, 1e-3))
def test_the_choice_is_within_limits_and_never_worse_than_none(chances, line, n_max, wait_s):
    numbers, gain = choose(chances, by_line(line), n_rows=len(chances), n_drafts_max=n_max, wait_s=wait_s)
    assert all(0 <= n <= len(own) for n, own in zip(numbers, chances, strict=True))
    assert sum(numbers) <= n_max
    assert gain >= 1.0
    assert (gain > 1.0) == (sum(numbers) > 0)


@settings(deadline=None, derandomize=True)
@given(st.lists(falling, min_size=1, max_size=3), lines, st.floats(0, 1e-3))
def test_no_other_choice_makes_more_tokens_a_second(chances, line, wait_s):
    """Against all of them; so it is closed under prefixes, as its chances are."""
    seconds, n_rows = by_line(line), len(chances)
    _, gain = choose(chances, seconds, n_rows=n_rows, n_drafts_max=99, wait_s=wait_s)
    best = n_rows / seconds(n_rows)
    for numbers in itertools.product(*(range(len(own) + 1) for own in chances)):
        if sum(numbers):
            tokens = n_rows + sum(sum(own[:n]) for own, n in zip(chances, numbers, strict=True))
            best = max(best, tokens / (seconds(n_rows + sum(numbers)) + wait_s))
    assert gain == pytest.approx(best / (n_rows / seconds(n_rows)))


@settings(deadline=None, derandomize=True)
@given(st.lists(falling, min_size=1, max_size=4), st.floats(0.01, 1.0), st.floats(1.0, 3.0))
def test_dearer_rows_never_make_more_drafts(chances, slope, dearer):
    few, many = (
        sum(choose(chances, by_line((1e-3, s)), n_rows=len(chances), n_drafts_max=99)[0])
        for s in (slope * dearer, slope)
    )
    assert few <= many


def test_costs_are_those_measured_and_a_line_between_them():
    costs = StepCosts()
    for _ in range(40):
        for n in (1, 2, 4, 8):
            costs.observe(n, 1e-3 * (1 + 0.2 * (n - 1)))
    costs.check()
    for n in (1, 2, 3, 4, 6, 8, 12):
        assert costs.seconds(n) == pytest.approx(1e-3 * (1 + 0.2 * (n - 1)), rel=0.08)


def test_a_size_that_costs_more_than_the_line_is_known_for_it():
    """Rows computed four at a time: the fifth costs as much as three more."""
    costs = StepCosts()
    for _ in range(40):
        for n in range(1, 9):
            costs.observe(n, 1e-3 * -(-n // 4))
    assert costs.seconds(5) > 1.5 * costs.seconds(4)


def test_one_slow_step_is_forgotten():
    costs = StepCosts()
    rng = random.Random(0)
    for _ in range(30):
        costs.observe(rng.choice([1, 4]), 1e-3)
    costs.observe(6, 1.0)
    for _ in range(200):
        costs.observe(rng.choice([1, 4]), 1e-3)
    assert costs.seconds(6) < 1.5e-3


def test_after_one_measurement_further_rows_are_taken_to_cost_something():
    costs = StepCosts()
    assert not costs.is_known
    costs.observe(1, 1e-3)
    assert costs.is_known
    assert 1.1e-3 < costs.seconds(2) < 1.3e-3


def test_acceptance_learns_by_what_a_guess_rests_on():
    whole = Acceptance()
    one, other = Acceptance(whole), Acceptance(whole)
    before = other.rate(1)
    for _ in range(30):
        one.observe(12, 5, 5.0)
        one.observe(1, 0, 1.0)
    assert one.rate(12) > 0.97
    assert one.rate(1) < 0.1
    assert other.rate(1) < before / 2, "what is known of all is a beginning for each"
    assert all(0.0 <= one.rate(n) <= 1.0 for n in range(1, 40))


def test_the_number_of_drafts_follows_the_batch():
    ranges = ((1, 4, 8), (8, 16, 3), (20, 32, 0))
    got = [n_for_batch(ranges, n, 6) for n in (1, 4, 5, 7, 8, 16, 17, 20, 40)]
    assert got == [6, 6, 6, 6, 3, 3, 3, 0, 0]
    assert n_for_batch((), 5, 6) == 6
