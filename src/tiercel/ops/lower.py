"""A recorded program as native ops, one by one: nothing is fused that the native ops do not force together.

What they force: q, k and v share one buffer, and their norms, rotation and storing are one op (`RopeKv`); a gate and
its up-projection share one buffer; rounding to int8 is its own op; a residual stream is added to in place. `ops.passes`
then makes it fast. A program that cannot be said this way is refused with the op at fault.
"""

import msgspec

from tiercel.base.errors import UnsupportedModel
from tiercel.ops import lowered as low
from tiercel.ops.lowered import Buffer, BufferKind, Lowered, NativeOp
from tiercel.ops.program import OpCall, Program, Value, Weight
from tiercel.ops.vocabulary_moe import params_of, routing_of


def lower(program: Program) -> Lowered:
    """Return the program as native ops over buffers.

    Raises:
        UnsupportedModel: an op has no native form where it stands; the message names it.
    """
    result = _Lowering(program).run()
    result.check()
    return result


class _Columns(msgspec.Struct, frozen=True):
    """Where a value lies: columns `col` .. of a buffer."""

    buffer: Buffer
    col: int


class _Head(msgspec.Struct, frozen=True):
    """How one of q, k, v is made: a linear, then perhaps a norm of each head, a rotation, a choice of rows (q only)."""

    source: Value
    norm: OpCall | None
    rope: OpCall | None
    select: OpCall | None


