"""LFM2: layers of gated short convolutions, and some of attention with norms of heads.

A convolution's layer: [B | C | X] = in_proj h; y = out_proj(C * conv(B * X)), a causal filter of `conv_L_cache` taps a
channel without activation, whose last inputs are all that it keeps of a sequence. Source: LFM2's configs and
transformers' class; names as it has them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from msgspec.structs import replace

from tiercel.models.decoder import Decoder, DecoderConfig, default_scale, read_sizes
from tiercel.models.fields import ConfigFields, Required
from tiercel.models.info import ModelInfo
from tiercel.models.model import RecordOptions
from tiercel.models.rope import read_rope
from tiercel.ops.program import StateLayer, Value
from tiercel.ops.recorder import Recorder

_KINDS = ("conv", "full_attention")
_OF_TRAINING = ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")


class Lfm2(Decoder):
    """LFM2. `layer_types[i]` is layer i's kind, `taps` the width of every filter."""

    norm_name: ClassVar[str] = "embedding_norm"

    def __init__(self, config: DecoderConfig, layer_types: tuple[str, ...], taps: int) -> None:
        super().__init__(config)
        self.layer_types, self.taps = layer_types, taps

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read an LFM2 config; see `Model.from_config`."""
        fields = ConfigFields(config)
        fields.only("hidden_act", "silu", "swish", why="the feed-forward is made for it")
        fields.only("conv_bias", False, why="no released LFM2 has biases")
        fields.only("use_pos_enc", True, why="attention is rotated")
        fields.only("block_use_swiglu", True, why="the feed-forward is gated")
        for name in _OF_TRAINING:
            fields.raw(name)
        # The older name of the two has the last word, as in transformers.
        width = fields.size("block_ff_dim", fields.raw("intermediate_size") or Required)
        sizes = read_sizes(fields, default_intermediate=width)
        for name in ("block_dim", "conv_dim", "conv_dim_out"):
            if fields.size(name, sizes.hidden_size) != sizes.hidden_size:
                raise fields.broken(name, fields.raw(name), f"hidden_size {sizes.hidden_size}")
        if fields.size("num_heads", sizes.n_heads) != sizes.n_heads:
            raise fields.broken("num_heads", fields.raw("num_heads"), f"num_attention_heads {sizes.n_heads}")
        eps = fields.float32("norm_eps", 1e-5)
        if fields.float32("block_norm_eps", eps) != eps:
            raise fields.broken("block_norm_eps", fields.raw("block_norm_eps"), f"norm_eps {eps}")
        kinds = _read_kinds(fields, sizes.n_layers)
        rope = read_rope(fields, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=1e6)
        tied = fields.flag("tie_word_embeddings", default=True)
        found = DecoderConfig(
            architecture="Lfm2ForCausalLM",
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            intermediate_size=_adjusted(fields, width),
            n_heads=sizes.n_heads,
            n_kv_heads=sizes.n_kv_heads,
            head_dim=sizes.head_dim,
            eps=eps,
            act="silu",
            max_position=sizes.max_position,
            is_tied=fields.flag("tie_embedding", default=tied),
            windows=(0,) * sizes.n_layers,
            ropes={"rope": rope},
            layer_ropes=tuple("rope" if kind == "full_attention" else None for kind in kinds),
            attention_scale=default_scale(sizes.head_dim),
            has_qk_norm=True,
        )
        taps = fields.size("conv_L_cache", 3)
        fields.finish()
        return cls(found, kinds, taps)

    @property
    def info(self) -> ModelInfo:
        """Facts about the model: keys and values of the layers with attention, the last inputs of the others."""
        info, kinds, channels = super().info, self.layer_types, self.config.hidden_size
        kv = tuple(layer for layer in info.kv_layers if kinds[layer.index] == "full_attention")
        states = tuple(
            StateLayer(i, "short_conv", channels, self.taps, 0, 0, 0) for i, kind in enumerate(kinds) if kind == "conv"
        )
        return replace(info, kv_layers=kv, state_layers=states)

    def weights_of_layer(self, i: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of layer i's weights."""
        c = self.config
        hidden, width, q, kv = c.hidden_size, c.intermediate_size, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "operator_norm.weight": (hidden,),
            "ffn_norm.weight": (hidden,),
            "feed_forward.w1.weight": (width, hidden),
            "feed_forward.w3.weight": (width, hidden),
            "feed_forward.w2.weight": (hidden, width),
        }
        if self.layer_types[i] == "conv":
            return shapes | {
                "conv.in_proj.weight": (3 * hidden, hidden),
                "conv.conv.weight": (hidden, 1, self.taps),
                "conv.out_proj.weight": (hidden, hidden),
            }
        return shapes | {
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.out_proj.weight": (hidden, q),
            "self_attn.q_layernorm.weight": (c.head_dim,),
            "self_attn.k_layernorm.weight": (c.head_dim,),
        }

    def layer(self, rec: Recorder, options: RecordOptions, i: int, x: Value, tables: Mapping[str, Value]) -> Value:
        """Write layer i and return the residual stream after it, of the rows that it passes on."""
        prefix = f"{self.prefix}.layers.{i}"
        kept = self.kept_rows(rec, i, x)
        h = self.norm(rec, options, x, f"{prefix}.operator_norm.weight")
        is_conv = self.layer_types[i] == "conv"
        mixed = self._convolution(rec, i, h) if is_conv else self.attention(rec, options, i, h, tables)
        x = rec.add(kept, mixed)
        h = self.norm(rec, options, x, f"{prefix}.ffn_norm.weight")
        return rec.add(x, self.mlp(rec, i, h))

    def attention(self, rec: Recorder, options: RecordOptions, i: int, h: Value, tables: Mapping[str, Value]) -> Value:
        """Write layer i's attention over its normalised input, for the rows that the layer passes on."""
        c, prefix = self.config, f"{self.prefix}.layers.{i}.self_attn"
        q, k, v = (rec.linear(h, f"{prefix}.{name}_proj.weight") for name in ("q", "k", "v"))
        q = self.norm(rec, options, q, f"{prefix}.q_layernorm.weight", heads=c.n_heads)
        k = self.norm(rec, options, k, f"{prefix}.k_layernorm.weight", heads=c.n_kv_heads)
        q = rec.rope(q, tables["rope"], heads=c.n_heads)
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
        return rec.linear(y, f"{prefix}.out_proj.weight")

    def _convolution(self, rec: Recorder, i: int, h: Value) -> Value:
        n, prefix = self.config.hidden_size, f"{self.prefix}.layers.{i}.conv"

        def part(x: Value, index: int) -> Value:
            return rec.linear(x, f"{prefix}.in_proj.weight", rows=(3 * n, index * n, n))

        before, x = part(h, 0), part(h, 2)
        x = rec.gated_norm(x, before, None, heads=1, act="none")
        y = rec.short_conv([x], [f"{prefix}.conv.weight"], layer=i, act="none")
        behind = part(self.kept_rows(rec, i, h), 1)
        y = rec.gated_norm(self.kept_rows(rec, i, y), behind, None, heads=1, act="none")
        return rec.linear(y, f"{prefix}.out_proj.weight")

    def mlp(self, rec: Recorder, i: int, h: Value) -> Value:
        """Write layer i's gated feed-forward over its normalised input."""
        prefix = f"{self.prefix}.layers.{i}.feed_forward"
        gate, up = rec.linear(h, f"{prefix}.w1.weight"), rec.linear(h, f"{prefix}.w3.weight")
        return rec.linear(rec.gated(gate, up, self.config.act), f"{prefix}.w2.weight")


