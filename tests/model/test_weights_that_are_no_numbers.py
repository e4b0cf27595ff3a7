"""A NaN or an infinity in any matrix, itself or in a scale, is refused while it is packed, by its tensor's name."""

from types import SimpleNamespace

import numpy as np
import pytest

from tiercel import _native
from tiercel.base.errors import ModelFileError
from tiercel.models.registry import build_model
from tiercel.quant.formats import Format
from tiercel.runner.weights import FORMAT_CODES
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.native import float_tensors, native_runner

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
N, K = 37, 512
# Where each number that scales others lies in a block, and how it is spelled as no number.
HALF_NAN, HALF_INFINITY = b"\x00\x7e", b"\x00\xfc"
SPOILS = {
    Format.F32: [(0, np.float32(np.nan).tobytes()), (0, np.float32(-np.inf).tobytes())],
    Format.F16: [(0, HALF_NAN), (0, HALF_INFINITY)],
    Format.BF16: [(0, b"\xc0\x7f"), (0, b"\x80\xff")],
    **{f: [(0, HALF_NAN), (0, HALF_INFINITY)] for f in (Format.Q4_0, Format.Q5_0, Format.Q8_0)},
    **{f: [(0, HALF_NAN), (2, HALF_INFINITY)] for f in (Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K)},
    Format.Q6_K: [(208, HALF_NAN), (208, HALF_INFINITY)],
    Format.MXFP4: [(0, b"\xff")],
    Format.NVFP4: [(0, np.float32(np.nan).tobytes()), (4, np.float32(np.inf).tobytes())],
}


def blocks_of(format):
    """Rows whose every scale and element is small: bytes of a block that all read as small numbers."""
    return np.full((N, format.nbytes(K)), 0x11, np.uint8)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("format", SPOILS)
def test_one_block_of_any_format_that_is_no_number_is_seen(format, expand):
    code = FORMAT_CODES[format]
    rows = blocks_of(format)
    assert _native.PackedMatrix(code, rows, K, expand_to_f32=expand).is_finite
    for at, raw in SPOILS[format]:
        for row, first_byte in [(0, 0), (N - 1, rows.shape[1] - format.group_bytes), (17, 0)]:
            spoiled = rows.copy()
            spoiled[row, first_byte + at : first_byte + at + len(raw)] = np.frombuffer(raw, np.uint8)
            assert not _native.PackedMatrix(code, spoiled, K, expand_to_f32=expand, n_threads=2).is_finite
            order = np.array([r for r in range(N) if r != row], np.int32)
            assert _native.PackedMatrix(code, spoiled, K, order, expand_to_f32=expand).is_finite, "a row not taken"


def test_the_last_of_an_odd_number_of_bfloat16_columns_is_seen():
    rows = np.full((3, 14), 0x11, np.uint8)
    assert _native.PackedMatrix(FORMAT_CODES[Format.BF16], rows, 7).is_finite
    rows[2, 12:] = 0x80, 0x7F
    assert not _native.PackedMatrix(FORMAT_CODES[Format.BF16], rows, 7).is_finite


def load(weights, **options):
    model = build_model(MIXTURE)
    tensors = {name: SimpleNamespace(shape=w.shape, format=Format.F32) for name, w in weights.items()}
    program = model.record(tensors, **options)
    native_runner(program, float_tensors(weights)).close()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.mlp.experts.2.down_proj.weight",
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
    ],
)
def test_a_tensor_that_holds_no_number_is_refused_by_name(name, value):
    weights = tiny_checkpoint(MIXTURE)
    load(weights)
    weights[name] = weights[name].copy()
    weights[name].reshape(-1)[-5] = value
    with pytest.raises(ModelFileError, match=rf"tensor {name}: holds NaN or infinity"):
        load(weights)
