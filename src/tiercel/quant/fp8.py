"""Eight-bit floats of kind E4M3 (the one without infinities) and their scales.

Of a byte, the top bit is the sign, four are an exponent with bias 7, three the fraction; 0x7f and 0xff are NaN, the
largest value is 448. A weight is its value times a scale of its tensor, its row, or its block. Source: OCP 8-bit
Floating Point Specification 1.0.
"""

import ml_dtypes
import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

E4M3: _Floats = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""Value of each byte."""

# A product with a power of two is exact in bfloat16 from 2^-133 on; the smallest E4M3 is 2^-9, the largest below 2^9.
_LEAST_POWER, _MOST_POWER = -124, 118


def are_powers_of_two(scales: _Floats) -> bool:
    """Tell whether E4M3 numbers times any of the scales are exact in bfloat16, as it only moves their exponents."""
    fraction, exponent = np.frexp(scales)
    exponent = exponent - 1
    return bool(np.all((fraction == 0.5) & (exponent >= _LEAST_POWER) & (exponent <= _MOST_POWER)))


def bf16_rows(values: _Floats) -> _Bytes:
    """Return values that are exact in bfloat16 as rows of `Format.BF16`: [N, K] to [N, 2 K]."""
    upper = np.ascontiguousarray(values.view(np.uint32) >> np.uint32(16)).astype("<u2")
    return upper.view(np.uint8)
