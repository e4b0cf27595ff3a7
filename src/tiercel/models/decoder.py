"""The skeleton that the dense decoders share: sizes, weight names, and the parts of a layer, written in ops.

`llama`, `qwen` and `gemma3` read their configs into a `DecoderConfig` and say what differs. The plain layer is
x += o_proj(attention(norm(x))); x += down(act(gate h) * up h), h = norm(x).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from tiercel.base.errors import UnsupportedModel
from tiercel.models.fields import ConfigFields, Required
from tiercel.models.info import ModelInfo
from tiercel.models.model import Model, RecordOptions
from tiercel.models.rope import RopeParameters
from tiercel.ops.program import KvLayer, Value
from tiercel.ops.recorder import Recorder

_ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Every number and switch of a dense decoder that changes its arithmetic.

    `windows[i]` is layer i's sliding window in tokens, 0 for none. `ropes` are the model's rotations by name, and
    `layer_ropes[i]` names layer i's, None for a layer without positions. `n_mtp_modules` are the draft head's, if the
    checkpoint has one: layers past the last.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    act: str
    max_position: int
    is_tied: bool
    windows: tuple[int, ...]
    ropes: Mapping[str, RopeParameters]
    layer_ropes: tuple[str | None, ...]
    attention_scale: float
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_sinks: bool = False
    final_softcap: float = 0.0
    n_mtp_modules: int = 0

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self.windows)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that every decoder's config names alike."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_position: int


def read_sizes(
    fields: ConfigFields, *, default_head_dim: int | None = None, default_intermediate: object = Required
) -> Sizes:
    """Read the sizes, and refuse what no dense decoder here implements.

    Without `head_dim` in the config it is `default_head_dim`, or the hidden size over the heads; models without dense
    feed-forwards may do without `intermediate_size`.

    Raises:
        ModelFileError: a size is missing or they do not fit each other.
        UnsupportedModel: the weights are quantised in a way that is not implemented.
    """
    fields.raw("quantization_config")  # read where the tensors are, and refused there
    fields.only("is_encoder_decoder", False, why="only decoders are implemented")
    hidden, n_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    n_kv_heads = fields.size("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise fields.broken("num_key_value_heads", n_kv_heads, f"a divisor of num_attention_heads {n_heads}")
    if default_head_dim is None and not fields.has("head_dim") and hidden % n_heads:
        raise fields.broken("hidden_size", hidden, f"head_dim, or a multiple of num_attention_heads {n_heads},")
    return Sizes(
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size", default_intermediate),
        n_layers=read_n_layers(fields),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=fields.size("head_dim", default_head_dim or hidden // n_heads),
        max_position=fields.size("max_position_embeddings"),
    )


def read_n_layers(fields: ConfigFields) -> int:
    """Read the number of layers, bounded before anything of one entry a layer is made.

    Raises:
        ModelFileError: it is missing, no positive integer, or larger than any model's.
    """
    n_layers = fields.size("num_hidden_layers")
    if n_layers > _MAX_LAYERS:
        raise fields.broken("num_hidden_layers", n_layers, f"at most {_MAX_LAYERS} layers")
    return n_layers


def read_activation(fields: ConfigFields, name: str, default: str) -> str:
    """Read the name of the gated activation.

    Raises:
        UnsupportedModel: it is not implemented.
    """
    found = fields.raw(name)
    given = default if found is None else found
    if not isinstance(given, str) or given not in _ACTIVATIONS:
        raise fields.refused(name, given, f"the known activations are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[given]


def read_windows(fields: ConfigFields, n_layers: int, window: int | None, default: list[bool]) -> tuple[int, ...]:
    """Return each layer's window from `layer_types`, or from `default` (which layers slide) when the config has none.

    Raises:
        UnsupportedModel: a layer type is unknown.
        ModelFileError: a layer slides and there is no window.
    """
    types = fields.words("layer_types", n_layers)
    for kind in types or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.refused("layer_types", kind, "the known types are full_attention and sliding_attention")
    slides = [kind == "sliding_attention" for kind in types] if types is not None else default
    if any(slides) and window is None:
        raise fields.broken("sliding_window", None, "a window for the layers that slide")
    return tuple((window or 0) if slide else 0 for slide in slides)


class Decoder(Model):
    """A dense decoder. Subclasses read the config; some replace parts of the layer. `prefix` begins weights' names, but
    for the head's, which is `head_name`.
    """

    prefix: ClassVar[str] = "model"
    head_name: ClassVar[str] = "lm_head.weight"
    embed_name: ClassVar[str] = "embed_tokens"
    norm_name: ClassVar[str] = "norm"

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        c = self.config
        layers = tuple(KvLayer(i, c.n_kv_heads, c.head_dim, window) for i, window in enumerate(c.windows))
        n_parameters = sum(prod(shape) for shape in self.expected_weights().values())
        max_len = min((rope.max_len_tokens for rope in c.ropes.values()), default=c.max_position)
        return ModelInfo(c.architecture, c.vocab_size, c.hidden_size, max_len, n_parameters, layers)

    @property
    def n_tap_layers(self) -> int:
        """Layers of the residual stream."""
        return self.config.n_layers

    def ends(self) -> tuple[str, str]:
        """Return the names of the embedding and of the head, which may be one matrix."""
        embedding = f"{self.prefix}.{self.embed_name}.weight"
        return embedding, embedding if self.config.is_tied else self.head_name

    @property
    def rope_thetas(self) -> frozenset[float]:
        """The bases of its rotations."""
        return frozenset(self.config.ropes[name].theta for name in self.config.layer_ropes if name is not None)

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight that the forward pass reads, by canonical name."""
        c = self.config
        shapes: dict[str, tuple[int, ...]] = {f"{self.prefix}.{self.embed_name}.weight": (c.vocab_size, c.hidden_size)}
        for i in range(c.n_layers):
            shapes |= {f"{self.layer_prefix(i)}.{name}": shape for name, shape in self.weights_of_layer(i).items()}
        shapes[f"{self.prefix}.{self.norm_name}.weight"] = (c.hidden_size,)
        if not c.is_tied:
            shapes[self.head_name] = (c.vocab_size, c.hidden_size)
        return shapes

    def layer_prefix(self, i: int) -> str:
        """Return what begins the names of layer i's weights; layers past the last are a draft head's."""
        return f"{self.prefix}.layers.{i}"

    def weights_of_layer(self, i: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of layer i's weights, for models whose layers differ; names follow `model.layers.i.`."""
        del i
        return self.layer_weights()

    def layer_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one layer's weights; names follow `model.layers.i.`."""
        c = self.config
        q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        matrices = {
            "self_attn.q_proj": (q, c.hidden_size, c.has_qkv_bias),
            "self_attn.k_proj": (kv, c.hidden_size, c.has_qkv_bias),
            "self_attn.v_proj": (kv, c.hidden_size, c.has_qkv_bias),
            "self_attn.o_proj": (c.hidden_size, q, c.has_o_bias),
            "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.has_mlp_bias),
            "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.has_mlp_bias),
            "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.has_mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (c.hidden_size,),
            "post_attention_layernorm.weight": (c.hidden_size,),
        }
        for name, (n, k, has_bias) in matrices.items():
            shapes[f"{name}.weight"] = (n, k)
            if has_bias:
                shapes[f"{name}.bias"] = (n,)
        if c.has_qk_norm:
            shapes |= {"self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,)}
        if c.has_sinks:
            shapes["self_attn.sinks"] = (c.n_heads,)
        return shapes

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor may be left unread: rotary tables of old checkpoints, and a tied head's copy."""
        is_table = name.endswith(("rotary_emb.inv_freq", "rope_freqs.weight"))
        return is_table or (self.config.is_tied and name == self.head_name)

    def forward(self, rec: Recorder, options: RecordOptions) -> Value:
        """Write one step in ops and return its logits, or what `head` makes of the last hidden states."""
        c = self.config
        x = rec.embed(f"{self.prefix}.{self.embed_name}.weight", scale=self.embed_scale(rec))
        rec.tap(-1, x)
        tables = self.rope_tables(rec, options, [name for name in c.layer_ropes if name is not None])
        for i in range(c.n_layers):
            x = self.layer(rec, options, i, x, tables)
            rec.tap(i, x)
        x = self.norm(rec, options, x, f"{self.prefix}.{self.norm_name}.weight")
        return self.head(rec, rec.keep_hidden(x) if rec.keeps_hidden else x)

    def rope_tables(self, rec: Recorder, options: RecordOptions, names: Iterable[str]) -> dict[str, Value]:
        """Write the rotary tables of these names, each once."""
        tables: dict[str, Value] = {}
        for name in dict.fromkeys(names):
            table = self.config.ropes[name].table(options.max_len_tokens)
            tables[name] = rec.rope_table(name, table.inv_freq, magnitude=table.magnitude)
        return tables

    def head(self, rec: Recorder, x: Value) -> Value:
        """Write what follows the final norm."""
        c = self.config
        logits = rec.linear(x, f"{self.prefix}.{self.embed_name}.weight" if c.is_tied else self.head_name)
        return rec.softcap(logits, c.final_softcap) if c.final_softcap else logits

    def embed_scale(self, rec: Recorder) -> float:
        """Return what embeddings are multiplied with."""
        del rec
        return 1.0

    def layer(self, rec: Recorder, options: RecordOptions, i: int, x: Value, tables: Mapping[str, Value]) -> Value:
        """Write layer i and return the residual stream after it, of the rows that it passes on."""
        prefix = self.layer_prefix(i)
        kept = self.kept_rows(rec, i, x)
        h = self.norm(rec, options, x, f"{prefix}.input_layernorm.weight")
        x = rec.add(kept, self.attention(rec, options, i, h, tables))
        h = self.norm(rec, options, x, f"{prefix}.post_attention_layernorm.weight")
        return rec.add(x, self.mlp(rec, i, h))

    def kept_rows(self, rec: Recorder, i: int, x: Value) -> Value:
        """Return the rows of x that layer i passes on: all, but of the last layer only those that need logits.

        The other rows' keys and values are all that anybody reads of the last layer, if no draft head does.
        """
        return rec.select_rows(x) if i + 1 == self.config.n_layers and not rec.keeps_hidden else x

    def attention(self, rec: Recorder, options: RecordOptions, i: int, h: Value, tables: Mapping[str, Value]) -> Value:
        """Write layer i's attention over its normalised input, for the rows that the layer passes on."""
        c, prefix = self.config, f"{self.layer_prefix(i)}.self_attn"
        q, k, v = (
            rec.linear(h, f"{prefix}.{p}_proj.weight", bias=f"{prefix}.{p}_proj.bias" if c.has_qkv_bias else None)
            for p in ("q", "k", "v")
        )
        if c.has_qk_norm:
            q = self.norm(rec, options, q, f"{prefix}.q_norm.weight", heads=c.n_heads)
            k = self.norm(rec, options, k, f"{prefix}.k_norm.weight", heads=c.n_kv_heads)
        rope = c.layer_ropes[i]
        if rope is not None:
            q = rec.rope(q, tables[rope], heads=c.n_heads)
            k = rec.rope(k, tables[rope], heads=c.n_kv_heads)
        y = rec.attention(
            self.kept_rows(rec, i, q),
            (k, v),
            layer=i,
            heads=c.n_heads,
            kv_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            scale=c.attention_scale,
            window=c.windows[i],
            sinks=f"{prefix}.sinks" if c.has_sinks else None,
        )
        return rec.linear(y, f"{prefix}.o_proj.weight", bias=f"{prefix}.o_proj.bias" if c.has_o_bias else None)

    def mlp(self, rec: Recorder, i: int, h: Value) -> Value:
        """Write layer i's gated feed-forward over its normalised input."""
        c, prefix = self.config, f"{self.layer_prefix(i)}.mlp"

        def project(x: Value, name: str) -> Value:
            return rec.linear(x, f"{prefix}.{name}.weight", bias=f"{prefix}.{name}.bias" if c.has_mlp_bias else None)

        gate, up = project(h, "gate_proj"), project(h, "up_proj")
        return project(rec.gated(gate, up, c.act), "down_proj")

    def norm(self, rec: Recorder, options: RecordOptions, x: Value, weight: str, *, heads: int = 1) -> Value:
        """Write a norm by a weight; the model's kind says whether one is added to it."""
        plus_one = self.norms_add_one and not options.norm_weights_include_one
        return rec.rms_norm(x, weight, self.config.eps, heads=heads, plus_one=plus_one)


def default_scale(head_dim: int) -> float:
    """Return the usual factor of attention scores."""
    return float(np.float64(head_dim) ** -0.5)


def refuse_mixed(fields: ConfigFields, name: str, windows: tuple[int, ...]) -> None:
    """Refuse a mixture of sliding and full layers where the architecture has none.

    Raises:
        UnsupportedModel: the layers differ.
    """
    if len(set(windows)) > 1:
        raise fields.refused("layer_types", "a mixture", f"all layers of {name} have one attention")
    if not windows:
        raise UnsupportedModel(f"config: {name} has no layers")
