"""EAGLE-3: one small layer that reads a token's embedding beside the target's streams, then beside its own state.

In the target's program g = fc [taps]. A draft row at position t has the token t + 1 and g, or what the pass before
gave: x = [input_norm(embedding) | hidden_norm(g)] goes to queries, keys and values of twice the width; the stream that
the layer adds to is g, or hidden_norm(g) with `norm_before_residual`. Logits are head(norm(stream)); the next pass gets
the stream, or its norm with `norm_output`. Source: Li et al. 2025 (arXiv:2503.01840); names as the published
checkpoints have them, `midlayer` and `layers.0` alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tiercel.models.drafters.config import WHERE, DraftLayers, read_layers
from tiercel.models.drafters.interface import DraftModel, HeadSpec, Shapes
from tiercel.models.drafters.layers import attention, feed_forward, joined, layer_prefix, rope_table
from tiercel.models.fields import ConfigFields
from tiercel.models.model import Model, RecordOptions, Tensor
from tiercel.ops.program import KvLayer, Program, Value
from tiercel.ops.recorder import ComputeDtype, Recorder

# Passes of a chain, each less often right than the one before.
_MAX_DRAFTS = 16

# What some exporters write of the one arrangement that is implemented.
_FIXED: Mapping[str, tuple[object, str]] = {
    "sliding_window": (None, "its layer attends to everything"),
    "use_input_layernorm_in_first_layer": (True, "the embedding is always normed"),
    "use_last_layernorm": (True, "the last state is always normed"),
    "use_mtp_layernorm": (False, "hidden_norm is the only norm of what is given"),
    "next_layer_regular": (True, "layers past the first are plain"),
    "parallel_draft_step": (1, "one draft a pass"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """What EAGLE-3 adds to its layers. `embedding` and `head` are tensors' names, its own or the target's."""

    layers: DraftLayers
    norms_before_residual: bool
    norms_before_fc: bool
    norms_each_tap: bool
    norms_output: bool
    input_scale: float
    embedding: str
    head: str


class Eagle3(DraftModel):
    """EAGLE-3."""

    kind = "chain"

    def __init__(self, config: Eagle3Config) -> None:
        self.config = config

    @classmethod
    def from_config(cls, config: Mapping[str, Any], target: Model, names: frozenset[str]) -> Self:
        """Read a config in one form.

        Raises:
            ModelFileError, UnsupportedModel: as `read_layers`.
        """
        fields = ConfigFields(config, WHERE)
        for name, (value, why) in _FIXED.items():
            fields.only(name, value, why=why)
        n = target.n_tap_layers
        layers = read_layers(fields, target, names, own_base=True, usual_taps=[1, n // 2 - 1, n - 4])
        embedding, head = target.ends()
        has_head = layers.has_d2t or "lm_head.weight" in names
        has_own = {"embed_tokens.weight": "embed_tokens.weight" in names, "lm_head.weight": "lm_head.weight" in names}
        for name, is_there in has_own.items():
            if layers.hidden_size != layers.target_size and not is_there:
                needed = f"{layers.target_size}, or a tensor {name}: the target's is of that size,"
                raise fields.broken("hidden_size", layers.hidden_size, needed)
        found = Eagle3Config(
            layers=layers,
            norms_before_residual=fields.flag("norm_before_residual", default=False),
            norms_before_fc=fields.flag("norm_before_fc", default=False),
            norms_each_tap=fields.flag("fc_norm", default=False),
            norms_output=fields.flag("norm_output", default=False),
            input_scale=fields.positive("input_embedding_scale", 1.0),
            embedding="draft.embed_tokens.weight" if has_own["embed_tokens.weight"] else embedding,
            head="draft.lm_head.weight" if has_head else head,
        )
        if found.norms_before_fc and found.norms_each_tap:
            raise fields.broken("fc_norm", True, "false beside norm_before_fc")
        fields.finish()
        return cls(found)

    @property
    def name(self) -> str:
        """What it is called."""
        return "eagle3"

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose residual stream it reads."""
        return self.config.layers.taps

    @property
    def n_draft_max(self) -> int:
        """Passes of a chain."""
        return _MAX_DRAFTS

    def draft_weights(self) -> Shapes:
        """Return the shape of every tensor of its own."""
        c, n = self.config, self.config.layers
        shapes = self.context_weights() | {"draft.norm.weight": (n.hidden_size,)}
        for i in range(n.n_layers):
            width = n.hidden_size if i else 2 * n.hidden_size
            names = ("input_layernorm", "post_attention_layernorm", *(() if i else ("hidden_norm",)))
            own: Shapes = {f"{name}.weight": (n.hidden_size,) for name in names}
            own |= {f"self_attn.{name}": shape for name, shape in n.attention_weights(width).items()}
            own |= {f"mlp.{name}": shape for name, shape in n.mlp_weights().items()}
            shapes |= {f"{layer_prefix(i)}.{name}": shape for name, shape in own.items()}
        if c.embedding == "draft.embed_tokens.weight":
            shapes[c.embedding] = (n.vocab_size, n.hidden_size)
        if c.head == "draft.lm_head.weight":
            shapes[c.head] = (n.draft_vocab_size, n.hidden_size)
        return shapes

    def shared_weights(self) -> tuple[str, ...]:
        """Return the target's tensors that it reads."""
        names = dict.fromkeys((self.config.embedding, self.config.head))
        return tuple(name for name in names if not name.startswith("draft."))

    def context_weights(self) -> Shapes:
        """Return what makes one row of the taps."""
        c, n = self.config, self.config.layers
        width = len(n.taps) * n.target_size
        shapes: Shapes = {"draft.fc.weight": (n.hidden_size, width)}
        if c.norms_before_fc:
            shapes["draft.input_norm.weight"] = (width,)
        if c.norms_each_tap:
            shapes |= {f"draft.fc_norm.{i}.weight": (n.target_size,) for i in range(len(n.taps))}
        return shapes

    def kv_layers(self, first: int) -> tuple[KvLayer, ...]:
        """Return its layers of keys and values."""
        n = self.config.layers
        return tuple(KvLayer(first + i, n.n_kv_heads, n.head_dim, 0) for i in range(n.n_layers))

    def record_context(self, rec: Recorder, options: RecordOptions, taps: Sequence[Value], first: int) -> Value | None:
        """Write the row that a first pass reads of each token."""
        del options, first
        c, n = self.config, self.config.layers
        rows = list(taps)
        if c.norms_each_tap:
            rows = [rec.rms_norm(x, f"draft.fc_norm.{i}.weight", n.eps) for i, x in enumerate(rows)]
        x = joined(rec, rows)
        if c.norms_before_fc:
            x = rec.rms_norm(x, "draft.input_norm.weight", n.eps)
        return rec.linear(x, "draft.fc.weight")

    def record_draft(
        self,
        tensors: Mapping[str, Tensor],
        *,
        first: int,
        module: int = 0,
        compute_dtype: ComputeDtype = ComputeDtype.AUTO,
        max_len_tokens: int | None = None,
        norm_weights_include_one: bool = False,
    ) -> Program:
        """Record one pass; `hidden` is what the next is given."""
        del norm_weights_include_one, module  # the only one
        c, n = self.config, self.config.layers
        rec = self.recorder(tensors, compute_dtype)
        table = rope_table(rec, n, n.rope.max_len_tokens if max_len_tokens is None else max_len_tokens)
        token, x = rec.embed(c.embedding, scale=c.input_scale), rec.given(n.hidden_size)
        for i in range(n.n_layers):
            h = rec.rms_norm(token if i == 0 else x, f"{layer_prefix(i)}.input_layernorm.weight", n.eps)
            if i == 0:
                normed = rec.rms_norm(x, f"{layer_prefix(0)}.hidden_norm.weight", n.eps)
                h, x = rec.join(h, normed), normed if c.norms_before_residual else x
            y = attention(rec, n, i, h, table, layer=first + i, window=0, sees_block=False)
            x = rec.add(x, y)
            h = rec.rms_norm(x, f"{layer_prefix(i)}.post_attention_layernorm.weight", n.eps)
            x = rec.add(x, feed_forward(rec, n, i, h))
        if c.norms_output:
            rows = rec.keep_hidden(rec.rms_norm(x, "draft.norm.weight", n.eps))
        else:
            rows = rec.rms_norm(rec.keep_hidden(x), "draft.norm.weight", n.eps)
        return rec.finish(rec.linear(rows, c.head))

    def head(self) -> HeadSpec:
        """Return a plain head."""
        n = self.config.layers
        return HeadSpec(kind="plain", n_vocab=n.draft_vocab_size, d2t="draft.d2t" if n.has_d2t else None)
