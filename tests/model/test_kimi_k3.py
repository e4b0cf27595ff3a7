"""Kimi K3, every branch on, against golden numbers of another implementation; and its draft head.

The numbers have five decimals. No library has the model: what they rest on is its config and its weights' names.
"""

import json
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import quantized_files as files
from conftest import BACKENDS

from tiercel import _native
from tiercel.base.errors import ShapeError
from tiercel.loaders.checkpoint import open_checkpoint
from tiercel.models.registry import build_model
from tiercel.models.weights import check_mtp_weights, check_weights
from tiercel.ops.passes import Passes, lower_and_fuse
from tiercel.ops.recorder import ComputeDtype
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import StepPlan
from tiercel.quant.formats import Format
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.testing.fill import fill
from tiercel.testing.native import float_tensors, native_logits, native_runner

GOLDEN = json.loads((Path(__file__).parent / "kimi_k3.json").read_text())
TOLERANCE = 1e-4
IDS = [(7 * t + 3) % 128 for t in range(24)]
CHUNKS = {"prefill": [24], "token-by-token": [1] * 24, "ragged": [1, 7, 2, 9, 1, 4]}


def filled(name, shape):
    """The golden numbers' own amplitudes."""
    if "norm" in name and name.endswith(".weight"):
        return fill(name, shape, base=1.0, amp=0.1)
    if name.endswith("e_score_correction_bias"):
        return fill(name, shape, base=0.0, amp=0.1)
    is_half = name.endswith(("A_log", "dt_bias", "conv1d.weight", "embed_tokens.weight"))
    return fill(name, shape, base=0.0, amp=0.5 if is_half else shape[-1] ** -0.5)


def described(weights, format=Format.F32):
    def format_of(w):
        return format if w.ndim == 2 and w.shape[1] % 32 == 0 else Format.F32

    return {name: SimpleNamespace(shape=w.shape, format=format_of(w)) for name, w in weights.items()}


def test_a_second_draft_layer_is_the_firsts_arithmetic_over_weights_and_rows_of_its_own():
    model = build_model(GOLDEN["config"] | {"num_nextn_predict_layers": 2})
    weights = {n: filled(n, shape) for n, shape in model.mtp_module_weights(0).items()}
    assert not weights.keys() & model.mtp_module_weights(1).keys()
    weights |= dict(zip(model.mtp_module_weights(1), list(weights.values()), strict=True))
    given = np.random.default_rng(2).standard_normal((9, model.info.hidden_size)).astype(np.float32)
    found = []
    for module in range(2):
        program = model.record_mtp(described(weights), module=module)
        assert [layer.index for layer in program.kv_layers] == [model.config.n_layers + module]
        found.append(ReferenceExecutor(program, weights).step([Chunk(0, range(9), given=given)]))
    np.testing.assert_array_equal(*found)


@pytest.fixture(scope="module")
def k3():
    model = build_model(GOLDEN["config"])
    shapes = model.expected_weights() | model.mtp_weights()
    weights = {name: filled(name, shape) for name, shape in shapes.items()}
    tensors = described(weights)
    head = model.record_mtp(tensors)
    programs = {"plain": model.record(tensors), "hidden": model.record(tensors, keeps_hidden=True), "head": head}
    return SimpleNamespace(model=model, weights=weights, **programs)


def check_rows(logits, rows):
    for t, row in rows.items():
        got = logits[int(t)]
        assert np.abs(got[:6] - np.array(row["logits"])).max() <= TOLERANCE
        assert np.argsort(-got)[:5].tolist() == row["top"]


def test_the_fill_and_the_sizes_are_those_of_the_golden_numbers(k3):
    for name, values in GOLDEN["values"].items():
        np.testing.assert_allclose(k3.weights[name].reshape(-1)[:4], values, atol=5e-8)
    # The first layer's unused norm and projection are counted there: 2 * 64.
    unread = {"model.layers.0.self_attention_res_norm.weight", "model.layers.0.self_attention_res_proj.weight"}
    assert all(k3.model.may_ignore(name) and name not in k3.weights for name in unread)
    assert k3.model.info.n_parameters + 2 * 64 == GOLDEN["n_parameters"]
    assert sum(prod(shape) for shape in k3.model.mtp_weights().values()) == GOLDEN["n_mtp_parameters"]


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_logits_equal_the_golden_ones(k3, backend, chunks):
    logits = backend.run(k3.plain, k3.weights, IDS, chunks)
    check_rows(logits, GOLDEN["rows"])
    assert np.abs(logits).mean() == pytest.approx(GOLDEN["mean_size"], abs=1e-5)


def test_the_first_layers_state_is_the_golden_one(k3):
    executor = ReferenceExecutor(k3.plain, k3.weights)
    executor.step([Chunk(0, IDS)])
    state = executor.state_of(0, 0)
    assert state.sum() == pytest.approx(GOLDEN["first_state"]["sum"], abs=1e-4)
    assert np.abs(state).sum() == pytest.approx(GOLDEN["first_state"]["size"], abs=1e-4)


LOWERINGS = {
    "recorded": lambda program: program,
    "lowered": lower_and_fuse,
    "no-passes": lambda program: lower_and_fuse(program, Passes.none()),
}


@pytest.mark.parametrize("chunks", [[23], [1] * 23, [1, 7, 2, 13]], ids=["prefill", "token-by-token", "ragged"])
@pytest.mark.parametrize("lower", LOWERINGS.values(), ids=LOWERINGS)
def test_the_draft_heads_logits_equal_the_golden_ones(k3, lower, chunks):
    target = ReferenceExecutor(lower(k3.hidden), k3.weights)
    target.step([Chunk(0, IDS)])
    head = ReferenceExecutor(lower(k3.head), k3.weights)
    rows, start = [], 0
    for n in chunks:
        own = slice(start, start + n)
        rows.append(head.step([Chunk(0, IDS[1:][own], given=target.last_hidden[own])]))
        start += n
    check_rows(np.concatenate(rows), GOLDEN["mtp_rows"])


