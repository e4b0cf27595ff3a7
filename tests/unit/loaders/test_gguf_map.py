from contextlib import suppress

import model_bytes as mb
import numpy as np
import pytest

from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.loaders.checkpoint import open_checkpoint
from tiercel.loaders.gguf_map import unpermute_rows
from tiercel.models.registry import build_model
from tiercel.models.weights import check_weights

ARCHES = ("llama", "qwen2", "qwen3", "gemma3")
LAYER = "model.layers.1."


def opened(put, arch="llama", *, tensors=None, extra=None, drop=(), **changes):
    """Open a tiny model. `extra` are whole metadata keys, `changes` keys under the architecture."""
    metadata = mb.metadata(arch, **changes) | (extra or {})
    for key in drop:
        del metadata[key]
    return open_checkpoint(put(mb.gguf(metadata, mb.filled(tensors or mb.shapes(arch)))))


def assert_unsupported(put, match, *args, **options):
    with pytest.raises(UnsupportedModel, match=match):
        opened(put, *args, **options)


def assert_refused(put, match, *args, **options):
    with pytest.raises(ModelFileError, match=match):
        opened(put, *args, **options)


# Names


@pytest.mark.parametrize("arch", ARCHES)
def test_every_tensor_gets_its_hugging_face_name(put, arch):
    names = {name.removeprefix(LAYER) for name in opened(put, arch).tensors if not name.startswith("model.layers.0")}
    expected = {"model.embed_tokens.weight", "model.norm.weight", "input_layernorm.weight"}
    expected |= {"post_attention_layernorm.weight"}
    expected |= {f"self_attn.{x}_proj.weight" for x in "qkvo"} | {
        f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")
    }
    if arch == "qwen2":
        expected |= {f"self_attn.{x}_proj.bias" for x in "qkv"}
    if arch in ("qwen3", "gemma3"):
        expected |= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    if arch == "gemma3":
        expected |= {"pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"}
    assert names == expected


def test_stacked_experts_become_a_tensor_each(put):
    checkpoint = opened(put, "qwen3moe")
    values = mb.filled(mb.shapes("qwen3moe"))
    for old, new in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
        _, shape, raw = values[f"blk.1.ffn_{old}_exps.weight"]
        stack = np.frombuffer(raw, np.float32).reshape(shape)
        for e in range(mb.EXPERTS):
            tensor = checkpoint.tensors[f"{LAYER}mlp.experts.{e}.{new}.weight"]
            assert tensor.shape == shape[1:]
            np.testing.assert_array_equal(tensor.float32(), stack[e])
    assert not any(name.endswith("experts.gate_proj.weight") for name in checkpoint.tensors)
    model = build_model(checkpoint.config)
    check_weights(model, checkpoint.tensors)
    assert (model.mixture.routing.n_experts, model.mixture.routing.top_k) == (mb.EXPERTS, 2)
    assert model.mixture.routing.renormalises


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_gating_func", 2),
        ("expert_weights_scale", 2.5),
        ("leading_dense_block_count", 1),
        ("expert_shared_count", 1),
        ("expert_weights_norm", False),
        ("expert_group_count", 4),
    ],
)
def test_fields_of_experts_that_would_change_the_choice_are_refused(put, key, value):
    assert_unsupported(put, key, "qwen3moe", **{key: value})


def test_a_dense_file_with_experts_is_refused(put):
    assert_unsupported(put, "expert_count", "qwen3", expert_count=8)


def test_a_file_without_one_of_its_stacks_is_refused(put):
    shapes = mb.shapes("qwen3moe")
    del shapes["blk.1.ffn_up_exps.weight"]
    assert_refused(put, r"blk\.1\.ffn_up_exps\.weight", "qwen3moe", tensors=shapes)


def test_gemmas_ffn_norm_is_the_one_before_the_mlp(put):
    checkpoint = opened(put, "gemma3")
    values = mb.filled(mb.shapes("gemma3"))
    for old, new in (
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
        ("attn_norm", "input_layernorm"),
    ):
        assert checkpoint.tensors[f"{LAYER}{new}.weight"].data.tobytes() == values[f"blk.1.{old}.weight"][2]


