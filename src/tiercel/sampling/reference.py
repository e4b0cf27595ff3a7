"""What sampling means: one row of logits to one token, in numpy. The native sampler meets it bit for bit.

Pure functions. Order: the grammar's mask, allowed ids, logit bias, min_tokens, bad words; penalties; temperature;
min_p, top_k, top_p; draw. Log-probabilities and ranks are those of the logits as given, before all of this.

What is exact, so that no implementation can differ:
- Edits (bias, penalties) are computed in double, rounded to float32, and kept within its finite range; -inf stays -inf.
- After temperature a token has z = (logit - largest) / temperature in float32: z <= 0, and 0 is the likeliest.
  min_p and top_k are thresholds on z; ties at the threshold are kept.
- top_p sums integer weights (`arithmetic.weights`), which has no order; ties are taken in order of token id.
- The drawn token has the largest z + Gumbel noise in double; of equal ones the lowest id wins.

When no token is left, `min_tokens` yields if that leaves one (all that the other constraints allow may be stop tokens);
otherwise the answer is NOTHING_ALLOWED. A NaN or +inf among the logits answers BAD_LOGITS. Both must end the request:
no token is made up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiercel.protocol.params import SamplingParams
from tiercel.sampling import arithmetic, philox

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

BAD_LOGITS = -1
NOTHING_ALLOWED = -2
_F32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Sample:
    """One row's outcome. Without a token, `token` is BAD_LOGITS or NOTHING_ALLOWED and the rest NaN, 0 and empty.

    Shapes:
        top_ids  int32 [N], top_logprobs  f32 [N]   the likeliest by the logits as given, best first, ties by id; or, of
            a sample, those that the request names, in its order
    """

    token: int
    logprob: float
    rank: int
    top_ids: npt.NDArray[np.int32]
    top_logprobs: F32


def sample(
    logits: F32,
    params: SamplingParams,
    history: Sequence[int] | npt.NDArray[np.int32],
    n_prompt: int,
    seed: int,
    stop_ids: Sequence[int] = (),
    *,
    n_top: int = 0,
    mask: npt.NDArray[np.uint32] | None = None,
) -> Sample:
    """Choose the token that follows `history`, whose first `n_prompt` ids are the prompt's.

    Shapes:
        logits  f32 [V]; not changed. Ids outside 0..V in any list are ignored: they cannot be chosen.
        mask    uint32 [ceil(V / 32)]; token i may be chosen if bit i % 32 of word i // 32 is set
    """
    raw = np.asarray(logits, np.float32)
    if not _are_usable(raw):
        return _no_sample(BAD_LOGITS)
    ids = np.asarray(history, np.int64)
    masked = raw if mask is None else np.where(unpacked(mask, len(raw)), raw, np.float32(-np.inf))
    edited = edit(masked, params, ids, n_prompt, stop_ids)
    if not edited.max() > -np.inf:
        edited = edit(masked, params, ids, n_prompt, ())
    if not edited.max() > -np.inf:
        return _no_sample(NOTHING_ALLOWED)
    if params.is_greedy:
        return score(raw, int(edited.argmax()), n_top=n_top, named=params.logprob_token_ids)
    z = keep_likely(tempered(edited, params.temperature), params)
    return score(raw, draw(z, seed, position=len(ids)), n_top=n_top, named=params.logprob_token_ids)


def score(logits: F32, token: int, *, n_top: int = 0, named: Sequence[int] | None = None) -> Sample:
    """Log-probability and rank of a given token, and those of the likeliest `n_top`, or of the first that are named.

    Requires: those are in the vocabulary.
    """
    raw = np.asarray(logits, np.float32)
    if not _are_usable(raw):
        return _no_sample(BAD_LOGITS)
    x = raw.astype(np.float64)
    largest = x.max()
    if largest == -np.inf:
        return _no_sample(NOTHING_ALLOWED)
    log_total = arithmetic.log_of_weight(int(arithmetic.weights(x - largest).sum()))
    with np.errstate(over="ignore"):
        logprobs = ((x - largest) - log_total).astype(np.float32)
    top = np.lexsort((np.arange(len(raw)), -raw)) if named is None else np.asarray(named, np.int64)
    top = top[:n_top]
    rank = 1 + int((raw > raw[token]).sum())
    return Sample(token, float(logprobs[token]), rank, top.astype(np.int32), logprobs[top])


def unpacked(mask: npt.NDArray[np.uint32], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return a mask's bits, one a token, bool [V]."""
    words = np.asarray(mask, "<u4").view(np.uint8)
    return np.unpackbits(words, bitorder="little")[:vocab_size].astype(np.bool_)


