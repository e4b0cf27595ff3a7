"""Budgets for verification by rejection: an early stop, and a number from confidences two steps old.

Properties first, then DSpark's counter-example, simulated: a rule that looks at what it should not biases the output.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.spec.budget import choose, n_worth, share
from tiercel.spec.verify import NO_DRAFT, Stream, gumbels, matching, standard, uniforms

falling = st.lists(st.floats(0.01, 1.0), max_size=6).map(
    lambda each: list(itertools.accumulate(each, lambda a, b: a * b))
)
batches = st.lists(falling, min_size=1, max_size=4)
# What further rows cost in steps of one, each: not a line, so that stopping early is something else than the best.
stairs = st.lists(st.floats(0.0, 0.5), min_size=32, max_size=32)


def by_stairs(each):
    costs = [1.0, *itertools.accumulate(each, initial=1.0)]
    return costs.__getitem__


@settings(deadline=None, derandomize=True)
@given(batches, stairs, st.integers(0, 12))
def test_a_number_is_within_limits_and_the_early_one_no_larger(chances, each, n_max):
    arguments = {"n_rows": len(chances), "n_drafts_max": n_max}
    early = n_worth(chances, by_stairs(each), stops_early=True, **arguments)
    best = n_worth(chances, by_stairs(each), **arguments)
    assert 0 <= early <= best <= min(n_max, sum(map(len, chances)))
    assert share(chances, best) == choose(chances, by_stairs(each), **arguments)[0]


@settings(deadline=None, derandomize=True)
@given(batches, st.integers(0, 24))
def test_shares_are_prefixes_that_grow_with_the_number_and_bring_the_most(chances, n):
    numbers = share(chances, n)
    assert sum(numbers) == min(n, sum(map(len, chances)))
    assert all(few <= more for few, more in zip(numbers, share(chances, n + 1), strict=True))
    got = sum(sum(own[:k]) for own, k in zip(chances, numbers, strict=True))
    for others in itertools.product(*(range(len(own) + 1) for own in chances)):
        if sum(others) == sum(numbers):
            assert got >= sum(sum(own[:k]) for own, k in zip(chances, others, strict=True)) - 1e-9


@settings(deadline=None, derandomize=True)
@given(batches, stairs, st.integers(0, 24), st.data())
def test_a_draft_is_taken_whatever_comes_behind_it(chances, each, n, data):
    """The condition: neither rule looks at later drafts of a sequence when it decides about one."""
    s = data.draw(st.sampled_from(range(len(chances))))
    place = data.draw(st.integers(0, max(len(chances[s]) - 1, 0)))
    kept = chances[s][: place + 1]
    tail = [kept[-1] * c for c in data.draw(falling)] if kept else []
    others = [*chances[:s], kept + tail, *chances[s + 1 :]]

    def is_taken(of):
        early = n_worth(of, by_stairs(each), n_rows=len(of), n_drafts_max=24, stops_early=True)
        return share(of, n)[s] > place, share(of, early)[s] > place

    if kept:
        assert is_taken(chances) == is_taken(others)


@pytest.mark.parametrize("stops_early", [False, True])
def test_sure_drafts_are_all_taken_where_rows_are_free_and_hopeless_ones_never(stops_early):
    def number(chance):
        arguments = {"n_rows": 2, "n_drafts_max": 99, "stops_early": stops_early}
        return n_worth([[chance] * 3, [chance] * 2], lambda n: 1.0, **arguments)

    assert (number(1.0), number(0.0)) == (5, 0)


# The counter-example: two sequences with two drafts each, 0 or 1, drawn evenly where the target says (.7, .3). Behind a
# drafted 0 the drafter is sure of its second draft, behind a 1 it expects nothing of it.

N = 200_000
P, Q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
CHI_SQUARE_7 = 29.9  # 0.9999 of it, with 7 degrees of freedom


def live(first_a, first_b):
    return [[0.8, 0.8 * (0.95, 0.05)[first_a]], [0.6, 0.6 * (0.95, 0.05)[first_b]]]


def in_pairs(n_rows):
    return 1.0 + 0.7 * -(-(n_rows - 2) // 2)


def evenly(n_rows):
    return 1.0 + 0.35 * (n_rows - 2)


def numbers_by(rule, first_a, first_b, before):
    """Two numbers, from what was drafted; `before`: what the drafter was sure of two steps ago."""
    chances, limits = live(first_a, first_b), {"n_rows": 2, "n_drafts_max": 4}
    if rule == "best":
        return choose(chances, in_pairs, **limits)[0]
    if rule == "early stop":
        return share(chances, n_worth(chances, evenly, stops_early=True, **limits))
    return share(chances, n_worth(live(before, before), in_pairs, **limits))


def draw(distribution, seed, position, stream):
    noise = gumbels(seed, position, stream, np.arange(2 * N)).reshape(N, 2)
    return (np.log(distribution) + noise).argmax(axis=-1)


def emit(seed, drafts, numbers, *, matches):
    """Two tokens of each case: those of the step, and plain ones behind."""
    own = np.stack([draw(P, seed, i, Stream.TARGET) for i in range(3)], axis=1)
    computed = np.where(np.arange(2) < numbers[:, None], drafts, NO_DRAFT)
    if matches:
        got = matching(own, computed)
    else:
        accept = np.stack([uniforms(seed, i, np.arange(N)) for i in range(2)], axis=1)
        noise = [gumbels(seed, i, Stream.RESIDUAL, np.arange(2 * N)).reshape(N, 2) for i in range(3)]
        p, q = np.broadcast_to(P, (N, 3, 2)), np.broadcast_to(Q, (N, 2, 2))
        got = standard(p, q, computed, accept, np.stack(noise, axis=1))
    plain = own if matches else np.stack([draw(P, seed, i + 50, Stream.TARGET) for i in range(3)], axis=1)
    return np.where(got.token_ids >= 0, got.token_ids, plain)[:, :2]


@pytest.mark.parametrize("matches", [False, True])
@pytest.mark.parametrize("rule", ["best", "early stop", "two steps old"])
def test_a_rule_that_looks_ahead_biases_rejection_and_no_other_does(rule, matches):
    """Source: Cheng et al. 2026, arXiv:2607.05147: .85/.15 comes out for .7/.3."""
    drafts = [np.stack([draw(Q, seed, i, Stream.DRAFT) for i in range(2)], axis=1) for seed in (5, 6)]
    before = draw(Q, 7, 0, Stream.DRAFT)
    table = np.array([[[numbers_by(rule, a, b, t) for t in (0, 1)] for b in (0, 1)] for a in (0, 1)])
    assert len(np.unique(table.reshape(-1, 2), axis=0)) > 1  # a rule that always says the same would show nothing
    numbers = table[drafts[0][:, 0], drafts[1][:, 0], before]
    a = emit(5, drafts[0], numbers[:, 0], matches=matches)
    b = emit(6, drafts[1], numbers[:, 1], matches=matches)

    counts = np.bincount(a[:, 0] * 4 + a[:, 1] * 2 + b[:, 0], minlength=8)
    expected = N * np.einsum("i,j,k->ijk", P, P, P).reshape(-1)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    if rule == "best" and not matches:
        assert chi_square > 10_000
        np.testing.assert_allclose((a[:, 0] == 0).mean(), 0.85, atol=0.005)
    else:
        assert chi_square < CHI_SQUARE_7
