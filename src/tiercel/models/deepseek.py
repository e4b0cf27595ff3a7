"""DeepSeek V2 and V3: latent attention (one small row a token instead of keys and values), rotary on a part of each head.

Layers are dense up to `first_k_dense_replace`. Source: DeepSeek-AI 2024 (arXiv:2405.04434, arXiv:2412.19437); weights'
names as transformers has them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Self

from tiercel.models.decoder import (
    Decoder,
    DecoderConfig,
    Sizes,
    default_scale,
    read_activation,
    read_sizes,
)
from tiercel.models.fields import ConfigFields
from tiercel.models.info import ModelInfo
from tiercel.models.model import RecordOptions
from tiercel.models.rope import read_rope
from tiercel.ops.program import KvLayer, Value
from tiercel.ops.recorder import Recorder

# The latents' norms have an epsilon of their own, whatever rms_norm_eps is.
_LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(DecoderConfig):
    """What latent attention adds. `q_rank` 0: queries come from the hidden state by one matrix. `head_dim` is a key's."""

    q_rank: int
    rank: int
    nope: int
    rope: int
    v_dim: int
    is_interleaved: bool


class DeepseekV3(Decoder):
    """DeepSeek V3 and R1; V2 differs in what its config may say."""

    config: LatentConfig
    _architecture: ClassVar[str] = "DeepseekV3ForCausalLM"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a DeepSeek config; see `Model.from_config`."""
        fields = ConfigFields(config)
        sizes = read_sizes(fields, default_head_dim=fields.size("qk_rope_head_dim", 64))
        _refuse_experts(fields, sizes)
        latent = read_latent(cls._architecture, fields, sizes, is_interleaved=cls._is_interleaved(fields))
        fields.finish()
        return cls(latent)

    @classmethod
    def _is_interleaved(cls, fields: ConfigFields) -> bool:
        return fields.flag("rope_interleave", default=True)

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        c = self.config
        layers = tuple(KvLayer(i, 1, c.rank + c.rope, 0, c.rank) for i in range(c.n_layers))
        n_parameters = sum(prod(shape) for shape in self.expected_weights().values())
        max_len = c.ropes["rope"].max_len_tokens
        return ModelInfo(c.architecture, c.vocab_size, c.hidden_size, max_len, n_parameters, layers)

    def layer_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one layer's weights; names follow `model.layers.i.`."""
        shapes = super().layer_weights()
        kept = {name: shape for name, shape in shapes.items() if not name.startswith("self_attn.")}
        return kept | latent_weights(self.config)

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor may be left unread: besides a decoder's, layers past the last, which draft tokens."""
        parts = name.split(".")
        is_layer = parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdecimal()
        return super().may_ignore(name) or (is_layer and int(parts[2]) >= self.config.n_layers)

    def attention(self, rec: Recorder, options: RecordOptions, i: int, h: Value, tables: Mapping[str, Value]) -> Value:
        """Write layer i's attention over its normalised input, for the rows that the layer passes on."""
        del options
        c, prefix = self.config, f"model.layers.{i}.self_attn"

        def bias(name: str) -> str | None:
            return f"{prefix}.{name}.bias" if c.has_qkv_bias else None

        if c.q_rank:
            small = rec.linear(h, f"{prefix}.q_a_proj.weight", bias=bias("q_a_proj"))
            small = rec.rms_norm(small, f"{prefix}.q_a_layernorm.weight", _LATENT_EPS)
            q = rec.linear(small, f"{prefix}.q_b_proj.weight")
        else:
            q = rec.linear(h, f"{prefix}.q_proj.weight")
        latents = rec.linear(h, f"{prefix}.kv_a_proj_with_mqa.weight", bias=bias("kv_a_proj_with_mqa"))
        y = rec.latent_attention(
            self.kept_rows(rec, i, q),
            latents,
            layer=i,
            norm=f"{prefix}.kv_a_layernorm.weight",
            weight=f"{prefix}.kv_b_proj.weight",
            heads=c.n_heads,
            nope=c.nope,
            rope=c.rope,
            v_dim=c.v_dim,
            eps=_LATENT_EPS,
            scale=c.attention_scale,
            table=tables["rope"],
            interleaved=c.is_interleaved,
        )
        return rec.linear(y, f"{prefix}.o_proj.weight", bias=bias("o_proj"))


class DeepseekV2(DeepseekV3):
    """DeepSeek V2 and V2-Lite: pairs are always interleaved, the feed-forward may have biases."""

    _architecture: ClassVar[str] = "DeepseekV2ForCausalLM"

    @classmethod
    def _is_interleaved(cls, fields: ConfigFields) -> bool:
        fields.only("mlp_bias", False, why="no released DeepSeek has it")
        return True


