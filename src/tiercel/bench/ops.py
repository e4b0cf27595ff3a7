"""`bench ops`: each op of a model's program in one step: its time, its cost, and how near the machine's limit it is.

A step of `n_tokens` tokens in `n_sequences` sequences that each have `context` tokens before them is repeated; the
native runner tells each op's time. Ops that are alike (kind, shape, format) are one line. The machine's limits are
measured before and after, and the better is taken (`limits`). What an op reads is taken to come from memory if it is
weights or keys and values, with the whole step as the working set, and from cache if it is activations alone.

Measures of a repetition: `step_us`, from submission to the result; `read_frac`, the least time in which what the step
reads can be read, at the rate of a working set of that size, over `step_us`; `memory_read_frac`, the same at the rate
of the largest set, which no cache holds; `arithmetic_frac`, the least time in which the step's arithmetic can be done,
over `step_us`; `linears_frac`, the linears' alone, over their own time. Arithmetic is held against the ceiling of the
weights' format (`limits.ceiling_frac`). Where there are such ops, `attention_read_frac`, `attention_arithmetic_frac`
and `experts_read_frac`: the least time of what these ops read, or compute, over theirs; and `state_read_frac`: of
reading, once, the states that delta rules read and write, over the rules' time. With `over` and `under`, beginnings of
lines: `time_ratio`, the time of the lines of the one over the other's. With `by_token`: `rule_gain` and `step_gain`,
how many times as long the same tokens take one a step, by the delta rules' time and by the steps'. Then one measure for
each line of ops.
"""

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiercel.base.errors import ConfigError, RequestFailed
from tiercel.bench import limits as machine_limits
from tiercel.bench import machine
from tiercel.bench.limits import Limits
from tiercel.bench.offline import Told, make_row
from tiercel.bench.rows import OURS, Contestant, Row, percentile, spread

if TYPE_CHECKING:
    from tiercel.ops.lowered import DeltaLayer, DeltaRule, LinearGroup, NativeOp


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsWork:
    """The step that is repeated. `n_tokens` are shared out evenly among `n_sequences`."""

    n_tokens: int = 1
    n_sequences: int = 1
    context: int = 128
    num_iters: int = 100
    num_iters_warmup: int = 10
    by_token: bool = False
    over: Sequence[str] = ()
    under: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.n_sequences < 1 or self.n_tokens < 1 or self.n_tokens % self.n_sequences:
            raise ConfigError(
                f"bench ops: got {self.n_tokens} tokens for {self.n_sequences} sequences; need the same number, 1 or "
                "more, for each"
            )
        if self.context < 0 or self.num_iters < 1 or self.num_iters_warmup < 0:
            raise ConfigError("bench ops: context and num-iters-warmup need 0 or more, num-iters 1 or more")
        if bool(self.over) != bool(self.under):
            raise ConfigError("bench ops: work: got one of over and under; need both, lists of beginnings of lines")

    @property
    def len_tokens(self) -> int:
        """Tokens of one sequence, with the one that is sampled."""
        return self.context + self.n_tokens // self.n_sequences + 1


@dataclass(frozen=True, slots=True)
class OpLine:
    """Ops that are alike: how many, what one costs, and the time of each repetition of all of them together."""

    label: str
    n: int
    flops: int
    nbytes: int
    is_int8: bool
    is_from_memory: bool
    ns: tuple[int, ...]
    is_linear: bool = False
    ceiling_frac: float = 1.0
    kind: str = ""
    state_bytes: int = 0

    @property
    def one_us(self) -> float:
        """Median time of one."""
        return percentile(self.ns, 50) / self.n / 1e3

    def limit_frac(self, limits: Limits, step_bytes: int) -> float:
        """Return the least time the machine could take, over the median time."""
        working_set = step_bytes if self.is_from_memory else self.nbytes
        floor_s = limits.floor_s(self.nbytes, self.flops, is_int8=self.is_int8, working_set_bytes=working_set)
        return floor_s / (self.one_us / 1e6)

    def arithmetic_s(self, limits: Limits) -> float:
        """Return the least time in which the arithmetic of all of them can be done."""
        rate = limits.int8_gop_s * self.ceiling_frac if self.is_int8 else limits.f32_gflop_s
        return self.n * self.flops / (rate * 1e9)