@pytest.mark.parametrize("arch", ARCHES)
def test_only_gemmas_norm_weights_include_one(put, arch):
    assert opened(put, arch).norm_weights_include_one is (arch == "gemma3")


def test_a_head_of_its_own_is_not_tied(put):
    checkpoint = opened(put, tensors=mb.shapes(is_tied=False))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.tensors["lm_head.weight"].shape == (mb.VOCAB, mb.WIDTH)
    assert opened(put).config["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    "name", ["blk.0.attn_qkv.weight", "blk.2.attn_q.weight", "blk.00.attn_q.weight", "blk.-1.x", "blk.0", "v.weight"]
)
def test_a_tensor_without_a_place_is_refused_by_name(put, name):
    assert_unsupported(put, name, tensors=mb.shapes() | {name: (4,)})


def test_rotary_divisors_of_an_architecture_without_them_are_refused(put):
    assert_unsupported(put, "rope_freqs.weight", "qwen3", tensors=mb.shapes("qwen3") | {"rope_freqs.weight": (4,)})


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "blk.0.ffn_norm.weight", "token_embd.weight"])
def test_a_missing_tensor_is_named(put, name):
    shapes = mb.shapes()
    del shapes[name]
    assert_refused(put, f"1 tensors are missing, first '{name}'", tensors=shapes)


def test_a_bias_in_one_layer_only_is_refused(put):
    shapes = mb.shapes(biases=("attn_q", "attn_k", "attn_v", "attn_output"))
    del shapes["blk.1.attn_k.bias"]
    assert_refused(put, "'blk.1.attn_k.bias'", tensors=shapes)


# The order of rows


def test_unpermuting_follows_the_hand_derived_example():
    # Two heads of width 6. A writer interleaves the halves: rows 0 1 2 | 3 4 5 become 0 3 1 4 2 5.
    ours = np.arange(12)
    written = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    np.testing.assert_array_equal(written[unpermute_rows(2, 6)], ours)


