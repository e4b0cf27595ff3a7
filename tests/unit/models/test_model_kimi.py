"""Kimi's configs: both dialects, what each layer is and keeps, and what is refused with the field or tensor's name."""

from types import SimpleNamespace

import pytest

from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.models.registry import build_model
from tiercel.models.weights import check_mtp_weights, check_weights
from tiercel.ops.dims import Dim
from tiercel.ops.program import KvLayer, StateLayer
from tiercel.quant.formats import Format

LINEAR = {
    "num_heads": 3,
    "head_dim": 24,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
}
TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "model_max_length": 256,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_router_activation_func": "sigmoid",
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": True,
    "rope_theta": 10000.0,
    "head_dim": 72,
    "linear_attn_config": LINEAR,
}
LATENT_EXPERTS = {"routed_expert_hidden_size": 48, "latent_moe_use_norm": True}


def model_of(**more):
    return build_model({"architectures": ["KimiLinearForCausalLM"], **TEXT, **more})


def tensors_of(model, **changed):
    shapes = model.expected_weights() | changed
    return {name: SimpleNamespace(shape=shape, format=Format.F32) for name, shape in shapes.items()}


def ops_of(model, name):
    return [op for op in model.record(tensors_of(model)).ops if op.op == name]


def test_full_layers_keep_latent_rows_and_the_others_a_state():
    info = model_of().info
    assert info.kv_layers == (KvLayer(1, 1, 40, 0, 32), KvLayer(3, 1, 40, 0, 32))
    assert info.state_layers == tuple(StateLayer(i, "delta_rule", 216, 4, 3, 24, 24) for i in (0, 2))
    assert info.max_len_tokens == 256


def test_what_k3_keeps_of_a_token_and_of_a_sequence():
    """27,648 B a token in half precision; 69 layers of 96 float32 states of 128 by 128, and 3 inputs of 36,864."""
    full = [*range(4, 93, 4), 93]
    linear = {**LINEAR, "num_heads": 96, "head_dim": 128, "full_attn_layers": full}
    linear["kda_layers"] = [i for i in range(1, 94) if i not in full]
    sizes = {"num_hidden_layers": 93, "num_attention_heads": 96, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    info = model_of(**sizes, linear_attn_config=linear).info
    assert info.kv_bytes_per_token("float16") == 27_648
    assert len(info.state_layers) == 69
    assert info.state_bytes == 69 * (96 * 128 * 128 + 3 * 36_864) * 4


@pytest.mark.parametrize("more", [{}, LATENT_EXPERTS, {"mla_use_output_gate": True}, {"num_shared_experts": None}])
def test_the_program_reads_and_keeps_what_the_model_says(more):
    model = model_of(**more)
    program = model.record(tensors_of(model))
    assert {one.name for w in program.weights() for one in w.each()} == set(model.expected_weights())
    assert (program.kv_layers, program.state_layers) == (model.info.kv_layers, model.info.state_layers)


def test_both_dialects_mean_the_same():
    theirs = {
        name: value for name, value in TEXT.items() if name not in ("linear_attn_config", "first_k_dense_replace")
    }
    renamed = {
        "model_max_length": "max_position_embeddings",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }
    for old, new in renamed.items():
        theirs[new] = theirs.pop(old)
    theirs |= {"linear_num_heads": 3, "linear_head_dim": 24, "linear_conv_kernel_dim": 4}
    theirs["layer_types"] = ["linear_attention", "full_attention"] * 2
    theirs["mlp_layer_types"] = ["dense", "sparse", "sparse", "sparse"]
    assert build_model({"model_type": "kimi_linear", **theirs}).config == model_of().config


def test_a_decays_bound_and_the_gate_of_full_rank_are_followed():
    model = model_of(linear_attn_config=LINEAR | {"gate_lower_bound": -5.0, "use_full_rank_gate": True})
    assert {op.real("lower_bound") for op in ops_of(model, "delta_rule")} == {-5.0}
    shapes = model.expected_weights()
    assert shapes["model.layers.0.self_attn.g_proj.weight"] == (72, 64)
    assert "model.layers.0.self_attn.g_a_proj.weight" not in shapes
    assert {op.real("lower_bound") for op in ops_of(model_of(), "delta_rule")} == {0.0}


def test_situ_has_its_two_betas():
    situ = {"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    assert {(op.real("beta"), op.real("linear_beta")) for op in ops_of(model_of(**situ), "experts")} == {(4.0, 25.0)}
    situ["activation_situ_linear_beta"] = None
    assert {(op.real("beta"), op.real("linear_beta")) for op in ops_of(model_of(**situ), "gated")} == {(4.0, 0.0)}


def test_layers_of_experts_may_be_each_second():
    names = model_of(first_k_dense_replace=2, moe_layer_freq=2).expected_weights()
    assert [f"model.layers.{i}.block_sparse_moe.gate.weight" in names for i in range(4)] == [False, False, True, False]
    names = model_of(first_k_dense_replace=4, num_experts=None, moe_intermediate_size=None).expected_weights()
    assert not any("block_sparse_moe" in name for name in names)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "layer_types is 'sliding_attention'"),
        ({"mlp_layer_types": ["dense"] * 3 + ["wide"]}, "mlp_layer_types is 'wide'"),
        ({"attn_gate_kind": "tanh"}, "attn_gate_kind is 'tanh'"),
        ({"linear_attn_config": LINEAR | {"o_norm": "layer"}}, "linear_attn_config: o_norm is 'layer'"),
        ({"kv_lora_rank": 36}, "kv_lora_rank is 36"),
    ],
)
def test_arithmetic_that_is_not_implemented_is_refused_by_name(changes, words):
    with pytest.raises(UnsupportedModel, match=words):
        model_of(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kda_layers": [1]}, r"kda_layers is \[1\]; .* each of layers 1 to 4 once \(3 is in neither list\)"),
        ({"kda_layers": [1, 2, 3]}, r"2 is in both lists"),
        ({"kda_layers": [1, 3, 5]}, r"5 is no layer"),
        ({"full_attn_layers": [0, 2, 4]}, r"0 is no layer"),
        ({"kda_layers": "1,3"}, "kda_layers is '1,3'; a list of integers"),
        ({"gate_lower_bound": 5.0}, "gate_lower_bound is 5.0; a number below 0"),
        ({"head_dim": None}, "linear_attn_config: head_dim is missing"),
    ],
)
def test_linear_layers_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(ModelFileError, match=words):
        model_of(linear_attn_config=LINEAR | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layer_types .* linear_attn_config names"),
        ({"max_position_embeddings": 128}, "max_position_embeddings 128, which is the same field"),
        ({"linear_head_dim": 16}, r"linear_head_dim is 16; linear_attn_config\.head_dim 24"),
        ({"linear_attn_config": [1]}, "linear_attn_config .* an object"),
        ({"num_experts_per_token": 9}, "num_experts_per_token is 9; at most num_experts 8"),
        ({"num_expert_group": 3}, "n_group is 3"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is None"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"hidden_act": "situ"}, "activation_situ_beta is missing"),
    ],
)
def test_a_field_that_makes_no_sense_is_refused_with_what_is_needed(changes, words):
    with pytest.raises(ModelFileError, match=words):
        model_of(**changes)


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("0.self_attn.q_conv1d.weight", (72, 1, 3), r"\[72, 1, 4\]"),
        ("0.self_attn.A_log", (4,), r"\[3\]"),
        ("0.self_attn.dt_bias", (3,), r"\[72\]"),
        ("0.self_attn.f_b_proj.weight", (3, 24), r"\[72, 24\]"),
        ("2.self_attn.g_b_proj.weight", (72, 16), r"\[72, 24\]"),
        ("1.self_attn.kv_b_proj.weight", (120, 32), r"\[128, 32\]"),
        ("3.block_sparse_moe.experts.5.w2.weight", (64, 48), r"\[64, 32\]"),
        ("3.block_sparse_moe.gate.e_score_correction_bias", (7,), r"\[8\]"),
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_its_name_and_both_shapes(name, shape, needed):
    model, name = model_of(), f"model.layers.{name}"
    shown = ", ".join(map(str, shape))
    with pytest.raises(ModelFileError, match=rf"tensor {name} has shape \[{shown}\]; {needed} is needed"):
        check_weights(model, tensors_of(model, **{name: shape}))


