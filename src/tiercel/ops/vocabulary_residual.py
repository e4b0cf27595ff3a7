"""Shape rules of the ops of residual banks and of draft heads; `ops.vocabulary` has them among its own."""

from math import prod

from tiercel.ops.dims import MAX_RESIDUALS, Dim
from tiercel.ops.program import OpCall

Shape = tuple[Dim, int]
Broken = str | None  # what was got and what is needed


def residual_mix(call: OpCall) -> tuple[Shape, Broken]:
    """Weigh rows of one shape by what a projection says of each one's norm."""
    first, norm, projection = call.inputs[0], call.weights["norm"], call.weights["w"]
    fits = (
        all((x.rows, x.width) == (first.rows, first.width) for x in call.inputs) and len(call.inputs) <= MAX_RESIDUALS
    )
    fits = fits and norm.shape == (first.width,) and prod(projection.shape) == first.width and call.real("eps") > 0.0
    got = f"widths {[x.width for x in call.inputs]}, norm {list(norm.shape)}, w {list(projection.shape)}"
    return (
        first.rows,
        first.width,
    ), None if fits else f"{got}; up to {MAX_RESIDUALS} alike, norm and w as wide, eps > 0"


def given(call: OpCall) -> tuple[Shape, Broken]:
    """Take rows from outside."""
    width = call.integer("width")
    return (Dim.TOKENS, width), None if width >= 1 else f"width {width}; a positive number"


def join(call: OpCall) -> tuple[Shape, Broken]:
    """Put rows side by side."""
    x, z = call.inputs
    return (x.rows, x.width + z.width), None if x.rows is z.rows else f"rows {x.rows} and {z.rows}; equal rows"
