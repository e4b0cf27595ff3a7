"""Latent attention and its gate on the native core, at every level, against the definition that makes keys and values.

A program of one layer: the definition computes each head's keys and values from the latent rows, the core never does.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from tiercel import _native
from tiercel.base.errors import ConfigError, ModelFileError, ShapeError, UnsupportedModel
from tiercel.ops.passes import Passes, lower_and_fuse
from tiercel.ops.recorder import ComputeDtype, LatentSizes, Recorder
from tiercel.ops.reference import TOLERANCE
from tiercel.ops.reference_latent import latent_attention, latent_rows, sigmoid_gate
from tiercel.protocol.params import SamplingParams
from tiercel.quant.formats import Format
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.testing.fill import fill_by_name
from tiercel.testing.native import float_tensors, native_logits, native_runner, one_sequence

LEVELS = _native.kernel_levels()
VOCAB, HIDDEN = 64, 48
CHUNKS = [1, 1, 2, 250, 1, 1, 1, 43]
CASES = {  # heads, nope, rope, rank, v, rotation, width of the gate
    "nope-gated": (4, 16, 8, 40, 16, None, 64),
    "interleaved-gate-a-head": (5, 12, 16, 24, 20, True, 5),
    "halves": (3, 16, 8, 72, 8, False, 0),
    "released-sizes": (2, 128, 64, 512, 128, True, 0),
    "more-heads-than-a-block": (98, 8, 8, 16, 8, True, 0),
}


def layer(case, **wrong):
    """The program of one layer, and its weights."""
    heads, nope, rope, rank, v, rotation, gate_width = CASES[case]
    shapes = {
        "embed_tokens": (VOCAB, HIDDEN),
        "q": (heads * (nope + rope), HIDDEN),
        "a": (rank + rope, HIDDEN),
        "norm.weight": (rank,),
        "kv_b": (heads * (nope + v), rank),
        "gate": (gate_width, HIDDEN),
        "head": (VOCAB, heads * v),
    }
    weights = {name: fill_by_name(name, shape) for name, shape in shapes.items() if shape[0]} | wrong
    rec = Recorder(
        "latent", {n: w.shape for n, w in weights.items()}, dict.fromkeys(weights, Format.F32), ComputeDtype.AUTO
    )
    x = rec.embed("embed_tokens")
    table = None
    if rotation is not None:
        table = rec.rope_table("rope", (0.6 ** np.arange(rope // 2)).astype(np.float32), magnitude=1.1)
    sizes = {"sizes": LatentSizes(heads, nope, rope, v), "norm": "norm.weight", "weight": "kv_b"}
    more = {"eps": 1e-6, "scale": (nope + rope) ** -0.5, "table": table, "interleaved": bool(rotation)}
    q, gate = rec.select_rows(rec.linear(x, "q")), rec.linear(rec.select_rows(x), "gate") if gate_width else None
    y = rec.latent_attention(q, rec.linear(x, "a"), layer=0, **sizes, **more)
    return rec.finish(rec.linear(y if gate is None else rec.sigmoid_gate(y, gate), "head")), weights


def tokens(n):
    return np.random.default_rng(3).integers(0, VOCAB, n).tolist()


@pytest.fixture
def native():
    made = []

    def make(case, **options):
        program, weights = layer(case)
        made.append(
            native_runner(
                program, float_tensors(weights), **({"max_len_tokens": 320, "max_step_tokens": 320} | options)
            )
        )
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("level", LEVELS)
def test_the_core_agrees_with_the_definition(native, level, case, kv_dtype):
    program, weights = layer(case)
    ids = tokens(290)
    expected = ReferenceExecutor(program, weights, max_tokens=290, kv_dtype=kv_dtype).step([Chunk(0, ids)])
    got = native_logits(native(case, level=level, kv_dtype=kv_dtype), ids, [250, 1, 1, 38])
    # Rows that round to another half are off by that; of float32 rows nothing is rounded.
    tolerance = TOLERANCE["latent_attention"] if kv_dtype == "float32" else SimpleNamespace(atol=2e-3, rtol=1e-3)
    np.testing.assert_allclose(got, expected, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize("case", CASES)
def test_the_absorbed_form_agrees_with_the_definition(case):
    program, weights = layer(case)
    ids = tokens(40)
    expected = ReferenceExecutor(program, weights).step([Chunk(0, ids)])
    executor = ReferenceExecutor(lower_and_fuse(program), weights)
    got = [executor.step([Chunk(0, ids[:25], n_logits=0)]), executor.step([Chunk(0, ids[25:])])]
    assert got[0].shape == (0, VOCAB)
    np.testing.assert_allclose(got[1], expected[25:], atol=TOLERANCE["latent_attention"].atol)


@pytest.mark.parametrize("on", Passes.__struct_fields__)
def test_no_pass_changes_a_bit_of_the_absorbed_form(on):
    program, weights = layer("nope-gated")
    plain = ReferenceExecutor(lower_and_fuse(program, Passes.none()), weights, reuse_buffers=False)
    fused = ReferenceExecutor(lower_and_fuse(program, replace(Passes.none(), **{on: True})), weights)
    ids = tokens(30)
    np.testing.assert_array_equal(fused.step([Chunk(0, ids)]), plain.step([Chunk(0, ids)]))


@pytest.mark.parametrize(("case", "kv_dtype"), [*((case, "float16") for case in CASES), ("halves", "float32")])
def test_levels_threads_and_chunks_change_no_bit(native, case, kv_dtype):
    ids = tokens(300)
    whole = native_logits(native(case, level=LEVELS[0], n_threads=1, kv_dtype=kv_dtype), ids, [300])
    for level in LEVELS:
        n_threads = 3 if level == LEVELS[-1] else 2
        got = native_logits(native(case, level=level, n_threads=n_threads, kv_dtype=kv_dtype), ids, CHUNKS)
        np.testing.assert_array_equal(got.view(np.uint32), whole.view(np.uint32))


def test_what_lies_past_a_sequence_in_its_pages_does_not_matter(native):
    runner = native("halves", n_slots=1)
    ids = tokens(300)
    fresh = native_logits(runner, ids[:20], [20])
    native_logits(runner, ids, [300])
    np.testing.assert_array_equal(native_logits(runner, ids[:20], [20]), fresh)


def test_a_page_holds_each_row_once(native):
    heads, _, rope, rank, *_ = CASES["released-sizes"]
    assert heads == 2
    assert native("released-sizes", kv_dtype="float16").kv.page_bytes == 16 * (rank + rope) * 2


def test_a_pool_of_bytes_is_refused(native):
    with pytest.raises(ConfigError, match=r"int8.*latent"):
        native("halves", kv_dtype="int8")


def test_weights_that_do_not_fit_are_refused_with_their_names_and_shapes():
    with pytest.raises(
        ShapeError, match=r"latent_attention\(norm.weight, kv_b\).*w \[71, 72\].*w \[heads\*\(nope\+v\), rank\]"
    ):
        layer("halves", kv_b=np.zeros((71, 72), np.float32))
    with pytest.raises(ShapeError, match=r"norm \[70\]"):
        layer("halves", **{"norm.weight": np.zeros(70, np.float32)})
    with pytest.raises(ShapeError, match=r"sigmoid_gate.*widths 64, 63"):
        layer("nope-gated", gate=np.zeros((63, HIDDEN), np.float32))


def test_a_weight_that_is_not_finite_is_refused_by_name():
    program, weights = layer("halves")
    weights["kv_b"][5, 5] = np.nan
    with pytest.raises(ModelFileError, match="kv_b: holds NaN"):
        native_runner(program, float_tensors(weights))


def drafting(case):
    """A model that keeps latent rows for a drafter's layer 7, and the drafter, whose block attends to them."""
    heads, nope, rope, _, v, rotation, _ = CASES[case]
    _, weights = layer(case)

    def begun(name):
        shapes, formats = {n: w.shape for n, w in weights.items()}, dict.fromkeys(weights, Format.F32)
        rec = Recorder(name, shapes, formats, ComputeDtype.AUTO)
        x = rec.embed("embed_tokens")
        frequencies = (0.6 ** np.arange(rope // 2)).astype(np.float32)
        return rec, x, None if rotation is None else rec.rope_table("rope", frequencies, magnitude=1.1)

    more = {"layer": 7, "norm": "norm.weight", "eps": 1e-6, "interleaved": bool(rotation)}
    rec, x, table = begun("model")
    rec.keep_latents(rec.linear(x, "a"), rope=rope, table=table, **more)
    model = rec.finish(rec.linear(rec.select_rows(x), "embed_tokens"))
    rec, x, table = begun("drafter")
    sizes = {"sizes": LatentSizes(heads, nope, rope, v), "weight": "kv_b", "scale": (nope + rope) ** -0.5}
    y = rec.latent_attention(rec.linear(x, "q"), rec.linear(x, "a"), table=table, sees_block=True, **sizes, **more)
    return model, rec.finish(rec.linear(rec.select_rows(y), "head")), weights


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_kept_latents_have_the_bytes_of_an_attentions(native, case, kv_dtype):
    model, _, weights = drafting(case)
    ids, attends = tokens(60), native(case, kv_dtype=kv_dtype)
    for level in LEVELS:
        keeps = native_runner(model, float_tensors(weights), level=level, kv_dtype=kv_dtype)
        try:
            native_logits(attends, ids, [60])
            native_logits(keeps, ids, [1, 20, 39])
            pages = [[bytes(page) for page in runner.read_pages(range(4))] for runner in (attends, keeps)]
            assert pages[0] == pages[1]
            assert any(pages[0][0])
        finally:
            keeps.close()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_drafters_block_attends_whole_to_what_the_model_kept(case, level):
    """Every row to those behind it too, whichever the form, and with the same bits on any threads."""
    model, drafter, weights = drafting(case)
    assert model.kv_layers == drafter.kv_layers
    ids, n, made = tokens(290), 285, []
    for forms in ((model, drafter), (lower_and_fuse(model), lower_and_fuse(drafter))):
        executors = [ReferenceExecutor(form, weights, max_tokens=300) for form in forms]
        executors[0].step([Chunk(0, ids[:n])])
        executors[1].adopt(0, executors[0], n)
        made.append(executors[1].step([Chunk(0, ids[n:])]))
        np.testing.assert_allclose(made[-1], made[0], atol=TOLERANCE["latent_attention"].atol)
    options = {"level": level, "max_len_tokens": 320, "max_step_tokens": 320}
    runners = [
        native_runner(p, float_tensors(weights), n_threads=t, **options)
        for p, t in ((model, 1), (drafter, 1), (drafter, 3))
    ]
    keeps, *blocks = runners
    try:
        native_logits(keeps, ids[:n], [n])
        pages, found = keeps.read_pages(range(18)), []
        for runner in blocks:
            runner.admit(0, ids, len(ids), SamplingParams(temperature=0.0), 0, ())
            runner.set_pages(0, 0, list(range(19)))
            runner.write_pages(range(18), pages)
            runner.submit(one_sequence(0, 0, n, len(ids) - n))
            runner.collect()
            found.append(runner.last_logits(len(ids) - n))
        np.testing.assert_allclose(found[0], made[0], **TOLERANCE["latent_attention"]._asdict())
        assert found[0].tobytes() == found[1].tobytes()
    finally:
        for runner in runners:
            runner.close()


def test_kept_latents_of_wrong_shapes_are_refused():
    shapes = {"e": (8, 24), "n": (16,)}
    rec = Recorder("kept", shapes, dict.fromkeys("en", Format.F32), ComputeDtype.AUTO)
    x = rec.embed("e")
    for wrong in ({"rope": 10}, {"rope": 8, "table": rec.rope_table("r", np.ones(3, np.float32))}):
        with pytest.raises(ShapeError, match=r"keep_latents\(n\): got latents \[T,24\]"):
            rec.keep_latents(x, layer=0, norm="n", eps=1e-6, **wrong)
    with pytest.raises(ShapeError, match=r"latents \[R,24\]"):
        rec.keep_latents(rec.select_rows(x), layer=0, norm="n", rope=8, eps=1e-6)
    rec.keep_latents(x, layer=0, norm="n", rope=8, eps=1e-6)
    with pytest.raises(UnsupportedModel, match="normed in place"):
        lower_and_fuse(rec.finish(rec.select_rows(x)))


def test_latents_that_something_else_reads_are_refused():
    rec = Recorder(
        "twice", {"e": (8, 24), "n": (16,), "w": (32, 16)}, dict.fromkeys("enw", Format.F32), ComputeDtype.AUTO
    )
    x = rec.embed("e")
    sizes = {"sizes": LatentSizes(1, 16, 8, 16), "eps": 1e-6, "scale": 1.0}
    y = rec.latent_attention(x, x, layer=0, norm="n", weight="w", **sizes)
    with pytest.raises(UnsupportedModel, match="normed in place"):
        lower_and_fuse(rec.finish(rec.select_rows(y)))


def test_a_query_that_sees_one_row_gets_its_value():
    rng = np.random.default_rng(1)
    rows = latent_rows(*(rng.standard_normal(s).astype(np.float32) for s in ((1, 12), (8,))), 1e-6, None)
    w = rng.standard_normal((2 * 5, 8)).astype(np.float32)
    y = latent_attention(rng.standard_normal((1, 2, 6)).astype(np.float32), rows, w, start=0, nope=2, scale=1.0)
    np.testing.assert_allclose(y[0], w.reshape(2, 5, 8)[:, 2:] @ rows[0, :8], rtol=1e-5)


def test_a_gate_far_below_zero_closes_and_far_above_opens():
    x = np.array([[3.0, -3.0, 5.0, 6.0]], np.float32)
    np.testing.assert_allclose(sigmoid_gate(x, np.array([[-1e4, 1e4]], np.float32)), [[0.0, 0.0, 5.0, 6.0]])
