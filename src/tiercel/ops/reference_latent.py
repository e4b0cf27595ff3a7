"""Definitions of latent attention's ops. Read beside `ops.reference`, which holds the rest."""

import numpy as np

from tiercel.base.errors import ShapeError
from tiercel.ops.reference import Floats, attention, rms_norm


def rotate_pairs(x: Floats, cos_sin: Floats, *, interleaved: bool) -> Floats:
    """Rotate all columns; interleaved pairs (2j, 2j + 1) are written as halves (j, j + n / 2), else halves stay halves.

    Keys and queries get the same order, so that no score knows it.

    Shapes:
        x        [T, heads, n]  float32
        cos_sin  [T, n]         float32, from `rope_table`
        returns  [T, heads, n]  float32
    """
    d2 = x.shape[-1] // 2
    cos, sin = cos_sin[:, None, :d2], cos_sin[:, None, d2:]
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :d2], x[..., d2:])
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def latent_rows(a: Floats, norm: Floats, eps: float, cos_sin: Floats | None, *, interleaved: bool = True) -> Floats:
    """Return what tokens leave in the cache: the normed latent, then the position part, rotated where there is a table.

    Shapes:
        a        [T, rank + rope]  float32
        norm     [rank]            float32
        cos_sin  [T, rope]         float32, or None for a layer without positions
        returns  [T, rank + rope]  float32
    """
    rank = norm.shape[0]
    latent, pe = rms_norm(a[:, :rank], norm, eps), a[:, None, rank:]
    if cos_sin is not None:
        pe = rotate_pairs(pe, cos_sin, interleaved=interleaved)
    return np.concatenate([latent, pe[:, 0]], axis=-1)


def split_heads(w: Floats, heads: int, nope: int) -> tuple[Floats, Floats]:
    """Return kv_b_proj [heads * (nope + v), rank] as two: keys [heads, nope, rank], values [heads, v, rank]."""
    whole = w.reshape(heads, -1, w.shape[1])
    return whole[:, :nope], whole[:, nope:]


def latent_attention(
    q: Floats, rows: Floats, w: Floats, *, start: int, nope: int, scale: float, sees_block: bool = False
) -> Floats:
    """Attend queries at positions start.. to latent rows at positions 0.., causally or as `attention`'s `sees_block`.

    With c, p = a row's first `rank` columns and the rest: a head's key is [w_key c | p], its value w_value c.
    An implementation may multiply queries by w_key first, and weighted latents by w_value last (the absorbed form).

    Shapes:
        q        [T, H, nope + rope]    float32, its last `rope` columns rotated
        rows     [L, rank + rope]       float32, from `latent_rows`; L >= start + T
        w        [H * (nope + v), rank] float32: of each head, w_key [nope, rank], then w_value [v, rank]
        returns  [T, H, v]              float32; products, softmax and sums in float64

    Raises:
        ShapeError: a line of Shapes does not hold.

    Source: DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1.
    """
    rank, heads = w.shape[1], q.shape[1]
    fits = q.shape[2] - nope == rows.shape[1] - rank and w.shape[0] % heads == 0 and w.shape[0] // heads > nope
    if not fits:
        raise ShapeError(
            f"ops.latent_attention: got q {list(q.shape)}, rows {list(rows.shape)}, w {list(w.shape)}, nope {nope}; "
            f"q [T, H, nope + rope], rows [L, rank + rope], w [H * (nope + v), rank] are needed"
        )
    w_key, w_value = split_heads(w.astype(np.float64), heads, nope)
    latent = rows[:, :rank].astype(np.float64)
    keys = np.einsum("lr,hnr->lhn", latent, w_key)
    pe = np.broadcast_to(rows[:, None, rank:], (len(rows), heads, rows.shape[1] - rank))
    k = np.concatenate([keys, pe], axis=-1)
    values = np.einsum("lr,hvr->lhv", latent, w_value)
    wide = max(k.shape[2], values.shape[2])  # `attention` wants keys and values of one width
    padded = [np.pad(x, ((0, 0), (0, 0), (0, wide - x.shape[2]))) for x in (q.astype(np.float64), k, values)]
    return attention(*padded, start=start, scale=scale, sees_block=sees_block)[..., : values.shape[2]]


def head_linear(x: Floats, w: Floats) -> Floats:
    """Multiply each head by its own matrix.

    Shapes:
        x        [T, H, K]  float32
        w        [H, K, N]  float32
        returns  [T, H, N]  float32; sums in float64, rounded once
    """
    y = np.einsum("rhk,hkc->rhc", x.astype(np.float64), w.astype(np.float64))
    return np.asarray(y, np.float32)


def sigmoid_gate(x: Floats, gate: Floats) -> Floats:
    """Return x * sigmoid(gate); each column of gate serves width / gate_width neighbouring columns of x.

    Shapes:
        x        [.., N]  float32
        gate     [.., G]  float32; N is a multiple of G
        returns  [.., N]  float32; the sigmoid in float64, rounded once before the product
    """
    with np.errstate(over="ignore"):
        factor = (1.0 / (1.0 + np.exp(-gate.astype(np.float64)))).astype(np.float32)
    return np.asarray(x * np.repeat(factor, x.shape[-1] // gate.shape[-1], axis=-1), np.float32)