@dataclass(frozen=True, slots=True)
class OpsResult:
    """What `bench ops` found. `step_us` holds each repetition's time, from submission to its result."""

    lines: Sequence[OpLine]
    step_us: Sequence[float]
    limits: Limits
    by_token: "OpsResult | None" = None

    @property
    def step_bytes(self) -> int:
        """Bytes that a step reads from memory at least."""
        return bytes_from_memory(self.lines)

    def fractions(self) -> dict[str, list[float]]:
        """Return, for each repetition, how near the step came to each of the machine's limits."""
        read_us, memory_us = (
            self.step_bytes / self.limits.read_rate(size) / 1e3 for size in (self.step_bytes, math.inf)
        )
        linears = [line for line in self.lines if line.is_linear]
        arithmetic_us, linears_us = (
            1e6 * sum(line.arithmetic_s(self.limits) for line in lines) for lines in (self.lines, linears)
        )
        took_us = [sum(ns) / 1e3 for ns in zip(*(line.ns for line in linears), strict=True)]
        return {
            "read_frac": [read_us / us for us in self.step_us],
            "memory_read_frac": [memory_us / us for us in self.step_us],
            "arithmetic_frac": [arithmetic_us / us for us in self.step_us],
            "linears_frac": [linears_us / us for us in took_us if us > 0],
        }

    def fractions_of_kinds(self) -> dict[str, list[float]]:
        """Return, for each repetition, how near attention, experts and states came to the machine's limits."""
        rate = self.limits.read_rate(self.step_bytes)
        found: dict[str, list[float]] = {}
        for name, kind, amount, per_ns in (
            ("attention_read_frac", "attention", "nbytes", rate),
            ("attention_arithmetic_frac", "attention", "flops", self.limits.f32_gflop_s),
            ("experts_read_frac", "experts", "nbytes", rate),
            ("state_read_frac", "delta", "state_bytes", rate),
        ):
            lines = [line for line in self.lines if line.kind.startswith(kind)]
            least_ns = sum(line.n * getattr(line, amount) for line in lines) / per_ns
            if lines:
                found[name] = [least_ns / ns for ns in self.ns_of(lines)]
        return found

    def ns_of(self, lines: Sequence[OpLine]) -> list[int]:
        """Return the nanoseconds of these lines in each repetition."""
        return [sum(ns) for ns in zip(*(line.ns for line in lines), strict=True)]

    def comparisons(self, work: OpsWork) -> dict[str, list[float]]:
        """Return what `over`, `under` and `by_token` ask for.

        Raises: ConfigError: no line begins so.
        """
        found: dict[str, list[float]] = {}
        if work.over:
            over, under = (self.ns_of(self._lines_like(names)) for names in (work.over, work.under))
            found["time_ratio"] = [a / b for a, b in zip(over, under, strict=True)]
        if self.by_token is not None:
            each = work.n_tokens // work.n_sequences
            one_us = percentile(self.by_token.step_us, 50)
            found["step_gain"] = [each * one_us / us for us in self.step_us]
            of_one, of_all = (
                [line for line in result.lines if line.kind.startswith("delta")] for result in (self.by_token, self)
            )
            if of_all:
                one_ns = percentile(self.by_token.ns_of(of_one), 50)
                found["rule_gain"] = [each * one_ns / ns for ns in self.ns_of(of_all)]
        return found

    def _lines_like(self, names: Sequence[str]) -> list[OpLine]:
        for name in names:
            if not any(line.label.startswith(name) for line in self.lines):
                labels = ", ".join(line.label for line in self.lines)
                raise ConfigError(f"bench ops: work: no line begins with {name!r}; there are: {labels}")
        return [line for line in self.lines if line.label.startswith(tuple(names))]

    def table(self) -> str:
        """Return the lines as a table, longest first."""
        total_ns = sum(percentile(line.ns, 50) for line in self.lines)
        head = f"{'op':<44} {'n':>4} {'us each':>9} {'share':>6} {'GB/s':>7} {'GOP/s':>8} {'of limit':>8}"
        told = [head]
        for line in sorted(self.lines, key=lambda line: -percentile(line.ns, 50)):
            share = percentile(line.ns, 50) / total_ns if total_ns else 0.0
            read, done = line.nbytes / line.one_us / 1e3, line.flops / line.one_us / 1e3
            told.append(
                f"{line.label:<44} {line.n:>4} {line.one_us:>9.2f} {share:>6.1%} {read:>7.1f} {done:>8.1f} "
                f"{line.limit_frac(self.limits, self.step_bytes):>8.0%}"
            )
        step_us = percentile(self.step_us, 50)
        told.append(
            f"step {step_us:,.1f} us, ops {total_ns / 1e3:,.1f} us, the rest {step_us - total_ns / 1e3:,.1f} us "
            f"({1 - total_ns / 1e3 / step_us:.1%})"
        )
        found = self.fractions() | self.fractions_of_kinds()
        fractions = {name: percentile(values, 50) for name, values in found.items() if values}
        told.append(
            "of the limits, with the formats' ceilings: "
            + ", ".join(f"{name.removesuffix('_frac')} {value:.1%}" for name, value in fractions.items())
        )
        by_set = ", ".join(f"{mib} MiB {rate:.0f}" for mib, rate in self.limits.read_gb_s.items())
        told.append(
            f"limits, {self.limits.n_threads} threads: read GB/s {by_set}; float32 {self.limits.f32_gflop_s:,.0f} "
            f"GFLOP/s; int8 {self.limits.int8_gop_s:,.0f} GOP/s"
        )
        return "\n".join(told)


