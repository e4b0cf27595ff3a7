import xml.etree.ElementTree as ET
from types import SimpleNamespace

import numpy as np
import pytest

from tiercel import _native
from tiercel.base.errors import ConfigError, RequestFailed
from tiercel.base.units import MIB
from tiercel.bench import limits, ops, plot
from tiercel.bench.limits import Limits
from tiercel.bench.ops import OpsResult, OpsWork, time_steps
from tiercel.ops import lowered
from tiercel.ops.dims import Bounds, Dim
from tiercel.ops.lowered import Buffer, BufferKind, LinearGroup, LinearPart
from tiercel.ops.program import Weight
from tiercel.quant.formats import Format

LIMITS = Limits(2, {1: 100.0, 16: 50.0, 256: 20.0}, 200.0, 800.0)
WORK = OpsWork(n_tokens=4, n_sequences=2, context=10, num_iters=3, num_iters_warmup=1)


def linear(name, *, k=32, n=64, kind=BufferKind.Q8):
    x, y = Buffer(0, Dim.TOKENS, k, kind), Buffer(1, Dim.TOKENS, n)
    return LinearGroup(x, (LinearPart(Weight(name, (n, k), Format.Q8_0), None, 0),), y)


PROGRAM = [linear("a"), lowered.Softcap(Buffer(1, Dim.TOKENS, 64), 30.0), linear("b"), linear("c", n=32)]


class TimedRunner:
    """Meets what `time_steps` needs of the native runner; each op takes 10 times its place, in nanoseconds."""

    def __init__(self, *, drifts=False, has_states=False):
        self.program = SimpleNamespace(state_layers=("state",) if has_states else ())
        self.limits = SimpleNamespace(
            max_len_tokens=64, max_step_tokens=8, page_size_tokens=4, n_pages=20, vocab_size=100
        )
        self.plans, self.admitted, self.pages = [], {}, {}
        self.is_timing = False
        self.kv_dtype = "float16"
        self._drifts = drifts

    def admit(self, slot, token_ids, n_prompt_tokens, params, seed, stop_ids):
        self.admitted[slot] = list(token_ids)

    def set_pages(self, slot, first_idx, page_ids):
        self.pages[slot] = list(page_ids)

    def submit(self, plan):
        self.plans.append(plan)

    def collect(self):
        n = int(self.plans[-1].seq_samples.sum())
        return SimpleNamespace(row_token=np.full(n, len(self.plans) if self._drifts else 5))

    def set_timing(self, *, on):
        self.is_timing = on

    def take_op_ns(self):
        assert self.is_timing
        return [(op, 10 * i) for i, op in enumerate(PROGRAM)]


def test_ops_that_are_alike_are_one_line():
    lines, step_us, _ = time_steps(TimedRunner(), WORK)
    assert [(line.n, line.ns) for line in lines] == [(2, (20, 20, 20)), (1, (10, 10, 10)), (1, (30, 30, 30))]
    assert len(step_us) == 3


def test_a_model_without_pages_is_asked_for_none():
    runner = TimedRunner()
    runner.limits.n_pages = 0
    time_steps(runner, WORK)
    assert runner.pages == {0: [], 1: []}


def test_a_line_has_the_cost_of_one_op():
    line = ops.group_ops(PROGRAM, [[1, 1, 1, 1]], Bounds(4, 2, 2, 11))[0]
    assert line.flops >= 2 * 4 * 64 * 32
    assert line.nbytes >= 64 * 34
    assert (line.is_int8, line.is_from_memory) == (True, True)


def test_the_context_is_computed_before_the_step_and_sequences_share_no_page():
    runner = TimedRunner()
    time_steps(runner, WORK)
    filled = [(int(p.seq_slot[0]), int(p.seq_start[0]), int(p.seq_tokens[0])) for p in runner.plans[:4]]
    assert filled == [(0, 0, 8), (0, 8, 2), (1, 0, 8), (1, 8, 2)]
    assert not any(plan.seq_samples.any() for plan in runner.plans[:4])
    step = runner.plans[4]
    assert (step.seq_start.tolist(), step.seq_tokens.tolist()) == ([10, 10], [2, 2])
    assert len(runner.plans) == 4 + 1 + 3
    assert not set(runner.pages[0]) & set(runner.pages[1])
    assert len(runner.admitted[0]) == 12


def test_steps_that_give_different_tokens_are_no_measurement():
    with pytest.raises(RequestFailed, match="different results"):
        time_steps(TimedRunner(drifts=True), WORK)


