"""The ops of residual banks and of draft heads, defined; see `ops.reference` for the rules."""

from collections.abc import Sequence

import numpy as np

from tiercel.base.errors import ShapeError
from tiercel.ops.reference import Floats


def residual_mix(sources: Sequence[Floats], norm: Floats, projection: Floats, eps: float) -> Floats:
    """Return the sum of the sources, weighed by the softmax of what a projection says of each one's norm.

    score_j = sum_d norm[d] projection[d] source_j[d] / sqrt(mean(source_j**2) + eps); what is added are the sources
    themselves.

    Shapes:
        sources     n of [.., E]  float32
        norm        [E]           float32
        projection  [E] or [1, E] float32
        returns     [.., E]       float32; computed in float64

    Raises:
        ShapeError: a line of Shapes does not hold.

    Source: Kimi Team 2026, attention residuals (Kimi K3).
    """
    width = sources[0].shape[-1] if sources else 0
    fits = bool(sources) and all(x.shape == sources[0].shape for x in sources)
    if not fits or norm.shape != (width,) or projection.size != width:
        shapes = [list(x.shape) for x in (*sources, norm, projection)]
        raise ShapeError(f"ops.residual_mix: got {shapes}; sources of one shape, a norm and a projection are needed")
    stacked = np.stack([x.astype(np.float64) for x in sources])
    root = np.sqrt(np.square(stacked).mean(axis=-1) + eps)
    scores = stacked @ (norm.astype(np.float64) * projection.reshape(-1)) / root
    weights = np.exp(scores - scores.max(axis=0))
    weights /= weights.sum(axis=0)
    return np.asarray((weights[..., None] * stacked).sum(axis=0), np.float32)


def given(rows: Floats, width: int) -> Floats:
    """Return the rows that the step brings along.

    Shapes:
        returns  [T, width]  float32

    Raises:
        ShapeError: they have another width.
    """
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ShapeError(f"ops.given: got {list(rows.shape)}; [T, {width}] is needed")
    return rows


def join(x: Floats, z: Floats) -> Floats:
    """Return the rows of x with those of z behind them.

    Shapes:
        x, z     [.., A], [.., B]  float32
        returns  [.., A + B]       float32
    """
    return np.concatenate([x, z], axis=-1)
