"""Runs a program with the numpy definitions: the slow, plain executor that others are tested against.

It takes a program as recorded or as lowered. A lowered one runs in a real arena at its planned offsets, filled with NaN
before each step, so that a wrong lifetime shows in the result. Keys and values are kept as one array a sequence and
layer. It knows no pages, slots or sampling, and is not a `runner.interface.Runner`.

State: the keys and values of each sequence. Invariant (`check`): all layers of a sequence hold the same number of
tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tiercel.base.errors import ShapeError
from tiercel.ops import lowered as low
from tiercel.ops import reference as ref
from tiercel.ops import reference_draft as draft
from tiercel.ops import reference_encoder as ref_encoder
from tiercel.ops import reference_latent as latent
from tiercel.ops import reference_moe as moe
from tiercel.ops import reference_recurrent as rec
from tiercel.ops import reference_residual as residual
from tiercel.ops.dims import ACTIVATION_GROUP, Bounds, Dim
from tiercel.ops.lowered import Buffer, BufferKind, Lowered
from tiercel.ops.place import Placement, packed_row_bytes, place
from tiercel.ops.program import OpCall, Program, Value, Weight
from tiercel.ops.reference import Floats
from tiercel.ops.vocabulary_moe import params_of, routing_of


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence in a step; the last `n_logits` of them get logits (None: all).

    Tokens from position `n_first` on are of a pair's second text; None: there is one text. `given` are rows, one a
    token, for a program that takes some.
    """

    sequence: int
    token_ids: Sequence[int]
    n_logits: int | None = None
    n_first: int | None = None
    given: Floats | None = None


@dataclass(frozen=True, slots=True)
class _Rows:
    """One step's rows: sequence s has rows starts[s] .. starts[s + 1], the first at position first_positions[s].

    `of_logits` says the same of the rows that need logits, which are the last of each sequence; it is None in itself.
    """

    sequences: tuple[int, ...]
    starts: tuple[int, ...]
    first_positions: tuple[int, ...]
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    logits_rows: npt.NDArray[np.int64]
    of_logits: "_Rows | None" = None
    segments: npt.NDArray[np.int64] | None = None
    given: Floats | None = None

    def brought(self) -> Floats:
        if self.given is None or len(self.given) != len(self.token_ids):
            raise ShapeError(f"runner.reference: {len(self.token_ids)} tokens; as many given rows are needed")
        return self.given

    def of(self, dim: Dim) -> "_Rows":
        if dim is Dim.TOKENS:
            return self
        assert self.of_logits is not None
        return self.of_logits


@dataclass(slots=True)
class _Kept:
    """One sequence's keys and values, [tokens, K, D] a layer, and its recurrent state."""

    n_tokens: int = 0
    keys: dict[int, Floats] = field(default_factory=dict)
    values: dict[int, Floats] = field(default_factory=dict)
    windows: dict[int, Floats] = field(default_factory=dict)  # of convolutions, [W - 1, C]
    states: dict[int, Floats] = field(default_factory=dict)  # of delta rules, [H, D, E]

    def copied(self) -> "_Kept":
        """Return another of the same content; arrays are replaced by a step, never written to."""
        stores = (self.keys, self.values, self.windows, self.states)
        return _Kept(self.n_tokens, *(dict(store) for store in stores))


@dataclass(frozen=True, slots=True)
class _RuleSizes:
    """What a delta rule's recorded and its lowered form say alike."""

    layer: int
    key_heads: int
    value_heads: int
    key_dim: int
    lower_bound: float
    eps: float
    weights: tuple[Weight, Weight]

    @classmethod
    def of(cls, op: OpCall | low.DeltaRule | low.DeltaLayer) -> "_RuleSizes":
        if isinstance(op, low.DeltaRule | low.DeltaLayer):
            sizes = (op.layer, op.key_heads, op.value_heads, op.key_dim)
            return cls(*sizes, op.lower_bound, op.eps, (op.a_log, op.dt_bias))
        layer, key_heads, value_heads, key_dim = map(op.integer, ("layer", "key_heads", "value_heads", "key_dim"))
        named = (op.weights["a_log"], op.weights["dt_bias"])
        return cls(layer, key_heads, value_heads, key_dim, op.real("lower_bound"), op.real("eps"), named)


