"""Drafters that fill a block of masks in one pass, over keys and values made of the target's residual streams.

Context, for each of the target's tokens: f = norm(fc [taps]); of each draft layer k = rotated norm(k_proj f) and
v = v_proj f, at the token's position. A draft pass has the rows [last token, mask ..] from the last token's position
on; a row sees all context before the block, and the whole block unless its layer is causal. Rows of the block leave
keys and values too, which the next step's context overwrites. `dflash`, `dflash2` and `dspark` say what they add.
Source: Chen et al. 2026 (arXiv:2602.06036), and the configs of the published drafters. Where we differ: a sliding
layer's window counts from the block's last row for all its rows, not from each row's own position.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tiercel.models.drafters.config import DraftLayers, read_layers
from tiercel.models.drafters.interface import DraftModel, HeadSpec, Shapes
from tiercel.models.drafters.layers import attention, feed_forward, joined, keyed, layer_prefix, projected, rope_table
from tiercel.models.fields import ConfigFields, Required
from tiercel.models.model import Model, RecordOptions, Tensor
from tiercel.ops.program import KvLayer, Program, Value
from tiercel.ops.recorder import ComputeDtype, Recorder

_MAX_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """The rows of a block: how many, whether the last token's foretells the next, and the token of the others."""

    n_rows: int
    samples_from_anchor: bool
    mask_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(BlockRows):
    """What a block drafter adds to its layers. `embedding` and `head` are tensors' names, its own or the target's."""

    layers: DraftLayers
    windows: tuple[int, ...]
    is_causal: tuple[bool, ...]
    input_scale: float
    logit_scale: float
    softcap: float
    embedding: str
    head: str


class MaskedBlock(DraftModel):
    """A drafter of one pass over a block of masks, whatever its layers are."""

    kind = "block"
    architecture: ClassVar[str]
    config: BlockRows

    @property
    def name(self) -> str:
        """What it is called."""
        return self.architecture

    @property
    def n_draft_max(self) -> int:
        """Drafts of a block."""
        return self.n_block_rows - self.first_logits_row

    @property
    def n_block_rows(self) -> int:
        """Rows of a block."""
        return self.config.n_rows

    @property
    def first_logits_row(self) -> int:
        """0 if the last token's row foretells the next; 1 if masks stand for themselves."""
        return 0 if self.config.samples_from_anchor else 1

    @property
    def mask_token_id(self) -> int:
        """The masks' token; -1: a learned vector."""
        return self.config.mask_token_id


