"""Buffers: the matrices that a lowered program's ops read and write. `ops.lowered` has the ops."""

import enum

import msgspec

from tiercel.ops.dims import Dim


class BufferKind(enum.StrEnum):
    """What a buffer's rows hold."""

    F32 = "f32"
    Q8 = "q8"


class Buffer(msgspec.Struct, frozen=True):
    """A matrix that ops read and write. Ids are unique in a program."""

    id: int
    rows: Dim
    width: int
    kind: BufferKind = BufferKind.F32

    def __hash__(self) -> int:
        # Passes and placement look buffers up tens of thousands of times at start; ids are unique.
        return self.id

    def __str__(self) -> str:
        return f"b{self.id}"

    @property
    def type_text(self) -> str:
        """Kind and shape, as the text form shows them."""
        return f"{self.kind}[{self.rows},{self.width}]"


def are_alike(a: Buffer, b: Buffer) -> bool:
    """Whether two buffers have the same shape."""
    return a.rows is b.rows and a.width == b.width
