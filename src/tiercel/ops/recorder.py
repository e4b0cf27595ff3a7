"""Writes a program while a model's forward runs once on symbolic values.

The recorder is passed to the forward; there is no current one. It resolves weights by canonical name, checks each op
against the vocabulary as it is recorded, and decides which activations a linear reads: int8 where the weight is
quantised and the compute dtype allows it, else float32. It knows no model.
"""

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypedDict, Unpack

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tiercel.base.errors import ModelFileError, ShapeError, UnsupportedModel
from tiercel.ops.activations import ACTIVATIONS
from tiercel.ops.dims import Dim
from tiercel.ops.program import Attr, Constant, KvLayer, OpCall, Program, Value, Weight
from tiercel.ops.routing import Routing
from tiercel.ops.vocabulary import VOCABULARY
from tiercel.ops.vocabulary_recurrent import state_layers_of
from tiercel.quant.formats import Format


class ComputeDtype(enum.StrEnum):
    """What activations are when they meet quantised weights: AUTO rounds them to int8, FLOAT32 never."""

    AUTO = "auto"
    FLOAT32 = "float32"


class LatentSizes(NamedTuple):
    """What a head of latent attention has: query columns without and with rotation, and value columns."""

    heads: int
    nope: int
    rope: int
    v_dim: int


class AttentionLimits(TypedDict, total=False):
    """What attention may have beside its sizes; each is off where it is left out.

    `window` W: a row sees the last W positions. `softcap` c: scores are c * tanh(score / c). `sinks`: a weight [H], a
    logit for each head that takes part in the softmax and gives no value. `sees_block`: every row of a sequence in the
    step sees what the last one does, the rows behind it too; a window counts from there.
    """

    window: int
    softcap: float
    sinks: str | None
    sees_block: bool


class LatentOptions(TypedDict, total=False):
    """What latent attention may have beside its sizes. `interleaved`, which it is if nothing is said: rotated pairs are
    neighbours, else halves. `sees_block`: as attention's.
    """

    interleaved: bool
    sees_block: bool


class ExpertNames(NamedTuple):
    """The tensors of a mixture's experts; each name has `{}` where the expert's number goes."""

    gate: str
    up: str
    down: str
    gate_bias: str | None = None
    up_bias: str | None = None
    down_bias: str | None = None


def activation_attrs(act: str, params: Sequence[float]) -> dict[str, Attr]:
    """Return an activation as attributes: its name, and each of its parameters by name.

    Raises:
        ShapeError: it has other parameters.
    """
    names = ACTIVATIONS.get(act, ())
    if len(params) != len(names):
        raise ShapeError(f"ops: got {len(params)} parameters of {act}; {', '.join(names) or 'none'} is needed")
    return {"act": act} | {name: float(value) for name, value in zip(names, params, strict=True)}


