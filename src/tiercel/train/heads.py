"""What makes tokens of a drafter's rows, in torch: losses while training, and greedy picks slot by slot. Needs torch.

`Vocabulary` holds what is the target's and is never trained: its embedding, and the rows of its head that the drafter
can say. DSpark adds to a slot's logits a bias by the token before; DFlash2 adds to each of a slot's best candidates the
score of the edge from the token before.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from tiercel.train.network import Params
from tiercel.train.shape import DraftShape

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

DECAY = 4.0  # slots: a slot counts exp(-k / DECAY)
_N_ROWS = 64  # of the draft vocabulary's 8192 columns: 2 MiB each array
_TINY = 1e-9


class Vocabulary(NamedTuple):
    """The target's share.

    Shapes:
        embedding  float32 [V, E]
        head       float32 [V_draft, E]
        ids        int64 [V_draft]   target ids of the drafter's own
        own_of     int64 [V]         the reverse; -1 for what the drafter cannot say
        row_before int64 [V]         rows of the table by the token before
    """

    embedding: Tensor
    head: Tensor
    ids: Tensor
    own_of: Tensor
    row_before: Tensor
    softcap: float

    @staticmethod
    def of(embedding: Floats, head: Floats, ids: Ints, row_before: Ints, softcap: float, device: str) -> "Vocabulary":
        """Put the target's whole tables, [V, E], and the ids that can be drafted on a device."""
        own_of = np.full(len(embedding), -1, np.int64)
        own_of[ids] = np.arange(len(ids))
        arrays = (embedding, np.ascontiguousarray(head[ids]), ids, own_of, row_before)
        table, rows, own, reverse, row = (torch.from_numpy(one).to(device) for one in arrays)
        return Vocabulary(table, rows, own, reverse, row, softcap)

    def teacher(self, hidden: Tensor) -> Tensor:
        """Return the target's logits of what the drafter can say, of its final rows."""
        logits = F.linear(hidden, self.head)
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


class Slots(NamedTuple):
    """What slots are trained on: [R, K] of R anchors; `before` and `labels` are target ids, `teacher` logits."""

    before: Tensor
    labels: Tensor
    teacher: Tensor
    weights: Tensor

    @staticmethod
    def of(tokens: Tensor, is_valid: Tensor, teacher: Tensor) -> "Slots":
        """Make them of tokens [R, K + 1], the anchor's first."""
        decay = torch.exp(-torch.arange(is_valid.shape[1], device=tokens.device) / DECAY)
        weights = is_valid * decay
        return Slots(tokens[:, :-1], tokens[:, 1:], teacher, weights / weights.sum().clamp_min(_TINY))


class Loss(NamedTuple):
    """A step's loss, and what is worth a look: mean overlap of the first slot, and of all."""

    total: Tensor
    first_overlap: Tensor
    overlap: Tensor