def _read_kinds(fields: ConfigFields, n_layers: int) -> tuple[str, ...]:
    """Return each layer's kind, from `layer_types` or from the older list of those with attention; none says: all."""
    kinds = fields.words("layer_types", n_layers)
    for kind in kinds or ():
        if kind not in _KINDS:
            raise fields.refused("layer_types", kind, f"the known types are {' and '.join(_KINDS)}")
    if not fields.has("full_attn_idxs"):
        fields.raw("full_attn_idxs")
        return tuple(kinds or [_KINDS[1]] * n_layers)
    full = fields.indices("full_attn_idxs")
    listed = tuple(_KINDS[i in full] for i in range(n_layers))
    if max(full, default=0) >= n_layers or (kinds is not None and listed != tuple(kinds)):
        needed = f"a list of layers 0 to {n_layers - 1}{', as layer_types has them,' if kinds else ''}"
        raise fields.broken("full_attn_idxs", sorted(full), needed)
    return listed


def _adjusted(fields: ConfigFields, width: int) -> int:
    """Return the feed-forward's width: two thirds of what the config says, times a factor, rounded up; or just that."""
    multiple = fields.size("block_multiple_of", 256)
    factor = fields.positive("block_ffn_dim_multiplier", 1.0)
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return width
    adjusted = -(-int(factor * int(2 * width / 3)) // multiple) * multiple
    if adjusted < 1:
        raise fields.broken("block_ffn_dim_multiplier", factor, "one that leaves a feed-forward some columns")
    return adjusted
