"""Norms, gated activations, rotary tables and the other row kernels against their definitions, at every level."""

import numpy as np
import pytest

from tiercel import _native
from tiercel.ops import reference
from tiercel.ops.reference import TOLERANCE

LEVELS = _native.kernel_levels()
ACTS = [
    ("silu", ()),
    ("gelu_tanh", ()),
    ("situ", (4.0, 25.0)),
    ("situ", (4.0, 0.0)),
    ("swiglu_clamp", (1.702, 2.5)),
    ("silu_clamp", (2.0,)),
]

pytestmark = [pytest.mark.parametrize("level", LEVELS), pytest.mark.parametrize("n_threads", [1, 2])]


def seeded(*shape, seed=1, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def native_params(params):
    return dict(zip(("p0", "p1"), params, strict=False))


def assert_close(got, expected, op):
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE[op].rtol, atol=TOLERANCE[op].atol)


@pytest.mark.parametrize(("n_rows", "width"), [(0, 32), (1, 8), (3, 24), (5, 576), (2, 1001)])
def test_norm_agrees_with_its_definition(level, n_threads, n_rows, width):
    x, w = seeded(n_rows, width, scale=4.0), seeded(width, seed=2)
    y = np.full_like(x, np.nan)
    _native.norm(level, n_threads, x, w, eps=1e-5, y=y)
    assert_close(y, reference.rms_norm(x, w, 1e-5), "rms_norm")


def test_norm_with_a_residual_adds_the_norm_to_it(level, n_threads):
    x, w, residual = seeded(4, 72), seeded(72, seed=2), seeded(4, 72, seed=3)
    y = residual.copy()
    _native.norm(level, n_threads, x, w, eps=1e-6, add_to_y=True, y=y)
    assert_close(y, residual + reference.rms_norm(x, w, 1e-6), "rms_norm")


@pytest.mark.parametrize(("act", "params"), ACTS)
@pytest.mark.parametrize(("n_rows", "width"), [(0, 32), (1, 32), (5, 40), (3, 1536)])
def test_gated_agrees_with_its_definition(level, n_threads, act, params, n_rows, width):
    x = seeded(n_rows, 2 * width, scale=3.0)
    y = np.full((n_rows, width), np.nan, np.float32)
    _native.gated(level, n_threads, x, act=act, y=y, **native_params(params))
    assert_close(y, reference.gated(x, act, params), "gated")


@pytest.mark.parametrize(("act", "params"), ACTS)
def test_gated_stays_finite_for_gates_far_from_zero(level, n_threads, act, params):
    gate = np.array([[-3e4, -200.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0, 3e4]], np.float32)
    x = np.concatenate([gate, np.ones_like(gate)], axis=1)
    y = np.full_like(gate, np.nan)
    _native.gated(level, n_threads, x, act=act, y=y, **native_params(params))
    assert_close(y, reference.gated(x, act, params), "gated")


@pytest.mark.parametrize(("act", "params"), ACTS)
@pytest.mark.parametrize("side", [0, 1])
def test_a_nan_stays_a_nan_through_every_activation(level, n_threads, act, params, side):
    x = np.ones((1, 40), np.float32)
    x[0, 20 * side + 3] = np.nan
    y = np.zeros((1, 20), np.float32)
    _native.gated(level, n_threads, x, act=act, y=y, **native_params(params))
    assert np.flatnonzero(np.isnan(y)).tolist() == [3]


def test_rope_table_agrees_with_its_definition(level, n_threads):
    inv_freq = (1e5 ** (-np.arange(12) / 12)).astype(np.float32)
    seq_start, seq_rows = np.array([0, 7000, 33], np.int32), np.array([0, 3, 4, 9], np.int32)
    positions = np.array([0, 1, 2, 7000, 33, 34, 35, 36, 37])
    y = np.full((9, 24), np.nan, np.float32)
    _native.rope_table(level, n_threads, seq_start, seq_rows, inv_freq, magnitude=1.1386, y=y)
    assert_close(y, reference.rope_table(positions, inv_freq, 1.1386), "rope_table")


@pytest.mark.parametrize(("n_rows", "width"), [(0, 16), (1, 49), (3, 5), (2, 3000)])
def test_softcap_and_add_agree_with_their_definitions(level, n_threads, n_rows, width):
    x, y = seeded(n_rows, width, scale=40.0), seeded(n_rows, width, seed=2)
    capped, total = x.copy(), x.copy()
    _native.softcap(level, n_threads, cap=30.0, x=capped)
    _native.add(level, n_threads, y, x=total)
    assert_close(capped, reference.softcap(x, 30.0), "softcap")
    assert_close(total, reference.add(x, y), "add")


def test_select_rows_copies_the_rows_asked_for(level, n_threads):
    x, rows = seeded(6, 50), np.array([5, 0, 0, 3], np.int32)
    y = np.full((4, 50), np.nan, np.float32)
    _native.select_rows(level, n_threads, x, rows, y=y)
    np.testing.assert_array_equal(y, reference.select_rows(x, rows))


@pytest.mark.parametrize("n", [1, 16, 50, 4000])
def test_argmax_is_the_first_largest(level, n_threads, n):
    x = np.round(seeded(n, scale=2.0))  # rounded: many ties
    assert _native.argmax(level, x) == int(np.argmax(x))
    x[n // 2] = np.nan
    assert _native.argmax(level, x) == -1


def test_an_output_of_another_type_is_refused_and_not_copied(level, n_threads):
    with pytest.raises(TypeError):
        _native.norm(level, n_threads, seeded(2, 8), seeded(8), eps=1e-5, y=np.zeros((2, 8), np.float64))


def test_arrays_that_do_not_fit_are_refused(level, n_threads):
    with pytest.raises(ValueError, match="equal shapes"):
        _native.norm(level, n_threads, seeded(2, 8), seeded(8), eps=1e-5, y=np.zeros((3, 8), np.float32))
    with pytest.raises(ValueError, match="kernel_levels"):
        _native.argmax("avx1024", seeded(4))
