"""Qwen3.5's config: each field honoured or refused, what it keeps of a sequence, and which tensors are left unread."""

from types import SimpleNamespace

import pytest

from tiercel.base.errors import ModelFileError, ShapeError, UnsupportedModel
from tiercel.models.registry import build_model
from tiercel.models.weights import check_weights
from tiercel.ops.program import KvLayer, StateLayer
from tiercel.ops.recorder import ComputeDtype, Recorder
from tiercel.quant.formats import Format

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
MROPE = TEXT["rope_parameters"] | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}


MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}


def model_of(architecture="Qwen3_5ForCausalLM", **more):
    return build_model({"architectures": [architecture], **TEXT, **more})


def tensors_of(model, **changed):
    shapes = model.expected_weights() | changed
    return {name: SimpleNamespace(shape=shape, format=Format.F32) for name, shape in shapes.items()}


def ops_of(model, name):
    return [op for op in model.record(tensors_of(model)).ops if op.op == name]


def test_full_layers_keep_keys_and_values_and_the_others_a_state():
    info = model_of().info
    state = StateLayer(0, "delta_rule", 2 * 2 * 16 + 6 * 24, 4, 6, 16, 24)
    assert info.kv_layers == (KvLayer(3, 2, 32, 0),)
    assert [layer.index for layer in info.state_layers] == [0, 1, 2]
    assert info.state_layers[0] == state
    # 3 inputs of 208 channels, and 6 states of 16 rows of 24 columns, kept as 32.
    assert state.nbytes == 3 * 208 * 4 + 6 * 16 * 32 * 4
    assert info.state_bytes == 3 * state.nbytes


def test_the_program_reads_and_keeps_what_the_model_says():
    model = model_of()
    program = model.record(tensors_of(model))
    read = {w.name for w in program.weights()}
    assert read == set(model.expected_weights())
    assert (program.kv_layers, program.state_layers) == (model.info.kv_layers, model.info.state_layers)


def test_layer_types_are_followed_before_the_interval():
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    info = model_of(layer_types=kinds, full_attention_interval=2).info
    assert [layer.index for layer in info.kv_layers] == [0, 3]
    info = model_of(full_attention_interval=2).info
    assert [layer.index for layer in info.kv_layers] == [1, 3]


@pytest.mark.parametrize(("given", "act"), [(None, "silu"), ("swish", "silu"), ("sigmoid", "sigmoid")])
def test_the_output_gate_is_the_one_that_is_named(given, act):
    norms = [op for op in ops_of(model_of(output_gate_type=given), "gated_norm") if op.weights]
    assert [op.word("act") for op in norms] == [act] * 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"output_gate_type": "relu"}, "output_gate_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "layer_types"),
        ({"num_experts": 8}, "num_experts"),
        ({"hc_count": 4}, "hc_count"),
    ],
)
def test_arithmetic_that_is_not_implemented_is_refused_by_name(changes, words):
    with pytest.raises(UnsupportedModel, match=words):
        model_of(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear_num_value_heads": 5}, "linear_num_value_heads is 5; a multiple of linear_num_key_heads 2"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types .* a list of 4 strings"),
        ({"rope_parameters": MROPE | {"mrope_section": [4, 1, 1]}}, "mrope_section of 4 frequencies"),
        ({"rope_parameters": MROPE | {"mrope_interleaved": "yes"}}, "mrope_interleaved"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
    ],
)
def test_a_field_that_makes_no_sense_is_refused_with_what_is_needed(changes, words):
    with pytest.raises(ModelFileError, match=words):
        model_of(**changes)


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("linear_attn.in_proj_qkv.weight", (200, 64), r"\[208, 64\]"),
        ("linear_attn.conv1d.weight", (208, 1, 3), r"\[208, 1, 4\]"),
        ("linear_attn.A_log", (5,), r"\[6\]"),
        ("linear_attn.dt_bias", (7,), r"\[6\]"),
        ("linear_attn.norm.weight", (16,), r"\[24\]"),
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_its_name_and_both_shapes(name, shape, needed):
    model, name = model_of(), f"model.layers.1.{name}"
    shown = ", ".join(map(str, shape))
    with pytest.raises(ModelFileError, match=rf"tensor {name} has shape \[{shown}\]; {needed} is needed"):
        check_weights(model, tensors_of(model, **{name: shape}))


def test_a_query_projection_without_its_gate_is_refused():
    model, name = model_of(), "model.layers.3.self_attn.q_proj.weight"
    with pytest.raises(ModelFileError, match=rf"{name} has shape \[128, 64\]; \[256, 64\] is needed"):
        check_weights(model, tensors_of(model, **{name: (128, 64)}))


