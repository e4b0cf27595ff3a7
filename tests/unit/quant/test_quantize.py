import tracemalloc

import gguf
import numpy as np
import pytest

from tiercel.base.errors import ModelFileError, ShapeError, UnsupportedModel
from tiercel.quant.dequantize import dequantize
from tiercel.quant.formats import Format
from tiercel.quant.quantize import QUANTIZABLE, quantize

OUTSIDE = {Format.Q8_0: gguf.GGMLQuantizationType.Q8_0, Format.Q4_0: gguf.GGMLQuantizationType.Q4_0}


def _inputs():
    rng = np.random.default_rng(4)
    normal = rng.standard_normal((40, 96), np.float32)
    ties = rng.integers(-8, 9, (40, 96)).astype(np.float32) / 2
    scales = np.float32(10.0) ** rng.integers(-36, 4, (40, 1)).astype(np.float32)
    return {
        "normal": normal,
        "ties": ties,
        "halves": np.linspace(-127, 127, 40 * 96, dtype=np.float32).round(1).reshape(40, 96),
        "many sizes": normal * scales,
        "zeros": np.zeros((3, 64), np.float32),
        "minus zeros": -np.zeros((3, 64), np.float32),
        "no rows": np.zeros((0, 64), np.float32),
    }


@pytest.mark.parametrize("weight_format", sorted(QUANTIZABLE))
@pytest.mark.parametrize("kind", _inputs())
def test_the_bytes_are_the_gguf_packages(weight_format, kind):
    x = _inputs()[kind]
    got = quantize(x, weight_format)
    assert got.shape == (len(x), weight_format.nbytes(x.shape[1]))
    if len(x):
        np.testing.assert_array_equal(got, gguf.quants.quantize(x, OUTSIDE[weight_format]))


@pytest.mark.parametrize(("weight_format", "worst"), [(Format.Q8_0, 0.5 / 127), (Format.Q4_0, 1 / 8)])
def test_a_round_trip_stays_within_one_code(weight_format, worst):
    x = _inputs()["normal"]
    back = dequantize(quantize(x, weight_format), weight_format, x.shape)
    largest = np.abs(x.reshape(-1, 32)).max(axis=1, keepdims=True)
    # The scale itself is rounded to 11 bits.
    assert np.all(np.abs(back - x).reshape(-1, 32) <= (worst + 2**-11) * largest)


def test_rows_are_independent_of_the_run_they_are_in():
    x = np.random.default_rng(5).standard_normal((600, 1024), np.float32)
    np.testing.assert_array_equal(quantize(x, Format.Q8_0)[599:], quantize(x[599:], Format.Q8_0))


def test_working_memory_does_not_grow_with_the_matrix():
    x = np.random.default_rng(6).standard_normal((4096, 1024), np.float32)
    tracemalloc.start()
    out = quantize(x, Format.Q4_0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - out.nbytes < 12 << 20


def test_a_group_of_subnormals_becomes_zeros():
    x = np.full((1, 32), 1e-44, np.float32)
    x[0, 0] = 0
    assert not dequantize(quantize(x, Format.Q8_0), Format.Q8_0, (1, 32)).any()


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("weight_format", sorted(QUANTIZABLE))
def test_a_weight_no_scale_can_hold_is_refused(weight_format, weight):
    x = np.ones((2, 64), np.float32)
    x[1, 40] = weight
    with pytest.raises(ModelFileError, match="NaN, infinite or too large"):
        quantize(x, weight_format)


@pytest.mark.parametrize("weight_format", sorted(set(Format) - QUANTIZABLE))
def test_other_formats_are_refused_by_name(weight_format):
    with pytest.raises(UnsupportedModel, match=rf"cannot write {weight_format.value};.*q4_0, q8_0"):
        quantize(np.zeros((1, 256), np.float32), weight_format)


@pytest.mark.parametrize("x", [np.zeros(32, np.float32), np.zeros((1, 32)), np.zeros((1, 33), np.float32)], ids=str)
def test_other_shapes_and_types_are_refused(x):
    with pytest.raises(ShapeError):
        quantize(x, Format.Q8_0)