def test_half_rotation_of_unpermuted_rows_equals_pair_rotation_of_the_files(put):
    """The scores must be the ones of a program that rotates neighbouring rows of the stored matrices."""
    checkpoint = opened(put)
    stored = mb.filled(mb.shapes())
    x = np.random.default_rng(1).standard_normal((2, mb.WIDTH))  # a query's and a key's hidden state
    angles = 10000.0 ** (-np.arange(0, mb.HEAD_DIM, 2) / mb.HEAD_DIM)

    def projected(name, n_heads, position, hidden):
        raw = np.frombuffer(stored[f"blk.0.{name}.weight"][2], np.float32).reshape(n_heads, mb.HEAD_DIM, mb.WIDTH)
        pairs = (raw @ hidden).reshape(n_heads, mb.HEAD_DIM // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * position * angles)
        ours = checkpoint.tensors[f"model.layers.0.self_attn.{name[-1]}_proj.weight"].float32()
        halves = (ours @ hidden).reshape(n_heads, 2, mb.HEAD_DIM // 2)
        ours_turned = (halves[:, 0] + 1j * halves[:, 1]) * np.exp(1j * position * angles)
        return turned, ours_turned

    theirs_q, ours_q = projected("attn_q", mb.HEADS, 5, x[0])
    theirs_k, ours_k = projected("attn_k", mb.KV_HEADS, 3, x[1])
    np.testing.assert_allclose(ours_q, theirs_q, rtol=1e-6)
    np.testing.assert_allclose(ours_k, theirs_k, rtol=1e-6)


def test_biases_are_reordered_with_their_rows(put):
    names = ("attn_q", "attn_k", "attn_v", "attn_output")
    checkpoint = opened(put, tensors=mb.shapes(biases=names))
    stored = np.frombuffer(mb.filled(mb.shapes(biases=names))["blk.0.attn_k.bias"][2], np.float32)
    order = unpermute_rows(mb.KV_HEADS, mb.HEAD_DIM)
    np.testing.assert_array_equal(checkpoint.tensors["model.layers.0.self_attn.k_proj.bias"].float32(), stored[order])
    assert checkpoint.tensors["model.layers.0.self_attn.v_proj.bias"].row_permutation is None
    assert checkpoint.config["attention_bias"] is True


@pytest.mark.parametrize("arch", ARCHES)
def test_only_llama_files_are_reordered(put, arch):
    reordered = {n.removeprefix(LAYER) for n, t in opened(put, arch).tensors.items() if t.row_permutation is not None}
    reordered = {name for name in reordered if not name.startswith("model.")}
    assert reordered == ({"self_attn.q_proj.weight", "self_attn.k_proj.weight"} if arch == "llama" else set())


@pytest.mark.parametrize("shape", [(mb.HEADS * mb.HEAD_DIM + 8, mb.WIDTH), (mb.HEADS * mb.HEAD_DIM,)])
def test_rows_that_are_not_those_of_the_heads_are_refused(put, shape):
    assert_refused(put, "4 heads of 8 rows", tensors=mb.shapes() | {"blk.1.attn_q.weight": shape})


# Configuration


@pytest.mark.parametrize(
    ("arch", "model_type", "architecture"),
    [
        ("llama", "llama", "LlamaForCausalLM"),
        ("qwen2", "qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "qwen3", "Qwen3ForCausalLM"),
        ("gemma3", "gemma3_text", "Gemma3ForCausalLM"),
    ],
)
def test_the_common_fields_are_those_of_the_file(put, arch, model_type, architecture):
    config = opened(put, arch).config
    expected = {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": mb.VOCAB,
        "hidden_size": mb.WIDTH,
        "intermediate_size": mb.FEED,
        "num_hidden_layers": mb.LAYERS,
        "num_attention_heads": mb.HEADS,
        "num_key_value_heads": mb.KV_HEADS,
        "head_dim": mb.HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu_pytorch_tanh" if arch == "gemma3" else "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    assert {key: config[key] for key in expected} == expected


def test_absent_fields_have_their_defaults(put):
    drop = ["llama.attention.head_count_kv", "llama.attention.key_length", "llama.attention.value_length"]
    shapes = mb.shapes()
    shapes |= {name: (mb.WIDTH, mb.WIDTH) for name in shapes if "attn_k." in name or "attn_v." in name}
    config = opened(put, tensors=shapes, drop=[*drop, "llama.rope.freq_base"]).config
    assert (config["num_key_value_heads"], config["head_dim"]) == (mb.HEADS, mb.WIDTH // mb.HEADS)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_a_sliding_llama_is_mistral(put):
    config = opened(put, attention__sliding_window=64).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)
    assert config["architectures"] == ["MistralForCausalLM"]
    assert opened(put, attention__sliding_window=0).config["model_type"] == "llama"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, {"rope_type": "default"}),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ({"rope__scaling__factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ({"rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0}, {"rope_type": "default"}),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 0.5},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "attention_factor": 0.5 * (1 + 0.1 * float(np.log(4.0))),
            },
        ),
    ],
)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_rotary_scaling_is_honoured(put, arch, changes, expected):
    config = opened(put, arch, rope__freq_base=1e6, **changes).config
    assert config["rope_parameters"] == {"rope_theta": 1e6} | expected


def test_rotary_divisors_arrive_as_a_list_and_as_a_tensor(put):
    metadata, tensors = mb.metadata(), mb.filled(mb.shapes())
    divisors = np.array([1, 1, 4, 8], np.float32)
    tensors["rope_freqs.weight"] = ("f32", (4,), divisors.tobytes())
    checkpoint = open_checkpoint(put(mb.gguf(metadata, tensors)))
    assert checkpoint.config["rope_parameters"] == {
        "rope_type": "tiercel_freq_factors",
        "rope_theta": 10000.0,
        "freq_factors": [1.0, 1.0, 4.0, 8.0],
    }
    np.testing.assert_array_equal(checkpoint.tensors["rope_freqs.weight"].float32(), divisors)


