"""Float32 weights to a file format, for `--quantization` while a dense checkpoint is loaded.

Q8_0 and Q4_0 only: the formats whose rounding is defined without a search. The bytes are the ones the `gguf`
package's quantizer writes. We differ in two places: a weight that is not finite, or a scale past float16's range, is
refused instead of written; and a group whose scale's reciprocal overflows float32 becomes zeros instead of NaN.
"""

import numpy as np
import numpy.typing as npt

from tiercel.base.errors import ModelFileError, ShapeError, UnsupportedModel
from tiercel.quant.formats import Format

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

# Weights converted at a time: 1 MiB of float32, so a run's handful of temporaries stays under 8 MiB.
_RUN_WEIGHTS = 1 << 18
_F16_MAX = np.float32(65504.0)

QUANTIZABLE: frozenset[Format] = frozenset({Format.Q8_0, Format.Q4_0})
"""The formats `quantize` can write."""


def quantize(x: _Floats, format: Format) -> _Bytes:
    """Round a matrix to `format`.

    Shapes:
        x        [N, K]  float32; K is a multiple of 32
        returns  [N, format.nbytes(K)]  uint8, the file's layout

    Raises:
        UnsupportedModel: `format` is not in `QUANTIZABLE`.
        ShapeError: x is no float32 matrix, or K is no multiple of the group.
        ModelFileError: a weight is NaN or infinite, or too large for the format's float16 scale.
    """
    if format not in QUANTIZABLE:
        names = ", ".join(sorted(f.value for f in QUANTIZABLE))
        raise UnsupportedModel(
            f"quant.quantize: cannot write {format.value}; the formats it can write are {names}; choose one of them"
        )
    if x.ndim != 2 or x.dtype != np.float32:
        raise ShapeError(f"quant.quantize: got {x.dtype} of shape {list(x.shape)}; a float32 matrix [N, K] is needed")
    n_rows, n_columns = x.shape
    out = np.empty((n_rows, format.nbytes(n_columns)), np.uint8)
    encode = _q8_0 if format is Format.Q8_0 else _q4_0
    step = max(1, _RUN_WEIGHTS // max(1, n_columns))
    for start in range(0, n_rows, step):
        rows = x[start : start + step]
        encoded = encode(np.ascontiguousarray(rows).reshape(-1, format.group), start)
        out[start : start + step] = encoded.reshape(len(rows), -1)
    return out


def _scales(top: _Floats, divisor: float, first_row: int) -> tuple[_Bytes, _Floats]:
    """Return the stored f16 scale top/divisor of each group, and the factor its weights are multiplied with."""
    d = top / np.float32(divisor)
    if not np.all(np.abs(d) <= _F16_MAX):
        raise ModelFileError(
            f"quant.quantize: a weight in the {len(d)} groups from row {first_row} is NaN, infinite or too large for a "
            "float16 scale; finite weights are needed; load the checkpoint without --quantization"
        )
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    inverse[~np.isfinite(inverse)] = 0
    return d.astype("<f2").view(np.uint8), inverse


def _q8_0(groups: _Floats, first_row: int) -> _Bytes:
    scale, inverse = _scales(np.abs(groups).max(axis=1, keepdims=True), 127, first_row)
    scaled = groups * inverse
    size = np.abs(scaled)
    whole = np.floor(size)
    # Half goes away from zero (C's roundf); adding 0.5 before floor would round 0.49999997 up.
    rounded = np.sign(scaled) * (whole + np.floor((size - whole) * np.float32(2)))
    return np.concatenate([scale, rounded.astype(np.int8).view(np.uint8)], axis=1)


def _q4_0(groups: _Floats, first_row: int) -> _Bytes:
    # The weight of largest size becomes -8, so that the one extra negative code is used; the first one wins a tie.
    at = np.abs(groups).argmax(axis=1)[:, None]
    scale, inverse = _scales(np.take_along_axis(groups, at, axis=1), -8, first_row)
    codes = np.clip(np.trunc(groups * inverse + np.float32(8.5)), 0, 15).astype(np.uint8)
    packed = codes[:, :16] | (codes[:, 16:] << np.uint8(4))
    return np.concatenate([scale, packed], axis=1)
