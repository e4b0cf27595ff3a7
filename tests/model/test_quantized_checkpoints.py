"""Checkpoints whose matrices lie in parts (FP4, FP8, GPTQ, AWQ): their values, their logits, and what is refused."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import quantized_files as files

from tiercel import LLM, SamplingParams
from tiercel.base.config import EngineOptions
from tiercel.base.errors import ConfigError, ModelFileError, UnsupportedModel
from tiercel.boot.plan import make_plan
from tiercel.boot.runner import build_runner
from tiercel.boot.summary import describe
from tiercel.loaders.checkpoint import open_checkpoint
from tiercel.loaders.quantization_config import read_scheme
from tiercel.loaders.quantized_matrices import Stored, gather_matrices
from tiercel.models.registry import build_model
from tiercel.ops.passes import lower_and_fuse
from tiercel.ops.recorder import ComputeDtype
from tiercel.quant.dequantize import dequantize
from tiercel.quant.formats import Format
from tiercel.quant.fp4 import E2M1, e8m0
from tiercel.quant.fp8 import E4M3
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.testing.native import float_tensors, native_logits, native_runner

IDS = np.random.default_rng(0).integers(0, 256, 40).tolist()
CHUNKS = [17, 1, 2, 9, 1, 10]
Q = "model.layers.0.self_attn.q_proj"
every_scheme = pytest.mark.parametrize("scheme", files.SCHEMES)


def opened(tmp_path, scheme):
    config, tensors, floats = files.tiny_quantized(scheme)
    return open_checkpoint(files.write(tmp_path / "model", config, tensors)), floats


def logits_of(model, tensors, **options):
    compute = ComputeDtype.FLOAT32 if options.get("expand_to_f32") else ComputeDtype.AUTO
    runner = native_runner(model.record(tensors, compute_dtype=compute), tensors, **options)
    try:
        return native_logits(runner, IDS, CHUNKS)
    finally:
        runner.close()


# Values.


@every_scheme
def test_a_matrix_in_parts_is_one_tensor_with_the_values_of_its_definition(tmp_path, scheme):
    checkpoint, floats = opened(tmp_path, scheme)
    with checkpoint:
        assert set(checkpoint.tensors) == set(floats)
        for name, expected in floats.items():
            tensor = checkpoint.tensors[name]
            assert tensor.shape == expected.shape
            np.testing.assert_array_equal(tensor.float32(), expected, err_msg=name)
            if name.endswith("_proj.weight"):
                assert tensor.format == files.SCHEMES[scheme][2]


@every_scheme
def test_rows_can_be_made_in_any_pieces(tmp_path, scheme):
    checkpoint, _ = opened(tmp_path, scheme)
    with checkpoint:
        tensor = checkpoint.tensors[f"{Q}.weight"]
        pieces = [tensor.row_range(a, b) for a, b in [(0, 1), (1, 11), (11, 40), (40, 64)]]
        np.testing.assert_array_equal(np.concatenate(pieces), tensor.rows())


def test_all_256_bytes_of_an_fp8_matrix_and_all_16_codes_have_their_values():
    finite = np.isfinite(files.E4M3) & ((np.arange(256) & 127) != 127)
    np.testing.assert_array_equal(E4M3[finite], files.E4M3[finite])
    assert np.isnan(E4M3[~finite]).all()
    np.testing.assert_array_equal(E2M1, files.E2M1)
    exponents = np.arange(256, dtype=np.uint8)
    assert e8m0(exponents)[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert np.isnan(e8m0(exponents)[255])


PACKED_OUTSIDE = json.loads((Path(__file__).parent / "compressed_tensors.json").read_text())


@pytest.mark.parametrize("case", PACKED_OUTSIDE, ids=[case["format"] for case in PACKED_OUTSIDE])
def test_what_compressed_tensors_packs_has_the_values_that_it_unpacks(case):
    """Written by tools/make_quantized_fixtures.py with that package."""
    scheme = read_scheme({"quantization_config": files.compressed(case["format"], case["weights"])}, "config")
    stored = {}
    for suffix, (dtype, shape, raw) in case["parts"].items():
        data = np.frombuffer(bytes.fromhex(raw), np.uint8)
        stored[f"{Q}.{suffix}"] = Stored(f"{Q}.{suffix}", dtype, tuple(shape), data)
    matrices, read = gather_matrices(scheme, stored)
    assert read == set(stored)
    matrix = matrices[f"{Q}.weight"]
    _, shape, raw = case["values"]
    expected = np.frombuffer(bytes.fromhex(raw), "<f4").reshape(shape)
    got = dequantize(matrix.rows(0, shape[0]), matrix.format, matrix.shape)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("scheme", "wider", "format"),
    [("gptq-symmetric", "gptq-zero-points", Format.Q5_0), ("fp8-block-powers-of-two", "fp8-block", Format.F32)],
)
def test_experts_of_a_layer_have_one_format_and_their_own_values(scheme, wider, format):
    stored, values = {}, {}
    for expert, name in enumerate([scheme, wider, scheme]):
        parts, values[expert] = files.SCHEMES[name][0](np.random.default_rng(expert), 16, 64)
        for suffix, (dtype, shape, raw) in parts.items():
            full = f"model.layers.0.mlp.experts.{expert}.up_proj.{suffix}"
            stored[full] = Stored(full, dtype, tuple(shape), np.frombuffer(raw, np.uint8))
    found, _ = gather_matrices(read_scheme({"quantization_config": files.SCHEMES[wider][1]}, "config"), stored)
    for expert, matrix in enumerate(found.values()):
        assert matrix.format is format
        np.testing.assert_array_equal(dequantize(matrix.rows(0, 16), matrix.format, (16, 64)), values[expert])


def test_gpt_oss_experts_are_one_tensor_of_all_their_matrices():
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (2, 5, 3, 32), np.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    exponents = rng.integers(110, 130, (2, 5, 3), np.uint8)
    expected = (files.E2M1[codes] * np.exp2(exponents.astype(np.float32) - 127)[..., None]).reshape(2, 5, 96)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored = {
        f"{name}_blocks": Stored(f"{name}_blocks", "U8", blocks.shape, blocks.reshape(-1)),
        f"{name}_scales": Stored(f"{name}_scales", "U8", exponents.shape, exponents.reshape(-1)),
    }
    scheme = read_scheme({"quantization_config": {"quant_method": "mxfp4"}}, "config")
    matrices, read = gather_matrices(scheme, stored)
    assert read == set(stored)
    assert matrices[name].shape == (2, 5, 96)
    np.testing.assert_array_equal(dequantize(matrices[name].rows(0, 10), Format.MXFP4, (2, 5, 96)), expected)
    with pytest.raises(ModelFileError, match=r"gate_up_proj_scales is missing; .*gate_up_proj_blocks needs it"):
        gather_matrices(scheme, {f"{name}_blocks": stored[f"{name}_blocks"]})


# Logits.


@every_scheme
def test_unrounded_logits_are_bit_for_bit_those_of_the_dequantised_weights(tmp_path, scheme):
    checkpoint, floats = opened(tmp_path, scheme)
    with checkpoint:
        model = build_model(checkpoint.config)
        as_floats = float_tensors(floats)
        expected = logits_of(model, as_floats)
        got = logits_of(model, checkpoint.tensors, expand_to_f32=True)
        np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
        exact = ReferenceExecutor(model.record(as_floats), floats).step([Chunk(0, IDS)])
        assert np.abs(got - exact).max() <= 1e-4
        assert exact.std() > 0.5


@every_scheme
def test_logits_are_the_references_of_the_same_program(tmp_path, scheme):
    checkpoint, floats = opened(tmp_path, scheme)
    with checkpoint:
        model = build_model(checkpoint.config)
        got = logits_of(model, checkpoint.tensors)
        program = lower_and_fuse(model.record(checkpoint.tensors))
        expected = ReferenceExecutor(program, floats).step([Chunk(0, IDS)])
        rounds = Format(files.SCHEMES[scheme][2]).is_quantized
        # A sum in another order moves an int8 activation to the next code now and then; see test_quality.
        assert np.abs(got - expected).max() <= (0.15 if rounds else 1e-4)
        assert np.quantile(np.abs(got - expected)[:8].max(axis=1), 0.25) <= 1e-4


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "fp8-block", "awq"])
def test_logits_do_not_depend_on_chunks_or_threads(tmp_path, scheme):
    checkpoint, _ = opened(tmp_path, scheme)
    with checkpoint:
        model = build_model(checkpoint.config)
        program = model.record(checkpoint.tensors)
        found = []
        for chunks, n_threads in [([40], 1), ([1] * 40, 2), (CHUNKS, 3)]:
            runner = native_runner(program, checkpoint.tensors, n_threads=n_threads)
            found.append(native_logits(runner, IDS, chunks))
            runner.close()
        np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))
        np.testing.assert_array_equal(found[0].view(np.uint32), found[2].view(np.uint32))


def test_an_engine_answers_from_fp4_weights_and_its_log_says_what_they_are(tmp_path, caplog):
    config, tensors, _ = files.tiny_quantized("nvfp4-modelopt")
    folder = files.write(tmp_path / "model", config, tensors)
    caplog.set_level(logging.INFO, logger="tiercel.boot")
    with LLM(str(folder), kv_cache_memory_bytes=1 << 20) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        alone = llm.generate(["one"], params)[0].outputs[0].token_ids
        beside = llm.generate(["two", "one", "three"], params)[1].outputs[0].token_ids
    assert len(alone) == 4
    assert alone == beside
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("weights: ")]
    assert len(told) == 1
    assert "ModelOpt NVFP4: 14 matrices" in told[0]
    assert "activations are not rounded to the scheme's own type" in told[0]


# What is said.


@every_scheme
def test_show_says_how_weights_are_stored_and_computed(tmp_path, scheme):
    config, tensors, _ = files.tiny_quantized(scheme)
    folder = files.write(tmp_path / "model", config, tensors)
    summary = dict(describe(str(folder))["summary"])
    assert "14 matrices" in summary["stored as"]
    assert f"as {files.SCHEMES[scheme][2]}" in summary["stored as"]


def test_formats_take_the_bytes_that_the_decision_record_says():
    bits = {f: f.bits_per_weight for f in (Format.MXFP4, Format.NVFP4, Format.Q4_0, Format.Q5_0)}
    assert bits == {Format.MXFP4: 4.25, Format.NVFP4: 6.0, Format.Q4_0: 4.5, Format.Q5_0: 5.5}


def test_fp8_weights_can_be_quantised_further_and_fp4_weights_cannot(tmp_path):
    config, tensors, _ = files.tiny_quantized("fp8-block")
    folder = files.write(tmp_path / "fp8", config, tensors)
    plan = make_plan(EngineOptions(model=str(folder), quantization="q8_0"))
    with plan.checkpoint:
        assert "q8_0" in plan.program.text()
        build_runner(plan).close()
    config, tensors, _ = files.tiny_quantized("mxfp4")
    folder = files.write(tmp_path / "fp4", config, tensors)
    with pytest.raises(ConfigError, match=r"q_proj\.weight is mxfp4 already"):
        make_plan(EngineOptions(model=str(folder), quantization="q8_0"))


def test_modelopts_own_file_is_read_where_the_config_is_silent(tmp_path):
    config, tensors, floats = files.tiny_quantized("nvfp4-modelopt")
    del config["quantization_config"]
    folder = files.write(tmp_path / "model", config, tensors)
    words = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": words}))
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensors[f"{Q}.weight"].float32(), floats[f"{Q}.weight"])
        assert any("FP8 keys and values" in note for note in checkpoint.quantization.notes)


# Bad input: tensors.


def changed(tmp_path, scheme, change):
    config, tensors, _ = files.tiny_quantized(scheme)
    change(config, tensors)
    return files.write(tmp_path / "model", config, tensors)


def load(folder):
    plan = make_plan(EngineOptions(model=str(folder), kv_cache_memory_bytes=1 << 20))
    with plan.checkpoint:
        build_runner(plan).close()


def refused(tmp_path, scheme, change, match, error=ModelFileError):
    with pytest.raises(error, match=match):
        load(changed(tmp_path, scheme, change))


COMPANIONS = [
    *[("mxfp4", "weight_scale"), ("nvfp4", "weight_scale"), ("nvfp4", "weight_global_scale")],
    *[("nvfp4-modelopt", "weight_scale_2"), ("fp8-tensor", "weight_scale"), ("fp8-block", "weight_scale_inv")],
    *[("gptq-symmetric", "scales"), ("gptq-symmetric", "qzeros"), ("awq", "qzeros")],
]


@pytest.mark.parametrize(("scheme", "suffix"), COMPANIONS)
def test_a_missing_companion_is_named(tmp_path, scheme, suffix):
    refused(tmp_path, scheme, lambda _, t: t.pop(f"{Q}.{suffix}"), rf"{Q}\.{suffix}.* is missing")


@pytest.mark.parametrize(("scheme", "suffix"), [c for c in COMPANIONS if c not in [("fp8-tensor", "weight_scale")]])
def test_a_companion_of_another_shape_is_refused_with_both_shapes(tmp_path, scheme, suffix):
    def shorten(_, tensors):
        dtype, shape, raw = tensors[f"{Q}.{suffix}"]
        n = len(raw) // int(np.prod(shape))
        tensors[f"{Q}.{suffix}"] = (dtype, (7, 3), raw[:n] * 21)

    refused(
        tmp_path, scheme, shorten, rf"{Q}\.{suffix} is .* of shape \[7, 3\]; .* of shape .*\[.*\] is needed beside {Q}"
    )


@pytest.mark.parametrize(
    ("scheme", "suffix", "nan"),
    [
        ("mxfp4", "weight_scale", b"\xff"),
        ("nvfp4", "weight_scale", b"\x7f"),
        ("nvfp4", "weight_scale", b"\xff"),
        ("nvfp4-modelopt", "weight_scale_2", np.float32(np.nan).tobytes()),
        ("fp8-tensor", "weight", b"\x7f"),
        ("fp8-tensor", "weight_scale", np.float32(np.inf).tobytes()),
        ("fp8-block", "weight_scale_inv", np.float32(np.nan).tobytes()),
        ("gptq-symmetric", "scales", np.float16(np.nan).tobytes()),
        ("awq", "scales", np.float16(np.inf).tobytes()),
    ],
)
def test_a_scale_or_weight_that_is_no_number_is_refused_by_name(tmp_path, scheme, suffix, nan):
    def spoil(_, tensors):
        dtype, shape, raw = tensors[f"{Q}.{suffix}"]
        tensors[f"{Q}.{suffix}"] = (dtype, shape, raw[: -len(nan)] + nan)

    refused(tmp_path, scheme, spoil, rf"{Q}\.{suffix} .*(NaN|infinity)")


def test_a_global_scale_of_zero_is_refused(tmp_path):
    refused(tmp_path, "nvfp4", lambda _, t: t.update({f"{Q}.weight_global_scale": files.f32([0.0])}), "and is 0")


@pytest.mark.parametrize(("scheme", "suffix"), [("nvfp4-modelopt", "weight_scale_2"), ("fp8-tensor", "weight_scale")])
def test_scales_that_make_weights_infinite_are_refused(tmp_path, scheme, suffix):
    refused(tmp_path, scheme, lambda _, t: t.update({f"{Q}.{suffix}": files.f32(3e38)}), rf"{Q}\..* is infinite")


def test_codes_without_their_matrix_are_refused(tmp_path):
    refused(tmp_path, "mxfp4", lambda _, t: t.pop(f"{Q}.weight_packed"), rf"{Q}\.weight_scale .*belongs to no matrix")


def test_a_matrix_of_another_size_than_the_configs_is_refused_with_both_shapes(tmp_path):
    def shrink(_, tensors):
        parts, _ = files.mxfp4(np.random.default_rng(1), 48, 64)
        tensors |= {f"{Q}.{suffix}": one for suffix, one in parts.items()}

    refused(tmp_path, "mxfp4", shrink, rf"{Q}\.weight has shape \[48, 64\]; \[64, 64\] is needed")


def test_a_matrix_stored_twice_is_refused(tmp_path):
    twice = files.f32(np.zeros((64, 64)))
    refused(tmp_path, "mxfp4", lambda _, t: t.update({f"{Q}.weight": twice}), rf"{Q}\.weight too; one of them")


def test_a_quantised_matrix_that_the_config_ignores_is_refused(tmp_path):
    def ignore(config, _):
        config["quantization_config"] = {**config["quantization_config"], "ignore": ["re:.*q_proj"]}

    refused(tmp_path, "mxfp4", ignore, rf"{Q}\.weight_packed .*says that {Q} is not")


def test_a_matrix_left_as_floats_is_read_as_floats(tmp_path):
    floats = np.random.default_rng(5).standard_normal((64, 64)).astype(np.float32) / 8

    def leave(config, tensors):
        config["quantization_config"] = {**config["quantization_config"], "ignore": ["lm_head", Q]}
        for suffix in ("weight_packed", "weight_scale"):
            tensors.pop(f"{Q}.{suffix}")
        tensors[f"{Q}.weight"] = files.f32(floats)

    folder = changed(tmp_path, "mxfp4", leave)
    load(folder)
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensors[f"{Q}.weight"].float32(), floats)
        assert checkpoint.quantization.n_matrices == 13


def test_a_checkpoint_with_nothing_of_its_scheme_is_refused(tmp_path):
    config, _, floats = files.tiny_quantized("mxfp4")
    folder = files.write(tmp_path / "model", config, {name: files.f32(w) for name, w in floats.items()})
    with pytest.raises(ModelFileError, match="no tensor is stored as compressed-tensors mxfp4-pack-quantized"):
        load(folder)


def test_fp8_weights_without_a_config_are_refused(tmp_path):
    refused(tmp_path, "fp8-tensor", lambda c, _: c.pop("quantization_config"), "has type F8_E4M3", UnsupportedModel)


def test_a_scale_for_activations_is_refused(tmp_path):
    scale = files.f32(np.ones(64))
    refused(
        tmp_path,
        "nvfp4-modelopt",
        lambda _, t: t.update({f"{Q}.pre_quant_scale": scale}),
        "activations would have to be multiplied",
        UnsupportedModel,
    )


def test_a_group_that_is_not_there_is_refused(tmp_path):
    wrong = files.part(np.full(64, 2, "<i4"), "I32")
    refused(
        tmp_path,
        "gptq-symmetric",
        lambda _, t: t.update({f"{Q}.g_idx": wrong}),
        rf"{Q}\.g_idx .*holds 2; groups 0 to 1",
    )


# Bad input: configs.


def words(base, **changes):
    return files.SCHEMES[base][1] | changes


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method: got 'bitsandbytes'; one of"),
        ({}, "quant_method: got 'None'"),
        (words("mxfp4", format="marlin-24"), "format: got 'marlin-24'"),
        (words("mxfp4", quantization_status="frozen"), "quantization_status: got 'frozen'"),
        (words("mxfp4", sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
        (words("mxfp4", transform_config={"R1": {}}), "transform_config"),
        (words("mxfp4", surprise=1), "surprise: got '1'; no such key"),
        (words("nvfp4", format="mxfp4-pack-quantized"), r"weights.group_size: got '16'; 32 is needed"),
        (words("fp8-block", fmt="e5m2"), "fmt: got 'e5m2'"),
        (words("fp8-block", weight_block_size=[128]), "weight_block_size"),
        (words("nvfp4-modelopt", quant_algo="W4A8_AWQ"), "quant_algo: got 'W4A8_AWQ'"),
        (words("gptq-symmetric", bits=3), "bits: got '3'; 4 is needed"),
        (words("gptq-symmetric", dynamic={"-:.*": {}}), "dynamic"),
        (words("awq", version="gemv"), "version: got 'gemv'; gemm is needed"),
        (words("mxfp4-quark", layer_quant_config={"lm_head": {}}), "layer_quant_config"),
    ],
)
def test_a_scheme_that_is_not_read_is_refused_by_its_key(tmp_path, config, match):
    refused(tmp_path, "mxfp4", lambda c, _: c.update(quantization_config=config), match, UnsupportedModel)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ("mxfp4", "quantization_config: a str; an object is needed"),
        (words("mxfp4", ignore="lm_head"), "ignore: a list of module names"),
        (words("mxfp4", ignore=["re:("]), "is no pattern"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(tmp_path, config, match):
    refused(tmp_path, "mxfp4", lambda c, _: c.update(quantization_config=config), match)
