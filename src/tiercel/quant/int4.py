"""Four-bit integers with scales and zero points, as GPTQ and AWQ keep them, to the group layouts of `formats`.

A weight is scale * (q - zero), q in 0..15. Both keep eight numbers in an int32, lowest bits first. GPTQ packs along the
inputs, [K / 8, N]; AWQ along the outputs, [K, N / 8], and in each int32 the outputs 0, 2, 4, 6, 1, 3, 5, 7. Zero points
are packed along the outputs by both, [groups, N / 8].
"""

import numpy as np
import numpy.typing as npt

from tiercel.quant.formats import Format

_Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint32]
_Ints = npt.NDArray[np.int8]

_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)
# Where in an int32 of AWQ's output j of eight lies.
_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
ZERO_4 = 8
ZERO_5 = 16


def along_inputs(packed: _Words) -> _Bytes:
    """Unpack int32 along the inputs: [K / 8, N] to [N, K]."""
    return ((packed.T[:, :, None] >> _SHIFTS) & np.uint32(15)).astype(np.uint8).reshape(packed.shape[1], -1)


def along_outputs(packed: _Words, *, is_awq: bool) -> _Bytes:
    """Unpack int32 along the outputs: [R, N / 8] to [N, R]."""
    shifts = _SHIFTS[_AWQ_PLACES] if is_awq else _SHIFTS
    unpacked = (packed[:, :, None] >> shifts) & np.uint32(15)
    return np.ascontiguousarray(unpacked.astype(np.uint8).reshape(len(packed), -1).T)


def group_rows(differences: _Ints, scales: npt.NDArray[np.float16], format: Format) -> _Bytes:
    """Return rows of Q4_0 or Q5_0, which hold scale * difference exactly.

    Shapes:
        differences  [N, K]  q - zero: -8..7 for Q4_0, -16..15 for Q5_0
        scales       [N, K / 32]
        returns      [N, format.nbytes(K)]
    """
    n, k = differences.shape
    zero = ZERO_4 if format is Format.Q4_0 else ZERO_5
    codes = (differences + np.int8(zero)).astype(np.uint8).reshape(n, k // 32, 32)
    out = np.empty((n, k // 32, format.group_bytes), np.uint8)
    out[:, :, :2] = np.ascontiguousarray(scales, "<f2").view(np.uint8).reshape(n, -1, 2)
    if format is Format.Q5_0:
        out[:, :, 2:6] = np.packbits(codes >> np.uint8(4), axis=-1, bitorder="little")
    low = codes & np.uint8(15)
    out[:, :, -16:] = low[:, :, :16] | (low[:, :, 16:] << np.uint8(4))
    return out.reshape(n, -1)
