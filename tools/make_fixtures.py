"""Makes tests/model/fixtures: tiny models' logits, and rotary tables, as transformers computes them.

Needs the extra `oracle` (torch, transformers); the tests need neither. From the repository's root:

    HF_HUB_OFFLINE=1 PYTHONPATH=src python tools/make_fixtures.py [FIXTURE ...]

A logits fixture holds the config as transformers writes it, the argmax of each of the T positions, the first 8 logits
of each, and whole rows at three of them, the last among them. Weights are `tiercel.testing.fill` by tensor name;
ids[t] = (7t + 3) mod 128.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers as hf
from safetensors.numpy import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tiercel.testing.fill import fill_by_name
from tiercel.testing.interleaved_model import mxfp4_experts

OUT = Path(__file__).parent.parent / "tests" / "model" / "fixtures"
N_TOKENS = 40
N_COLUMNS = 8
WHOLE_ROWS = (0, 11)

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def rope(kind: str, theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


LLAMA3 = rope("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=64)
GEMMA = {
    **BASE,
    "num_hidden_layers": 6,
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "sliding_attention": rope("default", 1e4),
        "full_attention": rope("linear", 1e6, factor=8.0),
    },
}

MOE = {
    **BASE,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DEEPSEEK_MOE: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK_YARN = YARN | {"rope_theta": 1e4, "mscale": 0.707, "mscale_all_dim": 0.9}


QWEN3_5: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "full_attention_interval": 4,
    "rope_parameters": rope(
        "default", 1e7, partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True
    ),
}


KIMI: dict[str, Any] = {
    **BASE,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 40,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "linear_head_dim": 24,
    "linear_num_heads": 3,
    "linear_conv_kernel_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA2: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 2,
    "num_hidden_layers": 3,
    "chunk_size": 8,
}


LING: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "num_local_experts": 16,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "num_mtp_layers": 1,
    "head_dim": 16,
    "layer_group_size": 2,
}


def recurrent_models() -> dict[str, Any]:
    return {
        "lfm2": hf.Lfm2Config(
            **BASE | {"num_hidden_layers": 4},
            layer_types=["conv", "full_attention", "conv", "conv"],
            block_multiple_of=16,
            rope_parameters=rope("default", 1e6),
        ),
        "lfm2_untied_attention_last": hf.Lfm2Config(
            **BASE | {"num_hidden_layers": 3, "num_key_value_heads": 1, "intermediate_size": 96},
            layer_types=["conv", "conv", "full_attention"],
            conv_L_cache=4,
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=False,
            rope_parameters=rope("default", 1e6),
        ),
        "ling": hf.BailingHybridConfig(**LING),
        "ling_clamped": hf.BailingHybridConfig(
            **LING,
            expert_swiglu_limit_list=[0, 0, 0.1, 0.05],
            share_expert_swiglu_limit_list=[None, 0.2, 0, 0.03],
        ),
        "ling_delta_last": hf.BailingHybridConfig(
            **LING
            | {"q_lora_rank": 24, "num_hidden_layers": 3, "kda_safe_gate": False, "norm_topk_prob": False}
            | {"head_dim": 24, "n_shared_experts": 2},
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
        ),
        "kimi_linear": hf.KimiLinearConfig(
            **KIMI,
            layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        ),
        "kimi_linear_delta_last": hf.KimiLinearConfig(
            **KIMI | {"q_lora_rank": 24, "norm_topk_prob": False, "n_group": 1, "num_hidden_layers": 3},
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
        ),
        "mamba2": hf.Mamba2Config(**MAMBA2),
        "mamba2_odd_sizes_limits_tied": hf.Mamba2Config(
            **MAMBA2 | {"hidden_size": 60, "num_heads": 3, "head_dim": 40, "state_size": 24, "n_groups": 1},
            conv_kernel=3,
            use_conv_bias=False,
            time_step_limit=(0.4, 0.9),
            tie_word_embeddings=True,
        ),
        "qwen3_5": hf.Qwen3_5TextConfig(**QWEN3_5),
        "qwen3_5_linear_last_tied": hf.Qwen3_5TextConfig(
            **QWEN3_5
            | {
                "num_hidden_layers": 3,
                "tie_word_embeddings": True,
                "linear_key_head_dim": 40,
                "linear_value_head_dim": 80,
                "linear_num_value_heads": 2,
            },
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        "qwen3_5_moe": hf.Qwen3_5MoeTextConfig(
            **{name: value for name, value in QWEN3_5.items() if name != "intermediate_size"},
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
        ),
        "qwen3_next": hf.Qwen3NextConfig(
            **QWEN3_5 | {"rope_parameters": rope("default", 1e7, partial_rotary_factor=0.25)},
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            mlp_only_layers=[1],
            norm_topk_prob=True,
        ),
    }


GPT_OSS: dict[str, Any] = {
    **BASE,
    "intermediate_size": 48,
    "head_dim": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "rope_parameters": rope("yarn", 15e4, factor=4.0, original_max_position_embeddings=64, truncate=False),
}


def sink_models() -> dict[str, Any]:
    return {
        "gpt_oss": hf.GptOssConfig(**GPT_OSS),
        "gpt_oss_tied_full_last": hf.GptOssConfig(
            **GPT_OSS | {"num_hidden_layers": 2, "swiglu_alpha": 1.1, "swiglu_limit": 0.25, "num_key_value_heads": 1},
            layer_types=["full_attention", "sliding_attention"],
            tie_word_embeddings=True,
            attention_bias=False,
        ),
    }


def models() -> dict[str, Any]:
    smol = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 4}
    odd_heads = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
    qwen2_window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    return {
        "llama_rope_llama3_tied": hf.LlamaConfig(
            **BASE, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters=LLAMA3
        ),
        "llama_linear_biases_head_dim_24": hf.LlamaConfig(
            **BASE,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=rope("linear", 1e4, factor=2.0),
        ),
        "llama_odd_heads_9_3": hf.LlamaConfig(
            **BASE | odd_heads, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters=rope("default", 1e5)
        ),
        "mistral_window_8": hf.MistralConfig(
            **BASE, head_dim=24, sliding_window=8, rope_parameters=rope("default", 1e6)
        ),
        "mistral_no_window": hf.MistralConfig(**BASE, sliding_window=None, rope_parameters=rope("default", 1e6)),
        "smollm3_nope": hf.SmolLM3Config(**BASE | smol, rope_parameters=rope("default", 5e6)),
        "qwen2_yarn_window": hf.Qwen2Config(**BASE, **qwen2_window, tie_word_embeddings=True, rope_parameters=YARN),
        "qwen3": hf.Qwen3Config(**BASE, head_dim=32, rope_parameters=rope("default", 1e6)),
        "qwen3_window_bias": hf.Qwen3Config(
            **BASE,
            **qwen2_window,
            head_dim=16,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters=rope("default", 1e6),
        ),
        "gemma3_pattern_3_softcap": hf.Gemma3TextConfig(**GEMMA),
        "qwen3_moe": hf.Qwen3MoeConfig(**MOE, norm_topk_prob=True, rope_parameters=rope("default", 1e6)),
        "qwen3_moe_dense_layers_tied": hf.Qwen3MoeConfig(
            **MOE | {"num_hidden_layers": 4},
            decoder_sparse_step=2,
            mlp_only_layers=[1],
            norm_topk_prob=False,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters=rope("default", 1e6),
        ),
        "gemma3_biases_untied": hf.Gemma3TextConfig(
            **GEMMA | {"num_hidden_layers": 3, "final_logit_softcapping": None, "num_key_value_heads": 1},
            attention_bias=True,
            tie_word_embeddings=False,
        ),
        "deepseek_v3_yarn_dense": hf.DeepseekV3Config(
            **BASE | DEEPSEEK,
            q_lora_rank=24,
            first_k_dense_replace=3,
            attention_bias=True,
            rope_parameters=DEEPSEEK_YARN,
        ),
        "deepseek_v3_halves_plain_q": hf.DeepseekV3Config(
            **BASE | DEEPSEEK | {"v_head_dim": 20, "qk_nope_head_dim": 12},
            q_lora_rank=None,
            first_k_dense_replace=3,
            rope_interleave=False,
            rope_parameters=rope("default", 1e4),
        ),
        "deepseek_v3_experts": hf.DeepseekV3Config(
            **BASE | DEEPSEEK | DEEPSEEK_MOE, q_lora_rank=24, first_k_dense_replace=1, rope_parameters=DEEPSEEK_YARN
        ),
        "deepseek_v2_experts_groups": hf.DeepseekV2Config(
            **BASE | DEEPSEEK | DEEPSEEK_MOE,
            q_lora_rank=24,
            first_k_dense_replace=1,
            topk_method="group_limited_greedy",
            rope_parameters=DEEPSEEK_YARN,
        ),
        "deepseek_v2_experts_greedy": hf.DeepseekV2Config(
            **BASE | DEEPSEEK | DEEPSEEK_MOE | {"n_group": None, "topk_group": None, "kv_lora_rank": 32},
            q_lora_rank=None,
            first_k_dense_replace=0,
            attention_bias=True,
            rope_parameters=rope("default", 1e4),
        ),
        "deepseek_v2_dense": hf.DeepseekV2Config(
            **BASE | DEEPSEEK, q_lora_rank=None, first_k_dense_replace=3, rope_parameters=DEEPSEEK_YARN
        ),
        **recurrent_models(),
        **sink_models(),
    }


def filled(config: Any, rename: Callable[[str], str] = str) -> Any:
    """Return transformers' model, each parameter filled by the name that `rename` gives it."""
    config._attn_implementation = "eager"
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    adds_one = config.model_type.startswith(("gemma", "qwen3_5", "qwen3_next"))
    seen: set[int] = set()
    with torch.no_grad():
        for own_name, parameter in model.named_parameters():
            name = rename(own_name)
            # A tied head is listed once, under the embedding's name.
            assert parameter.data_ptr() not in seen, name
            seen.add(parameter.data_ptr())
            if config.model_type == "bailing_hybrid":
                values = ling_values(config, name, tuple(parameter.shape))
            elif config.model_type == "kimi_linear":
                values = kimi_values(config, name, tuple(parameter.shape))
            elif ".experts." in name and config.model_type == "gpt_oss":
                values = interleaved_experts(name, tuple(parameter.shape))
            elif ".experts." in name:
                values = stacked_experts(name, tuple(parameter.shape))
            else:
                values = fill_by_name(name, tuple(parameter.shape), norms_add_one=adds_one)
            parameter.copy_(torch.from_numpy(values))
        for own_name, buffer in model.named_buffers():
            name = rename(own_name)
            if name.endswith("e_score_correction_bias"):
                name = name.replace(".mlp.", ".block_sparse_moe.") if config.model_type == "kimi_linear" else name
                name = ling_name(config, name) if config.model_type == "bailing_hybrid" else name
                buffer.copy_(torch.from_numpy(fill_by_name(name, tuple(buffer.shape))))
        if config.model_type == "bailing_hybrid":
            clamp_ling(model, config)
    return model


