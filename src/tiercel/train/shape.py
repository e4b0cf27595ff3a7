"""The sizes of a drafter to train: what decides its tensors. Knows the published names of the fields, and no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["dspark", "dflash2", "eagle3"]
KINDS: tuple[Kind, ...] = ("dspark", "dflash2", "eagle3")

CONV_TAPS = 2
CONV_GROUP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """One drafter's sizes. A block's rows are the anchor and masks; `n_slots` drafts come of it.

    `topk` is of how many of a slot's best tokens one is drafted: DFlash2's candidates; of DSpark, 0 is all.
    """

    kind: Kind
    vocab: int
    draft_vocab: int
    hidden: int
    ffn: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    act: str
    rope_theta: float
    max_position: int
    taps: tuple[int, ...]
    n_slots: int
    rank: int
    topk: int
    embedding_scale: float
    has_qk_norm: bool = False

    @property
    def n_rows(self) -> int:
        """Rows of a block: DSpark's anchor row foretells a token already, DFlash2's does not."""
        return self.n_slots + (self.kind == "dflash2")

    @property
    def context_width(self) -> int:
        """Columns of the joined taps."""
        return len(self.taps) * self.hidden

    @property
    def n_groups(self) -> int:
        """Groups of columns that a convolution's kernel is computed for."""
        return self.hidden // CONV_GROUP

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one layer's tensors."""
        e, q, kv = self.hidden, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        wide = 2 * e if self.kind == "eagle3" else e  # EAGLE-3 reads [embedding, hidden] side by side
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (e,),
            "self_attn.q_proj.weight": (q, wide),
            "self_attn.k_proj.weight": (kv, wide),
            "self_attn.v_proj.weight": (kv, wide),
            "self_attn.o_proj.weight": (e, q),
            "post_attention_layernorm.weight": (e,),
            "mlp.gate_proj.weight": (self.ffn, e),
            "mlp.up_proj.weight": (self.ffn, e),
            "mlp.down_proj.weight": (e, self.ffn),
        }
        if self.has_qk_norm:
            shapes |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        if self.kind == "eagle3":
            shapes["hidden_norm.weight"] = (e,)
        if self.kind == "dflash2":
            for conv in ("attention_conv", "mlp_conv"):
                shapes[f"{conv}.base_kernel"] = (2, CONV_TAPS, e)
                shapes[f"{conv}.kernel_projection.weight"] = (2 * CONV_TAPS * self.n_groups, e)
        return shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor that is trained, by its published name."""
        e, r = self.hidden, self.rank
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (e, self.context_width)}
        for i in range(self.n_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in self.layer_shapes().items()}
        shapes["norm.weight"] = (e,)
        if self.kind == "eagle3":
            return shapes
        shapes |= {"hidden_norm.weight": (e,), "mask_embedding": (e,)}
        if self.kind == "dspark":
            shapes |= {
                "markov_head.markov_w1.weight": (self.vocab, r),
                "markov_head.markov_w2.weight": (self.draft_vocab, r),
                "confidence_head.proj.weight": (1, e + r),
                "confidence_head.proj.bias": (1,),
            }
        else:
            shapes |= {
                "candidate_selector.predecessor_codebook": (self.vocab, r),
                "candidate_selector.successor_codebook": (self.draft_vocab, r),
                "candidate_selector.hidden_projection.weight": (r, e),
            }
        return shapes

    def config(self) -> dict[str, Any]:
        """Return `config.json` in the published fields."""
        common: dict[str, Any] = {
            "vocab_size": self.vocab,
            "draft_vocab_size": self.draft_vocab,
            "hidden_size": self.hidden,
            "target_hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.eps,
            "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(self.act, self.act),
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_position,
            "use_qk_norm": self.has_qk_norm,
            "input_embedding_scale": self.embedding_scale,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
        }
        return {**common, **_OF_KIND[self.kind](self)}


def _dspark(shape: DraftShape) -> dict[str, Any]:
    return {
        "architectures": ["DSparkDraftModel"],
        "model_type": "dspark",
        "block_size": shape.n_slots,
        "target_layer_ids": list(shape.taps),
        "mask_token_id": None,
        "sample_from_anchor": True,
        "markov_rank": shape.rank,
        "markov_head_type": "vanilla",
        "dspark_draft_topk": shape.topk,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def _dflash2(shape: DraftShape) -> dict[str, Any]:
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "dflash2",
        "block_size": shape.n_rows,
        "sample_from_anchor": False,
        "dflash_config": {
            "mask_token_id": None,
            "target_layer_ids": list(shape.taps),
            "conv_kernel_size": CONV_TAPS,
            "conv_group_size": CONV_GROUP,
            "selector_rank": shape.rank,
            "selector_top_k": shape.topk,
            "causal": False,
        },
    }


def _eagle3(shape: DraftShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        # At the top, layers are counted from the embeddings on.
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in shape.taps],
        "eagle_config": {"use_aux_hidden_state": True},
    }


_OF_KIND: Mapping[str, Callable[[DraftShape], dict[str, Any]]] = {
    "dspark": _dspark,
    "dflash2": _dflash2,
    "eagle3": _eagle3,
}
