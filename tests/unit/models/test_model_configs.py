"""Every field that changes the arithmetic is honoured or refused by name."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.models.registry import ARCHITECTURES, build_model
from tiercel.models.weights import check_weights
from tiercel.ops.recorder import ComputeDtype
from tiercel.quant.formats import Format
from tiercel.testing.tiny_model import ATTENTION_FREE_CONFIG

FIXTURES = Path(__file__).parent.parent.parent / "model" / "fixtures"
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}


def config(architecture, **more):
    return {"architectures": [architecture], **SIZES, **more}


def tensors(model, format=Format.F32):
    return {name: SimpleNamespace(shape=s, format=format) for name, s in model.expected_weights().items()}


def attention_ops(model):
    return [op for op in model.record(tensors(model)).ops if op.op == "attention"]


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "Gemma3ForConditionalGeneration", "gpt2", None, 3])
def test_an_unknown_architecture_is_refused_and_the_known_ones_are_listed(architecture):
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM, MistralForCausalLM"):
        build_model(config(architecture))


def test_an_architecture_may_be_told_by_its_model_type():
    model = build_model({**SIZES, "model_type": "qwen2"})
    assert model.info.architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("LlamaForCausalLM", "pretraining_tp", 2),
        ("LlamaForCausalLM", "hidden_act", "gelu"),
        ("LlamaForCausalLM", "sliding_window", 64),
        ("LlamaForCausalLM", "num_experts", 8),
        ("LlamaForCausalLM", "num_local_experts", 8),
        ("LlamaForCausalLM", "logit_scale", 0.5),
        ("LlamaForCausalLM", "attention_chunk_size", 8192),
        ("LlamaForCausalLM", "layer_types", ["full_attention", "linear_attention", "full_attention"]),
        ("LlamaForCausalLM", "rope_scaling", {"rope_type": "mrope", "mrope_section": [1, 2]}),
        ("LlamaForCausalLM", "rope_scaling", {"rope_type": "linear", "factor": 2.0, "surprise": 1}),
        ("LlamaForCausalLM", "is_encoder_decoder", True),
        ("MistralForCausalLM", "attention_bias", True),
        ("MistralForCausalLM", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("Qwen2ForCausalLM", "attention_bias", False),
        ("Qwen2ForCausalLM", "use_mrope", True),
        ("Qwen3MoeForCausalLM", "shared_expert_intermediate_size", 64),
        ("Qwen3MoeForCausalLM", "n_group", 2),
        ("Gemma3ForCausalLM", "use_bidirectional_attention", True),
        ("Gemma3ForCausalLM", "attn_logit_softcapping", 50.0),
        ("Gemma3ForCausalLM", "hidden_activation", "relu"),
        ("Gemma3ForCausalLM", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(architecture, field, value):
    names = "rope_type|surprise" if field == "rope_scaling" else field
    with pytest.raises(UnsupportedModel, match=f"({names}) is .*not implemented"):
        build_model(config(architecture, **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("hidden_size", 1 << 40),
        ("hidden_size", 65),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 10**6),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("rope_theta", -1.0),
        ("rope_scaling", [1]),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}),
        ("rope_scaling", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
        ("partial_rotary_factor", 0.01),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["sliding_attention"] * 3),
    ],
)
def test_a_field_that_makes_no_sense_is_named(field, value):
    name = {"rope_scaling": "factor|rope_scaling", "layer_types": "layer_types|sliding_window"}.get(field, field)
    with pytest.raises(ModelFileError, match=name):
        build_model(config("LlamaForCausalLM", **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", 0),
        ("num_experts", 2.5),
        ("num_experts", 1 << 20),
        ("num_local_experts", 64),
        ("num_experts_per_tok", 129),
        ("moe_intermediate_size", -1),
        ("decoder_sparse_step", 0),
        ("mlp_only_layers", [1, "2"]),
        ("mlp_only_layers", 3),
        ("norm_topk_prob", "yes"),
    ],
)
def test_a_field_of_experts_that_makes_no_sense_is_named(field, value):
    with pytest.raises(ModelFileError, match=field):
        build_model(config("Qwen3MoeForCausalLM", **{"num_experts": 128} | {field: value}))


def test_layers_have_experts_where_the_config_says():
    def sparse(**more):
        return sorted(build_model(config("Qwen3MoeForCausalLM", **more)).sparse_layers)

    assert sparse() == [0, 1, 2]
    assert sparse(decoder_sparse_step=2) == [1]
    assert sparse(mlp_only_layers=[0, 2, 7]) == [1]
    assert sparse(decoder_sparse_step=4) == []


def test_fields_that_are_off_or_harmless_are_accepted():
    build_model(config("LlamaForCausalLM", unknown=False, other=None, more=0, torch_dtype="bfloat16", _private=7))


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.json")), ids=lambda p: p.stem)
def test_every_config_that_transformers_writes_for_them_is_read(path):
    build_model(json.loads(path.read_text())["config"])


def test_head_dim_defaults_to_what_the_architecture_says():
    assert build_model(config("LlamaForCausalLM")).info.head_dim == 16
    assert build_model(config("Qwen3ForCausalLM")).info.head_dim == 128
    assert build_model(config("Gemma3ForCausalLM")).info.head_dim == 256
    assert build_model(config("LlamaForCausalLM", head_dim=24)).info.head_dim == 24


def test_a_llama_without_key_value_heads_has_as_many_as_heads():
    assert build_model(config("LlamaForCausalLM", num_key_value_heads=None)).info.n_kv_heads == 4


@pytest.mark.parametrize(("more", "windows"), [({}, 4096), ({"sliding_window": None}, 0), ({"sliding_window": 8}, 8)])
def test_mistral_slides_on_every_layer_unless_its_window_is_null(more, windows):
    layers = build_model(config("MistralForCausalLM", **more)).info.kv_layers
    assert {layer.window for layer in layers} == {windows}


def test_qwen_slides_from_max_window_layers_on():
    fields = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        model = build_model(config(architecture, **fields))
        assert [layer.window for layer in model.info.kv_layers] == [0, 0, 8]
        fields_off = fields | {"use_sliding_window": False}
        model = build_model(config(architecture, **fields_off))
        assert [layer.window for layer in model.info.kv_layers] == [0, 0, 0]


def test_layer_types_overrule_the_pattern():
    types = ["full_attention", "sliding_attention", "full_attention"]
    model = build_model(config("Gemma3ForCausalLM", layer_types=types, sliding_window=8))
    assert [layer.window for layer in model.info.kv_layers] == [0, 8, 0]
    assert [layer.window for layer in build_model(config("Gemma3ForCausalLM")).info.kv_layers] == [4096] * 3


def test_gemma_scales_scores_by_query_pre_attn_scalar():
    model = build_model(config("Gemma3ForCausalLM", query_pre_attn_scalar=168))
    assert attention_ops(model)[0].real("scale") == pytest.approx(168**-0.5)


def test_older_gemma_rope_fields_mean_the_same_as_newer_ones():
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = config("Gemma3ForCausalLM", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=scaling)
    new = config(
        "Gemma3ForCausalLM",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert build_model(old).config == build_model(new).config


@pytest.mark.parametrize(
    ("format", "scale"), [(Format.F32, 1152**0.5), (Format.BF16, 34.0), (Format.F16, 33.9375), (Format.Q4_K, 1152**0.5)]
)
def test_gemma_rounds_the_embedding_scale_like_its_embedding(format, scale):
    sizes = {"hidden_size": 1152, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 256}
    model = build_model(config("Gemma3ForCausalLM", **sizes))
    given = tensors(model) | {"model.embed_tokens.weight": SimpleNamespace(shape=(256, 1152), format=format)}
    program = model.record(given, compute_dtype=ComputeDtype.FLOAT32)
    assert program.ops[0].real("scale") == pytest.approx(scale, rel=1e-7)


def test_norm_weights_that_include_the_one_get_no_second():
    model = build_model(config("Gemma3ForCausalLM"))
    added = {w.plus_one for w in model.record(tensors(model)).weights() if "norm" in w.name}
    included = model.record(tensors(model), norm_weights_include_one=True)
    assert added == {True}
    assert not any(w.plus_one for w in included.weights())


# Those that see have their text part in a config of its own.
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if not name.endswith("ConditionalGeneration")])
def test_a_program_reads_exactly_the_expected_weights(architecture):
    given = config(architecture, **(LATENT if architecture.startswith(("Deepseek", "Kimi", "Bailing")) else {}))
    if architecture.startswith("Bailing"):
        given["layer_group_size"] = 3
    if architecture.startswith(("Kimi", "Bailing")):
        given["num_experts"] = given.pop("n_routed_experts")
    if architecture.startswith("Mamba"):
        given |= ATTENTION_FREE_CONFIG
    if "ert" in architecture:  # BERT's heads have keys of their own
        del given["num_key_value_heads"]
    model = build_model(given)
    program = model.record(tensors(model))
    expected, read = model.expected_weights(), [one for w in program.weights() for one in w.each()]
    assert {w.name: expected[w.name] if w.rows else w.shape for w in read} == expected
    for name, shape in expected.items():  # what is read in parts is read once and whole
        assert sum(w.shape[0] for w in read if w.name == name) == shape[0]
    assert (program.kv_layers, program.state_layers) == (model.info.kv_layers, model.info.state_layers)


def test_info_counts_parameters_and_bytes_of_a_token():
    model = build_model(json.loads((FIXTURES / "llama_rope_llama3_tied.json").read_text())["config"])
    assert model.info.n_parameters == 137_664
    assert model.info.kv_bytes_per_token() == 3 * 2 * 2 * 16 * 2
    assert model.info.kv_bytes_per_token("float32") == 2 * model.info.kv_bytes_per_token("float16")
    assert model.info.kv_bytes_per_token("int8") == 3 * 2 * 2 * (16 + 2)
    gemma = build_model(json.loads((FIXTURES / "gemma3_pattern_3_softcap.json").read_text())["config"])
    assert gemma.info.n_parameters == 304_992


@pytest.mark.parametrize(
    ("scaling", "max_len"),
    [
        (None, 256),
        ({"rope_type": "linear", "factor": 4.0}, 1024),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "dynamic", "factor": 4.0}, 256),
    ],
)
def test_the_longest_text_follows_from_the_rotation(scaling, max_len):
    assert build_model(config("LlamaForCausalLM", rope_scaling=scaling)).info.max_len_tokens == max_len


class TestCheckWeights:
    def model(self, **more):
        return build_model(config("LlamaForCausalLM", **more))

    def test_accepts_a_whole_checkpoint_and_what_may_be_ignored(self):
        model = self.model(tie_word_embeddings=True)
        given = tensors(model)
        given["lm_head.weight"] = given["model.embed_tokens.weight"]
        given["model.layers.0.self_attn.rotary_emb.inv_freq"] = SimpleNamespace(shape=(8,), format=Format.F32)
        check_weights(model, given)

    def test_names_a_missing_tensor_and_its_shape(self):
        given = tensors(self.model())
        del given["model.layers.2.mlp.up_proj.weight"]
        with pytest.raises(ModelFileError, match=r"model\.layers\.2\.mlp\.up_proj\.weight is missing; \[160, 64\]"):
            check_weights(self.model(), given)

    def test_names_both_shapes_of_a_wrong_one(self):
        given = tensors(self.model())
        given["lm_head.weight"] = SimpleNamespace(shape=(127, 64), format=Format.F32)
        with pytest.raises(ModelFileError, match=r"lm_head\.weight has shape \[127, 64\]; \[128, 64\] is needed"):
            check_weights(self.model(), given)

    def test_refuses_a_tensor_that_no_op_reads(self):
        given = tensors(self.model())
        given["model.layers.0.self_attn.q_proj.bias"] = SimpleNamespace(shape=(64,), format=Format.F32)
        with pytest.raises(ModelFileError, match=r"q_proj\.bias of shape \[64\] is read by no op"):
            check_weights(self.model(), given)

    @pytest.mark.parametrize("n_in_file", [7, 9])
    def test_refuses_another_number_of_experts_than_the_config_has(self, n_in_file):
        given, asked = (
            build_model(config("Qwen3MoeForCausalLM", num_experts=n, num_experts_per_tok=2)) for n in (n_in_file, 8)
        )
        with pytest.raises(ModelFileError, match=r"mlp\.gate\.weight has shape|experts\.7\.gate_proj\.weight"):
            check_weights(asked, tensors(given))

    def test_names_a_missing_expert_and_both_shapes_of_a_wrong_one(self):
        model = build_model(config("Qwen3MoeForCausalLM", num_experts=8, moe_intermediate_size=32))
        name = "model.layers.1.mlp.experts.5.up_proj.weight"
        given = tensors(model)
        del given[name]
        with pytest.raises(ModelFileError, match=r"1\.mlp\.experts\.5\.up_proj\.weight is missing; \[32, 64\]"):
            check_weights(model, given)
        given[name] = SimpleNamespace(shape=(64, 32), format=Format.F32)
        with pytest.raises(ModelFileError, match=r"experts\.5\.up_proj\.weight has shape \[64, 32\]; \[32, 64\]"):
            check_weights(model, given)

    def test_refuses_an_untied_head_that_is_missing(self):
        with pytest.raises(ModelFileError, match=r"lm_head\.weight is missing"):
            check_weights(self.model(), tensors(self.model(tie_word_embeddings=True)))
