import pytest

from tiercel.base.errors import ModelFileError, ShapeError, UnsupportedModel
from tiercel.ops.dims import Bounds, Dim
from tiercel.ops.lower import lower
from tiercel.ops.program import Program
from tiercel.ops.recorder import ComputeDtype, ExpertNames, LatentSizes, Recorder
from tiercel.ops.routing import Routing
from tiercel.ops.vocabulary import VOCABULARY, cost
from tiercel.quant.formats import Format

SHAPES = {
    "table": (16, 64),
    "square": (64, 64),
    "narrow": (32, 64),
    "head": (16, 64),
    "norm": (64,),
    "head_norm": (16,),
    "bias": (64,),
    **{f"{name}.{e}": (96, 64) for name in ("gate", "up") for e in range(16)},
    **{f"down.{e}": (64, 96) for e in range(16)},
    "filters": (64, 1, 4),
    "one": (1, 64),
    "of_one": (1,),
    "of_half": (32,),
    "wide": (64, 32),
    "latent_q": (48, 64),
    "latents": (24, 64),
    "latent_kv": (64, 16),
    "joined": (64, 96),
    "taps": (1, 2, 64),
}
FORMATS = {name: Format.Q4_1 if len(shape) == 2 else Format.F32 for name, shape in SHAPES.items()}
FORMATS["latent_kv"] = Format.F32  # rows of 16 columns are no whole groups


def recorder(compute_dtype=ComputeDtype.AUTO):
    return Recorder("tiny", SHAPES, FORMATS, compute_dtype)


def tiny():
    rec = recorder()
    x = rec.embed("table")
    table = rec.rope_table("r", [1.0, 0.5])
    h = rec.rms_norm(x, "norm", 1e-5)
    q, k, v = rec.linear(h, "square"), rec.linear(h, "narrow"), rec.linear(h, "narrow")
    q, k = rec.rope(q, table, heads=4), rec.rope(k, table, heads=2)
    y = rec.attention(q, (k, v), layer=0, heads=4, kv_heads=2, head_dim=16, scale=0.25)
    x = rec.add(x, rec.linear(y, "square", bias="bias"))
    return rec, x


def mixture(rec, x, *, top_k=3, n_experts=16, act="silu", params=(), names=("gate.{}", "up.{}", "down.{}")):
    route = rec.router(rec.linear(x, "head"), Routing(n_experts=16, top_k=top_k))
    return rec.experts(x, route, ExpertNames(*names), act, params, n_experts=n_experts)


def test_text_has_one_line_an_op_and_is_stable():
    rec, x = tiny()
    program = rec.finish(rec.linear(rec.select_rows(x), "head"))
    lines = program.text().splitlines()
    assert lines[0] == "program tiny"
    assert lines[1] == "kv 0: K=2 D=16"
    assert lines[2] == "const r(f32[2]) = 1 0.5"
    assert lines[3] == "%0 = embed scale=1 w=table(q4_1[16,64]) : f32[T,64]"
    assert lines[12] == "%9 = linear %8 act=q8 w=square(q4_1[64,64]) bias=bias(f32[64]) : f32[T,64]"
    assert lines[-1] == f"return %{len(program.ops) - 1}"
    assert len(lines) == 4 + len(program.ops)


def test_rows_follow_select_rows():
    rec, x = tiny()
    assert x.rows is Dim.TOKENS
    assert rec.select_rows(x).rows is Dim.ROWS


def attend(rec, q, k, v):
    return rec.attention(q, (k, v), layer=0, heads=4, kv_heads=2, head_dim=16, scale=0.25)


def test_attention_of_selected_queries_keeps_the_keys_of_all_rows():
    rec = recorder()
    x = rec.embed("table")
    q, k, v = rec.linear(x, "square"), rec.linear(x, "narrow"), rec.linear(x, "narrow")
    y = attend(rec, rec.select_rows(q), k, v)
    program = rec.finish(rec.linear(y, "head"))
    assert y.rows is Dim.ROWS
    bounds = Bounds(8, 2, 1, context_tokens=100)
    assert cost(program.ops[-2], bounds).flops == 4 * 100 * 64
    lines = [line.split(" : ")[-1] for line in lower(program).text().splitlines()]
    assert lines[-6:-1] == ["f32[T,128]", "f32[R,64]", "f32[R,64]", "q8[R,64]", "f32[R,16]"]


