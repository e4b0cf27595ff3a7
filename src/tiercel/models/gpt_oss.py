"""gpt-oss: every other layer attends within a window, each head has a sink, each layer is a mixture of experts.

A sink is a logit of its own in a head's softmax, whose weight goes to no value. Router and experts have biases; the
chosen experts' weights are the softmax of their logits; an expert's gated product is clamped before its sigmoid
(`ops.activations`, swiglu_clamp). The rotation is stretched by YaRN. Source: OpenAI 2025 (arXiv:2508.10925) and the
released config; names as transformers has them, but an expert's tensors are its own (`loaders.interleaved_experts`).
"""

from collections.abc import Mapping
from typing import Any, Self

from tiercel.models.decoder import (
    Decoder,
    DecoderConfig,
    default_scale,
    read_sizes,
    read_windows,
)
from tiercel.models.fields import ConfigFields
from tiercel.models.moe import MixtureConfig, read_experts
from tiercel.models.rope import parse_rope, read_rope
from tiercel.ops.program import Value
from tiercel.ops.recorder import ExpertNames, Recorder

_ALPHA, _LIMIT = 1.702, 7.0
_USUAL_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_USUAL_THETA = 150000.0


class GptOss(Decoder):
    """gpt-oss."""

    def __init__(self, config: DecoderConfig, mixture: MixtureConfig) -> None:
        super().__init__(config)
        self.mixture = mixture

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a gpt-oss config; see `Model.from_config`."""
        fields = ConfigFields(config)
        routing = read_experts(fields, "num_experts", "num_experts_per_tok", 128, 4)
        if fields.size("experts_per_token", routing.top_k) != routing.top_k:  # released configs say it twice
            raise fields.broken("experts_per_token", fields.raw("experts_per_token"), f"{routing.top_k}")
        fields.only("hidden_act", "silu", "swish", why="gpt-oss has an activation of its own and another name for it")
        for name in ("router_aux_loss_coef", "output_router_logits", "initial_context_length"):
            fields.raw(name)  # of training
        sizes = read_sizes(fields, default_head_dim=64)
        has_window = fields.has("sliding_window") or "sliding_window" not in config
        window = fields.size("sliding_window", 128) if has_window else fields.raw("sliding_window")
        bias = fields.flag("attention_bias", default=True)
        rope = {"head_dim": sizes.head_dim, "max_position": sizes.max_position}
        if fields.has("rope_parameters") or fields.has("rope_scaling"):
            table = read_rope(fields, **rope, default_theta=_USUAL_THETA)
        else:
            theta = fields.positive("rope_theta", _USUAL_THETA)
            table = parse_rope({**_USUAL_ROPE, "rope_theta": theta}, **rope, default_theta=theta)
        act_params = (fields.float32("swiglu_alpha", _ALPHA), fields.float32("swiglu_limit", _LIMIT))
        result = DecoderConfig(
            architecture="GptOssForCausalLM",
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            n_heads=sizes.n_heads,
            n_kv_heads=sizes.n_kv_heads,
            head_dim=sizes.head_dim,
            eps=fields.float32("rms_norm_eps", 1e-5),
            act="swiglu_clamp",
            max_position=sizes.max_position,
            is_tied=fields.flag("tie_word_embeddings", default=False),
            windows=read_windows(fields, sizes.n_layers, window, [i % 2 == 0 for i in range(sizes.n_layers)]),
            ropes={"rope": table},
            layer_ropes=("rope",) * sizes.n_layers,
            attention_scale=default_scale(sizes.head_dim),
            has_qkv_bias=bias,
            has_o_bias=bias,
            has_sinks=True,
        )
        fields.finish()
        mixture = MixtureConfig(
            routing=routing, intermediate_size=sizes.intermediate_size, act=result.act, act_params=act_params
        )
        return cls(result, mixture)

    def layer_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one layer's weights; names follow `model.layers.i.`."""
        shapes = {name: of for name, of in super().layer_weights().items() if not name.startswith("mlp.")}
        for name, of in self.mixture.weights(self.config.hidden_size).items():
            full = "mlp.router.weight" if name == "gate.weight" else f"mlp.{name}"
            shapes |= {full: of, full.replace(".weight", ".bias"): of[:1]}
        return shapes

    def mlp(self, rec: Recorder, i: int, h: Value) -> Value:
        """Write layer i's mixture over its normalised input."""
        prefix, mixture = f"model.layers.{i}.mlp", self.mixture
        logits = rec.linear(h, f"{prefix}.router.weight", bias=f"{prefix}.router.bias")
        route = rec.router(logits, mixture.routing)
        matrices = [f"{prefix}.experts.{{}}.{p}_proj.weight" for p in ("gate", "up", "down")]
        names = (*matrices, *(name.replace(".weight", ".bias") for name in matrices))
        n = mixture.routing.n_experts
        return rec.experts(h, route, ExpertNames(*names), mixture.act, mixture.act_params, n_experts=n)