@pytest.mark.parametrize("divisors", [[1, 1, 0, 1], [1, 1, -2, 1], [1, np.nan, 1, 1], [np.inf, 1, 1, 1], [1, 1, 1]])
def test_bad_rotary_divisors_are_refused(put, divisors):
    tensors = mb.filled(mb.shapes())
    tensors["rope_freqs.weight"] = ("f32", (len(divisors),), np.array(divisors, np.float32).tobytes())
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
        open_checkpoint(put(mb.gguf(mb.metadata(), tensors)))


def test_divisors_and_a_scaling_type_together_are_refused(put):
    shapes = mb.shapes() | {"rope_freqs.weight": (4,)}
    tensors = mb.filled(shapes) | {"rope_freqs.weight": ("f32", (4,), np.full(4, 2, np.float32).tobytes())}
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\.type"):
        open_checkpoint(put(mb.gguf(mb.metadata(rope__scaling__factor=4.0), tensors)))


def test_gemma_3_has_its_two_rotary_tables_and_its_pattern(put):
    config = opened(put, "gemma3", rope__freq_base=1e6, rope__scaling__factor=8.0).config
    assert config["rope_parameters"] == {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }
    assert config["sliding_window"] == 16
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert config["query_pre_attn_scalar"] == mb.HEAD_DIM


@pytest.mark.parametrize("pattern", [2, [True, False]])
def test_a_pattern_in_the_file_is_honoured(put, pattern):
    config = opened(put, "gemma3", attention__sliding_window_pattern=pattern).config
    assert config["layer_types"] == ["sliding_attention", "full_attention"]


def test_gemma_3_scales_and_caps_are_honoured(put):
    config = opened(put, "gemma3", attention__scale=168**-0.5, final_logit_softcapping=30.0).config
    assert config["query_pre_attn_scalar"] == 168
    assert config["final_logit_softcapping"] == 30.0
    assert opened(put, "gemma3", final_logit_softcapping=0.0).config["final_logit_softcapping"] is None


def test_one_number_a_layer_is_read_if_all_are_the_same(put):
    assert opened(put, attention__head_count_kv=[2, 2]).config["num_key_value_heads"] == 2
    assert_unsupported(put, "head_count_kv is a list from 1 to 2", attention__head_count_kv=[1, 2])
    assert_unsupported(put, "feed_forward_length", feed_forward_length=[64, 128])


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {"expert_count": 8}),
        ("llama", {"expert_used_count": 2}),
        ("llama", {"attention__clamp_kqv": 8.0}),
        ("llama", {"attention__max_alibi_bias": 8.0}),
        ("llama", {"attention__causal": False}),
        ("llama", {"attention__scale": 0.5}),
        ("llama", {"attn_logit_softcapping": 50.0}),
        ("llama", {"final_logit_softcapping": 30.0}),
        ("llama", {"logit_scale": 0.25}),
        ("llama", {"residual_scale": 0.5}),
        ("llama", {"embedding_scale": 12.0}),
        ("llama", {"attention__value_length": 16}),
        ("llama", {"attention__something_new": 1}),
        ("llama", {"ssm__state_size": 16}),
        ("llama", {"rope__dimension_count": 4}),
        ("llama", {"rope__scaling__type": "longrope"}),
        ("llama", {"rope__scaling__attn_factor": 1.5}),
        ("llama", {"rope__scaling__yarn_log_multiplier": 0.1}),
        ("llama", {"use_parallel_residual": True}),
        ("qwen2", {"attention__sliding_window": 64}),
        ("qwen3", {"pooling_type": 1}),
        ("qwen3", {"rope__dimension_count": 4}),
        ("gemma3", {"attn_logit_softcapping": 50.0}),
        ("gemma3", {"attention__shared_kv_layers": 2}),
        ("gemma3", {"attention__sliding_window_pattern": [True]}),
    ],
)
def test_a_field_that_changes_the_arithmetic_is_refused_by_name(put, arch, changes):
    (key,) = changes
    assert_unsupported(put, key.replace("__", "."), arch, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_count": 0},
        {"attention__scale": mb.HEAD_DIM**-0.5},
        {"logit_scale": 1.0},
        {"rope__dimension_count": mb.HEAD_DIM},
        {"rope__scaling__finetuned": True},
        {"vocab_size": mb.VOCAB},
        {"attention__causal": True},
    ],
)
def test_a_field_at_its_neutral_value_changes_nothing(put, changes):
    assert opened(put, **changes).config == opened(put).config


