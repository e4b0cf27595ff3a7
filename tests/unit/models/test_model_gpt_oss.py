"""gpt-oss configs: the released one, what defaults are, and what is refused with a reason."""

import pytest

from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.models.registry import build_model

TINY = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
# As openai/gpt-oss-20b has it.
RELEASED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def test_the_released_config_is_read_to_its_20_9_billion_parameters():
    model = build_model(RELEASED)
    assert model.info.n_parameters == 20_914_757_184
    assert [layer.window for layer in model.info.kv_layers] == [128, 0] * 12
    assert model.info.max_len_tokens == 131072
    assert (model.mixture.act, model.mixture.act_params) == ("swiglu_clamp", (1.702, 7.0))


def test_what_the_config_leaves_out_is_what_was_released():
    """Rotation and window; a layer list that is left out slides in every other layer."""
    rope = build_model(RELEASED).config.ropes["rope"]
    short = without(RELEASED, "rope_scaling", "rope_theta", "sliding_window", "swiglu_limit", "layer_types")
    model = build_model(short)
    assert model.config.ropes["rope"] == rope
    assert model.config.windows == (128, 0) * 12
    assert model.mixture.act_params == (1.702, 7.0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "'linear_attention'"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_type is 'mrope'"),
        ({"surprise": 3}, "surprise is 3"),
    ],
)
def test_arithmetic_that_is_not_there_is_refused_by_its_field(more, message):
    with pytest.raises(UnsupportedModel, match=message):
        build_model(TINY | more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5; at most num_experts 4"),
        ({"num_experts": 5}, "num_local_experts is 4; num_experts 5"),
        ({"experts_per_token": 3}, "experts_per_token is 3; 2"),
        ({"num_local_experts": 5000}, "at most 4096 experts"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types .*a list of 3 strings"),
        ({"sliding_window": None}, "sliding_window is None; a window"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0.0"),
        ({"swiglu_alpha": -1.0}, "swiglu_alpha is -1.0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_their_field(more, message):
    with pytest.raises(ModelFileError, match=message):
        build_model(TINY | more)
