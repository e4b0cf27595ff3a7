"""DFlash2: DFlash whose layers' parts stand between two short convolutions over the block, and a candidate selector.

Of a part's normed input x: delta = kernel_projection x, coefficients for two convolutions, each of some taps over the
rows right before; part's output = conv(part(conv(x, side 0)), side 1). The selector then walks the block from the last
token on: of each row's best candidates it takes the one with the best logit plus edge from the token before, which is
sum_r predecessor[p, r] (projection h)_r successor[c, r]. Where we differ: candidates may be of a smaller vocabulary.
Source: z-lab's DFlash2 checkpoints and the engines that run them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from tiercel.models.drafters.block import BlockConfig, BlockDrafter, read_block
from tiercel.models.drafters.config import WHERE
from tiercel.models.drafters.interface import HeadSpec, Shapes
from tiercel.models.drafters.layers import feed_forward, layer_prefix
from tiercel.models.fields import ConfigFields
from tiercel.models.model import Model
from tiercel.ops.program import Value
from tiercel.ops.recorder import Recorder

_N_SIDES = 2
_MAX_CANDIDATES = 256


class DFlash2(BlockDrafter):
    """DFlash2. `n_taps` and `group` are the convolutions'; `rank` and `topk` the selector's."""

    architecture: ClassVar[str] = "dflash2"

    def __init__(self, config: BlockConfig, n_taps: int, group: int, rank: int, topk: int) -> None:
        super().__init__(config)
        self.n_taps, self.group, self.rank, self.topk = n_taps, group, rank, topk

    @classmethod
    def from_config(cls, config: Mapping[str, Any], target: Model, names: frozenset[str]) -> Self:
        """Read a config in one form; see `read_block`."""
        fields = ConfigFields(config, WHERE)
        found = read_block(fields, target, names, sliding_is_causal=False, anchor_default=False)
        if found.samples_from_anchor:
            raise fields.refused("sample_from_anchor", True, "DFlash2's masks stand for themselves")
        group, hidden = fields.size("conv_group_size", 16), found.layers.hidden_size
        if hidden % group:
            raise fields.broken("conv_group_size", group, f"a divisor of hidden_size {hidden}")
        n_taps = fields.size("conv_kernel_size", 2)
        if n_taps > found.n_rows:
            raise fields.broken("conv_kernel_size", n_taps, f"at most block_size {found.n_rows}")
        rank, topk = fields.size("selector_rank", 256), fields.size("selector_top_k", 16)
        most = min(_MAX_CANDIDATES, found.layers.draft_vocab_size)
        if topk > most:
            raise fields.broken("selector_top_k", topk, f"at most {most} candidates")
        fields.finish()
        return cls(found, n_taps, group, rank, topk)

    def layer_weights(self) -> Shapes:
        """Return the shapes of a layer's tensors, its convolutions' too."""
        hidden = self.config.layers.hidden_size
        shapes = super().layer_weights()
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"{name}.base_kernel"] = (_N_SIDES, self.n_taps, hidden)
            shapes[f"{name}.kernel_projection.weight"] = (_N_SIDES * self.n_taps * hidden // self.group, hidden)
        return shapes

    def head_weights(self) -> Shapes:
        """Return the shapes of the selector's tensors."""
        n = self.config.layers
        return {
            "draft.candidate_selector.predecessor_codebook": (n.vocab_size, self.rank),
            "draft.candidate_selector.successor_codebook": (n.draft_vocab_size, self.rank),
            "draft.candidate_selector.hidden_projection.weight": (self.rank, n.hidden_size),
        }

    def attention_part(self, rec: Recorder, i: int, x: Value, table: Value, layer: int) -> Value:
        """Write what layer i's attention adds to the stream."""
        h = rec.rms_norm(x, f"{layer_prefix(i)}.input_layernorm.weight", self.config.layers.eps)
        delta = self._coefficients(rec, i, h, "attention_conv")
        y = self.attend(rec, i, self._mixed(rec, i, h, delta, "attention_conv", 0), table, layer)
        return self._mixed(rec, i, y, delta, "attention_conv", 1)

    def mlp_part(self, rec: Recorder, i: int, x: Value) -> Value:
        """Write what layer i's feed-forward adds to the stream."""
        h = rec.rms_norm(x, f"{layer_prefix(i)}.post_attention_layernorm.weight", self.config.layers.eps)
        delta = self._coefficients(rec, i, h, "mlp_conv")
        y = feed_forward(rec, self.config.layers, i, self._mixed(rec, i, h, delta, "mlp_conv", 0))
        return self._mixed(rec, i, y, delta, "mlp_conv", 1)

    def _coefficients(self, rec: Recorder, i: int, h: Value, name: str) -> Value:
        return rec.linear(h, f"{layer_prefix(i)}.{name}.kernel_projection.weight")

    def _mixed(self, rec: Recorder, i: int, x: Value, delta: Value, name: str, side: int) -> Value:
        base = f"{layer_prefix(i)}.{name}.base_kernel"
        return rec.block_conv(x, base, delta, taps=self.n_taps, group=self.group, side=side)

    def head(self) -> HeadSpec:
        """Return the selector."""
        n, prefix = self.config.layers, "draft.candidate_selector"
        return HeadSpec(
            kind="selector",
            n_vocab=n.draft_vocab_size,
            rank=self.rank,
            topk=self.topk,
            weights={
                "predecessor": f"{prefix}.predecessor_codebook",
                "successor": f"{prefix}.successor_codebook",
                "projection": f"{prefix}.hidden_projection.weight",
            },
            d2t="draft.d2t" if n.has_d2t else None,
        )
