"""The ops that drafters are written in, defined; see `ops.reference` for the rules."""

import numpy as np

from tiercel.base.errors import ShapeError
from tiercel.ops.reference import Floats, as_stored


def keep_kv(k: Floats, v: Floats, kv_dtype: str) -> tuple[Floats, Floats]:
    """Return what a layer's store of `kv_dtype` keeps of keys and values, as later attention reads them.

    Shapes:
        k, v     [T, K, D]  float32; keys normed and rotated already
        returns  the same
    """
    return as_stored(k, v, kv_dtype)


def block_conv(x: Floats, base: Floats, delta: Floats, group: int) -> Floats:
    """Return each row mixed with the rows right before it in its block, by coefficients that it brings itself.

    y[i, c] = sum_t (base[t, c] + delta[i, t, c // group]) * x[i - t, c] over taps t <= i, where the block begins.

    Shapes:
        x        [B, C]                   float32; one block, from its first row on
        base     [taps, C]                float32
        delta    [B, taps * (C / group)]  float32
        returns  [B, C]                   float32; sums in float64

    Raises:
        ShapeError: a line of Shapes does not hold.

    Source: DFlash2 (z-lab, 2026), grouped dynamic causal convolution.
    """
    taps = base.shape[0] if base.ndim == 2 else 0
    fits = taps >= 1 and x.ndim == 2 and base.shape[1] == x.shape[1] and group >= 1 and x.shape[1] % group == 0
    if not fits or delta.shape != (len(x), taps * (x.shape[1] // group)):
        raise ShapeError(
            f"ops.block_conv: got x {list(x.shape)}, base {list(base.shape)}, delta {list(delta.shape)}, group {group};"
            " [B, C], [taps, C] and [B, taps * C / group] are needed"
        )
    own = np.repeat(delta.reshape(len(x), taps, -1).astype(np.float64), group, axis=2)
    y = np.zeros(x.shape, np.float64)
    for t in range(min(taps, len(x))):
        y[t:] += (base[t].astype(np.float64) + own[t:, t]) * x[: len(x) - t]
    return y.astype(np.float32)


def scale(x: Floats, factor: float) -> Floats:
    """Return factor * x, the factor rounded to float32.

    Shapes:
        x        any   float32
        returns  same  float32
    """
    return np.asarray(x * np.float32(factor), np.float32)
