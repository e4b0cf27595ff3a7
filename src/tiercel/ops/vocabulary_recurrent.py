"""The ops of recurrent layers: contracts and costs; `ops.vocabulary` has them in its list."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType

from tiercel.base.errors import ShapeError
from tiercel.ops import costs
from tiercel.ops.costs import F32_BYTES, Cost
from tiercel.ops.dims import Bounds, Dim
from tiercel.ops.program import OpCall, StateLayer

Need = Callable[[bool, OpCall, str, str], None]
# What an op keeps of each sequence.
_KEEPS: Mapping[str, str] = MappingProxyType({"short_conv": "window", "delta_rule": "matrices", "ssd": "matrices"})


def short_conv_shape(call: OpCall, need: Need) -> tuple[Dim, int]:
    """Check a short convolution: one filter of `width` taps for each channel of its inputs, side by side."""
    width, total = call.integer("width"), sum(x.width for x in call.inputs)
    n = sum(name.startswith("w") for name in call.weights)
    widths = [total] if n == 1 else [x.width for x in call.inputs]
    need(width >= 1 and n == len(widths), call, f"{n} weights of width {width}", "one weight, or one an input")
    for i, channels in enumerate(widths):
        w, bias = call.weights[f"w{i}"], call.weights.get(f"bias{i}")
        fits = prod(w.shape) == channels * width and w.shape[0] == channels and w.shape[-1] == width
        need(fits, call, f"x width {channels}, w {list(w.shape)}", f"w [{channels}, {width}]")
        need(bias is None or bias.shape == (channels,), call, f"bias {bias}", f"bias [{channels}]")
    has_all = len({f"bias{i}" in call.weights for i in range(n)}) == 1
    need(has_all, call, "some biases", "all or none")
    need(all(x.rows is Dim.TOKENS for x in call.inputs), call, "rows of logits", "rows T")
    need(call.word("act") in ("silu", "none"), call, f"act {call.word('act')!r}", "silu or none")
    return Dim.TOKENS, total


def delta_rule_shape(call: OpCall, need: Need) -> tuple[Dim, int]:
    """Check a delta rule; a gate as wide as all heads' keys has one decay a key channel."""
    qkv, gate, beta = call.inputs
    n_key, n_value, d, e = _heads(call)
    fits = min(n_key, n_value, d, e) >= 1 and n_value % n_key == 0 and qkv.width == 2 * n_key * d + n_value * e
    got = f"qkv width {qkv.width}, key_heads {n_key} of {d}, value_heads {n_value} of {e}"
    need(fits, call, got, "2*K*D + H*E with H a multiple of K")
    a_log, dt_bias = call.weights["a_log"], call.weights["dt_bias"]
    fits = gate.width in (n_value, n_value * d) and beta.width == n_value
    need(fits, call, f"gate width {gate.width}, beta width {beta.width}", "gate H or H*D, beta H")
    fits = prod(a_log.shape) == n_value and prod(dt_bias.shape) == gate.width
    need(fits, call, f"a_log {list(a_log.shape)}, dt_bias {list(dt_bias.shape)}", f"[{n_value}], [{gate.width}]")
    need(call.real("lower_bound") <= 0.0, call, f"lower_bound {call.real('lower_bound')}", "lower_bound <= 0")
    need(all(x.rows is Dim.TOKENS for x in call.inputs), call, "rows of logits", "rows T")
    return Dim.TOKENS, n_value * e


