"""Shape rules and costs of the ops that drafters are written in; `ops.vocabulary` has them among its own."""

from tiercel.ops import costs
from tiercel.ops.costs import Cost
from tiercel.ops.dims import Bounds, Dim
from tiercel.ops.program import OpCall

Shape = tuple[Dim, int]
Broken = str | None  # what was got and what is needed


def keep_kv(call: OpCall) -> tuple[Shape, Broken]:
    """Keep keys and values; nothing comes of it in the step itself."""
    k, v = call.inputs
    kv_heads, d = call.integer("kv_heads"), call.integer("head_dim")
    fits = kv_heads >= 1 and d >= 1 and k.width == v.width == kv_heads * d and k.rows is v.rows is Dim.TOKENS
    got = f"k and v of rows {k.rows} and {v.rows}, widths {k.width} and {v.width}, kv_heads {kv_heads}, head_dim {d}"
    return (Dim.TOKENS, 0), None if fits else f"{got}; rows T, widths K*D twice"


def keep_kv_cost(call: OpCall, bounds: Bounds) -> Cost:
    """Count reading both once; where they go is counted by whoever reads them there."""
    return costs.rows(bounds.of(call.output.rows), sum(x.width for x in call.inputs), 0, 0)


def keep_latents(call: OpCall) -> tuple[Shape, Broken]:
    """Keep latent rows; nothing comes of it in the step itself."""
    (latents, *tables), norm, rope = call.inputs, call.weights["norm"], call.integer("rope")
    rank = latents.width - rope
    fits = rank >= 1 and rope >= 0 and norm.shape == (rank,) and latents.rows is Dim.TOKENS and call.real("eps") > 0.0
    fits = fits and all(t.width == rope and rope % 2 == 0 and t.rows is Dim.TOKENS for t in tables)
    got = f"latents [{latents.rows},{latents.width}], tables {[t.width for t in tables]}, norm {list(norm.shape)}"
    return (Dim.TOKENS, 0), None if fits else f"{got}; latents [T, rank+{rope}], a table of {rope} columns, norm [rank]"


def block_conv(call: OpCall) -> tuple[Shape, Broken]:
    """Mix each row with those before it in its block."""
    x, delta, base = call.inputs[0], call.inputs[1], call.weights["base"]
    taps, group, side = call.integer("taps"), call.integer("group"), call.integer("side")
    n_sides = base.n_weights // (taps * x.width) if taps >= 1 else 0
    fits = taps >= 1 and group >= 1 and x.width % group == 0 and 0 <= side < n_sides
    fits = fits and base.shape in ((taps, x.width), (n_sides, taps, x.width))
    fits = fits and delta.width * group == n_sides * taps * x.width and x.rows is delta.rows is Dim.TOKENS
    got = f"x and delta of rows {x.rows} and {delta.rows}, widths {x.width} and {delta.width}, base {list(base.shape)}"
    needed = f"rows T, base [S, taps, C], delta S*taps*C/group, for taps {taps}, group {group}, side {side} of S"
    return (x.rows, x.width), None if fits else f"{got}; {needed}"


def block_conv_cost(call: OpCall, bounds: Bounds) -> Cost:
    """Count two operations a tap and column, and one to make its coefficient."""
    m, x = bounds.of(call.output.rows), call.inputs[0]
    coefficients = costs.F32_BYTES * call.integer("taps") * x.width
    return costs.rows(m, x.width + call.inputs[1].width, x.width, 0, coefficients) + Cost(
        3 * m * call.integer("taps") * x.width, 0
    )


def scale(call: OpCall) -> tuple[Shape, Broken]:
    """Multiply by a number."""
    x, factor = call.inputs[0], call.real("factor")
    fits = factor == factor and abs(factor) < float("inf")
    return (x.rows, x.width), None if fits else f"factor {factor}; a finite one"
