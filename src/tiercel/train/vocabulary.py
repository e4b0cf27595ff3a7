"""Which tokens a drafter can say, and which it remembers as the token before. Counted over the texts it learns from."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tiercel.train.texts import Conversation

Ints = npt.NDArray[np.int64]


def count_tokens(texts: Sequence[Conversation], vocab: int) -> Ints:
    """Return how often each token is in the answers, int64 [V]."""
    counts = np.zeros(vocab, np.int64)
    for one in texts:
        counts += np.bincount(one.token_ids[one.answer_start :], minlength=vocab)
    return counts


def draft_ids(counts: Ints, n: int) -> Ints:
    """Return the `n` most frequent tokens, ascending; of equally frequent ones, the smaller ids.

    The offsets of a published `d2t` are these minus 0 .. n - 1.
    """
    order = np.lexsort((np.arange(len(counts)), -counts))
    return np.sort(order[: min(n, len(counts))])


def coverage(counts: Ints, ids: Ints) -> float:
    """Return which part of the counted tokens is among `ids`."""
    return float(counts[ids].sum() / max(int(counts.sum()), 1))


class Before:
    """Rows of the table that is looked up by the token before. Row 0 is that of all tokens too rare to have one.

    The published table has a row for each token; a small one is what can be learnt from these texts.
    """

    def __init__(self, counts: Ints, n_seen_min: int = 3) -> None:
        own = np.flatnonzero(counts >= n_seen_min)
        self.row_of = np.zeros(len(counts), np.int64)
        self.row_of[own] = 1 + np.arange(len(own))
        self.n_rows = 1 + len(own)

    def whole(self, table: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the published table, [V, r], of the small one."""
        return table[self.row_of]
