"""The ops of encoders, defined as in `ops.reference`: layer norm, elementwise activations, attention both ways."""

import math

import numpy as np

from tiercel.base.errors import ShapeError
from tiercel.ops.dims import UNARY
from tiercel.ops.reference import Floats


def layer_norm(x: Floats, w: Floats, bias: Floats, eps: float) -> Floats:
    """Return (x - mean) / sqrt(variance + eps) * w + bias over the last axis.

    Shapes:
        x        [.., n]  float32
        w, bias  [n]      float32
        returns  [.., n]  float32; in float64, rounded once

    Raises:
        ShapeError: w or bias is no vector of x's last axis.

    Source: arXiv:1607.06450 (2016), equation 4.
    """
    if not x.shape[-1:] == w.shape == bias.shape:
        raise ShapeError(
            f"ops.layer_norm: got x {list(x.shape)}, w {list(w.shape)}, bias {list(bias.shape)}; "
            "w and bias [n] for x [.., n] are needed"
        )
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    return np.asarray(centred / np.sqrt(variance + eps) * w + bias, np.float32)


def activate(x: Floats, act: str) -> Floats:
    """Return act(x), elementwise.

    gelu(x) = x / 2 * (1 + erf(x / sqrt(2))); gelu_tanh and silu as in `reference.gated`; relu(x) = max(x, 0); tanh.

    Shapes:
        x        [..]  float32
        returns  [..]  float32; in float64, rounded once

    Raises:
        ShapeError: `act` is none of `UNARY`.

    Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415), section 2.
    """
    if act not in UNARY:
        raise ShapeError(f"ops.activate: got act {act!r}; one of {', '.join(UNARY)} is needed")
    wide = x.astype(np.float64)
    if act == "gelu":
        erf = np.vectorize(math.erf, otypes=[np.float64])
        y = 0.5 * wide * (1.0 + erf(wide / math.sqrt(2.0)))
    elif act == "gelu_tanh":
        y = 0.5 * wide * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (wide + 0.044715 * wide**3)))
    elif act == "relu":
        y = np.maximum(wide, 0.0)
    elif act == "tanh":
        y = np.tanh(wide)
    else:
        with np.errstate(over="ignore"):  # exp(-x) may be infinite; x / inf is the right limit
            y = wide / (1.0 + np.exp(-wide))
    return np.asarray(y, np.float32)


def sequence_attention(q: Floats, k: Floats, v: Floats, *, scale: float) -> Floats:
    """Attend each row of one sequence to all of its rows: softmax(scale * q k^T) v.

    Shapes:
        q        [T, H, D]  float32
        k, v     [T, K, D]  float32; H a multiple of K
        returns  [T, H, D]  float32; query head h reads key/value head h // (H // K); softmax and sums in float64

    Raises:
        ShapeError: a line of Shapes does not hold.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1; Devlin et al. 2018 (arXiv:1810.04805).
    """
    fits = q.ndim == k.ndim == 3 and k.shape == v.shape and q.shape[::2] == k.shape[::2]
    if not fits or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"ops.sequence_attention: got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; "
            "q [T, H, D], k and v [T, K, D] with H a multiple of K are needed"
        )
    n_tokens, n_heads, d = q.shape
    n_kv = k.shape[1]
    grouped = q.astype(np.float64).reshape(n_tokens, n_kv, n_heads // n_kv, d).transpose(1, 2, 0, 3)
    scores = (grouped @ k.astype(np.float64).transpose(1, 2, 0)[:, None]) * scale
    if n_tokens:
        scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    y = weights @ v.astype(np.float64).transpose(1, 0, 2)[:, None]
    return np.asarray(y.transpose(2, 0, 1, 3).reshape(n_tokens, n_heads, d), np.float32)
