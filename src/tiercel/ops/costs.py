"""What an op costs at least: arithmetic, and bytes that must be read or written once. It knows no machine.

A multiply and an add are two operations. Activations are float32; a weight counts its file bytes; values that stay in a
core's cache between two ops are counted all the same, so `nbytes` is a floor for large steps and an over-count for
small ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tiercel.ops.dims import KEY_SCALE_COLUMNS, Bounds

F32_BYTES = 4


def kv_head_bytes(kv_dtype: str, head_dim: int) -> int:
    """Return the bytes that one token's key and value take in one head: "float32", "float16" or "int8".

    int8 keeps a byte a number, a float16 scale for each 64 columns of the key and one for the value.
    """
    n_scales = -(-head_dim // KEY_SCALE_COLUMNS) + 1
    return {"float32": 8 * head_dim, "float16": 4 * head_dim, "int8": 2 * head_dim + 2 * n_scales}[kv_dtype]


def latent_row_bytes(kv_dtype: str, width: int) -> int:
    """Return the bytes that one token's latent row takes; an int8 pool keeps none."""
    return {"float32": 4, "float16": 2}[kv_dtype] * width


class Cost(NamedTuple):
    """Operations and bytes of one op in one step."""

    flops: int
    nbytes: int

    def __add__(self, other: object) -> "Cost":
        assert isinstance(other, Cost)
        return Cost(self.flops + other.flops, self.nbytes + other.nbytes)


def linear(m: int, n: int, k: int, weight_bytes: int) -> Cost:
    """Return the cost of [m, k] times the transpose of [n, k]."""
    return Cost(2 * m * n * k, (weight_bytes if m else 0) + F32_BYTES * m * (n + k))


def rows(m: int, width_in: int, width_out: int, flops_per_column: int, fixed_bytes: int = 0) -> Cost:
    """Return the cost of an op that reads and writes each row once."""
    return Cost(flops_per_column * m * width_in, F32_BYTES * m * (width_in + width_out) + (fixed_bytes if m else 0))


def experts(m: int, n_experts: int, top_k: int, each: Sequence[tuple[int, int]], width_in: int, width_out: int) -> Cost:
    """Return the cost of m rows through `top_k` of the experts; `each` is (weights, bytes) of an expert's matrices.

    Each expert counts once, however many rows chose it: the bytes are those of rows that spread as wide as they can.
    """
    n_read = min(n_experts, m * top_k)
    flops = 2 * m * top_k * sum(n for n, _ in each)
    return Cost(flops, n_read * sum(size for _, size in each) + F32_BYTES * m * (width_in + width_out + 2 * top_k))


def attention(
    n_queries: int,
    bounds: Bounds,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    window: int,
    kv_dtype: str = "float16",
) -> Cost:
    """Return the cost of attending to `bounds.context_tokens` keys a query, read once for each sequence."""
    context = min(bounds.context_tokens, window) if window else bounds.context_tokens
    q_and_y = 2 * F32_BYTES * n_queries * n_heads * head_dim
    kv = min(n_queries, bounds.n_sequences) * context * n_kv_heads * kv_head_bytes(kv_dtype, head_dim)
    return Cost(4 * n_queries * context * n_heads * head_dim, q_and_y + kv)


def latent_attention(
    n_queries: int, bounds: Bounds, n_heads: int, rank: int, rope: int, kv_dtype: str = "float16"
) -> Cost:
    """Return the cost of attending to latent rows, read once for each sequence."""
    context, width = bounds.context_tokens, rank + rope
    q_and_y = F32_BYTES * n_queries * n_heads * (width + rank)
    rows = min(n_queries, bounds.n_sequences) * context * latent_row_bytes(kv_dtype, width)
    return Cost(2 * n_queries * context * n_heads * (width + rank), q_and_y + rows)