def latent_weights(c: LatentConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one layer's attention weights; names follow `model.layers.i.`."""
    q = c.n_heads * (c.nope + c.rope)
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.kv_a_proj_with_mqa.weight": (c.rank + c.rope, c.hidden_size),
        "self_attn.kv_a_layernorm.weight": (c.rank,),
        "self_attn.kv_b_proj.weight": (c.n_heads * (c.nope + c.v_dim), c.rank),
        "self_attn.o_proj.weight": (c.hidden_size, c.n_heads * c.v_dim),
    }
    if c.q_rank:
        shapes["self_attn.q_a_proj.weight"] = (c.q_rank, c.hidden_size)
        shapes["self_attn.q_a_layernorm.weight"] = (c.q_rank,)
        shapes["self_attn.q_b_proj.weight"] = (q, c.q_rank)
    else:
        shapes["self_attn.q_proj.weight"] = (q, c.hidden_size)
    if c.has_qkv_bias:
        biased = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if c.q_rank else ("kv_a_proj_with_mqa", "o_proj")
        shapes |= {f"self_attn.{name}.bias": (shapes[f"self_attn.{name}.weight"][0],) for name in biased}
    return shapes


def read_latent(architecture: str, fields: ConfigFields, sizes: Sizes, *, is_interleaved: bool) -> LatentConfig:
    """Read the sizes of latent attention, its rotation and scale.

    Raises:
        ModelFileError: a size is missing or makes no sense.
        UnsupportedModel: a field asks for arithmetic that is not implemented.
    """
    nope, rope = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    rank, v_dim = fields.size("kv_lora_rank"), fields.size("v_head_dim")
    if rank % 8 or rope % 8:
        name, value = ("kv_lora_rank", rank) if rank % 8 else ("qk_rope_head_dim", rope)
        raise fields.refused(name, value, "latent rows are read by eights")
    if fields.size("qk_head_dim", nope + rope) != nope + rope:
        raise fields.broken(
            "qk_head_dim", fields.raw("qk_head_dim"), f"qk_nope_head_dim + qk_rope_head_dim {nope + rope}"
        )
    fields.only("pretraining_tp", 1, why="weights split for training-time tensor parallelism")
    table = read_rope(fields, head_dim=rope, max_position=sizes.max_position, default_theta=10000.0)
    return LatentConfig(
        architecture=architecture,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        n_heads=sizes.n_heads,
        n_kv_heads=1,
        head_dim=nope + rope,
        eps=fields.float32("rms_norm_eps", 1e-6),
        act=read_activation(fields, "hidden_act", "silu"),
        max_position=sizes.max_position,
        is_tied=fields.flag("tie_word_embeddings", default=False),
        windows=(0,) * sizes.n_layers,
        ropes={"rope": table},
        layer_ropes=("rope",) * sizes.n_layers,
        attention_scale=default_scale(nope + rope) * _long_text_factor(fields, table.factor),
        has_qkv_bias=fields.flag("attention_bias", default=False),
        q_rank=fields.size("q_lora_rank") if fields.has("q_lora_rank") else _none(fields, "q_lora_rank"),
        rank=rank,
        nope=nope,
        rope=rope,
        v_dim=v_dim,
        is_interleaved=is_interleaved,
    )


def _long_text_factor(fields: ConfigFields, factor: float) -> float:
    """Return what scores are multiplied with where a rotation is stretched: the square of its `mscale_all_dim` growth."""
    params = fields.raw("rope_parameters") or fields.raw("rope_scaling") or {}
    all_dim = params.get("mscale_all_dim") or 0.0
    if not all_dim or factor <= 1.0:
        return 1.0
    return (0.1 * float(all_dim) * math.log(factor) + 1.0) ** 2


def _none(fields: ConfigFields, name: str) -> int:
    fields.raw(name)
    return 0


def _refuse_experts(fields: ConfigFields, sizes: Sizes) -> None:
    n_dense = fields.raw("first_k_dense_replace")
    n_experts = fields.raw("n_routed_experts")
    if n_experts and (not isinstance(n_dense, int) or n_dense < sizes.n_layers):
        raise fields.refused("n_routed_experts", n_experts, "a mixture of experts; dense layers are")
    # Nothing reads these where every layer is dense.
    for name in _OF_EXPERTS:
        fields.raw(name)


_OF_EXPERTS = (
    "n_shared_experts",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "norm_topk_prob",
    "topk_method",
    "scoring_func",
    "moe_layer_freq",
    "ep_size",
    "aux_loss_alpha",
    "seq_aux",
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "output_router_logits",
    "num_experts",
    "num_local_experts",
)
