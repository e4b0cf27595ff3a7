"""DSpark for Kimi K3 as published: dense layers of latent attention over latent rows, and the head of `markov`.

Context, for each of the target's tokens: f = context_norm(context_proj [taps]), each tap normed by `fc_norm` first if
the checkpoint has that; of each layer the latent row that its own kv_a_proj_with_mqa makes of f, normed and rotated at
the token's position. A draft pass has the rows [last token, mask ..]; a row sees all context before the block, and the
whole block unless `causal` says otherwise. Layers are DeepSeek V3's dense ones: queries through a small row, keys
rotated in interleaved pairs, scores by YaRN's growth squared; no output gate, other than K3's own. Each row foretells
the token after it, unless `sample_from_anchor` is false. The embedding and the head are the target's; a checkpoint's
copy of the former is not read.

Which stream a tap is of, `aux_hidden_stream` says: the running row (`prefix`, the usual), or what the layer after it
mixes of the bank (`attn_res`). Source: the published configs and tensors' names (architecture K3DSparkModel), and what
vLLM, TokenSpeed and others make of them. Where these differ: we read `confidence_head` where it is flagged (vLLM leaves
it out); a block without `block_size` has the 7 rows that published ones were trained with, of which
`num_speculative_tokens` may use fewer (vLLM makes as many rows as that); one port has a row more, for the last token.
At the released sizes the tensors and parameters are as many as a published card tells; no weights were at hand.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

from tiercel.models.decoder import Sizes, read_n_layers
from tiercel.models.deepseek import LatentConfig, latent_attention, latent_projections, latent_weights, read_latent
from tiercel.models.drafters.block import BlockRows, MaskedBlock, read_rows
from tiercel.models.drafters.config import WHERE, read_ends, read_taps
from tiercel.models.drafters.interface import HeadSpec, Shapes
from tiercel.models.drafters.layers import joined, layer_prefix
from tiercel.models.drafters.markov import MarkovHead, read_markov
from tiercel.models.fields import ConfigFields
from tiercel.models.model import Model, RecordOptions, TapStream, Tensor
from tiercel.ops.program import KvLayer, Program, Value
from tiercel.ops.recorder import ComputeDtype, Recorder

_USUAL_ROWS = 7
_COPIED = "draft.embed_tokens.weight"
# What an MLA drafter may be elsewhere, and none that is published for K3 is.
_OFF = {
    "mla_use_nope": "its keys are rotated",
    "mla_use_output_gate": "its attention has no output gate",
    "mla_use_qk_norm": "its queries and keys are normed as small rows only",
    "dspark_bonus_anchor": "the last token's row is the first of the block",
    "attention_bias": "its attention has no biases",
    "mlp_bias": "its feed-forward has no biases",
}
# What configs of DeepSeek's kind say besides, and no dense layer reads.
_UNREAD = ("head_dim", "first_k_dense_replace", "quantization_config", "target_digest", "training", "target_model_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentBlockConfig(BlockRows):
    """What its config says. `taps` are of `tap_stream`, each with a norm of its own if `has_tap_norms`."""

    layers: LatentConfig
    taps: tuple[int, ...]
    tap_stream: TapStream
    has_tap_norms: bool
    is_causal: bool
    embedding: str
    head: str


class DSparkMla(MaskedBlock):
    """DSpark with latent attention."""

    architecture: ClassVar[str] = "dspark"
    config: LatentBlockConfig

    def __init__(self, config: LatentBlockConfig, markov: MarkovHead) -> None:
        self.config, self.markov = config, markov

    @classmethod
    def from_config(cls, config: Mapping[str, Any], target: Model, names: frozenset[str]) -> Self:
        """Read a config; `names` are the checkpoint's tensors, as published.

        Raises:
            ModelFileError: a field is missing, makes no sense, or is of another target.
            UnsupportedModel: a field asks for arithmetic that is not implemented.
        """
        fields = ConfigFields(config, WHERE)
        for name in _UNREAD:
            fields.raw(name)
        for name, why in _OFF.items():
            fields.only(name, False, why=why)
        for name in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"):
            fields.only(name, 0, why="its layers are dense")
        n = _read_latent(fields, target)
        taps, stream = _read_taps(fields, target)
        rows = read_rows(fields, n.vocab_size, frozenset(), anchor_default=True, usual_n=_USUAL_ROWS)
        embedding, head = target.ends()
        found = LatentBlockConfig(
            **dataclasses.asdict(rows),
            layers=n,
            taps=taps,
            tap_stream=stream,
            has_tap_norms=fields.flag("fc_norm", default=False),
            is_causal=any([fields.flag(name, default=False) for name in ("causal", "full_attention_causal")]),
            embedding=embedding,
            head=head,
        )
        vocab = n.vocab_size
        markov = read_markov(fields, names, hidden=n.hidden_size, vocab=vocab, draft_vocab=vocab)
        fields.finish()
        return cls(found, markov)

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers after which it reads a stream."""
        return self.config.taps

    @property
    def tap_stream(self) -> TapStream:
        """Which stream that is."""
        return self.config.tap_stream

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor may be left unread: the target's embedding, which checkpoints bring along."""
        return name == _COPIED

    def draft_weights(self) -> Shapes:
        """Return the shape of every tensor of its own."""
        c, n = self.config, self.config.layers
        hidden, f = n.hidden_size, n.intermediate_size
        shapes: Shapes = {"context_proj.weight": (hidden, len(c.taps) * hidden)}
        shapes |= {f"{name}.weight": (hidden,) for name in ("context_norm", "final_norm")}
        if c.has_tap_norms:
            shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(len(c.taps))}
        layer: Shapes = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        layer |= latent_weights(n) | {f"mlp.{name}_proj.weight": (f, hidden) for name in ("gate", "up")}
        layer["mlp.down_proj.weight"] = (hidden, f)
        found = {f"draft.{name}": shape for name, shape in shapes.items()}
        for i in range(n.n_layers):
            found |= {f"{layer_prefix(i)}.{name}": shape for name, shape in layer.items()}
        return found | self.markov.weights()

    def shared_weights(self) -> tuple[str, ...]:
        """Return the target's tensors that it reads."""
        return tuple(dict.fromkeys((self.config.embedding, self.config.head)))

    def context_weights(self) -> Shapes:
        """Return the tensors that make the context."""
        parts = ("context_proj.", "context_norm.", "fc_norm.", "self_attn.kv_a_")
        return {name: s for name, s in self.draft_weights().items() if any(f".{part}" in name for part in parts)}

    def kv_layers(self, first: int) -> tuple[KvLayer, ...]:
        """Return its layers of latent rows."""
        n = self.config.layers
        return tuple(KvLayer(first + i, 1, n.rank + n.rope, 0, n.rank) for i in range(n.n_layers))

    def record_context(self, rec: Recorder, options: RecordOptions, taps: Sequence[Value], first: int) -> Value | None:
        """Write the latent rows of each of the target's tokens."""
        c, n = self.config, self.config.layers
        if c.has_tap_norms:
            taps = [rec.rms_norm(tap, f"draft.fc_norm.{i}.weight", n.eps) for i, tap in enumerate(taps)]
        f = rec.linear(joined(rec, taps), "draft.context_proj.weight")
        f = rec.rms_norm(f, "draft.context_norm.weight", n.eps)
        table = self._table(rec, options.max_len_tokens)
        for i in range(n.n_layers):
            prefix = f"{layer_prefix(i)}.self_attn"
            rec.keep_latents(
                rec.linear(f, f"{prefix}.kv_a_proj_with_mqa.weight"),
                layer=first + i,
                norm=f"{prefix}.kv_a_layernorm.weight",
                rope=n.rope,
                eps=n.latent_eps,
                table=table,
                interleaved=n.is_interleaved,
            )
        return None

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
        """Record one pass over blocks; `hidden` is the normed state of every row."""
        del norm_weights_include_one, module  # the only one
        c, n = self.config, self.config.layers
        rec = self.recorder(tensors, compute_dtype)
        table = self._table(rec, n.ropes["rope"].max_len_tokens if max_len_tokens is None else max_len_tokens)
        x = rec.embed(c.embedding)
        for i in range(n.n_layers):
            prefix = layer_prefix(i)
            h = rec.rms_norm(x, f"{prefix}.input_layernorm.weight", n.eps)
            made = latent_projections(rec, n, f"{prefix}.self_attn", h)
            y = latent_attention(
                rec, n, f"{prefix}.self_attn", made, layer=first + i, table=table, sees_block=not c.is_causal
            )
            x = rec.add(x, rec.linear(y, f"{prefix}.self_attn.o_proj.weight"))
            h = rec.rms_norm(x, f"{prefix}.post_attention_layernorm.weight", n.eps)
            gate, up = (rec.linear(h, f"{prefix}.mlp.{name}_proj.weight") for name in ("gate", "up"))
            x = rec.add(x, rec.linear(rec.gated(gate, up, n.act), f"{prefix}.mlp.down_proj.weight"))
        rows = rec.keep_hidden(rec.rms_norm(x, "draft.final_norm.weight", n.eps))
        return rec.finish(rec.linear(rows, c.head))

    def _table(self, rec: Recorder, max_len_tokens: int) -> Value:
        table = self.config.layers.ropes["rope"].table(max_len_tokens)
        return rec.rope_table("draft", table.inv_freq, magnitude=table.magnitude)

    def head(self) -> HeadSpec:
        """Return the Markov head."""
        return self.markov.spec(None)