def test_some_biases_only_are_refused(put):
    assert_unsupported(put, "some biases only", tensors=mb.shapes(biases=("attn_q", "attn_k", "attn_v")))
    assert_unsupported(put, "some biases only", tensors=mb.shapes(biases=("ffn_up",)))
    assert_unsupported(put, "attn_output.bias", "qwen2", tensors=mb.shapes("qwen2", biases=("attn_output",)))


def test_a_qwen_2_without_biases_is_refused(put):
    assert_unsupported(put, "biases on q, k and v", "qwen2", tensors=mb.shapes("llama"))


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length", "attention.head_count"])
def test_a_missing_field_is_named(put, key):
    assert_refused(put, f"{key} is nothing", drop=[f"llama.{key}"])


@pytest.mark.parametrize("value", [0, -1, 1 << 31, 1.5, "2", True, [], ["a"], [1.5]])
@pytest.mark.parametrize("key", ["block_count", "attention__head_count", "feed_forward_length"])
def test_a_count_that_is_none_is_refused(put, key, value):
    value = mb.one(mb.I64, value) if type(value) is int else mb.many(mb.I32, []) if value == [] else value
    with pytest.raises((ModelFileError, UnsupportedModel), match=key.replace("__", ".")):
        opened(put, **{key: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "1e-5", True, [1.0]])
@pytest.mark.parametrize("key", ["attention__layer_norm_rms_epsilon", "rope__freq_base"])
def test_a_number_that_is_none_is_refused(put, key, value):
    assert_refused(put, key.replace("__", "."), **{key: value})


def test_fields_that_contradict_each_other_are_refused(put):
    assert_refused(put, "multiple", attention__head_count_kv=3)
    assert_refused(put, "even number", attention__key_length=7, attention__value_length=7)
    assert_refused(put, r"token_embd.weight is \[40, 32\]", embedding_length=64)
    assert_refused(put, "block_count is 100000", block_count=100_000)
    assert_refused(put, "are missing", block_count=3)
    assert_unsupported(put, "blk.1", block_count=1)
    assert_refused(put, "vocab_size differs", vocab_size=41)


# Vocabulary