class BlockDrafter(MaskedBlock):
    """The backbone. Subclasses read their heads' fields, and may wrap a layer's two parts."""

    config: BlockConfig

    def __init__(self, config: BlockConfig) -> None:
        self.config = config

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose residual stream it reads."""
        return self.config.layers.taps

    def draft_weights(self) -> Shapes:
        """Return the shape of every tensor of its own."""
        c, n = self.config, self.config.layers
        shapes: Shapes = {"draft.fc.weight": (n.hidden_size, len(n.taps) * n.target_size)}
        shapes |= {f"draft.{name}.weight": (n.hidden_size,) for name in ("hidden_norm", "norm")}
        for i in range(n.n_layers):
            shapes |= {f"{layer_prefix(i)}.{name}": shape for name, shape in self.layer_weights().items()}
        if c.embedding == "draft.embed_tokens.weight":
            shapes[c.embedding] = (n.vocab_size, n.hidden_size)
        if c.head == "draft.lm_head.weight":
            shapes[c.head] = (n.draft_vocab_size, n.hidden_size)
        if c.mask_token_id < 0:
            shapes["draft.mask_embedding"] = (n.hidden_size,)
        return shapes | self.head_weights()

    def layer_weights(self) -> Shapes:
        """Return the shapes of a layer's tensors; names follow `draft.layers.i.`."""
        n = self.config.layers
        shapes: Shapes = {f"{name}_layernorm.weight": (n.hidden_size,) for name in ("input", "post_attention")}
        shapes |= {f"self_attn.{name}": shape for name, shape in n.attention_weights(n.hidden_size).items()}
        return shapes | {f"mlp.{name}": shape for name, shape in n.mlp_weights().items()}

    def head_weights(self) -> Shapes:
        """Return the shapes of the tensors that pick drafts."""
        return {}

    def shared_weights(self) -> tuple[str, ...]:
        """Return the target's tensors that it reads."""
        names = dict.fromkeys((self.config.embedding, self.config.head))
        return tuple(name for name in names if not name.startswith("draft."))

    def context_weights(self) -> Shapes:
        """Return the tensors that make the context: fc, its norm, and each layer's way to keys and values."""
        parts = ("fc.", "hidden_norm.", "self_attn.k_proj.", "self_attn.v_proj.", "self_attn.k_norm.")
        return {name: s for name, s in self.draft_weights().items() if any(f".{part}" in name for part in parts)}

    def kv_layers(self, first: int) -> tuple[KvLayer, ...]:
        """Return its layers of keys and values."""
        n = self.config.layers
        return tuple(KvLayer(first + i, n.n_kv_heads, n.head_dim, w) for i, w in enumerate(self.config.windows))

    def record_context(self, rec: Recorder, options: RecordOptions, taps: Sequence[Value], first: int) -> Value | None:
        """Write keys and values of each of the target's tokens."""
        n = self.config.layers
        f = rec.linear(joined(rec, taps), "draft.fc.weight")
        f = rec.rms_norm(f, "draft.hidden_norm.weight", n.eps)
        table = rope_table(rec, n, options.max_len_tokens)
        for i in range(n.n_layers):
            k, v = keyed(rec, n, i, f, table), projected(rec, n, i, f, "v")
            window = self.config.windows[i]
            rec.keep_kv(k, v, layer=first + i, kv_heads=n.n_kv_heads, head_dim=n.head_dim, window=window)
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
        table = rope_table(rec, n, n.rope.max_len_tokens if max_len_tokens is None else max_len_tokens)
        masked = "draft.mask_embedding" if c.mask_token_id < 0 else None
        x = rec.embed(c.embedding, scale=c.input_scale, masked=masked)
        for i in range(n.n_layers):
            x = rec.add(x, self.attention_part(rec, i, x, table, first + i))
            x = rec.add(x, self.mlp_part(rec, i, x))
        rows = rec.keep_hidden(rec.rms_norm(x, "draft.norm.weight", n.eps))
        logits = rec.linear(rows, c.head)
        logits = logits if c.logit_scale == 1.0 else rec.scale(logits, c.logit_scale)
        return rec.finish(rec.softcap(logits, c.softcap) if c.softcap else logits)

    def attention_part(self, rec: Recorder, i: int, x: Value, table: Value, layer: int) -> Value:
        """Write what layer i's attention adds to the stream."""
        h = rec.rms_norm(x, f"{layer_prefix(i)}.input_layernorm.weight", self.config.layers.eps)
        return self.attend(rec, i, h, table, layer)

    def mlp_part(self, rec: Recorder, i: int, x: Value) -> Value:
        """Write what layer i's feed-forward adds to the stream."""
        h = rec.rms_norm(x, f"{layer_prefix(i)}.post_attention_layernorm.weight", self.config.layers.eps)
        return feed_forward(rec, self.config.layers, i, h)

    def attend(self, rec: Recorder, i: int, h: Value, table: Value, layer: int) -> Value:
        """Write layer i's attention over its input."""
        c = self.config
        sees_block = not c.is_causal[i]
        return attention(rec, c.layers, i, h, table, layer=layer, window=c.windows[i], sees_block=sees_block)

    @abstractmethod
    def head(self) -> HeadSpec:
        """Return how drafts are picked."""


