"""The ops of a mixture of experts, defined: which experts a row goes to, and what they make of it.

A route is float32 [.., 2 * top_k]: the numbers of the chosen experts, ascending, then their weights.
"""

from typing import NamedTuple

import numpy as np

from tiercel.base.errors import ShapeError
from tiercel.ops.activations import activated, broken_activation
from tiercel.ops.reference import Floats, dequantize_activations, linear, quantize_activations
from tiercel.ops.routing import Routing


class Experts(NamedTuple):
    """All experts' float32 weights: gate and up [X, F, K], down [X, N, F]; biases [X, F], [X, F], [X, N] or None."""

    gate: Floats
    up: Floats
    down: Floats
    gate_bias: Floats | None = None
    up_bias: Floats | None = None
    down_bias: Floats | None = None


def router(logits: Floats, routing: Routing, bias: Floats | None = None) -> Floats:
    """Choose each row's experts and their weights.

    s is the softmax or the sigmoid of the logits, and c = s + bias decides: of the groups, the `n_groups_kept` with the
    largest sum of their `group_top` largest c stay; of their experts, the `top_k` with the largest c are chosen. Of
    equals the lower number wins. The weight is s; renormalised, s / (sum of the chosen s + 1e-20); then times `scale`.
    A row with a NaN among its s has experts 0 .. top_k - 1 with weights NaN.

    Shapes:
        logits   [T, X]          float32
        bias     [X]             float32
        returns  [T, 2 * top_k]  float32; see the module

    Raises:
        ShapeError: a line of Shapes does not hold, or the routing is broken.

    Source: Shazeer et al. 2017 (arXiv:1701.06538); groups and bias, DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.
    """
    fault = routing.broken()
    if fault is not None:
        raise ShapeError(f"ops.router: got {fault} is needed")
    n, k = routing.n_experts, routing.top_k
    if logits.ndim != 2 or logits.shape[1] != n or (bias is not None and bias.shape != (n,)):
        shown = "" if bias is None else f", bias {list(bias.shape)}"
        raise ShapeError(f"ops.router: got logits {list(logits.shape)}{shown}; [T, {n}] and [{n}] are needed")
    wide = logits.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if routing.scores == "sigmoid":
            s = 1.0 / (1.0 + np.exp(-wide))
        else:
            s = np.exp(wide - wide.max(axis=-1, keepdims=True))
            s /= s.sum(axis=-1, keepdims=True)
    s = s.astype(np.float32)
    choice = s if bias is None else s + bias
    out = np.empty((len(s), 2 * k), np.float32)
    for t in range(len(s)):
        out[t] = _route(s[t], choice[t], routing)
    return out


def _route(s: Floats, choice: Floats, routing: Routing) -> Floats:
    k = routing.top_k
    if np.isnan(s).any():
        return np.array([*range(k), *[np.nan] * k], np.float32)
    groups = choice.reshape(routing.n_groups, -1)
    group_scores = -np.sort(-groups, axis=-1)[:, : routing.group_top].sum(axis=-1, dtype=np.float32)
    kept = np.zeros(routing.n_groups, bool)
    kept[np.argsort(-group_scores, kind="stable")[: routing.n_groups_kept]] = True
    allowed = np.where(kept[:, None], groups, -np.inf).reshape(-1)
    chosen = np.sort(np.argsort(-allowed, kind="stable")[:k])
    weights = s[chosen].astype(np.float64)
    if routing.renormalises:
        weights /= weights.sum() + 1e-20
    return np.concatenate([chosen, weights * routing.scale]).astype(np.float32)


def experts(
    x: Floats,
    route: Floats,
    weights: Experts,
    act: str,
    params: tuple[float, ...] = (),
    *,
    rounds_x: bool = False,
    rounds_hidden: bool = False,
) -> Floats:
    """Return the sum over each row's experts e of weight_e * down_e(act(gate_e x, up_e x)), by ascending number.

    Each projection adds its expert's bias, if there is one. Where `rounds_x` and `rounds_hidden` say so, the rows that
    gate and up, or down, read are rounded to int8 first, as their weights are quantised: see `reference.linear_q8`.

    Shapes:
        x        [T, K]          float32
        route    [T, 2 * top_k]  float32, of `router`
        returns  [T, N]          float32; the sum in float64, rounded once

    Raises:
        ShapeError: a line of Shapes does not hold, a number in route is of no expert, or the activation is unknown.
    """
    n, f, width = weights.gate.shape[0], weights.gate.shape[1], weights.down.shape[1]
    fits = weights.gate.shape == weights.up.shape == (n, f, x.shape[1]) and weights.down.shape == (n, width, f)
    fault = broken_activation(act, params)
    if not fits or route.shape[0] != len(x) or route.shape[1] % 2 or fault is not None:
        shapes = ", ".join(str(list(w.shape)) for w in (x, route, weights.gate, weights.up, weights.down))
        raise ShapeError(f"ops.experts: got {shapes}, {act}{params}; see the op's shapes; {fault or ''}")
    k = route.shape[1] // 2
    chosen = route[:, :k].astype(np.int64)
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < n:
        raise ShapeError(f"ops.experts: got experts {chosen.min()}..{chosen.max()}; 0..{n} is needed")
    x = dequantize_activations(*quantize_activations(x)) if rounds_x else x
    total = np.zeros((len(x), width), np.float64)
    for e in range(n):
        rows, at = np.nonzero(chosen == e)
        if not len(rows):
            continue
        gate = linear(x[rows], weights.gate[e], None if weights.gate_bias is None else weights.gate_bias[e])
        up = linear(x[rows], weights.up[e], None if weights.up_bias is None else weights.up_bias[e])
        hidden = activated(gate, up, act, params)
        hidden = dequantize_activations(*quantize_activations(hidden)) if rounds_hidden else hidden
        down = linear(hidden, weights.down[e], None if weights.down_bias is None else weights.down_bias[e])
        total[rows] += route[rows, k + at][:, None].astype(np.float64) * down
    return total.astype(np.float32)