def test_a_model_with_states_goes_on_from_step_to_step_unless_it_begins():
    runner = TimedRunner(drifts=True, has_states=True)
    _, _, digest = time_steps(runner, WORK)
    assert [plan.seq_start.tolist() for plan in runner.plans[4:]] == [[10, 10], [12, 12], [14, 14], [16, 16]]
    assert len(runner.admitted[0]) == 18
    assert digest == time_steps(TimedRunner(drifts=True, has_states=True), WORK)[2]
    begins = OpsWork(n_tokens=4, n_sequences=2, context=0, num_iters=3, num_iters_warmup=1)
    runner = TimedRunner(has_states=True)
    time_steps(runner, begins)
    assert [plan.seq_start.tolist() for plan in runner.plans] == [[0, 0]] * 4


def test_one_token_a_step_stands_behind_half_of_the_prompt():
    one = ops.one_token_of(OpsWork(n_tokens=1024, n_sequences=2, context=6, num_iters=9))
    assert (one.n_tokens, one.n_sequences, one.context, one.num_iters) == (2, 2, 262, 512)


def line_of(label, kind, ns, *, n=1, flops=0, nbytes=0, state_bytes=0):
    return ops.OpLine(label, n, flops, nbytes, False, True, ns, kind=kind, state_bytes=state_bytes)


def test_attention_experts_and_states_are_held_against_the_limits():
    lines = [
        line_of("a", "attention", (1_000_000,), n=2, flops=10_000_000, nbytes=4 * MIB),
        line_of("b", "experts", (2_000_000,), nbytes=16 * MIB),
        line_of("c", "delta_layer", (500_000,), nbytes=16 * MIB, state_bytes=2 * MIB),
        line_of("d", "delta_rule", (1_500_000,), nbytes=16 * MIB, state_bytes=6 * MIB),
    ]
    rate = Limits(2, {1: 50.0}, 100.0, 800.0)
    found = OpsResult(lines, [9000.0], rate).fractions_of_kinds()
    assert found == {
        "attention_read_frac": [pytest.approx(8 * MIB / 50e9 / 0.001)],
        "attention_arithmetic_frac": [pytest.approx(20_000_000 / 100e9 / 0.001)],
        "experts_read_frac": [pytest.approx(16 * MIB / 50e9 / 0.002)],
        "state_read_frac": [pytest.approx(8 * MIB / 50e9 / 0.002)],
    }


def test_lines_are_compared_with_other_lines_and_with_single_tokens():
    lines = [line_of("experts x", "experts", (30, 60)), line_of("router", "router", (10, 20))]
    lines += [line_of("linear y", "linear_group", (20, 20)), line_of("delta", "delta_rule", (1000, 500))]
    single = OpsResult([line_of("delta", "delta_rule", (40, 60, 50))], [2.0, 3.0, 4.0], LIMITS)
    result = OpsResult(lines, [10.0, 20.0], LIMITS, single)
    found = result.comparisons(OpsWork(n_tokens=100, over=["experts", "router"], under=["linear"]))
    assert found == {"time_ratio": [2.0, 4.0], "step_gain": [30.0, 15.0], "rule_gain": [5.0, 10.0]}
    with pytest.raises(ConfigError, match="no line begins with 'gate'; there are: experts x, router"):
        result.comparisons(OpsWork(over=["gate"], under=["linear"]))
    with pytest.raises(ConfigError, match="over and under; need both"):
        OpsWork(over=["gate"])


def test_a_step_that_does_not_fit_is_refused_with_numbers():
    with pytest.raises(ConfigError, match="need 26 pages; there are 20"):
        time_steps(TimedRunner(), OpsWork(n_sequences=2, n_tokens=2, context=50))


@pytest.mark.parametrize(
    "work", [{"n_tokens": 3, "n_sequences": 2}, {"n_tokens": 0}, {"context": -1}, {"num_iters": 0}]
)
def test_a_step_that_cannot_be_is_refused(work):
    with pytest.raises(ConfigError, match="bench ops"):
        OpsWork(**work)


def test_a_formats_ceiling_counts_what_its_scales_cost():
    found = {weights: round(limits.ceiling_frac(weights), 3) for weights in Format}
    assert found[Format.Q8_0] == found[Format.Q4_0] == 0.727
    assert found[Format.Q4_1] == found[Format.Q4_K] == 0.667
    assert found[Format.Q6_K] == 0.571
    assert found[Format.F32] == found[Format.BF16] == 1.0