def test_a_missing_expert_is_named():
    model = model_of()
    tensors = tensors_of(model)
    del tensors["model.layers.2.block_sparse_moe.experts.7.w3.weight"]
    with pytest.raises(ModelFileError, match=r"tensor model.layers.2.block_sparse_moe.experts.7.w3.weight is missing"):
        check_weights(model, tensors)


K3 = {
    "linear_attn_config": LINEAR | {"gate_lower_bound": -5.0, "use_full_rank_gate": True},
    "q_lora_rank": 24,
    "mla_use_output_gate": True,
    "attn_res_block_size": 2,
    **LATENT_EXPERTS,
}


def test_a_bank_has_a_row_for_each_so_many_layers():
    mixes = ops_of(model_of(**K3), "residual_mix")
    # Nothing is mixed before the first attention; then each layer's two parts and the end mix what the bank has.
    assert [len(op.inputs) for op in mixes] == [2, 2, 2, 2, 3, 3, 3, 3]
    assert [op.inputs[0] for op in mixes[:-2]] == [mixes[0].inputs[0]] * 6
    assert ops_of(model_of(), "residual_mix") == []


def test_the_last_layer_passes_on_only_rows_that_need_logits():
    program = model_of(**K3).record(tensors_of(model_of(**K3)))
    assert {op.output.rows for op in program.ops if op.op == "residual_mix"} == {Dim.TOKENS, Dim.ROWS}
    whole = model_of(**K3).record(tensors_of(model_of(**K3)), keeps_hidden=True)
    assert {op.output.rows for op in whole.ops if op.op == "residual_mix"} == {Dim.TOKENS}
    assert (whole.hidden.rows, whole.hidden.width) == (Dim.TOKENS, 64)
    assert program.hidden is None