def test_keys_of_selected_rows_are_refused():
    rec = recorder()
    x = rec.embed("table")
    q, k, v = rec.linear(x, "square"), rec.linear(x, "narrow"), rec.linear(x, "narrow")
    with pytest.raises(ShapeError, match=r"k and v of rows T, q of rows T or R"):
        attend(rec, q, rec.select_rows(k), v)


@pytest.mark.parametrize(
    ("compute_dtype", "weight", "act"),
    [("auto", "square", "q8"), ("float32", "square", "f32"), ("auto", "plain", "f32")],
)
def test_activations_are_rounded_for_quantised_weights_unless_computing_in_float32(compute_dtype, weight, act):
    rec = Recorder("t", SHAPES | {"plain": (8, 64)}, FORMATS | {"plain": Format.F16}, ComputeDtype(compute_dtype))
    rec.finish(rec.linear(rec.embed("table"), weight))
    assert rec.finish(rec.linear(rec.embed("table"), weight)).ops[-1].word("act") == act


def test_a_weight_that_the_checkpoint_lacks_is_named():
    with pytest.raises(ModelFileError, match=r"tensor nothing is missing .* tiny needs it"):
        recorder().embed("nothing")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda rec, x: rec.linear(x, "norm"), r"ops\.linear\(norm\): got x width 64, w \[64\]"),
        (lambda rec, x: rec.linear(x, "square", bias="head_norm"), r"bias \[16\]"),
        (lambda rec, x: rec.rms_norm(x, "head_norm", 1e-5), r"ops\.rms_norm\(head_norm\)"),
        (lambda rec, x: rec.rms_norm(x, "norm", 0.0), r"eps > 0 is needed"),
        (lambda rec, x: rec.rope(x, rec.rope_table("r", [1.0] * 9), heads=4), r"ops\.rope: .* table width 18"),
        (lambda rec, x: rec.gated(x, x, "relu"), r"one of silu, gelu_tanh"),
        (lambda rec, x: rec.add(x, rec.linear(x, "narrow")), r"ops\.add: got widths 64, 32"),
        (lambda rec, x: rec.add(x, rec.select_rows(x)), r"ops\.add"),
        (lambda rec, x: rec.select_rows(rec.select_rows(x)), r"ops\.select_rows: got rows R"),
        (lambda rec, x: rec.softcap(x, -1.0), r"cap > 0"),
        (
            lambda rec, x: rec.attention(x, (x, x), layer=0, heads=4, kv_heads=3, head_dim=16, scale=1.0),
            r"ops\.attention: got q, k, v widths 64, 64, 64, heads 4, kv_heads 3",
        ),
    ],
)
def test_an_op_that_breaks_its_contract_cannot_be_recorded(record, message):
    rec = recorder()
    with pytest.raises(ShapeError, match=message):
        record(rec, rec.embed("table"))


def test_a_program_without_its_output_is_refused():
    rec, x = tiny()
    program = rec.finish(rec.select_rows(x))
    with pytest.raises(ShapeError, match="no op writes the output"):
        Program("t", program.ops[:-1], program.output, program.kv_layers).check()


def test_two_attentions_cannot_share_a_layer():
    rec, x = tiny()
    q, k, v = rec.linear(x, "square"), rec.linear(x, "narrow"), rec.linear(x, "narrow")
    rec.attention(q, (k, v), layer=0, heads=4, kv_heads=2, head_dim=16, scale=0.25)
    with pytest.raises(ShapeError, match=r"attention of layers \[0, 0\]"):
        rec.finish(rec.select_rows(x))


