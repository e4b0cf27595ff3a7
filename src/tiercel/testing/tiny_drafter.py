"""Writes a tiny drafter's folder for a tiny model, in the published layout.

Its weights follow from their names: what it drafts is chance. So it drafts from a few tokens only, of which those that
a request allows come often.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tiercel.models.drafters.config import in_one_form
from tiercel.models.drafters.dflash import DFlash
from tiercel.models.drafters.dflash2 import DFlash2
from tiercel.models.drafters.dspark import DSpark
from tiercel.models.drafters.eagle3 import Eagle3
from tiercel.models.registry import build_model
from tiercel.testing.fill import fill_by_name

KINDS = ("dflash", "dflash2", "dspark", "eagle3")
_CLASSES: Mapping[str, Any] = {"dflash": DFlash, "dflash2": DFlash2, "dspark": DSpark, "eagle3": Eagle3}
_BLOCK = {"num_hidden_layers": 2, "block_size": 5}
_FIELDS: Mapping[str, dict[str, Any]] = {
    "dflash": {"architectures": ["DFlashDraftModel"], **_BLOCK},
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        **_BLOCK,
        "dflash_config": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4},
    },
    "dspark": {
        "architectures": ["Qwen3DSparkModel"],
        **_BLOCK,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1},
}
_OPTIONAL = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def write_tiny_drafter(folder: Path, kind: str, target: Path, token_ids: Sequence[int], **changes: Any) -> Path:
    """Write a drafter of the kind for the model in `target`, which drafts only `token_ids`, ascending."""
    from safetensors.numpy import save_file

    theirs = json.loads((target / "config.json").read_text("utf-8"))
    n_layers = theirs["num_hidden_layers"]
    config = {
        "model_type": "qwen3",
        "hidden_size": theirs["hidden_size"],
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": theirs["vocab_size"],
        "draft_vocab_size": len(token_ids),
        "max_position_embeddings": theirs["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "target_layer_ids": list(range(-1, n_layers - 1))[-3:],
        **({} if kind == "eagle3" else {"mask_token_id": theirs["vocab_size"] - 1}),
        **_FIELDS[kind],
        **changes,
    }
    model = _CLASSES[kind].from_config(
        in_one_form(config)[1],
        build_model(theirs),
        frozenset(("d2t", "lm_head.weight", *(f"layers.0.{name}" for name in _OPTIONAL))),
    )
    tensors = {name: fill_by_name(name, shape) for name, shape in model.draft_weights().items()}
    tensors = {name.removeprefix("draft."): w for name, w in tensors.items() if name.startswith("draft.")}
    d2t = np.asarray(token_ids, np.int64) - np.arange(len(token_ids))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({**tensors, "d2t": d2t}, str(folder / "model.safetensors"))
    return folder