def run_head(runner, ids, hidden, chunks):
    """Native logits, and what the head gives out, of a draft head over `ids`, one sequence in chunks."""
    runner.admit(0, ids, len(ids), SamplingParams(temperature=0.0), 0, ())
    runner.set_pages(0, 0, list(range(-(-len(ids) // 16))))
    logits, kept, start = [], [], 0
    for step_id, n in enumerate(chunks):
        arrays = (np.array([value], np.int32) for value in (0, start, n))
        plan = StepPlan(step_id, *arrays, np.array([False]), np.array([True]), n_logprobs=None)
        runner.submit(plan, np.ascontiguousarray(hidden[start : start + n]))
        runner.collect()
        logits.append(runner.last_logits(n))
        kept.append(runner.last_hidden(n))
        start += n
    return np.concatenate(logits), np.concatenate(kept)


def same_bits(a, b):
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.fixture
def native(k3):
    made = []

    def make(program, **options):
        made.append(native_runner(program, float_tensors(k3.weights), **options))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@pytest.mark.parametrize("level", _native.kernel_levels())
def test_the_native_draft_head_gives_the_golden_logits_in_any_chunks(k3, native, level):
    target = native(k3.hidden, level=level, n_threads=1)
    plain = native_logits(native(k3.plain, level=level), IDS, [24])
    assert same_bits(native_logits(target, IDS, [24]), plain)
    hidden = target.last_hidden(24)[:23]
    head = native(k3.head, level=level, n_threads=1)
    logits, again = run_head(head, IDS[1:], hidden, [23])
    check_rows(logits, GOLDEN["mtp_rows"])
    for chunks in ([1] * 23, [1, 7, 2, 13]):
        other, kept = run_head(head, IDS[1:], hidden, chunks)
        assert same_bits(other, logits)
        assert same_bits(kept, again)


def test_what_a_draft_head_is_given_decides_what_it_says(k3, native):
    head, rng = native(k3.head), np.random.default_rng(1)
    hidden = rng.standard_normal((23, 64)).astype(np.float32)
    logits, kept = run_head(head, IDS[1:], hidden, [23])
    changed = hidden.copy()
    changed[20] += 1.0
    other, _ = run_head(head, IDS[1:], changed, [23])
    assert same_bits(other[:20], logits[:20])
    assert (np.abs(other[20:] - logits[20:]).max(axis=1) > 1e-3).all()
    assert kept.shape == (23, 64)


def test_rows_that_are_not_given_are_asked_for(k3, native):
    head = native(k3.head)
    head.admit(0, IDS, 24, SamplingParams(temperature=0.0), 0, ())
    head.set_pages(0, 0, [0, 1])
    arrays = [np.array([value], np.int32) for value in (0, 0, 2)]
    plan = StepPlan(0, *arrays, np.array([False]), np.array([True]), n_logprobs=None)
    for given in (None, np.zeros((3, 64), np.float32), np.zeros((2, 63), np.float32)):
        with pytest.raises(ShapeError, match="one given row for each token"):
            head.submit(plan, given)
    with pytest.raises(ShapeError, match="gives no rows out"):
        native(k3.plain).last_hidden(1)


IGNORED = ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*", "re:.*lm_head.*"]
IGNORED += ["re:vision_tower.*", "re:mm_projector.*"]


def released(folder, k3):
    """K3 as it is released: text behind a prefix, experts in MXFP4, vision weights beside them; and all as floats."""
    rng, tensors, floats = np.random.default_rng(4), {}, {}
    for name, w in k3.weights.items():
        own = f"language_model.{name}"
        if ".experts." in name:
            parts, floats[own] = files.mxfp4(rng, *w.shape)
            tensors |= {f"{own.removesuffix('.weight')}.{suffix}": one for suffix, one in parts.items()}
        else:
            floats[own], tensors[own] = w, files.f32(w)
    for name in ("vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight"):
        tensors[name] = files.f32(np.zeros((4, 4)))
    words = files.compressed("mxfp4-pack-quantized", files.FLOAT4 | {"group_size": 32, "strategy": "group"})
    text = GOLDEN["config"] | {"quantization_config": words | {"ignore": IGNORED}}
    outer = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}
    outer |= {"vision_config": {"patch_size": 14}, "media_placeholder_token_id": 100}
    return files.write(folder, outer, tensors), floats


def test_experts_as_released_give_the_bits_of_their_dequantised_weights(k3, tmp_path):
    folder, floats = released(tmp_path / "k3", k3)
    with open_checkpoint(folder) as checkpoint:
        model = build_model(checkpoint.config)
        check_weights(model, checkpoint.tensors)
        check_mtp_weights(model, checkpoint.tensors)
        assert model.has_mtp(checkpoint.tensors)
        experts = {t.format for name, t in checkpoint.tensors.items() if ".experts." in name}
        assert experts == {Format.MXFP4}

        def logits(tensors, **options):
            compute = ComputeDtype.FLOAT32 if options else ComputeDtype.AUTO
            programs = [model.record(tensors, compute_dtype=compute, keeps_hidden=True)]
            programs.append(model.record_mtp(tensors, compute_dtype=compute))
            target, head = (native_runner(program, tensors, **options) for program in programs)
            first = native_logits(target, IDS, [24])
            second, _ = run_head(head, IDS[1:], target.last_hidden(23), [23])
            target.close()
            head.close()
            return np.concatenate([first, second])

        assert same_bits(logits(checkpoint.tensors, expand_to_f32=True), logits(float_tensors(floats)))