def read_block(
    fields: ConfigFields, target: Model, names: frozenset[str], *, sliding_is_causal: bool, anchor_default: bool
) -> BlockConfig:
    """Read what block drafters' configs say alike; `names` are the checkpoint's tensors, as published.

    Raises:
        ModelFileError, UnsupportedModel: as `read_layers`.
    """
    layers = read_layers(fields, target, names, own_base=False)
    if layers.hidden_size != layers.target_size and not {"embed_tokens.weight", "lm_head.weight"} <= names:
        raise fields.broken(
            "hidden_size", layers.hidden_size, f"{layers.target_size}, whose embedding and head it shares,"
        )
    embedding, head = target.ends()
    windows, is_causal = _read_windows(fields, layers.n_layers, sliding_is_causal=sliding_is_causal)
    softcap = fields.positive("final_logit_softcapping") if fields.has("final_logit_softcapping") else 0.0
    fields.raw("final_logit_softcapping")
    rows = read_rows(fields, layers.vocab_size, names, anchor_default=anchor_default)
    has_head = layers.has_d2t or "lm_head.weight" in names
    return BlockConfig(
        layers=layers,
        n_rows=rows.n_rows,
        samples_from_anchor=rows.samples_from_anchor,
        mask_token_id=rows.mask_token_id,
        windows=windows,
        is_causal=is_causal,
        input_scale=fields.positive("input_embedding_scale", 1.0),
        logit_scale=fields.positive("output_multiplier", 1.0),
        softcap=softcap,
        embedding="draft.embed_tokens.weight" if "embed_tokens.weight" in names else embedding,
        head="draft.lm_head.weight" if has_head else head,
    )


def read_rows(
    fields: ConfigFields, n_vocab: int, names: frozenset[str], *, anchor_default: bool, usual_n: object = Required
) -> BlockRows:
    """Read what a block's rows are.

    Raises:
        ModelFileError: there are too many or none, or the masks' token is none of the vocabulary's.
    """
    n_rows, from_anchor = fields.size("block_size", usual_n), fields.flag("sample_from_anchor", default=anchor_default)
    least = 1 if from_anchor else 2
    if not least <= n_rows <= _MAX_ROWS:
        raise fields.broken("block_size", n_rows, f"{least} to {_MAX_ROWS} rows")
    mask = fields.raw("mask_token_id")
    if "mask_embedding" in names:
        mask = -1
    elif type(mask) is not int or not 0 <= mask < n_vocab:
        raise fields.broken("mask_token_id", mask, f"a token 0 to {n_vocab - 1}, or a tensor mask_embedding,")
    return BlockRows(n_rows=n_rows, samples_from_anchor=from_anchor, mask_token_id=mask)


def _read_windows(
    fields: ConfigFields, n_layers: int, *, sliding_is_causal: bool
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return each layer's window, 0 for none, and whether it is causal within the block."""
    kinds = fields.words("layer_types", n_layers)
    for kind in kinds or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.refused("layer_types", kind, "the known types are full_attention and sliding_attention")
    marks = [kind == "sliding_attention" for kind in kinds or ()]
    uses = fields.flag("use_swa", default=False)
    slides = marks if any(marks) else [uses] * n_layers
    sizes = [fields.size(name) for name in ("swa_window_size", "sliding_window") if fields.has(name)]
    for name in ("swa_window_size", "sliding_window"):
        fields.raw(name)
    if any(slides) and not sizes:
        raise fields.broken("sliding_window", None, "a window for the layers that slide")
    said = [name for name in ("is_causal", "causal") if fields.has(name)]
    flags = [fields.flag(name, default=False) for name in ("is_causal", "causal")]
    is_free = fields.flag("sliding_window_non_causal", default=not sliding_is_causal)
    if said:
        causal = [flags[("is_causal", "causal").index(said[0])]] * n_layers
    else:
        causal = [slide and not is_free for slide in slides]
    return tuple(sizes[0] if slide else 0 for slide in slides), tuple(causal)
