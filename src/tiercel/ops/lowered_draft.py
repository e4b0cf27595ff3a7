"""The native ops that drafters need beside a model's, and the rules of their shapes; see the list of `ops.lowered`."""

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from tiercel.ops.buffers import Buffer, are_alike
from tiercel.ops.dims import Dim
from tiercel.ops.program import Weight


class BlockConv(msgspec.Struct, frozen=True, tag="block_conv"):
    """See the list of `ops.lowered`. Of `base` [S, taps, C], or [taps, C], and of `delta`, `side` is used."""

    kind: ClassVar[str] = "block_conv"
    x: Buffer
    delta: Buffer
    base: Weight
    taps: int
    group: int
    side: int
    y: Buffer


class Scale(msgspec.Struct, frozen=True, tag="scale"):
    """See the list of `ops.lowered`."""

    kind: ClassVar[str] = "scale"
    x: Buffer
    factor: float


DraftOp = BlockConv | Scale


def rules(op: DraftOp) -> Iterator[tuple[bool, str]]:
    """Yield each rule of an op's shapes as (holds, what is wrong)."""
    if isinstance(op, BlockConv):
        fits = are_alike(op.x, op.y) and op.x.rows is op.delta.rows is Dim.TOKENS and op.y not in (op.x, op.delta)
        yield fits, f"x {op.x.type_text}, delta {op.delta.type_text}, y {op.y.type_text}"
        n_sides = op.base.n_weights // (op.taps * op.x.width)
        fits = op.x.width % op.group == 0 and op.delta.width == n_sides * op.taps * (op.x.width // op.group)
        yield fits and 0 <= op.side < n_sides, f"delta {op.delta.type_text}, {op.base}, side {op.side}"
