"""Writes a tiny model's folder: config, safetensors, a tokenizer of single bytes. For tests that begin with a path."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tiercel.testing.fill import tiny_checkpoint

CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 264,  # as models pad theirs: more logits than tokens
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 258,
    }
)
MIXTURE_CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
    }
)
"""Laid over `CONFIG`: a dense layer, then one with experts."""
LATENT_CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "head_dim": 8,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
    }
)
"""Laid over `CONFIG`: latent attention; a dense layer, then one with experts in groups."""
ATTENTION_FREE_CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "head_dim": 16,
        "num_heads": 8,
        "state_size": 16,
        "n_groups": 2,
        **dict.fromkeys(
            ["intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta"]
        ),
    }
)
"""Laid over `CONFIG`: no keys and values, and states of two groups."""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 256, 257 and 258; a byte's id is the byte."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    has_tokenizer: bool = True,
    dtype: str = "float32",
) -> Path:
    """Write the folder, whose weights follow from their names, and return it. `config` is laid over `CONFIG`."""
    from safetensors.numpy import save_file

    whole = {**CONFIG, **(config or {})}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    weights = {name: w.astype(np.dtype(dtype)) for name, w in tiny_checkpoint(whole).items()}
    save_file(weights, str(folder / "model.safetensors"))
    if has_tokenizer:
        (folder / "tokenizer.json").write_text(byte_tokenizer_json(), encoding="utf-8")
        settings = {"eos_token": SPECIAL_TOKENS[2], "chat_template": chat_template}
        (folder / "tokenizer_config.json").write_text(
            json.dumps({k: v for k, v in settings.items() if v is not None}), encoding="utf-8"
        )
    return folder


ENCODER_CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
    }
)


def write_tiny_encoder(folder: Path, *, config: Mapping[str, Any] | None = None) -> Path:
    """Write an encoder's folder, with a tokenizer of single letters, and return it. `config` is laid over its own."""
    from safetensors.numpy import save_file

    whole = {**ENCODER_CONFIG, **(config or {})}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    save_file(tiny_checkpoint(whole), str(folder / "model.safetensors"))
    (folder / "tokenizer.json").write_text(letter_tokenizer_json(), encoding="utf-8")
    return folder


def letter_tokenizer_json() -> str:
    """Return a tokenizer.json as BERT's: small letters and digits, whole or as a word's later part, [CLS] and [SEP]."""
    from string import ascii_lowercase, digits

    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = [*ascii_lowercase, *digits]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(names[:4])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer.to_str()


def byte_tokenizer_json() -> str:
    """Return a tokenizer.json of 256 one-byte tokens, each byte's id its value, and the special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {letter: byte for byte, letter in enumerate(_byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return tokenizer.to_str()


def _byte_letters() -> list[str]:
    """Return the byte-level alphabet, letter of byte 0 first: what prints is itself, the rest is from 256 up."""
    letters, n = [], 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + n))
            n += 1
    return letters
