"""Qwen3-MoE: Qwen3 whose feed-forwards are mixtures of experts, in every `decoder_sparse_step`-th layer.

Layers in `mlp_only_layers`, and those between, are dense. Source: Yang et al. 2025 (arXiv:2505.09388), section 2;
weights' names as transformers has them.
"""

from collections.abc import Mapping
from typing import Any, Self

from msgspec.structs import replace

from tiercel.models.decoder import Decoder, DecoderConfig
from tiercel.models.fields import ConfigFields
from tiercel.models.moe import MixtureConfig, read_experts
from tiercel.models.qwen import read_qwen
from tiercel.ops.program import Value
from tiercel.ops.recorder import Recorder


class Qwen3Moe(Decoder):
    """Qwen3-MoE. `sparse_layers` are those with experts."""

    def __init__(self, config: DecoderConfig, mixture: MixtureConfig, sparse_layers: frozenset[int]) -> None:
        super().__init__(config)
        self.mixture = mixture
        self.sparse_layers = sparse_layers

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Qwen3-MoE config; see `Model.from_config`."""
        fields = ConfigFields(config)
        bias = fields.flag("attention_bias", default=False)
        routing = read_experts(fields, "num_experts", "num_experts_per_tok", 128, 8)
        routing = replace(routing, renormalises=fields.flag("norm_topk_prob", default=False))
        intermediate = fields.size("moe_intermediate_size", 768)
        step, dense = fields.size("decoder_sparse_step", 1), fields.indices("mlp_only_layers")
        for name in ("router_aux_loss_coef", "output_router_logits"):
            fields.raw(name)  # of training
        fields.only("shared_expert_intermediate_size", 0, why="Qwen3-MoE has no shared expert")
        found = read_qwen(fields, "Qwen3MoeForCausalLM", qkv_bias=bias, o_bias=bias, qk_norm=True)
        sparse = frozenset(i for i in range(found.n_layers) if (i + 1) % step == 0 and i not in dense)
        return cls(found, MixtureConfig(routing=routing, intermediate_size=intermediate, act=found.act), sparse)

    def weights_of_layer(self, i: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of layer i's weights."""
        shapes = self.layer_weights()
        if i not in self.sparse_layers:
            return shapes
        dense = {name: shape for name, shape in shapes.items() if not name.startswith("mlp.")}
        mixture = self.mixture.weights(self.config.hidden_size)
        return dense | {f"mlp.{name}": shape for name, shape in mixture.items()}

    def mlp(self, rec: Recorder, i: int, h: Value) -> Value:
        """Write layer i's feed-forward: a mixture, or dense."""
        if i not in self.sparse_layers:
            return super().mlp(rec, i, h)
        return self.mixture.record(rec, f"model.layers.{i}.mlp", h)
