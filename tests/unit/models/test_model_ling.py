"""Ling 3 configs: the released one, which layer is what, where experts are clamped, and what is refused."""

from types import SimpleNamespace

import pytest

from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.models.registry import build_model
from tiercel.quant.formats import Format

TINY = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "layer_group_size": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
}
RELEASED = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "eos_token_id": 156895,
    "expert_swiglu_limit_list": [0.0] * 35 + [4.0] * 7,
    "share_expert_swiglu_limit_list": [0.0] * 34 + [5.0] * 6 + [7.0] * 2,
    "first_k_dense_replace": 2,
    "gated_attention_proj_granularity_type": "head_wise",
    "group_norm_size": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "kda_lower_bound": -5.0,
    "kda_safe_gate": True,
    "kv_lora_rank": 512,
    "layer_group_size": 6,
    "linear_silu": True,
    "max_position_embeddings": 262144,
    "max_window_layers": 20,
    "model_type": "bailing_hybrid",
    "moe_intermediate_size": 768,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 768,
    "mtp_loss_scaling_factor": 0,
    "mtp_use_kda": False,
    "n_group": 8,
    "no_kda_lora": True,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 42,
    "num_key_value_heads": 32,
    "num_kv_heads_for_linear_attn": 0,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "output_router_logits": False,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": None,
    "qk_head_dim": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 6000000, "rope_type": "default"},
    "rope_theta": 6000000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "short_conv_kernel_size": 4,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "use_bias": False,
    "use_mla_nope": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "v_head_dim": 128,
    "vocab_size": 157184,
}


def recorded(config):
    model = build_model(config)
    shapes = model.expected_weights()
    return model.record({name: SimpleNamespace(shape=shape, format=Format.F32) for name, shape in shapes.items()})


def test_the_released_config_keeps_8064_bytes_a_token_and_a_state_for_each_of_35_layers():
    info = build_model(RELEASED).info
    assert info.kv_bytes_per_token("float16") == 8064
    assert [layer.index for layer in info.kv_layers] == [5, 11, 17, 23, 29, 35, 41]
    assert len(info.state_layers) == 35
    # A float32 window of 3 inputs of 12,288 channels, and 32 matrices of 128 by 128.
    assert info.state_bytes == 35 * (4 * 3 * 12288 + 4 * 32 * 128 * 128)


def test_a_rotation_is_as_wide_as_its_columns_whatever_the_partial_factor_says():
    assert build_model(RELEASED).config.ropes["rope"].dim == 64


def test_only_late_experts_are_clamped_each_half_by_its_own_list():
    found = {i: limits for i, limits in enumerate(build_model(RELEASED).config.limits) if any(limits)}
    assert found == {34: (0.0, 5.0), **dict.fromkeys(range(35, 40), (4.0, 5.0)), 40: (4.0, 7.0), 41: (4.0, 7.0)}


def test_clamped_experts_and_shared_experts_are_recorded_where_the_lists_say():
    lists = {"expert_swiglu_limit_list": [0, 0, 0.5, 4], "share_expert_swiglu_limit_list": [9, 5, 0, 7, 3]}
    program = recorded(TINY | lists | {"num_nextn_predict_layers": 1})
    acts = [(op.op, op.word("act"), op.attrs.get("limit")) for op in program.ops if op.op in ("experts", "gated")]
    assert acts == [
        ("gated", "silu", None),  # a dense layer has neither
        ("experts", "silu", None),
        ("gated", "silu_clamp", 5.0),
        ("experts", "silu_clamp", 0.5),
        ("gated", "silu", None),
        ("experts", "silu_clamp", 4.0),
        ("gated", "silu_clamp", 7.0),
    ]


def test_the_safe_gate_bounds_decays_and_without_it_they_have_no_bound():
    for more, bound in (({}, -5.0), ({"kda_lower_bound": -2}, -2.0), ({"kda_safe_gate": False}, 0.0)):
        rules = [op for op in recorded(TINY | more).ops if op.op == "delta_rule"]
        assert [rule.real("lower_bound") for rule in rules] == [bound] * 2


def test_layers_that_draft_may_be_left_unread_and_no_others():
    drafting = build_model(TINY | {"num_nextn_predict_layers": 1})
    assert drafting.may_ignore("model.layers.4.eh_proj.weight")
    assert not drafting.may_ignore("model.layers.5.eh_proj.weight")
    assert not build_model(TINY).may_ignore("model.layers.4.eh_proj.weight")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"gated_attention_proj_granularity_type": "element_wise"}, "granularity_type is 'element_wise'"),
        ({"no_kda_lora": False}, "no_kda_lora is False"),
        ({"score_function": "softmax"}, "score_function is 'softmax'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_qkv_bias": True}, "use_qkv_bias is True"),
        ({"use_mla_nope": True}, "use_mla_nope is True"),
        ({"value_norm": True}, "value_norm is True"),
        ({"scale_router_input": True}, "scale_router_input is True"),
        ({"moe_shared_expert_intermediate_size": 64}, "moe_shared_expert_intermediate_size is 64"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling is .*stretches"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer_types is 'sliding_attention'"),
        ({"mlp_layer_types": ["dense"] * 3 + ["moe"]}, "mlp_layer_types is 'moe'"),
        ({"kv_lora_rank": 36}, "kv_lora_rank is 36"),
    ],
)
def test_arithmetic_that_is_not_there_is_refused_by_its_field(more, message):
    with pytest.raises(UnsupportedModel, match=message):
        build_model(TINY | more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types .*a list of 4 strings"),
        ({"mlp_layer_types": ["sparse"] * 5}, "mlp_layer_types .*a list of 4 strings"),
        ({"layer_group_size": 3}, "layer_group_size is 3; a divisor of num_hidden_layers 4, or layer_types"),
        ({"expert_swiglu_limit_list": [0, 0, 4]}, "expert_swiglu_limit_list .*a list of 4 numbers"),
        ({"share_expert_swiglu_limit_list": [0, 0, 0, 0, 4]}, "share_expert_swiglu_limit_list .*a list of 4 numbers"),
        ({"expert_swiglu_limit_list": [0, 0, -1, 0]}, "expert_swiglu_limit_list"),
        ({"expert_swiglu_limit_list": 4.0}, "expert_swiglu_limit_list is 4.0"),
        ({"kda_lower_bound": 0.5}, "kda_lower_bound is 0.5"),
        ({"rotary_dim": 16}, "rotary_dim is 16; qk_rope_head_dim 8"),
        ({"n_group": 3}, "n_group is 3"),
        ({"num_experts_per_tok": 5}, "top_k 5 of 4 experts in the kept groups"),
        ({"num_local_experts": 9}, "num_local_experts is 9; num_experts 8, which is the same field"),
        ({"num_experts": 5000}, "at most 4096 experts"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is 3; short_conv_kernel_size 4"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_their_field(more, message):
    with pytest.raises(ModelFileError, match=message):
        build_model(TINY | more)
