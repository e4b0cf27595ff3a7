"""The ops, defined: one numpy function an op. An implementation is tested against it and may differ by `TOLERANCE`.

Knows nothing of programs, buffers or pages: plain arrays in, a new array out. Activations are float32 throughout;
wider sums are used where noted, so that the reference's own rounding is not what a kernel is measured against.
Read next: `ops.vocabulary` (shape rules and costs), `ops.lowered` (what a backend replays).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiercel.base.errors import ShapeError
from tiercel.ops.activations import activated, broken_activation
from tiercel.ops.dims import ACTIVATION_GROUP, KEY_SCALE_COLUMNS

Floats = npt.NDArray[np.float32]
Int8s = npt.NDArray[np.int8]
Ints = npt.NDArray[np.integer]


class Tolerance(NamedTuple):
    """How far an implementation may be from the reference: |a - b| <= atol + rtol * |b|."""

    atol: float
    rtol: float


# For operands of magnitude about one. Sums of n <= 16384 terms in another order: a few ulp times sqrt(n).
TOLERANCE: Mapping[str, Tolerance] = MappingProxyType(
    {
        "embed": Tolerance(1e-7, 1e-6),
        "linear": Tolerance(1e-4, 1e-4),
        "linear_q8": Tolerance(1e-4, 1e-4),
        "rms_norm": Tolerance(1e-6, 1e-5),
        # Of the scale; a q may be off by one step where x / scale is within 1e-5 of a half.
        "quantize_activations": Tolerance(0.0, 1e-6),
        "gated": Tolerance(1e-6, 1e-5),
        "rope_table": Tolerance(2e-6, 2e-6),
        "rope": Tolerance(1e-6, 1e-5),
        # Keys and values in float32; a pool of another type is compared on keys and values `as_stored` first.
        "attention": Tolerance(2e-5, 1e-4),
        # The int8 pool rounds queries and weighted values to 16 bits too: 2^-15 of a row's largest.
        "attention_int8": Tolerance(4e-4, 1e-3),
        "select_rows": Tolerance(0.0, 0.0),
        "softcap": Tolerance(1e-5, 1e-5),
        "add": Tolerance(0.0, 0.0),
        # Of weights up to 1; which experts are chosen is exact where no two scores are within 1e-6 of each other.
        "router": Tolerance(1e-6, 1e-5),
        # Two products in a row; a hidden value may round to the next int8, as `quantize_activations` says.
        "experts": Tolerance(1e-3, 1e-3),
        # Two more products than attention, of as many columns as the latent has.
        "latent_attention": Tolerance(1e-4, 1e-4),
        "latent_rows": Tolerance(2e-6, 1e-5),
        "head_linear": Tolerance(1e-4, 1e-4),
        "sigmoid_gate": Tolerance(1e-6, 1e-5),
        "short_conv": Tolerance(1e-6, 1e-5),
        # Of outputs and states of some hundred tokens: each one's rounding is carried on.
        "delta_rule": Tolerance(2e-5, 1e-4),
        "gated_norm": Tolerance(1e-6, 1e-5),
        "ssd": Tolerance(2e-5, 1e-4),
        "gate_norm": Tolerance(1e-6, 1e-5),
        "layer_norm": Tolerance(2e-6, 1e-5),
        # gelu: x times an error of 1.5e-7, as the kernels compute erf.
        "activate": Tolerance(2e-6, 1e-5),
        "sequence_attention": Tolerance(2e-5, 1e-4),
        # Of sources up to a hundred, times the rounding of their weights.
        "residual_mix": Tolerance(2e-5, 1e-5),
        "keep_kv": Tolerance(0.0, 0.0),
        "block_conv": Tolerance(1e-6, 1e-5),
        "scale": Tolerance(0.0, 0.0),
        "given": Tolerance(0.0, 0.0),
        "join": Tolerance(0.0, 0.0),
    }
)
"""Op name -> its tolerance; part of the op's definition, used by every test of every implementation."""


def rms_norm(x: Floats, w: Floats, eps: float) -> Floats:
    """Return x * (1 / sqrt(mean(x**2) + eps)) * w over the last axis.

    The weight is applied as it is given: models whose norm multiplies by 1 + w add the one before.

    Shapes:
        x        [.., n]  float32
        w        [n]      float32
        returns  [.., n]  float32; the mean in float64, the factor rounded to float32

    Raises:
        ShapeError: w is no vector of x's last axis.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467), equation 4, with eps inside the root.
    """
    _need(w.ndim == 1 and x.shape[-1:] == w.shape, "rms_norm", f"x {_s(x)} and w {_s(w)}", "w [n] for x [.., n]")
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    factor = (1.0 / np.sqrt(mean + eps)).astype(np.float32)
    return np.asarray(x * factor * w, np.float32)


