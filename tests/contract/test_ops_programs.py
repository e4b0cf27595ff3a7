"""A program must give the same bits as recorded, as lowered, and under every choice of passes and placement."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tiercel.base.errors import ShapeError
from tiercel.models.registry import build_model
from tiercel.ops import lowered as low
from tiercel.ops.dims import Bounds
from tiercel.ops.lowered import BufferKind, LinearGroup, Lowered
from tiercel.ops.passes import Passes, lower_and_fuse
from tiercel.ops.place import Place, Placement, check, lifetimes, peak_bytes, place
from tiercel.quant.formats import Format
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.testing.fill import tiny_checkpoint

FIXTURES = Path(__file__).parent.parent / "model" / "fixtures"
PASSES = [
    Passes(**dict(zip(Passes.__struct_fields__, on, strict=True)))
    for on in itertools.product((True, False), repeat=len(Passes.__struct_fields__))
]
NAMES = [
    "llama_linear_biases_head_dim_24",
    "qwen3_window_bias",
    "gemma3_pattern_3_softcap",
    "smollm3_nope",
    "qwen3_moe",
]


def record(name, mixed=False, **options):
    config = json.loads((FIXTURES / f"{name}.json").read_text())["config"]
    model = build_model(config)
    weights = tiny_checkpoint(config)

    # A format here only says which activations meet the weight; its values stay what they are.
    def format_of(key, shape):
        if len(shape) < 2 or shape[1] % 32 or (mixed and ("k_proj" in key or ".mlp.up_proj" in key)):
            return Format.F32
        return Format.Q8_0

    tensors = {key: SimpleNamespace(shape=w.shape, format=format_of(key, w.shape)) for key, w in weights.items()}
    return model.record(tensors, **options), weights


def logits(program, weights, **options):
    executor = ReferenceExecutor(program, weights, max_tokens=16, **options)
    first = executor.step([Chunk(0, [3, 1, 4, 1, 5]), Chunk(1, [9, 2], n_logits=1)])
    second = executor.step(
        [Chunk(1, [6]), Chunk(2, [5, 3, 5, 8, 9, 7, 9, 3, 2], n_logits=2), Chunk(0, [2], n_logits=0)]
    )
    return np.concatenate([first, second])


@pytest.mark.parametrize("mixed", [False, True], ids=["q8", "mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_every_choice_of_passes_gives_the_recorded_programs_bits(name, mixed):
    program, weights = record(name, mixed)
    expected = logits(program, weights)
    assert np.isfinite(expected).all()
    for passes in PASSES:
        assert np.array_equal(logits(lower_and_fuse(program, passes), weights), expected), passes
    assert np.array_equal(logits(lower_and_fuse(program), weights, reuse_buffers=False), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_float32_program_rounds_no_activation(name):
    program, _ = record(name, compute_dtype="float32")
    assert all(b.kind is BufferKind.F32 for b in lower_and_fuse(program).buffers())


def test_rounding_activations_changes_logits_a_little():
    rounded = logits(*record("qwen3_window_bias"))
    exact = logits(*record("qwen3_window_bias", compute_dtype="float32"))
    assert 0.0 < np.abs(rounded - exact).max() < 0.5


def test_batched_sequences_equal_sequences_alone():
    program, weights = record("gemma3_pattern_3_softcap")
    program = lower_and_fuse(program)
    together = ReferenceExecutor(program, weights).step([Chunk(0, range(12)), Chunk(1, range(40, 57)), Chunk(2, [7])])
    alone = [ReferenceExecutor(program, weights).step([Chunk(0, ids)]) for ids in (range(12), range(40, 57), [7])]
    assert np.allclose(together, np.concatenate(alone), atol=1e-5)


def test_a_float16_store_changes_logits_by_its_rounding_only():
    program, weights = record("qwen3_window_bias", compute_dtype="float32")
    steps = [Chunk(0, range(20))]
    exact = ReferenceExecutor(program, weights).step(steps)
    rounded = ReferenceExecutor(program, weights, kv_dtype="float16").step(steps)
    assert 0.0 < np.abs(rounded - exact).max() < 0.05


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([Chunk(0, [1]), Chunk(0, [2])], "appears twice"),
        ([Chunk(0, [1], n_logits=2)], "2 rows of logits asked for 1 tokens"),
        ([Chunk(0, [128])], r"ids in 0\.\.128"),
        ([Chunk(0, [1] * 65)], "65 tokens; at most 64"),
    ],
)
def test_a_step_that_cannot_be_computed_is_refused(chunks, message):
    program, weights = record("smollm3_nope")
    with pytest.raises(ShapeError, match=message):
        ReferenceExecutor(lower_and_fuse(program), weights, max_tokens=64).step(chunks)


def test_a_step_without_tokens_is_legal():
    program, weights = record("smollm3_nope")
    for form in (program, lower_and_fuse(program)):
        executor = ReferenceExecutor(form, weights)
        assert executor.step([]).shape == (0, 128)
        assert executor.step([Chunk(0, [1, 2], n_logits=0)]).shape == (0, 128)
        executor.release(0)
        executor.check()


def test_all_passes_leave_the_fewest_ops():
    program, _ = record("gemma3_pattern_3_softcap")
    counts = [len(lower_and_fuse(program, passes).ops) for passes in PASSES]
    assert min(counts) == counts[0] < counts[-1] == max(counts)
    kinds = [op.kind for op in lower_and_fuse(program).ops]
    assert "add" not in kinds
    # What is left to round by itself: the outputs of attention, one a layer.
    assert kinds.count("quantize") == kinds.count("attention") == 6


def test_linears_of_mixed_formats_are_grouped_by_what_they_read():
    program, _ = record("llama_linear_biases_head_dim_24", mixed=True)
    groups = [op for op in lower_and_fuse(program).ops if isinstance(op, LinearGroup)]
    for group in groups:
        quantised = {part.w.format.is_quantized for part in group.parts}
        assert quantised == {group.x.kind is BufferKind.Q8}
    assert {len(group.parts) for group in groups} == {1}


def test_placement_reaches_the_peak_and_saves_most_of_the_space():
    program, _ = record("gemma3_pattern_3_softcap")
    lowered = lower_and_fuse(program)
    bounds = Bounds(512, 32, 32)
    placement = place(lowered, bounds)
    assert placement.arena_bytes == peak_bytes(lowered, placement)
    assert placement.arena_bytes < place(lowered, bounds, reuse=False).arena_bytes / 4


@pytest.mark.parametrize("bounds", [Bounds(1, 1, 1), Bounds(17, 3, 0), Bounds(333, 8, 8), Bounds(0, 0, 0)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_buffers_alive_together_never_overlap(name, bounds):
    lowered = lower_and_fuse(record(name)[0])
    placement = place(lowered, bounds, lambda k: 64 * (k // 32 + 1))
    ends = [at.end_bytes for at in placement.places.values()]
    assert max(ends) <= placement.arena_bytes
    alive = lifetimes(lowered)
    for a, b in itertools.combinations(alive, 2):
        pa, pb = placement.places[a.id], placement.places[b.id]
        if max(alive[a][0], alive[b][0]) < min(alive[a][1], alive[b][1]):
            assert pa.end_bytes <= pb.offset_bytes or pb.end_bytes <= pa.offset_bytes


def test_a_quantised_row_takes_what_the_backend_says():
    lowered = lower_and_fuse(record("qwen3_window_bias")[0])
    placement = place(lowered, Bounds(4, 1, 1), lambda k: 1024 + k)
    strides = {placement.places[b.id].stride_bytes - b.width for b in lowered.buffers() if b.kind is BufferKind.Q8}
    assert strides == {1024}


def test_an_overlap_of_living_buffers_is_found():
    lowered = lower_and_fuse(record("qwen3_window_bias")[0])
    placement = place(lowered, Bounds(4, 1, 1))
    piled = {key: Place(0, at.stride_bytes, at.n_rows) for key, at in placement.places.items()}
    with pytest.raises(ShapeError, match="alive together and overlap"):
        check(lowered, Placement(placement.bounds, piled, placement.arena_bytes))


def test_a_lifetime_cut_short_shows_in_the_logits():
    """The NaN-filled arena is what makes the tests above mean something."""
    program, weights = record("qwen3_window_bias")
    lowered = lower_and_fuse(program)
    executor = ReferenceExecutor(lowered, weights, max_tokens=8)
    places = dict(executor._placement.places)
    table = next(op.y for op in lowered.ops if isinstance(op, low.RopeTable))
    attention = next(op for op in lowered.ops if isinstance(op, low.Attention))
    at = places[table.id]
    places[table.id] = Place(places[attention.y.id].offset_bytes, at.stride_bytes, at.n_rows)
    executor._placement = Placement(executor._placement.bounds, places, executor._placement.arena_bytes)
    with np.errstate(all="ignore"):
        got = executor.step([Chunk(0, [1, 2, 3])])
    assert not np.array_equal(got, ReferenceExecutor(lowered, weights).step([Chunk(0, [1, 2, 3])]))


@pytest.mark.parametrize("broken", ["overlap", "order", "kind"])
def test_a_lowered_program_that_breaks_a_rule_is_refused(broken):
    program = lower_and_fuse(record("qwen3_window_bias")[0])
    ops = list(program.ops)
    i = next(i for i, op in enumerate(ops) if isinstance(op, LinearGroup))
    group = ops[i]
    if broken == "overlap":
        parts = (group.parts[0], *(low.LinearPart(p.w, p.bias, 0) for p in group.parts[1:]))
        ops[i] = low.LinearGroup(group.x, parts, group.y)
    elif broken == "order":
        del ops[0]
    else:
        ops[i] = low.Quantize(group.x, group.y)
    with pytest.raises(ShapeError, match=r"^ops\.lowered: in "):
        Lowered(program.name, tuple(ops), program.output, program.kv_layers).check()


def test_cost_of_a_lowered_program_counts_every_weight():
    program, _ = record("llama_linear_biases_head_dim_24")
    lowered = lower_and_fuse(program)
    total = sum(low.cost(op, Bounds(1, 1, 1, 10)).nbytes for op in lowered.ops if isinstance(op, LinearGroup))
    assert total > sum(w.nbytes for w in lowered.weights() if len(w.shape) == 2 and "embed" not in w.name)
    assert all(low.cost(op, Bounds(0, 0, 0)) == (0, 0) for op in lowered.ops)