def test_every_op_has_a_tolerance_and_a_cost():
    rec, x = tiny()
    x = rec.add(x, rec.embed_rows("table", "position"))
    x = rec.activate(rec.layer_norm(x, "bias", "bias", 1e-5), "gelu")
    q, k, v = (rec.linear(x, "square") for _ in range(3))
    x = rec.add(x, rec.sequence_attention(q, k, v, heads=4, kv_heads=4, head_dim=16, scale=0.25))
    q, latents = rec.linear(x, "latent_q"), rec.linear(x, "latents")
    sizes = LatentSizes(heads=2, nope=16, rope=8, v_dim=16)
    y = rec.latent_attention(
        q, latents, layer=2, norm="head_norm", weight="latent_kv", sizes=sizes, eps=1e-6, scale=0.2
    )
    x = rec.add(x, rec.linear(rec.sigmoid_gate(y, rec.linear(x, "narrow")), "wide"))
    gated = rec.gated(rec.linear(x, "square"), rec.linear(x, "square"), "silu")
    mixed = rec.short_conv([rec.linear(x, "square")], ["filters"], layer=1, act="silu")
    gates = (rec.linear(x, "one"), rec.linear(x, "one"))
    sizes = {"key": (1, 16), "value": (1, 32)}
    y = rec.delta_rule(mixed, *gates, a_log="of_one", dt_bias="of_one", layer=1, **sizes)
    y = rec.gated_norm(y, rec.linear(x, "narrow"), None, heads=1, act="silu")
    x = rec.linear(y, "wide")
    scanned, step = rec.linear(x, "square"), rec.linear(x, "one")
    y = rec.ssd(scanned, step, weights=("of_one",) * 3, layer=3, heads=(1, 32), groups=(1, 16))
    x = rec.linear(rec.gate_norm(y, rec.linear(x, "narrow"), "of_half", groups=2, eps=1e-5), "wide")
    mixed = mixture(rec, rec.add(x, gated))
    mixed = rec.linear(rec.join(rec.residual_mix([mixed, x], "bias", "bias", 1e-5), rec.given(32)), "joined")
    rec.keep_kv(rec.linear(mixed, "narrow"), rec.linear(mixed, "narrow"), layer=5, kv_heads=2, head_dim=16)
    rec.keep_latents(rec.linear(mixed, "latents"), layer=6, norm="head_norm", rope=8, eps=1e-6)
    mixed = rec.scale(rec.block_conv(mixed, "taps", rec.linear(mixed, "narrow"), taps=2, group=4), 2.0)
    program = rec.finish(rec.softcap(rec.linear(rec.select_rows(mixed), "head"), 30.0))
    assert {op.op for op in program.ops} == set(VOCABULARY)
    bounds = Bounds(8, 2, 2, context_tokens=100)
    for op in program.ops:
        assert cost(op, bounds).nbytes > 0
        assert cost(op, Bounds(0, 0, 0)).nbytes == 0
        assert VOCABULARY[op.op].tolerance.rtol >= 0.0


def test_cost_of_a_linear_counts_a_weight_once():
    rec = recorder()
    program = rec.finish(rec.linear(rec.embed("table"), "square"))
    one, many = (cost(program.ops[-1], Bounds(n, 1, 1)) for n in (1, 11))
    assert one.flops * 11 == many.flops == 2 * 11 * 64 * 64
    assert many.nbytes - one.nbytes == 10 * 4 * (64 + 64)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (lambda rec, x: rec.rope(x, rec.rope_table("r", [1.0]), heads=1), "no part of an attention"),
        (lambda rec, x: rec.rms_norm(x, "head_norm", 1e-5, heads=4), "no part of an attention"),
        (lambda rec, x: rec.gated(x, x, "silu"), "from a linear of its own"),
        (lambda rec, x: rec.add(x, x), "must not be read again"),
        (lambda rec, x: rec.add(rec.softcap(x, 3.0), x), "must not be read again"),
    ],
)
def test_what_has_no_native_form_is_refused_by_name(record, why):
    rec = recorder()
    y = record(rec, rec.embed("table"))
    program = rec.finish(rec.select_rows(y))
    with pytest.raises(UnsupportedModel, match=f"^ops.lower: tiny: %.* has no native form: .*{why}"):
        lower(program)


def test_a_rotation_that_q_and_k_do_not_share_is_refused():
    rec = recorder()
    x = rec.embed("table")
    q, k, v = rec.linear(x, "square"), rec.linear(x, "narrow"), rec.linear(x, "narrow")
    q = rec.rope(q, rec.rope_table("r", [1.0]), heads=4)
    y = rec.attention(q, (k, v), layer=0, heads=4, kv_heads=2, head_dim=16, scale=0.25)
    with pytest.raises(UnsupportedModel, match="share one rotation"):
        lower(rec.finish(rec.select_rows(y)))


