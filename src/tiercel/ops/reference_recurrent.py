"""The ops of recurrent layers, defined; see `ops.reference` for the rules. State goes in and comes out as an array."""

import numpy as np
import numpy.typing as npt

from tiercel.base.errors import ShapeError
from tiercel.ops.reference import Floats, rms_norm

Reals = npt.NDArray[np.float64]


def short_conv(x: Floats, w: Floats, bias: Floats | None, act: str, window: Floats) -> tuple[Floats, Floats]:
    """Convolve each channel with its own filter over the tokens, causally: y[t] = act(bias + sum_j w[:, j] x[t-W+1+j]).

    Shapes:
        x        [T, C]      float32; one sequence's next tokens
        w        [C, W]      float32; the oldest tap first
        bias     [C]         float32
        window   [W - 1, C]  float32; the inputs before x, zeros where there were none
        returns  [T, C]      float32; sums in float64
                 [W - 1, C]  float32; the last inputs

    Raises:
        ShapeError: a line of Shapes does not hold, or `act` is neither silu nor none.
    """
    width = w.shape[1] if w.ndim == 2 else 0
    fits = w.ndim == 2 and width >= 1 and x.ndim == 2 and x.shape[1] == len(w) and window.shape == (width - 1, len(w))
    if not fits or act not in ("silu", "none"):
        raise ShapeError(
            f"ops.short_conv: got x {list(x.shape)}, w {list(w.shape)}, window {list(window.shape)}, act {act!r}; "
            "[T, C], [C, W], [W - 1, C] and silu or none are needed"
        )
    joined = np.concatenate([window, x])
    y = np.zeros(x.shape, np.float64) if bias is None else np.broadcast_to(bias, x.shape).astype(np.float64)
    for j in range(width):
        y = y + w[:, j].astype(np.float64) * joined[j : j + len(x)]
    y = y * _sigmoid(y) if act == "silu" else y
    return y.astype(np.float32), joined[len(x) :].astype(np.float32)


def log_decay(gate: Floats, a_log: Floats, dt_bias: Floats, lower_bound: float) -> Reals:
    """Return the logarithm of what a state is multiplied with, at most 0.

    With s = gate + dt_bias: -exp(a_log) * softplus(s), or lower_bound * sigmoid(exp(a_log) * s) for a bound below 0.

    Shapes:
        gate     [T, H] or [T, H, D]  float32
        a_log    [H]                  float32
        dt_bias  [H] or [H, D]        float32, as gate
        returns  like gate            float64
    """
    s = gate.astype(np.float64) + dt_bias
    a = np.exp(a_log.astype(np.float64)).reshape(-1, *[1] * (gate.ndim - 2))
    return np.asarray(lower_bound * _sigmoid(a * s) if lower_bound < 0.0 else -a * np.logaddexp(0.0, s))


def delta_rule(
    q: Floats, k: Floats, v: Floats, decay: Reals, beta: Floats, state: Floats, eps: float = 1e-6
) -> tuple[Floats, Floats]:
    """Walk one sequence's tokens through the gated delta rule.

    With q, k normalised (x / sqrt(sum x**2 + eps), q also times D**-0.5), each value head's state S [D, E] becomes
    S = exp(decay) * S; S += k (beta (v - S^T k))^T, and y = S^T q. Key head h serves H / K consecutive value heads.

    Shapes:
        q, k     [T, K, D]             float32
        v        [T, H, E]             float32; H a multiple of K
        decay    [T, H] or [T, H, D]   logarithms: one for the whole state, or one a key channel
        beta     [T, H]                float32; its sigmoid is what is used
        state    [H, D, E]             float32; zeros before the first token
        returns  [T, H, E]             float32; computed in float64
                 [H, D, E]             float32

    Raises:
        ShapeError: a line of Shapes does not hold.

    Source: Yang et al. 2024 (arXiv:2412.06464), equation 10; gates of channels, Kimi Linear 2025 (arXiv:2510.26692).
    """
    n, heads, e = v.shape
    d = q.shape[2]
    fits = q.shape == k.shape and len(q) == n and heads % q.shape[1] == 0 and state.shape == (heads, d, e)
    if not fits or decay.shape not in ((n, heads), (n, heads, d)) or beta.shape != (n, heads):
        shapes = ", ".join(str(list(a.shape)) for a in (q, k, v, decay, beta, state))
        raise ShapeError(f"ops.delta_rule: got q, k, v, decay, beta, state of {shapes}; see its Shapes")
    repeat = heads // q.shape[1]
    qs, ks = (np.repeat(_normalised(a, eps), repeat, axis=1) for a in (q, k))
    qs = qs * d**-0.5
    kept = np.exp(decay.reshape(n, heads, -1))[..., None]
    betas = _sigmoid(beta.astype(np.float64))[..., None]
    s = state.astype(np.float64)
    y = np.empty(v.shape, np.float64)
    for t in range(n):
        s = s * kept[t]
        seen = np.einsum("hde,hd->he", s, ks[t])
        s = s + ks[t][:, :, None] * (betas[t] * (v[t] - seen))[:, None, :]
        y[t] = np.einsum("hde,hd->he", s, qs[t])
    return y.astype(np.float32), s.astype(np.float32)


