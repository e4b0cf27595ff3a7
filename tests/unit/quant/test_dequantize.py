import gguf
import numpy as np
import pytest

from tiercel.base.errors import ShapeError
from tiercel.quant.dequantize import dequantize
from tiercel.quant.formats import GGUF_TYPES, Format

TYPE_IDS = {weight_format: type_id for type_id, weight_format in GGUF_TYPES.items()}
# Byte offsets of the float16 scales and minimums in a group.
F16_PLACES = {
    Format.Q4_0: [0],
    Format.Q4_1: [0, 2],
    Format.Q5_0: [0],
    Format.Q5_1: [0, 2],
    Format.Q8_0: [0],
    Format.Q4_K: [0, 2],
    Format.Q5_K: [0, 2],
    Format.Q6_K: [208],
}
# Zero, minus zero, the smallest subnormal, the largest number, infinities, a quiet and a signalling NaN.
SPECIAL_F16 = [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7D01]


def outside(raw, weight_format):
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(TYPE_IDS[weight_format]))


def assert_same_bits(got, expected):
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


@pytest.mark.parametrize("weight_format", TYPE_IDS)
def test_random_bytes_expand_to_the_gguf_packages_bits(weight_format):
    raw = np.random.default_rng(1).integers(0, 256, (37, weight_format.nbytes(512)), dtype=np.uint8)
    assert_same_bits(dequantize(raw, weight_format, (37, 512)), outside(raw, weight_format))


@pytest.mark.parametrize("weight_format", F16_PLACES)
def test_special_scales_expand_to_the_gguf_packages_bits(weight_format):
    rng = np.random.default_rng(2)
    rows = []
    for first in SPECIAL_F16:
        for second in SPECIAL_F16:
            row = rng.integers(0, 256, weight_format.group_bytes, dtype=np.uint8)
            for place, bits in zip(F16_PLACES[weight_format], (first, second), strict=False):
                row[place : place + 2] = np.array([bits], "<u2").view(np.uint8)
            rows.append(row)
    raw = np.stack(rows)
    got = dequantize(raw, weight_format, (len(rows), weight_format.group))
    expected = outside(raw, weight_format)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    # The payload of a NaN that meets another NaN is the processor's choice.
    assert_same_bits(np.where(np.isnan(got), 0, got), np.where(np.isnan(expected), 0, expected))


def test_a_hand_made_q4_0_group_has_low_nibbles_first():
    raw = np.zeros(18, np.uint8)
    raw[:2] = np.array([0.5], "<f2").view(np.uint8)
    raw[2] = 0xF0  # weight 0 is code 0, weight 16 is code 15
    raw[3:] = 0x88
    expected = np.zeros(32, np.float32)
    expected[0], expected[16] = -4.0, 3.5
    np.testing.assert_array_equal(dequantize(raw, Format.Q4_0, (32,)), expected)


def test_more_weights_than_one_run_expand_alike():
    raw = np.random.default_rng(3).integers(0, 256, (300, Format.Q4_1.nbytes(1024)), dtype=np.uint8)
    whole = dequantize(raw, Format.Q4_1, (300, 1024))
    np.testing.assert_array_equal(whole[299], dequantize(raw[299], Format.Q4_1, (1024,)))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_an_empty_tensor_expands_to_nothing(shape):
    assert dequantize(np.zeros(0, np.uint8), Format.Q8_0, shape).shape == shape


def test_a_scalar_expands():
    assert dequantize(np.array([1.5], "<f4").view(np.uint8), Format.F32, ()) == np.float32(1.5)


@pytest.mark.parametrize(("n_bytes", "shape"), [(33, (32,)), (35, (32,)), (68, (32,)), (34, (31,)), (34, (2, 16))])
def test_bytes_that_do_not_fit_the_shape_are_refused(n_bytes, shape):
    with pytest.raises(ShapeError, match="q8_0"):
        dequantize(np.zeros(n_bytes, np.uint8), Format.Q8_0, shape)
