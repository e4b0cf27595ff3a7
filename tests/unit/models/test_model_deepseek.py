"""DeepSeek configs: what is read, and what is refused with a reason."""

import math

import pytest

from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.models.registry import build_model

BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}
V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"


def config(architecture=V3, **more):
    return {"architectures": [architecture], **BASE, **more}


def test_a_token_leaves_one_row_a_layer():
    info = build_model(config()).info
    assert [(k.n_kv_heads, k.head_dim, k.latent_values) for k in info.kv_layers] == [(1, 40, 32)] * 2
    assert info.kv_bytes_per_token("float16") == 2 * 40 * 2
    assert info.kv_dtypes == ("float16", "float32")


def test_released_v3_keeps_70_272_bytes_a_token():
    sizes = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}
    assert build_model(config(**sizes)).info.kv_bytes_per_token("float16") == 61 * 576 * 2


def test_scores_grow_with_the_stretched_rotation():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64}
    plain = build_model(config(rope_parameters=yarn)).config.attention_scale
    grown = build_model(config(rope_parameters=yarn | {"mscale": 1.0, "mscale_all_dim": 1.0})).config.attention_scale
    assert plain == pytest.approx(24**-0.5)
    assert grown == pytest.approx(24**-0.5 * (0.1 * math.log(40.0) + 1.0) ** 2)


def test_mixtures_begin_after_the_dense_layers():
    names = build_model(config()).expected_weights()
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert names["model.layers.1.mlp.gate.e_score_correction_bias"] == (8,)
    assert not any(n.startswith("model.layers.0.mlp.experts") for n in names)
    assert build_model(config(first_k_dense_replace=2)).mixture is None


def test_v2_has_no_correction_and_takes_groups_only_where_told():
    greedy = build_model(config(V2, topk_method="greedy"))
    assert greedy.mixture.routing.n_groups == 1
    assert not any("correction" in name for name in greedy.expected_weights())
    limited = build_model(config(V2, topk_method="group_limited_greedy")).mixture.routing
    assert (limited.n_groups, limited.n_groups_kept, limited.group_top, limited.renormalises) == (4, 2, 1, False)


@pytest.mark.parametrize(
    ("architecture", "more", "message"),
    [
        (V3, {"kv_lora_rank": 36}, "kv_lora_rank is 36"),
        (V3, {"qk_rope_head_dim": 12}, "qk_rope_head_dim is 12"),
        (V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (V3, {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob is True"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
    ],
)
def test_arithmetic_that_is_not_there_is_refused_by_its_field(architecture, more, message):
    with pytest.raises(UnsupportedModel, match=message):
        build_model(config(architecture, **more))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"qk_head_dim": 25}, "qk_head_dim is 25; qk_nope_head_dim [+] qk_rope_head_dim 24 is needed"),
        ({"n_group": 3}, "n_group is 3"),
        ({"topk_group": 5}, "5 of 4 groups"),
        ({"num_experts_per_tok": 5}, "top_k 5 of 4 experts in the kept groups"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"v_head_dim": 0}, "v_head_dim is 0"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_their_field(more, message):
    with pytest.raises(ModelFileError, match=message):
        build_model(config(**more))


def test_the_draft_head_is_the_layer_past_the_last_and_shares_the_embedding():
    shapes = build_model(config(num_nextn_predict_layers=1)).mtp_weights()
    assert all(name.startswith("model.layers.2.") for name in shapes)
    assert shapes["model.layers.2.eh_proj.weight"] == (64, 128)
    assert shapes["model.layers.2.mlp.gate.weight"] == (8, 64)
    assert shapes["model.layers.2.self_attn.kv_b_proj.weight"] == (128, 32)
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in shapes)


@pytest.mark.parametrize(("more", "n"), [({}, 1), ({"num_nextn_predict_layers": 0}, 1), ({"num_mtp_layers": 3}, 3)])
def test_a_draft_head_has_as_many_modules_as_the_config_says_and_one_where_it_says_none(more, n):
    model = build_model(config(**more))
    assert model.n_mtp_modules == n
    assert {name.split(".")[2] for name in model.mtp_weights()} == {str(2 + module) for module in range(n)}
    assert set(model.mtp_weights(1)) == set(model.mtp_module_weights(0))


@pytest.mark.parametrize("n", [-1, 17, True, "2"])
def test_a_number_of_modules_that_is_none_is_refused(n):
    with pytest.raises(ModelFileError, match="num_nextn_predict_layers"):
        build_model(config(num_nextn_predict_layers=n))


def test_v2_has_no_draft_head():
    model = build_model(config(V2, topk_method="greedy"))
    assert model.mtp_weights() == {}
    assert not model.has_mtp(["model.layers.2.eh_proj.weight"])
    with pytest.raises(UnsupportedModel, match="DeepseekV2ForCausalLM has no draft head"):
        model.record_mtp({})
