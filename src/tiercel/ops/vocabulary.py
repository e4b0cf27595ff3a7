"""The ops a model may be written in: each one's contract, reference, tolerance and cost.

A spec's `infer` checks the operands of a call and gives the output's shape; it is the only place where an op's shape
rule stands. `reference` is the definition (`ops.reference`). Read next: `ops.recorder`, which applies specs.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tiercel.base.errors import ShapeError
from tiercel.ops import (
    costs,
    reference_draft,
    reference_encoder,
    reference_latent,
    reference_moe,
    reference_recurrent,
    reference_residual,
    vocabulary_draft,
    vocabulary_encoder,
    vocabulary_latent,
    vocabulary_moe,
    vocabulary_residual,
)
from tiercel.ops import reference as definitions
from tiercel.ops import vocabulary_recurrent as recurrent
from tiercel.ops.activations import broken_activation
from tiercel.ops.costs import Cost
from tiercel.ops.dims import ACTIVATION_GROUP, Bounds, Dim
from tiercel.ops.program import OpCall

Shape = tuple[Dim, int]


class OpSpec(msgspec.Struct, frozen=True):
    """One op of the vocabulary. `infer` reads a call whose output is not known yet, and raises ShapeError."""

    name: str
    contract: str
    infer: Callable[[OpCall], Shape]
    reference: Callable[..., Any]
    cost: Callable[[OpCall, Bounds], Cost]

    @property
    def tolerance(self) -> definitions.Tolerance:
        """How far an implementation may be from the reference."""
        return definitions.TOLERANCE[self.reference.__name__]


def _same(call: OpCall) -> Shape:
    return call.inputs[0].rows, call.inputs[0].width


def _embed(call: OpCall) -> Shape:
    w = call.weights["w"]
    _need(len(w.shape) == 2, call, f"w {list(w.shape)}", "[V, E]")
    masked = call.weights.get("masked")
    fits = masked is None or masked.shape == w.shape[1:]
    _need(fits, call, f"w {list(w.shape)}, masked {list(masked.shape) if masked else []}", "masked [E]")
    return Dim.TOKENS, w.shape[1]


def _rms_norm(call: OpCall) -> Shape:
    x, w, heads = call.inputs[0], call.weights["w"], call.integer("heads")
    fits = heads >= 1 and w.shape == (x.width // heads,) and x.width % heads == 0
    _need(fits, call, f"x width {x.width}, heads {heads}, w {list(w.shape)}", "w [width / heads]")
    _need(call.real("eps") > 0.0, call, f"eps {call.real('eps')}", "eps > 0")
    return _same(call)


def _linear(call: OpCall) -> Shape:
    x, w, bias = call.inputs[0], call.weights["w"], call.weights.get("bias")
    fits = len(w.shape) == 2 and w.shape[1] == x.width and (bias is None or bias.shape == w.shape[:1])
    shown = list(bias.shape) if bias else "none"
    _need(fits, call, f"x width {x.width}, w {list(w.shape)}, bias {shown}", "w [N, width of x], bias [N]")
    act = call.word("act")
    _need(act in ("f32", "q8"), call, f"act {act!r}", "f32 or q8")
    _need(act == "f32" or x.width % ACTIVATION_GROUP == 0, call, f"act q8 on width {x.width}", "groups of 32")
    return x.rows, w.shape[0]


def _rope_table(call: OpCall) -> Shape:
    return Dim.TOKENS, 2 * len(call.constants[0].values)


def _rope(call: OpCall) -> Shape:
    x, table, heads = call.inputs[0], call.inputs[1], call.integer("heads")
    fits = heads >= 1 and x.width % heads == 0 and table.width <= x.width // heads and table.width % 2 == 0
    _need(fits, call, f"x width {x.width}, heads {heads}, table width {table.width}", "table width <= x width / heads")
    _need(x.rows is table.rows is Dim.TOKENS, call, f"rows {x.rows} and {table.rows}", "rows T")
    return _same(call)


def _attention(call: OpCall) -> Shape:
    q, k, v = call.inputs
    heads, kv_heads, d = call.integer("heads"), call.integer("kv_heads"), call.integer("head_dim")
    fits = kv_heads >= 1 and heads % kv_heads == 0 and q.width == heads * d and k.width == v.width == kv_heads * d
    got = f"q, k, v widths {q.width}, {k.width}, {v.width}, heads {heads}, kv_heads {kv_heads}, head_dim {d}"
    _need(fits, call, got, "widths H*D, K*D, K*D with H a multiple of K")
    fits = k.rows is v.rows is Dim.TOKENS and q.rows in (Dim.TOKENS, Dim.ROWS)
    _need(fits, call, f"rows {q.rows}, {k.rows}, {v.rows}", "k and v of rows T, q of rows T or R")
    fits = call.integer("window") >= 0 and call.real("softcap") >= 0.0 and call.real("scale") > 0.0
    _need(fits, call, "a negative window or softcap, or scale <= 0", "window and softcap >= 0, scale > 0")
    sinks = call.weights.get("sinks")
    fits = sinks is None or sinks.shape == (heads,)
    _need(fits, call, f"sinks {list(sinks.shape) if sinks else []}, heads {heads}", "sinks [heads]")
    return _same(call)


def _gated(call: OpCall) -> Shape:
    gate, up = call.inputs
    _need(gate.width == up.width and gate.rows is up.rows, call, f"widths {gate.width}, {up.width}", "equal shapes")
    fault = broken_activation(call.word("act"), vocabulary_moe.params_of(call))
    _need(fault is None, call, f"{fault}", "a known activation")
    return _same(call)


def _add(call: OpCall) -> Shape:
    x, y = call.inputs
    _need(x.width == y.width and x.rows is y.rows, call, f"widths {x.width}, {y.width}", "equal shapes")
    return _same(call)


def _select_rows(call: OpCall) -> Shape:
    _need(call.inputs[0].rows is Dim.TOKENS, call, f"rows {call.inputs[0].rows}", "rows T")
    return Dim.ROWS, call.inputs[0].width


def _softcap(call: OpCall) -> Shape:
    _need(call.real("cap") > 0.0, call, f"cap {call.real('cap')}", "cap > 0")
    return _same(call)


def _latent_attention(call: OpCall) -> Shape:
    wrong, rows, width = vocabulary_latent.latent_attention_shape(call)
    _need(wrong is None, call, *(wrong or ("", "")))
    return rows, width


def _sigmoid_gate(call: OpCall) -> Shape:
    wrong, rows, width = vocabulary_latent.sigmoid_gate_shape(call)
    _need(wrong is None, call, *(wrong or ("", "")))
    return rows, width


def _linear_cost(call: OpCall, bounds: Bounds) -> Cost:
    w = call.weights["w"]
    return costs.linear(bounds.of(call.output.rows), w.shape[0], w.shape[1], w.nbytes)


def _row_cost(flops_per_column: int) -> Callable[[OpCall, Bounds], Cost]:
    def cost(call: OpCall, bounds: Bounds) -> Cost:
        width_in = sum(x.width for x in call.inputs)
        return costs.rows(bounds.of(call.output.rows), width_in, call.output.width, flops_per_column)

    return cost


def _attention_cost(call: OpCall, bounds: Bounds) -> Cost:
    heads, kv_heads, d = call.integer("heads"), call.integer("kv_heads"), call.integer("head_dim")
    return costs.attention(bounds.of(call.output.rows), bounds, heads, kv_heads, d, call.integer("window"))


def _table_cost(call: OpCall, bounds: Bounds) -> Cost:
    return costs.rows(bounds.n_tokens, 0, call.output.width, 0)


def _told(rule: Callable[[OpCall], tuple[Shape, str | None]]) -> Callable[[OpCall], Shape]:
    def infer(call: OpCall) -> Shape:
        shape, broken = rule(call)
        got, _, needed = (broken or "").partition("; ")
        _need(broken is None, call, got, needed)
        return shape

    return infer


def _sequence_attention_cost(call: OpCall, bounds: Bounds) -> Cost:
    heads, kv_heads, d = call.integer("heads"), call.integer("kv_heads"), call.integer("head_dim")
    return costs.attention(bounds.of(call.output.rows), bounds, heads, kv_heads, d, 0, "float32")


_SPECS = (
    OpSpec(
        "embed",
        "w [V,E], masked [E]? -> [T,E]: row token of w, or masked for token -1, times scale",
        _embed,
        definitions.embed,
        _table_cost,
    ),
    OpSpec(
        "rms_norm", "x [.,heads*n], w [n] -> like x: each head's norm", _rms_norm, definitions.rms_norm, _row_cost(4)
    ),
    OpSpec("linear", "x [.,K], w [N,K], bias [N] -> [.,N]", _linear, definitions.linear, _linear_cost),
    OpSpec("rope_table", "frequencies [d2] -> [T,2*d2]", _rope_table, definitions.rope_table, _table_cost),
    OpSpec("rope", "x [T,heads*D], table [T,2*d2] -> like x", _rope, definitions.rope, _row_cost(3)),
    OpSpec(
        "attention",
        "q [T or R,H*D], k, v [T,K*D] -> like q; keeps k and v, then attends causally to all that the layer kept, or "
        "with sees_block as the last of the sequence's rows does",
        _attention,
        definitions.attention,
        _attention_cost,
    ),
    OpSpec("gated", "gate, up [.,F] -> [.,F]: act(gate, up)", _gated, definitions.gated, _row_cost(5)),
    OpSpec("add", "x, y -> x + y", _add, definitions.add, _row_cost(1)),
    OpSpec(
        "select_rows",
        "x [T,E] -> [R,E]: the rows that need logits",
        _select_rows,
        definitions.select_rows,
        _row_cost(0),
    ),
    OpSpec("softcap", "x -> cap * tanh(x / cap)", _softcap, definitions.softcap, _row_cost(4)),
    OpSpec(
        "embed_rows",
        "w [P,E] -> [T,E]: row first + position of w, or first + segment",
        _told(vocabulary_encoder.embed_rows),
        definitions.embed,
        _table_cost,
    ),
    OpSpec(
        "layer_norm",
        "x [.,n], w, bias [n] -> like x",
        _told(vocabulary_encoder.layer_norm),
        reference_encoder.layer_norm,
        _row_cost(6),
    ),
    OpSpec("activate", "x -> act(x)", _told(vocabulary_encoder.activate), reference_encoder.activate, _row_cost(8)),
    OpSpec(
        "sequence_attention",
        "q [T,H*D], k, v [T,K*D] -> like q; attends both ways to all rows of the sequence in the step; keeps nothing",
        _told(vocabulary_encoder.sequence_attention),
        reference_encoder.sequence_attention,
        _sequence_attention_cost,
    ),
    OpSpec(
        "router",
        "logits [.,X], bias [X] -> [.,2*top_k]: chosen experts by number, then their weights",
        vocabulary_moe.router,
        reference_moe.router,
        vocabulary_moe.router_cost,
    ),
    OpSpec(
        "experts",
        "x [.,K], route [.,2*top_k], X of gate, up [F,K], down [N,F] -> [.,N]: the chosen experts' weighted sum",
        vocabulary_moe.experts,
        reference_moe.experts,
        vocabulary_moe.experts_cost,
    ),
    OpSpec(
        "latent_attention",
        "q [T or R,H*(nope+rope)], latents [T,rank+rope], table [T,rope]? -> [.,H*v]; keeps the normed, rotated "
        "latents, then attends to all that the layer kept, causally or with sees_block as attention does",
        _latent_attention,
        reference_latent.latent_attention,
        vocabulary_latent.latent_attention_cost,
    ),
    OpSpec(
        "sigmoid_gate",
        "x [.,N], gate [.,G] -> like x: x * sigmoid(gate), a gate's column for N / G columns",
        _sigmoid_gate,
        reference_latent.sigmoid_gate,
        _row_cost(5),
    ),
)
_RECURRENT_SPECS = (
    OpSpec(
        "short_conv",
        "x0, x1.. [T,C_i], w_i [C_i,W], bias_i [C_i] -> [T,sum C_i]: each channel's causal filter; keeps W - 1 inputs",
        lambda call: recurrent.short_conv_shape(call, _need),
        reference_recurrent.short_conv,
        recurrent.short_conv_cost,
    ),
    OpSpec(
        "delta_rule",
        "qkv [T,2*K*D+H*E], gate [T,H or H*D], beta [T,H], a_log, dt_bias -> [T,H*E]; keeps H states of D by E",
        lambda call: recurrent.delta_rule_shape(call, _need),
        reference_recurrent.delta_rule,
        recurrent.delta_rule_cost,
    ),
    OpSpec(
        "gated_norm",
        "x, z [.,heads*n], or z [.,heads], w [n] -> like x: each head's norm (with w) times act(z)",
        lambda call: recurrent.gated_norm_shape(call, _need),
        reference_recurrent.gated_norm,
        _row_cost(6),
    ),
    OpSpec(
        "ssd",
        "xbc [T,H*P+2*G*N], dt [T,H], a_log, dt_bias, d [H] -> [T,H*P]: Mamba2's recurrence; keeps H states of N by P",
        lambda call: recurrent.ssd_shape(call, _need),
        reference_recurrent.ssd,
        recurrent.ssd_cost,
    ),
    OpSpec(
        "gate_norm",
        "x, z [.,n], w [n] -> like x: the norm of each group of x * silu(z)",
        lambda call: recurrent.gate_norm_shape(call, _need),
        reference_recurrent.gate_norm,
        _row_cost(6),
    ),
)

_RESIDUAL_SPECS = (
    OpSpec(
        "residual_mix",
        "x0, x1.. [.,E], norm [E], w [E] -> [.,E]: their sum, weighed by the softmax of w . (each one's norm)",
        _told(vocabulary_residual.residual_mix),
        reference_residual.residual_mix,
        _row_cost(6),
    ),
    OpSpec(
        "given",
        "-> [T,width]: the rows that the step brings along",
        _told(vocabulary_residual.given),
        reference_residual.given,
        _table_cost,
    ),
    OpSpec(
        "join",
        "x [.,A], z [.,B] -> [.,A+B]: side by side",
        _told(vocabulary_residual.join),
        reference_residual.join,
        _row_cost(0),
    ),
)

_DRAFT_SPECS = (
    OpSpec(
        "keep_kv",
        "k, v [T,K*D] -> [T,0]: keeps k and v in the layer's store",
        _told(vocabulary_draft.keep_kv),
        reference_draft.keep_kv,
        vocabulary_draft.keep_kv_cost,
    ),
    OpSpec(
        "keep_latents",
        "latents [T,rank+rope], table [T,rope]? -> [T,0]: keeps the normed, rotated latents in the layer's store",
        _told(vocabulary_draft.keep_latents),
        reference_latent.latent_rows,
        vocabulary_draft.keep_kv_cost,
    ),
    OpSpec(
        "block_conv",
        "x [T,C], delta [T,S*taps*C/group], base [S,taps,C] -> like x: each row with those before it in its block, a "
        "sequence's rows of the step, weighed by base + delta of one side",
        _told(vocabulary_draft.block_conv),
        reference_draft.block_conv,
        vocabulary_draft.block_conv_cost,
    ),
    OpSpec("scale", "x -> factor * x", _told(vocabulary_draft.scale), reference_draft.scale, _row_cost(1)),
)

VOCABULARY: Mapping[str, OpSpec] = MappingProxyType(
    {spec.name: spec for spec in (*_SPECS, *_RECURRENT_SPECS, *_RESIDUAL_SPECS, *_DRAFT_SPECS)}
)
"""Op name -> its spec."""


def cost(call: OpCall, bounds: Bounds) -> Cost:
    """Return the operations and bytes of a call in a step of the given size."""
    return VOCABULARY[call.op].cost(call, bounds)


def _need(holds: bool, call: OpCall, got: str, needed: str) -> None:
    if not holds:
        names = ", ".join(w.name for w in call.weights.values())
        where = f"ops.{call.op}({names})" if names else f"ops.{call.op}"
        raise ShapeError(f"{where}: got {got}; {needed} is needed")
