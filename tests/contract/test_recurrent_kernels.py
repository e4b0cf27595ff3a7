"""Short convolutions, the delta rule with both kinds of gates, and the gated norm, at every level.

Each against its definition over several sequences of a step, and bitwise against itself in other chunks and on other
numbers of threads.
"""

import numpy as np
import pytest

from tiercel import _native
from tiercel.ops import reference_recurrent as reference
from tiercel.ops.reference import TOLERANCE

LEVELS = _native.kernel_levels()
LENGTHS = {"decode": [1, 1, 1], "empty": [], "ragged": [3, 0, 70, 1], "long": [130]}


def seeded(*shape, seed=1, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def assert_close(got, expected, op):
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE[op].rtol, atol=TOLERANCE[op].atol)


def same_bits(a, b):
    return np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


def step_of(lengths, is_new):
    """Slots in another order than sequences; every second sequence goes on from a state, or all begin."""
    n = len(lengths)
    slots = np.arange(n, dtype=np.int32)[::-1].copy()
    starts = np.array([0 if is_new or i % 2 else 9 for i in range(n)], np.int32)
    return slots, starts, np.cumsum([0, *lengths]).astype(np.int32)


class Conv:
    op = "short_conv"

    def __init__(self, channels, width, has_bias, act):
        self.w, self.act, self.width, self.channels = seeded(channels, width, seed=5), act, width, channels
        self.bias = seeded(channels, seed=6) if has_bias else None
        self.state_floats = (width - 1) * channels

    def inputs(self, n):
        return (seeded(n, self.channels),)

    def run(self, level, n_threads, step, inputs, state):
        y = np.full(inputs[0].shape, np.nan, np.float32)
        taps = np.ascontiguousarray(self.w.T)
        _native.short_conv(
            level, n_threads, *step, *inputs, taps, bias=self.bias, has_silu=self.act == "silu", y=y, state=state
        )
        return y

    def define(self, inputs, state):
        window = state.reshape(self.width - 1, self.channels)
        y, window = reference.short_conv(*inputs, self.w, self.bias, self.act, window)
        return y, window.reshape(-1)


