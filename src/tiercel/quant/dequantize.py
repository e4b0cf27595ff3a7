"""Stored weights to float32: the definition of every format, in numpy.

The results are the ones of the `gguf` package, bit for bit: each weight is computed in float32 with the same
operations in the same order. Work goes in runs of groups, so beside the result only a few MiB are needed.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from tiercel.base.errors import ShapeError
from tiercel.quant.formats import Format
from tiercel.quant.fp4 import E2M1

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

# Weights expanded at a time: 256 KiB of float32, so that a run's intermediates stay in a core's L2.
_RUN_WEIGHTS = 1 << 16

_NIBBLE_SHIFTS = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)


def dequantize(raw: _Bytes, format: Format, shape: Sequence[int]) -> _Floats:
    """Expand the stored bytes of a tensor to float32.

    Shapes:
        raw      uint8, any shape, C order: the file groups of all rows, first row first
        shape    [..., K]; K is a multiple of `format.group`
        returns  float32 of `shape`, new memory

    Raises:
        ShapeError: `raw` does not hold exactly the bytes that `shape` needs, or K is no multiple of the group.
    """
    shape = tuple(shape)
    n_weights = prod(shape)
    row = shape[-1] if shape else 1
    format.nbytes(row)
    if raw.dtype != np.uint8 or raw.size != format.nbytes(n_weights):
        raise ShapeError(
            f"quant.dequantize: {raw.size} elements of {raw.dtype} for {format.value} of shape {list(shape)}; "
            f"{format.nbytes(n_weights)} bytes of uint8 are needed"
        )
    if n_weights == 0:
        return np.zeros(shape, np.float32)
    groups = np.ascontiguousarray(raw).reshape(-1, format.group_bytes)
    expand = _EXPAND[format]
    out = np.empty((len(groups), format.group), np.float32)
    step = _RUN_WEIGHTS // format.group
    # A hostile file's infinite scales make NaN; that is for whoever checks the weights, and no reason to warn.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(groups), step):
            out[start : start + step] = expand(groups[start : start + step])
    return out.reshape(shape)


def _f16(groups: _Bytes, at: int) -> _Floats:
    """Return the f16 number at byte `at` of each group, as a float32 column."""
    return np.ascontiguousarray(groups[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: _Bytes, half: int) -> _Bytes:
    """Unpack 4-bit numbers: of each run of `half` bytes first all low nibbles, then all high ones."""
    n_groups = len(packed)
    pairs = packed.reshape(n_groups, -1, 1, half) >> _NIBBLE_SHIFTS
    return (pairs & np.uint8(15)).reshape(n_groups, -1)


def _high_bits(packed: _Bytes) -> _Bytes:
    """Return bit j of a group's four bytes as the value 0 or 16 of its weight j."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _f32(groups: _Bytes) -> _Floats:
    return groups.view("<f4").astype(np.float32)


def _f16_plain(groups: _Bytes) -> _Floats:
    return groups.view("<f2").astype(np.float32)