def gated_norm(x: Floats, z: Floats, w: Floats | None, eps: float, act: str) -> Floats:
    """Return rms_norm(x, w, eps) * act(z) over the last axis, or x * act(z) without w; act is silu, sigmoid or none.

    Shapes:
        x        [.., n]            float32
        z        [.., n] or [.., 1] float32
        w        [n]                float32
        returns  [.., n]            float32

    Raises:
        ShapeError: x and z differ, or `act` is unknown.
    """
    if z.shape not in (x.shape, (*x.shape[:-1], 1)) or act not in ("silu", "sigmoid", "none"):
        raise ShapeError(f"ops.gated_norm: got x {list(x.shape)}, z {list(z.shape)}, act {act!r}; equal shapes needed")
    wide = z.astype(np.float64)
    gate = wide if act == "none" else wide * _sigmoid(wide) if act == "silu" else _sigmoid(wide)
    return ((x if w is None else rms_norm(x, w, eps)) * gate).astype(np.float32)


def ssd(
    x: Floats, b: Floats, c: Floats, steps: Reals, a_log: Floats, d: Floats, state: Floats
) -> tuple[Floats, Floats]:
    """Walk one sequence's tokens through Mamba2's recurrence.

    Each head's state S [N, P] becomes S = exp(-exp(a_log) * step) * S + b (step * x)^T, and y = S^T c + d * x. Each
    group's b and c serve H / G consecutive heads.

    Shapes:
        x        [T, H, P]   float32
        b, c     [T, G, N]   float32; H a multiple of G
        steps    [T, H]      how long each step is; see `ssd_steps`
        a_log, d [H]         float32
        state    [H, N, P]   float32; zeros before the first token
        returns  [T, H, P]   float32; sums in float64
                 [H, N, P]   float32; the state after the last token

    Source: Dao and Gu 2024 (arXiv:2405.21060), section 6, as a recurrence: one order for decoding and prefill.

    Raises:
        ShapeError: a line of Shapes does not hold.
    """
    n, heads, p = x.shape
    fits = b.shape == c.shape and b.ndim == 3 and len(b) == n and b.shape[1] >= 1 and heads % b.shape[1] == 0
    fits = fits and steps.shape == (n, heads) and a_log.shape == d.shape == (heads,)
    if not fits or state.shape != (heads, b.shape[2], p):
        raise ShapeError(
            f"ops.ssd: got x {list(x.shape)}, b {list(b.shape)}, c {list(c.shape)}, steps {list(steps.shape)}, "
            f"state {list(state.shape)}; [T, H, P], [T, G, N] twice, [T, H] and [H, N, P] are needed"
        )
    bs, cs = (np.repeat(a.astype(np.float64), heads // b.shape[1], axis=1) for a in (b, c))
    kept = np.exp(-np.exp(a_log.astype(np.float64)) * steps)[..., None, None]
    s = state.astype(np.float64)
    y = np.empty(x.shape, np.float64)
    for t in range(n):
        s = s * kept[t] + bs[t][:, :, None] * (steps[t][:, None] * x[t])[:, None, :]
        y[t] = np.einsum("hnp,hn->hp", s, cs[t]) + d[:, None] * x[t].astype(np.float64)
    return y.astype(np.float32), s.astype(np.float32)


def ssd_steps(dt: Floats, dt_bias: Floats, shortest: float, longest: float) -> Reals:
    """Return how long each token's step is: softplus(dt + dt_bias), between two limits; float64 like dt [T, H]."""
    return np.asarray(np.clip(np.logaddexp(0.0, dt.astype(np.float64) + dt_bias), shortest, longest))


def gate_norm(x: Floats, z: Floats, w: Floats, eps: float, groups: int) -> Floats:
    """Return the norm of each of `groups` equal parts of x * silu(z), times w.

    Shapes:
        x, z     [T, n]  float32; n a multiple of groups
        w        [n]     float32
        returns  [T, n]  float32

    Raises:
        ShapeError: a line of Shapes does not hold.
    """
    if x.shape != z.shape or w.shape != x.shape[1:] or groups < 1 or w.shape[0] % groups:
        raise ShapeError(
            f"ops.gate_norm: got x {list(x.shape)}, z {list(z.shape)}, w {list(w.shape)}, {groups} groups; "
            "[T, n] twice and [n], n a multiple of the groups, are needed"
        )
    wide = z.astype(np.float64)
    gated = (x * (wide * _sigmoid(wide))).reshape(len(x), groups, w.shape[0] // groups)
    normed = gated / np.sqrt(np.square(gated).mean(axis=-1, keepdims=True) + eps)
    return np.asarray(normed.reshape(x.shape) * w).astype(np.float32)


def _normalised(x: Floats, eps: float) -> Reals:
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt(np.square(wide).sum(axis=-1, keepdims=True) + eps))


def _sigmoid(x: Reals) -> Reals:
    return np.asarray(np.exp(-np.logaddexp(0.0, -x)))