def linear(x: Floats, w: Floats, bias: Floats | None = None) -> Floats:
    """Return x @ w.T + bias.

    Shapes:
        x        [.., K]  float32
        w        [N, K]   float32
        bias     [N]      float32
        returns  [.., N]  float32; sums in float64, rounded once

    Raises:
        ShapeError: a line of Shapes does not hold.
    """
    _check_linear("linear", x, w, bias)
    y = x.astype(np.float64) @ w.astype(np.float64).T
    return (y if bias is None else y + bias).astype(np.float32)


def quantize_activations(x: Floats) -> tuple[Int8s, Floats]:
    """Round each group of 32 columns to int8 with one scale: x is about q * scale.

    scale = max|x| / 127; q = x / scale rounded half to even, so |q| <= 127. A group of zeros has scale 0. A group that
    holds NaN or infinity has a scale that is not finite and q = 0: every product with it is NaN and nothing is hidden.

    Shapes:
        x        [.., K]            float32; K is a multiple of 32
        returns  q [.., K]          int8
                 scale [.., K / 32] float32

    Raises:
        ShapeError: K is no multiple of 32.
    """
    k = x.shape[-1] if x.ndim else 0
    _need(
        x.ndim >= 1 and k % ACTIVATION_GROUP == 0,
        "quantize_activations",
        f"x {_s(x)}",
        f"a last axis that is a multiple of {ACTIVATION_GROUP}",
    )
    groups = x.astype(np.float32, copy=False).reshape(*x.shape[:-1], k // ACTIVATION_GROUP, ACTIVATION_GROUP)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = (np.abs(groups).max(axis=-1) / np.float32(127.0)).astype(np.float32)
        q = np.rint(groups / scale[..., None])
        usable = np.isfinite(scale) & (scale > 0.0)
        q = np.where(usable[..., None], np.clip(q, -127, 127), 0.0)
    return q.astype(np.int8).reshape(x.shape), scale


def dequantize_activations(q: Int8s, scale: Floats) -> Floats:
    """Return q * scale, group by group: the inverse of `quantize_activations` up to its rounding.

    Shapes:
        q        [.., K]       int8
        scale    [.., K / 32]  float32
        returns  [.., K]       float32
    """
    groups = q.reshape(*scale.shape, ACTIVATION_GROUP).astype(np.float32)
    with np.errstate(invalid="ignore"):  # 0 * inf: the NaN that a group without a finite scale must give
        return np.asarray(groups * scale[..., None], np.float32).reshape(q.shape)


def linear_q8(x: Floats, w: Floats, bias: Floats | None = None) -> Floats:
    """`linear` on activations rounded to int8: what quantised weights, here dequantised to float32, are met with.

    Shapes:
        x        [.., K]  float32; K is a multiple of 32
        w        [N, K]   float32, the exact values of the quantised weight
        bias     [N]      float32
        returns  [.., N]  float32; sums in float64, rounded once

    Raises:
        ShapeError: a line of Shapes does not hold.
    """
    _check_linear("linear_q8", x, w, bias)
    return linear(dequantize_activations(*quantize_activations(x)), w, bias)


def embed(ids: Ints, w: Floats, scale: float = 1.0, masked: Floats | None = None) -> Floats:
    """Return row ids[t] of w, or `masked` where the id is -1, times `scale`.

    Shapes:
        ids      [T]     integers in 0..V; -1 too if there is `masked`
        w        [V, E]  float32
        masked   [E]     float32
        returns  [T, E]  float32

    Raises:
        ShapeError: w is no matrix, ids no vector, masked no row of w, or an id is outside 0..V.
    """
    if masked is not None:
        _need(masked.shape == w.shape[1:], "embed", f"w {_s(w)} and masked {_s(masked)}", "masked [E] for w [V, E]")
        y = embed(np.where(ids == -1, 0, ids), w, scale)
        return np.where((ids == -1)[:, None], masked * np.float32(scale), y).astype(np.float32)
    _need(w.ndim == 2 and ids.ndim == 1, "embed", f"ids {_s(ids)} and w {_s(w)}", "ids [T] and w [V, E]")
    if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < w.shape[0]):
        raise ShapeError(f"ops.embed: got ids in {ids.min()}..{ids.max()}; ids in 0..{w.shape[0]} are needed")
    return np.asarray(w[ids] * np.float32(scale), np.float32)


