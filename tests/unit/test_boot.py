"""What `boot` decides before it touches weights, and that nothing is left open when it fails."""

import gc
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiercel.base.config import EngineOptions
from tiercel.base.errors import ConfigError, ModelFileError, OutOfPages
from tiercel.boot import engine as engine_module
from tiercel.boot.engine import build_engine, engine_config
from tiercel.boot.plan import make_plan, planned_tensors
from tiercel.boot.runner import build_runner
from tiercel.boot.summary import describe
from tiercel.boot.text import eos_ids
from tiercel.quant.formats import Format
from tiercel.testing.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def plan_of(folder, **options):
    plan = make_plan(EngineOptions(model=str(folder), **options))
    plan.checkpoint.close()
    return plan


def tensors_of(*formats):
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"]
    shapes = [(64, 32), (96, 32), (64, 32), (32,)]
    tensors = {n: SimpleNamespace(format=f) for n, f in zip(names, formats, strict=True)}
    return SimpleNamespace(tensors=tensors), dict(zip(names, shapes, strict=True))


def is_open(path):
    gc.collect()
    return str(path) in Path("/proc/self/maps").read_text()


# Formats.


@pytest.mark.parametrize("stored", [Format.F32, Format.F16, Format.BF16])
def test_q4_0_leaves_the_tables_at_q8_0_and_the_vectors_as_they_are(stored):
    checkpoint, expected = tensors_of(stored, stored, stored, Format.F32)
    planned = planned_tensors(checkpoint, expected, "q4_0")
    assert [tensor.format for tensor in planned.values()] == [Format.Q8_0, Format.Q4_0, Format.Q8_0, Format.F32]
    assert {name: tensor.shape for name, tensor in planned.items()} == expected


@pytest.mark.parametrize(
    "name", ["mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_a", "linear_attn.in_proj_ba"]
)
def test_small_matrices_that_decide_much_keep_their_format(name):
    names = (f"model.layers.0.{name}.weight", "model.layers.0.mlp.shared_expert.gate_proj.weight")
    checkpoint = SimpleNamespace(tensors={n: SimpleNamespace(format=Format.BF16) for n in names})
    planned = planned_tensors(checkpoint, dict.fromkeys(names, (64, 32)), "q8_0")
    assert [planned[n].format for n in names] == [Format.BF16, Format.Q8_0]


@pytest.mark.parametrize("quantization", [None, "none"])
def test_without_a_quantization_formats_are_the_files(quantization):
    formats = (Format.Q6_K, Format.Q4_1, Format.BF16, Format.F32)
    checkpoint, expected = tensors_of(*formats)
    planned = planned_tensors(checkpoint, expected, quantization)
    assert tuple(tensor.format for tensor in planned.values()) == formats


def test_a_quantised_file_is_not_quantised_again():
    checkpoint, expected = tensors_of(Format.F16, Format.Q4_K, Format.F16, Format.F32)
    with pytest.raises(ConfigError, match=r"up_proj\.weight is q4_k already; leave the option out"):
        planned_tensors(checkpoint, expected, "q8_0")


def test_a_matrix_whose_rows_hold_no_whole_groups_stays_as_it_is():
    checkpoint, expected = tensors_of(*[Format.F32] * 4)
    expected["model.layers.0.mlp.up_proj.weight"] = (96, 40)
    planned = planned_tensors(checkpoint, expected, "q8_0")
    assert planned["model.layers.0.mlp.up_proj.weight"].format is Format.F32


# Identity: the same for what gives the same numbers, and for nothing else.


@pytest.mark.parametrize(
    "options",
    [{"quantization": "q8_0"}, {"compute_dtype": "float32", "quantization": "q8_0"}, {"quantization": "q4_0"}],
    ids=str,
)
def test_identity_follows_the_arithmetic(folder, options):
    assert plan_of(folder, **options).identity != plan_of(folder).identity


def test_compute_dtype_is_part_of_the_identity(folder):
    one, other = (plan_of(folder, quantization="q8_0", compute_dtype=dtype).identity for dtype in ("auto", "float32"))
    assert one != other


@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": 3}, {"threads": 1}, {"block_size": 32}, {"enable_prefix_caching": False}, {"max_model_len": 40}],
    ids=str,
)
def test_identity_does_not_follow_sizes(folder, options):
    assert plan_of(folder, **options).identity == plan_of(folder).identity


