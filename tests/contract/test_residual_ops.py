"""The ops of residual banks and of draft heads in the core, at every level, against their definitions."""

import numpy as np
import pytest

from tiercel import _native
from tiercel.base.errors import ModelFileError, ShapeError
from tiercel.ops.passes import Passes, lower_and_fuse
from tiercel.ops.recorder import ComputeDtype, Recorder
from tiercel.ops.reference import TOLERANCE
from tiercel.ops.reference_residual import residual_mix
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import StepPlan
from tiercel.quant.formats import Format
from tiercel.testing.native import float_tensors, native_logits, native_runner

LEVELS = _native.kernel_levels()
VOCAB = 32  # not more than the columns that are given out for logits
CASES = {
    "one": (1, 48),
    "two": (2, 40),
    "nine-odd": (9, 71),
    "seventeen": (17, 96),
    "most": (64, 33),
    "wide": (9, 7168),
}
IDS = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()


def recorder(weights):
    formats = dict.fromkeys(weights, Format.F32)
    return Recorder("residuals", {n: w.shape for n, w in weights.items()}, formats, ComputeDtype.AUTO)


def mix_of(case, **wrong):
    """A program that mixes as many tables' rows, and its weights. Rows differ in size by orders of magnitude."""
    n, width = CASES[case]
    rng = np.random.default_rng(n)
    weights = {f"e{i}": (rng.standard_normal((VOCAB, width)) * 10.0 ** (i % 5 - 2)) for i in range(n)}
    weights |= {"norm.weight": 1 + 0.1 * rng.standard_normal(width), "w": rng.standard_normal((1, width)) * width**-0.5}
    weights = {name: w.astype(np.float32) for name, w in weights.items()} | wrong
    rec = recorder(weights)
    y = rec.residual_mix([rec.embed(f"e{i}") for i in range(n)], "norm.weight", "w", 1e-5)
    return rec.finish(rec.select_rows(y)), weights


def defined(case, ids):
    n, _ = CASES[case]
    weights = mix_of(case)[1]
    return residual_mix([weights[f"e{i}"][ids] for i in range(n)], weights["norm.weight"], weights["w"], 1e-5)


def run(program, weights, chunks, ids=IDS, **options):
    runner = native_runner(program, float_tensors(weights), **options)
    try:
        return native_logits(runner, ids, chunks)
    finally:
        runner.close()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_mix_agrees_with_its_definition(level, case):
    got = run(*mix_of(case), [40], level=level)
    limit = TOLERANCE["residual_mix"]
    np.testing.assert_allclose(got, defined(case, IDS), atol=limit.atol, rtol=limit.rtol)


@pytest.mark.parametrize("case", ["nine-odd", "most"])
def test_a_mix_has_the_same_bits_at_every_level_in_any_chunks_on_any_threads(case):
    expected = run(*mix_of(case), [40], level=LEVELS[0], n_threads=1)
    alone = [{"level": level, "n_threads": 1} for level in LEVELS]
    for options in (*alone, {"n_threads": 3}, {"passes": Passes.none(), "n_threads": 1}):
        for chunks in ([1] * 40 if options in alone else [40], [3, 1, 20, 16]):
            got = run(*mix_of(case), chunks, **options)
            assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_a_single_source_is_its_own_mix():
    got = run(*mix_of("one"), [40])
    assert np.array_equal(got, mix_of("one")[1]["e0"][IDS])


def test_equal_sources_are_their_mix():
    source = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    y = residual_mix([source] * 4, np.ones(8, np.float32), np.ones((1, 8), np.float32), 1e-5)
    np.testing.assert_allclose(y, source, rtol=1e-6)


def test_a_source_that_is_not_a_number_shows_in_its_row_only():
    weights = mix_of("nine-odd")[1]
    weights["e4"][7, 3] = 3e38  # scaled, an infinity, whose norm is no number
    rec = recorder(weights)
    y = rec.residual_mix([rec.embed(f"e{i}", scale=10.0) for i in range(9)], "norm.weight", "w", 1e-5)
    got = run(rec.finish(rec.select_rows(y)), weights, [3], ids=[6, 7, 8])
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[[0, 2]]).all()


