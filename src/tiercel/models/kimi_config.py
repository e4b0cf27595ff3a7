"""Reads the configs of Kimi Linear and of Kimi K3's text part, which are one family: what a config leaves out is off.

Two dialects name the same fields: the checkpoints' (`linear_attn_config`, with layers counted from 1) and
transformers' (`layer_types`). Either is read; one that says a thing twice must say it alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercel.models.decoder import default_scale, read_sizes
from tiercel.models.deepseek import LatentConfig, grouped, read_latent_sizes, read_size_or_0
from tiercel.models.fields import ConfigFields, in_one_dialect
from tiercel.models.moe import read_experts
from tiercel.models.mtp import read_n_modules
from tiercel.ops.program import StateLayer, Value
from tiercel.ops.recorder import Recorder
from tiercel.ops.routing import Routing

# transformers' names, and the checkpoints' for the same.
_ALIASES: Mapping[str, str] = {
    "model_max_length": "max_position_embeddings",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
_KINDS = ("linear_attention", "full_attention")
_FEED_FORWARDS = ("dense", "sparse")
# Positions are not rotated, so what describes a rotation is not read; a head's width is that of its two parts.
_UNUSED = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "head_dim",
    "output_router_logits",
    "aux_loss_alpha",
    "seq_aux",
)


CONVOLVED = ("q", "k", "v")  # the projections that a delta layer convolves


@dataclass(frozen=True, slots=True)
class DeltaAttention:
    """Sizes of Kimi Delta Attention. `lower_bound` 0: decays have none. Without `has_full_gate` its matrix has two
    factors.
    """

    heads: int
    head_dim: int
    conv_width: int
    lower_bound: float
    has_full_gate: bool

    @property
    def width(self) -> int:
        """Columns of all heads' queries, keys or values."""
        return self.heads * self.head_dim

    def state(self, index: int) -> StateLayer:
        """Return what layer `index` keeps of a sequence."""
        sizes = (self.heads, self.head_dim, self.head_dim)
        return StateLayer(index, "delta_rule", 3 * self.width, self.conv_width, *sizes)

    def record(
        self,
        rec: Recorder,
        prefix: str,
        qkv: Sequence[Value],
        parts: tuple[Value, Value, Value],
        *,
        layer: int,
        eps: float,
    ) -> Value:
        """Write what lies between a layer's projections and its output's: `parts` are decays, betas and gates."""
        decays, betas, gates = parts
        mixed = rec.short_conv(qkv, [f"{prefix}.{name}_conv1d.weight" for name in CONVOLVED], layer=layer, act="silu")
        y = rec.delta_rule(
            mixed,
            decays,
            betas,
            a_log=f"{prefix}.A_log",
            dt_bias=f"{prefix}.dt_bias",
            layer=layer,
            key=(self.heads, self.head_dim),
            value=(self.heads, self.head_dim),
            lower_bound=self.lower_bound,
        )
        return rec.gated_norm(y, gates, f"{prefix}.o_norm.weight", heads=self.heads, act="sigmoid", eps=eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiMixture:
    """Experts, and `n_shared` that every token goes through. `latent` above 0: experts see that many columns only, and
    what they return is normed, with `has_norm`, before it is widened again.
    """

    routing: Routing
    intermediate_size: int
    n_shared: int
    latent: int
    has_norm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiConfig(LatentConfig):
    """What Kimi's models add. `is_linear[i]` and `is_sparse[i]` say what layer i's two parts are.

    `act_params` are the activation's. `residual_size` above 0: that many layers share a row of the residual bank.
    """

    delta: DeltaAttention
    is_linear: tuple[bool, ...]
    is_sparse: tuple[bool, ...]
    mixture: KimiMixture | None
    has_output_gate: bool
    act_params: tuple[float, ...]
    residual_size: int


def read_kimi(config: Mapping[str, Any], architecture: str) -> KimiConfig:
    """Read a text config.

    Raises:
        UnsupportedModel: a field asks for arithmetic that is not implemented.
        ModelFileError: a field is missing or makes no sense.
    """
    fields = ConfigFields(in_one_dialect(config, _ALIASES))
    for name in _UNUSED:
        fields.raw(name)
    fields.only("mla_use_nope", True, why="attention has no positions")
    fields.only("attention_bias", False, why="no Kimi has biases in its attention")
    fields.only("mlp_bias", False, why="no Kimi has biases in its feed-forward")
    fields.only("pretraining_tp", 1, why="weights split for training-time tensor parallelism")
    sizes = read_sizes(fields, default_head_dim=fields.size("qk_rope_head_dim", 64))
    nope, rope, rank, v_dim = read_latent_sizes(fields)
    is_linear, delta = _read_layers(fields, sizes.n_layers)
    is_sparse = _read_feed_forwards(fields, sizes.n_layers)
    act, act_params = _read_act(fields)
    found = KimiConfig(
        architecture=architecture,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        n_heads=sizes.n_heads,
        n_kv_heads=1,
        head_dim=nope + rope,
        eps=fields.float32("rms_norm_eps", 1e-5),
        act=act,
        max_position=sizes.max_position,
        is_tied=fields.flag("tie_word_embeddings", default=False),
        windows=(0,) * sizes.n_layers,
        ropes={},
        layer_ropes=(None,) * sizes.n_layers,
        attention_scale=default_scale(nope + rope),
        q_rank=read_size_or_0(fields, "q_lora_rank"),
        rank=rank,
        nope=nope,
        rope=rope,
        v_dim=v_dim,
        is_interleaved=False,
        delta=delta,
        is_linear=is_linear,
        is_sparse=is_sparse,
        mixture=_read_mixture(fields, is_needed=any(is_sparse)),
        has_output_gate=fields.flag("mla_use_output_gate", default=False),
        act_params=act_params,
        residual_size=read_size_or_0(fields, "attn_res_block_size"),
        n_mtp_modules=read_n_modules(fields, "num_nextn_predict_layers", 0),
    )
    fields.finish()
    return found


def _read_layers(fields: ConfigFields, n_layers: int) -> tuple[tuple[bool, ...], DeltaAttention]:
    given = fields.raw("linear_attn_config")
    if given is not None and not isinstance(given, Mapping):
        raise fields.broken("linear_attn_config", given, "an object")
    kinds = fields.words("layer_types", n_layers)
    for kind in kinds or ():
        if kind not in _KINDS:
            raise fields.refused("layer_types", kind, f"the known types are {' and '.join(_KINDS)}")
    if given is None:
        heads, dim = fields.size("linear_num_heads", 32), fields.size("linear_head_dim", 128)
        delta = DeltaAttention(heads, dim, fields.size("linear_conv_kernel_dim", 4), 0.0, has_full_gate=False)
        usual = (_KINDS[bool(i) and i % 4 == 0] for i in range(n_layers))
        return tuple(kind == _KINDS[0] for kind in kinds or usual), delta
    inner = ConfigFields(given, "config: linear_attn_config")
    is_linear = _covered(inner, n_layers)
    if kinds is not None and is_linear != tuple(kind == _KINDS[0] for kind in kinds):
        raise fields.broken("layer_types", kinds, "the layers that linear_attn_config names, or no list at all,")
    bound = 0.0
    if inner.has("gate_lower_bound"):
        bound = inner.real("gate_lower_bound")
        if bound >= 0.0:
            raise inner.broken("gate_lower_bound", bound, "a number below 0")
    heads, dim, width = (inner.size(name) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
    for name, own, found in (("linear_num_heads", "num_heads", heads), ("linear_head_dim", "head_dim", dim)):
        if fields.size(name, found) != found:
            raise fields.broken(name, fields.raw(name), f"linear_attn_config.{own} {found}")
    if fields.size("linear_conv_kernel_dim", width) != width:
        raise fields.broken(
            "linear_conv_kernel_dim",
            fields.raw("linear_conv_kernel_dim"),
            f"linear_attn_config.short_conv_kernel_size {width}",
        )
    has_full_gate = inner.flag("use_full_rank_gate", default=False)
    inner.finish()
    return is_linear, DeltaAttention(heads, dim, width, bound, has_full_gate)


def _covered(inner: ConfigFields, n_layers: int) -> tuple[bool, ...]:
    """Return which layers are linear, of two lists that count from 1 and must name each layer once."""
    linear, full = inner.indices("kda_layers"), inner.indices("full_attn_layers")
    twice, wanted = sorted(linear & full), frozenset(range(1, n_layers + 1))
    missing, beyond = sorted(wanted - linear - full), sorted((linear | full) - wanted)
    for layers, fault in ((twice, "in both lists"), (missing, "in neither list"), (beyond, "no layer")):
        if layers:
            needed = (
                f"with full_attn_layers {sorted(full)} each of layers 1 to {n_layers} once ({layers[0]} is {fault})"
            )
            raise inner.broken("kda_layers", sorted(linear), needed)
    return tuple(i in linear for i in range(1, n_layers + 1))


def _read_feed_forwards(fields: ConfigFields, n_layers: int) -> tuple[bool, ...]:
    kinds = fields.words("mlp_layer_types", n_layers)
    for kind in kinds or ():
        if kind not in _FEED_FORWARDS:
            raise fields.refused("mlp_layer_types", kind, f"the known types are {' and '.join(_FEED_FORWARDS)}")
    n_dense, freq = fields.raw("first_k_dense_replace"), fields.size("moe_layer_freq", 1)
    n_dense = 1 if n_dense is None else n_dense
    if isinstance(n_dense, bool) or not isinstance(n_dense, int) or n_dense < 0:
        raise fields.broken("first_k_dense_replace", n_dense, "a number of layers")
    if kinds is not None:
        return tuple(kind == "sparse" for kind in kinds)
    return tuple(i >= n_dense and i % freq == 0 for i in range(n_layers))


def _read_act(fields: ConfigFields) -> tuple[str, tuple[float, ...]]:
    fields.only("hidden_act", "silu", "situ", why="no Kimi has another activation")
    is_situ = fields.raw("hidden_act") == "situ"
    if not is_situ:
        for name in ("activation_situ_beta", "activation_situ_linear_beta"):
            fields.raw(name)
        return "silu", ()
    linear_beta = 0.0
    if fields.has("activation_situ_linear_beta"):
        linear_beta = fields.float32("activation_situ_linear_beta")
    fields.raw("activation_situ_linear_beta")
    return "situ", (fields.float32("activation_situ_beta"), linear_beta)


def _read_mixture(fields: ConfigFields, *, is_needed: bool) -> KimiMixture | None:
    latent, has_norm = (
        read_size_or_0(fields, "routed_expert_hidden_size"),
        fields.flag("latent_moe_use_norm", default=False),
    )
    fields.only("moe_router_activation_func", "sigmoid", why="the router's scores are sigmoids")
    fields.only("topk_method", "noaux_tc", why="the choice is corrected by a bias")
    fields.only("use_grouped_topk", True, why="the choice is made of groups")
    n_groups, n_kept = fields.size("num_expert_group", 1), fields.size("topk_group", 1)
    n_shared, width = read_size_or_0(fields, "num_shared_experts"), read_size_or_0(fields, "moe_intermediate_size")
    renormalises = fields.flag("moe_renormalize", default=True)
    scale = fields.float32("routed_scaling_factor", 1.0)
    if not is_needed:
        for name in ("num_experts", "num_experts_per_token"):
            fields.raw(name)
        return None
    if not width:
        raise fields.broken("moe_intermediate_size", None, "a positive integer")
    usual: tuple[object, object] = (256, 8)
    routing = read_experts(fields, "num_experts", "num_experts_per_token", *usual)
    # A group's score is the sum of its two best.
    routing = grouped(fields, routing, n_groups, n_kept, 2, "sigmoid", renormalises=renormalises, scale=scale)
    return KimiMixture(routing=routing, intermediate_size=width, n_shared=n_shared, latent=latent, has_norm=has_norm)