def _read_latent(fields: ConfigFields, target: Model) -> LatentConfig:
    hidden, n_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    target_size, draft_vocab = read_ends(fields, target, hidden)
    if hidden != target_size:
        raise fields.broken("hidden_size", hidden, f"{target_size}, whose embedding and head it shares,")
    vocab = target.info.vocab_size
    if draft_vocab != vocab:
        raise fields.broken("draft_vocab_size", draft_vocab, f"{vocab}, the vocabulary of the target's head,")
    if fields.size("num_key_value_heads", n_heads) != n_heads:
        raise fields.broken("num_key_value_heads", fields.raw("num_key_value_heads"), f"num_attention_heads {n_heads}")
    for name, layout in (("rope_layout", "interleaved"), ("rope_interleave", True)):
        fields.only(name, layout, why="rotated pairs are neighbours; reorder the rows of q_b_proj and kv_a_proj")
    fields.size("q_lora_rank")
    sizes = Sizes(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        n_layers=read_n_layers(fields),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=fields.size("qk_rope_head_dim"),
        max_position=fields.size("max_position_embeddings", target.info.max_len_tokens),
    )
    found = read_latent("dspark", fields, sizes, is_interleaved=True)
    return dataclasses.replace(found, latent_eps=found.eps)


def _read_taps(fields: ConfigFields, target: Model) -> tuple[tuple[int, ...], TapStream]:
    stream = fields.raw("aux_hidden_stream")
    stream = "prefix" if stream is None else stream
    if stream not in ("prefix", "attn_res"):
        raise fields.refused("aux_hidden_stream", stream, "the known streams are prefix and attn_res")
    if stream not in target.tap_streams:
        raise fields.broken("aux_hidden_stream", stream, f"{' or '.join(target.tap_streams)}, as this target has,")
    taps = read_taps(fields, target, stream=cast("TapStream", stream))
    if list(taps) != sorted(taps):
        raise fields.broken("target_layer_ids", list(taps), "layers in ascending order")
    if fields.size("num_target_layers", len(taps)) != len(taps):
        raise fields.broken("num_target_layers", fields.raw("num_target_layers"), f"{len(taps)}, as target_layer_ids,")
    n = target.n_tap_layers
    if fields.size("target_num_hidden_layers", n) != n:
        raise fields.broken("target_num_hidden_layers", fields.raw("target_num_hidden_layers"), f"this target's {n}")
    return taps, cast("TapStream", stream)
