"""The exponential and logarithm that decide which token wins, spelt out in additions and multiplications.

A library's `exp` may differ in the last bit from one machine to the next, and so could a sampled token. These are the
same IEEE double operations in the same order here and in `native/src/sampler_math.hpp`, so both give the same bits
everywhere. Errors are below 1e-14 relative, far under what a sampler can notice. Knows nothing of logits or tokens.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

_LOG2_E = 1.4426950408889634
# ln 2 in two parts; the first has 40 fractional bits, so that its product with a small integer is exact.
_LN2_HIGH = 0.6931471805601177
_LN2_LOW = -1.7239444525614835e-13
# Adding and subtracting 1.5 * 2**52 rounds a small double to the nearest integer, ties to even.
_ROUND = 6755399441055744.0
_EXP_TERMS = tuple(1.0 / math.factorial(i) for i in range(11, -1, -1))
_LOG_TERMS = tuple(1.0 / (2 * i + 1) for i in range(10, 0, -1))
# exp(-40) * 2**44 rounds to 0, so nothing below need be told apart.
_EXP_FLOOR = -40.0
_WEIGHT_ONE = 2.0**44


def exp_of_nonpositive(x: F64) -> F64:
    """exp(x) for x <= 0; everything below -40, and -inf, gives exp(-40)."""
    x = np.maximum(x, _EXP_FLOOR)
    n = (x * _LOG2_E + _ROUND) - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = np.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        p = p * r + term
    return np.asarray(np.ldexp(p, n.astype(np.int32)))


def log(x: Any) -> F64:
    """Return the natural logarithm of positive finite x; the relative error stays small near 1."""
    m, k = np.frexp(np.asarray(x, np.float64))
    low = m < 0.7071067811865476
    m = np.where(low, m * 2.0, m)
    k = np.where(low, k - 1, k).astype(np.float64)
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    q = np.full_like(z, _LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        q = q * z + term
    return np.asarray(k * _LN2_HIGH + (2.0 * s + (2.0 * s * (z * q) + k * _LN2_LOW)))


def weights(x: F64) -> npt.NDArray[np.int64]:
    """exp(x) for x <= 0 in units of 2**-44, rounded to an integer.

    Sums of integers do not depend on their order, hence their use for probabilities. Fewer than 2**19 fit in int64.
    """
    return np.rint(exp_of_nonpositive(x) * _WEIGHT_ONE).astype(np.int64)


def log_of_weight(total: int) -> float:
    """Return the logarithm of what a sum of `weights` stands for."""
    return float(log(np.float64(total) * (1.0 / _WEIGHT_ONE)))
