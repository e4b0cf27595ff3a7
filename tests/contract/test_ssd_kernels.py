"""Mamba2's recurrence and its norm at every level: odd sizes, ragged and empty steps.

Each against its definition, and bitwise against itself in other chunks, among others and on other numbers of threads.
"""

import numpy as np
import pytest

from tiercel import _native
from tiercel.ops import reference_recurrent as reference
from tiercel.ops.reference import TOLERANCE

LEVELS = _native.kernel_levels()
LENGTHS = {"decode": [1, 1, 1], "empty": [], "ragged": [3, 0, 70, 1], "long": [130], "two": [2, 5]}
NO_LIMITS = (0.0, float("inf"))


def seeded(*shape, seed=1, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def same_bits(a, b):
    return np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


class Scan:
    """One set of sizes; states are kept as the kernel lays them out, by blocks of 32 columns of a multiple of 16."""

    def __init__(self, heads, head_dim, groups, state_dim, limits=NO_LIMITS):
        self.sizes, self.limits = (heads, head_dim, groups, state_dim), limits
        self.a_log, self.dt_bias, self.d = (seeded(heads, seed=7 + i) for i in range(3))
        self.padded = -(-head_dim // 16) * 16
        self.state_floats = heads * state_dim * self.padded

    def inputs(self, n):
        heads, head_dim, groups, state_dim = self.sizes
        return seeded(n, heads * head_dim + 2 * groups * state_dim), seeded(n, heads, seed=2)

    def run(self, level, n_threads, step, inputs, state):
        heads, head_dim, groups, _ = self.sizes
        y = np.full((len(inputs[0]), heads * head_dim), np.nan, np.float32)
        weights = (self.a_log, self.dt_bias, self.d)
        _native.ssd(level, n_threads, *step, *inputs, *weights, groups=groups, limits=self.limits, y=y, state=state)
        return y

    def define(self, inputs, state):
        heads, head_dim, groups, state_dim = self.sizes
        xbc, dt = inputs
        x, b, c = np.split(xbc, [heads * head_dim, heads * head_dim + groups * state_dim], axis=1)
        b, c = b.reshape(-1, groups, state_dim), c.reshape(-1, groups, state_dim)
        steps = reference.ssd_steps(dt, self.dt_bias, *self.limits)
        x = x.reshape(-1, heads, head_dim)
        y, state = reference.ssd(x, b, c, steps, self.a_log, self.d, self._plain(state))
        return y.reshape(len(xbc), -1), self._blocked(state)

    def states(self, n, *, fill=None):
        """Random states, or all of one number; padding columns are zero, as the kernel keeps them."""
        if fill is not None:
            return np.full((n, self.state_floats), fill, np.float32)
        found = seeded(n, self.state_floats, seed=9, scale=0.3)
        return np.stack([self._blocked(self._plain(row)) for row in found]) if n else found

    def _plain(self, state):
        heads, head_dim, _, n = self.sizes
        rows, parts = state.reshape(heads, -1), []
        for begin in range(0, self.padded, 32):
            width = min(32, self.padded - begin)
            parts.append(rows[:, n * begin : n * (begin + width)].reshape(heads, n, width))
        return np.concatenate(parts, axis=2)[:, :, :head_dim]

    def _blocked(self, state):
        heads, head_dim = self.sizes[:2]
        wide = np.pad(state, [(0, 0), (0, 0), (0, self.padded - head_dim)])
        blocks = [wide[:, :, begin : begin + 32].reshape(heads, -1) for begin in range(0, self.padded, 32)]
        return np.concatenate(blocks, axis=1).reshape(-1)


CASES = {
    "released": Scan(4, 64, 2, 128),
    "tiny": Scan(8, 16, 2, 16),
    "odd": Scan(3, 40, 3, 7),
    "one-of-each": Scan(1, 1, 1, 1),
    "two-blocks": Scan(2, 100, 1, 24),
    "three-vectors": Scan(5, 33, 1, 9, limits=(0.4, 0.9)),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return request.param


def step_of(lengths, *, is_new):
    """Slots in another order than sequences; every second sequence goes on from a state, or all begin."""
    n = len(lengths)
    slots = np.arange(n, dtype=np.int32)[::-1].copy()
    starts = np.array([0 if is_new or i % 2 else 9 for i in range(n)], np.int32)
    return slots, starts, np.cumsum([0, *lengths]).astype(np.int32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_outputs_and_states_agree_with_the_definition(case, level, n_threads, lengths):
    slots, starts, rows = step_of(lengths, is_new=False)
    inputs, state = case.inputs(sum(lengths)), case.states(len(lengths))
    before = state.copy()
    y = case.run(level, n_threads, (slots, starts, rows), inputs, state)
    limits = {"rtol": TOLERANCE["ssd"].rtol, "atol": TOLERANCE["ssd"].atol}
    for i, slot in enumerate(slots):
        own = slice(rows[i], rows[i + 1])
        if not lengths[i]:
            assert same_bits(state[slot], before[slot]), "a sequence without rows keeps its state"
            continue
        found = before[slot] if starts[i] else np.zeros_like(before[slot])
        expected, after = case.define([a[own] for a in inputs], found)
        np.testing.assert_allclose(y[own], expected, **limits)
        np.testing.assert_allclose(state[slot], after, **limits)


@pytest.mark.parametrize("level", LEVELS)
def test_every_chunking_number_of_threads_and_level_gives_the_same_bits(case, level):
    n = 70
    inputs, state = case.inputs(n), case.states(1, fill=np.nan)
    whole = case.run(LEVELS[0], 1, step_of([n], is_new=True), inputs, state)
    for cuts in ([n], [1] * n, [3, 16, 1, 33, 17]):
        other = case.states(1, fill=np.nan)
        parts, start = [], 0
        for count in cuts:
            step = (np.zeros(1, np.int32), np.array([start], np.int32), np.array([0, count], np.int32))
            parts.append(case.run(level, 1 + len(parts) % 3, step, [a[start : start + count] for a in inputs], other))
            start += count
        assert same_bits(np.concatenate(parts), whole)
        assert same_bits(other, state)


@pytest.mark.parametrize("level", LEVELS)
def test_a_sequence_among_others_gets_the_bits_it_gets_alone(case, level):
    lengths = [5, 0, 18, 1]
    inputs, state = case.inputs(sum(lengths)), case.states(4, fill=np.nan)
    together = case.run(level, 2, step_of(lengths, is_new=True), inputs, state)
    alone = case.states(1, fill=np.nan)
    y = case.run(level, 1, step_of([18], is_new=True), [a[5:23] for a in inputs], alone)
    assert same_bits(together[5:23], y)
    assert same_bits(state[1], alone[0]), "the third sequence has slot 1"


@pytest.mark.parametrize("level", LEVELS)
def test_nan_stays_in_its_sequence(case, level):
    inputs = case.inputs(8)
    clean = case.run(level, 2, step_of([4, 4], is_new=True), inputs, case.states(2, fill=0.0))
    for operand in inputs:
        poisoned = [a.copy() for a in inputs]
        poisoned[[a is operand for a in inputs].index(True)][1] = np.nan
        y = case.run(level, 2, step_of([4, 4], is_new=True), poisoned, case.states(2, fill=0.0))
        assert np.isnan(y[1:4]).all(axis=1).all(), "what a token spoils stays spoilt"
        assert same_bits(y[:1], clean[:1])
        assert same_bits(y[4:], clean[4:])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("n", "groups", "width"), [(0, 2, 8), (3, 6, 24), (5, 1, 100), (2, 3, 64)])
def test_gate_norm_agrees_with_its_definition(level, n, groups, width):
    x, z, w = seeded(n, groups * width), seeded(n, groups * width, seed=2, scale=4.0), seeded(groups * width, seed=3)
    y = np.full_like(x, np.nan)
    _native.gate_norm(level, 2, x, z, groups=groups, w=w, eps=1e-5, y=y)
    expected = reference.gate_norm(x, z, w, 1e-5, groups)
    np.testing.assert_allclose(y, expected, rtol=TOLERANCE["gate_norm"].rtol, atol=TOLERANCE["gate_norm"].atol)


def test_every_level_gates_and_norms_to_the_same_bits():
    x, z, w = seeded(4, 3 * 40), seeded(4, 3 * 40, seed=2), seeded(3 * 40, seed=3)
    found = []
    for level in LEVELS:
        y = np.full_like(x, np.nan)
        _native.gate_norm(level, 3, x, z, groups=3, w=w, eps=1e-5, y=y)
        found.append(y)
    assert all(same_bits(found[0], y) for y in found)


def test_operands_that_do_not_fit_are_refused():
    case, step = CASES["tiny"], step_of([2], is_new=True)
    xbc, dt = case.inputs(2)
    with pytest.raises(ValueError, match="are needed"):
        case.run(LEVELS[0], 1, step, (xbc[:, :-1].copy(), dt), case.states(1))
    with pytest.raises(ValueError, match="state needs"):
        case.run(LEVELS[0], 1, step, (xbc, dt), np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="groups or w"):
        _native.gate_norm(LEVELS[0], 1, xbc, xbc, groups=5, w=seeded(xbc.shape[1]), eps=1e-5, y=xbc.copy())
