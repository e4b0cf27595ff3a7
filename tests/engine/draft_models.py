"""Tiny targets with drafters that are models, for tests: by what the token before says alone most of a draft comes.

The target is a small llama whose layers add little to a token's embedding. The drafters are written by hand: a chain
that reads the target's normed rows, and a block over keys and values made of a tapped layer.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from tiercel import _native
from tiercel.models.drafters.interface import DraftModel, HeadSpec
from tiercel.models.registry import build_model
from tiercel.ops.passes import lower_and_fuse
from tiercel.ops.program import KvLayer, Program
from tiercel.ops.recorder import ComputeDtype, Recorder
from tiercel.quant.formats import Format
from tiercel.runner.capacity import Capacity
from tiercel.runner.drafting import Drafting
from tiercel.runner.native import NativeRunner, NativeSettings
from tiercel.runner.weights import PackedWeightStore
from tiercel.testing.fill import fill_by_name
from tiercel.testing.native import float_tensors
from tiercel.testing.tiny_model import CONFIG

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 264, 64, 4, 2, 16
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
MASK = 263
_EPS = 1e-6


@dataclass
class Pair:
    """A target's program, those of its drafter's modules, and all their weights."""

    target: Program
    drafts: tuple[Program, ...]
    weights: dict
    kind: str
    n_draft_max: int = 4
    n_block_rows: int = 1
    first_logits_row: int = 0
    mask_token_id: int = -1

    def drafting(self):
        programs = tuple(lower_and_fuse(program) for program in self.drafts)
        return Drafting(
            programs,
            self.kind,
            self.n_draft_max,
            _native.make_draft_head("plain", programs[0].output.width, self.target.output.width, {}),
            self.n_block_rows,
            self.first_logits_row,
            self.mask_token_id,
        )

    def runner(self, *, drafts=True, n_slots=3, max_len=64, n_pages=16, n_threads=1, kv_dtype="float32", max_step=64):
        store = PackedWeightStore(float_tensors(self.weights), expand_to_f32=False, n_threads=1)
        capacity = Capacity(16, 1, n_pages, max_len, n_slots, n_snapshots=2, snapshot_spacing_tokens=16)
        settings = NativeSettings(max_step, max_step, kv_dtype, n_threads, max_draft_rows=24)
        drafting = self.drafting() if drafts else None
        return NativeRunner(lower_and_fuse(self.target), store, capacity, settings, drafting=drafting)


def attention_shapes(prefix):
    shapes = {
        f"{prefix}.{n}_proj.weight": (h * HEAD_DIM, HIDDEN)
        for n, h in zip("qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True)
    }
    return shapes | {f"{prefix}.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM), f"{prefix}.norm.weight": (HIDDEN,)}


def attended(rec, x, prefix, layer, **options):
    """Write x + attention(norm(x)), and return it."""
    h = rec.rms_norm(x, f"{prefix}.norm.weight", _EPS)
    q, k, v = (rec.linear(h, f"{prefix}.{n}_proj.weight") for n in "qkv")
    table = rope(rec)
    q, k = rec.rope(q, table, heads=HEADS), rec.rope(k, table, heads=KV_HEADS)
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "scale": 0.25}
    y = rec.attention(q, (k, v), layer=layer, **sizes, **options)
    return rec.add(x, rec.linear(y, f"{prefix}.o_proj.weight"))


def rope(rec):
    return rec.rope_table("draft", (10000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))).astype(np.float32))


class ByHand(DraftModel):
    """What both have in common."""

    taps = ()
    n_draft_max = 4
    name = "by hand"

    def kv_layers(self, first):
        return (KvLayer(first, KV_HEADS, HEAD_DIM, 0),)

    def head(self):
        return HeadSpec(kind="plain", n_vocab=VOCAB)

    def recorder(self, tensors, dtype):
        shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        return Recorder(self.name, shapes, {n: t.format for n, t in tensors.items()}, dtype, keeps_hidden=True)


class ChainByHand(ByHand):
    kind = "chain"
    reads_hidden = True

    def draft_weights(self):
        return {"draft.mix.weight": (HIDDEN, HIDDEN), **attention_shapes("draft.attn")}

    def record_context(self, rec, options, taps, first):
        return None

    def record_draft(self, tensors, *, first, compute_dtype=ComputeDtype.AUTO):
        rec = self.recorder(tensors, compute_dtype)
        x = rec.add(rec.embed(EMBED), rec.linear(rec.given(HIDDEN), "draft.mix.weight"))
        x = attended(rec, x, "draft.attn", first)
        return rec.finish(rec.linear(rec.keep_hidden(rec.rms_norm(x, NORM, _EPS)), HEAD))


class BlockByHand(ByHand):
    kind = "block"
    taps = (0,)
    n_block_rows = 4
    mask_token_id = MASK

    def draft_weights(self):
        return {"draft.fc.weight": (HIDDEN, HIDDEN), **attention_shapes("draft.attn")}

    def context_weights(self):
        return self.draft_weights()

    def record_context(self, rec, options, taps, first):
        f = rec.rms_norm(rec.linear(taps[0], "draft.fc.weight"), "draft.attn.norm.weight", _EPS)
        k, v = (rec.linear(f, f"draft.attn.{n}_proj.weight") for n in "kv")
        rec.keep_kv(rec.rope(k, rope(rec), heads=KV_HEADS), v, layer=first, kv_heads=KV_HEADS, head_dim=HEAD_DIM)

    def record_draft(self, tensors, *, first, compute_dtype=ComputeDtype.AUTO):
        rec = self.recorder(tensors, compute_dtype)
        x = attended(rec, rec.embed(EMBED), "draft.attn", first, sees_block=True)
        return rec.finish(rec.linear(rec.keep_hidden(rec.rms_norm(x, NORM, _EPS)), HEAD))


def pair(drafter, *, format=Format.Q8_0, **facts):
    """Record the tiny target with a drafter."""
    model = build_model(dict(CONFIG))
    shapes = model.expected_weights() | drafter.draft_weights()
    weights = {name: fill_by_name(name, shape) for name, shape in shapes.items()}
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight", "mix.weight")):
            weights[name] *= np.float32(0.2)
    tensors = described(weights, format)
    first = model.info.next_layer
    target, draft = model.record(tensors, drafter=drafter), drafter.record_draft(tensors, first=first)
    return Pair(target, (draft,), weights, drafter.kind, **facts)


def described(weights, format):
    """Give tensors of these shapes: matrices in a format, the rest in float32."""
    return {
        name: SimpleNamespace(shape=w.shape, format=format if w.ndim == 2 and w.shape[1] % 32 == 0 else Format.F32)
        for name, w in weights.items()
    }


def chain(**facts):
    return pair(ChainByHand(), **facts)


def block(first_logits_row=0, **facts):
    sizes = {"n_draft_max": 4 - first_logits_row, "n_block_rows": 4, "mask_token_id": MASK} | facts
    return pair(BlockByHand(), first_logits_row=first_logits_row, **sizes)