def bench(
    model: str | None,
    options: Mapping[str, Any],
    told: Told,
    work: OpsWork,
    *,
    on_note: Callable[[str], None] = lambda _: None,
) -> tuple[Row, OpsResult]:
    """Measure each op of `model`'s program.

    Raises: ConfigError: the step does not fit the engine's limits; RequestFailed: its results changed between
        repetitions.
    """
    from tiercel.base.config import engine_options
    from tiercel.boot.plan import make_plan
    from tiercel.boot.runner import build_runner
    from tiercel.runner.native import chosen_level

    least = {"max_num_batched_tokens": max(512, work.n_tokens), "max_num_seqs": work.n_sequences}
    plan = make_plan(engine_options(model=model, **{**least, **options}))
    with plan.checkpoint:
        on_note("loading")
        runner = build_runner(plan)
        state = machine.describe()
        try:
            n_bytes = bytes_from_memory(group_ops(runner.program.ops, [], bounds_of(work), runner.kv_dtype))
            on_note("measuring the machine's limits")
            limits = machine_limits.measure(plan.n_threads, chosen_level(), n_bytes)
            on_note(f"{work.num_iters} steps")
            lines, step_us, digest = time_steps(runner, work)
            by_token = None
            if work.by_token:
                on_note("the same, one token a step")
                by_token = time_steps(runner, one_token_of(work))
            limits = limits.best(machine_limits.measure(plan.n_threads, chosen_level(), n_bytes))
        finally:
            runner.close()
        single = None if by_token is None else OpsResult(by_token[0], by_token[1], limits)
        result = OpsResult(lines, step_us, limits, single)
        config = {
            "work": dataclasses.asdict(work),
            "engine": {
                **dataclasses.asdict(plan.options),
                "model": plan.resolved.display_name,
                "threads": plan.n_threads,
            },
            "limits": dataclasses.asdict(limits),
            "ops": {
                line.label: {
                    "n": line.n,
                    "flops": line.flops,
                    "nbytes": line.nbytes,
                    "limit_frac": line.limit_frac(limits, result.step_bytes),
                    "ceiling_frac": line.ceiling_frac,
                }
                for line in lines
            },
        }
    measures = {"step_us": spread(step_us)}
    found = result.fractions() | result.fractions_of_kinds() | result.comparisons(work)
    measures |= {name: spread(values) for name, values in found.items() if values}
    measures |= {f"{line.label} x {line.n}, all_us": spread([ns / 1e3 for ns in line.ns]) for line in lines}
    ours = Contestant(machine.versions(), {}, measures, {"digest": digest})
    return make_row(told, config, {OURS: ours}, {}, state), result