class Rule:
    op = "delta_rule"

    def __init__(self, key_heads, heads, key_dim, value_dim, per_channel, lower_bound):
        self.sizes = key_heads, heads, key_dim, value_dim
        self.gate_width = heads * key_dim if per_channel else heads
        self.a_log, self.dt_bias = seeded(heads, seed=7, scale=0.5), seeded(self.gate_width, seed=8)
        self.lower_bound = lower_bound
        self.padded = -(-value_dim // 16) * 16
        self.state_floats = heads * key_dim * self.padded

    def inputs(self, n):
        key_heads, heads, key_dim, value_dim = self.sizes
        qkv = seeded(n, 2 * key_heads * key_dim + heads * value_dim)
        return qkv, seeded(n, self.gate_width, seed=2), seeded(n, heads, seed=3, scale=2.0)

    def run(self, level, n_threads, step, inputs, state):
        key_heads, heads, key_dim, value_dim = self.sizes
        y = np.full((len(inputs[0]), heads * value_dim), np.nan, np.float32)
        options = {"key_heads": key_heads, "key_dim": key_dim, "lower_bound": self.lower_bound, "eps": 1e-6}
        _native.delta_rule(level, n_threads, *step, *inputs, self.a_log, self.dt_bias, **options, y=y, state=state)
        return y

    def define(self, inputs, state):
        key_heads, heads, key_dim, value_dim = self.sizes
        qkv, gate, beta = inputs
        n = len(qkv)
        q, k, v = np.split(qkv, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
        q, k, v = q.reshape(n, key_heads, key_dim), k.reshape(n, key_heads, key_dim), v.reshape(n, heads, value_dim)
        dt_bias = self.dt_bias
        if self.gate_width != heads:
            gate, dt_bias = gate.reshape(n, heads, key_dim), dt_bias.reshape(heads, key_dim)
        decay = reference.log_decay(gate, self.a_log, dt_bias, self.lower_bound)
        y, state = reference.delta_rule(q, k, v, decay, beta, self._plain(state))
        return y.reshape(n, heads * value_dim), self._blocked(state)

    def _plain(self, state):
        """From [H][blocks of 32 columns][D][columns] to [H, D, E]."""
        _, heads, key_dim, value_dim = self.sizes
        parts, rows = [], state.reshape(heads, -1)
        for begin in range(0, self.padded, 32):
            width = min(32, self.padded - begin)
            parts.append(rows[:, key_dim * begin : key_dim * (begin + width)].reshape(heads, key_dim, width))
        return np.concatenate(parts, axis=2)[:, :, :value_dim]

    def _blocked(self, state):
        _, heads, _, value_dim = self.sizes
        wide = np.pad(state, [(0, 0), (0, 0), (0, self.padded - value_dim)])
        blocks = [wide[:, :, begin : begin + 32].reshape(heads, -1) for begin in range(0, self.padded, 32)]
        return np.concatenate(blocks, axis=1).reshape(-1)


CASES = {
    "conv-4-silu": Conv(72, 4, has_bias=False, act="silu"),
    "conv-3-bias": Conv(37, 3, has_bias=True, act="none"),
    "conv-1": Conv(16, 1, has_bias=True, act="silu"),
    "gdn": Rule(2, 6, 16, 24, per_channel=False, lower_bound=0.0),
    "gdn-wide": Rule(1, 2, 40, 80, per_channel=False, lower_bound=0.0),
    "kda": Rule(2, 2, 128, 128, per_channel=True, lower_bound=0.0),
    "kda-bounded": Rule(3, 3, 24, 40, per_channel=True, lower_bound=-5.0),
    "gdn-bounded": Rule(1, 1, 8, 200, per_channel=False, lower_bound=-5.0),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return request.param


def state_of(case, n, *, fill=None):
    """Random states; padding columns are zero, as the kernel keeps them."""
    if fill is not None:
        return np.full((n, case.state_floats), fill, np.float32)
    state = seeded(n, case.state_floats, seed=9, scale=0.3)
    if isinstance(case, Rule):
        state = np.stack([case._blocked(case._plain(row)) for row in state]) if n else state
    return state


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_outputs_and_states_agree_with_the_definition(case, level, n_threads, lengths):
    slots, starts, rows = step_of(lengths, is_new=False)
    inputs, state = case.inputs(sum(lengths)), state_of(case, len(lengths))
    before = state.copy()
    y = case.run(level, n_threads, (slots, starts, rows), inputs, state)
    for i, slot in enumerate(slots):
        own = slice(rows[i], rows[i + 1])
        if not lengths[i]:
            assert same_bits(state[slot], before[slot]), "a sequence without rows keeps its state"
            continue
        found = before[slot] if starts[i] else np.zeros_like(before[slot])
        expected, after = case.define([a[own] for a in inputs], found)
        assert_close(y[own], expected, case.op)
        assert_close(state[slot], after, case.op)


@pytest.mark.parametrize("level", LEVELS)
def test_every_chunking_number_of_threads_and_level_gives_the_same_bits(case, level):
    n = 70
    inputs, state = case.inputs(n), state_of(case, 1, fill=np.nan)
    whole = case.run(LEVELS[0], 1, step_of([n], is_new=True), inputs, state)
    for cuts in ([n], [1] * n, [3, 16, 1, 33, 17]):
        other = state_of(case, 1, fill=np.nan)
        parts, start = [], 0
        for count in cuts:
            step = (np.zeros(1, np.int32), np.array([start], np.int32), np.array([0, count], np.int32))
            parts.append(case.run(level, 1 + len(parts) % 3, step, [a[start : start + count] for a in inputs], other))
            start += count
        assert same_bits(np.concatenate(parts), whole)
        assert same_bits(other, state)


@pytest.mark.parametrize("level", LEVELS)
def test_a_sequence_that_begins_reads_nothing_of_its_slot(case, level):
    """What another sequence left there, NaN among it."""
    lengths = [2, 20]
    inputs = case.inputs(sum(lengths))
    clean, dirty = state_of(case, 2, fill=0.0), state_of(case, 2, fill=np.nan)
    step = step_of(lengths, is_new=True)
    assert same_bits(case.run(level, 2, step, inputs, clean), case.run(level, 2, step, inputs, dirty))
    assert same_bits(clean, dirty)


@pytest.mark.parametrize("level", LEVELS)
def test_nan_stays_in_its_sequence(case, level):
    lengths = [4, 4]
    inputs = case.inputs(8)
    clean = case.run(level, 2, step_of(lengths, is_new=True), inputs, state_of(case, 2, fill=0.0))
    inputs[0][1] = np.nan
    y = case.run(level, 2, step_of(lengths, is_new=True), inputs, state_of(case, 2, fill=0.0))
    assert np.isnan(y[1]).any()
    assert same_bits(y[:1], clean[:1])
    assert same_bits(y[4:], clean[4:])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("act", ["silu", "sigmoid", "none"])
@pytest.mark.parametrize(("n", "heads", "width", "has_w"), [(0, 2, 8, True), (3, 6, 24, True), (5, 1, 100, False)])
def test_gated_norm_agrees_with_its_definition(level, act, n, heads, width, has_w):
    x, z, w = seeded(n, heads * width), seeded(n, heads * width, seed=2, scale=4.0), seeded(width, seed=3)
    y = np.full_like(x, np.nan)
    weight = w if has_w else None
    options = {"is_sigmoid": act == "sigmoid", "is_plain": act == "none"}
    _native.gated_norm(level, 2, x, z, heads=heads, w=weight, eps=1e-6, **options, y=y)
    expected = reference.gated_norm(x.reshape(n, heads, width), z.reshape(n, heads, width), weight, 1e-6, act)
    assert_close(y, expected.reshape(x.shape), "gated_norm")


@pytest.mark.parametrize("level", LEVELS)
def test_one_gate_may_be_of_all_columns_of_a_head(level):
    x, z = seeded(5, 3 * 40), seeded(5, 3, seed=2)
    y, wide = np.full_like(x, np.nan), np.full_like(x, np.nan)
    options = {"heads": 3, "w": None, "eps": 1.0, "is_sigmoid": True}
    _native.gated_norm(level, 2, x, z, **options, y=y)
    _native.gated_norm(level, 2, x, np.repeat(z, 40, axis=1), **options, y=wide)
    assert same_bits(y, wide)


@pytest.mark.parametrize("level", LEVELS[:1])
def test_operands_that_do_not_fit_are_refused(level):
    case = CASES["gdn"]
    step = step_of([2], is_new=True)
    qkv, gate, beta = case.inputs(2)
    with pytest.raises(ValueError, match="are needed"):
        case.run(level, 1, step, (qkv[:, :-1].copy(), gate, beta), state_of(case, 1))
    with pytest.raises(ValueError, match="state needs"):
        case.run(level, 1, step, (qkv, gate, beta), np.zeros((1, 3), np.float32))