def gated(x: Floats, act: str, params: tuple[float, ...] = ()) -> Floats:
    """Return act(gate, up), where gate is the left half of x and up the right half; see `ops.activations`.

    Shapes:
        x        [.., 2F]  float32
        returns  [.., F]   float32; the activation in float64, rounded once before the product

    Raises:
        ShapeError: the last axis is odd, or `act` is none of `ACTIVATIONS` with its parameters.
    """
    _need(x.ndim >= 1 and x.shape[-1] % 2 == 0, "gated", f"x {_s(x)}", "an even last axis")
    fault = broken_activation(act, params)
    if fault is not None:
        raise ShapeError(f"ops.gated: got {fault} is needed")
    f = x.shape[-1] // 2
    return activated(x[..., :f], x[..., f:], act, params)


def rope_table(positions: Ints, inv_freq: Floats, magnitude: float = 1.0) -> Floats:
    """Return the cosines, then the sines, of position times frequency, all times `magnitude`.

    The angle is a float32 product, as the models were trained with; its cosine and sine are taken in float64.

    Shapes:
        positions  [T]       integers >= 0
        inv_freq   [d2]      float32
        returns    [T, 2*d2] float32

    Source: Su et al. 2021 (arXiv:2104.09864), equation 34.
    """
    angle = positions.astype(np.float32)[:, None] * inv_freq.astype(np.float32)[None, :]
    wide = angle.astype(np.float64)
    table = np.concatenate([np.cos(wide), np.sin(wide)], axis=-1) * magnitude
    return np.asarray(table, np.float32)


def rope(x: Floats, cos_sin: Floats) -> Floats:
    """Rotate the first 2 * d2 columns of each head: halves (a, b) become (a cos - b sin, b cos + a sin).

    Shapes:
        x        [T, heads, D]  float32
        cos_sin  [T, 2*d2]      float32, from `rope_table`; 2 * d2 <= D
        returns  [T, heads, D]  float32; columns 2*d2.. are copied

    Raises:
        ShapeError: a line of Shapes does not hold.
    """
    width = cos_sin.shape[-1]
    fits = x.ndim == 3 and cos_sin.ndim == 2 and x.shape[0] == cos_sin.shape[0] and width % 2 == 0
    _need(
        fits and width <= x.shape[-1], "rope", f"x {_s(x)} and cos_sin {_s(cos_sin)}", "[T, heads, D], [T, 2*d2 <= D]"
    )
    d2 = width // 2
    cos, sin = cos_sin[:, None, :d2], cos_sin[:, None, d2:]
    y = x.astype(np.float32, copy=True)
    a, b = x[..., :d2], x[..., d2:width]
    y[..., :d2] = a * cos - b * sin
    y[..., d2:width] = b * cos + a * sin
    return y


def quantize_kv(x: Floats, columns: int) -> tuple[Int8s, Floats]:
    """Round keys or values to int8 with one scale for each `columns` columns (the last may be fewer): about q * scale.

    scale = float16(max|x| / 127); q = x / scale rounded half to even, within +-127. A scale that rounds to 0 has q = 0;
    columns that hold NaN or infinity, or are too large for a float16 scale, have scale NaN and q = 0. (The pool gives a
    token NaN for all scales if one is NaN: whoever sees the token gets NaN, and nothing is hidden.)

    Shapes:
        x        [.., D]                         float32
        returns  q [.., D]                       int8
                 scale [.., ceil(D / columns)]   float32; each a float16
    """
    q = np.empty(x.shape, np.int8)
    scales: list[Floats] = []
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for begin in range(0, x.shape[-1], columns):
            part = x[..., begin : begin + columns]
            scale = (np.abs(part).max(axis=-1, keepdims=True) / np.float32(127.0)).astype(np.float16).astype(np.float32)
            scale = np.where(np.isfinite(scale), scale, np.float32(np.nan))
            rounded = np.where(scale > 0.0, np.clip(np.rint(part / scale), -127, 127), 0.0)
            q[..., begin : begin + columns] = rounded.astype(np.int8)
            scales.append(scale)
    return q, np.concatenate(scales, axis=-1)


def as_stored(k: Floats, v: Floats, kv_dtype: str) -> tuple[Floats, Floats]:
    """Return keys and values [.., D] as a pool of `kv_dtype` ("float32" | "float16" | "int8") gives them back."""
    if kv_dtype == "int8":
        return _through_int8(k, KEY_SCALE_COLUMNS), _through_int8(v, v.shape[-1])
    stored = {"float32": np.float32, "float16": np.float16}[kv_dtype]
    return k.astype(stored).astype(np.float32), v.astype(stored).astype(np.float32)


def _through_int8(x: Floats, columns: int) -> Floats:
    q, scale = quantize_kv(x, columns)
    return np.asarray(q.astype(np.float32) * np.repeat(scale, columns, axis=-1)[..., : x.shape[-1]], np.float32)