def test_bounds_that_make_no_sense_are_refused():
    with pytest.raises(ShapeError, match="R <= T"):
        Bounds(1, 1, 2)


def test_a_programs_weights_list_each_expert_and_its_text_lists_them_once():
    rec = recorder()
    program = rec.finish(mixture(rec, rec.embed("table")))
    assert {w.name for w in program.weights()} >= {f"{name}.{e}" for name in ("gate", "up", "down") for e in range(16)}
    assert program.weights() == lower(without_output_rule(program)).weights()
    line = program.text().splitlines()[-2]
    assert line == (
        "%3 = experts %0 %2 act=silu x=q8 hidden=q8 gate=gate.{}(q4_1[16x96,64]) up=up.{}(q4_1[16x96,64]) "
        "down=down.{}(q4_1[16x64,96]) : f32[T,64]"
    )


def without_output_rule(program):
    """The same program ending in rows that need logits, as a lowered one must."""
    rec = recorder()
    return rec.finish(rec.select_rows(mixture(rec, rec.embed("table"))))


def test_cost_of_experts_counts_those_that_rows_can_choose():
    rec = recorder()
    program = rec.finish(mixture(rec, rec.embed("table")))
    one, two, many = (cost(program.ops[-1], Bounds(n, 1, 1)) for n in (1, 2, 50))
    each = 3 * Format.Q4_1.nbytes(96 * 64)
    row = 4 * (64 + 64 + 2 * 3)
    assert one == (2 * 3 * 3 * 96 * 64, 3 * each + row)
    assert two == (2 * one.flops, 6 * each + 2 * row)
    assert many == (50 * one.flops, 16 * each + 50 * row)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top_k": 17}, ShapeError, "top_k 17 of 16 experts"),
        ({"n_experts": 17}, ModelFileError, r"gate\.16 is missing"),
        ({"names": ("gate.{}", "down.{}", "up.{}")}, ShapeError, r"gate and up \[F, width of x\]"),
        ({"names": ("gate.{}", "up.{}", "square")}, ShapeError, r"down square\(q4_1\[16x64,64\]\)"),
        ({"act": "relu"}, ShapeError, "act 'relu'"),
        ({"act": "situ", "params": (4.0,)}, ShapeError, "1 parameters of situ; beta, linear_beta"),
        ({"act": "situ", "params": (0.0, 0.0)}, ShapeError, "situ with beta 0.0"),
        ({"act": "swiglu_clamp", "params": (1.7, float("inf"))}, ShapeError, "swiglu_clamp with limit inf"),
    ],
)
def test_experts_that_do_not_fit_are_refused(options, error, message):
    rec = recorder()
    with pytest.raises(error, match=message):
        mixture(rec, rec.embed("table"), **options)


def test_experts_of_unlike_formats_or_shapes_are_refused_by_name():
    for changes, message in (
        ({"up.3": Format.Q8_0}, r"tensor up\.3\(q8_0\[96,64\]\) is unlike up\.0\(q4_1"),
        ({f"up.{e}": Format.F16 for e in range(16)}, r"are read together; formats both quantised or both float"),
    ):
        rec = Recorder("tiny", SHAPES, FORMATS | changes, ComputeDtype.AUTO)
        with pytest.raises((ModelFileError, UnsupportedModel), match=message):
            mixture(rec, rec.embed("table"))
    rec = Recorder("tiny", SHAPES | {"down.9": (64, 64)}, FORMATS, ComputeDtype.AUTO)
    with pytest.raises(ModelFileError, match=r"down\.9\(q4_1\[64,64\]\) is unlike down\.0"):
        mixture(rec, rec.embed("table"))


def test_experts_need_a_routers_route():
    rec = recorder()
    x = rec.embed("table")
    logits = rec.select_rows(rec.experts(x, x, ExpertNames("gate.{}", "up.{}", "down.{}"), "silu", n_experts=16))
    with pytest.raises(UnsupportedModel, match="a router's result for the same rows"):
        lower(rec.finish(logits))
