"""What a drafter is worth on texts that it did not learn from. Needs torch; the arithmetic is `walk`'s."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.train.batches import gather
from tiercel.train.drafter import Drafter, Tensors
from tiercel.train.taps import TapFiles
from tiercel.train.texts import Conversation
from tiercel.train.walk import Drafted, calibrate, ngram_drafts, walk

_N_ANCHORS = 64  # at once: their masks and logits are the memory this takes


def held_out(texts: Sequence[Conversation]) -> list[Conversation]:
    """Return the greedy texts that are not learned from, and have an answer to walk through."""
    return [one for one in texts if one.is_held_out and one.is_greedy and len(one.token_ids) - one.answer_start >= 2]


def draft_texts(
    drafter: Drafter, params: Mapping[str, Tensor], texts: Sequence[Conversation], files: TapFiles
) -> list[Drafted]:
    """Draft after every position of the answers."""
    drafts = []
    for text in texts:
        with torch.no_grad():
            found = [drafter.draft(params, batch) for batch in _batches(drafter, text, files)]
        tokens = np.concatenate([tokens[0].cpu().numpy() for tokens, _ in found])
        confidences = np.concatenate([confidences[0].double().cpu().numpy() for _, confidences in found])
        drafts.append(Drafted(text, tokens, confidences))
    return drafts


def mean_overlaps(
    drafter: Drafter, params: Mapping[str, Tensor], texts: Sequence[Conversation], files: TapFiles
) -> npt.NDArray[np.float64]:
    """Return how much of the target's distribution the drafter's has at each slot, the texts' own tokens before it;
    [K].
    """
    total, count = np.zeros(drafter.shape.n_slots), np.zeros(drafter.shape.n_slots)
    for text in texts:
        for batch in _batches(drafter, text, files):
            with torch.no_grad():
                overlaps = drafter.overlaps(params, batch) * batch.is_valid
            total += overlaps[0].sum(0).cpu().numpy()
            count += batch.is_valid[0].sum(0).cpu().numpy()
    return total / np.maximum(count, 1)


def _batches(drafter: Drafter, text: Conversation, files: TapFiles) -> Iterator[Tensors]:
    places = np.arange(text.answer_start, len(text.token_ids) - 1)
    for group in np.split(places, range(_N_ANCHORS, len(places), _N_ANCHORS)):
        yield drafter.tensors(gather([text], [group], files, drafter.shape.n_slots))


def look(
    drafter: Drafter, params: Mapping[str, Tensor], texts: Sequence[Conversation], files: TapFiles
) -> dict[str, Any]:
    """Measure quickly: what a report draws over the steps."""
    found = walk(draft_texts(drafter, params, texts, files))
    return {
        "tokens_a_step": round(found.tokens_a_step, 4),
        "first_slot": round(float(found.survival[0]), 4),
    }


def measure(
    drafter: Drafter, params: Mapping[str, Tensor], texts: Sequence[Conversation], files: TapFiles
) -> dict[str, Any]:
    """Measure everything that a report tells.

    Returns: plain numbers and lists, ready for JSON. `tokens_a_step` by the number of drafts, `survival` and `overlap`
    by slot, `ngram` by the least length that is looked up, and the calibration, which is fitted on half of the texts
    and judged on the others.
    """
    drafts, overlap = draft_texts(drafter, params, texts, files), mean_overlaps(drafter, params, texts, files)
    n_slots = drafter.shape.n_slots
    whole = walk(drafts)
    fitted = calibrate(drafts[::2])
    ngram = {}
    for n_min in (2, 3, 5):
        looked_up = [ngram_drafts(one, n_slots, n_min=n_min, n_max=5) for one in texts]
        ngram[str(n_min)] = round(walk(looked_up).tokens_a_step, 4)
    return {
        "n_texts": len(drafts),
        "n_tokens": whole.n_tokens,
        "n_steps": whole.n_steps,
        "tokens_a_step": {str(k): round(walk(drafts, k).tokens_a_step, 4) for k in range(1, n_slots + 1)},
        "tokens_a_step_95": [round(x, 4) for x in _spread(drafts)],
        "survival": [round(float(x), 4) for x in whole.survival],
        "overlap": [round(float(x), 4) for x in overlap],
        "ngram_tokens_a_step": ngram,
        "confidence": {
            "temperatures": [round(float(x), 4) for x in fitted.temperatures],
            "error_before": [round(float(x), 4) for x in fitted.error_before],
            "error_after": [round(float(x), 4) for x in fitted.judge(drafts[1::2])],
        },
    }


def _spread(drafts: Sequence[Drafted], n_draws: int = 500) -> tuple[float, float]:
    """Return between which numbers 95 % of the means of resampled texts lie."""
    rng = np.random.default_rng(0)
    walks = [walk([one]) for one in drafts]
    tokens, steps = np.array([one.n_tokens for one in walks]), np.array([one.n_steps for one in walks])
    drawn = rng.integers(0, len(walks), (n_draws, len(walks)))
    low, high = np.quantile(tokens[drawn].sum(1) / steps[drawn].sum(1), [0.025, 0.975])
    return float(low), float(high)