def attention(
    q: Floats,
    k: Floats,
    v: Floats,
    *,
    start: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Floats | None = None,
    sees_block: bool = False,
) -> Floats:
    """Attend queries at positions start.. to keys at positions 0.., causally; with `sees_block`, all as the last does.

    score = scale * q.k; with softcap c > 0, score = c * tanh(score / c). Key s is visible to the query at position t
    when s <= t and, with window W > 0, t - W < s. y = softmax(score) @ v over the visible keys. With sinks, the softmax
    has one more logit, its head's sink (neither scaled nor capped), whose weight goes to no value.

    Shapes:
        q        [T, H, D]  float32; row t is at position start + t
        k, v     [L, K, D]  float32; row s is at position s; L >= start + T, H a multiple of K
        sinks    [H]        float32
        returns  [T, H, D]  float32; query head h reads key/value head h // (H // K); softmax and sums in float64

    Raises:
        ShapeError: a line of Shapes does not hold, or start, window or softcap is negative.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1; head groups, Ainslie et al. 2023 (arXiv:2305.13245).
    """
    fits = q.ndim == 3 and k.ndim == 3 and k.shape == v.shape and q.shape[2] == k.shape[2]
    fits = fits and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0 and k.shape[0] >= start + q.shape[0]
    _need(
        fits and min(start, window, softcap) >= 0,
        "attention",
        f"q {_s(q)}, k {_s(k)}, v {_s(v)}, start {start}, window {window}, softcap {softcap}",
        "q [T, H, D], k and v [L, K, D] with L >= start + T and H a multiple of K; start, window, softcap >= 0",
    )
    n_tokens, n_heads, d = q.shape
    length, n_kv = k.shape[0], k.shape[1]
    grouped = q.astype(np.float64).reshape(n_tokens, n_kv, n_heads // n_kv, d).transpose(1, 2, 0, 3)
    keys = k.astype(np.float64).transpose(1, 2, 0)[:, None]
    scores = (grouped @ keys) * scale  # [K, H/K, T, L]
    if softcap > 0.0:
        scores = softcap * np.tanh(scores / softcap)
    at = np.arange(start, start + n_tokens)[:, None]
    if sees_block:
        at = np.full_like(at, start + n_tokens - 1)
    key_at = np.arange(length)[None, :]
    visible = key_at <= at
    if window > 0:
        visible &= key_at > at - window
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, sinks.astype(np.float64).reshape(n_kv, -1, 1, 1))
    scores -= top
    weights = np.exp(scores)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.astype(np.float64).reshape(n_kv, -1, 1, 1) - top)
    weights /= total
    values = v.astype(np.float64).transpose(1, 0, 2)[:, None]
    return (weights @ values).transpose(2, 0, 1, 3).reshape(n_tokens, n_heads, d).astype(np.float32)


def select_rows(x: Floats, rows: Ints) -> Floats:
    """Return row rows[r] of x for each r.

    Shapes:
        x        [T, E]  float32
        rows     [R]     integers in 0..T
        returns  [R, E]  float32

    Raises:
        ShapeError: a row is outside 0..T.
    """
    if rows.size and not (int(rows.min()) >= 0 and int(rows.max()) < x.shape[0]):
        raise ShapeError(f"ops.select_rows: got rows in {rows.min()}..{rows.max()}; rows in 0..{x.shape[0]} are needed")
    return np.asarray(x[rows], np.float32)


def softcap(x: Floats, cap: float) -> Floats:
    """Return cap * tanh(x / cap): the values stay within -cap..cap.

    Shapes:
        x        [..]  float32
        returns  [..]  float32; tanh in float64, rounded once

    Raises:
        ShapeError: cap is not positive.
    """
    _need(cap > 0.0, "softcap", f"cap {cap}", "a positive cap")
    return np.asarray(cap * np.tanh(x.astype(np.float64) / cap), np.float32)


def add(x: Floats, y: Floats) -> Floats:
    """Return x + y.

    Shapes:
        x, y     [..]  float32, the same shape
        returns  [..]  float32

    Raises:
        ShapeError: the shapes differ.
    """
    _need(x.shape == y.shape, "add", f"x {_s(x)} and y {_s(y)}", "equal shapes")
    return np.asarray(x + y, np.float32)


def _check_linear(op: str, x: Floats, w: Floats, bias: Floats | None) -> None:
    fits = w.ndim == 2 and x.ndim >= 1 and x.shape[-1] == w.shape[1] and (bias is None or bias.shape == w.shape[:1])
    shown = "" if bias is None else f", bias {_s(bias)}"
    _need(fits, op, f"x {_s(x)}, w {_s(w)}{shown}", "x [.., K], w [N, K], bias [N]")


def _need(holds: bool, op: str, got: str, needed: str) -> None:
    if not holds:
        raise ShapeError(f"ops.{op}: got {got}; {needed} is needed")


def _s(x: npt.NDArray[np.generic]) -> str:
    return str(list(x.shape))
