"""The requests of a benchmark, from a seed: random token ids to be timed, and short texts to be agreed on."""

import random
from collections.abc import Callable, Sequence

from tiercel.base.errors import ConfigError
from tiercel.bench.contest import Request

# Texts whose greedy continuation even a small model is sure of, so that rounding cannot turn it.
CHECK_TEXTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "2, 4, 6, 8, 10, 12, 14,",
    "A B C D E F G H I J K",
)
CHECK_TOKENS = 16


def check_requests(encode: Callable[[str], Sequence[int]]) -> list[Request]:
    """Return the texts that all contestants continue before anything is timed."""
    return [Request(tuple(encode(text)), CHECK_TOKENS) for text in CHECK_TEXTS]


def random_requests(
    n: int, *, input_len: int, output_len: int, vocab_size: int, seed: int, range_ratio: float = 0.0
) -> list[Request]:
    """Return `n` requests of random token ids.

    Lengths are drawn from `len * (1 - range_ratio)` to `len * (1 + range_ratio)`, at least 1; vLLM's meaning. Ids come
    from the middle of the vocabulary: its ends hold control tokens, which peers treat each in their own way.

    Raises: ConfigError: a number is out of its range.
    """
    for name, value in (("input-len", input_len), ("output-len", output_len), ("number of requests", n)):
        if value < 1:
            raise ConfigError(f"bench: {name}: got {value}; need 1 or more")
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"bench: random-range-ratio: got {range_ratio:g}; need 0 or more, and below 1")
    source = random.Random(seed)
    low, high = vocab_size // 10, max(vocab_size // 10 + 1, vocab_size * 9 // 10)
    return [
        Request(
            tuple(source.randrange(low, high) for _ in range(_drawn(source, input_len, range_ratio))),
            _drawn(source, output_len, range_ratio),
        )
        for _ in range(n)
    ]


def _drawn(source: random.Random, length: int, range_ratio: float) -> int:
    least, most = int(length * (1 - range_ratio)), int(length * (1 + range_ratio))
    return max(1, source.randint(least, most))