@dataclass(frozen=True, slots=True)
class _SsdSizes:
    """What a recurrence of Mamba2's recorded and its lowered form say alike."""

    layer: int
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    limits: tuple[float, float]
    weights: tuple[Weight, Weight, Weight]

    @classmethod
    def of(cls, op: OpCall | low.Ssd) -> "_SsdSizes":
        if isinstance(op, low.Ssd):
            sizes = (op.layer, op.heads, op.head_dim, op.groups, op.state_dim)
            return cls(*sizes, (op.dt_min, op.dt_max), (op.a_log, op.dt_bias, op.d))
        layer, heads, head_dim = map(op.integer, ("layer", "heads", "head_dim"))
        named = (op.weights["a_log"], op.weights["dt_bias"], op.weights["d"])
        limits = (op.real("dt_min"), op.real("dt_max"))
        return cls(layer, heads, head_dim, op.integer("groups"), op.integer("state_dim"), limits, named)


class ReferenceExecutor:
    """Runs steps of one program. Owner: a test, or whoever made it.

    `weights` gives each weight of the program as float32, dequantised, by canonical name. Keys and values
    are kept as a pool of `kv_dtype` gives them back; the native pool's own type is float16.
    """

    def __init__(
        self,
        program: Program | Lowered,
        weights: Mapping[str, Floats],
        *,
        max_tokens: int = 64,
        kv_dtype: str = "float32",
        reuse_buffers: bool = True,
    ) -> None:
        self._program = program
        self._weights = weights
        self._kv_dtype = kv_dtype
        self._sequences: dict[int, _Kept] = {}
        self._snapshots: dict[int, _Kept] = {}
        self._placement: Placement | None = None
        self.last_hidden: Floats | None = None  # of the last step, [T, E], if the program gives them out
        if isinstance(program, Lowered):
            self._placement = place(program, Bounds(max_tokens, max_tokens, max_tokens), reuse=reuse_buffers)
        for weight in program.weights():
            got = weights[weight.name].shape
            if (got if weight.rows is None else (_row_mask(weight.rows, got[0]).sum(), *got[1:])) != weight.shape:
                raise ShapeError(f"runner.reference: {weight.name} has shape {list(got)}; {weight} is needed")

    def step(self, chunks: Sequence[Chunk]) -> Floats:
        """Compute the chunks' tokens and return logits.

        Shapes:
            returns  [R, V]  float32: the rows asked for, chunk by chunk

        Raises:
            ShapeError: a sequence appears twice, asks for more logits than tokens, or a token is outside the
            vocabulary.
        """
        rows = self._rows(chunks)
        if isinstance(self._program, Lowered):
            assert self._placement is not None, "a lowered program is placed when the executor is made"
            y = _ArenaStep(self._program, self._placement, self, rows).run()
        else:
            y = self._run_recorded(self._program, rows)
        for i, sequence in enumerate(rows.sequences):
            self._sequences[sequence].n_tokens += rows.starts[i + 1] - rows.starts[i]
        self.check()
        return y

    def state_of(self, sequence: int, layer: int) -> Floats:
        """Return the state that a layer's delta rule keeps of a sequence, float32 [H, D, E]."""
        return self._sequences[sequence].states[layer]

    def adopt(self, sequence: int, source: "ReferenceExecutor", n_tokens: int) -> None:
        """Begin a sequence with what another program's executor kept of its first tokens, in the layers both have."""
        layers = [layer.index for layer in self._program.kv_layers]
        kept = source._sequences[sequence]
        stores = ({i: store[i][:n_tokens] for i in layers} for store in (kept.keys, kept.values))
        self._sequences[sequence] = _Kept(n_tokens, *stores)
        self.check()

    def release(self, sequence: int) -> None:
        """Forget a sequence's keys and values."""
        del self._sequences[sequence]

    def save_state(self, sequence: int, snapshot_idx: int) -> None:
        """Copy what a sequence left, keys and values too, to a place."""
        self._snapshots[snapshot_idx] = self._sequences[sequence].copied()

    def load_state(self, sequence: int, snapshot_idx: int) -> None:
        """Have a new sequence go on from where a saved one stood.

        Raises: ShapeError: nothing was saved in that place.
        """
        if snapshot_idx not in self._snapshots:
            raise ShapeError(f"runner.reference: nothing was saved in place {snapshot_idx}; save a state there first")
        self._sequences[sequence] = self._snapshots[snapshot_idx].copied()

    def check(self) -> None:
        """Check the module's invariant.

        Raises:
            ShapeError: it is broken.
        """
        n_layers = len(self._program.kv_layers)
        for sequence, kept in self._sequences.items():
            lengths = {len(a) for store in (kept.keys, kept.values) for a in store.values()}
            wanted = {kept.n_tokens} if n_layers else set()
            if kept.n_tokens and (lengths != wanted or len(kept.keys) != n_layers):
                raise ShapeError(
                    f"runner.reference: sequence {sequence} has {kept.n_tokens} tokens, layers have {lengths}"
                )

    def _rows(self, chunks: Sequence[Chunk]) -> _Rows:
        sequences = tuple(chunk.sequence for chunk in chunks)
        if len(set(sequences)) != len(sequences):
            raise ShapeError(
                f"runner.reference: a sequence appears twice in {list(sequences)}; one chunk each is needed"
            )
        starts, firsts = [0], []
        wanted_starts, wanted_firsts = [0], []
        positions: list[int] = []
        segments: list[int] = []
        wanted: list[int] = []
        for chunk in chunks:
            n = len(chunk.token_ids)
            n_logits = n if chunk.n_logits is None else chunk.n_logits
            if not 0 <= n_logits <= n:
                raise ShapeError(f"runner.reference: {n_logits} rows of logits asked for {n} tokens")
            first = self._sequences.setdefault(chunk.sequence, _Kept()).n_tokens
            firsts.append(first)
            positions += range(first, first + n)
            segments += [chunk.n_first is not None and p >= chunk.n_first for p in range(first, first + n)]
            wanted += range(starts[-1] + n - n_logits, starts[-1] + n)
            starts.append(starts[-1] + n)
            wanted_starts.append(len(wanted))
            wanted_firsts.append(first + n - n_logits)
        ids = [token for chunk in chunks for token in chunk.token_ids]
        token_ids, at, logits = (np.array(a, np.int64) for a in (ids, positions, wanted))
        of_logits = _Rows(
            sequences, tuple(wanted_starts), tuple(wanted_firsts), token_ids[logits], at[logits], np.arange(len(logits))
        )
        parts = [chunk.given for chunk in chunks if chunk.given is not None]
        brought = np.concatenate(parts) if parts else None
        of_segments = np.array(segments, np.int64)
        return _Rows(sequences, tuple(starts), tuple(firsts), token_ids, at, logits, of_logits, of_segments, brought)

    def weight(self, weight: Weight) -> Floats:
        """Return a weight's values as an op uses them."""
        stored = self._weights[weight.name]
        if weight.rows is not None:
            stored = stored[_row_mask(weight.rows, len(stored))]
        return np.asarray(stored + np.float32(1.0), np.float32) if weight.plus_one else stored

    def family(self, weight: Weight) -> Floats:
        """Return one tensor an expert, stacked."""
        return np.stack([self.weight(one) for one in weight.each()])

    def keep(self, layer: int, rows: _Rows, k: Floats, v: Floats) -> None:
        """Append a step's keys and values [T, K, D] to a layer's store."""
        k, v = ref.as_stored(k, v, self._kv_dtype)
        for i, sequence in enumerate(rows.sequences):
            kept = self._sequences[sequence]
            own = slice(rows.starts[i], rows.starts[i + 1])
            for store, new in ((kept.keys, k[own]), (kept.values, v[own])):
                store[layer] = np.concatenate([store[layer], new]) if layer in store else new.copy()

    def attend(
        self,
        layer: int,
        rows: _Rows,
        q: Floats,
        scale: float,
        window: int,
        softcap: float,
        sinks: Floats | None = None,
        *,
        sees_block: bool = False,
    ) -> Floats:
        """Attend each sequence's rows of q [T, H, D] to what the layer kept of it."""
        y = np.empty_like(q)
        for i, sequence in enumerate(rows.sequences):
            kept = self._sequences[sequence]
            own = slice(rows.starts[i], rows.starts[i + 1])
            keys, values = kept.keys[layer], kept.values[layer]
            start = rows.first_positions[i]
            y[own] = ref.attention(
                q[own],
                keys,
                values,
                start=start,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                sees_block=sees_block,
            )
        return y

    def convolve_blocks(self, rows: _Rows, x: Floats, base: Floats, delta: Floats, group: int, side: int) -> Floats:
        """Filter each sequence's rows of the step by one side of base [S, taps, C] and delta."""
        n = base.shape[1] * (x.shape[1] // group)
        y = np.empty_like(x)
        for a, b in pairwise(rows.starts):
            y[a:b] = draft.block_conv(x[a:b], base[side], delta[a:b, side * n : (side + 1) * n], group)
        return y

    def _keep_latents(self, op: OpCall, rows: _Rows, latents: Floats, table: Floats | None = None) -> None:
        norm, interleaved = self.weight(op.weights["norm"]), bool(op.integer("interleaved"))
        made = latent.latent_rows(latents, norm, op.real("eps"), table, interleaved=interleaved)[:, None]
        self.keep(op.integer("layer"), rows, made, made)

    def _latent_attention(self, op: OpCall, inputs: Sequence[Floats], rows: _Rows) -> Floats:
        """Keep the step's latent rows and attend as the definition says, with each head's keys and values made."""
        q, latents, *tables = inputs
        nope, layer, sees_block = op.integer("nope"), op.integer("layer"), "sees_block" in op.attrs
        interleaved, table = bool(op.integer("interleaved")), tables[0] if tables else None
        w = self.weight(op.weights["w"])
        self._keep_latents(op, rows, latents, table)
        q = _heads(q, op.integer("heads"))
        own_rows = rows.of(op.output.rows)
        if table is not None:
            at = rows.logits_rows if op.output.rows is Dim.ROWS else slice(None)
            q = q.copy()
            q[..., nope:] = latent.rotate_pairs(q[..., nope:], table[at], interleaved=interleaved)
        y = np.empty((len(q), op.output.width), np.float32)
        for i, sequence in enumerate(own_rows.sequences):
            own, kept = slice(own_rows.starts[i], own_rows.starts[i + 1]), self._sequences[sequence].keys[layer][:, 0]
            start, scale = own_rows.first_positions[i], op.real("scale")
            made = latent.latent_attention(q[own], kept, w, start=start, nope=nope, scale=scale, sees_block=sees_block)
            y[own] = made.reshape(-1, y.shape[1])
        return y

    def convolve(self, layer: int, rows: _Rows, x: Floats, w: Floats, bias: Floats | None, act: str) -> Floats:
        """Filter each sequence's rows of x [T, C] after those that the layer kept of it."""
        y = np.empty_like(x)
        for i, own, kept in self._sequences_of(rows):
            window = kept.windows.get(layer)
            if rows.first_positions[i] == 0 or window is None:
                window = np.zeros((w.shape[1] - 1, x.shape[1]), np.float32)
            y[own], kept.windows[layer] = rec.short_conv(x[own], w, bias, act, window)
        return y

    def recur(
        self, op: OpCall | low.DeltaRule | low.DeltaLayer, rows: _Rows, qkv: Floats, gate: Floats, beta: Floats
    ) -> Floats:
        """Walk each sequence's rows through a delta rule, from the state that the layer kept of it."""
        h = _RuleSizes.of(op)
        a_log, dt_bias = (np.asarray(self.weight(w)) for w in h.weights)
        q, k, v = np.split(qkv, [h.key_heads * h.key_dim, 2 * h.key_heads * h.key_dim], axis=1)
        q, k, v = _heads(q, h.key_heads), _heads(k, h.key_heads), _heads(v, h.value_heads)
        if gate.shape[1] != h.value_heads:
            gate, dt_bias = _heads(gate, h.value_heads), dt_bias.reshape(h.value_heads, h.key_dim)
        decay = rec.log_decay(gate, a_log.reshape(-1), dt_bias, h.lower_bound)
        y = np.empty_like(v)
        for i, own, kept in self._sequences_of(rows):
            state = kept.states.get(h.layer)
            if rows.first_positions[i] == 0 or state is None:
                state = np.zeros((h.value_heads, h.key_dim, v.shape[2]), np.float32)
            y[own], kept.states[h.layer] = rec.delta_rule(q[own], k[own], v[own], decay[own], beta[own], state, h.eps)
        return y.reshape(len(v), -1)

    def scan(self, op: OpCall | low.Ssd, rows: _Rows, xbc: Floats, dt: Floats) -> Floats:
        """Walk each sequence's rows through Mamba2's recurrence, from the state that the layer kept of it."""
        h = _SsdSizes.of(op)
        a_log, dt_bias, d = (np.asarray(self.weight(w)).reshape(-1) for w in h.weights)
        x, b, c = np.split(xbc, [h.heads * h.head_dim, h.heads * h.head_dim + h.groups * h.state_dim], axis=1)
        x, b, c = _heads(x, h.heads), _heads(b, h.groups), _heads(c, h.groups)
        steps = rec.ssd_steps(dt, dt_bias, *h.limits)
        y = np.empty_like(x)
        for i, own, kept in self._sequences_of(rows):
            state = kept.states.get(h.layer)
            if rows.first_positions[i] == 0 or state is None:
                state = np.zeros((h.heads, h.state_dim, h.head_dim), np.float32)
            y[own], kept.states[h.layer] = rec.ssd(x[own], b[own], c[own], steps[own], a_log, d, state)
        return y.reshape(len(x), -1)

    def _sequences_of(self, rows: _Rows) -> Iterator[tuple[int, slice, _Kept]]:
        for i, sequence in enumerate(rows.sequences):
            yield i, slice(rows.starts[i], rows.starts[i + 1]), self._sequences[sequence]

    def _run_recorded(self, program: Program, rows: _Rows) -> Floats:
        values: dict[Value, Floats] = {}
        for op in program.ops:
            values[op.output] = self._call(op, [values[v] for v in op.inputs], rows)
        self.last_hidden = None if program.hidden is None else values[program.hidden]
        return values[program.output]

    def _call(self, op: OpCall, inputs: Sequence[Floats], rows: _Rows) -> Floats:
        weights = {name: self.family(w) if w.n_experts else self.weight(w) for name, w in op.weights.items()}
        match op.op:
            case "embed":
                y = ref.embed(rows.token_ids, weights["w"], op.real("scale"), weights.get("masked"))
                return _skip_first(y, rows) if "skips_first" in op.attrs else y
            case "rope_table":
                inv_freq = np.array(op.constants[0].values, np.float32)
                return ref.rope_table(rows.positions, inv_freq, op.real("magnitude"))
            case "rms_norm":
                x = _heads(inputs[0], op.integer("heads"))
                return ref.rms_norm(x, weights["w"], op.real("eps")).reshape(inputs[0].shape)
            case "linear":
                product = ref.linear_q8 if op.word("act") == "q8" else ref.linear
                return product(inputs[0], weights["w"], weights.get("bias"))
            case "rope":
                return ref.rope(_heads(inputs[0], op.integer("heads")), inputs[1]).reshape(inputs[0].shape)
            case "attention":
                q, k, v = inputs
                layer, n_kv = op.integer("layer"), op.integer("kv_heads")
                self.keep(layer, rows, _heads(k, n_kv), _heads(v, n_kv))
                q = _heads(q, op.integer("heads"))
                limits = (op.real("scale"), op.integer("window"), op.real("softcap"))
                sees_block = "sees_block" in op.attrs
                y = self.attend(layer, rows.of(op.output.rows), q, *limits, weights.get("sinks"), sees_block=sees_block)
                return y.reshape(inputs[0].shape)
            case "gated":
                return ref.gated(np.concatenate(inputs, axis=-1), op.word("act"), params_of(op))
            case "add":
                return ref.add(inputs[0], inputs[1])
            case "select_rows":
                return ref.select_rows(inputs[0], rows.logits_rows)
            case "softcap":
                return ref.softcap(inputs[0], op.real("cap"))
            case "router":
                return moe.router(inputs[0], routing_of(op), weights.get("bias"))
            case "experts":
                all_experts = moe.Experts(**weights)
                act, params = op.word("act"), params_of(op)
                rounds = {f"rounds_{name}": op.word(name) == "q8" for name in ("x", "hidden")}
                return moe.experts(inputs[0], inputs[1], all_experts, act, params, **rounds)
            case "latent_attention":
                return self._latent_attention(op, inputs, rows)
            case "sigmoid_gate":
                return latent.sigmoid_gate(inputs[0], inputs[1])
            case "short_conv":
                width = op.integer("width")
                w = np.concatenate([v.reshape(-1, width) for name, v in weights.items() if name.startswith("w")])
                biases = [v for name, v in weights.items() if name.startswith("bias")]
                bias = np.concatenate(biases) if biases else None
                return self.convolve(op.integer("layer"), rows, np.concatenate(inputs, 1), w, bias, op.word("act"))
            case "delta_rule":
                return self.recur(op, rows, *inputs)
            case "gated_norm":
                x, z = (_heads(value, op.integer("heads")) for value in inputs)
                y = rec.gated_norm(x, z, weights.get("w"), op.real("eps"), op.word("act"))
                return y.reshape(inputs[0].shape)
            case "ssd":
                return self.scan(op, rows, *inputs)
            case "gate_norm":
                return rec.gate_norm(inputs[0], inputs[1], weights["w"], op.real("eps"), op.integer("groups"))
            case "embed_rows":
                return embed_rows(weights["w"], op.word("of"), op.integer("first"), rows)
            case "layer_norm":
                return ref_encoder.layer_norm(inputs[0], weights["w"], weights["bias"], op.real("eps"))
            case "activate":
                return ref_encoder.activate(inputs[0], op.word("act"))
            case "sequence_attention":
                q, k, v = inputs
                n_kv, n_heads = op.integer("kv_heads"), op.integer("heads")
                return attend_whole(
                    rows, _heads(q, n_heads), _heads(k, n_kv), _heads(v, n_kv), op.real("scale")
                ).reshape(q.shape)
            case "residual_mix":
                return residual.residual_mix(inputs, weights["norm"], weights["w"], op.real("eps"))
            case "given":
                return residual.given(rows.brought(), op.integer("width"))
            case "join":
                return residual.join(inputs[0], inputs[1])
            case "keep_kv":
                n_kv = op.integer("kv_heads")
                self.keep(op.integer("layer"), rows, _heads(inputs[0], n_kv), _heads(inputs[1], n_kv))
                return np.empty((len(inputs[0]), 0), np.float32)
            case "keep_latents":
                self._keep_latents(op, rows, *inputs)
                return np.empty((len(inputs[0]), 0), np.float32)
            case "block_conv":
                x, delta = inputs
                base = weights["base"].reshape(-1, op.integer("taps"), x.shape[1])
                return self.convolve_blocks(rows, x, base, delta, op.integer("group"), op.integer("side"))
            case "scale":
                return draft.scale(inputs[0], op.real("factor"))
        raise AssertionError(f"op {op.op} is in the vocabulary and not in the reference executor")


class _ArenaStep:
    """One step of a lowered program. Buffers are views into an arena that is NaN wherever nothing was written."""

    def __init__(self, program: Lowered, placement: Placement, store: ReferenceExecutor, rows: _Rows) -> None:
        self._program = program
        self._placement = placement
        self._store = store
        self._rows = rows
        self._bounds = Bounds(len(rows.token_ids), len(rows.sequences), len(rows.logits_rows))
        if self._bounds.n_tokens > placement.bounds.n_tokens:
            raise ShapeError(
                f"runner.reference: a step of {self._bounds.n_tokens} tokens; at most {placement.bounds.n_tokens} were "
                f"planned for; make the executor with a larger max_tokens"
            )
        self._arena = np.full(placement.arena_bytes // 4, np.nan, np.float32).view(np.uint8)

    def run(self) -> Floats:
        for op in self._program.ops:
            self._replay(op)
        if self._program.hidden is not None:
            self._store.last_hidden = self._floats(self._program.hidden).copy()
        return self._floats(self._program.output).copy()

    def _replay(self, op: low.NativeOp) -> None:
        store, rows = self._store, self._rows
        match op:
            case low.RopeTable():
                inv_freq = np.array(op.inv_freq.values, np.float32)
                self._write(op.y, ref.rope_table(rows.positions, inv_freq, op.magnitude))
            case low.Embed():
                masked = None if op.masked is None else store.weight(op.masked)
                y = ref.embed(rows.token_ids, store.weight(op.w), op.scale, masked)
                self._write(op.y, _skip_first(y, rows) if op.skips_first else y)
            case low.Norm():
                y = ref.rms_norm(self._floats(op.x), store.weight(op.w), op.eps)
                self._write(op.y, y if op.residual is None else ref.add(self._floats(op.residual), y))
            case low.Quantize():
                self._write(op.y, self._floats(op.x))
            case low.LinearGroup():
                self._linear_group(op)
            case low.RopeKv():
                self._rope_kv(op)
            case low.Attention():
                q = _heads(self._floats(op.q)[:, : op.n_heads * op.head_dim], op.n_heads)
                sinks = None if op.sinks is None else store.weight(op.sinks)
                limits = (op.scale, op.window, op.softcap, sinks)
                y = store.attend(op.layer, rows.of(op.y.rows), q, *limits, sees_block=op.sees_block)
                self._write(op.y, y[..., : op.value_dim].reshape(len(q), op.y.width))
            case low.Gated():
                self._write(op.y, ref.gated(self._floats(op.x), op.act, op.params))
            case low.SelectRows():
                self._write(op.y, ref.select_rows(self._floats(op.x)[:, : op.y.width], rows.logits_rows))
            case low.Softcap():
                self._write(op.x, ref.softcap(self._floats(op.x), op.cap))
            case low.Add():
                self._write(op.x, ref.add(self._floats(op.x), self._floats(op.y)))
            case low.EmbedRows():
                self._write(op.y, embed_rows(store.weight(op.w), op.of, op.first, rows))
            case low.LayerNorm():
                y = ref_encoder.layer_norm(self._floats(op.x), store.weight(op.w), store.weight(op.bias), op.eps)
                self._write(op.y, y)
            case low.Activate():
                self._write(op.x, ref_encoder.activate(self._floats(op.x), op.act))
            case low.SequenceAttention():
                qkv = self._floats(op.qkv)
                n_q, n_kv = op.n_heads * op.head_dim, op.n_kv_heads * op.head_dim
                q, k, v = qkv[:, :n_q], qkv[:, n_q : n_q + n_kv], qkv[:, n_q + n_kv :]
                heads = _heads(q, op.n_heads), _heads(k, op.n_kv_heads), _heads(v, op.n_kv_heads)
                self._write(op.y, attend_whole(rows, *heads, op.scale).reshape(len(qkv), n_q))
            case low.Router():
                bias = None if op.bias is None else store.weight(op.bias)
                self._write(op.y, moe.router(self._floats(op.x), op.routing, bias))
            case low.Experts():
                self._experts(op)
            case low.LatentKv():
                table = None if op.cos_sin is None else self._floats(op.cos_sin)
                norm = store.weight(op.norm)
                made = latent.latent_rows(self._floats(op.latents), norm, op.eps, table, interleaved=op.interleaved)
                store.keep(op.layer, rows, made[:, None], made[:, None])
                self._write(op.latents, made)
            case low.LatentQuery():
                self._latent_query(op)
            case low.LatentOut():
                _, w_value = latent.split_heads(store.weight(op.w), op.n_heads, op.nope)
                y = latent.head_linear(_heads(self._floats(op.x), op.n_heads), w_value.swapaxes(1, 2))
                self._write(op.y, y.reshape(len(y), op.y.width))
            case low.SigmoidGate():
                self._write(op.y, latent.sigmoid_gate(self._floats(op.x), self._floats(op.gate)))
            case low.ShortConv():
                x = self._floats(op.x)[:, op.x_col : op.x_col + op.y.width]
                w = np.concatenate([store.weight(w).reshape(-1, op.width) for w in op.w])
                bias = np.concatenate([store.weight(b) for b in op.bias]) if op.bias else None
                self._write(op.y, store.convolve(op.layer, rows, x, w, bias, op.act))
            case low.DeltaRule():
                gate = self._floats(op.gate)[:, op.gate_col : op.gate_col + op.dt_bias.n_weights]
                beta = self._floats(op.beta)[:, op.beta_col : op.beta_col + op.value_heads]
                self._write(op.y, store.recur(op, rows, self._floats(op.qkv), gate, beta))
            case low.DeltaLayer():
                self._delta_layer(op)
            case low.GatedNorm():
                z_width = op.heads if op.is_gate_per_head else op.y.width
                x, z = self._floats(op.x), self._floats(op.z)[:, op.z_col : op.z_col + z_width]
                scale = None if op.w is None else store.weight(op.w)
                y = rec.gated_norm(_heads(x, op.heads), _heads(z, op.heads), scale, op.eps, op.act)
                self._write(op.y, y.reshape(x.shape))
            case low.Ssd():
                dt = self._floats(op.dt)[:, op.dt_col : op.dt_col + op.heads]
                self._write(op.y, store.scan(op, rows, self._floats(op.xbc), dt))
            case low.GateNorm():
                z = self._floats(op.z)[:, op.z_col : op.z_col + op.y.width]
                self._write(op.y, rec.gate_norm(self._floats(op.x), z, store.weight(op.w), op.eps, op.groups))
            case low.ResidualMix():
                sources = [self._floats(source) for source in op.sources]
                y = residual.residual_mix(sources, store.weight(op.norm), store.weight(op.w), op.eps)
                self._write(op.y, y)
            case low.Given():
                self._write(op.y, residual.given(rows.brought(), op.y.width))
            case low.Join():
                self._write(op.y, residual.join(self._floats(op.x), self._floats(op.z)))
            case low.BlockConv() | low.Scale():
                self._draft_op(op)

    def _draft_op(self, op: low.BlockConv | low.Scale) -> None:
        x = self._floats(op.x)
        if isinstance(op, low.Scale):
            return self._write(op.x, draft.scale(x, op.factor))
        base = self._store.weight(op.base).reshape(-1, op.taps, op.x.width)
        delta = self._floats(op.delta)
        self._write(op.y, self._store.convolve_blocks(self._rows, x, base, delta, op.group, op.side))

    def _delta_layer(self, op: low.DeltaLayer) -> None:
        """As its three parts, one after the other."""
        store, rows = self._store, self._rows
        x = self._floats(op.x)[:, op.x_col : op.x_col + op.channels]
        w = np.concatenate([store.weight(w).reshape(-1, op.width) for w in op.w])
        bias = np.concatenate([store.weight(b) for b in op.bias]) if op.bias else None
        qkv = store.convolve(op.layer, rows, x, w, bias, op.act)
        gate = self._floats(op.gate)[:, op.gate_col : op.gate_col + op.dt_bias.n_weights]
        beta = self._floats(op.beta)[:, op.beta_col : op.beta_col + op.value_heads]
        made = _heads(store.recur(op, rows, qkv, gate, beta), op.value_heads)
        z_width = op.value_heads if op.is_gate_per_head else op.y.width
        z = _heads(self._floats(op.z)[:, op.z_col : op.z_col + z_width], op.value_heads)
        scale = None if op.norm is None else store.weight(op.norm)
        self._write(op.y, rec.gated_norm(made, z, scale, op.norm_eps, op.norm_act).reshape(len(made), -1))

    def _experts(self, op: low.Experts) -> None:
        families = (op.gate, op.up, op.down, op.gate_bias, op.up_bias, op.down_bias)
        weights = moe.Experts(*(None if w is None else self._store.family(w) for w in families))  # type: ignore[arg-type]
        x, route = self._floats(op.x), self._floats(op.route)
        self._write(op.y, moe.experts(x, route, weights, op.act, op.params, rounds_hidden=op.rounds_hidden))

    def _latent_query(self, op: low.LatentQuery) -> None:
        q = _heads(self._floats(op.q), op.n_heads)
        w_key, _ = latent.split_heads(self._store.weight(op.w), op.n_heads, op.nope)
        pe = q[..., op.nope :]
        if op.cos_sin is not None:
            at = self._rows.logits_rows if op.y.rows is Dim.ROWS else slice(None)
            pe = latent.rotate_pairs(pe, self._floats(op.cos_sin)[at], interleaved=op.interleaved)
        y = np.concatenate([latent.head_linear(q[..., : op.nope], w_key), pe], axis=-1)
        self._write(op.y, y.reshape(len(y), op.y.width))

    def _linear_group(self, op: low.LinearGroup) -> None:
        x = self._floats(op.x)
        y = self._floats(op.y)
        for part in op.parts:
            bias = None if part.bias is None else self._store.weight(part.bias)
            product = ref.linear(x, self._store.weight(part.w), bias)
            columns = slice(part.y_col, part.y_col + part.w.shape[0])
            if op.residual is not None:
                product = ref.add(self._floats(op.residual)[:, columns], product)
            y[:, columns] = product

    def _rope_kv(self, op: low.RopeKv) -> None:
        qkv = self._floats(op.qkv)
        q_width, kv_width = op.n_heads * op.head_dim, op.n_kv_heads * op.head_dim
        q = qkv[:, :q_width].reshape(len(qkv), op.n_heads, op.head_dim)
        k = _heads(qkv[:, q_width : q_width + kv_width], op.n_kv_heads)
        v = _heads(qkv[:, q_width + kv_width :], op.n_kv_heads)
        if op.q_norm is not None:
            q = ref.rms_norm(q, self._store.weight(op.q_norm), op.eps)
        if op.k_norm is not None:
            k = ref.rms_norm(k, self._store.weight(op.k_norm), op.eps)
        if op.cos_sin is not None:
            table = self._floats(op.cos_sin)
            q, k = ref.rope(q, table), ref.rope(k, table)
        self._store.keep(op.layer, self._rows, k, v)
        qkv[:, :q_width] = q.reshape(len(q), q_width)
        qkv[:, q_width:] = np.nan  # not defined after this op: see ops.lowered

    def _rows_of(self, buffer: Buffer) -> npt.NDArray[np.uint8]:
        at = self._placement.places[buffer.id]
        n = self._bounds.of(buffer.rows)
        return self._arena[at.offset_bytes : at.offset_bytes + n * at.stride_bytes].reshape(n, at.stride_bytes)

    def _floats(self, buffer: Buffer) -> Floats:
        """Return a view of an F32 buffer, or the values of a Q8 one."""
        stored = self._rows_of(buffer)
        if buffer.kind is BufferKind.F32:
            return stored.view(np.float32)
        n_groups = buffer.width // ACTIVATION_GROUP
        assert packed_row_bytes(buffer.width) == stored.shape[1], "the reference lays out its own Q8 rows"
        scales = stored[:, buffer.width : buffer.width + 4 * n_groups].copy().view(np.float32)
        return ref.dequantize_activations(stored[:, : buffer.width].view(np.int8), scales)

    def _write(self, buffer: Buffer, y: Floats) -> None:
        if buffer.kind is BufferKind.F32:
            self._floats(buffer)[:] = y
            return
        q, scales = ref.quantize_activations(y)
        stored = self._rows_of(buffer)
        stored[:, : buffer.width] = q.view(np.uint8)
        stored[:, buffer.width : buffer.width + 4 * scales.shape[1]] = np.ascontiguousarray(scales).view(np.uint8)


def embed_rows(w: Floats, of: str, first: int, rows: _Rows) -> Floats:
    """Return the row of w that each token's position, or segment, names."""
    ids = rows.positions if of == "position" else rows.segments
    assert ids is not None
    return ref.embed(ids + first, w)


def _skip_first(y: Floats, rows: _Rows) -> Floats:
    return np.where(rows.positions[:, None] == 0, np.float32(0.0), y)


def attend_whole(rows: _Rows, q: Floats, k: Floats, v: Floats, scale: float) -> Floats:
    """Attend each sequence's rows to all of its rows in the step."""
    y = np.empty_like(q)
    for start, end in zip(rows.starts, rows.starts[1:], strict=False):
        own = slice(start, end)
        y[own] = ref_encoder.sequence_attention(q[own], k[own], v[own], scale=scale)
    return y


def _heads(x: Floats, n: int) -> Floats:
    return x.reshape(len(x), n, x.shape[1] // n)


def _row_mask(rows: tuple[int, int, int], n: int) -> npt.NDArray[np.bool_]:
    period, start, count = rows
    at = np.arange(n) % period
    return (at >= start) & (at < start + count)
