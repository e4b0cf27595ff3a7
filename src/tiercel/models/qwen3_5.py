"""Qwen3.5, dense: three layers of gated delta nets for each layer of gated attention. Text only.

A full layer's `q_proj` holds, head by head, a query and a gate: y = o_proj(attention * sigmoid(gate)); only the first
part of a head is rotated. A linear layer's state replaces keys and values: conv, delta rule, gated norm. Norms multiply
by 1 + weight, but for the norm of the delta rule's outputs. Source: Qwen3.5's configs and transformers' classes; the
delta rule, Yang et al. 2024 (arXiv:2412.06464).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tiercel.models.decoder import Decoder, DecoderConfig, default_scale, read_activation, read_sizes
from tiercel.models.fields import ConfigFields, Required
from tiercel.models.info import ModelInfo
from tiercel.models.model import RecordOptions
from tiercel.models.mtp import DraftNames, draft_weights, read_n_modules, record_draft
from tiercel.models.rope import RopeParameters, parse_rope
from tiercel.ops.program import StateLayer, Value
from tiercel.ops.recorder import Recorder

_GATES: Mapping[str, str] = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
_KINDS = ("full_attention", "linear_attention")
_DRAFT_NAMES = DraftNames(  # of all modules
    *(f"mtp.{name}.weight" for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"))
)


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Sizes of a linear layer. `gate` is the output gate's activation."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    gate: str

    @property
    def value_width(self) -> int:
        """Columns of all heads' values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Columns of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    def state(self, index: int) -> StateLayer:
        """Return what layer `index` keeps of a sequence."""
        sizes = (self.value_heads, self.key_dim, self.value_dim)
        return StateLayer(index, "delta_rule", self.channels, self.conv_width, *sizes)


