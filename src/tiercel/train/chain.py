"""EAGLE-3's network in torch: one layer, which reads its own output again for each further draft. Needs torch.

The row at t takes the token at t + 1 beside what the target's program gives out of t, `fc(taps)`; it foretells the
token at t + 2. A further draft's row takes the token just drafted, and the row before's own output. In training a chain
begins at each anchor and is unrolled as it will be in use, with the text's own tokens.
Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840), "training-time test"; the layout as vLLM reads it.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tiercel.train.network import Params, attend, feed_forward, heads_of, padded, rms_norm, rotate
from tiercel.train.shape import DraftShape


class ChainContext(NamedTuple):
    """Pass 0 over B texts: keys and values [B, K, L, D], and its rows [B, L, E]."""

    keys: Tensor
    values: Tensor
    rows: Tensor


class ChainNetwork:
    """The body of a chain drafter. Holds no tensors."""

    def __init__(self, shape: DraftShape) -> None:
        self.shape = shape

    def context(self, params: Params, taps: Tensor, lengths: Tensor, next_rows: Tensor) -> ChainContext:
        """Run pass 0 over texts.

        Shapes:
            taps       [N, W] of all texts, one after the other
            next_rows  [N, E], embeddings of the token after each row, not scaled
        """
        given = padded(F.linear(taps, params["fc.weight"]), lengths)
        tokens = padded(next_rows, lengths)
        n_texts, length = given.shape[:2]
        positions = torch.arange(length, device=taps.device).expand(n_texts, -1)
        h = self._input(params, tokens, given)
        k, v = self._keys(params, h, positions)
        mask = torch.ones(length, length, dtype=torch.bool, device=taps.device).tril().expand(n_texts, -1, -1)
        return ChainContext(k, v, self._rest(params, h, given, positions, (k, v), mask))

    def start(self, context: ChainContext, anchors: Tensor) -> Tensor:
        """Return pass 0's rows [B, A, E] that foretell the token after each anchor."""
        index = (anchors - 1).unsqueeze(-1).expand(-1, -1, context.rows.shape[-1])
        return context.rows.gather(1, index)

    def further(
        self, params: Params, context: ChainContext, anchors: Tensor, rows: list[Tensor], tokens: list[Tensor]
    ) -> Tensor:
        """Return the rows [B, A, E] of the next draft.

        Shapes:
            rows    the chain's rows so far, pass 0's first, each [B, A, E]
            tokens  embeddings of the drafts made of them, not scaled, each [B, A, E]
        """
        n_texts, n_anchors = anchors.shape
        n_own = len(rows)
        given, said = torch.stack(rows, 2).flatten(1, 2), torch.stack(tokens, 2).flatten(1, 2)
        positions = (anchors.unsqueeze(-1) + torch.arange(n_own, device=anchors.device)).flatten(1)
        h = self._input(params, said, given)
        k, v = self._keys(params, h, positions)
        pick = torch.arange(n_anchors, device=anchors.device) * n_own + n_own - 1
        before = torch.arange(context.keys.shape[2], device=anchors.device) < anchors.unsqueeze(-1)
        own = torch.eye(n_anchors, dtype=torch.bool, device=anchors.device).repeat_interleave(n_own, 1)
        mask = torch.cat([before, own.expand(n_texts, -1, -1)], -1)
        keys, values = torch.cat([context.keys, k], 2), torch.cat([context.values, v], 2)
        return self._rest(params, h[:, pick], given[:, pick], positions[:, pick], (keys, values), mask)

    def normed(self, params: Params, rows: Tensor) -> Tensor:
        """Return what the head reads of rows."""
        return rms_norm(rows, params["norm.weight"], self.shape.eps)

    def _input(self, params: Params, tokens: Tensor, given: Tensor) -> Tensor:
        eps = self.shape.eps
        said = rms_norm(tokens * self.shape.embedding_scale, params["layers.0.input_layernorm.weight"], eps)
        return torch.cat([said, rms_norm(given, params["layers.0.hidden_norm.weight"], eps)], -1)

    def _keys(self, params: Params, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.shape
        k = heads_of(params, "layers.0.self_attn.k", h, shape.n_kv_heads, shape)
        v = heads_of(params, "layers.0.self_attn.v", h, shape.n_kv_heads, shape)
        return rotate(k, positions, shape.rope_theta).transpose(1, 2), v.transpose(1, 2)

    def _rest(
        self, params: Params, h: Tensor, given: Tensor, positions: Tensor, kv: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        shape = self.shape
        q = heads_of(params, "layers.0.self_attn.q", h, shape.n_heads, shape)
        y = attend(rotate(q, positions, shape.rope_theta), *kv, mask)
        x = given + F.linear(y, params["layers.0.self_attn.o_proj.weight"])
        between = rms_norm(x, params["layers.0.post_attention_layernorm.weight"], shape.eps)
        return x + feed_forward(params, "layers.0.", between, shape.act)