def logits_of(config: Any) -> torch.Tensor:
    with torch.no_grad():
        return filled(config)(torch.tensor([ids_of(config)])).logits[0]


def clamp_ling(model: Any, config: Any) -> None:
    """Clamp experts where the config says so, which transformers' class leaves out: behind the silu, and the other."""
    routed, shared = (getattr(config, f"{name}_swiglu_limit_list", None) for name in ("expert", "share_expert"))

    def product(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
        return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

    def of_experts(experts: Any, limit: float) -> Any:
        def forward(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            gate, up = torch.einsum("th,xfh->txf", x, experts.gate_up_proj).chunk(2, dim=-1)
            each = torch.einsum("txf,xhf->txh", product(gate, up, limit), experts.down_proj)
            return (each.gather(1, chosen[..., None].expand(-1, -1, each.shape[-1])) * weights[..., None]).sum(dim=1)

        return forward

    def of_shared(mlp: Any, limit: float) -> Any:
        return lambda x: mlp.down_proj(product(mlp.gate_proj(x), mlp.up_proj(x), limit))

    for i, layer in enumerate(model.model.layers):
        if routed and routed[i]:
            layer.mlp.experts.forward = of_experts(layer.mlp.experts, routed[i])
        if shared and shared[i]:
            layer.mlp.shared_experts.forward = of_shared(layer.mlp.shared_experts, shared[i])


def ids_of(config: Any) -> list[int]:
    """Return the tokens: more than one 64-token chunk of the oracle's for recurrent models."""
    is_recurrent = config.model_type.startswith(("qwen3_5", "qwen3_next", "kimi_linear", "bailing", "mamba2", "lfm2"))
    n_tokens = 100 if is_recurrent else N_TOKENS
    return [(7 * t + 3) % 128 for t in range(n_tokens)]


def kimi_values(config: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a Kimi Linear's parameter as transformers holds it, filled by the names that checkpoints have."""
    name = name.replace(".forget_gate.", ".")
    parts = name.split(".")
    if parts[1] == "layers" and parts[3] == "mlp" and config.mlp_layer_types[int(parts[2])] == "sparse":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if ".experts." in name:
        return stacked_experts(name, shape, {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)})
    if name.endswith(".conv1d.weight"):
        rows = (shape[0] // 3, *shape[1:])
        return np.concatenate([fill_by_name(name.replace("conv1d", f"{part}_conv1d"), rows) for part in "qkv"])
    return fill_by_name(name, (shape[2],)).reshape(shape) if name.endswith(".A_log") else fill_by_name(name, shape)


def ling_values(config: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a Ling 3's parameter as transformers holds it, filled by the names that checkpoints have."""
    name = ling_name(config, name)
    if ".experts." in name:
        return stacked_experts(name, shape)
    if name.endswith(".conv1d.weight"):
        rows = (shape[0] // 3, *shape[1:])
        return np.concatenate([fill_by_name(name.replace("conv1d", f"{part}_conv1d"), rows) for part in "qkv"])
    return fill_by_name(name, shape)


def ling_name(config: Any, name: str) -> str:
    """Return what checkpoints call a Ling 3's parameter."""
    name = name.replace(".embed_tokens.", ".word_embeddings.").replace(".self_attn.", ".attention.")
    name = name.replace(".forget_gate.", ".").replace(".e_score_correction_bias", ".expert_bias")
    parts = name.split(".")
    # A draft head's layer, past the last, is of latent attention.
    is_full = parts[1] == "layers" and [*config.layer_types, *["full_attention"] * 9][int(parts[2])] == "full_attention"
    return name.replace(".o_proj.", ".dense.") if is_full else name


def stacked_experts(name: str, shape: tuple[int, ...], names: dict[str, tuple[str, ...]] | None = None) -> np.ndarray:
    """Return all experts' matrices as transformers holds them; each is filled by the name that checkpoints give it."""
    prefix, kind = name.rsplit(".", 1)
    names = names or {"gate_up_proj": ("gate_proj", "up_proj")}
    halves = names.get(kind, (kind,))
    rows = shape[1] // len(halves)
    each = [[fill_by_name(f"{prefix}.{e}.{half}.weight", (rows, shape[2])) for half in halves] for e in range(shape[0])]
    return np.stack([np.concatenate(parts) for parts in each])


def interleaved_experts(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return gpt-oss' stack of matrices, [X, in, out], or of biases, [X, out]: gate and up in turns along the last."""
    prefix, kind = name.removesuffix("_bias").rsplit(".", 1)
    halves = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    rows, part = shape[-1] // len(halves), "bias" if name.endswith("_bias") else "weight"
    out = np.empty(shape, np.float32)
    for e in range(shape[0]):
        for i, half in enumerate(halves):
            values = fill_by_name(f"{prefix}.{e}.{half}.{part}", (rows, shape[1]) if part == "weight" else (rows,))
            out[e, ..., i :: len(halves)] = values.T
    return out


def digits(values: Any) -> list[float]:
    return [float(f"{v:.7g}") for v in values.tolist()]


def config_dict(config: Any, class_name: str) -> dict[str, Any]:
    d = json.loads(config.to_json_string(use_diff=False))
    d["architectures"] = [class_name]
    d.pop("transformers_version", None)
    return d


def fixture_of(config: Any, logits: torch.Tensor) -> dict[str, Any]:
    class_name = type(hf.AutoModelForCausalLM.from_config(config)).__name__
    return {
        "config": config_dict(config, class_name),
        "token_ids": ids_of(config),
        "argmax": logits.argmax(-1).tolist(),
        "columns": [digits(row[:N_COLUMNS]) for row in logits],
        "rows": {str(t): digits(logits[t]) for t in (*WHOLE_ROWS, len(logits) - 1)},
    }


def write_models(names: list[str]) -> None:
    for name, config in models().items():
        if not names or name in names:
            write(OUT / f"{name}.json", fixture_of(config, logits_of(config)))


def write_mxfp4() -> None:
    """Write what transformers computes from a checkpoint with MXFP4 experts, which it dequantises itself."""
    config = hf.GptOssConfig(**GPT_OSS | {"intermediate_size": 64})
    ids = ids_of(config)
    words = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    as_dict = config_dict(config, "GptOssForCausalLM") | {"quantization_config": words}
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(as_dict))
        save_file(mxfp4_experts(as_dict)[0], Path(folder) / "model.safetensors")
        model = hf.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            quantization_config=hf.Mxfp4Config(dequantize=True),
            attn_implementation="eager",
        )
    with torch.no_grad():
        logits = model.eval()(torch.tensor([ids])).logits[0]
    rows = {str(t): digits(logits[t]) for t in (*WHOLE_ROWS, len(ids) - 1)}
    columns = [digits(row[:N_COLUMNS]) for row in logits]
    write(OUT.parent / "gpt_oss_mxfp4.json", {"config": as_dict, "token_ids": ids, "columns": columns, "rows": rows})


def write_ropes() -> None:
    base = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 256}
    factors = {"short_factor": [1.0 + 0.05 * j for j in range(16)], "long_factor": [2.0 + 0.5 * j for j in range(16)]}
    kinds = {
        "default": rope("default", 1e4),
        "default_partial": rope("default", 1e4, partial_rotary_factor=0.5),
        "linear": rope("linear", 1e4, factor=4.0),
        "dynamic": rope("dynamic", 1e4, factor=4.0),
        "llama3": LLAMA3,
        "yarn": YARN,
        "yarn_mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16, "truncate": False},
        "yarn_attention_factor": YARN | {"attention_factor": 1.5, "factor": 2.0},
        "longrope": rope("longrope", 1e4, factor=8.0, original_max_position_embeddings=64, **factors),
        "proportional": rope("proportional", 1e6, partial_rotary_factor=0.25),
    }
    rows = []
    for name, params in kinds.items():
        for length in (64, 256, 1024):
            config = hf.LlamaConfig(**BASE | base, rope_parameters=dict(params))
            kind = params["rope_type"]
            if kind == "default":
                dim = int(32 * params.get("partial_rotary_factor", 1.0))
                inv_freq, magnitude = 1.0 / params["rope_theta"] ** (torch.arange(0, dim, 2).double() / dim), 1.0
            else:
                inv_freq, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
            row = {"name": name, "length": length, "head_dim": 32, "max_position": 256, "params": params}
            rows.append(row | {"inv_freq": digits(inv_freq), "magnitude": float(magnitude)})
            if kind not in ("dynamic", "longrope"):
                break
    write(OUT.parent / "rope_tables.json", rows)


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, separators=(",", ":")) + "\n")
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    write_models(sys.argv[1:])
    write_mxfp4()
    write_ropes()
