"""The ops of encoders at every level against their definitions, as programs of one op over tables of chosen numbers."""

import numpy as np
import pytest

from tiercel import _native
from tiercel.ops import reference_encoder as definitions
from tiercel.ops.dims import UNARY
from tiercel.ops.recorder import ComputeDtype, Recorder
from tiercel.ops.reference import TOLERANCE
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import StepPlan
from tiercel.quant.formats import Format
from tiercel.testing.native import float_tensors, native_runner

LEVELS = _native.kernel_levels()
N_IDS = 48

pytestmark = [pytest.mark.parametrize("level", LEVELS), pytest.mark.parametrize("n_threads", [1, 2])]


def seeded(*shape, seed=1, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def run(record, weights, texts, *, level, n_threads):
    """Record a program over weights, compute each text whole in one step; return all rows, text after text."""
    shapes = {name: w.shape for name, w in weights.items()}
    rec = Recorder("op", shapes, dict.fromkeys(weights, Format.F32), ComputeDtype.AUTO)
    program = rec.finish(rec.select_rows(record(rec)), is_pooling=True)
    runner = native_runner(program, float_tensors(weights), max_len_tokens=64, level=level, n_threads=n_threads)
    try:
        n = len(texts)
        for slot, ids in enumerate(texts):
            runner.admit(slot, ids, len(ids), SamplingParams(temperature=0.0), 0, ())
            runner.set_pages(slot, 0, range(4 * slot, 4 * slot + 4))
        lengths = np.array([len(ids) for ids in texts], np.int32)
        none, every = np.zeros(n, np.bool_), np.ones(n, np.bool_)
        runner.submit(StepPlan(0, np.arange(n, dtype=np.int32), np.zeros(n, np.int32), lengths, none, every, None))
        return runner.collect().rows
    finally:
        runner.close()


def assert_close(got, expected, op):
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE[op].rtol, atol=TOLERANCE[op].atol)


@pytest.mark.parametrize("act", UNARY)
@pytest.mark.parametrize("width", [5, 16, 49])
def test_activate_agrees_with_its_definition(level, n_threads, act, width):
    table = seeded(N_IDS, width, scale=3.0)
    table[0] = np.linspace(-40.0, 40.0, width)
    ids = list(range(N_IDS))
    rows = run(lambda rec: rec.activate(rec.embed("t"), act), {"t": table}, [ids], level=level, n_threads=n_threads)
    assert_close(rows, definitions.activate(table, act), "activate")


def test_gelu_keeps_its_digits_far_below_zero(level, n_threads):
    """The tail must not be the difference of one and nearly one, which at -5 has one digit."""
    table = np.linspace(-5.0, -2.0, 16, dtype=np.float32)[None]
    rows = run(lambda rec: rec.activate(rec.embed("t"), "gelu"), {"t": table}, [[0]], level=level, n_threads=n_threads)
    np.testing.assert_allclose(rows, definitions.activate(table, "gelu"), rtol=5e-3)


@pytest.mark.parametrize("width", [1, 7, 64, 384, 1001])
def test_layer_norm_agrees_with_its_definition(level, n_threads, width):
    weights = {"t": seeded(N_IDS, width, scale=4.0) + 3.0, "w": seeded(width, seed=2), "b": seeded(width, seed=3)}
    ids = list(range(N_IDS))
    rows = run(
        lambda rec: rec.layer_norm(rec.embed("t"), "w", "b", 1e-5), weights, [ids], level=level, n_threads=n_threads
    )
    assert_close(rows, definitions.layer_norm(weights["t"], weights["w"], weights["b"], 1e-5), "layer_norm")


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(2, 2, 16), (3, 1, 24), (4, 2, 5), (1, 1, 40)])
def test_attention_sees_its_own_text_both_ways_and_no_other(level, n_threads, heads, kv_heads, d):
    widths = {"q": heads * d, "k": kv_heads * d, "v": kv_heads * d}
    weights = {"t": seeded(N_IDS, 32)}
    weights |= {name: seeded(n, 32, seed=n + i, scale=0.3) for i, (name, n) in enumerate(widths.items())}
    texts = [[5, 6, 7], list(range(48)), [1], list(range(33))]

    def record(rec):
        x = rec.embed("t")
        q, k, v = (rec.linear(x, name) for name in "qkv")
        return rec.sequence_attention(q, k, v, heads=heads, kv_heads=kv_heads, head_dim=d, scale=0.3)

    rows = run(record, weights, texts, level=level, n_threads=n_threads)
    start = 0
    for ids in texts:
        x = weights["t"][ids]
        q, k, v = ((x @ weights[name].T).reshape(len(ids), -1, d) for name in "qkv")
        expected = definitions.sequence_attention(q, k, v, scale=0.3).reshape(len(ids), -1)
        assert_close(rows[start : start + len(ids)], expected, "sequence_attention")
        start += len(ids)


def test_a_nan_stays_in_its_own_text(level, n_threads):
    weights = {"t": seeded(N_IDS, 32)} | {name: 100 * seeded(32, 32, seed=i) for i, name in enumerate("qkv")}
    weights["t"][9] = 3e38  # times weights of both signs: infinities of both, and their sum is no number

    def record(rec):
        x = rec.embed("t")
        q, k, v = (rec.linear(x, name) for name in "qkv")
        return rec.sequence_attention(q, k, v, heads=2, kv_heads=2, head_dim=16, scale=0.3)

    rows = run(record, weights, [[1, 9, 2], [3, 4]], level=level, n_threads=n_threads)
    assert np.isnan(rows[:3]).all()
    assert np.isfinite(rows[3:]).all()


def test_embed_rows_counts_positions_from_its_first_row(level, n_threads):
    table = seeded(N_IDS, 16)

    def record(rec):
        return rec.embed_rows("p", "position", first=2)

    weights = {"p": table}
    rows = run(record, weights, [[0, 0, 0], [0]], level=level, n_threads=n_threads)
    np.testing.assert_array_equal(rows, table[[2, 3, 4, 2]])
