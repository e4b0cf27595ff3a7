"""Counter-based noise: a token's draw is a function of the seed, the position and the token id, and of nothing else.

So neither a sequence's batch-mates, nor preemption, nor the tokens that a filter dropped, change it; a draft and its
verification see the same noise. Knows nothing of logits.

Source: Philox4x32 with 10 rounds, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

import numpy as np
import numpy.typing as npt

from tiercel.sampling.arithmetic import F64, log

U32 = npt.NDArray[np.uint32]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_N_ROUNDS = 10


def philox4x32(counter: tuple[U32, int, int, int], key: tuple[int, int]) -> tuple[U32, U32, U32, U32]:
    """Four random words for each first counter word; the other three and the key are the same for all."""
    c0 = counter[0].astype(np.uint64)
    c1, c2, c3 = (np.full_like(c0, word) for word in counter[1:])
    k0, k1 = key
    mask, half = np.uint64(_MASK), np.uint64(32)
    for _ in range(_N_ROUNDS):
        p0, p1 = c0 * np.uint64(_MULTIPLIERS[0]), c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ np.uint64(k0), p1 & mask, (p0 >> half) ^ c3 ^ np.uint64(k1), p0 & mask
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0.astype(np.uint32), c1.astype(np.uint32), c2.astype(np.uint32), c3.astype(np.uint32)


def token_words(seed: int, position: int, token_ids: npt.NDArray[np.int64], *, stream: int = 0, lane: int = 0) -> U32:
    """One random word for each token id.

    Key: the seed's 64 bits in two's complement. Counter: (id // 64 * 16 + id % 16, position, stream, lane), of whose
    four words token `id` takes number id // 16 % 4: 16 neighbours take the same word of 16 counters, which suits vector
    registers. Stream 0 draws tokens; others are independent of it (`spec.verify.Stream`), and lanes of each other.
    """
    ids = np.asarray(token_ids, np.int64)
    key = (seed & _MASK, (seed >> 32) & _MASK)
    first = ((ids >> 6) * 16 + (ids & 15)).astype(np.uint32)
    words = np.stack(philox4x32((first, position & _MASK, stream, lane), key))
    return np.asarray(words[(ids >> 4) & 3, np.arange(len(ids))])


def gumbel(words: U32) -> F64:
    """Turn uniform words into standard Gumbel noise: -log(-log(1 - u)), u = (word + 0.5) / 2**32.

    A small word gives a large value, so that the winners' end has the finest resolution. Never above 22.88.
    """
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    return -log(-log(1.0 - u))
