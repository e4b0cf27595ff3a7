"""Passes that make a lowered program faster without changing a bit of what it computes. Each can be switched off.

    share_quantize   one rounding to int8 for all linears that read one value
    group_linears    neighbouring linears of one input and one output buffer become one group (q, k, v; gate, up)
    fuse_quantize    a norm or gated product that is only read rounded writes int8 itself
    fuse_residual    a linear or norm whose result is only added to the residual stream adds it itself
    fuse_delta       a convolution, the delta rule of it, and the gated norm of that are one op, with no buffer between

A pass is a function Lowered -> Lowered and is pure. `ops.place` lays out the buffers of the result.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from tiercel.ops.lower import lower
from tiercel.ops.lowered import (
    Add,
    Buffer,
    DeltaLayer,
    DeltaRule,
    Experts,
    Gated,
    GatedNorm,
    LinearGroup,
    Lowered,
    NativeOp,
    Norm,
    Quantize,
    ResidualMix,
    ShortConv,
    reads,
    writes,
)
from tiercel.ops.program import Program

Pass = Callable[[Lowered], Lowered]


class Passes(Struct, frozen=True):
    """Which passes run. All do by default: each is there because it is faster and changes no result."""

    share_quantize: bool = True
    group_linears: bool = True
    fuse_quantize: bool = True
    fuse_residual: bool = True
    fuse_delta: bool = True

    @classmethod
    def none(cls) -> "Passes":
        """Return the choice of no pass."""
        return cls(**dict.fromkeys(cls.__struct_fields__, False))


def lower_and_fuse(program: Program, passes: Passes | None = None) -> Lowered:
    """Return the recorded program as native ops, rewritten by the chosen passes (all, when None).

    Raises:
        UnsupportedModel: an op has no native form where it stands.
    """
    chosen = passes or Passes()
    result = lower(program)
    for name, rewrite in _ORDER:
        if getattr(chosen, name):
            result = rewrite(result)
    result = renumbered(result)
    result.check()
    return result


def share_quantize(program: Lowered) -> Lowered:
    """Round each state of a buffer once: a later rounding of the same, unchanged buffer reads the earlier result."""
    out: list[NativeOp] = []
    rounded: dict[Buffer, Buffer] = {}
    renamed: dict[Buffer, Buffer] = {}
    for op in program.ops:
        if isinstance(op, Quantize):
            if op.x in rounded:
                renamed[op.y] = rounded[op.x]
                continue
            rounded[op.x] = op.y
        else:
            rounded.pop(writes(op), None)
        out.append(_renamed(op, renamed))
    return replace(program, ops=tuple(out))


def group_linears(program: Lowered) -> Lowered:
    """Join each linear to the group right before it when both read one buffer and fill one buffer."""
    out: list[NativeOp] = []
    for op in program.ops:
        last = out[-1] if out else None
        if (
            isinstance(op, LinearGroup)
            and isinstance(last, LinearGroup)
            and (op.x, op.y) == (last.x, last.y)
            and op.residual is last.residual is None
        ):
            out[-1] = replace(last, parts=last.parts + op.parts)
        else:
            out.append(op)
    return replace(program, ops=tuple(out))


def fuse_quantize(program: Lowered) -> Lowered:
    """Let a norm or gated product write int8 when its one reader is the rounding that follows it."""
    n_readers = _n_readers(program)
    out: list[NativeOp] = []
    for op in program.ops:
        last = out[-1] if out else None
        fits = isinstance(last, Gated) or (isinstance(last, Norm) and last.residual is None)
        if (
            isinstance(op, Quantize)
            and isinstance(last, Norm | Gated)
            and fits
            and last.y == op.x
            and n_readers[op.x] == 1
        ):
            out[-1] = replace(last, y=op.y)
        else:
            out.append(op)
    return replace(program, ops=tuple(out))


def fuse_residual(program: Lowered) -> Lowered:
    """Let a linear or norm add its result to the residual stream when the addition that follows is its one reader."""
    n_readers = _n_readers(program)
    out: list[NativeOp] = []
    for op in program.ops:
        last = out[-1] if out else None
        # A linear that fills a part of its buffer only cannot add to all of it.
        fits = isinstance(last, Norm) or (isinstance(last, LinearGroup) and _fills(last))
        if (
            isinstance(op, Add)
            and isinstance(last, LinearGroup | Norm)
            and fits
            and last.residual is None
            and last.y == op.y
            and n_readers[op.y] == 1
        ):
            out[-1] = replace(last, y=op.x, residual=op.x)
        else:
            out.append(op)
    return replace(program, ops=tuple(out))


def fuse_delta(program: Lowered) -> Lowered:
    """Let a gated norm's place compute the delta rule that it norms and the convolution that the rule reads.

    What they read must still be there then, as what linears wrote is: they fill each column once.
    """
    n_readers = _n_readers(program)
    of_linears = {writes(op) for op in program.ops} - {
        writes(op) for op in program.ops if not isinstance(op, LinearGroup) or op.residual is not None
    }
    made_at = {writes(op): i for i, op in enumerate(program.ops)}
    joined: dict[int, DeltaLayer] = {}
    gone: set[int] = set()
    for i, norm in enumerate(program.ops):
        if not isinstance(norm, GatedNorm) or norm.x not in made_at:
            continue
        rule = program.ops[made_at[norm.x]]
        if (
            not isinstance(rule, DeltaRule)
            or rule.qkv not in made_at
            or norm.heads != rule.value_heads
            or norm.act == "none"
        ):
            continue
        conv = program.ops[made_at[rule.qkv]]
        if not isinstance(conv, ShortConv) or n_readers[norm.x] != 1 or n_readers[rule.qkv] != 1:
            continue
        if not {conv.x, rule.gate, rule.beta} <= of_linears:
            continue
        joined[i] = _delta_layer(conv, rule, norm)
        gone |= {made_at[rule.qkv], made_at[norm.x]}
    ops = tuple(joined.get(i, op) for i, op in enumerate(program.ops) if i not in gone)
    return replace(program, ops=ops)


def _delta_layer(conv: ShortConv, rule: DeltaRule, norm: GatedNorm) -> DeltaLayer:
    own = {name: getattr(rule, name) for name in rule.__struct_fields__ if name not in ("qkv", "y")}
    own |= {name: getattr(conv, name) for name in ("x", "x_col", "width", "w", "bias", "act")}
    own |= {name: getattr(norm, name) for name in ("z", "z_col", "is_gate_per_head", "y")}
    return DeltaLayer(**own, norm=norm.w, norm_eps=norm.eps, norm_act=norm.act)


def renumbered(program: Lowered) -> Lowered:
    """Return the program with buffers numbered in order of first writing: its text then shows no trace of passes."""
    new = {buffer: replace(buffer, id=i) for i, buffer in enumerate(program.buffers())}
    out: list[NativeOp] = []
    for op in program.ops:
        found = ((name, getattr(op, name)) for name in op.__struct_fields__)
        changes: dict[str, Any] = {name: new[value] for name, value in found if isinstance(value, Buffer)}
        if isinstance(op, ResidualMix):
            changes["sources"] = tuple(new[source] for source in op.sources)
        out.append(replace(op, **changes))
    hidden = None if program.hidden is None else new[program.hidden]
    return replace(program, ops=tuple(out), output=new[program.output], hidden=hidden)


_ORDER: tuple[tuple[str, Pass], ...] = (
    ("share_quantize", share_quantize),
    ("group_linears", group_linears),
    ("fuse_quantize", fuse_quantize),
    ("fuse_residual", fuse_residual),
    ("fuse_delta", fuse_delta),
)


def _fills(group: LinearGroup) -> bool:
    return sum(part.w.shape[0] for part in group.parts) == group.y.width


def _n_readers(program: Lowered) -> Counter[Buffer]:
    found = Counter(buffer for op in program.ops for buffer in reads(op))
    if program.hidden is not None:
        found[program.hidden] += 1  # whoever runs the program reads it
    return found


def _renamed(op: NativeOp, renamed: Mapping[Buffer, Buffer]) -> NativeOp:
    if isinstance(op, LinearGroup | Experts) and op.x in renamed:
        return replace(op, x=renamed[op.x])
    return op