def test_k3_reads_and_keeps_what_it_says():
    model = model_of(**K3)
    program = model.record(tensors_of(model))
    assert {one.name for w in program.weights() for one in w.each()} == set(model.expected_weights())
    assert (program.kv_layers, program.state_layers) == (model.info.kv_layers, model.info.state_layers)
    assert "model.layers.0.self_attention_res_norm.weight" not in model.expected_weights()
    assert model.may_ignore("model.layers.0.self_attention_res_proj.weight")
    assert not model.may_ignore("model.layers.1.self_attention_res_proj.weight_scale")


def test_the_draft_head_has_weights_and_a_latent_row_of_its_own():
    model = model_of(**K3)
    shapes = model.mtp_weights()
    tensors = tensors_of(model) | {n: SimpleNamespace(shape=s, format=Format.F32) for n, s in shapes.items()}
    head = model.record_mtp(tensors)
    assert {one.name for w in head.weights() for one in w.each()} == set(shapes)
    assert all(name.startswith("model.layers.4.") for name in shapes)
    assert head.kv_layers == (KvLayer(4, 1, 40, 0, 32),)
    assert head.state_layers == ()
    assert (head.hidden.rows, head.hidden.width) == (Dim.TOKENS, 64)
    assert head.output.width == 128


def test_a_draft_head_is_checked_by_who_records_it():
    """A model whose head is broken runs without it."""
    model = model_of(**K3, num_nextn_predict_layers=1)
    tensors = tensors_of(model)
    assert not model.has_mtp(tensors)
    whole = tensors | {n: SimpleNamespace(shape=s, format=Format.F32) for n, s in model.mtp_weights().items()}
    assert model.has_mtp(whole)
    unread = {"model.layers.4.self_attention_res_norm.weight": SimpleNamespace(shape=(64,), format=Format.F32)}
    check_weights(model, whole | unread)
    check_mtp_weights(model, whole | unread)
    whole["model.layers.4.eh_proj.weight"] = SimpleNamespace(shape=(64, 64), format=Format.F32)
    with pytest.raises(ModelFileError, match=r"layers\.4\.eh_proj\.weight has shape \[64, 64\]; \[64, 128\] is needed"):
        check_mtp_weights(model, whole)
    del whole["model.layers.4.eh_proj.weight"]
    with pytest.raises(ModelFileError, match=r"layers\.4\.eh_proj\.weight is missing"):
        check_mtp_weights(model, whole)
    check_weights(model, whole)


def test_a_model_without_a_draft_head_says_so():
    llama = build_model({"architectures": ["LlamaForCausalLM"], **SMALL})
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM has no draft head"):
        llama.record_mtp(tensors_of(llama))


SMALL = {name: TEXT[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
SMALL |= {"num_attention_heads": 4, "max_position_embeddings": 64}
SEEING = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "text_config": TEXT | K3,
    "vision_config": {"patch_size": 14},
    "media_placeholder_token_id": 7,
}


def test_of_a_checkpoint_that_sees_only_the_text_part_is_read():
    model = build_model(SEEING)
    assert all(name.startswith("language_model.") for name in model.expected_weights() | model.mtp_weights())
    unread = ("vision_tower.pos_emb.weight", "mm_projector.post_norm.weight")
    given = tensors_of(model) | {name: SimpleNamespace(shape=(3, 3), format=Format.F32) for name in unread}
    check_weights(model, given)
    with pytest.raises(ModelFileError, match=r"tensor model\.norm\.weight"):
        check_weights(model, given | {"model.norm.weight": SimpleNamespace(shape=(64,), format=Format.F32)})


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"text_config": None}, ModelFileError, "text_config is None; an object is needed"),
        ({"audio_config": {"layers": 2}}, UnsupportedModel, "audio_config"),
        ({"tie_word_embeddings": True}, ModelFileError, "tie_word_embeddings is True; what text_config says"),
    ],
)
def test_an_outer_config_that_says_more_is_refused_by_name(changes, error, words):
    with pytest.raises(error, match=words):
        build_model(SEEING | changes)


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("layers.1.self_attention_res_proj.weight", (64,), r"\[1, 64\]"),
        ("layers.3.mlp_res_norm.weight", (63,), r"\[64\]"),
        ("output_attn_res_proj.weight", (2, 64), r"\[1, 64\]"),
        ("layers.2.block_sparse_moe.routed_expert_up_proj.weight", (64, 64), r"\[64, 48\]"),
        ("layers.2.block_sparse_moe.experts.0.w1.weight", (32, 64), r"\[32, 48\]"),
        ("layers.1.self_attn.g_proj.weight", (72, 64), r"\[64, 64\]"),
    ],
)
def test_a_tensor_of_k3_of_another_shape_is_refused_with_its_name_and_both_shapes(name, shape, needed):
    model, name = model_of(**K3), f"model.{name}"
    shown = ", ".join(map(str, shape))
    with pytest.raises(ModelFileError, match=rf"tensor {name} has shape \[{shown}\]; {needed} is needed"):
        check_weights(model, tensors_of(model, **{name: shape}))
