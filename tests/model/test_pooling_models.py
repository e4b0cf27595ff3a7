"""Tiny pooling models against rows of transformers (tools/make_pooling_fixtures.py), and their invariance."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tiercel import _native
from tiercel.models.registry import build_model
from tiercel.ops.passes import Passes, lower_and_fuse
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import StepPlan
from tiercel.quant.formats import Format
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.native import float_tensors, native_runner

FIXTURES = Path(__file__).parent / "pooling_fixtures"
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0.0)


def load(path):
    expected = json.loads(path.read_text())
    model = build_model(expected["config"])
    weights = tiny_checkpoint(expected["config"])
    tensors = {name: SimpleNamespace(shape=w.shape, format=Format.F32) for name, w in weights.items()}
    return SimpleNamespace(model=model, weights=weights, program=model.record(tensors), **expected)


@pytest.fixture(scope="session", params=sorted(FIXTURES.glob("*.json")), ids=lambda path: path.stem)
def tiny(request):
    return load(request.param)


@pytest.fixture
def encoder():
    return load(FIXTURES / "bert.json")


def run(runner, texts, *, wants_all=True):
    """Compute texts, each (ids, n_first), in one step; return each one's rows."""
    page, n_pages = runner.limits.page_size_tokens, runner.limits.max_len_tokens // runner.limits.page_size_tokens
    assert page * n_pages == runner.limits.max_len_tokens
    for slot, (ids, n_first) in enumerate(texts):
        runner.admit(slot, ids, len(ids), GREEDY, 0, (), n_first)
        runner.set_pages(slot, 0, range(slot * n_pages, (slot + 1) * n_pages))
    n = len(texts)
    every, none = np.full(n, wants_all), np.full(n, fill_value=not wants_all)
    lengths = np.array([len(ids) for ids, _ in texts], np.int32)
    runner.submit(StepPlan(0, np.arange(n, dtype=np.int32), np.zeros(n, np.int32), lengths, none, every, None))
    result = runner.collect()
    for slot in range(n):
        runner.release(slot)
    return [result.rows[np.asarray(result.row_seq) == i] for i in range(n)]


def assert_close(tiny, rows):
    expected = np.array(tiny.rows)
    # A sequence classifier of an encoder reads the first token, of a decoder the last.
    if len(expected) == 1:
        rows = rows[:1] if tiny.model.pooling.method == "cls" else rows[-1:]
    assert rows.shape == (len(expected), tiny.program.output.width)
    assert np.abs(rows[:, : expected.shape[1]] - expected).max() <= TOLERANCE


@pytest.mark.parametrize("form", ["recorded", "lowered", "no-passes"])
def test_definitions_give_the_rows_of_transformers(tiny, form):
    forms = {
        "recorded": lambda p: p,
        "lowered": lower_and_fuse,
        "no-passes": lambda p: lower_and_fuse(p, Passes.none()),
    }
    executor = ReferenceExecutor(
        forms[form](tiny.program), tiny.weights, max_tokens=24, reuse_buffers=form == "lowered"
    )
    assert_close(tiny, executor.step([Chunk(0, tiny.token_ids, n_first=tiny.n_first)]))


@pytest.mark.parametrize("level", _native.kernel_levels())
def test_kernels_give_the_rows_of_transformers(tiny, level):
    runner = native_runner(tiny.program, float_tensors(tiny.weights), max_len_tokens=64, level=level)
    try:
        (rows,) = run(runner, [(tiny.token_ids, tiny.n_first)])
        assert_close(tiny, rows)
    finally:
        runner.close()


def test_rows_are_the_same_bits_alone_and_in_a_batch_at_every_level_and_number_of_threads(encoder):
    rng = np.random.default_rng(3)
    lengths = (1, 2, 31, 32, 33, 48, 64, 5)
    texts = [([int(t) for t in rng.integers(0, 128, n)], None if i % 2 else n // 2) for i, n in enumerate(lengths)]
    seen = []
    for level in _native.kernel_levels():
        for n_threads in (1, 2, 3):
            tensors = float_tensors(encoder.weights)
            options = {"max_len_tokens": 64, "n_slots": 8, "n_threads": n_threads, "level": level}
            runner = native_runner(encoder.program, tensors, **options)
            try:
                seen.append(run(runner, texts))
                seen.append([run(runner, [text])[0] for text in texts])
                seen.append(run(runner, texts[::-1])[::-1])
            finally:
                runner.close()
    for other in seen[1:]:
        for a, b in zip(seen[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_second_text_changes_the_rows(encoder):
    """Else a fixture could not tell a wrong segment."""
    runner = native_runner(encoder.program, float_tensors(encoder.weights), max_len_tokens=64)
    try:
        one, pair = run(runner, [(encoder.token_ids, None), (encoder.token_ids, 9)])
    finally:
        runner.close()
    assert np.abs(one - pair).max() > 1e-3


def test_an_encoder_keeps_nothing(encoder):
    assert encoder.model.info.kv_layers == ()
    assert encoder.model.info.kv_bytes_per_token() == 0
    assert "return rows" in encoder.program.text()


def test_only_the_last_row_comes_when_it_alone_is_asked_for(encoder):
    runner = native_runner(encoder.program, float_tensors(encoder.weights), max_len_tokens=64)
    try:
        (all_rows,) = run(runner, [(encoder.token_ids, None)])
        (last,) = run(runner, [(encoder.token_ids, None)], wants_all=False)
    finally:
        runner.close()
    np.testing.assert_array_equal(last, all_rows[-1:])