class Recorder:
    """Records one program. Owner: the function that records a model; it lives for one recording.

    `shapes` and `formats` describe the weights that may be named. Each method records the op of its name. With
    `keeps_hidden`, the program gives out what a draft head reads of each token; `taps` are layers whose rows a drafter
    reads.
    """

    def __init__(
        self,
        name: str,
        shapes: Mapping[str, tuple[int, ...]],
        formats: Mapping[str, Format],
        compute_dtype: ComputeDtype,
        *,
        keeps_hidden: bool = False,
        taps: Sequence[int] = (),
    ) -> None:
        self.keeps_hidden = keeps_hidden
        self._taps: dict[int, Value | None] = dict.fromkeys(taps)
        self._name = name
        self._shapes = shapes
        self._formats = formats
        self._compute_dtype = compute_dtype
        self._ops: list[OpCall] = []
        self._kv_layers: list[KvLayer] = []
        self._hidden: Value | None = None

    def embed(self, weight: str, *, scale: float = 1.0, skips_first: bool = False, masked: str | None = None) -> Value:
        """Look up the step's tokens in a weight [V, E]; with `skips_first`, the row at position 0 is zeros.

        `masked` names a weight [E] that stands for the row of token -1; it is scaled as rows are.
        """
        attrs: dict[str, Attr] = {"scale": float(scale)}
        attrs |= {"skips_first": 1} if skips_first else {}
        weights = {"w": self.weight(weight)} | ({} if masked is None else {"masked": self.weight(masked)})
        return self._record("embed", (), weights, attrs)

    def rms_norm(self, x: Value, weight: str, eps: float, *, heads: int = 1, plus_one: bool = False) -> Value:
        """Normalise each of `heads` equal parts of every row; with `plus_one`, multiply by 1 + weight."""
        w = replace(self.weight(weight), plus_one=plus_one)
        return self._record("rms_norm", (x,), {"w": w}, {"heads": heads, "eps": float(eps)})

    def linear(
        self, x: Value, weight: str, *, bias: str | None = None, rows: tuple[int, int, int] | None = None
    ) -> Value:
        """Multiply by the transpose of a weight [N, K], or of `rows` of it: (p, a, n) is of each p rows n from a on."""
        w = self.weight(weight)
        if rows is not None:
            w = _rows_of(w, rows)
        rounds = self._compute_dtype is ComputeDtype.AUTO and w.format.is_quantized
        weights = {"w": w} if bias is None else {"w": w, "bias": self.weight(bias)}
        return self._record("linear", (x,), weights, {"act": "q8" if rounds else "f32"})

    def rope_table(self, name: str, inv_freq: npt.NDArray[np.float32], *, magnitude: float = 1.0) -> Value:
        """Make the cosines and sines of the step's positions; `name` tells tables apart in the text."""
        constant = Constant(name, tuple(float(f) for f in inv_freq))
        return self._record("rope_table", (), {}, {"magnitude": float(magnitude)}, (constant,))

    def rope(self, x: Value, table: Value, *, heads: int) -> Value:
        """Rotate each head of every row."""
        return self._record("rope", (x, table), {}, {"heads": heads})

    def attention(
        self,
        q: Value,
        kv: tuple[Value, Value],
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        **limits: Unpack[AttentionLimits],
    ) -> Value:
        """Keep keys and values in the layer's store, then attend each query to its own sequence.

        q has all rows of the step, or those that need logits. `layer` may be any number that no other layer of the pool
        has: a drafter's follow the model's.
        """
        sinks = limits.get("sinks")
        window, softcap = limits.get("window", 0), limits.get("softcap", 0.0)
        attrs: dict[str, Attr] = {"layer": layer, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        attrs |= {"scale": float(scale), "window": window, "softcap": float(softcap)}
        attrs |= {"sees_block": 1} if limits.get("sees_block") else {}
        y = self._record("attention", (q, *kv), {} if sinks is None else {"sinks": self.weight(sinks)}, attrs)
        self._kv_layers.append(KvLayer(layer, kv_heads, head_dim, window))
        return y

    def keep_kv(self, k: Value, v: Value, *, layer: int, kv_heads: int, head_dim: int, window: int = 0) -> None:
        """Keep keys, normed and rotated already, and values in a layer's store, for another program to attend to.

        `window` is that attention's.
        """
        attrs: dict[str, Attr] = {"layer": layer, "kv_heads": kv_heads, "head_dim": head_dim}
        self._record("keep_kv", (k, v), {}, attrs)
        self._kv_layers.append(KvLayer(layer, kv_heads, head_dim, window))

    def block_conv(self, x: Value, base: str, delta: Value, *, taps: int, group: int, side: int = 0) -> Value:
        """Mix each row with those before it in its block: the sequence's rows in the step.

        Tap t of row i weighs row i - t by base[t] + delta[i, t], the latter one number for `group` columns. `base` is a
        weight [taps, C], or [S, taps, C] with `delta` [T, S * taps * C / group], of which `side` is used.
        """
        attrs: dict[str, Attr] = {"taps": taps, "group": group, "side": side}
        return self._record("block_conv", (x, delta), {"base": self.weight(base)}, attrs)

    def scale(self, x: Value, factor: float) -> Value:
        """Return factor * x."""
        return self._record("scale", (x,), {}, {"factor": float(factor)})

    def latent_attention(
        self,
        q: Value,
        latents: Value,
        *,
        layer: int,
        norm: str,
        weight: str,
        sizes: LatentSizes,
        eps: float,
        scale: float,
        table: Value | None = None,
        **options: Unpack[LatentOptions],
    ) -> Value:
        """Keep each token's latent row, normed by `norm` and rotated by `table`, then attend through `weight`.

        The last `sizes.rope` columns of each of q's heads are rotated alike. q has all rows, or those that need logits.
        """
        attrs: dict[str, Attr] = {"layer": layer, **sizes._asdict()}
        attrs |= {"eps": float(eps), "scale": float(scale), "interleaved": int(options.get("interleaved", True))}
        attrs |= {"sees_block": 1} if options.get("sees_block") else {}
        weights = {"norm": self.weight(norm), "w": self.weight(weight)}
        y = self._record("latent_attention", (q, latents) if table is None else (q, latents, table), weights, attrs)
        rank = weights["w"].shape[1]
        self._kv_layers.append(KvLayer(layer, 1, rank + sizes.rope, 0, rank))
        return y

    def keep_latents(
        self,
        latents: Value,
        *,
        layer: int,
        norm: str,
        rope: int,
        eps: float,
        table: Value | None = None,
        interleaved: bool = True,
    ) -> None:
        """Keep each token's latent row as `latent_attention` does, for another program to attend to.

        Its last `rope` columns are rotated by `table`; those before them are normed.
        """
        attrs: dict[str, Attr] = {"layer": layer, "rope": rope, "eps": float(eps), "interleaved": int(interleaved)}
        inputs = (latents,) if table is None else (latents, table)
        self._record("keep_latents", inputs, {"norm": self.weight(norm)}, attrs)
        self._kv_layers.append(KvLayer(layer, 1, latents.width, 0, latents.width - rope))

    def sigmoid_gate(self, x: Value, gate: Value) -> Value:
        """Return x * sigmoid(gate); a narrower gate serves equal parts of x."""
        return self._record("sigmoid_gate", (x, gate), {}, {})

    def gated(self, gate: Value, up: Value, act: str, params: Sequence[float] = ()) -> Value:
        """Return act(gate, up); `ops.activations` says what parameters an activation has."""
        return self._record("gated", (gate, up), {}, activation_attrs(act, params))

    def add(self, x: Value, y: Value) -> Value:
        """Return x + y."""
        return self._record("add", (x, y), {}, {})

    def select_rows(self, x: Value) -> Value:
        """Keep the rows that need logits."""
        return self._record("select_rows", (x,), {}, {})

    def softcap(self, x: Value, cap: float) -> Value:
        """Return cap * tanh(x / cap)."""
        return self._record("softcap", (x,), {}, {"cap": float(cap)})

    def router(self, logits: Value, routing: Routing, *, bias: str | None = None) -> Value:
        """Choose each row's experts; `bias` [X] is added to the scores for the choice only."""
        attrs: dict[str, Attr] = {
            name: float(value) if name == "scale" else int(value) if isinstance(value, bool) else value
            for name, value in msgspec.structs.asdict(routing).items()
            if name != "n_experts"
        }
        if logits.width != routing.n_experts:
            raise ShapeError(f"ops.router: got {logits.width} logits; {routing.n_experts} experts are needed")
        return self._record("router", (logits,), {} if bias is None else {"bias": self.weight(bias)}, attrs)

    def experts(
        self,
        x: Value,
        route: Value,
        names: ExpertNames,
        act: str,
        params: Sequence[float] = (),
        *,
        n_experts: int,
    ) -> Value:
        """Send each row through the experts of its route and add up what they return, by its weights.

        Which of an expert's products read int8 follows from the formats, as for `linear`.
        """
        found = {
            role: self.expert_weight(name, n_experts)
            for role, name in zip(names._fields, names, strict=True)
            if name is not None
        }
        rounds = {role: self._compute_dtype is ComputeDtype.AUTO and w.format.is_quantized for role, w in found.items()}
        if rounds["gate"] != rounds["up"]:
            # Both read one x: rounded for both or for none.
            raise UnsupportedModel(
                f"models: {found['gate']} and {found['up']} are read together; formats both quantised or both float are"
                " needed; choose another conversion of the model"
            )
        attrs = activation_attrs(act, params)
        attrs |= {"x": "q8" if rounds["gate"] else "f32", "hidden": "q8" if rounds["down"] else "f32"}
        return self._record("experts", (x, route), found, attrs)

    def expert_weight(self, name: str, n_experts: int) -> Weight:
        """Return the reference of one tensor an expert, whose number stands for `{}` in the name.

        Raises:
            ModelFileError: one is missing, or has another shape or format than the first.
        """
        first = self.weight(name.replace("{}", "0"))
        for e in range(1, n_experts):
            other = self.weight(name.replace("{}", str(e)))
            if (other.shape, other.format) != (first.shape, first.format):
                raise ModelFileError(
                    f"models: tensor {other} is unlike {first}; experts of one shape and format are needed; "
                    "choose another conversion of the model"
                )
        return replace(first, name=name, n_experts=n_experts)

    def short_conv(
        self, xs: Sequence[Value], weights: Sequence[str], *, layer: int, act: str, biases: Sequence[str] = ()
    ) -> Value:
        """Filter each channel of `xs`, side by side, over the sequence; the layer's state keeps the last inputs.

        `weights` and `biases` are one an input, or one for all of them.
        """
        named = {f"w{i}": self.weight(name) for i, name in enumerate(weights)}
        named |= {f"bias{i}": self.weight(name) for i, name in enumerate(biases)}
        return self._record(
            "short_conv", tuple(xs), named, {"layer": layer, "width": named["w0"].shape[-1], "act": act}
        )

    def delta_rule(
        self,
        qkv: Value,
        gate: Value,
        beta: Value,
        *,
        a_log: str,
        dt_bias: str,
        layer: int,
        key: tuple[int, int],
        value: tuple[int, int],
        lower_bound: float = 0.0,
        eps: float = 1e-6,
    ) -> Value:
        """Walk each sequence's tokens through the gated delta rule; a `lower_bound` below 0 is its other gate.

        `key` and `value` are a number of heads and a head's width.
        """
        attrs: dict[str, Attr] = {"layer": layer, "key_heads": key[0], "value_heads": value[0]}
        attrs |= {"key_dim": key[1], "value_dim": value[1], "lower_bound": float(lower_bound), "eps": float(eps)}
        weights = {"a_log": self.weight(a_log), "dt_bias": self.weight(dt_bias)}
        return self._record("delta_rule", (qkv, gate, beta), weights, attrs)

    def gated_norm(self, x: Value, z: Value, weight: str | None, *, heads: int, act: str, eps: float = 1.0) -> Value:
        """Return each head's norm times act(z); without a weight, x * act(z). z may be one column a head."""
        weights = {} if weight is None else {"w": self.weight(weight)}
        return self._record("gated_norm", (x, z), weights, {"heads": heads, "act": act, "eps": float(eps)})

    def ssd(
        self,
        xbc: Value,
        dt: Value,
        *,
        weights: tuple[str, str, str],
        layer: int,
        heads: tuple[int, int],
        groups: tuple[int, int],
        limits: tuple[float, float] = (0.0, float("inf")),
    ) -> Value:
        """Walk each sequence's tokens through Mamba2's recurrence.

        `weights` name a_log, dt_bias and d; `heads` are a number and a width, `groups` a number and the state's rows;
        steps are kept between `limits`.
        """
        attrs: dict[str, Attr] = {"layer": layer, "heads": heads[0], "head_dim": heads[1]}
        attrs |= {"groups": groups[0], "state_dim": groups[1], "dt_min": float(limits[0]), "dt_max": float(limits[1])}
        named = {role: self.weight(name) for role, name in zip(("a_log", "dt_bias", "d"), weights, strict=True)}
        return self._record("ssd", (xbc, dt), named, attrs)

    def gate_norm(self, x: Value, z: Value, weight: str, *, groups: int, eps: float) -> Value:
        """Return the norm of each of `groups` equal parts of x * silu(z)."""
        return self._record("gate_norm", (x, z), {"w": self.weight(weight)}, {"groups": groups, "eps": float(eps)})

    def embed_rows(self, weight: str, of: str, *, first: int = 0) -> Value:
        """Look up each token's "position" or "segment" in a weight [P, E], counted from row `first`."""
        return self._record("embed_rows", (), {"w": self.weight(weight)}, {"of": of, "first": first})

    def layer_norm(self, x: Value, weight: str, bias: str, eps: float) -> Value:
        """Normalise every row around its mean."""
        weights = {"w": self.weight(weight), "bias": self.weight(bias)}
        return self._record("layer_norm", (x,), weights, {"eps": float(eps)})

    def activate(self, x: Value, act: str) -> Value:
        """Return act(x)."""
        return self._record("activate", (x,), {}, {"act": act})

    def sequence_attention(
        self, q: Value, k: Value, v: Value, *, heads: int, kv_heads: int, head_dim: int, scale: float
    ) -> Value:
        """Attend each row to all rows of its own sequence in the step, later ones too."""
        attrs: dict[str, Attr] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "scale": float(scale)}
        return self._record("sequence_attention", (q, k, v), {}, attrs)

    def residual_mix(self, sources: Sequence[Value], norm: str, weight: str, eps: float) -> Value:
        """Return the sum of the sources, weighed by the softmax of what `weight` says of each one's norm."""
        weights = {"norm": self.weight(norm), "w": self.weight(weight)}
        return self._record("residual_mix", tuple(sources), weights, {"eps": float(eps)})

    def given(self, width: int) -> Value:
        """Take rows that each step brings along, one a token; a program may do so once."""
        return self._record("given", (), {}, {"width": width})

    def join(self, x: Value, z: Value) -> Value:
        """Put the rows of z behind those of x."""
        return self._record("join", (x, z), {}, {})

    def format_of(self, weight: str) -> Format:
        """Return the format that a weight has in the checkpoint."""
        return self.weight(weight).format

    def weight(self, name: str) -> Weight:
        """Return the reference of a weight.

        Raises:
            ModelFileError: the checkpoint has no such tensor.
        """
        if name not in self._shapes or name not in self._formats:
            raise ModelFileError(f"models: tensor {name} is missing from the checkpoint; {self._name} needs it")
        return Weight(name, self._shapes[name], self._formats[name])

    def keep_hidden(self, x: Value) -> Value:
        """Give rows of all tokens out beside the result, for a draft head; returns those of them that need logits."""
        if not self.keeps_hidden or self._hidden is not None:
            raise ShapeError(f"ops.program: {self._name}: rows are given out twice, or unasked; see keeps_hidden")
        self._hidden = x
        return self.select_rows(x)

    def tap(self, layer: int, x: Value) -> None:
        """Say what the rows after a layer are (-1: of the embeddings), for a drafter that reads them."""
        if layer in self._taps:
            self._taps[layer] = x

    def tapped(self) -> list[Value]:
        """Return the rows of each tap, in the order of `taps`."""
        found = [(layer, x) for layer, x in self._taps.items()]
        for layer, x in found:
            if x is None or x.rows is not Dim.TOKENS:
                raise ShapeError(f"ops.program: {self._name}: no rows of all tokens are said of layer {layer}")
        return [x for _, x in found if x is not None]

    def give_out(self, x: Value) -> None:
        """Give rows of all tokens out beside the result, in place of what `keep_hidden` said."""
        self._hidden = x

    @property
    def hidden(self) -> Value | None:
        """What is given out beside the result."""
        return self._hidden

    def finish(self, output: Value, *, is_pooling: bool = False) -> Program:
        """Return the program whose result is `output`: logits, or a pooling model's rows.

        Raises:
            ShapeError: the program breaks its own rules; see `Program.check`.
        """
        layers = tuple(sorted(self._kv_layers, key=lambda layer: layer.index))
        states = state_layers_of(self._ops)
        program = Program(self._name, tuple(self._ops), output, layers, states, is_pooling, self._hidden)
        program.check()
        return program

    def _record(
        self,
        op: str,
        inputs: tuple[Value, ...],
        weights: Mapping[str, Weight],
        attrs: Mapping[str, Attr],
        constants: tuple[Constant, ...] = (),
    ) -> Value:
        unplaced = Value(len(self._ops), Dim.TOKENS, 0)
        call = OpCall(op, inputs, unplaced, MappingProxyType(dict(weights)), constants, MappingProxyType(dict(attrs)))
        rows, width = VOCABULARY[op].infer(call)
        value = Value(len(self._ops), rows, width)
        self._ops.append(replace(call, output=value))
        return value


def _rows_of(w: Weight, rows: tuple[int, int, int]) -> Weight:
    period, start, n = rows
    if not (0 <= start < start + n <= period and w.shape[0] % period == 0):
        raise ModelFileError(
            f"models: tensor {w.name} has shape {list(w.shape)}; a multiple of {period} rows is needed, of which {n} "
            f"from {start} on are used"
        )
    return replace(w, shape=(w.shape[0] // period * n, *w.shape[1:]), rows=rows)
