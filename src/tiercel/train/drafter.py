"""A drafter in training: a network and a head over batches. Needs torch.

Holds no tensors that are trained; `params` are everywhere those of `DraftShape.shapes`, but the table by the token
before has `Before.n_rows` rows, and `fc` takes taps divided by their root mean squares. `export` undoes both.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tiercel.train.batches import Batch
from tiercel.train.chain import ChainContext, ChainNetwork
from tiercel.train.heads import HEADS, Loss, PlainHead, Slots, Vocabulary
from tiercel.train.network import BlockNetwork, Params
from tiercel.train.shape import DraftShape


class Tensors(NamedTuple):
    """A batch as tensors; see `batches.Batch`. `taps` are divided by their root mean squares."""

    taps: Tensor
    next_ids: Tensor
    lengths: Tensor
    anchors: Tensor
    tokens: Tensor
    teacher: Tensor
    is_valid: Tensor


class Drafter:
    """One kind of drafter. Owned by who trains or measures it.

    `is_mixed`: within `loss`, products and attention of the drafter's are of bfloat16 numbers, and their gradients too.
    Weights, sums of the stream, norms, what the target says, and whatever is measured stay float32.
    """

    def __init__(self, shape: DraftShape, vocabulary: Vocabulary, tap_rms: Tensor, *, is_mixed: bool = False) -> None:
        self.shape, self.vocabulary = shape, vocabulary
        self._tap_rms, self._is_mixed = tap_rms, is_mixed
        self._head = HEADS[shape.kind](shape, vocabulary)
        self._block = BlockNetwork(shape)
        self._chain = ChainNetwork(shape)

    def tensors(self, batch: Batch) -> Tensors:
        """Return a batch as tensors on the device of the vocabulary."""
        device = self._tap_rms.device
        found = Tensors(*(torch.from_numpy(array).to(device) for array in batch))
        return found._replace(taps=found.taps / self._tap_rms, lengths=found.lengths.cpu())

    def loss(self, params: Params, batch: Tensors) -> Loss:
        """Return the loss of a batch."""
        slots = self._slots(batch)
        with torch.autocast(self._tap_rms.device.type, torch.bfloat16, enabled=self._is_mixed):
            rows = self._forced_rows(params, batch)
            return self._head.loss(params, rows.flatten(0, 1), slots)

    def overlaps(self, params: Params, batch: Tensors) -> Tensor:
        """Return how much of the target's distribution the drafter's has at each slot, the text's own tokens before it;
        [B, A, K]. Rejection would accept so many sampled drafts; matching accepts fewer (decision 0008).
        """
        rows = self._forced_rows(params, batch)
        slots = self._slots(batch)
        logits = self._head.logits(params, rows.flatten(0, 1), slots.before)
        overlap = torch.minimum(logits.softmax(-1), slots.teacher.softmax(-1)).sum(-1)
        return overlap.view(batch.is_valid.shape)

    def draft(self, params: Params, batch: Tensors) -> tuple[Tensor, Tensor]:
        """Return greedy drafts after every anchor, target ids [B, A, K], and the logits of their confidences."""
        anchors = batch.tokens[..., 0]
        if not isinstance(self._head, PlainHead):
            rows = self._block_rows(params, batch).flatten(0, 1)
            tokens, confidences = self._head.pick(params, rows, anchors.flatten())
            return tokens.view(batch.is_valid.shape), confidences.view(batch.is_valid.shape)
        context = self._chain_context(params, batch)
        rows_so_far, said, tokens_so_far, confidences_so_far = [self._chain.start(context, batch.anchors)], [], [], []
        for k in range(self.shape.n_slots):
            token, confidence = self._head.pick_one(params, self._chain.normed(params, rows_so_far[-1]))
            tokens_so_far.append(token)
            confidences_so_far.append(confidence)
            if k + 1 < self.shape.n_slots:
                said.append(F.embedding(token, self.vocabulary.embedding))
                rows_so_far.append(self._chain.further(params, context, batch.anchors, rows_so_far, said))
        return torch.stack(tokens_so_far, -1), torch.stack(confidences_so_far, -1)

    def _slots(self, batch: Tensors) -> Slots:
        teacher = self.vocabulary.teacher(batch.teacher.flatten(0, 1))
        return Slots.of(batch.tokens.flatten(0, 1), batch.is_valid.flatten(0, 1), teacher)

    def _forced_rows(self, params: Params, batch: Tensors) -> Tensor:
        """Return each slot's row, [B, A, K, E], where the tokens before are the text's."""
        if not isinstance(self._head, PlainHead):
            return self._block_rows(params, batch)
        context = self._chain_context(params, batch)
        rows = [self._chain.start(context, batch.anchors)]
        said = F.embedding(batch.tokens[..., 1:], self.vocabulary.embedding)
        for k in range(self.shape.n_slots - 1):
            before = [said[:, :, i] for i in range(k + 1)]
            rows.append(self._chain.further(params, context, batch.anchors, rows, before))
        return self._chain.normed(params, torch.stack(rows, 2))

    def _block_rows(self, params: Params, batch: Tensors) -> Tensor:
        context = self._block.context(params, batch.taps, batch.lengths)
        anchor_rows = F.embedding(batch.tokens[..., 0], self.vocabulary.embedding)
        return self._block.blocks(params, context, batch.anchors, anchor_rows)

    def _chain_context(self, params: Params, batch: Tensors) -> ChainContext:
        next_rows = F.embedding(batch.next_ids, self.vocabulary.embedding)
        return self._chain.context(params, batch.taps, batch.lengths, next_rows)
