"""The ops that drafters are written in, in the core at every level, against their definitions."""

import numpy as np
import pytest

from tiercel import _native
from tiercel.base.errors import ShapeError, UnsupportedModel
from tiercel.ops import reference
from tiercel.ops.dims import Bounds
from tiercel.ops.passes import Passes, lower_and_fuse
from tiercel.ops.program import KvLayer
from tiercel.ops.recorder import ComputeDtype, Recorder
from tiercel.ops.reference import TOLERANCE
from tiercel.ops.reference_draft import block_conv
from tiercel.ops.vocabulary import cost
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import StepPlan
from tiercel.quant.formats import Format
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.testing.native import float_tensors, native_logits, native_runner, one_sequence

LEVELS = _native.kernel_levels()
VOCAB = 64
IDS = np.random.default_rng(3).integers(0, 32, 400).tolist()  # fewer than any program here gives columns for


def recorder(weights, name="draft"):
    formats = dict.fromkeys(weights, Format.F32)
    return Recorder(name, {n: w.shape for n, w in weights.items()}, formats, ComputeDtype.AUTO)


def numbers(seed, *shape, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def same_bits(a, b):
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


# The masked row of an embedding.


@pytest.mark.parametrize("factor", [1.0, 7.35])
@pytest.mark.parametrize("width", [32, 71])
@pytest.mark.parametrize("level", LEVELS)
def test_a_masked_token_is_the_vector_that_stands_for_it(level, width, factor):
    table, masked = numbers(1, VOCAB, width), numbers(2, width)
    packed = _native.PackedMatrix(0, table.view(np.uint8).reshape(VOCAB, -1), width)
    ids = np.array([5, -1, 63, 0, -1, -1, 7], np.int32)
    y = np.empty((7, width), np.float32)
    _native.embed(level, packed, ids, y, factor, 3, masked)
    assert same_bits(y, reference.embed(ids, table, factor, masked))
    assert same_bits(y[1], masked * np.float32(factor))


def test_ids_that_are_no_token_are_refused_with_and_without_a_masked_row():
    table = numbers(1, VOCAB, 32)
    for bad, masked in ((-1, None), (-2, numbers(2, 32)), (VOCAB, numbers(2, 32))):
        with pytest.raises(ShapeError, match=r"ids in .*0\.\.64"):
            reference.embed(np.array([1, bad]), table, 1.0, masked)
    with pytest.raises(ShapeError, match=r"masked \[E\]"):
        reference.embed(np.array([1]), table, 1.0, numbers(2, 31))
    weights = {"e": table, "m": numbers(2, 31)}
    with pytest.raises(ShapeError, match=r"embed.*w \[64, 32\], masked \[31\]"):
        recorder(weights).embed("e", masked="m")


def test_a_recorded_masked_row_is_the_lowered_ones_and_shows_in_the_text_only_where_there_is_one():
    weights = {"e": numbers(1, VOCAB, 32), "m": numbers(2, 32)}
    rec = recorder(weights)
    program = rec.finish(rec.select_rows(rec.embed("e", scale=2.0, masked="m")))
    for form in (program, lower_and_fuse(program)):
        got = ReferenceExecutor(form, weights).step([Chunk(0, [3, -1])])
        assert same_bits(got, 2 * np.stack([weights["e"][3], weights["m"]]))
        assert "masked=m(f32[32])" in form.text()
    rec = recorder(weights)
    program = rec.finish(rec.select_rows(rec.embed("e")))
    assert "masked" not in program.text() + lower_and_fuse(program).text()


# The convolution over a block.

CONVS = {  # width, taps, group, sides
    "published": (576, 2, 16, 2),
    "narrow": (40, 2, 8, 2),
    "odd": (71, 3, 1, 1),
    "uneven": (72, 4, 24, 3),
    "one-tap": (48, 1, 48, 1),
}


def conv_of(case, side=0, identity=False):
    width, taps, group, sides = CONVS[case]
    n = sides * taps * (width // group)
    weights = {"e": numbers(1, VOCAB, width), "p": numbers(2, n, width, scale=width**-0.5)}
    weights["base"] = numbers(3, sides, taps, width)
    if identity:
        weights["p"][:] = 0
        weights["base"][:] = 0
        weights["base"][:, 0] = 1
    if sides == 1:
        weights["base"] = weights["base"][0]
    rec = recorder(weights)
    x = rec.embed("e")
    y = rec.block_conv(x, "base", rec.linear(x, "p"), taps=taps, group=group, side=side)
    return rec.finish(rec.select_rows(y)), weights


def conv_defined(case, side, ids, weights):
    width, taps, group, _ = CONVS[case]
    x = weights["e"][ids]
    n = taps * (width // group)
    delta = (x.astype(np.float64) @ weights["p"].astype(np.float64).T).astype(np.float32)
    base = weights["base"].reshape(-1, taps, width)
    return block_conv(x, base[side], delta[:, side * n : (side + 1) * n], group)


def one_by_one(case, ids, weights):
    """The convolution from its formula, by a loop that shares no code with the definition."""
    width, taps, group, _ = CONVS[case]
    x, base = weights["e"][ids].astype(float), weights["base"].reshape(-1, taps, width)[0]
    delta = x @ weights["p"].T.astype(float)
    y = np.zeros(x.shape)
    for i in range(len(ids)):
        for c in range(width):
            for t in range(taps):
                if i >= t:
                    y[i, c] += (base[t, c] + delta[i, t * (width // group) + c // group]) * x[i - t, c]
    return y


def test_the_definition_of_the_convolution_is_its_formula():
    for case in CONVS:
        program, weights = conv_of(case)
        del program
        np.testing.assert_allclose(
            conv_defined(case, 0, IDS[:5], weights), one_by_one(case, IDS[:5], weights), atol=1e-4
        )


@pytest.mark.parametrize(("case", "side"), [(c, s) for c, v in CONVS.items() for s in range(v[3])])
@pytest.mark.parametrize("level", LEVELS)
def test_each_chunk_is_a_block_of_its_own(level, case, side):
    program, weights = conv_of(case, side)
    runner = native_runner(program, float_tensors(weights), level=level)
    got = native_logits(runner, IDS[:20], [8, 1, 3, 8])
    runner.close()
    blocks = [IDS[0:8], IDS[8:9], IDS[9:12], IDS[12:20]]
    expected = np.concatenate([conv_defined(case, side, ids, weights) for ids in blocks])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)  # the projection's own tolerance
    for form in (program, lower_and_fuse(program)):
        executor = ReferenceExecutor(form, weights)
        by_definition = np.concatenate([executor.step([Chunk(0, ids)]) for ids in blocks])
        np.testing.assert_allclose(by_definition, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CONVS)
def test_an_identity_convolution_leaves_every_bit(case):
    program, weights = conv_of(case, identity=True)
    runner = native_runner(program, float_tensors(weights))
    assert same_bits(native_logits(runner, IDS[:16], [8, 8]), weights["e"][IDS[:16]])
    runner.close()


def steps_of(runner, blocks, *, context=0):
    """The logits of several sequences' blocks in one step, each after `context` tokens of its own."""
    size = runner.limits.page_size_tokens
    per_slot = -(-max(map(len, blocks)) // size)
    for slot, ids in enumerate(blocks):
        runner.admit(slot, ids, len(ids), SamplingParams(temperature=0.0), 0, ())
        runner.set_pages(slot, 0, list(range(slot * per_slot, (slot + 1) * per_slot)))
        if context:
            runner.submit(one_sequence(slot, slot, 0, context))
            runner.collect()
    arrays = (np.arange(len(blocks)), np.full(len(blocks), context), [len(ids) - context for ids in blocks])
    flags = np.zeros(len(blocks), bool)
    plan = StepPlan(99, *(np.array(a, np.int32) for a in arrays), flags, ~flags, n_logprobs=None)
    runner.submit(plan)
    runner.collect()
    return runner.last_logits(sum(arrays[2]))


@pytest.mark.parametrize("level", LEVELS)
def test_a_convolution_has_the_same_bits_beside_other_blocks_on_any_threads(level):
    program, weights = conv_of("published", side=1)
    alone = native_runner(program, float_tensors(weights), level=LEVELS[0], n_threads=1)
    expected = [native_logits(alone, ids, [len(ids)]) for ids in (IDS[:8], IDS[8:11], IDS[11:19])]
    alone.close()
    together = native_runner(program, float_tensors(weights), level=level, n_threads=3)
    assert same_bits(steps_of(together, [IDS[:8], IDS[8:11], IDS[11:19]]), np.concatenate(expected))
    together.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"taps": 3}, r"base \[2, 2, 576\].*taps 3"),
        ({"group": 7}, "group 7"),
        ({"side": 2}, "side 2"),
        ({"taps": 0}, "taps 0"),
    ],
)
def test_wrong_shapes_of_a_convolution_are_refused(change, message):
    _, weights = conv_of("published")
    rec = recorder(weights)
    x = rec.embed("e")
    delta = rec.linear(x, "p")
    with pytest.raises(ShapeError, match=message):
        rec.block_conv(x, "base", delta, **({"taps": 2, "group": 16} | change))
    with pytest.raises(ShapeError, match="rows R"):
        rec.block_conv(rec.select_rows(x), "base", delta, taps=2, group=16)


# Keys and values that are kept for another program, and attention that sees its block.

HEADS = {  # H, K, D, window, softcap, kv_dtype
    "smollm": (9, 3, 64, 0, 0.0, "float16"),
    "window": (4, 1, 24, 37, 0.0, "float32"),
    "capped": (8, 8, 32, 0, 20.0, "float16"),
    "wide": (4, 2, 128, 300, 0.0, "float32"),
    "int8": (9, 3, 64, 0, 0.0, "int8"),
    "int8-window": (4, 1, 24, 40, 20.0, "int8"),
}
WIDTH = 48


def heads_of(case, *, layer=0, norms=True):
    """Weights of one attention, and a function that records its q, k and v."""
    n_heads, n_kv, d, *_ = HEADS[case]
    sizes = {"q": n_heads * d, "k": n_kv * d, "v": n_kv * d}
    weights = {"e": numbers(1, VOCAB, WIDTH)}
    weights |= {name: numbers(i + 2, n, WIDTH, scale=WIDTH**-0.5) for i, (name, n) in enumerate(sizes.items())}
    weights |= {"q_norm": 1 + numbers(7, d, scale=0.1), "k_norm": 1 + numbers(8, d, scale=0.1)}
    weights["o"] = numbers(9, VOCAB, n_heads * d, scale=(n_heads * d) ** -0.5)

    def record(rec, x, parts="qkv"):
        table = rec.rope_table("rope", (10000.0 ** (-np.arange(0, d, 2) / d)).astype(np.float32))
        made = []
        for part in parts:
            y = rec.linear(x, part)
            heads = n_heads if part == "q" else n_kv
            if part != "v":
                y = rec.rms_norm(y, f"{part}_norm", 1e-6, heads=heads) if norms else y
                y = rec.rope(y, table, heads=heads)
            made.append(y)
        return made

    return weights, record


def attention_of(case, *, sees_block=True, layer=0):
    n_heads, n_kv, d, window, softcap, _ = HEADS[case]
    weights, record = heads_of(case)
    rec = recorder(weights)
    q, k, v = record(rec, rec.embed("e"))
    sizes = {"layer": layer, "heads": n_heads, "kv_heads": n_kv, "head_dim": d}
    y = rec.attention(q, (k, v), **sizes, scale=d**-0.5, window=window, softcap=softcap, sees_block=sees_block)
    return rec.finish(rec.linear(rec.select_rows(y), "o")), weights


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("level", LEVELS)
def test_each_row_of_a_block_sees_the_block_and_all_before_it(level, case):
    program, weights = attention_of(case)
    kv_dtype = HEADS[case][5]
    runner = native_runner(
        program, float_tensors(weights), level=level, kv_dtype=kv_dtype, max_len_tokens=400, max_step_tokens=400
    )
    chunks = [7, 250, 8, 1, 20, 5]
    got = native_logits(runner, IDS[: sum(chunks)], chunks)
    runner.close()
    executor = ReferenceExecutor(program, weights, kv_dtype=kv_dtype)
    start, expected = 0, []
    for n in chunks:
        expected.append(executor.step([Chunk(0, IDS[start : start + n])]))
        start += n
    tolerance = TOLERANCE["attention_int8" if kv_dtype == "int8" else "attention"]
    atol = 2e-3 if kv_dtype == "float16" else 10 * tolerance.atol  # a key may round to the next half
    np.testing.assert_allclose(got, np.concatenate(expected), rtol=10 * tolerance.rtol, atol=atol)


def test_the_definition_of_attention_that_sees_its_block_is_a_softmax_over_all_keys():
    q, k, v = numbers(1, 5, 4, 8), numbers(2, 20, 2, 8), numbers(3, 20, 2, 8)
    got = reference.attention(q, k, v, start=11, scale=0.3, window=9, sees_block=True)
    for t in range(5):
        for h in range(4):
            scores = 0.3 * k[7:16, h // 2].astype(float) @ q[t, h]
            weights = np.exp(scores - scores.max())
            np.testing.assert_allclose(got[t, h], weights @ v[7:16, h // 2] / weights.sum(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", HEADS)
def test_the_last_row_of_a_block_has_the_bits_of_causal_attention(case):
    kv_dtype = HEADS[case][5]
    rows = []
    for sees_block in (True, False):
        program, weights = attention_of(case, sees_block=sees_block)
        runner = native_runner(
            program, float_tensors(weights), kv_dtype=kv_dtype, max_len_tokens=400, max_step_tokens=400
        )
        rows.append(native_logits(runner, IDS[:308], [300, 8]))
        runner.close()
    assert same_bits(rows[0][299], rows[1][299])
    assert same_bits(rows[0][307], rows[1][307])
    assert not np.allclose(rows[0][300:307], rows[1][300:307], atol=1e-3)


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_block_has_the_same_bits_beside_others_on_any_threads_and_by_any_passes(level, case):
    program, weights = attention_of(case)
    options = {"kv_dtype": HEADS[case][5], "max_len_tokens": 400, "max_step_tokens": 400}
    blocks = [IDS[:300], IDS[40:345], IDS[50:351]]
    alone = native_runner(program, float_tensors(weights), level=LEVELS[0], n_threads=1, **options)
    expected = [native_logits(alone, ids, [293, len(ids) - 293])[293:] for ids in blocks]
    alone.close()
    for n_threads, passes in ((1, None), (3, Passes.none())):
        together = native_runner(
            program,
            float_tensors(weights),
            level=level,
            n_threads=n_threads,
            passes=passes,
            **options,
        )
        assert same_bits(steps_of(together, blocks, context=293), np.concatenate(expected))
        together.close()


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("level", LEVELS)
def test_kept_keys_and_values_have_the_bytes_of_an_attentions(level, case, norms):
    n_heads, n_kv, d, *_, kv_dtype = HEADS[case]
    weights, record = heads_of(case, norms=norms)
    pages = []
    for keeps in (True, False):
        rec = recorder(weights)
        x = rec.embed("e")
        if keeps:
            rec.keep_kv(*record(rec, x, "kv"), layer=0, kv_heads=n_kv, head_dim=d)
        else:
            q, k, v = record(rec, x)
            sizes = {"layer": 0, "heads": n_heads, "kv_heads": n_kv, "head_dim": d}
            rec.attention(q, (k, v), **sizes, scale=1.0)
        program = rec.finish(rec.select_rows(x))
        runner = native_runner(program, float_tensors(weights), level=level, kv_dtype=kv_dtype)
        native_logits(runner, IDS[:40], [33, 1, 6])
        pages.append([bytes(page) for page in runner.read_pages(range(3))])
        runner.close()
    assert pages[0] == pages[1]
    assert any(any(page) for page in pages[0])


def drafting_of(case):
    """A model that keeps keys and values for a drafter's layer 7, and the drafter, whose block attends to them."""
    n_heads, n_kv, d, _, softcap, _ = HEADS[case]
    weights, record = heads_of(case)
    weights["m"] = numbers(11, WIDTH)
    rec = recorder(weights, "model")
    x = rec.embed("e")
    q, k, v = record(rec, x)
    sizes = {"heads": n_heads, "kv_heads": n_kv, "head_dim": d}
    y = rec.attention(q, (k, v), layer=2, **sizes, scale=d**-0.5)
    rec.keep_kv(*record(rec, x, "kv"), layer=7, kv_heads=n_kv, head_dim=d)
    model = rec.finish(rec.linear(rec.select_rows(y), "o"))
    rec = recorder(weights, "drafter")
    q, k, v = record(rec, rec.embed("e", masked="m"))
    limits = {"window": 0, "softcap": softcap}
    y = rec.attention(q, (k, v), layer=7, **sizes, scale=d**-0.5, **limits, sees_block=True)
    return model, rec.finish(rec.linear(rec.select_rows(y), "o")), weights


def test_a_drafters_block_attends_to_what_the_model_kept():
    model, drafter, weights = drafting_of("window")
    assert [layer.index for layer in model.kv_layers] == [2, 7]
    assert drafter.kv_layers == (KvLayer(7, 1, 24, 0),)
    block = [IDS[30], -1, -1, -1]
    table = np.concatenate([weights["e"][IDS[:30]], weights["e"][IDS[30:31]], np.tile(weights["m"], (3, 1))])
    angles = np.arange(34)[:, None] * (10000.0 ** (-np.arange(0, 24, 2) / 24))[None, :]

    def heads(name, n):
        x = (table @ weights[name].T).reshape(34, n, 24).astype(float)
        if name != "v":
            x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * weights[f"{name}_norm"]
            a, b = x[..., :12], x[..., 12:]
            cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
            x = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        return x

    q, k, v = heads("q", 4), heads("k", 1), heads("v", 1)
    scores = np.einsum("thd,kd->thk", q[30:], k[:, 0]) * 24**-0.5
    p = np.exp(scores - scores.max(-1, keepdims=True))
    y = np.einsum("thk,kd->thd", p / p.sum(-1, keepdims=True), v[:, 0]).reshape(4, -1)
    for forms in ((model, drafter), (lower_and_fuse(model), lower_and_fuse(drafter))):
        executors = [ReferenceExecutor(form, weights) for form in forms]
        executors[0].step([Chunk(0, IDS[:20]), Chunk(1, IDS[:3])])
        executors[0].step([Chunk(0, IDS[20:34])])
        executors[1].adopt(0, executors[0], 30)
        got = executors[1].step([Chunk(0, block)])
        np.testing.assert_allclose(got, y @ weights["o"].T, rtol=1e-3, atol=1e-4)


def test_layers_of_one_program_are_kept_once():
    weights, record = heads_of("smollm")
    rec = recorder(weights)
    x = rec.embed("e")
    for _ in range(2):
        rec.keep_kv(*record(rec, x, "kv"), layer=3, kv_heads=3, head_dim=64)
    with pytest.raises(ShapeError, match=r"attention of layers \[3, 3\]"):
        rec.finish(rec.select_rows(x))


def test_keys_and_values_of_wrong_shapes_are_refused():
    weights, record = heads_of("smollm")
    rec = recorder(weights)
    x = rec.embed("e")
    k, v = record(rec, x, "kv")
    with pytest.raises(ShapeError, match=r"keep_kv.*widths 192 and 192, kv_heads 3, head_dim 32"):
        rec.keep_kv(k, v, layer=0, kv_heads=3, head_dim=32)
    with pytest.raises(ShapeError, match="rows R"):
        rec.keep_kv(rec.select_rows(k), v, layer=0, kv_heads=3, head_dim=64)


def test_kept_values_that_are_rotated_have_no_native_form():
    weights, record = heads_of("smollm")
    rec = recorder(weights)
    x = rec.embed("e")
    k, other = record(rec, x, "kq")
    rec.keep_kv(k, rec.linear(x, "v"), layer=0, kv_heads=3, head_dim=64)
    del other
    rec = recorder(weights)
    x = rec.embed("e")
    k, _ = record(rec, x, "kv")
    rec.keep_kv(k, rec.rms_norm(rec.linear(x, "v"), "k_norm", 1e-6, heads=3), layer=0, kv_heads=3, head_dim=64)
    with pytest.raises(UnsupportedModel, match="v have neither norm nor rotation"):
        lower_and_fuse(rec.finish(rec.select_rows(x)))


# A number times a row.


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_times_a_number_is_that_product(level):
    weights = {"e": numbers(1, VOCAB, 71)}
    rec = recorder(weights)
    program = rec.finish(rec.scale(rec.select_rows(rec.embed("e")), 0.3))
    runner = native_runner(program, float_tensors(weights), level=level, n_threads=3)
    got = native_logits(runner, IDS[:9], [9])
    runner.close()
    assert same_bits(got, weights["e"][IDS[:9]] * np.float32(0.3))
    for form in (program, lower_and_fuse(program)):
        assert same_bits(ReferenceExecutor(form, weights).step([Chunk(0, IDS[:9])]), got)
    with pytest.raises(ShapeError, match="factor nan; a finite one"):
        rec.scale(rec.embed("e"), float("nan"))


def test_a_row_that_is_read_again_is_not_scaled_in_place():
    rec = recorder({"e": numbers(1, VOCAB, 32)})
    x = rec.select_rows(rec.embed("e"))
    y = rec.add(rec.scale(x, 2.0), x)
    with pytest.raises(UnsupportedModel, match="to be scaled in place"):
        lower_and_fuse(rec.finish(y))


def test_every_op_of_a_drafter_has_a_cost_that_grows_with_its_rows():
    for program in (conv_of("published")[0], *drafting_of("smollm")[:2]):
        for op in program.ops:
            few, many = (cost(op, Bounds(n, 1, n, 100)) for n in (1, 8))
            assert many.nbytes >= few.nbytes >= 0
            assert cost(op, Bounds(0, 0, 0)) == (0, 0)
    conv = next(op for op in conv_of("published")[0].ops if op.op == "block_conv")
    assert cost(conv, Bounds(8, 1, 8)).flops == 8 * 3 * 2 * 576
