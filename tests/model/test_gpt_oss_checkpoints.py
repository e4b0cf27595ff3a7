"""gpt-oss as it is released: experts stacked, gate and up in turns, as floats or as MXFP4 blocks."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tiercel import LLM
from tiercel.base.errors import ModelFileError
from tiercel.loaders.checkpoint import open_checkpoint
from tiercel.models.registry import build_model
from tiercel.models.weights import check_weights
from tiercel.ops.recorder import ComputeDtype
from tiercel.quant.formats import Format
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.interleaved_model import mxfp4_experts, stack_experts
from tiercel.testing.native import float_tensors, native_logits, native_runner

EXPECTED = json.loads((Path(__file__).parent / "gpt_oss_mxfp4.json").read_text())
MXFP4 = EXPECTED["config"]
FLOAT = {name: value for name, value in MXFP4.items() if name != "quantization_config"}
IDS = EXPECTED["token_ids"]
CHUNKS = [[40], [1] * 40, [1, 7, 2, 13, 1, 1, 9, 6]]
EXPERTS = "model.layers.1.mlp.experts"


def written(folder, config, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "model.safetensors"))
    return folder


def logits_of(tensors, chunks, compute=ComputeDtype.AUTO, **options):
    runner = native_runner(build_model(FLOAT).record(tensors, compute_dtype=compute), tensors, **options)
    try:
        return native_logits(runner, IDS, chunks)
    finally:
        runner.close()


@pytest.mark.parametrize("chunks", CHUNKS, ids=["prefill", "token-by-token", "ragged"])
def test_mxfp4_logits_equal_those_of_transformers(tmp_path, chunks):
    """Computed there from the dequantised experts (tools/make_fixtures.py), so that no activation is rounded."""
    with open_checkpoint(written(tmp_path, MXFP4, mxfp4_experts(MXFP4)[0])) as checkpoint:
        logits = logits_of(checkpoint.tensors, chunks, ComputeDtype.FLOAT32, expand_to_f32=True)
    columns = np.array(EXPECTED["columns"])
    assert np.abs(logits[:, : columns.shape[1]] - columns).max() <= 1e-4
    for t, row in EXPECTED["rows"].items():
        assert np.abs(logits[int(t)] - np.array(row)).max() <= 1e-4


def test_mxfp4_logits_with_rounded_activations_do_not_depend_on_chunks_or_threads(tmp_path):
    with open_checkpoint(written(tmp_path, MXFP4, mxfp4_experts(MXFP4)[0])) as checkpoint:
        found = [logits_of(checkpoint.tensors, chunks, n_threads=n + 1) for n, chunks in enumerate(CHUNKS)]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0].view(np.uint32), other.view(np.uint32))


def test_an_mxfp4_stack_is_its_experts_values_row_by_row(tmp_path):
    stored, values = mxfp4_experts(MXFP4)
    with open_checkpoint(written(tmp_path, MXFP4, stored)) as checkpoint:
        check_weights(build_model(checkpoint.config), checkpoint.tensors)
        for name, expected in values.items():
            tensor = checkpoint.tensors[name]
            np.testing.assert_array_equal(tensor.float32(), expected, err_msg=name)
            is_expert = ".experts." in name and name.endswith(".weight")
            assert tensor.format is (Format.MXFP4 if is_expert else Format.F32)
        up = checkpoint.tensors[f"{EXPERTS}.2.up_proj.weight"]
        pieces = [up.row_range(a, b) for a, b in [(0, 1), (1, 30), (30, 64)]]
        np.testing.assert_array_equal(np.concatenate(pieces), up.rows())


def test_a_blocks_expert_is_a_view_of_the_file(tmp_path):
    with open_checkpoint(written(tmp_path, MXFP4, mxfp4_experts(MXFP4)[0])) as checkpoint:
        (file,) = checkpoint.files
        whole = file.data(file.tensors[f"{EXPERTS}.gate_up_proj_blocks"])
        for e in (0, 3):
            tensor = checkpoint.tensors[f"{EXPERTS}.{e}.gate_proj.weight"]
            assert np.shares_memory(tensor.data, whole)
            assert tensor.data.nbytes == whole.nbytes // 8


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_stacked_floats_have_the_logits_of_separate_experts(tmp_path, dtype):
    weights = {name: w.astype(dtype) for name, w in tiny_checkpoint(FLOAT).items()}
    separate = float_tensors({name: w.astype(np.float32) for name, w in weights.items()})
    with open_checkpoint(written(tmp_path, FLOAT, stack_experts(weights, 8))) as checkpoint:
        check_weights(build_model(checkpoint.config), checkpoint.tensors)
        for name, w in weights.items():
            np.testing.assert_array_equal(checkpoint.tensors[name].float32(), w.astype(np.float32), err_msg=name)
        got = logits_of(checkpoint.tensors, [40])
    np.testing.assert_array_equal(got.view(np.uint32), logits_of(separate, [40]).view(np.uint32))


# Bad input.


def changed(stored, name, values):
    return stored | {f"{EXPERTS}.{name}": np.ascontiguousarray(values)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # A stack of too few experts, of one too many, and of narrower ones.
        (lambda s: changed(s, "down_proj", s[f"{EXPERTS}.down_proj"][:7]), r"experts\.7\.down_proj\.weight is missing"),
        (
            lambda s: changed(s, "down_proj_bias", np.zeros((9, 64), "f4")),
            r"experts\.8\.down_proj\.bias of shape \[64\] is read by no op",
        ),
        (
            lambda s: changed(s, "gate_up_proj", s[f"{EXPERTS}.gate_up_proj"][:, :32]),
            r"experts\.0\.gate_proj\.weight has shape \[64, 32\]; \[64, 64\] is needed",
        ),
        (
            lambda s: changed(s, "gate_up_proj_bias", np.zeros((8, 126), "f4")),
            r"experts\.0\.gate_proj\.bias has shape \[63\]; \[64\] is needed",
        ),
        (
            lambda s: changed(s, "gate_up_proj_bias", np.zeros((8, 127), "f4")),
            r"gate_up_proj_bias has shape \[8, 127\]",
        ),
        (lambda s: changed(s, "gate_up_proj", np.zeros((8, 64, 127), "f4")), r"gate_up_proj has shape \[8, 64, 127\]"),
        (lambda s: changed(s, "down_proj", np.zeros((8, 64), "f4")), r"down_proj has shape \[8, 64\]; 3 dimensions"),
        (lambda s: changed(s, "3.up_proj.bias", np.zeros(64, "f4")), r"experts\.3\.up_proj\.bias is there twice"),
        (
            lambda s: s | {"model.layers.0.self_attn.sinks": np.zeros(5, "f4")},
            r"self_attn\.sinks has shape \[5\]; \[4\] is needed",
        ),
        (
            lambda s: s | {"model.layers.0.mlp.router.weight": np.zeros((7, 64), "f4")},
            r"router\.weight has shape \[7, 64\]; \[8, 64\] is needed",
        ),
    ],
)
def test_a_stack_that_does_not_fit_is_refused_by_name_and_shapes(tmp_path, change, message):
    stored = change(stack_experts(tiny_checkpoint(FLOAT), 8))
    with pytest.raises(ModelFileError, match=message):
        LLM(str(written(tmp_path, FLOAT, stored)), skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: changed(s, "gate_up_proj_scales", s[f"{EXPERTS}.gate_up_proj_scales"][:, :, :1]),
            r"gate_up_proj_scales .*\[8, 128, 1\].*\[8, 128, 2\]",
        ),
        (
            lambda s: changed(s, "gate_up_proj_scales", s[f"{EXPERTS}.gate_up_proj_scales"] * 0 + 255),
            r"gate_up_proj_scales .*holds 255, which is NaN",
        ),
        (
            lambda s: (
                changed(s, "down_proj_blocks", s[f"{EXPERTS}.down_proj_blocks"][:7])
                | changed({}, "down_proj_scales", s[f"{EXPERTS}.down_proj_scales"][:7])
            ),
            r"experts\.7\.down_proj\.weight is missing; \[64, 64\] is needed",
        ),
        (
            lambda s: {k: v for k, v in s.items() if k != f"{EXPERTS}.down_proj_scales"},
            r"down_proj_scales is missing",
        ),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_refused_by_name(tmp_path, change, message):
    stored = change(mxfp4_experts(MXFP4)[0])
    with pytest.raises(ModelFileError, match=message):
        LLM(str(written(tmp_path, MXFP4, stored)), skip_tokenizer_init=True)