def test_the_better_of_two_measurements_is_taken_limit_by_limit():
    other = Limits(2, {1: 90.0, 16: 60.0, 64: 30.0}, 300.0, 700.0)
    assert LIMITS.best(other) == Limits(2, {1: 100.0, 16: 60.0, 64: 30.0, 256: 20.0}, 300.0, 800.0)


def test_a_step_is_held_against_reading_and_its_formats_ceiling():
    line = ops.OpLine("linear", 2, 400, 16 * MIB, True, True, (2_000_000, 4_000_000), is_linear=True, ceiling_frac=0.5)
    other = ops.OpLine("norm", 1, 200, MIB, False, False, (1_000_000, 1_000_000))
    found = OpsResult(
        [line, other], [4000.0, 8000.0], Limits(2, {1: 100.0, 32: 50.0, 256: 20.0}, 1e-4, 1e-3)
    ).fractions()
    assert found["read_frac"] == pytest.approx([32 * MIB / 50e9 / 0.004, 32 * MIB / 50e9 / 0.008])
    assert found["memory_read_frac"] == pytest.approx([32 * MIB / 20e9 / 0.004, 32 * MIB / 20e9 / 0.008])
    assert found["linears_frac"] == pytest.approx([0.0016 / 0.002, 0.0016 / 0.004])
    assert found["arithmetic_frac"] == pytest.approx([0.0036 / 0.004, 0.0036 / 0.008])


@pytest.mark.parametrize(("mib", "rate"), [(0.001, 100), (1, 100), (4, 75), (16, 50), (64, 35), (999, 20)])
def test_the_read_rate_between_two_measured_sets_is_between_theirs(mib, rate):
    assert LIMITS.read_rate(mib * MIB) == pytest.approx(rate)


def test_the_floor_is_the_slower_of_reading_and_computing():
    assert LIMITS.floor_s(20e9, 1, is_int8=True, working_set_bytes=256 * MIB) == pytest.approx(1)
    assert LIMITS.floor_s(1, 800e9, is_int8=True, working_set_bytes=MIB) == pytest.approx(1)
    assert LIMITS.floor_s(1, 800e9, is_int8=False, working_set_bytes=MIB) == pytest.approx(4)


def test_each_kind_of_limit_is_measured_with_each_number_of_threads():
    level = _native.kernel_levels()[0]
    for n_threads in (1, 2):
        for kind in ("fma", "dot"):
            assert _native.measure_rate(level, kind, n_threads) > 0
        assert _native.measure_rate(level, "read", n_threads, MIB) > 0


@pytest.mark.parametrize("bad", [("none", "fma", 1, 0), ("scalar", "sum", 1, 0), ("scalar", "read", 2, 4096)])
def test_a_limit_of_an_unknown_kind_is_refused(bad):
    with pytest.raises(ValueError, match=r"needs|no such"):
        _native.measure_rate(*bad)


def test_the_table_tells_the_longest_first_and_what_is_no_op():
    lines, _, _ = time_steps(TimedRunner(), WORK)
    told = OpsResult(lines, [0.1, 0.2, 0.3], LIMITS).table().splitlines()
    assert told[1].startswith("linear q8_0 [T,32]->32")
    assert told[-3] == "step 0.2 us, ops 0.1 us, the rest 0.1 us (70.0%)"
    assert told[-2].startswith("of the limits")


def test_pictures_are_well_formed_and_hold_their_words():
    lines, _, _ = time_steps(TimedRunner(), WORK)
    picture = plot.roofline(OpsResult(lines, [0.1], LIMITS))
    assert ET.fromstring(picture).tag.endswith("svg")
    assert "int8 800" in picture
    assert "q8_0 at most 582" in picture
    ET.fromstring(plot.steps("A < B", [("x", [1.0, 2.0]), ("none", [])], "ms"))


@pytest.mark.parametrize("most", [0.41, 1.0, 77.48, 135.8, 5e4])
def test_ticks_are_round_and_reach_far_enough(most):
    picture = ET.fromstring(plot.steps("x", [("x", [most])], "ms"))
    words = [one.text for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    ticks = [float(word) for word in words[5:-1]]
    assert ticks[0] == 0.0
    assert 3 <= len(ticks) <= 6
    assert most - ticks[1] < ticks[-1] <= most
    assert ticks[1] == float(f"{ticks[1]:.0e}")
