"""Shape rules and costs of latent attention's ops; `ops.vocabulary` joins them to the rest.

Each `infer` returns what is wrong with a call, as (got, needed), or None, and the output's rows and width.
"""

from tiercel.ops import costs
from tiercel.ops.costs import Cost
from tiercel.ops.dims import Bounds, Dim
from tiercel.ops.program import OpCall

Wrong = tuple[str, str] | None


def latent_attention_shape(call: OpCall) -> tuple[Wrong, Dim, int]:
    """Check q [T or R, H*(nope+rope)], latents [T, rank+rope], table [T, rope]?, norm [rank], w [H*(nope+v), rank]."""
    q, latents, *tables = call.inputs
    norm, w = call.weights["norm"], call.weights["w"]
    heads, nope, rope, v = (call.integer(name) for name in ("heads", "nope", "rope", "v_dim"))
    rank = w.shape[1] if len(w.shape) == 2 else 0
    fits = min(heads, nope, v, rank) >= 1 and rope >= 0 and q.width == heads * (nope + rope)
    fits = fits and latents.width == rank + rope and norm.shape == (rank,) and w.shape == (heads * (nope + v), rank)
    fits = fits and all(t.width == rope and rope % 2 == 0 and t.rows is Dim.TOKENS for t in tables)
    fits = fits and latents.rows is Dim.TOKENS and q.rows in (Dim.TOKENS, Dim.ROWS)
    fits = fits and call.real("scale") > 0.0 and call.real("eps") > 0.0
    got = (
        f"q [{q.rows},{q.width}], latents [{latents.rows},{latents.width}], tables {[t.width for t in tables]}, "
        f"norm {list(norm.shape)}, w {list(w.shape)}, heads {heads}, nope {nope}, rope {rope}, v {v}"
    )
    needed = "q [T or R, heads*(nope+rope)], latents [T, rank+rope], a table as wide as rope, w [heads*(nope+v), rank]"
    return None if fits else (got, needed), q.rows, heads * v


def latent_attention_cost(call: OpCall, bounds: Bounds) -> Cost:
    """Return the absorbed form's cost."""
    w = call.weights["w"]
    rank, rope, heads = w.shape[1], call.integer("rope"), call.integer("heads")
    m = bounds.of(call.output.rows)
    products = Cost(2 * m * w.n_weights, w.nbytes if m else 0)
    return products + costs.latent_attention(m, bounds, heads, rank, rope)


def sigmoid_gate_shape(call: OpCall) -> tuple[Wrong, Dim, int]:
    """Check x [., N] and gate [., G] with G a divisor of N."""
    x, gate = call.inputs
    fits = gate.width >= 1 and x.width % gate.width == 0 and x.rows is gate.rows
    return None if fits else (f"widths {x.width}, {gate.width}", "a gate whose width divides x's"), x.rows, x.width
