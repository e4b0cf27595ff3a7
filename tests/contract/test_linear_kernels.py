"""Packed matrices, rounded activations, linear and embed against their definitions, in every format at every level."""

import numpy as np
import pytest

from tiercel import _native
from tiercel.ops import reference
from tiercel.ops.reference import TOLERANCE
from tiercel.quant.dequantize import dequantize
from tiercel.quant.formats import Format

LEVELS = _native.kernel_levels()
FORMATS = list(Format)
QUANTISED = [f for f in FORMATS if f.is_quantized]
# Where a group's f16 scale and f16 minimum lie in its bytes.
HALVES = {Format.Q6_K: [208], Format.Q4_1: [0, 2], Format.Q5_1: [0, 2], Format.Q4_K: [0, 2], Format.Q5_K: [0, 2]}

every_level = pytest.mark.parametrize("level", LEVELS)
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=[f.value for f in FORMATS])


def seeded(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def file_rows(fmt, n, k, seed=1):
    """Random rows as a file stores them: any quants, scales of ordinary size."""
    rng = np.random.default_rng(seed)
    if fmt is Format.F32:
        return seeded(n, k, seed=seed).view(np.uint8)
    if fmt is Format.F16:
        return seeded(n, k, seed=seed).astype(np.float16).view(np.uint8)
    if fmt is Format.BF16:
        return np.ascontiguousarray(seeded(n, k, seed=seed).view(np.uint16)[:, 1::2]).view(np.uint8)
    groups = rng.integers(0, 256, (n * k // fmt.group, fmt.group_bytes), np.uint8)
    if fmt is Format.MXFP4:
        groups[:, 0] = rng.integers(118, 124, len(groups))
        return groups.reshape(n, fmt.nbytes(k))
    if fmt is Format.NVFP4:
        groups[:, :8] = rng.uniform(-0.02, 0.02, (len(groups), 2)).astype(np.float32).view(np.uint8)
        return groups.reshape(n, fmt.nbytes(k))
    for at in HALVES.get(fmt, [0]):
        groups[:, at : at + 2] = rng.uniform(-0.02, 0.02, (len(groups), 1)).astype(np.float16).view(np.uint8)
    return groups.reshape(n, fmt.nbytes(k))


def matrix(fmt, n, k, seed=1, **options):
    """A packed matrix and its values."""
    rows = file_rows(fmt, n, k, seed)
    return _native.PackedMatrix(FORMATS.index(fmt), rows, k, **options), dequantize(rows, fmt, (n, k))


def linear(level, parts, x, n_columns, residual=None, n_threads=1):
    y = np.full((len(x), n_columns), np.nan, np.float32)
    _native.linear(level, parts, x, y, residual, n_threads)
    return y


def rounded(level, x):
    """x as the kernels see it: rounded to int8 groups and read back."""
    q = np.empty(x.shape, np.int8)
    scale = np.empty((len(x), x.shape[1] // 32), np.float32)
    _native.quantize_rows(level, x, q, scale)
    return reference.dequantize_activations(q, scale)


def width(fmt):
    return 512 if fmt.group == 256 else 96 if fmt.group == 32 else 53


@every_level
@every_format
@pytest.mark.parametrize("n_rows", [0, 1, 2, 7, 20, 61])
def test_linear_agrees_with_its_definition(level, fmt, n_rows):
    n, k = 37, width(fmt)
    w, values = matrix(fmt, n, k)
    x = seeded(n_rows, k, seed=2)
    got = linear(level, [(w, None, 0)], x, n, n_threads=2)
    op = "linear_q8" if fmt.is_quantized else "linear"
    expected = reference.linear(rounded(level, x) if fmt.is_quantized else x, values)
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE[op].rtol, atol=TOLERANCE[op].atol)


@every_format
def test_linear_bits_do_not_depend_on_level_rows_or_threads(fmt):
    n, k = 100, width(fmt)
    w, _ = matrix(fmt, n, k)
    x = seeded(64, k, seed=3)
    expected = linear("scalar", [(w, None, 0)], x, n)
    for level in LEVELS:
        for n_rows in (1, 3, 9, 33, 64):
            for n_threads in (1, 2, 3):
                got = linear(level, [(w, None, 0)], x[:n_rows], n, n_threads=n_threads)
                assert got.tobytes() == expected[:n_rows].tobytes(), (level, n_rows, n_threads)


@every_level
def test_linear_adds_bias_then_residual_in_place(level):
    w, _ = matrix(Format.Q4_1, 48, 64)
    x, bias, residual = seeded(5, 64, seed=4), seeded(48, seed=5), seeded(5, 48, seed=6)
    expected = (linear(level, [(w, None, 0)], x, 48) + bias) + residual
    y = residual.copy()
    _native.linear(level, [(w, bias, 0)], x, y, y)
    assert y.tobytes() == expected.tobytes()


@every_level
def test_parts_of_different_formats_write_their_own_columns(level):
    a, b, c = (matrix(f, n, 256)[0] for f, n in ((Format.Q5_0, 32), (Format.Q8_0, 17), (Format.Q4_K, 16)))
    x = seeded(3, 256, seed=7)
    together = linear(level, [(a, None, 0), (b, None, 33), (c, None, 50)], x, 66, n_threads=2)
    assert together[:, :32].tobytes() == linear(level, [(a, None, 0)], x, 32).tobytes()
    assert together[:, 33:50].tobytes() == linear(level, [(b, None, 0)], x, 17).tobytes()
    assert together[:, 50:].tobytes() == linear(level, [(c, None, 0)], x, 16).tobytes()
    assert np.isnan(together[:, 32]).all()


@every_level
@every_format
def test_embed_returns_the_files_values_bit_for_bit(level, fmt):
    n, k = 35, width(fmt)
    ids = np.array([34, 0, 16, 15, 0], np.int32)
    for expand in (False, True):
        w, values = matrix(fmt, n, k, expand_to_f32=expand)
        y = np.full((5, k), np.nan, np.float32)
        _native.embed(level, w, ids, y, n_threads=2)
        np.testing.assert_array_equal(y, values[ids])
        _native.embed(level, w, ids, y, scale=25.3)
        np.testing.assert_array_equal(y, values[ids] * np.float32(25.3))


def test_row_order_takes_the_files_rows_in_that_order():
    order = np.random.default_rng(8).permutation(40).astype(np.int32)
    w, values = matrix(Format.Q4_0, 40, 32, row_order=order)
    y = np.empty((40, 32), np.float32)
    _native.embed("scalar", w, np.arange(40, dtype=np.int32), y)
    np.testing.assert_array_equal(y, values[order])


def test_packing_gives_the_same_matrix_for_any_number_of_threads_and_in_an_arena():
    arena = _native.PackedArena()
    x = seeded(2, 256, seed=9)
    expected = linear("scalar", [(matrix(Format.Q6_K, 100, 256)[0], None, 0)], x, 100)
    for n_threads in (1, 2, 5, 20):
        w, _ = matrix(Format.Q6_K, 100, 256, arena=arena, n_threads=n_threads)
        assert linear("scalar", [(w, None, 0)], x, 100).tobytes() == expected.tobytes()


@every_level
def test_activations_round_as_their_definition_says(level):
    x = np.concatenate([seeded(4, 320, seed=10), 1e6 * seeded(2, 320, seed=11), np.zeros((1, 320), np.float32)])
    q, scale = np.empty(x.shape, np.int8), np.empty((7, 10), np.float32)
    _native.quantize_rows(level, x, q, scale, n_threads=2)
    expected_q, expected_scale = reference.quantize_activations(x)
    np.testing.assert_array_equal(scale, expected_scale)
    near_half = np.abs(np.abs(x / np.where(scale == 0, 1, scale).repeat(32, 1)) % 1 - 0.5) < 1e-4
    np.testing.assert_array_equal(q[~near_half], expected_q[~near_half])


@every_level
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_number_that_is_not_finite_gives_nan_and_no_other_row_does(level, bad):
    w, _ = matrix(Format.Q8_0, 20, 64)
    x = seeded(3, 64, seed=12)
    x[1, 40] = bad
    y = linear(level, [(w, None, 0)], x, 20)
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("fmt", QUANTISED, ids=[f.value for f in QUANTISED])
def test_packed_weights_take_less_than_half_a_bit_more_than_the_file(fmt):
    w, _ = matrix(fmt, 64, 512)
    assert w.nbytes * 8 / (64 * 512) < fmt.bits_per_weight + 0.5


def test_wrong_arguments_are_refused_by_name():
    rows = file_rows(Format.Q8_0, 4, 64)
    code = FORMATS.index(Format.Q8_0)
    with pytest.raises(ValueError, match="rows are 68 bytes; 32 columns of Q8_0 need 34"):
        _native.PackedMatrix(code, rows, 32)
    with pytest.raises(ValueError, match="does not fit Q8_0"):
        _native.PackedMatrix(code, rows, 40)
    with pytest.raises(ValueError, match="format is 13"):
        _native.PackedMatrix(13, rows, 64)
    with pytest.raises(ValueError, match=r"row_order\[1\] is 4"):
        _native.PackedMatrix(code, rows, 64, row_order=np.array([0, 4], np.int32))
    w = _native.PackedMatrix(code, rows, 64)
    x, y = seeded(2, 64), np.empty((2, 4), np.float32)
    with pytest.raises(ValueError, match="x has 32 columns; the matrix has 64"):
        _native.linear("scalar", [(w, None, 0)], seeded(2, 32), y)
    with pytest.raises(ValueError, match="columns 1 to 5 do not fit y's 4"):
        _native.linear("scalar", [(w, None, 1)], x, y)
    with pytest.raises(ValueError, match="bias has 3 values"):
        _native.linear("scalar", [(w, seeded(3), 0)], x, y)
    with pytest.raises(ValueError, match="mix float and quantised"):
        _native.linear("scalar", [(w, None, 0), (matrix(Format.F32, 4, 64)[0], None, 0)], x, y)
    with pytest.raises(ValueError, match="this processor has scalar"):
        _native.linear("sse9", [(w, None, 0)], x, y)
    with pytest.raises(ValueError, match=r"ids\[0\] is 4; the matrix has 4 rows"):
        _native.embed("scalar", w, np.array([4], np.int32), np.empty((1, 64), np.float32))
    with pytest.raises(TypeError):
        _native.linear("scalar", [(w, None, 0)], x, np.empty((4, 2), np.float32).T)