def one_token_of(work: OpsWork) -> OpsWork:
    """Return the step of one token a sequence, behind half of the tokens of `work`'s step."""
    each = work.n_tokens // work.n_sequences
    context, n = work.context + each // 2, work.n_sequences
    return OpsWork(n_tokens=n, n_sequences=n, context=context, num_iters=each, num_iters_warmup=work.num_iters_warmup)


def time_steps(runner: Any, work: OpsWork) -> tuple[list[OpLine], list[float], str]:
    """Repeat the step; return each line of ops, each step's microseconds, and a digest of the sampled tokens.

    A model with states can only go on, unless it begins: each repetition then computes the tokens behind the last's.
    """
    each = work.n_tokens // work.n_sequences
    stride = each if runner.program.state_layers and work.context else 0
    _admit(runner, work, stride * (work.num_iters + work.num_iters_warmup - 1))
    _fill_context(runner, work)
    # Greedy and at the same place each time: the same tokens, so the same work and the same result.
    step_us, op_ns, sampled = [], [], []
    runner.set_timing(on=True)
    for i in range(work.num_iters_warmup + work.num_iters):
        start_ns = time.perf_counter_ns()
        runner.submit(_plan(i, list(range(work.n_sequences)), work.context + i * stride, each, samples=True))
        result = runner.collect()
        took_ns = time.perf_counter_ns() - start_ns
        of_ops = runner.take_op_ns()
        sampled.append(tuple(result.row_token.tolist()))
        if i >= work.num_iters_warmup:
            step_us.append(took_ns / 1e3)
            op_ns.append([ns for _, ns in of_ops])
    different = set(sampled)
    if min(map(min, different)) < 0 or (len(different) != 1 and not stride):
        raise RequestFailed(f"bench ops: one step gave {len(different)} different results; need one; report this")
    digest = hashlib.sha256(str(sampled if len(different) > 1 else sampled[0]).encode()).hexdigest()[:16]
    return group_ops([op for op, _ in of_ops], op_ns, bounds_of(work), runner.kv_dtype), step_us, digest


