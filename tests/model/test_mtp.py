"""Models' own draft heads against transformers' layers (tools/make_mtp_fixtures.py), by definition and in the core."""

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
from tiercel.testing.fill import fill_by_name
from tiercel.testing.native import float_tensors, native_logits, native_runner

FIXTURES = sorted((Path(__file__).parent / "mtp_fixtures").glob("*.json"))
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=FIXTURES, ids=lambda path: path.stem)
def drafting(request):
    """A model's two programs, recorded for floats or for int8 products, and its weights."""
    expected = json.loads(request.param.read_text())
    model = build_model(expected["config"])
    shapes = model.expected_weights() | model.mtp_weights()
    weights = {n: fill_by_name(n, shape, norms_add_one=model.norms_add_one) for n, shape in shapes.items()}

    def record(format=Format.F32):
        def format_of(w):
            return format if w.ndim == 2 and w.shape[1] % 32 == 0 else Format.F32

        tensors = {name: SimpleNamespace(shape=w.shape, format=format_of(w)) for name, w in weights.items()}
        return model.record(tensors), model.record(tensors, keeps_hidden=True), model.record_mtp(tensors)

    return SimpleNamespace(model=model, weights=weights, record=record, expected=expected, ids=expected["token_ids"])


def check(logits, expected):
    columns = np.array(expected["columns"])
    assert logits.shape[0] == len(columns)
    assert np.abs(logits[:, : columns.shape[1]] - columns).max() <= TOLERANCE
    for t, row in expected["rows"].items():
        assert np.abs(logits[int(t)] - np.array(row)).max() <= TOLERANCE


def test_a_draft_head_reads_its_own_weights_and_what_it_shares(drafting):
    _, target, head = drafting.record()
    read = {one.name for w in head.weights() for one in w.each()}
    of_model = ("embed_tokens.weight", "word_embeddings.weight", "lm_head.weight")
    shared = {name for name in drafting.model.expected_weights() if name.endswith(of_model)}
    assert read == set(drafting.model.mtp_weights()) | shared
    index = drafting.model.config.n_layers
    assert [layer.index for layer in head.kv_layers] == [index]
    assert head.state_layers == ()
    assert target.hidden.width == head.hidden.width == drafting.model.info.hidden_size
    assert all(drafting.model.may_ignore(name) for name in drafting.model.mtp_weights())


LOWERINGS = {
    "recorded": lambda p: p,
    "lowered": lower_and_fuse,
    "no-passes": lambda p: lower_and_fuse(p, Passes.none()),
}


@pytest.mark.parametrize("lower", LOWERINGS.values(), ids=LOWERINGS)
def test_the_definitions_agree_with_transformers(drafting, lower):
    ids = drafting.ids
    _, target, head = (ReferenceExecutor(lower(p), drafting.weights, max_tokens=100) for p in drafting.record())
    target.step([Chunk(0, ids)])
    rows, hidden = [], target.last_hidden[:-1]
    for begin, end in ((0, 1), (1, 12), (12, len(ids) - 1)):
        rows.append(head.step([Chunk(0, ids[1:][begin:end], given=hidden[begin:end])]))
    check(np.concatenate(rows), drafting.expected)


def run_head(runner, ids, hidden, chunks, slot=0):
    runner.admit(slot, ids, len(ids), SamplingParams(temperature=0.0), 0, ())
    runner.set_pages(slot, 0, [slot * 8 + i for i in range(-(-len(ids) // 16))])
    logits, start = [], 0
    for step_id, n in enumerate(chunks):
        arrays = (np.array([value], np.int32) for value in (slot, start, n))
        plan = StepPlan(step_id, *arrays, np.array([False]), np.array([True]), n_logprobs=None)
        runner.submit(plan, np.ascontiguousarray(hidden[start : start + n]))
        runner.collect()
        logits.append(runner.last_logits(n))
        start += n
    return np.concatenate(logits)


def same_bits(a, b):
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.fixture
def native(drafting):
    made = []

    def make(program, **options):
        made.append(native_runner(program, float_tensors(drafting.weights), **options))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@pytest.mark.parametrize("level", _native.kernel_levels())
def test_the_core_agrees_with_transformers(drafting, native, level):
    ids = drafting.ids
    _, target, head = (native(program, level=level, n_threads=1) for program in drafting.record())
    native_logits(target, ids, [len(ids)])
    check(run_head(head, ids[1:], target.last_hidden(len(ids) - 1), [len(ids) - 1]), drafting.expected)


@pytest.mark.parametrize("format", [Format.F32, Format.Q8_0, Format.Q4_0], ids=str)
def test_chunks_and_threads_change_no_bit_and_giving_rows_out_changes_no_logit(drafting, native, format):
    ids = drafting.ids
    n = len(ids)
    programs = drafting.record(format)
    plain, target, head = (native(program, n_threads=1) for program in programs)
    assert same_bits(native_logits(target, ids, [n]), native_logits(plain, ids, [n]))
    hidden = target.last_hidden(n)
    native_logits(target, ids, [n - 5, 5])
    assert same_bits(target.last_hidden(5), hidden[-5:])
    whole = run_head(head, ids[1:], hidden, [n - 1])
    for runner in (head, native(programs[2], passes=Passes.none(), n_threads=1)):
        for chunks in ([1] * (n - 1), [7, 1, 1, n - 10]):
            assert same_bits(run_head(runner, ids[1:], hidden, chunks, slot=1), whole)
    assert same_bits(run_head(native(programs[2], n_threads=3), ids[1:], hidden, [7, 1, 1, n - 10]), whole)