class Qwen3_5(Decoder):
    """Qwen3.5, 3.6 and 3.8 dense, as text checkpoints have them."""

    norms_add_one: ClassVar[bool] = True

    def __init__(self, config: DecoderConfig, linear: GatedDeltaNet, layer_types: tuple[str, ...]) -> None:
        super().__init__(config)
        self.linear = linear
        self.layer_types = layer_types

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a text config; see `Model.from_config`."""
        return cls._read(config, "Qwen3_5ForCausalLM", is_tied=None)

    @classmethod
    def _read(cls, config: Mapping[str, Any], architecture: str, *, is_tied: bool | None) -> Self:
        fields = ConfigFields(config)
        found = cls(*read_qwen3_5(fields, architecture, is_tied=is_tied))
        fields.finish()
        return found

    @property
    def info(self) -> ModelInfo:
        """Facts about the model: keys and values of the full layers, states of the others."""
        from msgspec.structs import replace

        info = super().info
        kinds = self.layer_types
        kv = tuple(layer for layer in info.kv_layers if kinds[layer.index] == "full_attention")
        states = tuple(self.linear.state(i) for i, kind in enumerate(kinds) if kind == "linear_attention")
        return replace(info, kv_layers=kv, state_layers=states)

    def weights_of_layer(self, i: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of layer i's weights."""
        c, shapes = self.config, self.layer_weights()
        if not self._is_linear(i):
            return shapes | {"self_attn.q_proj.weight": (2 * c.n_heads * c.head_dim, c.hidden_size)}
        others = {name: shape for name, shape in shapes.items() if not name.startswith("self_attn.")}
        return others | {f"linear_attn.{part}": shape for part, shape in self.linear_weights().items()}

    def linear_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a linear layer's mixer."""
        n, hidden = self.linear, self.config.hidden_size
        return {
            "in_proj_qkv.weight": (n.channels, hidden),
            "in_proj_z.weight": (n.value_width, hidden),
            "in_proj_a.weight": (n.value_heads, hidden),
            "in_proj_b.weight": (n.value_heads, hidden),
            "conv1d.weight": (n.channels, 1, n.conv_width),
            "A_log": (n.value_heads,),
            "dt_bias": (n.value_heads,),
            "norm.weight": (n.value_dim,),
            "out_proj.weight": (hidden, n.value_width),
        }

    def _is_linear(self, i: int) -> bool:
        """Tell what layer i is; those past the last, which draft, are full."""
        return i < len(self.layer_types) and self.layer_types[i] == "linear_attention"

    def layer_prefix(self, i: int) -> str:
        """Return what begins the names of layer i's weights; layers past the last are the draft head's."""
        n = self.config.n_layers
        return super().layer_prefix(i) if i < n else f"mtp.layers.{i - n}"

    @property
    def n_mtp_modules(self) -> int:
        """Layers of the draft head."""
        return self.config.n_mtp_modules

    def mtp_module_weights(self, module: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a module's weights: a layer of its own; the join and the norms are all modules'."""
        return draft_weights(self, _DRAFT_NAMES, module)

    def forward_mtp(self, rec: Recorder, options: RecordOptions, module: int) -> Value:
        """Write the draft head's module."""
        return record_draft(self, rec, options, _DRAFT_NAMES, module, skips_first=False)

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor may be left unread: the draft head's, which is a program of its own."""
        return super().may_ignore(name) or name.startswith("mtp.")

    def attention(self, rec: Recorder, options: RecordOptions, i: int, h: Value, tables: Mapping[str, Value]) -> Value:
        """Write layer i's mixer: gated attention, or a gated delta net."""
        if self._is_linear(i):
            return self._delta_net(rec, i, h)
        c, prefix = self.config, f"{self.layer_prefix(i)}.self_attn"
        q = rec.linear(h, f"{prefix}.q_proj.weight", rows=(2 * c.head_dim, 0, c.head_dim))
        k = rec.linear(h, f"{prefix}.k_proj.weight")
        v = rec.linear(h, f"{prefix}.v_proj.weight")
        kept = self.kept_rows(rec, i, h)
        gate = rec.linear(kept, f"{prefix}.q_proj.weight", rows=(2 * c.head_dim, c.head_dim, c.head_dim))
        q = rec.rope(
            self.norm(rec, options, q, f"{prefix}.q_norm.weight", heads=c.n_heads), tables["rope"], heads=c.n_heads
        )
        k = self.norm(rec, options, k, f"{prefix}.k_norm.weight", heads=c.n_kv_heads)
        k = rec.rope(k, tables["rope"], heads=c.n_kv_heads)
        y = rec.attention(
            self.kept_rows(rec, i, q),
            (k, v),
            layer=i,
            heads=c.n_heads,
            kv_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            scale=c.attention_scale,
        )
        y = rec.gated_norm(y, gate, None, heads=1, act="sigmoid")
        return rec.linear(y, f"{prefix}.o_proj.weight")

    def projections(self, rec: Recorder, prefix: str, h: Value) -> tuple[list[Value], Value, Value, Value]:
        """Write a linear layer's projections: queries, keys and values side by side; output gates; decays; betas."""
        qkv, z, a, b = (rec.linear(h, f"{prefix}.in_proj_{part}.weight") for part in ("qkv", "z", "a", "b"))
        return [qkv], z, a, b

    def _delta_net(self, rec: Recorder, i: int, h: Value) -> Value:
        n, prefix = self.linear, f"{self.layer_prefix(i)}.linear_attn"
        parts, z, a, b = self.projections(rec, prefix, h)
        mixed = rec.short_conv(parts, [f"{prefix}.conv1d.weight"], layer=i, act="silu")
        y = rec.delta_rule(
            mixed,
            a,
            b,
            a_log=f"{prefix}.A_log",
            dt_bias=f"{prefix}.dt_bias",
            layer=i,
            key=(n.key_heads, n.key_dim),
            value=(n.value_heads, n.value_dim),
        )
        y = rec.gated_norm(y, z, f"{prefix}.norm.weight", heads=n.value_heads, act=n.gate, eps=self.config.eps)
        return rec.linear(self.kept_rows(rec, i, y), f"{prefix}.out_proj.weight")


class Qwen3_5Multimodal(Qwen3_5):
    """The text part of a checkpoint that sees: its vision weights are left unread."""

    prefix: ClassVar[str] = "model.language_model"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the config's text part; see `Model.from_config`."""
        text, tied = read_text_config(config)
        return cls._read(text, "Qwen3_5ForConditionalGeneration", is_tied=tied)

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor may be left unread: what only images need, too."""
        return super().may_ignore(name) or name.startswith("model.visual.")


def read_text_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool | None]:
    """Return the text part of a config that sees, and whether its head is tied, if it says so.

    Raises:
        UnsupportedModel: a field of the outer config is unknown.
        ModelFileError: there is no text part.
    """
    outer = ConfigFields(config)
    text = outer.raw("text_config")
    if not isinstance(text, Mapping):
        raise outer.broken("text_config", text, "an object")
    outer.raw("quantization_config")  # read where the tensors are, and refused there
    for name in ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        outer.raw(name)
    is_said = outer.has("tie_word_embeddings")
    tied = outer.flag("tie_word_embeddings", default=False)
    outer.finish()
    return text, tied if is_said else None


def read_qwen3_5(
    fields: ConfigFields,
    architecture: str,
    *,
    is_tied: bool | None = None,
    default_intermediate: object = Required,
) -> tuple[DecoderConfig, GatedDeltaNet, tuple[str, ...]]:
    """Read what the dense models and the mixtures share; `is_tied` overrules the text config's field.

    Raises:
        UnsupportedModel: a field asks for arithmetic that is not implemented.
        ModelFileError: a field is missing or makes no sense.
    """
    fields.only("attn_output_gate", True, why="attention's outputs are always gated")
    fields.only("attention_bias", False, why="Qwen3.5 has no biases in its attention")
    fields.only("mlp_bias", False, why="Qwen3.5 has no biases in its feed-forward")
    fields.only("mamba_ssm_dtype", "float32", why="the recurrent state is float32")
    fields.only("hidden_act", "silu", "swish", why="the convolution and the feed-forward are made for it")
    fields.raw("max_window_layers")
    fields.only("mtp_use_dedicated_embeddings", False, why="the draft head shares the model's embedding")
    sizes = read_sizes(fields, default_head_dim=256, default_intermediate=default_intermediate)
    rope = _read_rope(fields, head_dim=sizes.head_dim, max_position=sizes.max_position)
    kinds = _read_layer_types(fields, sizes.n_layers)
    linear = _read_linear(fields)
    tied = fields.flag("tie_word_embeddings", default=False)
    result = DecoderConfig(
        architecture=architecture,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        n_heads=sizes.n_heads,
        n_kv_heads=sizes.n_kv_heads,
        head_dim=sizes.head_dim,
        eps=fields.float32("rms_norm_eps", 1e-6),
        act=read_activation(fields, "hidden_act", "silu"),
        max_position=sizes.max_position,
        is_tied=tied if is_tied is None else is_tied,
        windows=(0,) * sizes.n_layers,
        ropes={"rope": rope},
        layer_ropes=tuple("rope" if kind == "full_attention" else None for kind in kinds),
        attention_scale=default_scale(sizes.head_dim),
        has_qk_norm=True,
        # A head may be there though the field says none.
        n_mtp_modules=max(read_n_modules(fields, "mtp_num_hidden_layers", 1), 1),
    )
    return result, linear, kinds


def _read_rope(fields: ConfigFields, *, head_dim: int, max_position: int) -> RopeParameters:
    found = fields.raw("rope_parameters")
    if found is None:
        found = fields.raw("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise fields.broken("rope_parameters", found, "an object")
    params = dict(found)
    for name, usual in (("rope_theta", None), ("partial_rotary_factor", 0.25)):
        value = fields.raw(name)
        params.setdefault(name, usual if value is None else value)
    # A text's three positions are one, so which frequency belongs to which does not matter.
    section, is_interleaved = params.pop("mrope_section", None), params.pop("mrope_interleaved", True)
    rope = parse_rope(params, head_dim=head_dim, max_position=max_position, default_theta=10000.0)
    is_list = isinstance(section, list | tuple) and all(isinstance(n, int) for n in section)
    if section is not None and not (is_list and sum(section) == rope.dim // 2):
        raise fields.broken("rope_parameters", found, f"mrope_section of {rope.dim // 2} frequencies")
    if not isinstance(is_interleaved, bool):
        raise fields.broken("rope_parameters", found, "mrope_interleaved true or false")
    return rope


def _read_layer_types(fields: ConfigFields, n_layers: int) -> tuple[str, ...]:
    interval = fields.size("full_attention_interval", 4)
    usual = [_KINDS[0] if (i + 1) % interval == 0 else _KINDS[1] for i in range(n_layers)]
    kinds = fields.words("layer_types", n_layers) or usual
    for kind in kinds:
        if kind not in _KINDS:
            raise fields.refused("layer_types", kind, f"the known types are {' and '.join(_KINDS)}")
    return tuple(kinds)


def _read_linear(fields: ConfigFields) -> GatedDeltaNet:
    key_heads, value_heads = fields.size("linear_num_key_heads", 16), fields.size("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise fields.broken("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads {key_heads}")
    gate = fields.raw("output_gate_type")
    gate = "swish" if gate is None else gate
    if not isinstance(gate, str) or gate not in _GATES:
        raise fields.refused("output_gate_type", gate, f"the known gates are {', '.join(_GATES)}")
    return GatedDeltaNet(
        key_heads,
        value_heads,
        fields.size("linear_key_head_dim", 128),
        fields.size("linear_value_head_dim", 128),
        fields.size("linear_conv_kernel_dim", 4),
        _GATES[gate],
    )
