"""Recorded and lowered programs of tiny models, as text. A changed golden file is a change of what is computed.

To write the files again, from the repository's root:  PYTHONPATH=src python tests/unit/models/test_model_golden.py
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tiercel.models.registry import build_model
from tiercel.ops.passes import lower_and_fuse
from tiercel.quant.formats import Format
from tiercel.testing.tiny_model import ATTENTION_FREE_CONFIG

GOLDEN = Path(__file__).parent / "golden"
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
CASES = {
    "llama_q4_1": ("LlamaForCausalLM", Format.Q4_1, {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "llama_f32_biases": (
        "LlamaForCausalLM",
        Format.F32,
        {"num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    "mistral_q8_0_mixed": ("MistralForCausalLM", Format.Q8_0, {"num_hidden_layers": 1, "sliding_window": 8}),
    "qwen2_yarn_f16": ("Qwen2ForCausalLM", Format.F16, {"num_hidden_layers": 1, "rope_parameters": YARN}),
    "qwen3_q4_0": ("Qwen3ForCausalLM", Format.Q4_0, {"num_hidden_layers": 1, "head_dim": 32}),
    "qwen3_moe_q8_0": (
        "Qwen3MoeForCausalLM",
        Format.Q8_0,
        {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "smollm3_bf16": ("SmolLM3ForCausalLM", Format.BF16, {"num_hidden_layers": 2, "no_rope_layers": [1, 0]}),
    "gemma3_q5_0": (
        "Gemma3ForCausalLM",
        Format.Q5_0,
        {
            "num_hidden_layers": 2,
            "head_dim": 24,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 30.0,
        },
    ),
    "deepseek_v3_q8_0": (
        "DeepseekV3ForCausalLM",
        Format.Q8_0,
        {
            "num_hidden_layers": 2,
            "q_lora_rank": 32,
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
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "gpt_oss_q8_0": (
        "GptOssForCausalLM",
        Format.Q8_0,
        {
            "num_hidden_layers": 2,
            "head_dim": 32,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
        },
    ),
    "kimi_k3_q8_0": (
        "KimiLinearForCausalLM",
        Format.Q8_0,
        {
            "num_hidden_layers": 2,
            "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 32}
            | {"short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True},
            "attn_res_block_size": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "mla_use_output_gate": True,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 32,
            "routed_expert_hidden_size": 32,
            "latent_moe_use_norm": True,
        },
    ),
    "qwen3_5_q8_0": (
        "Qwen3_5ForCausalLM",
        Format.Q8_0,
        {
            "num_hidden_layers": 2,
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
    ),
    "mamba2_q8_0": ("Mamba2ForCausalLM", Format.Q8_0, {**ATTENTION_FREE_CONFIG, "num_hidden_layers": 2}),
}


def texts(case):
    architecture, format, more = CASES[case]
    model = build_model({"architectures": [architecture], **SIZES, **more})

    def format_of(name, shape):
        if len(shape) != 2:
            return Format.F32
        return Format.F16 if "mixed" in case and "v_proj" in name else format

    shapes = model.expected_weights()
    program = model.record({n: SimpleNamespace(shape=s, format=format_of(n, s)) for n, s in shapes.items()})
    return {f"{case}.recorded.txt": program.text(), f"{case}.lowered.txt": lower_and_fuse(program).text()}


@pytest.mark.parametrize("case", CASES)
def test_program_equals_its_golden_text(case):
    for name, text in texts(case).items():
        assert text == (GOLDEN / name).read_text(), name


def test_every_golden_file_has_a_case():
    assert sorted(p.name for p in GOLDEN.glob("*.txt")) == sorted(name for case in CASES for name in texts(case))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for case in CASES:
        for name, text in texts(case).items():
            (GOLDEN / name).write_text(text)