def _bf16(groups: _Bytes) -> _Floats:
    return (groups.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q4_0(groups: _Bytes) -> _Floats:
    q = _nibbles(groups[:, 2:], 16).astype(np.int8) - np.int8(8)
    return _f16(groups, 0) * q.astype(np.float32)


def _q4_1(groups: _Bytes) -> _Floats:
    q = _nibbles(groups[:, 4:], 16).astype(np.float32)
    return _f16(groups, 0) * q + _f16(groups, 2)


def _q5_0(groups: _Bytes) -> _Floats:
    q = (_nibbles(groups[:, 6:], 16) | _high_bits(groups[:, 2:6])).astype(np.int8) - np.int8(16)
    return _f16(groups, 0) * q.astype(np.float32)


def _q5_1(groups: _Bytes) -> _Floats:
    q = (_nibbles(groups[:, 8:], 16) | _high_bits(groups[:, 4:8])).astype(np.float32)
    return _f16(groups, 0) * q + _f16(groups, 2)


def _q8_0(groups: _Bytes) -> _Floats:
    q = groups[:, 2:].view(np.int8).astype(np.float32)
    return q * _f16(groups, 0)


def _k_scales(packed: _Bytes) -> tuple[_Floats, _Floats]:
    """Unpack the 12 bytes that hold a K group's eight 6-bit scales and eight 6-bit minimums.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minimums 0-3 in their low six bits. Bytes 8-11 hold the low nibbles of
    scales (low half) and minimums (high half) 4-7, whose top two bits are the top two bits of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    low, top, four = np.uint8(63), np.uint8(0x30), np.uint8(4)
    two = np.uint8(2)
    scales = np.concatenate([first & low, (third & np.uint8(15)) | ((first >> two) & top)], axis=1)
    mins = np.concatenate([second & low, (third >> four) | ((second >> two) & top)], axis=1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _scale_k(groups: _Bytes, q: _Bytes) -> _Floats:
    """Apply d*scale and dmin*min of each run of 32 weights; the order of the two products is part of the format."""
    scales, mins = _k_scales(groups[:, 4:16])
    d = (_f16(groups, 0) * scales)[:, :, None]
    m = (_f16(groups, 2) * mins)[:, :, None]
    return (d * q.reshape(-1, 8, 32).astype(np.float32) - m).reshape(-1, 256)


def _q4_k(groups: _Bytes) -> _Floats:
    return _scale_k(groups, _nibbles(groups[:, 16:], 32))


def _q5_k(groups: _Bytes) -> _Floats:
    # Bit i of byte j is the fifth bit of weight j of run i.
    bits = groups[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    high = ((bits & np.uint8(1)) << np.uint8(4)).reshape(-1, 256)
    return _scale_k(groups, _nibbles(groups[:, 48:], 32) | high)


def _q6_k(groups: _Bytes) -> _Floats:
    low = _nibbles(groups[:, :128], 64)
    # Two bits of four weights a byte: of each run of 32 bytes, first all bits 0-1, then all bits 2-3, and so on.
    pairs = groups[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = ((pairs & np.uint8(3)) << np.uint8(4)).reshape(-1, 256)
    q = (low | high).astype(np.int8) - np.int8(32)
    scales = groups[:, 192:208].view(np.int8).astype(np.float32)
    d = (_f16(groups, 208) * scales)[:, :, None]
    return (d * q.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


def _e2m1(groups: _Bytes, at: int) -> _Floats:
    """Return the numbers whose codes lie in 16 bytes from byte `at`: first all low nibbles, then all high ones."""
    return E2M1[_nibbles(groups[:, at : at + 16], 16)]


def _mxfp4(groups: _Bytes) -> _Floats:
    # As ggml has it: twice the codes, which are integers, times half the scale; 255 is one more power of two.
    half = np.ldexp(np.float32(1), groups[:, :1].astype(np.int32) - 128)
    weights: _Floats = half * (_e2m1(groups, 1) * np.float32(2))
    return weights


def _nvfp4(groups: _Bytes) -> _Floats:
    scales = np.ascontiguousarray(groups[:, :8]).view("<f4").astype(np.float32)
    return (scales[:, :, None] * _e2m1(groups, 8).reshape(-1, 2, 16)).reshape(-1, 32)


_EXPAND: Mapping[Format, Callable[[_Bytes], _Floats]] = MappingProxyType(
    {
        Format.F32: _f32,
        Format.F16: _f16_plain,
        Format.BF16: _bf16,
        Format.Q4_0: _q4_0,
        Format.Q4_1: _q4_1,
        Format.Q5_0: _q5_0,
        Format.Q5_1: _q5_1,
        Format.Q8_0: _q8_0,
        Format.Q4_K: _q4_k,
        Format.Q5_K: _q5_k,
        Format.Q6_K: _q6_k,
        Format.MXFP4: _mxfp4,
        Format.NVFP4: _nvfp4,
    }
)
