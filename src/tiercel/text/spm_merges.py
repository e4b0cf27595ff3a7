"""Merges for a SentencePiece vocabulary, which stores scores and no merges.

SentencePiece joins, again and again, the neighbours whose union is the token of best score, the leftmost first among
equals. A BPE model with one merge for every way to cut a token into two tokens, in the order of the tokens' scores,
does the same. Ways that no text can reach are harmless: their two parts never stand side by side.

Where it cannot be the same: two *different* tokens of equal score. SentencePiece takes the leftmost, BPE the lower
rank (here: the lower id). Trained vocabularies have distinct scores.

Every way to cut is found with hashes of all prefixes and suffixes, since slicing a quarter of a million strings in
Python takes a second. Read `tests/unit/text/test_spm_merges.py` for the plain version of both.
"""

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    U64 = npt.NDArray[np.uint64]
    Ints = npt.NDArray[np.int64]

MAX_TOKEN_CHARS: Final = 8192
_MULTIPLIER: Final = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_LENGTH_BITS: Final = 16  # holds MAX_TOKEN_CHARS


def derive_merges(
    tokens: "Sequence[str]", scores: "npt.NDArray[np.float32]", is_joined: "npt.NDArray[np.bool_]"
) -> list[tuple[str, str]]:
    """List the merges of a vocabulary, best first.

    Shapes:
        scores     [V] f32, no NaN
        is_joined  [V] bool; whether merging may use and make the token (not: control, byte and user-defined tokens)

    Requires: tokens are distinct and none is longer than `MAX_TOKEN_CHARS`.
    Cost: linear in the characters of the vocabulary, about 100 bytes each while it runs.
    """
    ids = np.flatnonzero(is_joined)
    words = [tokens[i] for i in ids.tolist()]
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    if not words or int(lengths.max()) < 2:
        return []
    left, right, whole = _cuts(words, lengths)
    # The union's score decides; within one token the longer left part first, which is what "leftmost" does to runs.
    rank = np.empty(len(words), np.int64)
    rank[np.argsort(-scores[ids], kind="stable")] = np.arange(len(words))
    order = np.argsort((rank[whole] << _LENGTH_BITS) - lengths[left], kind="stable")
    name = words.__getitem__
    return list(zip(map(name, left[order].tolist()), map(name, right[order].tolist()), strict=True))


def _cuts(words: list[str], lengths: "Ints") -> "tuple[Ints, Ints, Ints]":
    """Every (left, right, whole) of word indices with words[left] + words[right] == words[whole]."""
    codes = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    span = _SpanHash(codes)
    table = _HashTable(span.of(starts, ends))

    at = np.arange(len(codes), dtype=np.int64)
    whole = np.repeat(np.arange(len(words), dtype=np.int64), lengths)
    inner = at != starts[whole]
    at, whole = at[inner], whole[inner]
    left = table.find(span.of(starts[whole], at))
    hit = left >= 0
    at, whole, left = at[hit], whole[hit], left[hit]
    right = table.find(span.of(at, ends[whole]))
    hit = right >= 0
    return left[hit], right[hit], whole[hit]


class _SpanHash:
    """64-bit hashes of substrings of one text, equal for equal substrings wherever they stand."""

    def __init__(self, codes: "npt.NDArray[np.uint32]") -> None:
        n = len(codes)
        with np.errstate(over="ignore"):
            self._inverse = _powers(pow(_MULTIPLIER, -1, 1 << 64), n + 1)
            self._prefix = np.zeros(n + 1, np.uint64)
            np.cumsum(_mix(codes.astype(np.uint64)) * _powers(_MULTIPLIER, n), out=self._prefix[1:])

    def of(self, start: "Ints", end: "Ints") -> "U64":
        with np.errstate(over="ignore"):
            return (self._prefix[end] - self._prefix[start]) * self._inverse[start]


def _powers(base: int, n: int) -> "U64":
    powers = np.full(n, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _mix(x: "U64") -> "U64":
    """Spread code points over 64 bits (the finaliser of splitmix64), so that spans of few characters do not collide."""
    x = x + np.uint64(_MULTIPLIER)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class _HashTable:
    """Index of a distinct hash, by gathers: a binary search over as many is five times slower.

    Each level is an array indexed by the hash's bits; entries that lose their place to another go to the next level.
    """

    def __init__(self, hashes: "U64") -> None:
        self._hashes = hashes
        self._mask = np.uint64((1 << min(22, max(8, (len(hashes) * 8).bit_length()))) - 1)
        self._levels: list[npt.NDArray[np.int32]] = []
        rest = np.arange(len(hashes), dtype=np.int32)
        # A sixteenth at most is left over by a level, so six hold everything but equal hashes.
        while len(rest) and len(self._levels) < 6:
            level = np.full(int(self._mask) + 1, -1, np.int32)
            place = self._place(hashes[rest], len(self._levels))
            level[place] = rest
            self._levels.append(level)
            rest = rest[level[place] != rest]

    def _place(self, hashes: "U64", level: int) -> "U64":
        return (hashes >> np.uint64(42 - 8 * level)) & self._mask

    def find(self, wanted: "U64") -> "Ints":
        """Give the index of each wanted hash, or -1 where there is none."""
        found = np.full(len(wanted), -1, np.int64)
        rest = np.arange(len(wanted))
        for i, level in enumerate(self._levels):
            index = level[self._place(wanted[rest], i)]
            same = (index >= 0) & (self._hashes[index] == wanted[rest])
            found[rest[same]] = index[same]
            # An empty place ends the search: an entry moves on only when its place is taken.
            rest = rest[(index >= 0) & ~same]
        return found
