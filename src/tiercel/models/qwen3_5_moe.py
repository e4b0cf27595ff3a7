"""Qwen3.5-MoE: Qwen3.5 whose feed-forwards are mixtures of experts beside a shared expert that a gate weighs.

y = sum of the chosen experts + sigmoid(shared_expert_gate h) * shared_expert(h); the chosen experts' weights add up to
one. Source: Qwen3.5's configs and transformers' classes; names as transformers has them. Text only.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from msgspec.structs import replace

from tiercel.models.decoder import DecoderConfig
from tiercel.models.fields import ConfigFields
from tiercel.models.moe import MixtureConfig, read_experts
from tiercel.models.qwen3_5 import GatedDeltaNet, Qwen3_5, read_qwen3_5, read_text_config
from tiercel.ops.program import Value
from tiercel.ops.recorder import Recorder


class Qwen3_5Moe(Qwen3_5):
    """Qwen3.5-MoE, as text checkpoints have it. `shared_size` is the shared expert's width; `dense_layers` have no
    experts.
    """

    def __init__(
        self,
        config: DecoderConfig,
        linear: GatedDeltaNet,
        layer_types: tuple[str, ...],
        mixture: MixtureConfig,
        shared_size: int,
        dense_layers: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(config, linear, layer_types)
        self.dense_layers = dense_layers
        self.mixture = mixture
        self.shared_size = shared_size

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a text config; see `Model.from_config`."""
        return cls._read(config, "Qwen3_5MoeForCausalLM", is_tied=None)

    @classmethod
    def _read(cls, config: Mapping[str, Any], architecture: str, *, is_tied: bool | None) -> Self:
        fields = ConfigFields(config)
        routing = replace(read_experts(fields, "num_experts", "num_experts_per_tok", 256, 8), renormalises=True)
        width, shared = fields.size("moe_intermediate_size", 512), fields.size("shared_expert_intermediate_size", 512)
        fields.only("norm_topk_prob", True, why="the chosen experts' weights add up to one")
        fields.only("decoder_sparse_step", 1, why="every layer has experts")
        fields.only("mlp_only_layers", [], why="every layer has experts")
        for name in ("router_aux_loss_coef", "output_router_logits"):
            fields.raw(name)  # of training
        found, linear, kinds = read_qwen3_5(fields, architecture, is_tied=is_tied, default_intermediate=width)
        fields.finish()
        mixture = MixtureConfig(routing=routing, intermediate_size=width, act=found.act)
        return cls(found, linear, kinds, mixture, shared)

    def weights_of_layer(self, i: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of layer i's weights."""
        hidden, shared = self.config.hidden_size, self.shared_size
        dense = super().weights_of_layer(i)
        if i in self.dense_layers:
            return dense
        others = {name: shape for name, shape in dense.items() if not name.startswith("mlp.")}
        mixture = {f"mlp.{name}": shape for name, shape in self.mixture.weights(hidden).items()}
        return {
            **others,
            **mixture,
            "mlp.shared_expert.gate_proj.weight": (shared, hidden),
            "mlp.shared_expert.up_proj.weight": (shared, hidden),
            "mlp.shared_expert.down_proj.weight": (hidden, shared),
            "mlp.shared_expert_gate.weight": (1, hidden),
        }

    def mlp(self, rec: Recorder, i: int, h: Value) -> Value:
        """Write layer i's mixture and its shared expert, or its dense feed-forward."""
        if i in self.dense_layers:
            return super().mlp(rec, i, h)
        prefix = f"{self.layer_prefix(i)}.mlp"
        gate, up = (rec.linear(h, f"{prefix}.shared_expert.{part}_proj.weight") for part in ("gate", "up"))
        shared = rec.linear(rec.gated(gate, up, self.config.act), f"{prefix}.shared_expert.down_proj.weight")
        weight = rec.linear(h, f"{prefix}.shared_expert_gate.weight")
        shared = rec.gated_norm(shared, weight, None, heads=1, act="sigmoid")
        return rec.add(self.mixture.record(rec, prefix, h), shared)


class Qwen3_5MoeMultimodal(Qwen3_5Moe):
    """The text part of a checkpoint that sees: its vision weights are left unread."""

    prefix: ClassVar[str] = "model.language_model"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the config's text part; see `Model.from_config`."""
        text, tied = read_text_config(config)
        return cls._read(text, "Qwen3_5MoeForConditionalGeneration", is_tied=tied)

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor may be left unread: what only images need, too."""
        return super().may_ignore(name) or name.startswith("model.visual.")
