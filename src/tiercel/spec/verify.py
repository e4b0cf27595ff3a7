"""What verifying drafts means, in numpy: the definitions, over many independent cases at once. Pure functions.

The engine verifies in C++ (`native/src/step_runner.cpp`), by `matching` unless another rule is asked for
(`rejection_sample_method`): a draft is accepted if it is the token that plain decoding draws there. That is greedy
verification and, for drafts that are one token with certainty, standard rejection as well: both accept a draft d with
probability p(d). `standard` and `block` are for drafters with probabilities of their own, and `block` for certain
drafts too.

p is the target's distribution after everything that a request asks for, q the one that the draft was drawn from.

Noise comes in, so that it can be keyed: `uniforms` and `gumbels` are functions of (seed, position, stream). Draft,
acceptance and residual must be independent. Streams that are shared bias the output: with q = (.5, .4, .1) and p = (.3,
.5, .2) a residual drawn with the draft's own Gumbel noise gives (.300, .477, .223). So does noise that blocks share:
`block` looks at all of a block's noise, so that of drafts and of acceptance is keyed by the block and the draft's place
in it. Keyed by the draft's own position, the next block, which drafts the same positions again, would find noise of
which it is known what it was not (`tests/unit/spec/test_verify.py`).

Source: Leviathan et al. 2023 (standard); Sun et al. 2024, arXiv 2403.10444 (block).
"""

import enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiercel.sampling import philox

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

NO_DRAFT = -1  # in place of a draft: always rejected, and the token is drawn from p itself


class Stream(enum.IntEnum):
    """What noise is for; each is independent of the others at the same seed and position."""

    TARGET = 0  # plain decoding's, `matching`'s and the bonus token's
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


class Verified(NamedTuple):
    """What came out of each case.

    Shapes:
        token_ids   int64 [N, K + 1]; those that are emitted, then -1
        n_accepted  int64 [N]; drafts that were accepted; one token more is emitted
    """

    token_ids: I64
    n_accepted: I64


def gumbels(seed: int, position: int, stream: Stream, token_ids: I64, *, place: int = 0) -> F64:
    """Gumbel noise of some tokens at a position; of drafts, at their block's first, and by their place in it."""
    return philox.gumbel(philox.token_words(seed, position, token_ids, stream=int(stream), lane=place))


def uniforms(seed: int, position: int, places: I64) -> F64:
    """Uniform noise for acceptance, in (0, 1), of drafts at some places of the block that begins at `position`."""
    words = philox.token_words(seed, position, places, stream=int(Stream.ACCEPT))
    return np.asarray((words.astype(np.float64) + 0.5) * 2.0**-32)


def matching(chosen: I64, drafts: I64) -> Verified:
    """Accept the drafts that are what plain decoding chose.

    Shapes:
        chosen  int64 [N, K + 1]; the token of each row, drawn as if the drafts before it were the sequence
        drafts  int64 [N, K]
    """
    n = _n_leading(chosen[:, :-1] == drafts)
    return _emitted(drafts, n, chosen[np.arange(len(n)), n])


def greedy(logits: F64, drafts: I64) -> Verified:
    """Accept the drafts that are the likeliest.

    Shapes: logits [N, K + 1, V]; drafts int64 [N, K]
    """
    return matching(logits.argmax(axis=-1), drafts)


def standard(p: F64, q: F64 | None, drafts: I64, accept: F64, residual: F64) -> Verified:
    """Accept each draft d with probability min(1, p(d) / q(d)); instead of the first that is not, draw from max(p - q,
    0).

    Shapes:
        p         [N, K + 1, V]
        q         [N, K, V]; None: each draft was certain
        drafts    int64 [N, K]
        accept    [N, K]; uniform
        residual  [N, K + 1, V]; Gumbel noise
    """
    q = _certain(drafts, p.shape[2]) if q is None else q
    is_draft = drafts != NO_DRAFT
    p_draft, q_draft = _of_drafts(p[:, :-1], drafts), _of_drafts(q, drafts)
    n = _n_leading(is_draft & (accept * q_draft < p_draft))
    case = np.arange(len(n))
    here = p[case, n]
    is_rejected = np.zeros(len(n), np.bool_)
    beyond = np.zeros_like(here)
    some = n < drafts.shape[1]
    is_rejected[some] = is_draft[case[some], n[some]]
    beyond[is_rejected] = q[case[is_rejected], n[is_rejected]]
    return _emitted(drafts, n, _draw(np.maximum(here - beyond, 0.0), here, residual[case, n]))


def block(p: F64, q: F64 | None, drafts: I64, accept: F64, residual: F64) -> Verified:
    """Accept the longest run of drafts whose joint acceptance succeeds; never fewer on average than `standard`.

    Shapes: as `standard`'s. Requires: no draft is NO_DRAFT.
    """
    q = _certain(drafts, p.shape[2]) if q is None else q
    n_cases, n_drafts = drafts.shape
    p_draft, q_draft = _of_drafts(p[:, :-1], drafts), _of_drafts(q, drafts)
    joint = np.ones((n_cases, n_drafts + 1))
    for i in range(n_drafts):
        joint[:, i + 1] = np.minimum(joint[:, i] * p_draft[:, i] / q_draft[:, i], 1.0)
    n = np.zeros(n_cases, np.int64)
    for i in range(1, n_drafts + 1):
        if i == n_drafts:
            chance = joint[:, i]
        else:
            left = np.maximum(joint[:, i, None] * p[:, i] - q[:, i], 0.0).sum(axis=-1)
            whole = left + 1.0 - joint[:, i]
            chance = np.where(whole > 0.0, left / np.where(whole > 0.0, whole, 1.0), 1.0)
        n[accept[:, i - 1] < chance] = i  # the longest that succeeds, whatever shorter ones did
    case = np.arange(n_cases)
    here = p[case, n]
    left = here.copy()
    some = n < n_drafts
    left[some] = np.maximum(joint[case[some], n[some], None] * here[some] - q[case[some], n[some]], 0.0)
    return _emitted(drafts, n, _draw(left, here, residual[case, n]))


def _certain(drafts: I64, vocab_size: int) -> F64:
    return np.asarray(drafts[..., None] == np.arange(vocab_size), np.float64)


def _of_drafts(distribution: F64, drafts: I64) -> F64:
    """Take each draft's own probability, [N, K]."""
    ids = np.maximum(drafts, 0)[..., None]
    return np.asarray(np.take_along_axis(distribution, ids, axis=-1)[..., 0])


def _n_leading(is_accepted: npt.NDArray[np.bool_]) -> I64:
    return np.asarray(np.cumprod(is_accepted, axis=1).sum(axis=1), np.int64)


def _draw(weights: F64, fallback: F64, noise: F64) -> I64:
    """Draw in proportion to `weights`; from `fallback` where rounding left none."""
    some = np.where(weights.sum(axis=-1, keepdims=True) > 0.0, weights, fallback)
    with np.errstate(divide="ignore"):
        return np.asarray((np.log(some) + noise).argmax(axis=-1), np.int64)


def _emitted(drafts: I64, n: I64, last: I64) -> Verified:
    n_cases, n_drafts = drafts.shape
    ids = np.full((n_cases, n_drafts + 1), -1, np.int64)
    ids[:, :-1] = np.where(np.arange(n_drafts) < n[:, None], drafts, -1)
    ids[np.arange(n_cases), n] = last
    return Verified(ids, n)
