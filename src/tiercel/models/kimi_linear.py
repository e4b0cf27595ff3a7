"""Kimi Linear: layers of Kimi Delta Attention, and some of latent attention without positions; mixtures of experts.

Delta attention: queries, keys and values each go through a short convolution; the delta rule's decays are one a key
channel; its outputs are normed and gated. Weights' names as the checkpoints have them. `kimi_k3` adds what K3 has over
this. Source: Kimi Team 2025 (arXiv:2510.26692); transformers' class.
"""

from collections.abc import Mapping
from typing import Any, Self

from msgspec.structs import replace

from tiercel.models.decoder import Decoder
from tiercel.models.deepseek import latent_attention, latent_projections, latent_weights
from tiercel.models.info import ModelInfo
from tiercel.models.kimi_config import CONVOLVED, KimiConfig, KimiMixture, read_kimi
from tiercel.models.model import RecordOptions
from tiercel.ops.program import KvLayer, Value
from tiercel.ops.recorder import ExpertNames, Recorder

Shapes = dict[str, tuple[int, ...]]
# Some checkpoints keep a head's decay behind as many of no use, up to whole runs of so many.
_PADDED_HEADS = 128


class KimiLinear(Decoder):
    """Kimi Linear."""

    config: KimiConfig

    def __init__(self, config: KimiConfig) -> None:
        super().__init__(config)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Kimi Linear config; see `Model.from_config`."""
        return cls(read_kimi(config, "KimiLinearForCausalLM"))

    @property
    def info(self) -> ModelInfo:
        """Facts about the model: a latent row a token of the full layers, states of the others."""
        c, kinds = self.config, self.config.is_linear
        kv = tuple(KvLayer(i, 1, c.rank + c.rope, 0, c.rank) for i, is_linear in enumerate(kinds) if not is_linear)
        states = tuple(c.delta.state(i) for i, is_linear in enumerate(kinds) if is_linear)
        return replace(super().info, kv_layers=kv, state_layers=states)

    def weights_of_layer(self, i: int) -> Shapes:
        """Return the shapes of layer i's weights."""
        c = self.config
        shapes: Shapes = {f"{name}_layernorm.weight": (c.hidden_size,) for name in ("input", "post_attention")}
        shapes |= self.delta_weights() if c.is_linear[i] else self.latent_weights()
        return shapes | self.feed_forward_weights(c.mixture if c.is_sparse[i] else None)

    def delta_weights(self) -> Shapes:
        """Return the shapes of a layer's delta attention; names follow `model.layers.i.`."""
        d, hidden = self.config.delta, self.config.hidden_size
        shapes: Shapes = {f"{name}_proj.weight": (d.width, hidden) for name in CONVOLVED}
        shapes |= {f"{name}_conv1d.weight": (d.width, 1, d.conv_width) for name in CONVOLVED}
        gate: Shapes = {"g_a_proj.weight": (d.head_dim, hidden), "g_b_proj.weight": (d.width, d.head_dim)}
        shapes |= {"g_proj.weight": (d.width, hidden)} if d.has_full_gate else gate
        shapes |= {
            "f_a_proj.weight": (d.head_dim, hidden),
            "f_b_proj.weight": (d.width, d.head_dim),
            "b_proj.weight": (d.heads, hidden),
            "A_log": (d.heads,),
            "dt_bias": (d.width,),
            "o_norm.weight": (d.head_dim,),
            "o_proj.weight": (hidden, d.width),
        }
        return {f"self_attn.{name}": shape for name, shape in shapes.items()}

    def latent_weights(self) -> Shapes:
        """Return the shapes of a layer's latent attention; names follow `model.layers.i.`."""
        c = self.config
        gate: Shapes = {"self_attn.g_proj.weight": (c.n_heads * c.v_dim, c.hidden_size)} if c.has_output_gate else {}
        return latent_weights(c) | gate

    def feed_forward_weights(self, mixture: KimiMixture | None) -> Shapes:
        """Return the shapes of a feed-forward; names follow `model.layers.i.`."""
        c = self.config
        if mixture is None:
            return _gated_weights("mlp", c.intermediate_size, c.hidden_size)
        n, f, width = mixture.routing.n_experts, mixture.intermediate_size, mixture.latent or c.hidden_size
        shapes: Shapes = {"gate.weight": (n, c.hidden_size), "gate.e_score_correction_bias": (n,)}
        for e in range(n):
            shapes |= {f"experts.{e}.w1.weight": (f, width), f"experts.{e}.w3.weight": (f, width)}
            shapes[f"experts.{e}.w2.weight"] = (width, f)
        if mixture.latent:
            shapes["routed_expert_down_proj.weight"] = (width, c.hidden_size)
            shapes["routed_expert_up_proj.weight"] = (c.hidden_size, width)
            if mixture.has_norm:
                shapes["routed_expert_norm.weight"] = (width,)
        if mixture.n_shared:
            shapes |= _gated_weights("shared_experts", mixture.n_shared * f, c.hidden_size)
        return {f"block_sparse_moe.{name}": shape for name, shape in shapes.items()}

    def other_shapes(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return what else a weight's shape may be: decays are kept with axes of one, or behind others of no use."""
        heads = self.config.delta.heads
        padded = -(-heads // _PADDED_HEADS) * _PADDED_HEADS
        return ((1, 1, heads, 1), (padded,)) if name.endswith(".A_log") else ()

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor may be left unread: besides a decoder's, layers past the last, which draft tokens."""
        parts = name.removeprefix(f"{self.prefix}.layers.").split(".")
        n = self.config.n_layers
        is_draft = parts[0].isdecimal() and n <= int(parts[0]) < n + max(1, self.config.n_mtp_modules)
        return super().may_ignore(name) or is_draft

    def attention(self, rec: Recorder, options: RecordOptions, i: int, h: Value, tables: Mapping[str, Value]) -> Value:
        """Write layer i's mixer over its normalised input, for the rows that the layer passes on."""
        del options, tables
        if self.config.is_linear[i]:
            return self._delta(rec, i, h)
        prefix = f"{self.prefix}.layers.{i}.self_attn"
        q, latents = latent_projections(rec, self.config, prefix, h)
        return self.attend(rec, prefix, self.kept_rows(rec, i, h), (self.kept_rows(rec, i, q), latents), layer=i)

    def attend(self, rec: Recorder, prefix: str, h: Value, made: tuple[Value, Value], *, layer: int) -> Value:
        """Write latent attention and what follows it; `h` has the rows of the queries."""
        y = latent_attention(rec, self.config, prefix, made, layer=layer, table=None)
        if self.config.has_output_gate:
            y = rec.sigmoid_gate(y, rec.linear(h, f"{prefix}.g_proj.weight"))
        return rec.linear(y, f"{prefix}.o_proj.weight")

    def _delta(self, rec: Recorder, i: int, h: Value) -> Value:
        d, prefix = self.config.delta, f"{self.prefix}.layers.{i}.self_attn"
        qkv = [rec.linear(h, f"{prefix}.{name}_proj.weight") for name in CONVOLVED]
        decays = rec.linear(rec.linear(h, f"{prefix}.f_a_proj.weight"), f"{prefix}.f_b_proj.weight")
        betas = rec.linear(h, f"{prefix}.b_proj.weight")
        if d.has_full_gate:
            gates = rec.linear(h, f"{prefix}.g_proj.weight")
        else:
            gates = rec.linear(rec.linear(h, f"{prefix}.g_a_proj.weight"), f"{prefix}.g_b_proj.weight")
        y = d.record(rec, prefix, qkv, (decays, betas, gates), layer=i, eps=self.config.eps)
        return rec.linear(self.kept_rows(rec, i, y), f"{prefix}.o_proj.weight")

    def mlp(self, rec: Recorder, i: int, h: Value) -> Value:
        """Write layer i's feed-forward over its normalised input."""
        prefix, mixture = f"{self.prefix}.layers.{i}", self.config.mixture
        if mixture is None or not self.config.is_sparse[i]:
            return self.gated(rec, f"{prefix}.mlp", h)
        return self.sparse(rec, f"{prefix}.block_sparse_moe", mixture, h)

    def sparse(self, rec: Recorder, prefix: str, mixture: KimiMixture, h: Value) -> Value:
        """Write a mixture, and its shared experts, over the normalised input."""
        c = self.config
        logits = rec.linear(h, f"{prefix}.gate.weight")
        route = rec.router(logits, mixture.routing, bias=f"{prefix}.gate.e_score_correction_bias")
        x = rec.linear(h, f"{prefix}.routed_expert_down_proj.weight") if mixture.latent else h
        names = ExpertNames(*(f"{prefix}.experts.{{}}.{name}.weight" for name in ("w1", "w3", "w2")))
        y = rec.experts(x, route, names, c.act, c.act_params, n_experts=mixture.routing.n_experts)
        if mixture.latent:
            # Of the experts' whole sum: a norm of parts would be another.
            y = rec.rms_norm(y, f"{prefix}.routed_expert_norm.weight", c.eps) if mixture.has_norm else y
            y = rec.linear(y, f"{prefix}.routed_expert_up_proj.weight")
        return rec.add(y, self.gated(rec, f"{prefix}.shared_experts", h)) if mixture.n_shared else y

    def gated(self, rec: Recorder, prefix: str, h: Value) -> Value:
        """Write a dense feed-forward."""
        gate, up = (rec.linear(h, f"{prefix}.{name}_proj.weight") for name in ("gate", "up"))
        hidden = rec.gated(gate, up, self.config.act, self.config.act_params)
        return rec.linear(hidden, f"{prefix}.down_proj.weight")


def _gated_weights(prefix: str, width: int, hidden: int) -> Shapes:
    shapes: Shapes = {f"{prefix}.{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
    return shapes | {f"{prefix}.down_proj.weight": (hidden, width)}
