"""What drafts are worth, computed exactly from greedy texts, and how well confidences foretell it. Knows no torch.

Greedy speculative decoding emits the target's greedy text whatever is drafted. So where a drafter was asked after every
position, the steps it would take are a walk: at position i, m drafts agree with the text, and the next step is at i + m
+ 1. Source: walk and sequential temperatures as in DSpark (Cheng et al. 2026, arXiv:2607.05147), section 5.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiercel.spec.drafters.ngram import NgramDrafter
from tiercel.train.texts import Conversation

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_TEMPERATURES = np.exp(np.linspace(np.log(0.25), np.log(8.0), 41))
_N_BINS = 10


class Walk(NamedTuple):
    """The steps of one or more texts. `survival[k]` is the part of steps whose draft k and all before it agreed."""

    n_tokens: int
    n_steps: int
    survival: Floats
    n_asked: Ints

    @property
    def tokens_a_step(self) -> float:
        """Tokens emitted by a step, the target's own included."""
        return self.n_tokens / max(self.n_steps, 1)


class Drafted(NamedTuple):
    """Drafts after every anchor `answer_start .. len - 2` of one text: tokens [A, K], confidences as logits [A, K]."""

    text: Conversation
    tokens: Ints
    confidences: Floats


def n_agreeing(drafted: Drafted) -> Ints:
    """Return how many drafts agree with the text before the first that does not, for each anchor; [A]."""
    found: Ints = matches(drafted).cumprod(axis=1).sum(axis=1)
    return found


def matches(drafted: Drafted) -> Ints:
    """Return whether each draft is the text's token, 0 where the text has ended; int64 [A, K]."""
    ids, start = drafted.text.token_ids, drafted.text.answer_start
    n_anchors, n_slots = drafted.tokens.shape
    at = start + np.arange(n_anchors)[:, None] + 1 + np.arange(n_slots)
    is_there = at < len(ids)
    right = is_there & (drafted.tokens == ids[np.minimum(at, len(ids) - 1)])
    found: Ints = right.astype(np.int64)
    return found


def walk(drafts: Sequence[Drafted], n_slots: int | None = None) -> Walk:
    """Walk all texts with `n_slots` drafts a step, or all there are."""
    k = min(n_slots or 1 << 30, max(one.tokens.shape[1] for one in drafts))
    agreed, asked = np.zeros(k, np.int64), np.zeros(k, np.int64)
    n_tokens = n_steps = 0
    for one in drafts:
        agreeing = np.minimum(n_agreeing(one), k)
        i, n = 0, len(agreeing)
        while i < n:
            m = int(agreeing[i])
            agreed[:m] += 1
            asked[: min(k, n - i)] += 1
            n_steps += 1
            n_tokens += m + 1
            i += m + 1
        # A last step that agrees to the text's end has no token of the target's own behind it.
        n_tokens -= i - n
    return Walk(n_tokens, n_steps, agreed / np.maximum(asked, 1), asked)


def ngram_drafts(text: Conversation, n_slots: int, *, n_min: int, n_max: int) -> Drafted:
    """Return what prompt lookup would draft after each anchor; -1 where it has nothing."""
    ids = text.token_ids.tolist()
    sequence = NgramDrafter(n_min=n_min, n_max=n_max).begin(ids[: text.answer_start + 1], shares=False)
    tokens = np.full((len(ids) - 1 - text.answer_start, n_slots), -1, np.int64)
    for row, end in enumerate(range(text.answer_start + 1, len(ids))):
        found = sequence.propose(n_slots)
        if found is not None:
            tokens[row, : len(found.token_ids)] = found.token_ids
        sequence.extend(ids[end : end + 1])
    return Drafted(text, tokens, np.zeros(tokens.shape))


class Calibration(NamedTuple):
    """Temperatures of each slot's confidence, and the error of the product of all up to it without them."""

    temperatures: Floats
    error_before: Floats

    def judge(self, drafts: Sequence[Drafted]) -> Floats:
        """Return the error with them, [K], on texts that they were perhaps not chosen on."""
        logits, came, is_told = _stacked(drafts)
        products = _sigmoid(logits / self.temperatures).cumprod(axis=1)
        return _errors(products, came, is_told)


def calibrate(drafts: Sequence[Drafted]) -> Calibration:
    """Choose each slot's temperature, left to right, by the error of the product of confidences up to it."""
    logits, came, is_told = _stacked(drafts)
    n_slots = logits.shape[1]
    chosen, product = np.ones(n_slots), np.ones(len(logits))
    for k in range(n_slots):
        told = is_told[:, k]
        errors = [expected_error((product * _sigmoid(logits[:, k] / t))[told], came[told, k]) for t in _TEMPERATURES]
        chosen[k] = _TEMPERATURES[int(np.argmin(errors))]
        product = product * _sigmoid(logits[:, k] / chosen[k])
    return Calibration(chosen, _errors(_sigmoid(logits).cumprod(axis=1), came, is_told))


def _stacked(drafts: Sequence[Drafted]) -> tuple[Floats, Ints, npt.NDArray[np.bool_]]:
    """Return all anchors' confidences, whether each draft and all before it came, and whether the text tells."""
    return (
        np.concatenate([one.confidences for one in drafts]),
        np.concatenate([matches(one).cumprod(axis=1) for one in drafts]),
        np.concatenate([_is_told(one) for one in drafts]),
    )


def _errors(products: Floats, came: Ints, is_told: npt.NDArray[np.bool_]) -> Floats:
    n_slots = products.shape[1]
    return np.array([expected_error(products[is_told[:, k], k], came[is_told[:, k], k]) for k in range(n_slots)])


def expected_error(chances: Floats, came: Ints) -> float:
    """Return the expected calibration error: how far chances are from what came, over bins of equal width."""
    if not len(chances):
        return 0.0
    bins = np.minimum((chances * _N_BINS).astype(np.int64), _N_BINS - 1)
    sums = np.bincount(bins, chances - came, minlength=_N_BINS)
    return float(np.abs(sums).sum() / len(chances))


def _is_told(drafted: Drafted) -> npt.NDArray[np.bool_]:
    n_anchors, n_slots = drafted.tokens.shape
    found: npt.NDArray[np.bool_] = np.arange(n_anchors)[:, None] + np.arange(n_slots) < n_anchors
    return found


def _sigmoid(x: Floats) -> Floats:
    y: Floats = 1.0 / (1.0 + np.exp(-np.clip(x, -50.0, 50.0)))
    return y
