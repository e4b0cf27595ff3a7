"""LFM2 configs: the released one, which layer keeps what, and what is refused."""

from types import SimpleNamespace

import pytest

from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.models.registry import build_model
from tiercel.ops.program import StateLayer
from tiercel.quant.formats import Format

TINY = {
    "architectures": ["Lfm2ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}
# As LiquidAI/LFM2-350M has it.
RELEASED = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 1024,
    "block_ff_dim": 6656,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 1024,
    "conv_dim_out": 1024,
    "conv_use_xavier_init": True,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 1024,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 16,
    "num_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "use_pos_enc": True,
    "vocab_size": 65536,
}


def test_the_released_config_has_354_million_parameters_and_feed_forwards_4608_wide():
    model = build_model(RELEASED)
    assert model.config.intermediate_size == 4608
    assert model.info.n_parameters == 354_483_968
    assert [layer.index for layer in model.info.kv_layers] == [2, 5, 8, 10, 12, 14]
    assert model.info.kv_bytes_per_token("float16") == 6 * 2 * 8 * 64 * 2
    assert model.info.state_bytes == 10 * 2 * 1024 * 4


def test_a_convolutions_layer_keeps_its_last_inputs_and_no_keys():
    model = build_model(TINY | {"conv_L_cache": 4})
    shapes = model.expected_weights()
    program = model.record({name: SimpleNamespace(shape=of, format=Format.F32) for name, of in shapes.items()})
    expected = tuple(StateLayer(i, "short_conv", 64, 4, 0, 0, 0) for i in (0, 2, 3))
    assert program.state_layers == model.info.state_layers == expected
    assert program.kv_layers == model.info.kv_layers
    assert [layer.index for layer in program.kv_layers] == [1]


def test_a_config_without_a_list_has_attention_everywhere():
    model = build_model({name: value for name, value in TINY.items() if name != "layer_types"})
    assert len(model.info.kv_layers) == 4
    assert model.info.state_layers == ()


@pytest.mark.parametrize(
    ("more", "width"),
    [
        ({}, 256),  # 64, rounded up
        ({"block_multiple_of": 16}, 64),
        ({"block_multiple_of": 16, "block_ffn_dim_multiplier": 1.3}, 96),
        ({"block_multiple_of": 16, "block_ff_dim": 160}, 112),
        ({"block_auto_adjust_ff_dim": False}, 96),
    ],
)
def test_a_feed_forward_is_two_thirds_of_what_is_said_rounded_up(more, width):
    shapes = build_model(TINY | more).expected_weights()
    assert shapes["model.layers.0.feed_forward.w1.weight"] == (width, 64)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"conv_bias": True}, "conv_bias is True"),
        ({"use_pos_enc": False}, "use_pos_enc is False"),
        ({"block_use_swiglu": False}, "block_use_swiglu is False"),
        ({"layer_types": ["conv", "full_attention", "conv", "linear_attention"]}, "layer_types is 'linear_attention'"),
        ({"num_experts": 4}, "num_experts is 4"),
    ],
)
def test_arithmetic_that_is_not_there_is_refused_by_its_field(more, message):
    with pytest.raises(UnsupportedModel, match=message):
        build_model(TINY | more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"layer_types": ["conv"] * 3}, "layer_types .*a list of 4 strings"),
        ({"full_attn_idxs": [2]}, "full_attn_idxs is .2.; .*as layer_types has them"),
        ({"layer_types": None, "full_attn_idxs": [1, 4]}, "full_attn_idxs is .1, 4.; a list of layers 0 to 3"),
        ({"conv_dim": 32}, "conv_dim is 32; hidden_size 64"),
        ({"num_heads": 8}, "num_heads is 8; num_attention_heads 4"),
        ({"block_norm_eps": 1e-6}, "block_norm_eps is 1e-06; norm_eps 1e-05"),
        ({"conv_L_cache": 0}, "conv_L_cache is 0"),
        ({"block_ffn_dim_multiplier": 0.0}, "block_ffn_dim_multiplier is 0.0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_their_field(more, message):
    with pytest.raises(ModelFileError, match=message):
        build_model(TINY | more)