@pytest.mark.parametrize("n", [mb.VOCAB - 1, mb.VOCAB + 1])
def test_a_vocabulary_of_another_length_is_refused(put, n):
    for key, value in (("tokens", ["t"] * n), ("token_type", [1] * n), ("scores", [0.5] * n)):
        assert_refused(put, f"{key} has {n} elements", extra={f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", [1] * mb.VOCAB),
        ("merges", [1]),
        ("token_type", ["1"] * mb.VOCAB),
        ("token_type", mb.many(mb.I8, [1] * mb.VOCAB)),
        ("scores", mb.many(mb.I8, [1] * mb.VOCAB)),
        ("scores", mb.many(mb.F64, [1.0] * mb.VOCAB)),
        ("scores", 0.5),
    ],
)
def test_a_vocabulary_array_of_another_type_is_refused(put, key, value):
    assert_refused(put, f"tokenizer.ggml.{key} has another element type", extra={f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize("kind", ["bos", "eos", "padding", "eot", "eom"])
@pytest.mark.parametrize("value", [mb.VOCAB, mb.one(mb.I32, -1), 1.0, "2", True])
def test_a_token_id_outside_the_vocabulary_is_refused(put, kind, value):
    assert_refused(put, f"{kind}_token_id", extra={f"tokenizer.ggml.{kind}_token_id": value})


def test_a_token_id_of_all_ones_is_none(put):
    config = opened(put, extra={"tokenizer.ggml.padding_token_id": 0xFFFFFFFF}).config
    assert config["pad_token_id"] is None


def test_a_model_without_a_tokenizer_is_read(put):
    metadata = {key: value for key, value in mb.metadata().items() if not key.startswith("tokenizer.")}
    checkpoint = open_checkpoint(put(mb.gguf(metadata, mb.filled(mb.shapes()))))
    assert checkpoint.config["vocab_size"] == mb.VOCAB
    assert checkpoint.generation_config == {}


def test_the_ids_that_end_an_answer_are_collected(put):
    tokens = [f"t{i}" for i in range(mb.VOCAB)]
    tokens[7], tokens[8], tokens[9] = "<|im_end|>", "<|eot_id|>", "<end_of_turn>"
    kinds = [1] * mb.VOCAB
    kinds[7] = kinds[8] = 3  # 9 is an ordinary token that only looks like an end mark
    extra = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eot_token_id": 8,
        "tokenizer.ggml.eom_token_id": 5,
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 40,
    }
    expected = {"bos_token_id": 1, "eos_token_id": [2, 8, 5, 7], "temperature": 0.7, "top_k": 40}
    assert opened(put, extra=extra).generation_config == expected


@pytest.mark.parametrize("value", [float("nan"), -1.0, "hot", [0.5]])
def test_a_recommended_temperature_that_is_none_is_refused(put, value):
    assert_refused(put, "general.sampling.temp", extra={"general.sampling.temp": value})


# Files of another kind


def test_an_unknown_architecture_is_refused_with_the_known_ones(put):
    assert_unsupported(put, "'mamba'; Tiercel reads gemma3, llama, qwen2, qwen3", "mamba", tensors=mb.shapes())


def test_a_file_that_is_no_model_is_refused(put):
    assert_unsupported(put, "'adapter'", extra={"general.type": "adapter"})
    assert_unsupported(put, "quantization_version is 1", extra={"general.quantization_version": 1})
    assert_refused(put, "general.architecture is missing", drop=["general.architecture"])


VALUES = [
    mb.one(mb.U32, 0),
    mb.one(mb.U64, (1 << 64) - 1),
    mb.one(mb.I64, -1),
    mb.one(mb.F64, 5e-324),
    mb.one(mb.F32, float("nan")),
    mb.one(mb.BOOL, True),
    mb.one(mb.STRING, ""),
    mb.many(mb.U64, [(1 << 64) - 1, 1]),
    mb.many(mb.F32, [1.0, 2.0]),
    mb.many(mb.BOOL, [True, False]),
    mb.many(mb.STRING, ["a", "b"]),
    mb.many(mb.U8, []),
]
READ_KEYS = [
    "general.type",
    "general.quantization_version",
    "general.sampling.top_p",
    "split.no",
    "split.count",
    "split.tensors.count",
    "*.vocab_size",
    "*.attention.scale",
    "*.attention.sliding_window_pattern",
    "*.final_logit_softcapping",
    "*.expert_count",
    "*.rope.scaling.type",
    "*.rope.scaling.factor",
    "*.rope.scaling.attn_factor",
    "*.rope.scaling.original_context_length",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.eot_token_id",
]


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_any_value_under_any_key_is_read_or_refused_by_name(put, arch):
    keys = [key.replace("*", arch) for key in READ_KEYS]
    tensors = mb.filled(mb.shapes(arch))
    for key in dict.fromkeys([*mb.metadata(arch), *keys]):
        for value in VALUES:
            with suppress(ModelFileError, UnsupportedModel):
                checkpoint = open_checkpoint(put(mb.gguf(mb.metadata(arch) | {key: value}, tensors)))
                assert checkpoint.config["num_hidden_layers"] == mb.LAYERS
