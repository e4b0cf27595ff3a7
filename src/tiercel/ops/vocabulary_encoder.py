"""Shape rules of the ops of encoders; `ops.vocabulary` has them among its own."""

from tiercel.ops.dims import UNARY, Dim
from tiercel.ops.program import OpCall

Shape = tuple[Dim, int]
Broken = str | None  # what was got and what is needed


def embed_rows(call: OpCall) -> tuple[Shape, Broken]:
    """Give a row of a table for each token's position or segment."""
    w, first, of = call.weights["w"], call.integer("first"), call.word("of")
    fits = len(w.shape) == 2 and 0 <= first < w.shape[0] and of in ("position", "segment")
    return (Dim.TOKENS, w.shape[-1]), None if fits else f"w {list(w.shape)}, first {first}, of {of!r}; w [P, E]"


def layer_norm(call: OpCall) -> tuple[Shape, Broken]:
    """Normalise each row around its mean."""
    x, w, bias = call.inputs[0], call.weights["w"], call.weights["bias"]
    fits = w.shape == bias.shape == (x.width,) and call.real("eps") > 0.0
    broken = f"x width {x.width}, w {list(w.shape)}, bias {list(bias.shape)}; w and bias [width], eps > 0"
    return (x.rows, x.width), None if fits else broken


def activate(call: OpCall) -> tuple[Shape, Broken]:
    """Apply a function to each number."""
    x, act = call.inputs[0], call.word("act")
    return (x.rows, x.width), None if act in UNARY else f"act {act!r}; one of {', '.join(UNARY)}"


def sequence_attention(call: OpCall) -> tuple[Shape, Broken]:
    """Attend each row to all rows of its sequence in the step."""
    q, k, v = call.inputs
    heads, kv_heads, d = call.integer("heads"), call.integer("kv_heads"), call.integer("head_dim")
    fits = kv_heads >= 1 and heads % kv_heads == 0 and q.width == heads * d and k.width == v.width == kv_heads * d
    fits = fits and q.rows is k.rows is v.rows is Dim.TOKENS and call.real("scale") > 0.0
    got = f"q, k, v widths {q.width}, {k.width}, {v.width}, heads {heads}, kv_heads {kv_heads}, head_dim {d}"
    return (q.rows, q.width), None if fits else f"{got}; widths H*D, K*D, K*D, rows T, scale > 0"
