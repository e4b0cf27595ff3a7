"""Four-bit floats with shared scales (MXFP4, NVFP4) as checkpoints keep them, to the group layouts of `formats`.

A code is E2M1: a sign, two bits of exponent, one of fraction; its values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
negatives. Byte j of a checkpoint's row has the code of column 2 j in its low and of 2 j + 1 in its high nibble. A group
of `formats` has columns 0 to 15 in its low and 16 to 31 in its high nibbles. Source: OCP Microscaling Formats 1.0.
"""

import numpy as np
import numpy.typing as npt

from tiercel.quant.formats import Format

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

_SIZES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1: _Floats = np.array(_SIZES + [0.0 - size for size in _SIZES], np.float32)
"""Value of each of the 16 codes; minus zero is zero, as it is for the kernels, which compute with integers."""

E8M0_NAN = 255
"""The scale byte that is no number."""


_E8M0: _Floats = np.array([*(2.0 ** (exponent - 127) for exponent in range(E8M0_NAN)), np.nan], np.float32)


def e8m0(exponents: _Bytes) -> _Floats:
    """Return 2 ** (exponent - 127) of each scale byte; NaN for 255. Exact: 0 is a subnormal float32."""
    return _E8M0[exponents]


def mxfp4_rows(codes: _Bytes, exponents: _Bytes) -> _Bytes:
    """Interleave codes and scales to rows of `Format.MXFP4`.

    Shapes:
        codes      [N, K / 2]
        exponents  [N, K / 32]
        returns    [N, Format.MXFP4.nbytes(K)]
    """
    n, n_groups = exponents.shape
    out = np.empty((n, n_groups, Format.MXFP4.group_bytes), np.uint8)
    out[:, :, 0] = exponents
    out[:, :, 1:] = _regrouped(codes, n_groups)
    return out.reshape(n, -1)


def nvfp4_rows(codes: _Bytes, scales: _Floats) -> _Bytes:
    """Interleave codes and scales to rows of `Format.NVFP4`.

    Shapes:
        codes    [N, K / 2]
        scales   [N, K / 16]
        returns  [N, Format.NVFP4.nbytes(K)]
    """
    n, n_halves = scales.shape
    out = np.empty((n, n_halves // 2, Format.NVFP4.group_bytes), np.uint8)
    out[:, :, :8] = np.ascontiguousarray(scales, "<f4").view(np.uint8).reshape(n, -1, 8)
    out[:, :, 8:] = _regrouped(codes, n_halves // 2)
    return out.reshape(n, -1)


def _regrouped(codes: _Bytes, n_groups: int) -> _Bytes:
    """Reorder [N, K / 2] of neighbours to [N, groups, 16] of columns 16 apart."""
    pairs = np.ascontiguousarray(codes).reshape(len(codes), n_groups, 2, 8)
    single = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=-1).reshape(len(codes), n_groups, 2, 16)
    regrouped: _Bytes = single[:, :, 0] | (single[:, :, 1] << np.uint8(4))
    return regrouped