def test_identity_follows_the_files_and_not_their_place(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    assert plan_of(tmp_path / "copy").identity == plan_of(folder).identity
    changed = write_tiny_model(tmp_path / "changed", config={"rms_norm_eps": 2e-6})
    assert plan_of(changed).identity != plan_of(folder).identity
    data = bytearray((tmp_path / "copy/model.safetensors").read_bytes())
    data[-1] ^= 0x40
    (tmp_path / "copy/model.safetensors").write_bytes(data)
    assert plan_of(tmp_path / "copy").identity != plan_of(folder).identity


# Sizes.


def test_slots_do_not_outnumber_a_steps_tokens_where_none_were_asked_for(folder):
    assert plan_of(folder).capacity.max_num_seqs == 64
    assert plan_of(folder, max_num_batched_tokens=8).capacity.max_num_seqs == 8


def test_more_slots_than_tokens_of_a_step_are_refused(folder):
    with pytest.raises(ConfigError, match="at least max_num_seqs, which is 20"):
        plan_of(folder, max_num_batched_tokens=8, max_num_seqs=20)


def test_the_engine_gets_its_options(folder):
    options = {"enable_prefix_caching": False, "async_scheduling": False, "scheduling_policy": "priority"}
    config = engine_config(plan_of(folder, seed=5, max_logprobs=3, max_waiting=9, **options))
    assert (config.seed, config.max_logprobs, config.max_waiting) == (5, 3, 9)
    assert not config.enable_prefix_caching
    assert not config.async_scheduling
    assert config.scheduling_policy == "priority"
    assert engine_config(plan_of(folder)).max_waiting > 9


def test_float32_keys_and_values_take_twice_the_room(folder):
    half, full = (plan_of(folder, kv_cache_dtype=dtype).capacity.page_bytes for dtype in ("float16", "float32"))
    assert (half, full) == (2 * 2 * 2 * 16 * 2 * 16, 2 * half)
    assert plan_of(folder).capacity.page_bytes == half


def test_int8_keys_and_values_take_a_byte_each_and_two_scales_a_head(folder):
    assert plan_of(folder, kv_cache_dtype="int8").capacity.page_bytes == 2 * 2 * 16 * (2 * 16 + 4)


def test_other_names_of_a_kv_type_mean_the_same(folder):
    assert plan_of(folder, kv_cache_dtype="fp16").kv_dtype == "float16"
    assert plan_of(folder, kv_cache_dtype="fp32").kv_dtype == "float32"


# Ends of a text.


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, {3, 4}),
        ({}, {"eos_token_id": 5}, {5}),
        ({}, {"eos_token_id": [5, 6]}, {5, 6}),
        ({}, {}, set()),
        ({"eos_token_id": None}, {"eos_token_id": 5}, {5}),
        ({"eos_token_id": [3, 264, -1, True, "7"]}, {}, {3}),
    ],
    ids=str,
)
def test_end_ids_are_the_generation_configs_else_the_configs(folder, generation, config, expected):
    plan = plan_of(folder)
    checkpoint = SimpleNamespace(generation_config=generation, config=config)
    plan = SimpleNamespace(checkpoint=checkpoint, info=plan.info)
    assert eos_ids(plan, None) == expected
    tokenizer = SimpleNamespace(eos_ids=(9,))
    assert eos_ids(plan, tokenizer) == expected | {9}


# Failures.


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_model_len": 999}, ConfigError),
        ({"dtype": "bfloat16"}, ConfigError),
        ({"kv_cache_memory_bytes": 1}, OutOfPages),
    ],
    ids=str,
)
def test_a_plan_that_fails_leaves_no_file_open(folder, tmp_path, options, error):
    shutil.copytree(folder, tmp_path / "own")
    with pytest.raises(error):
        make_plan(EngineOptions(model=str(tmp_path / "own"), **options))
    assert not is_open(tmp_path)


def test_an_engine_that_fails_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    """The tokenizer's error comes from another thread, when the weights are packed already."""
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    (own / "tokenizer.json").write_text("{")
    closed = []
    runners = []

    def build(plan, ready):
        runner = build_runner(plan, ready)
        runners.append(runner)
        close = runner.close
        monkeypatch.setattr(runner, "close", lambda: (closed.append(runner), close()))
        return runner

    monkeypatch.setattr(engine_module, "build_runner", build)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        build_engine(EngineOptions(model=str(own), threads=1))
    assert closed == runners != []
    monkeypatch.undo()
    runners.clear()
    closed.clear()
    assert not is_open(tmp_path)


def test_a_plan_is_told_before_weights_are_packed(folder, monkeypatch):
    order = []
    monkeypatch.setattr(
        engine_module, "build_runner", lambda plan, ready: (order.append("packed"), build_runner(plan, ready))[1]
    )
    options = EngineOptions(model=str(folder), threads=1, max_num_seqs=2)
    engine = build_engine(options, on_plan=lambda plan: order.append(plan.capacity.max_num_seqs))
    engine.close()
    engine.close()
    assert order == [2, "packed"]


# `tiercel show`.


def test_a_description_names_what_a_person_may_ask(folder):
    found = describe(str(folder))
    summary = dict(found["summary"])
    assert summary["architecture"] == "LlamaForCausalLM"
    n_weights = 264 * 64 * 2 + 64 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)
    assert (found["sizes"].n_weights, found["sizes"].n_bytes) == (n_weights, 4 * n_weights)
    assert summary["formats"].startswith("f32 ")
    assert summary["context"] == "256 tokens"
    assert set(found) == {"summary", "sizes"}
    assert not is_open(folder)


def test_a_description_shows_the_program_and_the_choices_on_request(folder):
    found = describe(str(folder), program=True, explain=True)
    assert "rope_table" in found["program"]
    assert "linear" in found["program"]
    assert found["explain"]
