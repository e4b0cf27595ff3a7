"""Qwen3-Next: Qwen3.5-MoE's arithmetic with other projections in the linear layers, and perhaps dense layers.

`in_proj_qkvz` has for each key head its query, its key, its value heads' values and their gates; `in_proj_ba` has for
each key head its value heads' betas and decays. Source: Qwen3-Next's config and transformers' class.
"""

from collections.abc import Mapping
from typing import Any, Self

from msgspec.structs import replace

from tiercel.models.fields import ConfigFields
from tiercel.models.moe import MixtureConfig, read_experts
from tiercel.models.qwen3_5 import read_qwen3_5
from tiercel.models.qwen3_5_moe import Qwen3_5Moe
from tiercel.ops.program import Value
from tiercel.ops.recorder import Recorder


class Qwen3Next(Qwen3_5Moe):
    """Qwen3-Next."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Qwen3-Next config; see `Model.from_config`."""
        fields = ConfigFields(config)
        routing = read_experts(fields, "num_experts", "num_experts_per_tok", 512, 10)
        routing = replace(routing, renormalises=fields.flag("norm_topk_prob", default=True))
        width, shared = fields.size("moe_intermediate_size", 512), fields.size("shared_expert_intermediate_size", 512)
        step, dense = fields.size("decoder_sparse_step", 1), fields.indices("mlp_only_layers")
        for name in ("router_aux_loss_coef", "output_router_logits"):
            fields.raw(name)  # of training
        found, linear, kinds = read_qwen3_5(fields, "Qwen3NextForCausalLM", default_intermediate=5632)
        fields.finish()
        mixture = MixtureConfig(routing=routing, intermediate_size=width, act=found.act)
        without = frozenset(i for i in range(found.n_layers) if (i + 1) % step or i in dense)
        return cls(found, linear, kinds, mixture, shared, without)

    def linear_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a linear layer's mixer."""
        n, hidden = self.linear, self.config.hidden_size
        others = {name: of for name, of in super().linear_weights().items() if not name.startswith("in_proj")}
        return {
            "in_proj_qkvz.weight": (n.channels + n.value_width, hidden),
            "in_proj_ba.weight": (2 * n.value_heads, hidden),
            **others,
        }

    def projections(self, rec: Recorder, prefix: str, h: Value) -> tuple[list[Value], Value, Value, Value]:
        """Write a linear layer's projections, each from its rows of every key head's."""
        n = self.linear
        each = n.value_heads // n.key_heads
        parts, start = [], 0
        for width in (n.key_dim, n.key_dim, each * n.value_dim, each * n.value_dim):
            period = 2 * n.key_dim + 2 * each * n.value_dim
            parts.append(rec.linear(h, f"{prefix}.in_proj_qkvz.weight", rows=(period, start, width)))
            start += width
        b, a = (rec.linear(h, f"{prefix}.in_proj_ba.weight", rows=(2 * each, first, each)) for first in (0, each))
        return parts[:3], parts[3], a, b
