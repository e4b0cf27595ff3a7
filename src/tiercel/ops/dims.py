"""The three dimensions of a program that are free until a step is run, the bounds that pin them for planning, and the
numbers that definitions and programs share.
"""

import enum

import msgspec

from tiercel.base.errors import ShapeError

ACTIVATION_GROUP = 32
"""Columns that share one scale when activations are rounded to int8; the group of the formats they meet."""

KEY_SCALE_COLUMNS = 64
"""Columns of a key that share one scale in an int8 pool; a value has one scale."""

MAX_RESIDUALS = 64
"""The most rows that one op mixes; the native kernel's limit."""

UNARY: tuple[str, ...] = ("gelu", "gelu_tanh", "relu", "silu", "tanh")
"""The names `activate` accepts."""


class Dim(enum.StrEnum):
    """A free dimension: how many rows a value has. All else is known when a program is recorded."""

    TOKENS = "T"
    SEQUENCES = "S"
    ROWS = "R"


class Bounds(msgspec.Struct, frozen=True):
    """Values for the free dimensions: the largest ones to plan buffers for, or one step's to count its cost.

    `context_tokens` is the mean number of keys that a query sees; only costs read it.
    """

    n_tokens: int
    n_sequences: int
    n_rows: int
    context_tokens: int = 0

    def __post_init__(self) -> None:
        values = (self.n_tokens, self.n_sequences, self.n_rows, self.context_tokens)
        if min(values) < 0 or self.n_rows > self.n_tokens:
            raise ShapeError(
                f"ops.dims: got T={self.n_tokens}, S={self.n_sequences}, R={self.n_rows}, context={self.context_tokens}"
                f"; numbers >= 0 with R <= T are needed"
            )

    def of(self, dim: Dim) -> int:
        """Return the value of one dimension."""
        if dim is Dim.TOKENS:
            return self.n_tokens
        return self.n_sequences if dim is Dim.SEQUENCES else self.n_rows
