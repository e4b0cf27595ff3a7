"""What one step learns from: a few texts, and places in their answers where a drafter would be asked. Knows no torch.

A place p is the position of a known token, the anchor. Slot k = 0 .. K-1 foretells the token at p + k + 1; the token
before it is at p + k, and so is the row by which the target itself foretold it. Which texts and places a step gets is a
function of the seed and the step's number.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiercel.train.taps import TapFiles
from tiercel.train.texts import Conversation

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Batch(NamedTuple):
    """Texts and anchors of one step.

    Shapes (B texts, A anchors each, K slots, W columns of joined taps):
        taps      float32 [N, W]     context rows of all texts, one text after the other, as the target made them
        next_ids  int64 [N]          the token after each context row
        lengths   int64 [B]          of each text's context; N is their sum
        anchors   int64 [B, A]       positions; each below or at its text's length
        tokens    int64 [B, A, K+1]  the anchor's token and those after it; 0 past the end
        teacher   float32 [B, A, K, E]  the target's final normed rows; zeros past the end
        is_valid  bool [B, A, K]     the slot's token is in the text
    """

    taps: Floats
    next_ids: Ints
    lengths: Ints
    anchors: Ints
    tokens: Ints
    teacher: Floats
    is_valid: Bools


def gather(texts: Sequence[Conversation], anchors: Sequence[Ints], files: TapFiles, n_slots: int) -> Batch:
    """Put texts and their anchors (as many of each) together."""
    hidden = files.hidden
    taps, next_ids, lengths, tokens, teachers, valid = [], [], [], [], [], []
    for text, places in zip(texts, anchors, strict=True):
        rows = files.rows(text)
        n, n_context = len(text.token_ids), int(places.max())
        at = places[:, None] + np.arange(n_slots + 1)
        is_there = at < n
        inside = np.minimum(at, n - 1)
        found = np.where(is_there, text.token_ids[inside], 0)
        # The rows that foretold: one before each foretold token, which is there if that is.
        teacher = rows[inside[:, :-1]][..., -hidden:].astype(np.float32)
        teacher *= is_there[:, 1:, None]
        taps.append(rows[:n_context, :-hidden].astype(np.float32))
        next_ids.append(text.token_ids[1 : n_context + 1].astype(np.int64))
        lengths.append(n_context)
        tokens.append(found)
        teachers.append(teacher)
        valid.append(is_there[:, 1:])
    return Batch(
        np.concatenate(taps),
        np.concatenate(next_ids),
        np.array(lengths, np.int64),
        np.stack([np.asarray(places, np.int64) for places in anchors]),
        np.stack(tokens).astype(np.int64),
        np.stack(teachers),
        np.stack(valid),
    )


class Sampler:
    """Chooses texts, longer answers more often, and anchors in them."""

    def __init__(self, texts: Sequence[Conversation], *, n_texts: int, n_anchors: int, seed: int) -> None:
        self._texts = [one for one in texts if len(one.token_ids) - one.answer_start >= 2]
        weights = np.array([len(one.token_ids) - one.answer_start - 1 for one in self._texts], np.float64)
        self._chances = weights / weights.sum()
        self._n_texts, self._n_anchors, self._seed = min(n_texts, len(self._texts)), n_anchors, seed

    def choose(self, step: int) -> tuple[list[Conversation], list[Ints]]:
        """Return the step's texts, and the anchors of each, ascending."""
        rng = np.random.default_rng([self._seed, 2, step])
        chosen = rng.choice(len(self._texts), self._n_texts, replace=False, p=self._chances)
        texts = [self._texts[i] for i in chosen]
        anchors = []
        for text in texts:
            places = np.arange(text.answer_start, len(text.token_ids) - 1)
            found = rng.choice(places, self._n_anchors, replace=len(places) < self._n_anchors)
            anchors.append(np.sort(found))
        return texts, anchors