def gated_norm_shape(call: OpCall, need: Need) -> tuple[Dim, int]:
    """Check a gated norm, its gates one a column or one a head; without w nothing is normalised."""
    x, z = call.inputs
    heads, w = call.integer("heads"), call.weights.get("w")
    fits = z.width in (x.width, heads) and x.rows is z.rows
    need(fits, call, f"widths {x.width}, {z.width}, heads {heads}", "equal shapes, or a gate a head")
    fits = heads >= 1 and x.width % heads == 0 and (w is None or w.shape == (x.width // heads,))
    need(fits, call, f"x width {x.width}, heads {heads}, w {list(w.shape) if w else 'none'}", "w [width / heads]")
    need(call.word("act") in ("silu", "sigmoid", "none"), call, f"act {call.word('act')!r}", "silu, sigmoid or none")
    return x.rows, x.width


def ssd_shape(call: OpCall, need: Need) -> tuple[Dim, int]:
    """Check Mamba2's recurrence: x, then each group's b and c, side by side, and a step's length a head."""
    xbc, dt = call.inputs
    heads, p, groups, n = ssd_sizes(call)
    fits = min(heads, p, groups, n) >= 1 and heads % groups == 0 and xbc.width == heads * p + 2 * groups * n
    got = f"xbc width {xbc.width}, heads {heads} of {p}, groups {groups} of {n}"
    need(fits, call, got, "H*P + 2*G*N with H a multiple of G")
    fits = dt.width == heads and all(prod(w.shape) == heads for w in call.weights.values())
    shown = ", ".join(f"{name} {list(w.shape)}" for name, w in call.weights.items())
    need(fits, call, f"dt width {dt.width}, {shown}", f"[{heads}] each")
    low, high = call.real("dt_min"), call.real("dt_max")
    need(0.0 <= low <= high, call, f"steps from {low} to {high}", "0 <= dt_min <= dt_max")
    need(all(x.rows is Dim.TOKENS for x in call.inputs), call, "rows of logits", "rows T")
    return Dim.TOKENS, heads * p


def ssd_sizes(call: OpCall) -> tuple[int, int, int, int]:
    """Return heads, a head's columns, groups, and the state's rows."""
    return call.integer("heads"), call.integer("head_dim"), call.integer("groups"), call.integer("state_dim")


def gate_norm_shape(call: OpCall, need: Need) -> tuple[Dim, int]:
    """Check a norm of groups of x * silu(z)."""
    x, z = call.inputs
    groups, w = call.integer("groups"), call.weights["w"]
    fits = z.width == x.width and x.rows is z.rows and groups >= 1 and x.width % groups == 0 and w.shape == (x.width,)
    got = f"widths {x.width}, {z.width}, groups {groups}, w {list(w.shape)}"
    need(fits, call, got, "equal shapes, w [width], and equal groups")
    need(call.real("eps") > 0.0, call, f"eps {call.real('eps')}", "eps > 0")
    return x.rows, x.width


def ssd_cost(call: OpCall, bounds: Bounds) -> Cost:
    """Rows in and out, and each sequence's state read and written."""
    heads, p, groups, n = ssd_sizes(call)
    return ssd(heads, p, groups, n, bounds)


def ssd(heads: int, p: int, groups: int, n: int, bounds: Bounds) -> Cost:
    """Return the cost of a step: five operations an element of the state and token."""
    rows = bounds.n_tokens * F32_BYTES * (2 * heads * p + 2 * groups * n + heads)
    states = bounds.n_sequences * 2 * F32_BYTES * heads * p * n
    return Cost(5 * bounds.n_tokens * heads * p * n, rows + states)


def short_conv_cost(call: OpCall, bounds: Bounds) -> Cost:
    """Rows in and out, and each sequence's window read and written."""
    channels, width = call.output.width, call.integer("width")
    windows = bounds.n_sequences * 2 * F32_BYTES * (width - 1) * channels
    return costs.rows(bounds.n_tokens, channels, channels, 2 * width + 4) + Cost(0, windows)


def delta_rule_cost(call: OpCall, bounds: Bounds) -> Cost:
    """Rows in and out, and each sequence's state read and written."""
    n_key, n_value, d, e = _heads(call)
    return delta_rule(n_key, n_value, d, e, bounds, call.inputs[1].width)


def delta_rule(n_key: int, n_value: int, d: int, e: int, bounds: Bounds, gate_width: int) -> Cost:
    """Return the cost of a step: seven operations an element of the state and token."""
    rows = bounds.n_tokens * F32_BYTES * (2 * n_key * d + 2 * n_value * e + gate_width + n_value)
    states = bounds.n_sequences * 2 * F32_BYTES * n_value * d * e
    return Cost(7 * bounds.n_tokens * n_value * d * e, rows + states)


def state_layers_of(ops: Sequence[OpCall]) -> tuple[StateLayer, ...]:
    """Return what the ops keep of each sequence, a layer each.

    Raises:
        ShapeError: two ops of one kind are of one layer.
    """
    found: dict[int, dict[str, OpCall]] = {}
    for op in ops:
        kind = _KEEPS.get(op.op)
        if kind is not None:
            layer = found.setdefault(op.integer("layer"), {})
            if kind in layer:
                raise ShapeError(
                    f"ops.program: {op} is the second {op.op} of layer {op.integer('layer')}; one is needed"
                )
            layer[kind] = op
    layers = []
    for index, kept in sorted(found.items()):
        conv, rule = kept.get("window"), kept.get("matrices")
        channels, width = (conv.output.width, conv.integer("width")) if conv else (0, 1)
        heads, d, e = _state_of(rule) if rule else (0, 0, 0)
        layers.append(StateLayer(index, rule.op if rule else "short_conv", channels, width, heads, d, e))
    return tuple(layers)


def _state_of(rule: OpCall) -> tuple[int, int, int]:
    """Return how many matrices an op keeps of a sequence, their rows, and their columns."""
    if rule.op == "ssd":
        heads, p, _, n = ssd_sizes(rule)
        return heads, n, p
    return _heads(rule)[1:]


def _heads(call: OpCall) -> tuple[int, int, int, int]:
    return call.integer("key_heads"), call.integer("value_heads"), call.integer("key_dim"), call.integer("value_dim")
