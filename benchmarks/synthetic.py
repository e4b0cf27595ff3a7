"""Writes a folder of a model with random weights, for what no small public checkpoint has: `synthetic.py NAME FOLDER`.

    gdn      16 layers of gated delta rules, 32 value heads of 128 x 128, and one of attention (Qwen3.5's)
    kda      the same of Kimi Delta Attention, and one of latent attention (Kimi Linear's)
    mla      8 layers of latent attention, 16 heads, rank 512 + 64 (DeepSeek's), in bfloat16
    moe      12 layers of 8 of 64 experts of 256, 12 of a dense feed-forward of 2,048 (Qwen3-MoE's)
    moe-4b   24 layers of 6 of 96 experts of 256: 3.9 B parameters, 0.5 B of them active (Qwen3-MoE's); 2.3 GB

Projections are int4 with a scale for each 128 columns (compressed-tensors), which is computed as Q4_0; the rest is
bfloat16. What a model says means nothing; how long it takes does not depend on that. Delete the folder afterwards.
"""

import json
import struct
import sys
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from tiercel.models.registry import build_model
from tiercel.testing.tiny_model import CHAT_TEMPLATE, byte_tokenizer_json

GROUP = 128
SHARED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "vocab_size": 32768,
    "eos_token_id": 258,
    "tie_word_embeddings": True,
}
LINEAR = ["linear_attention"] * 16 + ["full_attention"]
GDN = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 17,
    "layer_types": LINEAR,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
}
KDA = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 17,
    "layer_types": LINEAR,
    "mlp_layer_types": ["dense"] * 17,
    "linear_conv_kernel_dim": 4,
    "linear_num_heads": 32,
    "linear_head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 8,
}
QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
# Four heads: what attention projects to then has another width than the feed-forward, and another line in the row.
MOE = QWEN_MOE | {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_experts": 64,
    "moe_intermediate_size": 256,
    "mlp_only_layers": list(range(0, 24, 2)),
}
MOE_4B = QWEN_MOE | {
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_experts": 96,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 256,
    "mlp_only_layers": [],
}
MODELS: Mapping[str, Mapping[str, Any]] = {"gdn": GDN, "kda": KDA, "mla": MLA, "moe": MOE, "moe-4b": MOE_4B}
FLOAT_ONLY = ("mla",)
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, "strategy": "group", "group_size": GROUP}


def is_packed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a matrix is int4. kv_b_proj is used as float32."""
    is_projection = name.endswith(("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight"))
    return is_projection and "kv_b_proj" not in name and len(shape) == 2 and shape[1] % GROUP == 0


class Randomness:
    """A few MiB of random numbers, given out again and again from other places."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._bytes = rng.bytes(64 << 20)
        self._normal = rng.standard_normal(1 << 22).astype(np.float32)
        self._at = 0

    def raw(self, n_bytes: int) -> Iterator[bytes]:
        """Yield so many bytes."""
        while n_bytes > 0:
            self._at = (self._at + 4099) % (1 << 20)
            piece = self._bytes[self._at : self._at + n_bytes]
            n_bytes -= len(piece)
            yield piece

    def bfloat16(self, n: int, base: float, amplitude: float) -> Iterator[bytes]:
        """Yield n numbers around `base`."""
        while n > 0:
            piece = base + amplitude * self._normal[:n]
            n -= len(piece)
            yield piece.astype(ml_dtypes.bfloat16).tobytes()


def parts_of(name: str, shape: tuple[int, ...], *, packs: bool) -> list[tuple[str, str, tuple[int, ...], float, float]]:
    """Return a weight's tensors: name, type, shape, and where its numbers lie; of int4 codes they lie anywhere."""
    if packs and is_packed(name, shape):
        module, (n, k) = name.removesuffix(".weight"), shape
        return [
            (f"{module}.weight_packed", "I32", (n, k // 8), 0.0, 0.0),
            (f"{module}.weight_scale", "BF16", (n, k // GROUP), 1.0 / (4.6 * k**0.5), 0.0),
        ]
    is_norm = "norm" in name and name.endswith(".weight")
    scale = 0.0 if name.endswith(("A_log", "dt_bias", ".bias")) else 0.5 if "embed" in name else shape[-1] ** -0.5
    return [(name, "BF16", shape, 1.0 if is_norm else 0.0, 0.0 if is_norm else scale)]


def write(name: str, folder: Path) -> None:
    """Write config, weights and a tokenizer of bytes."""
    packs = name not in FLOAT_ONLY
    config = {**SHARED, **MODELS[name]}
    shapes = build_model(config).expected_weights()
    if packs:
        group = {"targets": ["Linear"], "weights": INT4}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
    parts = [part for weight, shape in shapes.items() for part in parts_of(weight, shape, packs=packs)]
    header, at = {}, 0
    for tensor, dtype, shape, _, _ in parts:
        end = at + prod(shape) * (4 if dtype == "I32" else 2)
        header[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        write_numbers(file, parts)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "tokenizer.json").write_text(byte_tokenizer_json(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    print(f"{folder}: {at / 1e9:.2f} GB")


def write_numbers(file: BinaryIO, parts: list[tuple[str, str, tuple[int, ...], float, float]]) -> None:
    """Write each tensor's bytes."""
    random = Randomness()
    for _, dtype, shape, base, amplitude in parts:
        pieces = random.raw(4 * prod(shape)) if dtype == "I32" else random.bfloat16(prod(shape), base, amplitude)
        for piece in pieces:
            file.write(piece)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in MODELS:
        sys.exit(f"usage: synthetic.py {'|'.join(MODELS)} FOLDER")
    write(sys.argv[1], Path(sys.argv[2]))
