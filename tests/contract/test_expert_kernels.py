"""The router and the experts against their definitions, in every format at every level, and bit for bit."""

import numpy as np
import pytest

from tiercel import _native
from tiercel.ops import reference, reference_moe
from tiercel.ops.reference import TOLERANCE
from tiercel.ops.reference_moe import Experts
from tiercel.ops.routing import Routing
from tiercel.quant.dequantize import dequantize
from tiercel.quant.formats import Format
from tiercel.quant.quantize import quantize

LEVELS = _native.kernel_levels()
FORMATS = list(Format)
ROUTINGS = {
    "softmax": Routing(n_experts=40, top_k=8),
    "softmax-as-it-is": Routing(n_experts=7, top_k=2, renormalises=False),
    "one-expert": Routing(n_experts=1, top_k=1),
    "all": Routing(n_experts=5, top_k=5, renormalises=False),
    "sigmoid": Routing(n_experts=130, top_k=16, scores="sigmoid", scale=2.446),
    "groups-by-two": Routing(
        n_experts=64, top_k=6, scores="sigmoid", n_groups=8, n_groups_kept=3, group_top=2, scale=2.5
    ),
    "groups-by-one": Routing(n_experts=24, top_k=4, n_groups=4, n_groups_kept=2, renormalises=False),
}

every_level = pytest.mark.parametrize("level", LEVELS)
every_routing = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)


def seeded(*shape, seed=1, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def route(level, logits, routing, bias=None, n_threads=2):
    y = np.zeros((len(logits), 2 * routing.top_k), np.float32)
    choice = {name: getattr(routing, name) for name in routing.__struct_fields__ if name != "n_experts"}
    _native.router(level, n_threads, logits, bias=bias, y=y, **choice)
    return y


@every_level
@every_routing
@pytest.mark.parametrize("has_bias", [False, True])
def test_router_agrees_with_its_definition(level, routing, has_bias):
    logits = seeded(33, routing.n_experts, seed=2, scale=1.5)
    bias = seeded(routing.n_experts, seed=3, scale=0.2) if has_bias else None
    got, expected = route(level, logits, routing, bias), reference_moe.router(logits, routing, bias)
    k = routing.top_k
    np.testing.assert_array_equal(got[:, :k], expected[:, :k])
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE["router"].rtol, atol=TOLERANCE["router"].atol)
    assert np.all(np.diff(got[:, :k]) > 0)


@every_routing
def test_router_bits_do_not_depend_on_level_rows_or_threads(routing):
    logits = seeded(21, routing.n_experts, seed=4, scale=3.0)
    expected = route("scalar", logits, routing, n_threads=1)
    for level in LEVELS:
        for n_rows in (0, 1, 2, 21):
            for n_threads in (1, 3):
                got = route(level, logits[:n_rows], routing, n_threads=n_threads)
                assert got.tobytes() == expected[:n_rows].tobytes()


@every_level
@every_routing
def test_of_equal_scores_the_lower_number_wins(level, routing):
    logits = np.zeros((2, routing.n_experts), np.float32)
    logits[1] = np.round(seeded(routing.n_experts, seed=5))  # few values: many ties
    got, expected = route(level, logits, routing), reference_moe.router(logits, routing)
    np.testing.assert_array_equal(got[:, : routing.top_k], expected[:, : routing.top_k])
    assert got[0, : routing.top_k].tolist() == list(range(routing.top_k))


