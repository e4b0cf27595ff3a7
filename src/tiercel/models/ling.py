"""Ling 3 (BailingMoeV3): layers of Kimi Delta Attention, the last of each group of latent attention; mixtures.

Delta attention is Kimi Linear's with decays of one full matrix, bounded below by the safe gate. Latent attention is
DeepSeek's; each head's output is multiplied by the sigmoid of one gate. Late layers' experts, and their shared expert,
clamp their gated product behind the silu (`ops.activations`, silu_clamp). Source: Ling 3.0's released config and
modelling code, transformers' bailing_hybrid, and vLLM's for the clamps, which the others leave out. Names as the
checkpoints have them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from msgspec import structs

from tiercel.models.decoder import Decoder, default_scale, read_sizes
from tiercel.models.deepseek import (
    LatentConfig,
    grouped,
    latent_attention,
    latent_projections,
    latent_weights,
    read_latent_sizes,
    read_size_or_0,
)
from tiercel.models.fields import ConfigFields, in_one_dialect
from tiercel.models.info import ModelInfo
from tiercel.models.kimi_config import CONVOLVED, DeltaAttention
from tiercel.models.model import RecordOptions
from tiercel.models.moe import MixtureConfig, read_experts
from tiercel.models.mtp import DraftNames, draft_weights, names_of, read_n_modules, record_draft
from tiercel.models.rope import RopeParameters, parse_rope
from tiercel.ops.program import KvLayer, Value
from tiercel.ops.recorder import Recorder

Shapes = dict[str, tuple[int, ...]]
# transformers' names, and the checkpoints' for the same.
_ALIASES: Mapping[str, str] = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_local_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "n_shared_experts": "num_shared_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
_KINDS = ("linear_attention", "full_attention")
_FEED_FORWARDS = ("dense", "sparse")
# The one value that each may have, and what another would mean.
_FIXED: Mapping[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the feed-forwards are made for it"),
    "no_kda_lora": (True, "decays and gates of delta attention come from one matrix each"),
    "gated_attention_proj_granularity_type": ("head_wise", "latent attention has one gate a head"),
    "rope_interleave": (True, "neighbouring columns are rotated together"),
    "score_function": ("sigmoid", "the router's scores are sigmoids"),
    "scoring_func": ("sigmoid", "the router's scores are sigmoids"),
    "topk_method": ("noaux_tc", "the choice is corrected by a bias"),
    "moe_router_enable_expert_bias": (True, "the choice is corrected by a bias"),
    "use_bias": (False, "no Ling 3 has biases"),
    "use_qkv_bias": (False, "no Ling 3 has biases"),
    "attention_bias": (False, "no Ling 3 has biases"),
    "mtp_use_kda": (False, "the layer that drafts is of latent attention"),
    "pretraining_tp": (1, "weights split for training-time tensor parallelism"),
}
# Of training or of earlier models, and read by no implementation of this one; a rotation is as wide as its columns.
_UNUSED = (
    "partial_rotary_factor",
    "group_norm_size",
    "linear_silu",
    "max_window_layers",
    "mtp_loss_scaling_factor",
    "num_kv_heads_for_linear_attn",
    "output_router_logits",
    "router_dtype",
    "seq_aux",
    "use_qk_norm",
    "embedding_dropout",
    "output_dropout",
)
_OF_MIXTURES = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "num_shared_experts",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LingConfig(LatentConfig):
    """What Ling 3 adds. `is_linear[i]` and `is_sparse[i]` say what layer i's two parts are.

    `limits[i]` clamp layer i's experts and its shared expert; 0 is none.
    """

    delta: DeltaAttention
    is_linear: tuple[bool, ...]
    is_sparse: tuple[bool, ...]
    mixture: MixtureConfig | None
    n_shared: int
    limits: tuple[tuple[float, float], ...]


class Ling(Decoder):
    """Ling 3."""

    config: LingConfig
    embed_name: ClassVar[str] = "word_embeddings"

    def __init__(self, config: LingConfig) -> None:
        super().__init__(config)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Ling 3 config; see `Model.from_config`."""
        return cls(_read(config))

    @property
    def info(self) -> ModelInfo:
        """Facts about the model: a latent row a token of the full layers, states of the others."""
        c, kinds = self.config, self.config.is_linear
        kv = tuple(KvLayer(i, 1, c.rank + c.rope, 0, c.rank) for i, is_linear in enumerate(kinds) if not is_linear)
        states = tuple(c.delta.state(i) for i, is_linear in enumerate(kinds) if is_linear)
        return structs.replace(super().info, kv_layers=kv, state_layers=states)

    def _parts(self, i: int) -> tuple[bool, MixtureConfig | None]:
        """Return whether layer i is linear, and its mixture; layers past the last draft tokens."""
        c = self.config
        if i >= c.n_layers:
            return False, c.mixture
        return c.is_linear[i], c.mixture if c.is_sparse[i] else None

    def weights_of_layer(self, i: int) -> Shapes:
        """Return the shapes of layer i's weights."""
        c, (is_linear, mixture) = self.config, self._parts(i)
        shapes: Shapes = {f"{name}_layernorm.weight": (c.hidden_size,) for name in ("input", "post_attention")}
        shapes |= self._delta_weights() if is_linear else self._latent_weights()
        if mixture is None:
            return shapes | _gated_weights("mlp", c.intermediate_size, c.hidden_size)
        shapes |= {f"mlp.{name}": shape for name, shape in mixture.weights(c.hidden_size).items()}
        shapes["mlp.gate.expert_bias"] = (mixture.routing.n_experts,)
        width = c.n_shared * mixture.intermediate_size
        return shapes | _gated_weights("mlp.shared_experts", width, c.hidden_size)

    def _delta_weights(self) -> Shapes:
        d, hidden = self.config.delta, self.config.hidden_size
        shapes: Shapes = {f"{name}_proj.weight": (d.width, hidden) for name in (*CONVOLVED, "f", "g")}
        shapes |= {f"{name}_conv1d.weight": (d.width, 1, d.conv_width) for name in CONVOLVED}
        shapes |= {
            "b_proj.weight": (d.heads, hidden),
            "A_log": (d.heads,),
            "dt_bias": (d.width,),
            "o_norm.weight": (d.head_dim,),
            "o_proj.weight": (hidden, d.width),
        }
        return {f"attention.{name}": shape for name, shape in shapes.items()}

    def _latent_weights(self) -> Shapes:
        c = self.config
        names = {"self_attn.": "attention.", "attention.o_proj.": "attention.dense."}
        shapes = latent_weights(c)
        for old, new in names.items():
            shapes = {name.replace(old, new): shape for name, shape in shapes.items()}
        return shapes | {"attention.g_proj.weight": (c.n_heads, c.hidden_size)}

    def other_shapes(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return what else a weight's shape may be: some files keep decays with axes of one."""
        return ((1, 1, self.config.delta.heads, 1),) if name.endswith(".A_log") else ()

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor may be left unread: besides a decoder's, layers past the last, which draft tokens."""
        parts, n = name.removeprefix(f"{self.prefix}.layers.").split("."), self.config.n_layers
        is_draft = parts[0].isdecimal() and n <= int(parts[0]) < n + self.config.n_mtp_modules
        return super().may_ignore(name) or is_draft

    def attention(self, rec: Recorder, options: RecordOptions, i: int, h: Value, tables: Mapping[str, Value]) -> Value:
        """Write layer i's mixer over its normalised input, for the rows that the layer passes on."""
        del options
        c, prefix = self.config, f"{self.prefix}.layers.{i}.attention"
        if self._parts(i)[0]:
            return self._delta(rec, i, prefix, h)
        q, latents = latent_projections(rec, c, prefix, h)
        made = (self.kept_rows(rec, i, q), latents)
        y = latent_attention(rec, c, prefix, made, layer=i, table=tables["rope"])
        y = rec.sigmoid_gate(y, rec.linear(self.kept_rows(rec, i, h), f"{prefix}.g_proj.weight"))
        return rec.linear(y, f"{prefix}.dense.weight")

    def _delta(self, rec: Recorder, i: int, prefix: str, h: Value) -> Value:
        d = self.config.delta
        qkv = [rec.linear(h, f"{prefix}.{name}_proj.weight") for name in CONVOLVED]
        decays, betas, gates = (rec.linear(h, f"{prefix}.{name}_proj.weight") for name in ("f", "b", "g"))
        y = d.record(rec, prefix, qkv, (decays, betas, gates), layer=i, eps=self.config.eps)
        return rec.linear(self.kept_rows(rec, i, y), f"{prefix}.o_proj.weight")

    def mlp(self, rec: Recorder, i: int, h: Value) -> Value:
        """Write layer i's feed-forward over its normalised input: dense, or a mixture and its shared expert."""
        c, prefix, (_, mixture) = self.config, f"{self.prefix}.layers.{i}.mlp", self._parts(i)
        if mixture is None:
            return super().mlp(rec, i, h)
        act, params = _clamped(c.limits[i][0])
        y = replace(mixture, act=act, act_params=params).record(rec, prefix, h, bias=f"{prefix}.gate.expert_bias")
        gate, up = (rec.linear(h, f"{prefix}.shared_experts.{name}_proj.weight") for name in ("gate", "up"))
        shared = rec.gated(gate, up, *_clamped(c.limits[i][1]))
        return rec.add(y, rec.linear(shared, f"{prefix}.shared_experts.down_proj.weight"))

    def _draft_names(self, module: int) -> DraftNames:
        return names_of(self, module, "eh_proj", "enorm", "hnorm", "final_layernorm")

    @property
    def n_mtp_modules(self) -> int:
        """Modules of the draft head, whose layers are mixtures."""
        return 0 if self.config.mixture is None else self.config.n_mtp_modules

    def mtp_module_weights(self, module: int) -> Shapes:
        """Return the shapes of a module's weights."""
        return draft_weights(self, self._draft_names(module), module)

    def forward_mtp(self, rec: Recorder, options: RecordOptions, module: int) -> Value:
        """Write the module, of latent attention and a mixture; a first token counts as any other."""
        return record_draft(self, rec, options, self._draft_names(module), module, skips_first=False)


def _clamped(limit: float) -> tuple[str, tuple[float, ...]]:
    return ("silu_clamp", (limit,)) if limit else ("silu", ())


def _gated_weights(prefix: str, width: int, hidden: int) -> Shapes:
    shapes: Shapes = {f"{prefix}.{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
    return shapes | {f"{prefix}.down_proj.weight": (hidden, width)}


def _read(config: Mapping[str, Any]) -> LingConfig:
    fields = ConfigFields(in_one_dialect(config, _ALIASES))
    for name, (value, why) in _FIXED.items():
        fields.only(name, value, why=why)
    for name in _UNUSED:
        fields.raw(name)
    sizes = read_sizes(fields, default_head_dim=128)
    nope, rope, rank, v_dim = read_latent_sizes(fields)
    if fields.size("rotary_dim", rope) != rope:
        raise fields.broken("rotary_dim", fields.raw("rotary_dim"), f"qk_rope_head_dim {rope}")
    n_drafts = read_n_modules(fields, "num_nextn_predict_layers", 0)
    is_linear, is_sparse = _read_kinds(fields, sizes.n_layers), _read_feed_forwards(fields, sizes.n_layers)
    mixture, n_shared = _read_mixture(fields) if any(is_sparse) else (None, 0)
    limits = [
        _read_limits(fields, name, sizes.n_layers, n_drafts)
        for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
    ]
    found = LingConfig(
        architecture="BailingMoeV3ForCausalLM",
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        n_heads=sizes.n_heads,
        n_kv_heads=1,
        head_dim=nope + rope,
        eps=fields.float32("rms_norm_eps", 1e-6),
        act="silu",
        max_position=sizes.max_position,
        is_tied=fields.flag("tie_word_embeddings", default=False),
        windows=(0,) * sizes.n_layers,
        ropes={"rope": _read_rotation(fields, rope, sizes.max_position)},
        layer_ropes=tuple(None if linear else "rope" for linear in is_linear),
        attention_scale=default_scale(nope + rope),
        q_rank=read_size_or_0(fields, "q_lora_rank"),
        rank=rank,
        nope=nope,
        rope=rope,
        v_dim=v_dim,
        is_interleaved=True,
        delta=_read_delta(fields, sizes.n_heads, sizes.head_dim),
        is_linear=is_linear,
        is_sparse=is_sparse,
        mixture=mixture,
        n_shared=n_shared,
        limits=tuple(zip(*limits, strict=True)),
        n_mtp_modules=n_drafts,
    )
    for name in _OF_MIXTURES:  # nothing reads these where every layer is dense
        fields.raw(name)
    fields.finish()
    return found


def _read_kinds(fields: ConfigFields, n_layers: int) -> tuple[bool, ...]:
    size = fields.size("layer_group_size", 6)
    kinds = fields.words("layer_types", n_layers)
    for kind in kinds or ():
        if kind not in _KINDS:
            raise fields.refused("layer_types", kind, f"the known types are {' and '.join(_KINDS)}")
    if kinds is None and n_layers % size:
        # Some take a last group that is not whole for latent attention, others for delta attention.
        raise fields.broken("layer_group_size", size, f"a divisor of num_hidden_layers {n_layers}, or layer_types,")
    return tuple(kind == _KINDS[0] for kind in kinds) if kinds else tuple((i + 1) % size != 0 for i in range(n_layers))


def _read_feed_forwards(fields: ConfigFields, n_layers: int) -> tuple[bool, ...]:
    kinds = fields.words("mlp_layer_types", n_layers)
    for kind in kinds or ():
        if kind not in _FEED_FORWARDS:
            raise fields.refused("mlp_layer_types", kind, f"the known types are {' and '.join(_FEED_FORWARDS)}")
    n_dense = fields.raw("first_k_dense_replace")
    n_dense = 2 if n_dense is None else n_dense
    if isinstance(n_dense, bool) or not isinstance(n_dense, int) or n_dense < 0:
        raise fields.broken("first_k_dense_replace", n_dense, "a number of layers")
    return tuple(kind == "sparse" for kind in kinds) if kinds else tuple(i >= n_dense for i in range(n_layers))


def _read_mixture(fields: ConfigFields) -> tuple[MixtureConfig, int]:
    routing = read_experts(fields, "num_experts", "num_experts_per_tok", 512, 8)
    n_groups, n_kept = fields.size("n_group", 8), fields.size("topk_group", 4)
    renormalises = fields.flag("norm_topk_prob", default=True)
    scale = fields.float32("routed_scaling_factor", 2.5)
    # A group's score is the sum of its two best.
    routing = grouped(fields, routing, n_groups, n_kept, 2, "sigmoid", renormalises=renormalises, scale=scale)
    width = fields.size("moe_intermediate_size", 768)
    if fields.size("moe_shared_expert_intermediate_size", width) != width:
        name = "moe_shared_expert_intermediate_size"
        raise fields.refused(name, fields.raw(name), f"a shared expert is as wide as the others, {width}")
    mixture = MixtureConfig(routing=routing, intermediate_size=width, act="silu")
    return mixture, fields.size("num_shared_experts", 1)


def _read_limits(fields: ConfigFields, name: str, n_layers: int, n_drafts: int) -> list[float]:
    """Return the limit of each layer, and of those that draft; 0 is none, as for those behind a list's end."""
    given, n = fields.raw(name), n_layers + n_drafts
    if given is None:
        return [0.0] * n
    values = [0.0 if v is None else v for v in given] if isinstance(given, list | tuple) else []
    fits = n_layers <= len(values) <= n
    if not fits or any(isinstance(v, bool) or not isinstance(v, int | float) or not 0 <= v < 1e38 for v in values):
        raise fields.broken(name, given, f"a list of {n_layers} numbers >= 0, one a layer,")
    return [float(v) for v in values] + [0.0] * (n - len(values))


def _read_rotation(fields: ConfigFields, dim: int, max_position: int) -> RopeParameters:
    theta = fields.positive("rope_theta", 6e6)
    for name in ("rope_parameters", "rope_scaling"):
        given = fields.raw(name)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise fields.broken(name, given, "an object")
        params = {"rope_theta": theta, **given, "partial_rotary_factor": 1.0}
        found = parse_rope(params, head_dim=dim, max_position=max_position, default_theta=theta)
        if found.kind != "default":
            raise fields.refused(name, given, "no Ling 3 stretches its rotation")
        return found
    return parse_rope({"rope_theta": theta}, head_dim=dim, max_position=max_position, default_theta=theta)


def _read_delta(fields: ConfigFields, n_heads: int, head_dim: int) -> DeltaAttention:
    heads, dim = fields.size("linear_num_heads", n_heads), fields.size("linear_head_dim", head_dim)
    width = fields.size("short_conv_kernel_size", 4)
    if fields.size("linear_conv_kernel_dim", width) != width:
        value = fields.raw("linear_conv_kernel_dim")
        raise fields.broken("linear_conv_kernel_dim", value, f"short_conv_kernel_size {width}")
    bound = fields.real("kda_lower_bound", -5.0)
    if not fields.flag("kda_safe_gate", default=True):
        return DeltaAttention(heads, dim, width, 0.0, has_full_gate=True)
    if bound >= 0.0:
        raise fields.broken("kda_lower_bound", bound, "a number below 0")
    return DeltaAttention(heads, dim, width, bound, has_full_gate=True)