def edit(raw: F32, params: SamplingParams, ids: I64, n_prompt: int, stop_ids: Sequence[int]) -> F32:
    """Return the logits after allowed ids, bias, min_tokens, bad words and penalties; -inf for what is forbidden."""
    v = len(raw)
    x = raw.copy()
    if params.allowed_token_ids is not None:
        x = np.full_like(raw, -np.inf)
        allowed = _within(params.allowed_token_ids, v)
        x[allowed] = raw[allowed]
    for token, bias in (params.logit_bias or {}).items():
        if token < v:
            x[token] = _settle(x[token], np.float64(x[token]) + bias)
    output = ids[n_prompt:]
    if len(output) < params.min_tokens:
        x[_within(stop_ids, v)] = -np.inf
    for word in params.bad_words_token_ids:
        n_before = len(word) - 1
        if word[-1] < v and n_before <= len(output) and list(output[len(output) - n_before :]) == list(word[:-1]):
            x[word[-1]] = -np.inf
    return _penalise(x, params, ids, output)


def _penalise(x: F32, params: SamplingParams, ids: I64, output: I64) -> F32:
    if params.repetition_penalty != 1.0:
        seen = _within(ids, len(x))
        wide = x[seen].astype(np.float64)
        by = params.repetition_penalty
        with np.errstate(over="ignore"):
            x[seen] = _settle(x[seen], np.where(wide > 0, wide / by, wide * by))
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        seen, counts = np.unique(output[(output >= 0) & (output < len(x))], return_counts=True)
        wide = x[seen].astype(np.float64)
        x[seen] = _settle(x[seen], (wide - counts * params.frequency_penalty) - params.presence_penalty)
    return x


def tempered(edited: F32, temperature: float) -> F32:
    """Return z of the module docstring."""
    with np.errstate(over="ignore"):
        return np.asarray((edited - edited.max()) / np.float32(temperature), np.float32)


def keep_likely(z: F32, params: SamplingParams) -> F32:
    """Return z with -inf for what min_p, top_k and top_p drop, in that order. At least one token stays."""
    if params.min_p > 0.0:
        z = np.where(z.astype(np.float64) >= arithmetic.log(params.min_p), z, -np.inf).astype(np.float32)
    if 0 < params.top_k < len(z):
        kth = np.sort(z)[len(z) - params.top_k]
        z = np.where(z >= kth, z, -np.inf).astype(np.float32)
    if params.top_p < 1.0:
        z = _nucleus(z, params.top_p)
    return z


def _nucleus(z: F32, top_p: float) -> F32:
    """Keep the shortest run of likeliest tokens whose weight reaches top_p of the whole."""
    weights = arithmetic.weights(z.astype(np.float64))
    # Rounding of so large an integer may ask for more than there is; then all are kept.
    needed = max(1, int(top_p * float(int(weights.sum()))))
    order = np.lexsort((np.arange(len(z)), -z))
    n_before = int((np.cumsum(weights[order]) < needed).sum())
    kept = np.full_like(z, -np.inf)
    chosen = order[: n_before + 1]
    kept[chosen] = z[chosen]
    return kept


def draw(z: F32, seed: int, position: int) -> int:
    """Take each token with probability proportional to exp(z): the largest of z + Gumbel noise."""
    ids = np.flatnonzero(z > -np.inf)
    noise = philox.gumbel(philox.token_words(seed, position, ids))
    return int(ids[(z[ids].astype(np.float64) + noise).argmax()])


def _are_usable(raw: F32) -> bool:
    return bool(raw.max() < np.inf)  # false for a NaN too, which max() hands on


def _no_sample(token: int) -> Sample:
    return Sample(token, float("nan"), 0, np.zeros(0, np.int32), np.zeros(0, np.float32))


def _within(ids: Sequence[int] | I64, v: int) -> I64:
    """Return the distinct ids that the vocabulary holds."""
    some = np.unique(np.asarray(ids, np.int64))
    return some[(some >= 0) & (some < v)]


def _settle(before: F32 | np.float32, after: npt.NDArray[np.float64] | np.float64) -> F32:
    """Round edited logits to float32. An edit does not forbid a token or make it infinite; a forbidden one stays so."""
    bounded = np.clip(after, -_F32_MAX, _F32_MAX)
    return np.where(np.isneginf(before), -np.inf, bounded).astype(np.float32)