def bounds_of(work: OpsWork) -> Any:
    """Return the step's sizes. A query sees the context, and half of the step's own tokens on average."""
    from tiercel.ops.dims import Bounds

    each = work.n_tokens // work.n_sequences
    return Bounds(work.n_tokens, work.n_sequences, work.n_sequences, work.context + (each + 1) // 2)


def bytes_from_memory(lines: Sequence[OpLine]) -> int:
    """Return the bytes that a step reads from memory at least."""
    return sum(line.n * line.nbytes for line in lines if line.is_from_memory)


def group_ops(
    ops: "Sequence[NativeOp]", op_ns: Sequence[Sequence[int]], bounds: Any, kv_dtype: str = "float16"
) -> list[OpLine]:
    """Put ops that are alike into one line each, in order of first use. `op_ns`: repetition -> op -> nanoseconds."""
    from tiercel.ops.lowered import (
        Attention,
        BufferKind,
        DeltaLayer,
        DeltaRule,
        Experts,
        LinearGroup,
        Ssd,
        cost,
        weights_of,
    )

    from_memory = Attention | DeltaRule | DeltaLayer | Ssd | Experts

    alike: dict[str, list[int]] = {}
    for i, op in enumerate(ops):
        alike.setdefault(label_of(op), []).append(i)
    lines = []
    for label, places in alike.items():
        op = ops[places[0]]
        one = cost(op, bounds, kv_dtype)
        is_linear = isinstance(op, LinearGroup)
        lines.append(
            OpLine(
                label,
                len(places),
                one.flops,
                one.nbytes,
                isinstance(op, LinearGroup) and op.x.kind is BufferKind.Q8,
                isinstance(op, from_memory) or (is_linear and bool(weights_of(op))),
                tuple(sum(row[i] for i in places) for row in op_ns),
                is_linear,
                _ceiling_frac(op) if isinstance(op, LinearGroup) else 1.0,
                op.kind,
                _state_bytes(op, bounds) if isinstance(op, DeltaRule | DeltaLayer) else 0,
            )
        )
    return lines


def _state_bytes(op: "DeltaRule | DeltaLayer", bounds: Any) -> int:
    """Return the bytes of all sequences' states of one layer."""
    return 4 * op.value_heads * op.key_dim * op.value_dim * int(bounds.n_sequences)


def _ceiling_frac(op: "LinearGroup") -> float:
    """Return the ceiling of a product with weights of several formats: their times add up."""
    n_weights = [part.w.n_weights for part in op.parts]
    slots = sum(n / machine_limits.ceiling_frac(part.w.format) for n, part in zip(n_weights, op.parts, strict=True))
    return sum(n_weights) / slots


def label_of(op: "NativeOp") -> str:
    """Return what an op's line is called: all that decides its cost."""
    from tiercel.ops.lowered import Attention, Embed, LinearGroup, writes

    if isinstance(op, LinearGroup):
        formats = "+".join(dict.fromkeys(str(part.w.format) for part in op.parts))
        n = sum(part.w.shape[0] for part in op.parts)
        return f"linear {formats} [{op.y.rows},{op.x.width}]->{n}{' + residual' if op.residual else ''}"
    if isinstance(op, Attention):
        return f"attention H={op.n_heads} K={op.n_kv_heads} D={op.head_dim}" + (
            f" window {op.window}" if op.window else ""
        )
    y = writes(op)
    more = f" {op.w.format}" if isinstance(op, Embed) else " + residual" if getattr(op, "residual", None) else ""
    return f"{op.kind} [{y.rows},{y.width}] {y.kind}{more}"


def _admit(runner: Any, work: OpsWork, n_more: int) -> None:
    import random

    from tiercel.protocol.params import SamplingParams
    from tiercel.runner.capacity import pages_for

    limits = runner.limits
    n_tokens = work.len_tokens + n_more
    n_pages = pages_for(n_tokens, limits.page_size_tokens) if limits.n_pages else 0
    if n_tokens > limits.max_len_tokens or n_pages * work.n_sequences > limits.n_pages:
        raise ConfigError(
            f"bench ops: {work.n_sequences} sequences of {n_tokens} tokens need "
            f"{n_pages * work.n_sequences} pages; there are {limits.n_pages}, and a sequence has at most "
            f"{limits.max_len_tokens} tokens; lower --context, or raise --kv-cache-memory-bytes"
        )
    source = random.Random(0)
    low, high = limits.vocab_size // 10, max(limits.vocab_size * 9 // 10, limits.vocab_size // 10 + 1)
    for slot in range(work.n_sequences):
        tokens = [source.randrange(low, high) for _ in range(n_tokens - 1)]
        runner.admit(slot, tokens, len(tokens), SamplingParams(temperature=0.0), slot, ())
        runner.set_pages(slot, 0, range(slot * n_pages, (slot + 1) * n_pages))


def _fill_context(runner: Any, work: OpsWork) -> None:
    """Compute the tokens before the step, so that attention reads real keys and values."""
    step_id = 1 << 20
    for slot in range(work.n_sequences):
        for start in range(0, work.context, runner.limits.max_step_tokens):
            n = min(runner.limits.max_step_tokens, work.context - start)
            runner.submit(_plan(step_id, [slot], start, n, samples=False))
            runner.collect()
            step_id += 1


def _plan(step_id: int, slots: Sequence[int], start: int, n: int, *, samples: bool) -> Any:
    import numpy as np

    from tiercel.protocol.step import StepPlan

    count = len(slots)
    return StepPlan(
        step_id=step_id,
        seq_slot=np.array(slots, np.int32),
        seq_start=np.full(count, start, np.int32),
        seq_tokens=np.full(count, n, np.int32),
        seq_samples=np.full(count, samples, np.bool_),
        seq_scores=np.zeros(count, np.bool_),
        n_logprobs=None,
    )
