"""Writes a tiny drafter's folder for a tiny model, in the published layout.

Its weights follow from their names: what it drafts is chance. So it drafts from a few tokens only, of which those that
a request allows come often.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercel.models.drafters.checkpoint import read_drafter
from tiercel.models.drafters.config import in_one_form
from tiercel.models.registry import build_model
from tiercel.testing.fill import fill_by_name

KINDS = ("dflash", "dflash2", "dspark", "eagle3")
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
        "rope_theta": min(build_model(theirs).rope_thetas, default=10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "target_layer_ids": list(range(-1, n_layers - 1))[-3:],
        **({} if kind == "eagle3" else {"mask_token_id": theirs["vocab_size"] - 1}),
        **_FIELDS[kind],
        **changes,
    }
    names = ("d2t", "lm_head.weight", *(f"layers.0.{name}" for name in _OPTIONAL))
    d2t = np.asarray(token_ids, np.int64) - np.arange(len(token_ids))
    return _write(folder, config, theirs, names, {"d2t": d2t})


def write_tiny_latent_drafter(folder: Path, target: Path, token_ids: Sequence[int], **changes: Any) -> Path:
    """Write a DSpark drafter in Kimi K3's layout for the model in `target`; its bias is for `token_ids` alone.

    Its head is the target's, with all of the vocabulary.
    """
    from safetensors.numpy import load_file, save_file

    theirs = json.loads((target / "config.json").read_text("utf-8"))
    n_layers, vocab = theirs["num_hidden_layers"], theirs["vocab_size"]
    config = {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "hidden_size": theirs["hidden_size"],
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "vocab_size": vocab,
        "max_position_embeddings": theirs["max_position_embeddings"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "target_layer_ids": list(range(n_layers - 1))[-3:],
        "mask_token_id": vocab - 1,
        "markov_rank": 8,
        "enable_confidence_head": True,
        **changes,
    }
    names = ("confidence_head.proj.weight", "confidence_head.proj.bias")
    folder = _write(folder, config, theirs, names, {})
    file = folder / "model.safetensors"
    tensors = load_file(file)
    others = np.setdiff1d(np.arange(vocab), np.asarray(token_ids))
    tensors["markov_head.markov_w2.weight"][others] = 0.0
    save_file(tensors, str(file))
    return folder


def _write(
    folder: Path, config: dict[str, Any], theirs: Any, names: Sequence[str], more: Mapping[str, npt.NDArray[Any]]
) -> Path:
    """Write the folder of a drafter whose tensors follow from their names, and `more`."""
    from safetensors.numpy import save_file

    kind, flat = in_one_form(config)
    model = read_drafter(kind, flat, build_model(theirs), frozenset(names))
    tensors = {name: fill_by_name(name, shape) for name, shape in model.draft_weights().items()}
    tensors = {name.removeprefix("draft."): w for name, w in tensors.items() if name.startswith("draft.")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({**tensors, **more}, str(folder / "model.safetensors"))
    return folder