def test_a_missing_state_tensor_is_named():
    model = model_of()
    tensors = tensors_of(model)
    del tensors["model.layers.2.linear_attn.A_log"]
    with pytest.raises(ModelFileError, match=r"tensor model.layers.2.linear_attn.A_log is missing"):
        check_weights(model, tensors)


def test_two_ops_cannot_share_a_layers_state():
    model = model_of()
    forward = model.forward

    def twice(rec, options):
        forward(rec, options)
        return forward(rec, options)

    model.forward = twice
    with pytest.raises(ShapeError, match="second short_conv of layer 0"):
        model.record(tensors_of(model))


def test_of_a_checkpoint_that_sees_only_the_text_part_is_read():
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": TEXT | {"rope_parameters": MROPE, "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1},
        "vision_config": {"depth": 2, "hidden_size": 32},
        "image_token_id": 100,
        "video_token_id": 101,
        "vision_start_token_id": 102,
        "vision_end_token_id": 103,
        "tie_word_embeddings": True,
    }
    model = build_model(config)
    assert model.config.is_tied
    tensors = tensors_of(model)
    assert all(name.startswith("model.language_model.") for name in tensors)
    unread = ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight", "lm_head.weight")
    check_weights(model, tensors | {name: SimpleNamespace(shape=(3, 3), format=Format.F32) for name in unread})
    with pytest.raises(ModelFileError, match=r"model.audio.weight"):
        check_weights(model, tensors | {"model.audio.weight": SimpleNamespace(shape=(3,), format=Format.F32)})
    with pytest.raises(ModelFileError, match="text_config is None; an object is needed"):
        build_model({"architectures": ["Qwen3_5ForConditionalGeneration"]})


@pytest.mark.parametrize("architecture", ["Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"])
def test_mixtures_read_and_keep_what_they_say(architecture):
    model = model_of(architecture, **MOE)
    program = model.record(tensors_of(model))
    assert {one.name for w in program.weights() for one in w.each()} == set(model.expected_weights())
    assert (program.kv_layers, program.state_layers) == (model.info.kv_layers, model.info.state_layers)
    assert model.expected_weights()["model.layers.0.mlp.shared_expert_gate.weight"] == (1, 64)


def test_qwen3_next_may_have_dense_layers_and_joint_projections():
    shapes = model_of("Qwen3NextForCausalLM", **MOE, mlp_only_layers=[1]).expected_weights()
    assert shapes["model.layers.1.mlp.up_proj.weight"] == (96, 64)
    assert "model.layers.1.mlp.gate.weight" not in shapes
    assert shapes["model.layers.0.linear_attn.in_proj_qkvz.weight"] == (208 + 144, 64)
    assert shapes["model.layers.0.linear_attn.in_proj_ba.weight"] == (12, 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_a_mixture_that_qwen3_5_has_not_is_refused_by_name(changes, words):
    with pytest.raises(UnsupportedModel, match=words):
        model_of("Qwen3_5MoeForCausalLM", **MOE, **changes)


def test_of_a_mixture_that_sees_only_the_text_part_is_read():
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "vision_config": {}, "text_config": TEXT | MOE}
    model = build_model(outer)
    assert all(name.startswith(("model.language_model.", "lm_head")) for name in model.expected_weights())
    assert model.may_ignore("model.visual.merger.weight")


def test_rows_that_do_not_divide_a_projection_are_refused():
    rec = Recorder("t", {"x": (16, 8), "w": (30, 8)}, {"x": Format.F32, "w": Format.F32}, ComputeDtype.AUTO)
    with pytest.raises(ModelFileError, match=r"tensor w has shape \[30, 8\]; a multiple of 8 rows"):
        rec.linear(rec.embed("x"), "w", rows=(8, 0, 4))


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"])
def test_the_draft_head_is_a_full_layer_whatever_the_last_is(architecture):
    kinds = ["full_attention"] + ["linear_attention"] * 3
    model = model_of(architecture, **(MOE if architecture != "Qwen3_5ForCausalLM" else {}), layer_types=kinds)
    shapes = model.mtp_weights()
    assert shapes["mtp.fc.weight"] == (64, 128)
    assert shapes["mtp.layers.0.self_attn.q_proj.weight"] == (256, 64)
    assert not any("linear_attn" in name for name in shapes)
    assert ("mtp.layers.0.mlp.gate.weight" in shapes) is (architecture != "Qwen3_5ForCausalLM")
    tensors = tensors_of(model) | {n: SimpleNamespace(shape=s, format=Format.F32) for n, s in shapes.items()}
    assert model.record_mtp(tensors).kv_layers == (KvLayer(4, 2, 32, 0),)


def test_a_draft_head_with_an_embedding_of_its_own_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match="mtp_use_dedicated_embeddings"):
        model_of(mtp_use_dedicated_embeddings=True)