class _Lowering:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._made_by = {op.output: op for op in program.ops}
        self._last_use: dict[Value, int] = {}
        self._n_readers = {op.output: 0 for op in program.ops}
        for i, op in enumerate(program.ops):
            for value in dict.fromkeys(op.inputs):
                self._last_use[value] = i
                self._n_readers[value] += 1
        self._last_use[program.output] = len(program.ops)
        if program.hidden is not None:
            self._last_use[program.hidden] = len(program.ops)
        self._places: dict[Value, _Columns] = {}
        self._absorbed: set[Value] = set()
        self._heads: dict[Value, tuple[_Head, ...]] = {}  # of q, k, v, or of k, v
        self._n_buffers = 0
        self._out: list[NativeOp] = []

    def run(self) -> Lowered:
        for op in self._program.ops:
            if op.op in ("attention", "keep_kv"):
                self._join_heads(op)
            elif op.op in ("gated", "sequence_attention"):
                self._join([*op.inputs], op)
            elif op.op == "short_conv":
                self._join_recurrent(op)
        emit = {
            "embed": self._embed,
            "rms_norm": self._rms_norm,
            "linear": self._linear,
            "rope_table": self._rope_table,
            "attention": self._attention,
            "gated": self._gated,
            "add": self._add,
            "select_rows": self._select_rows,
            "softcap": self._softcap,
            "router": self._router,
            "experts": self._experts,
            "latent_attention": self._latent_attention,
            "sigmoid_gate": self._sigmoid_gate,
            "short_conv": self._short_conv,
            "delta_rule": self._delta_rule,
            "gated_norm": self._gated_norm,
            "embed_rows": self._embed_rows,
            "layer_norm": self._layer_norm,
            "activate": self._activate,
            "sequence_attention": self._sequence_attention,
            "residual_mix": self._residual_mix,
            "given": self._given,
            "join": self._join_rows,
            "ssd": self._ssd,
            "gate_norm": self._gate_norm,
            "keep_kv": self._keep_kv,
            "keep_latents": self._keep_latents,
            "block_conv": self._block_conv,
            "scale": self._scale,
        }
        for op in self._program.ops:
            if op.output in self._absorbed:
                continue
            if op.op not in emit:
                raise self._refuse(op, "it is no part of an attention")
            emit[op.op](op)
        output = self._whole(self._program.output, self._program.ops[-1])
        return Lowered(
            self._program.name,
            tuple(self._out),
            output,
            self._program.kv_layers,
            self._program.state_layers,
            self._program.is_pooling,
            None if self._program.hidden is None else self._whole(self._program.hidden, self._program.ops[-1]),
        )

    def _join_heads(self, op: OpCall) -> None:
        heads = tuple(self._head(value) for value in op.inputs)
        *_, k, v = heads
        q = heads[0]  # or k, where only keys and values are kept
        if v.norm or v.rope or (q.rope and q.rope.inputs[1]) != (k.rope and k.rope.inputs[1]):
            raise self._refuse(op, "q and k must share one rotation, and v have neither norm nor rotation")
        if q.norm and k.norm and q.norm.real("eps") != k.norm.real("eps"):
            raise self._refuse(op, "the norms of q and k must share one eps")
        self._join([head.source for head in heads], op)
        self._heads[op.output] = heads
        for call in (call for head in heads for call in (head.norm, head.rope, head.select) if call):
            if self._n_readers[call.output] != 1:
                raise self._refuse(call, "more than one op reads it")
            self._absorbed.add(call.output)

    def _join_recurrent(self, op: OpCall) -> None:
        """Join a convolution's inputs, and with them what else of the layer is a linear of the same input."""
        joined = list(op.inputs)
        if len(joined) == 1 and (self._made_by[joined[0]].op != "linear" or self._n_readers[joined[0]] != 1):
            return
        source = self._made_by[joined[0]].inputs[:1]
        for rule in self._program.ops:
            if rule.op in ("delta_rule", "ssd") and rule.inputs[0] == op.output:
                norms = [
                    norm
                    for norm in self._program.ops
                    if norm.op in ("gated_norm", "gate_norm") and norm.inputs[0] == rule.output
                ]
                for value in (*(norm.inputs[1] for norm in norms), *rule.inputs[1:]):
                    maker = self._made_by[value]
                    if maker.op == "linear" and maker.inputs == source and self._n_readers[value] == 1:
                        joined.append(value)
        self._join(joined, op)

    def _head(self, value: Value) -> _Head:
        norm, rope, select = None, None, None
        call = self._made_by[value]
        if call.op == "select_rows":
            select, call = call, self._only_maker(call)
        if call.op == "rope":
            rope, call = call, self._only_maker(call)
        if call.op == "rms_norm":
            norm, call = call, self._only_maker(call)
        return _Head(call.output, norm, rope, select)

    def _only_maker(self, call: OpCall) -> OpCall:
        return self._made_by[call.inputs[0]]

    def _join(self, values: list[Value], reader: OpCall) -> None:
        """Give values that one op reads neighbouring columns of one buffer."""
        if len(set(values)) < len(values) or any(self._made_by[v].op != "linear" for v in values):
            raise self._refuse(reader, "each of its operands must come from a linear of its own")
        if any(self._n_readers[v] != 1 for v in values):
            raise self._refuse(reader, "nothing else may read the linears that its operands come from")
        buffer = self._buffer(values[0], width=sum(value.width for value in values))
        col = 0
        for value in values:
            self._places[value] = _Columns(buffer, col)
            col += value.width

    def _buffer(self, like: Value, *, width: int | None = None, kind: BufferKind = BufferKind.F32) -> Buffer:
        buffer = Buffer(self._n_buffers, like.rows, like.width if width is None else width, kind)
        self._n_buffers += 1
        return buffer

    def _new(self, value: Value) -> Buffer:
        buffer = self._buffer(value)
        self._places[value] = _Columns(buffer, 0)
        return buffer

    def _whole(self, value: Value, reader: OpCall) -> Buffer:
        place = self._places[value]
        if place.buffer.width != value.width:
            raise self._refuse(reader, f"it reads {value}, which shares its buffer with others")
        return place.buffer

    def _dies_at(self, value: Value, op: OpCall) -> bool:
        last = self._last_use[value]
        return last < len(self._program.ops) and self._program.ops[last] is op

    def _embed(self, op: OpCall) -> None:
        skips_first = bool(op.attrs.get("skips_first", 0))
        masked = op.weights.get("masked")
        self._out.append(low.Embed(op.weights["w"], op.real("scale"), self._new(op.output), skips_first, masked))

    def _rope_table(self, op: OpCall) -> None:
        self._out.append(low.RopeTable(op.constants[0], op.real("magnitude"), self._new(op.output)))

    def _rms_norm(self, op: OpCall) -> None:
        if op.integer("heads") != 1:
            raise self._refuse(op, "a norm of heads is no part of an attention")
        x = self._whole(op.inputs[0], op)
        self._out.append(low.Norm(x, op.weights["w"], op.real("eps"), self._new(op.output)))

    def _linear(self, op: OpCall) -> None:
        x = self._rounded(op, rounds=op.word("act") == "q8")
        place = self._places.get(op.output) or _Columns(self._new(op.output), 0)
        part = low.LinearPart(op.weights["w"], op.weights.get("bias"), place.col)
        self._out.append(low.LinearGroup(x, (part,), place.buffer))

    def _attention(self, op: OpCall) -> None:
        q = self._heads[op.output][0]
        rows = qkv = self._rope_kv(op, op.integer("heads"))
        h, n_kv, d = op.integer("heads"), op.integer("kv_heads"), op.integer("head_dim")
        layer = op.integer("layer")
        if q.select:
            rows = self._buffer(op.output)
            self._out.append(low.SelectRows(qkv, rows))
        scale, window, softcap = op.real("scale"), op.integer("window"), op.real("softcap")
        sinks, sees_block = op.weights.get("sinks"), bool(op.attrs.get("sees_block", 0))
        y = self._new(op.output)
        self._out.append(low.Attention(rows, y, h, n_kv, d, scale, window, softcap, layer, sinks, 0, sees_block))

    def _rope_kv(self, op: OpCall, n_heads: int) -> Buffer:
        """Norm and rotate n_heads heads of queries, and the keys, and store these and the values."""
        *queries, k, _ = self._heads[op.output]
        q_norm, k_norm = queries[0].norm if queries else None, k.norm
        qkv = self._places[(queries or [k])[0].source].buffer
        norms = [norm for norm in (q_norm, k_norm) if norm]
        cos_sin = self._whole(k.rope.inputs[1], op) if k.rope else None
        eps = norms[0].real("eps") if norms else 0.0
        sizes = (n_heads, op.integer("kv_heads"), op.integer("head_dim"))
        self._out.append(low.RopeKv(qkv, *sizes, _weight(q_norm), _weight(k_norm), eps, cos_sin, op.integer("layer")))
        return qkv

    def _keep_kv(self, op: OpCall) -> None:
        self._rope_kv(op, 0)

    def _block_conv(self, op: OpCall) -> None:
        x, delta = (self._whole(value, op) for value in op.inputs)
        taps, group, side = op.integer("taps"), op.integer("group"), op.integer("side")
        self._out.append(low.BlockConv(x, delta, op.weights["base"], taps, group, side, self._new(op.output)))

    def _scale(self, op: OpCall) -> None:
        if not self._dies_at(op.inputs[0], op):
            raise self._refuse(op, "its operand must not be read again, to be scaled in place")
        x = self._whole(op.inputs[0], op)
        self._out.append(low.Scale(x, op.real("factor")))
        self._places[op.output] = _Columns(x, 0)

    def _gated(self, op: OpCall) -> None:
        gate = op.inputs[0]
        joined = self._places[gate].buffer
        self._out.append(low.Gated(joined, gate.width, op.word("act"), self._new(op.output), params_of(op)))

    def _add(self, op: OpCall) -> None:
        x, y = op.inputs
        # In place: onto the older of the two that nothing reads later, so that the residual stream keeps its buffer.
        target, other = (x, y) if x.id <= y.id else (y, x)
        if not self._dies_at(target, op):
            target, other = other, target
        if not self._dies_at(target, op) or target == other:
            raise self._refuse(op, "one of its operands must not be read again, to be added to in place")
        onto = self._whole(target, op)
        self._out.append(low.Add(onto, self._whole(other, op)))
        self._places[op.output] = _Columns(onto, 0)

    def _select_rows(self, op: OpCall) -> None:
        self._out.append(low.SelectRows(self._whole(op.inputs[0], op), self._new(op.output)))

    def _softcap(self, op: OpCall) -> None:
        if not self._dies_at(op.inputs[0], op):
            raise self._refuse(op, "its operand must not be read again, to be capped in place")
        x = self._whole(op.inputs[0], op)
        self._out.append(low.Softcap(x, op.real("cap")))
        self._places[op.output] = _Columns(x, 0)

    def _router(self, op: OpCall) -> None:
        x = self._whole(op.inputs[0], op)
        self._out.append(low.Router(x, routing_of(op), op.weights.get("bias"), self._new(op.output)))

    def _experts(self, op: OpCall) -> None:
        if self._made_by[op.inputs[1]].op != "router" or op.inputs[0].rows is not op.inputs[1].rows:
            raise self._refuse(op, "its second operand must be a router's result for the same rows")
        route, w = self._whole(op.inputs[1], op), op.weights
        x = self._rounded(op, rounds=op.word("x") == "q8")
        biases = (w.get(f"{name}_bias") for name in ("gate", "up", "down"))
        made = low.Experts(
            x,
            route,
            w["gate"],
            w["up"],
            w["down"],
            op.word("act"),
            self._new(op.output),
            op.word("hidden") == "q8",
            params_of(op),
            *biases,
        )
        self._out.append(made)

    def _rounded(self, op: OpCall, *, rounds: bool) -> Buffer:
        """Return where an op's first operand lies, rounded to int8 if it is to be."""
        x = self._whole(op.inputs[0], op)
        if not rounds:
            return x
        rounded = self._buffer(op.inputs[0], kind=BufferKind.Q8)
        self._out.append(low.Quantize(x, rounded))
        return rounded

    def _keep_latents(self, op: OpCall) -> None:
        self._latent_kv(op, *op.inputs)

    def _latent_kv(self, op: OpCall, value: Value, table: Value | None = None) -> Buffer:
        """Norm and rotate latent rows, and store them; returns where they lie."""
        latents, cos_sin = self._whole(value, op), None if table is None else self._whole(table, op)
        if not self._dies_at(value, op):
            raise self._refuse(op, "its latents must not be read again, to be normed in place")
        norm, eps, rope = op.weights["norm"], op.real("eps"), op.integer("rope")
        interleaved, layer = bool(op.integer("interleaved")), op.integer("layer")
        self._out.append(low.LatentKv(latents, norm, rope, eps, cos_sin, interleaved, layer))
        return latents

    def _latent_attention(self, op: OpCall) -> None:
        q = self._whole(op.inputs[0], op)
        cos_sin = self._whole(op.inputs[2], op) if len(op.inputs) > 2 else None
        if q == self._latent_kv(op, *op.inputs[1:]):
            raise self._refuse(op, "its latents must not be read again, to be normed in place")
        w, heads, nope, rope = op.weights["w"], op.integer("heads"), op.integer("nope"), op.integer("rope")
        rank, layer, interleaved = w.shape[1], op.integer("layer"), bool(op.integer("interleaved"))
        scale, sees_block = op.real("scale"), bool(op.attrs.get("sees_block", 0))
        absorbed = self._buffer(op.output, width=heads * (rank + rope))
        attended = self._buffer(op.output, width=heads * rank)
        self._out += [
            low.LatentQuery(q, w, heads, nope, rope, cos_sin, interleaved, absorbed),
            low.Attention(absorbed, attended, heads, 1, rank + rope, scale, 0, 0.0, layer, None, rank, sees_block),
            low.LatentOut(attended, w, heads, nope, self._new(op.output)),
        ]

    def _sigmoid_gate(self, op: OpCall) -> None:
        x, gate = (self._whole(value, op) for value in op.inputs)
        self._out.append(low.SigmoidGate(x, gate, self._new(op.output)))

    def _short_conv(self, op: OpCall) -> None:
        place = self._places[op.inputs[0]]
        w = tuple(weight for name, weight in op.weights.items() if name.startswith("w"))
        bias = tuple(weight for name, weight in op.weights.items() if name.startswith("bias"))
        width, layer = op.integer("width"), op.integer("layer")
        self._out.append(
            low.ShortConv(place.buffer, place.col, width, w, bias, op.word("act"), layer, self._new(op.output))
        )

    def _delta_rule(self, op: OpCall) -> None:
        qkv = self._whole(op.inputs[0], op)
        gate, beta = self._places[op.inputs[1]], self._places[op.inputs[2]]
        self._out.append(
            low.DeltaRule(
                qkv,
                gate.buffer,
                gate.col,
                beta.buffer,
                beta.col,
                op.integer("key_heads"),
                op.integer("value_heads"),
                op.integer("key_dim"),
                op.integer("value_dim"),
                op.real("lower_bound"),
                op.weights["a_log"],
                op.weights["dt_bias"],
                op.real("eps"),
                op.integer("layer"),
                self._new(op.output),
            )
        )

    def _gated_norm(self, op: OpCall) -> None:
        x, z = self._whole(op.inputs[0], op), self._places[op.inputs[1]]
        heads, w = op.integer("heads"), op.weights.get("w")
        is_per_head = op.inputs[1].width == heads
        eps, act = op.real("eps"), op.word("act")
        self._out.append(low.GatedNorm(x, z.buffer, z.col, is_per_head, heads, w, eps, act, self._new(op.output)))

    def _embed_rows(self, op: OpCall) -> None:
        self._out.append(low.EmbedRows(op.weights["w"], op.word("of"), op.integer("first"), self._new(op.output)))

    def _layer_norm(self, op: OpCall) -> None:
        x = self._whole(op.inputs[0], op)
        y = self._new(op.output)
        self._out.append(low.LayerNorm(x, op.weights["w"], op.weights["bias"], op.real("eps"), y))

    def _activate(self, op: OpCall) -> None:
        if not self._dies_at(op.inputs[0], op):
            raise self._refuse(op, "its operand must not be read again, to be changed in place")
        x = self._whole(op.inputs[0], op)
        self._out.append(low.Activate(x, op.word("act")))
        self._places[op.output] = _Columns(x, 0)

    def _sequence_attention(self, op: OpCall) -> None:
        qkv = self._places[op.inputs[0]].buffer
        h, n_kv, d = op.integer("heads"), op.integer("kv_heads"), op.integer("head_dim")
        self._out.append(low.SequenceAttention(qkv, h, n_kv, d, op.real("scale"), self._new(op.output)))

    def _residual_mix(self, op: OpCall) -> None:
        sources = tuple(self._whole(value, op) for value in op.inputs)
        norm, w, eps = op.weights["norm"], op.weights["w"], op.real("eps")
        self._out.append(low.ResidualMix(sources, norm, w, eps, self._new(op.output)))

    def _given(self, op: OpCall) -> None:
        self._out.append(low.Given(self._new(op.output)))

    def _join_rows(self, op: OpCall) -> None:
        x, z = (self._whole(value, op) for value in op.inputs)
        self._out.append(low.Join(x, z, self._new(op.output)))

    def _ssd(self, op: OpCall) -> None:
        dt = self._places[op.inputs[1]]
        made = low.Ssd(
            self._whole(op.inputs[0], op),
            dt.buffer,
            dt.col,
            op.integer("heads"),
            op.integer("head_dim"),
            op.integer("groups"),
            op.integer("state_dim"),
            op.real("dt_min"),
            op.real("dt_max"),
            op.weights["a_log"],
            op.weights["dt_bias"],
            op.weights["d"],
            op.integer("layer"),
            self._new(op.output),
        )
        self._out.append(made)

    def _gate_norm(self, op: OpCall) -> None:
        x, z = self._whole(op.inputs[0], op), self._places[op.inputs[1]]
        groups, w, eps = op.integer("groups"), op.weights["w"], op.real("eps")
        self._out.append(low.GateNorm(x, z.buffer, z.col, groups, w, eps, self._new(op.output)))

    def _refuse(self, op: OpCall, why: str) -> UnsupportedModel:
        return UnsupportedModel(f"ops.lower: {self._program.name}: {op} has no native form: {why}")


def _weight(call: OpCall | None) -> Weight | None:
    return call.weights["w"] if call else None
