"""Where each buffer lies in one arena: offsets for the largest step, dead space reused, the peak known before a step.

A smaller step uses the same offsets and the same row strides, only fewer rows. Knows sizes and lifetimes, not what ops
do.
"""

from collections.abc import Callable, Mapping

import msgspec

from tiercel.base.errors import ShapeError
from tiercel.ops.dims import ACTIVATION_GROUP, Bounds
from tiercel.ops.lowered import Buffer, BufferKind, Lowered, reads, writes

ALIGN_BYTES = 64
"""Buffers begin on a cache line; also the widest vector's alignment."""


class Place(msgspec.Struct, frozen=True):
    """A buffer's bytes: rows `stride_bytes` apart from `offset_bytes` on, `n_rows` at most."""

    offset_bytes: int
    stride_bytes: int
    n_rows: int

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.stride_bytes * self.n_rows

    @property
    def end_bytes(self) -> int:
        """Offset of the first byte past the buffer."""
        return self.offset_bytes + self.nbytes


class Placement(msgspec.Struct, frozen=True):
    """The places of a program's buffers, by buffer id, and the arena that holds them."""

    bounds: Bounds
    places: Mapping[int, Place]
    arena_bytes: int


def packed_row_bytes(k: int) -> int:
    """Return the bytes of a Q8 row in the reference's layout: k int8, then one float32 a group, on whole cache lines.

    A backend passes its own function to `place`; the native one is `quant_row_bytes`.
    """
    return _aligned(k + 4 * (k // ACTIVATION_GROUP))


def lifetimes(program: Lowered) -> Mapping[Buffer, tuple[int, int]]:
    """Return for each buffer the half-open range of ops from first writing to last use; the output lives to the end."""
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for i, op in enumerate(program.ops):
        first.setdefault(writes(op), i)
        for buffer in (*reads(op), writes(op)):
            last[buffer] = i + 1
    last[program.output] = len(program.ops) + 1
    if program.hidden is not None:
        last[program.hidden] = len(program.ops) + 1
    return {buffer: (first[buffer], last[buffer]) for buffer in first}


def place(
    program: Lowered,
    bounds: Bounds,
    quant_row_bytes: Callable[[int], int] = packed_row_bytes,
    *,
    reuse: bool = True,
) -> Placement:
    """Give every buffer an offset for the largest step; buffers alive at one time never share a byte.

    Largest first, each at the lowest offset that is free over its whole life. With `reuse` off, every buffer has its
    own bytes, which is what a test compares with.

    Returns:
        offsets and Q8 strides in multiples of 64 bytes; an F32 row is width * 4 bytes, without padding.

    Cost: quadratic in the number of buffers that are alive together; run once a program.
    """
    alive = lifetimes(program)
    if not reuse:
        alive = dict.fromkeys(alive, (0, len(program.ops) + 1))
    strides = {b: 4 * b.width if b.kind is BufferKind.F32 else quant_row_bytes(b.width) for b in alive}
    sizes = {b: _aligned(strides[b] * bounds.of(b.rows)) for b in alive}
    offsets: dict[Buffer, int] = {}
    for buffer in sorted(alive, key=lambda b: (-sizes[b], alive[b], b.id)):
        start, end = alive[buffer]
        taken = sorted(
            (offsets[o], offsets[o] + sizes[o]) for o in offsets if alive[o][0] < end and start < alive[o][1]
        )
        offset = 0
        for low, high in taken:
            if offset + sizes[buffer] <= low:
                break
            offset = max(offset, high)
        offsets[buffer] = offset
    places = {b.id: Place(offsets[b], strides[b], bounds.of(b.rows)) for b in alive}
    result = Placement(bounds, places, max((offsets[b] + sizes[b] for b in alive), default=0))
    check(program, result)
    return result


def check(program: Lowered, placement: Placement) -> None:
    """Check that buffers alive together are apart, aligned, and inside the arena.

    Raises:
        ShapeError: it is not so.
    """
    alive = sorted(lifetimes(program).items(), key=lambda item: item[1])
    for i, (a, (_, a_end)) in enumerate(alive):
        pa = placement.places[a.id]
        if pa.offset_bytes % ALIGN_BYTES or pa.end_bytes > placement.arena_bytes:
            raise ShapeError(
                f"ops.place: {a} lies at {pa}; 64-byte steps inside {placement.arena_bytes} bytes are needed"
            )
        for b, (b_start, _) in alive[i + 1 :]:
            pb = placement.places[b.id]
            if b_start >= a_end:
                break
            if pa.offset_bytes < pb.end_bytes and pb.offset_bytes < pa.end_bytes:
                raise ShapeError(f"ops.place: {a} at {pa} and {b} at {pb} are alive together and overlap")


def peak_bytes(program: Lowered, placement: Placement) -> int:
    """Return the most bytes alive at one op: what no placement of these buffers can go below."""
    alive = lifetimes(program)
    sizes = {b: _aligned(placement.places[b.id].nbytes) for b in alive}
    return max(
        (sum(sizes[b] for b in alive if alive[b][0] <= i < alive[b][1]) for i in range(len(program.ops))), default=0
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
