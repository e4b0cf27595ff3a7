"""DeepSeek V2 and V3: latent attention (a token keeps one small row, no keys and values), and mixtures of experts.

Layers are dense up to `first_k_dense_replace`; a mixture has shared experts beside it. Weights' names as transformers
has them. Source: DeepSeek-AI 2024 (arXiv:2405.04434, arXiv:2412.19437).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal, Self

from msgspec.structs import replace

from tiercel.models.decoder import (
    Decoder,
    DecoderConfig,
    Sizes,
    default_scale,
    read_activation,
    read_sizes,
)
from tiercel.models.fields import ConfigFields, Required
from tiercel.models.info import ModelInfo
from tiercel.models.model import RecordOptions
from tiercel.models.moe import MixtureConfig, read_experts
from tiercel.models.mtp import DraftNames, draft_weights, names_of, read_n_modules, record_draft
from tiercel.models.rope import read_rope
from tiercel.ops.program import KvLayer, Value
from tiercel.ops.recorder import LatentSizes, Recorder
from tiercel.ops.routing import Routing

_OF_TRAINING = (
    "ep_size",
    "aux_loss_alpha",
    "seq_aux",
    "output_router_logits",
)
_OF_MIXTURES = (
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
)
# The latents' norms have an epsilon of their own, whatever rms_norm_eps is.
_LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(DecoderConfig):
    """What latent attention adds. `q_rank` 0: one matrix makes the queries. `head_dim` is a key's. `latent_eps` is that
    of the norms of both small rows.
    """

    q_rank: int
    rank: int
    nope: int
    rope: int
    v_dim: int
    is_interleaved: bool
    latent_eps: float = _LATENT_EPS


class DeepseekV3(Decoder):
    """DeepSeek V3 and R1; V2 differs in what its config may say."""

    config: LatentConfig
    _architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    _usual_n_dense: ClassVar[int] = 3
    _has_correction: ClassVar[bool] = True

    def __init__(self, config: LatentConfig, mixture: MixtureConfig | None, n_dense: int, n_shared: int) -> None:
        """`mixture` is of the layers from `n_dense` on, beside `n_shared` experts that every token goes through."""
        super().__init__(config)
        self.mixture, self.n_dense, self.n_shared = mixture, n_dense, n_shared

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a DeepSeek config; see `Model.from_config`."""
        fields = ConfigFields(config)
        sizes = read_sizes(fields, default_head_dim=fields.size("qk_rope_head_dim", 64))
        latent = read_latent(cls._architecture, fields, sizes, is_interleaved=cls._is_interleaved(fields))
        # A head may be there though no field says so.
        n_modules = read_n_modules(fields, "num_nextn_predict_layers", read_n_modules(fields, "num_mtp_layers", 1))
        latent = dataclasses.replace(latent, n_mtp_modules=max(n_modules, 1))
        n_dense = fields.raw("first_k_dense_replace")
        n_dense = cls._usual_n_dense if n_dense is None else n_dense
        if isinstance(n_dense, bool) or not isinstance(n_dense, int) or n_dense < 0:
            raise fields.broken("first_k_dense_replace", n_dense, "a number of layers")
        for name in _OF_TRAINING:
            fields.raw(name)
        fields.only("moe_layer_freq", 1, why="every layer past the dense ones is a mixture")
        mixture, n_shared = None, 0
        if n_dense < sizes.n_layers:
            width, act = fields.size("moe_intermediate_size"), latent.act
            mixture = MixtureConfig(routing=cls._routing(fields), intermediate_size=width, act=act)
            n_shared = fields.size("n_shared_experts") if fields.has("n_shared_experts") else 0
        for name in _OF_MIXTURES:  # nothing reads these where every layer is dense
            fields.raw(name)
        fields.finish()
        return cls(latent, mixture, n_dense, n_shared)

    @classmethod
    def _routing(cls, fields: ConfigFields) -> Routing:
        fields.only("scoring_func", "sigmoid", why="DeepSeek V3 scores by the sigmoid")
        fields.only("topk_method", "noaux_tc", why="DeepSeek V3 corrects its choice by a bias")
        routing = read_experts(fields, "n_routed_experts", "num_experts_per_tok", 256, 8)
        n_groups, n_kept = fields.size("n_group", 8), fields.size("topk_group", 4)
        renormalises = fields.flag("norm_topk_prob", default=True)
        scale = fields.float32("routed_scaling_factor", 2.5)
        # A group's score is the sum of its two best.
        return grouped(fields, routing, n_groups, n_kept, 2, "sigmoid", renormalises=renormalises, scale=scale)

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

    def weights_of_layer(self, i: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of layer i's weights."""
        shapes = self.layer_weights()
        if self.mixture is None or i < self.n_dense:
            return shapes
        c = self.config
        kept = {name: shape for name, shape in shapes.items() if not name.startswith("mlp.")}
        found = self.mixture.weights(c.hidden_size)
        if self._has_correction:
            found["gate.e_score_correction_bias"] = (self.mixture.routing.n_experts,)
        if self.n_shared:
            width = self.n_shared * self.mixture.intermediate_size
            found |= {f"shared_experts.{name}_proj.weight": (width, c.hidden_size) for name in ("gate", "up")}
            found["shared_experts.down_proj.weight"] = (c.hidden_size, width)
        return kept | {f"mlp.{name}": shape for name, shape in found.items()}

    def mlp(self, rec: Recorder, i: int, h: Value) -> Value:
        """Write layer i's feed-forward: dense, or a mixture and its shared experts."""
        if self.mixture is None or i < self.n_dense:
            return super().mlp(rec, i, h)
        prefix = f"{self.layer_prefix(i)}.mlp"
        bias = f"{prefix}.gate.e_score_correction_bias" if self._has_correction else None
        y = self.mixture.record(rec, prefix, h, bias=bias)
        if not self.n_shared:
            return y
        gate, up = (rec.linear(h, f"{prefix}.shared_experts.{name}_proj.weight") for name in ("gate", "up"))
        shared = rec.linear(rec.gated(gate, up, self.config.act), f"{prefix}.shared_experts.down_proj.weight")
        return rec.add(y, shared)

    @property
    def n_mtp_modules(self) -> int:
        """Modules of the draft head, whose layers are mixtures."""
        return 0 if self.mixture is None else self.config.n_mtp_modules

    def mtp_module_weights(self, module: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a module's weights, but for copies of the embedding and the head."""
        return draft_weights(self, self._draft_names(module), module)

    def forward_mtp(self, rec: Recorder, options: RecordOptions, module: int) -> Value:
        """Write the draft head's module."""
        return record_draft(self, rec, options, self._draft_names(module), module, skips_first=True)

    def _draft_names(self, module: int) -> DraftNames:
        return names_of(self, module, "eh_proj", "enorm", "hnorm", "shared_head.norm")

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor may be left unread: besides a decoder's, layers past the last, which draft tokens."""
        parts = name.split(".")
        is_layer = parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdecimal()
        return super().may_ignore(name) or (is_layer and int(parts[2]) >= self.config.n_layers)

    def attention(self, rec: Recorder, options: RecordOptions, i: int, h: Value, tables: Mapping[str, Value]) -> Value:
        """Write layer i's attention over its normalised input, for the rows that the layer passes on."""
        del options
        c, prefix = self.config, f"{self.layer_prefix(i)}.self_attn"
        q, latents = latent_projections(rec, c, prefix, h)
        y = latent_attention(rec, c, prefix, (self.kept_rows(rec, i, q), latents), layer=i, table=tables["rope"])
        return rec.linear(y, f"{prefix}.o_proj.weight", bias=f"{prefix}.o_proj.bias" if c.has_qkv_bias else None)


class DeepseekV2(DeepseekV3):
    """DeepSeek V2 and V2-Lite: interleaved pairs; experts are chosen by a softmax, and nothing is renormalised."""

    _architecture: ClassVar[str] = "DeepseekV2ForCausalLM"
    _usual_n_dense: ClassVar[int] = 0
    _has_correction: ClassVar[bool] = False

    @property
    def n_mtp_modules(self) -> int:
        """None: there is no draft head."""
        return 0

    @classmethod
    def _routing(cls, fields: ConfigFields) -> Routing:
        fields.only("scoring_func", "softmax", why="DeepSeek V2 scores by the softmax")
        fields.only("norm_topk_prob", False, why="DeepSeek V2 does not renormalise its weights")
        fields.only("topk_method", "greedy", "group_limited_greedy", why="DeepSeek V2 chooses in one of these ways")
        routing = read_experts(fields, "n_routed_experts", "num_experts_per_tok", 64, Required)
        is_limited = fields.raw("topk_method") == "group_limited_greedy"
        n_groups, n_kept = (fields.size("n_group"), fields.size("topk_group")) if is_limited else (1, 1)
        scale = fields.float32("routed_scaling_factor", 1.0)
        return grouped(fields, routing, n_groups, n_kept, 1, "softmax", renormalises=False, scale=scale)

    @classmethod
    def _is_interleaved(cls, fields: ConfigFields) -> bool:
        fields.only("mlp_bias", False, why="no released DeepSeek has it")
        return True


def grouped(
    fields: ConfigFields,
    routing: Routing,
    n_groups: int,
    n_kept: int,
    group_top: int,
    scores: Literal["softmax", "sigmoid"],
    *,
    renormalises: bool,
    scale: float,
) -> Routing:
    """Return the routing with its groups.

    Raises:
        ModelFileError: the numbers do not fit each other.
    """
    top = 1 if n_groups == 1 else group_top
    found = replace(
        routing,
        scores=scores,
        n_groups=n_groups,
        n_groups_kept=n_kept,
        group_top=top,
        renormalises=renormalises,
        scale=scale,
    )
    fault = found.broken()
    if fault is not None:
        raise fields.broken("n_group", n_groups, f"a choice that can be made ({fault})")
    return found


def latent_projections(rec: Recorder, c: LatentConfig, prefix: str, h: Value) -> tuple[Value, Value]:
    """Write the projections of a latent attention: queries, and what a token leaves."""

    def bias(name: str) -> str | None:
        return f"{prefix}.{name}.bias" if c.has_qkv_bias else None

    if c.q_rank:
        small = rec.linear(h, f"{prefix}.q_a_proj.weight", bias=bias("q_a_proj"))
        small = rec.rms_norm(small, f"{prefix}.q_a_layernorm.weight", c.latent_eps)
        q = rec.linear(small, f"{prefix}.q_b_proj.weight")
    else:
        q = rec.linear(h, f"{prefix}.q_proj.weight")
    return q, rec.linear(h, f"{prefix}.kv_a_proj_with_mqa.weight", bias=bias("kv_a_proj_with_mqa"))


def latent_attention(
    rec: Recorder,
    c: LatentConfig,
    prefix: str,
    made: tuple[Value, Value],
    *,
    layer: int,
    table: Value | None,
    sees_block: bool = False,
) -> Value:
    """Write the attention of `latent_projections`' values, whose queries may be fewer; no table: without positions."""
    return rec.latent_attention(
        *made,
        layer=layer,
        norm=f"{prefix}.kv_a_layernorm.weight",
        weight=f"{prefix}.kv_b_proj.weight",
        sizes=LatentSizes(c.n_heads, c.nope, c.rope, c.v_dim),
        eps=c.latent_eps,
        scale=c.attention_scale,
        table=table,
        interleaved=c.is_interleaved,
        sees_block=sees_block,
    )


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


def read_latent_sizes(fields: ConfigFields) -> tuple[int, int, int, int]:
    """Read a head's columns without and with rotation, a latent's, and a value's.

    Raises:
        ModelFileError: a size is missing or makes no sense.
        UnsupportedModel: the kernels read no rows of that size.
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
    return nope, rope, rank, v_dim


def read_latent(architecture: str, fields: ConfigFields, sizes: Sizes, *, is_interleaved: bool) -> LatentConfig:
    """Read the sizes of latent attention, its rotation and scale.

    Raises:
        ModelFileError: a size is missing or makes no sense.
        UnsupportedModel: a field asks for arithmetic that is not implemented.
    """
    nope, rope, rank, v_dim = read_latent_sizes(fields)
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
        q_rank=read_size_or_0(fields, "q_lora_rank"),
        rank=rank,
        nope=nope,
        rope=rope,
        v_dim=v_dim,
        is_interleaved=is_interleaved,
    )


def _long_text_factor(fields: ConfigFields, factor: float) -> float:
    """Return what a stretched rotation multiplies scores with: the square of its `mscale_all_dim` growth."""
    params = fields.raw("rope_parameters") or fields.raw("rope_scaling") or {}
    all_dim = params.get("mscale_all_dim") or 0.0
    if not all_dim or factor <= 1.0:
        return 1.0
    return (0.1 * float(all_dim) * math.log(factor) + 1.0) ** 2


def read_size_or_0(fields: ConfigFields, name: str) -> int:
    """Return a positive integer, or 0 where the field is absent or null."""
    if fields.has(name):
        return fields.size(name)
    fields.raw(name)
    return 0