@every_level
@every_routing
def test_a_nan_logit_makes_its_row_nan_and_no_other(level, routing):
    logits = seeded(4, routing.n_experts, seed=6)
    clean = route(level, logits, routing)
    logits[2, routing.n_experts // 2] = np.nan
    got, expected = route(level, logits, routing), reference_moe.router(logits, routing)
    np.testing.assert_array_equal(got[2], expected[2])
    assert got[2, : routing.top_k].tolist() == list(range(routing.top_k))
    assert np.isnan(got[2, routing.top_k :]).all()
    assert np.delete(got, 2, 0).tobytes() == np.delete(clean, 2, 0).tobytes()


def test_logits_far_apart_give_finite_weights():
    routing = Routing(n_experts=4, top_k=2)
    logits = np.array([[3e38, -3e38, 0.0, 1.0], [-np.inf, 0.0, 0.0, -np.inf]], np.float32)
    for level in LEVELS:
        got = route(level, logits, routing)
        assert got.tolist() == [[0.0, 1.0, 1.0, 0.0], [1.0, 2.0, 0.5, 0.5]]
    sigmoid = Routing(n_experts=4, top_k=2, scores="sigmoid")
    got = route("scalar", np.full((1, 4), -200.0, np.float32), sigmoid)
    assert got.tolist() == [[0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_experts": 8, "top_k": 9}, "top_k 9 of 8 experts"),
        ({"n_experts": 8, "top_k": 0}, "a count below 1"),
        ({"n_experts": 8, "top_k": 1, "n_groups": 3}, "1 of 3 groups of 8 experts"),
        ({"n_experts": 8, "top_k": 5, "n_groups": 2}, "top_k 5 of 4 experts in the kept groups"),
        ({"n_experts": 8, "top_k": 1, "n_groups": 8, "group_top": 2}, "group_top 2 of groups of 1"),
        ({"n_experts": 8, "top_k": 1, "scores": "tanh"}, "scores 'tanh'"),
        ({"n_experts": 8, "top_k": 1, "scale": 0.0}, "scale 0.0"),
    ],
)
def test_a_routing_that_makes_no_sense_is_told(fields, message):
    assert Routing(**fields).broken().startswith(message)


class Mixture:
    """Experts in a format, as packed matrices and as values."""

    def __init__(self, fmt, n_experts, k, f, width, *, has_biases=False, down=None):
        self.fmt, self.down_fmt = fmt, down or fmt
        shapes = {"gate": (f, k, fmt), "up": (f, k, fmt), "down": (width, f, self.down_fmt)}
        self.packed, values = {}, {}
        for i, (name, (n, columns, kind)) in enumerate(shapes.items()):
            rows = [self._rows(kind, n, columns, seed=10 * e + i) for e in range(n_experts)]
            self.packed[name] = [_native.PackedMatrix(FORMATS.index(kind), r, columns) for r in rows]
            values[name] = np.stack([dequantize(r, kind, (n, columns)) for r in rows])
            values[f"{name}_bias"] = seeded(n_experts, n, seed=70 + i, scale=0.3) if has_biases else None
        self.values = Experts(**values)

    @staticmethod
    def _rows(fmt, n, k, seed):
        w = seeded(n, k, seed=seed, scale=k**-0.5)
        if fmt is Format.F32:
            return w.view(np.uint8)
        if fmt is Format.F16:
            return w.astype(np.float16).view(np.uint8)
        if fmt is Format.BF16:
            return np.ascontiguousarray(w.view(np.uint16)[:, 1::2]).view(np.uint8)
        if fmt in (Format.Q4_0, Format.Q8_0):
            return quantize(w, fmt)
        groups = np.random.default_rng(seed).integers(0, 256, (n * k // fmt.group, fmt.group_bytes), np.uint8)
        if fmt is Format.MXFP4:
            groups[:, 0] = np.random.default_rng(seed + 1).integers(120, 124, len(groups))
            return groups.reshape(n, fmt.nbytes(k))
        if fmt is Format.NVFP4:
            scale = np.random.default_rng(seed + 1).uniform(-0.03, 0.03, (len(groups), 2))
            groups[:, :8] = scale.astype(np.float32).view(np.uint8)
            return groups.reshape(n, fmt.nbytes(k))
        for at in {Format.Q6_K: [208]}.get(fmt, [0, 2] if fmt is not Format.Q5_0 else [0]):
            scale = np.random.default_rng(seed + 1).uniform(-0.002, 0.002, (len(groups), 1))
            groups[:, at : at + 2] = scale.astype(np.float16).view(np.uint8)
        return groups.reshape(n, fmt.nbytes(k))

    def run(self, level, x, routes, *, act="silu", params=(), n_threads=2, rows_at_once=64):
        v = self.values
        y = np.full((len(x), v.down.shape[1]), 7.0, np.float32)
        p0, p1 = (*params, 0.0, 0.0)[:2]
        biases = [v.gate_bias, v.up_bias, v.down_bias]
        given = {"act": act, "p0": p0, "p1": p1, "rows_at_once": rows_at_once, "biases": biases}
        _native.experts(level, n_threads, x, routes, *self.packed.values(), y=y, **given)
        return y

    def expected(self, x, routes, act="silu", params=()):
        rounds = {"rounds_x": self.fmt.is_quantized, "rounds_hidden": self.down_fmt.is_quantized}
        return reference_moe.experts(x, routes, self.values, act, params, **rounds)


def routes_of(n_rows, n_experts, top_k, seed=20):
    routing = Routing(n_experts=n_experts, top_k=top_k)
    return reference_moe.router(seeded(n_rows, n_experts, seed=seed), routing)


def width(fmt):
    return 256 if fmt.group == 256 else 96 if fmt.group == 32 else 53


@every_level
@pytest.mark.parametrize("fmt", FORMATS, ids=[f.value for f in FORMATS])
@pytest.mark.parametrize("n_rows", [0, 1, 2, 19, 61])
def test_experts_agree_with_their_definition(level, fmt, n_rows):
    mixture = Mixture(fmt, 6, width(fmt), width(fmt), 37)
    x, routes = seeded(n_rows, width(fmt), seed=8), routes_of(n_rows, 6, 3)
    got = mixture.run(level, x, routes)
    tolerance = TOLERANCE["experts"]
    # Where a hidden value is rounded, one near a half may fall either way: a step of its int8 in one of many terms.
    atol = 3e-2 if fmt.is_quantized else tolerance.atol
    np.testing.assert_allclose(got, mixture.expected(x, routes), rtol=tolerance.rtol, atol=atol)


@every_level
@pytest.mark.parametrize(("act", "params"), [("gelu_tanh", ()), ("situ", (4.0, 25.0)), ("swiglu_clamp", (1.702, 7.0))])
def test_experts_with_biases_agree_for_every_activation(level, act, params):
    mixture = Mixture(Format.F32, 5, 40, 24, 33, has_biases=True)
    x, routes = seeded(11, 40, seed=9), routes_of(11, 5, 2)
    got, expected = mixture.run(level, x, routes, act=act, params=params), mixture.expected(x, routes, act, params)
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE["experts"].rtol, atol=TOLERANCE["experts"].atol)
    assert np.abs(got - mixture.run(level, x, routes)).max() > 1e-2


@pytest.mark.parametrize(
    ("fmt", "down"), [(Format.F32, None), (Format.Q4_0, None), (Format.Q4_0, Format.F32), (Format.Q4_K, Format.Q6_K)]
)
def test_experts_bits_do_not_depend_on_level_rows_threads_or_passes(fmt, down):
    mixture = Mixture(fmt, 8, width(fmt), 256, 300, down=down)
    x, routes = seeded(130, width(fmt), seed=11), routes_of(130, 8, 3)
    routes[40:120, :3] = [0, 1, 2]  # many rows of one expert: the kernels of many rows
    whole = mixture.run("scalar", x, routes, n_threads=1, rows_at_once=130)
    for level in LEVELS:
        for n_threads, rows_at_once in ((1, 16), (2, 130), (3, 33), (2, 7), (3, 5)):
            got = mixture.run(level, x, routes, n_threads=n_threads, rows_at_once=rows_at_once)
            assert got.tobytes() == whole.tobytes(), (level, n_threads, rows_at_once)
        alone = [mixture.run(level, x[r : r + 1], routes[r : r + 1]) for r in (0, 57, 129)]
        assert np.concatenate(alone).tobytes() == whole[[0, 57, 129]].tobytes(), level


@every_level
def test_experts_are_what_linear_and_gated_compute_summed_by_number(level):
    """One row through two experts, step by step."""
    mixture = Mixture(Format.Q8_0, 4, 64, 96, 48)
    x = seeded(1, 64, seed=12)
    routes = np.array([[1.0, 3.0, 0.25, 0.75]], np.float32)
    total = np.zeros((1, 48), np.float32)
    for e, weight in ((1, 0.25), (3, 0.75)):
        gate_up, hidden = np.zeros((1, 192), np.float32), np.zeros((1, 96), np.float32)
        _native.linear(level, [(mixture.packed["gate"][e], None, 0), (mixture.packed["up"][e], None, 96)], x, gate_up)
        _native.gated(level, 1, gate_up, act="silu", y=hidden)
        down = np.zeros((1, 48), np.float32)
        _native.linear(level, [(mixture.packed["down"][e], None, 0)], hidden, down)
        # An fma: exact in float64, for the product of two float32 is.
        total = (np.float64(weight) * down + total.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(mixture.run(level, x, routes), total, rtol=1e-6, atol=1e-7)


@every_level
@pytest.mark.parametrize("fmt", [Format.F32, Format.Q8_0])
@pytest.mark.parametrize("bad", ["x", "route"])
def test_a_row_that_is_nan_stays_alone(level, fmt, bad):
    mixture = Mixture(fmt, 4, 64, 64, 32)
    x, routes = seeded(9, 64, seed=13), routes_of(9, 4, 2)
    clean = mixture.run(level, x, routes)
    if bad == "x":
        x[4, 5] = np.nan
    else:
        routes[4, 2:] = np.nan
    got = mixture.run(level, x, routes)
    assert np.isnan(got[4]).all()
    assert np.delete(got, 4, 0).tobytes() == np.delete(clean, 4, 0).tobytes()


def test_what_does_not_fit_is_refused_by_name():
    mixture = Mixture(Format.F32, 3, 8, 8, 8)
    x, routes = seeded(2, 8), routes_of(2, 3, 2)
    with pytest.raises(ValueError, match="the matrices of expert 0 do not fit"):
        mixture.run("scalar", seeded(2, 9), routes)
    with pytest.raises(ValueError, match="a number in route is of no expert"):
        mixture.run("scalar", x, routes + 1)
    with pytest.raises(ValueError, match="act: got 'relu'"):
        mixture.run("scalar", x, routes, act="relu")
    with pytest.raises(ValueError, match="scores: got 'tanh'"):
        _native.router("scalar", 1, x, top_k=1, scores="tanh", y=np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="do not fit the experts"):
        _native.router("scalar", 1, x, top_k=9, scores="softmax", y=np.zeros((2, 18), np.float32))
    with pytest.raises(reference.ShapeError, match=r"experts 1\.\.3; 0\.\.3 is needed"):
        mixture.expected(x, np.array([[1, 3, 0.5, 0.5]] * 2, np.float32))