def test_wrong_shapes_of_a_mix_are_refused():
    with pytest.raises(ShapeError, match=r"residual_mix.*widths \[40, 40\], norm \[39\]"):
        mix_of("two", **{"norm.weight": np.zeros(39, np.float32)})
    with pytest.raises(ShapeError, match=r"residual_mix.*widths \[40, 41\]"):
        mix_of("two", e1=np.zeros((VOCAB, 41), np.float32))
    rec = recorder(mix_of("two")[1])
    x = rec.embed("e0")
    with pytest.raises(ShapeError, match="up to 64 alike"):
        rec.residual_mix([x] * 65, "norm.weight", "w", 1e-5)


def test_a_weight_of_a_mix_that_is_not_finite_is_refused_by_name():
    program, weights = mix_of("two")
    weights["w"][0, 5] = np.inf
    with pytest.raises(ModelFileError, match="w: holds NaN or infinity"):
        run(program, weights, [40])


def drafted(skips_first=True):
    """A program that joins the step's tokens with the rows that it brings along, and gives both out."""
    weights = {"e": np.random.default_rng(2).standard_normal((VOCAB, 24)).astype(np.float32)}
    rec = Recorder("drafts", {"e": (VOCAB, 24)}, {"e": Format.F32}, ComputeDtype.AUTO, keeps_hidden=True)
    y = rec.join(rec.embed("e", skips_first=skips_first), rec.given(17))
    return rec.finish(rec.keep_hidden(y)), weights


@pytest.mark.parametrize("level", LEVELS)
def test_joined_rows_are_the_tokens_but_the_first_and_those_that_were_brought(level):
    program, weights = drafted()
    runner = native_runner(program, float_tensors(weights), level=level, n_threads=3)
    given = np.random.default_rng(5).standard_normal((7, 17)).astype(np.float32)
    expected = np.concatenate([weights["e"][IDS[:7]], given], axis=1)
    expected[0, :24] = 0.0
    runner.admit(0, IDS[:7], 7, SamplingParams(temperature=0.0), 0, ())
    runner.set_pages(0, 0, [0])
    for step_id, (start, n) in enumerate(((0, 4), (4, 1), (5, 2))):
        arrays = (np.array([value], np.int32) for value in (0, start, n))
        plan = StepPlan(step_id, *arrays, np.array([False]), np.array([True]), n_logprobs=None)
        runner.submit(plan, given[start : start + n])
        runner.collect()
        assert np.array_equal(runner.last_logits(n), expected[start : start + n])
        assert np.array_equal(runner.last_hidden(n), expected[start : start + n])
    runner.close()


def test_a_token_at_the_first_position_counts_where_nothing_is_skipped():
    assert "skips_first" not in drafted(skips_first=False)[0].text()
    assert "skips_first=1" in drafted()[0].text()


def test_rows_are_brought_and_given_out_once():
    rec = Recorder("twice", {"e": (8, 8)}, {"e": Format.F32}, ComputeDtype.AUTO, keeps_hidden=True)
    y = rec.add(rec.given(8), rec.given(8))
    with pytest.raises(ShapeError, match="taken from the step twice"):
        rec.finish(rec.keep_hidden(y))
    with pytest.raises(ShapeError, match="given out twice"):
        rec.keep_hidden(y)


def test_what_is_given_out_lives_until_the_step_has_ended():
    """Nothing may take its place in the arena, nor be added to it, nor make it int8."""
    rng = np.random.default_rng(8)
    weights = {"e": rng.standard_normal((VOCAB, 64)), "n": np.ones(64), "w": rng.standard_normal((VOCAB, 64))}
    weights = {name: w.astype(np.float32) for name, w in weights.items()}
    formats = {"e": Format.F32, "n": Format.F32, "w": Format.Q8_0}
    rec = Recorder("kept", {n: w.shape for n, w in weights.items()}, formats, ComputeDtype.AUTO, keeps_hidden=True)
    x = rec.rms_norm(rec.embed("e"), "n", 1e-6)
    last = rec.keep_hidden(x)
    y = rec.linear(last, "w")
    program = rec.finish(y)
    runner = native_runner(program, float_tensors(weights))
    native_logits(runner, IDS, [40])
    rows = weights["e"][IDS]
    np.testing.assert_allclose(
        runner.last_hidden(40), rows / np.sqrt(np.square(rows).mean(1, keepdims=True) + 1e-6), rtol=1e-5
    )
    runner.close()
    assert f"hidden {lower_and_fuse(program).hidden}" in lower_and_fuse(program).text()