def divergence(logits: Tensor, teacher: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss between distributions, KL at first and total variation as they meet, and the slots' overlaps.

    The overlap, the sum of the smaller of both probabilities, is the chance that a sampled draft is accepted; it takes
    no part in the gradient. Its derivative is taken where the draft's probability is the smaller one.

    Shapes: logits, teacher  [R, K, V]; weights  [R, K], whose sum is 1
    Cost: the gradient is made here, some rows at a time, so that what is between stays in the processor's cache: a
        third of the step less than by torch's own derivatives, on two cores.
    Source: KL early and TV late by exp(-3 overlap): measured; see `docs/drafters.md`.
    """
    logits = logits.to(teacher.dtype)
    flat, target = logits.detach().flatten(0, 1), teacher.flatten(0, 1)
    w = weights.flatten().unsqueeze(-1)
    kl, overlap = torch.empty_like(w), torch.empty_like(w)
    pieces = [slice(i, i + _N_ROWS) for i in range(0, len(flat), _N_ROWS)]
    with torch.no_grad():
        for rows in pieces:
            log_t, log_d = F.log_softmax(target[rows], -1), F.log_softmax(flat[rows], -1)
            t, d = log_t.exp(), log_d.exp()
            torch.sum(torch.minimum(t, d), -1, keepdim=True, out=overlap[rows])
            torch.sum(t * (log_t - log_d), -1, keepdim=True, out=kl[rows])
        share = torch.exp(-3.0 * (overlap * w).sum())
        value = (w * (share * kl + (1.0 - share) * (1.0 - overlap))).sum()
        gradient = torch.empty_like(flat)
        for rows in pieces:
            t, d = target[rows].softmax(-1), flat[rows].softmax(-1)
            smaller = torch.where(d < t, d, 0.0)
            by_overlap = smaller - d * smaller.sum(-1, keepdim=True)
            torch.mul(share * (d - t) - (1.0 - share) * by_overlap, w[rows], out=gradient[rows])
    # A product whose derivative is the gradient, and whose value is taken away again.
    product = torch.dot(logits.flatten(), gradient.flatten())
    return value + (product - product.detach()), overlap.view(weights.shape)


class MarkovHead:
    """DSpark's: `logits = U + W2 W1[before]`, and a confidence of [h ; W1[before]]."""

    def __init__(self, shape: DraftShape, vocabulary: Vocabulary) -> None:
        self.shape, self.vocabulary = shape, vocabulary

    def loss(self, params: Params, h: Tensor, slots: Slots) -> Loss:
        """Return the loss of rows h [R, K, E]."""
        before = self._before(params, slots.before)
        logits = F.linear(h, self.vocabulary.head) + F.linear(before, params["markov_head.markov_w2.weight"])
        total, overlap = divergence(logits, slots.teacher, slots.weights)
        confidence = self._confidence(params, h, before)
        surprise = F.binary_cross_entropy_with_logits(confidence, overlap, reduction="none")
        total = total + (slots.weights * surprise).sum()
        return Loss(total, *_shown(overlap, slots.weights))

    def logits(self, params: Params, h: Tensor, before: Tensor) -> Tensor:
        """Return the logits after known tokens `before`; those that cannot be drafted are -inf."""
        bias = F.linear(self._before(params, before), params["markov_head.markov_w2.weight"])
        return self._among_best(F.linear(h, self.vocabulary.head)) + bias

    def pick(self, params: Params, h: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Return greedy drafts, target ids [R, K], and the logits of their confidences."""
        unary = self._among_best(F.linear(h, self.vocabulary.head))
        before, tokens, confidences = anchors, [], []
        for k in range(h.shape[1]):
            row = self._before(params, before)
            logits = unary[:, k] + F.linear(row, params["markov_head.markov_w2.weight"])
            confidences.append(self._confidence(params, h[:, k], row))
            before = self.vocabulary.ids[logits.argmax(-1)]
            tokens.append(before)
        return torch.stack(tokens, 1), torch.stack(confidences, 1)

    def _among_best(self, unary: Tensor) -> Tensor:
        topk = self.shape.topk
        if not 0 < topk < unary.shape[-1]:
            return unary
        values, best = unary.topk(topk, dim=-1)
        return torch.full_like(unary, -torch.inf).scatter(-1, best, values)

    def _before(self, params: Params, token_ids: Tensor) -> Tensor:
        return F.embedding(self.vocabulary.row_before[token_ids], params["markov_head.markov_w1.weight"])

    def _confidence(self, params: Params, h: Tensor, before: Tensor) -> Tensor:
        weight, bias = params["confidence_head.proj.weight"], params["confidence_head.proj.bias"]
        return F.linear(torch.cat([h, before], -1), weight, bias).squeeze(-1).float()


class SelectorHead:
    """DFlash2's: of each slot's `topk` best, the best by `U[c] + sum_r A[before, r] (P h)_r B[c, r]`."""

    def __init__(self, shape: DraftShape, vocabulary: Vocabulary) -> None:
        self.shape, self.vocabulary = shape, vocabulary

    def loss(self, params: Params, h: Tensor, slots: Slots) -> Loss:
        """Return the loss of rows h [R, K, E]."""
        unary = F.linear(h, self.vocabulary.head)
        total, overlap = divergence(unary, slots.teacher, slots.weights)
        best = slots.teacher.argmax(-1, keepdim=True)
        candidates = unary.detach().topk(self.shape.topk, dim=-1).indices
        is_there = (candidates == best).any(-1, keepdim=True)
        # A best token that is not among them takes the weakest one's place.
        last = torch.where(is_there, candidates[..., -1:], best)
        candidates = torch.cat([candidates[..., :-1], last], -1)
        scores = self._scores(params, h, slots.before, unary.gather(-1, candidates), candidates)
        label = (candidates == best).int().argmax(-1)
        surprise = F.cross_entropy(scores.flatten(0, 1), label.flatten(), reduction="none").view_as(label)
        return Loss(total + (slots.weights * surprise).sum(), *_shown(overlap, slots.weights))

    def logits(self, params: Params, h: Tensor, before: Tensor) -> Tensor:
        """Return the logits after known tokens `before`: those of the candidates, and of nothing else."""
        unary = F.linear(h, self.vocabulary.head)
        values, candidates = unary.topk(self.shape.topk, dim=-1)
        scores = self._scores(params, h, before, values, candidates)
        return torch.full_like(unary, -torch.inf).scatter(-1, candidates, scores)

    def pick(self, params: Params, h: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Return greedy drafts, target ids [R, K], and the logits of their probabilities among the candidates."""
        values, candidates = F.linear(h, self.vocabulary.head).topk(self.shape.topk, dim=-1)
        before, tokens, confidences = anchors, [], []
        for k in range(h.shape[1]):
            scores = self._scores(params, h[:, k], before, values[:, k], candidates[:, k])
            best = scores.argmax(-1, keepdim=True)
            chance = scores.softmax(-1).gather(-1, best).squeeze(-1)
            confidences.append(torch.logit(chance, eps=1e-6))
            before = self.vocabulary.ids[candidates[:, k].gather(-1, best).squeeze(-1)]
            tokens.append(before)
        return torch.stack(tokens, 1), torch.stack(confidences, 1)

    def _scores(self, params: Params, h: Tensor, before: Tensor, values: Tensor, candidates: Tensor) -> Tensor:
        name = "candidate_selector."
        a = F.embedding(self.vocabulary.row_before[before], params[f"{name}predecessor_codebook"])
        edge = a * F.linear(h, params[f"{name}hidden_projection.weight"])
        b = F.embedding(candidates, params[f"{name}successor_codebook"])
        return values.float() + (b @ edge.unsqueeze(-1)).squeeze(-1)


class PlainHead:
    """EAGLE-3's: the likeliest of what the drafter can say."""

    def __init__(self, shape: DraftShape, vocabulary: Vocabulary) -> None:
        self.shape, self.vocabulary = shape, vocabulary

    def loss(self, params: Params, h: Tensor, slots: Slots) -> Loss:
        """Return the loss of rows h [R, K, E]."""
        total, overlap = divergence(self.logits(params, h, slots.before), slots.teacher, slots.weights)
        return Loss(total, *_shown(overlap, slots.weights))

    def logits(self, params: Params, h: Tensor, before: Tensor) -> Tensor:
        """Return the logits; tokens before are in the rows already."""
        del params, before
        return F.linear(h, self.vocabulary.head)

    def pick_one(self, params: Params, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return one slot's greedy drafts [R], and the logits of their probabilities."""
        del params
        chances = F.linear(h, self.vocabulary.head).softmax(-1)
        chance, own = chances.max(-1)
        return self.vocabulary.ids[own], torch.logit(chance, eps=1e-6)


Head = MarkovHead | SelectorHead | PlainHead
HEADS: dict[str, Callable[[DraftShape, Vocabulary], Head]] = {
    "dspark": MarkovHead,
    "dflash2": SelectorHead,
    "eagle3": PlainHead,
}


def _shown(overlap: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    first = weights[:, 0]
    return (overlap[:, 0] * first).sum() / first.sum().clamp_min(_TINY), (overlap * weights).sum()
