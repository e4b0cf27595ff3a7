"""The networks that drafters are, in torch: functions over a dict of tensors under their published names. Needs torch.

`BlockNetwork` is the body of DSpark and DFlash2: keys and values of the context come from the taps, and each block's
rows see all context before their anchor and all of their own block. Everything is float32, but for products and
attention within `Drafter.loss`, if it was told so. Heads are in `heads`, the chain of EAGLE-3 in `chain`.
Source: DSpark (Cheng et al. 2026, arXiv:2607.05147); DFlash (arXiv:2602.06036); DFlash2's convolutions as published.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tiercel.train.shape import CONV_GROUP, CONV_TAPS, DraftShape

Params = Mapping[str, Tensor]
Convolution = Callable[[Tensor], Tensor]


class Context(NamedTuple):
    """What blocks see of B texts: for each layer keys and values, [B, K, L, D], and the lengths, [B]."""

    keys: list[Tensor]
    values: list[Tensor]
    lengths: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis, in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate heads [.., H, D] by their rows' positions [..], halves against halves."""
    half = x.shape[-1] // 2
    powers = torch.arange(half, device=x.device, dtype=torch.float64) / half
    angles = positions.unsqueeze(-1).to(torch.float64) * theta**-powers
    cos, sin = angles.cos().float().unsqueeze(-2), angles.sin().float().unsqueeze(-2)
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def activate(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """Return act(gate) * up."""
    return (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")) * up


def feed_forward(params: Params, prefix: str, x: Tensor, act: str) -> Tensor:
    """Return a layer's gated feed-forward of x."""
    gate, up = (F.linear(x, params[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return F.linear(activate(gate, up, act), params[f"{prefix}mlp.down_proj.weight"])


def heads_of(params: Params, name: str, x: Tensor, n: int, shape: DraftShape) -> Tensor:
    """Project x [.., E] to heads [.., n, D], normed if the shape says so."""
    y = F.linear(x, params[f"{name}_proj.weight"]).unflatten(-1, (n, shape.head_dim))
    norm = f"{name}_norm.weight"
    return rms_norm(y, params[norm], shape.eps) if norm in params else y


def padded(rows: Tensor, lengths: Tensor) -> Tensor:
    """Return rows [N, ..] of texts one after the other as [B, L, ..], with zeros behind each."""
    return torch.nn.utils.rnn.pad_sequence(list(rows.split(lengths.tolist())), batch_first=True)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend: q [B, R, H, D], k and v [B, K, C, D], mask [B, R, C] of what is seen; returns [B, R, H * D]."""
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask.unsqueeze(1), enable_gqa=True)
    return y.transpose(1, 2).flatten(-2)


class BlockNetwork:
    """The body of a block drafter. Holds no tensors."""

    def __init__(self, shape: DraftShape) -> None:
        self.shape = shape

    def context(self, params: Params, taps: Tensor, lengths: Tensor) -> Context:
        """Return what blocks see of texts.

        Shapes: taps  [N, W] of all texts, one after the other, as `fc` takes them; lengths  int64 [B]
        """
        shape = self.shape
        features = rms_norm(F.linear(taps, params["fc.weight"]), params["hidden_norm.weight"], shape.eps)
        positions = torch.cat([torch.arange(int(n), device=taps.device) for n in lengths])
        keys, values = [], []
        for i in range(shape.n_layers):
            prefix = f"layers.{i}.self_attn."
            k = heads_of(params, f"{prefix}k", features, shape.n_kv_heads, shape)
            v = heads_of(params, f"{prefix}v", features, shape.n_kv_heads, shape)
            keys.append(padded(rotate(k, positions, shape.rope_theta), lengths).transpose(1, 2))
            values.append(padded(v, lengths).transpose(1, 2))
        return Context(keys, values, lengths)

    def blocks(self, params: Params, context: Context, anchors: Tensor, anchor_rows: Tensor) -> Tensor:
        """Return the normed rows of every block's slots.

        Shapes:
            anchors      int64 [B, A]    positions
            anchor_rows  [B, A, E]       rows of the embedding, not scaled
            returns      [B, A, K, E]    of the K rows that foretell
        """
        shape = self.shape
        (n_texts, n_anchors), n_rows = anchors.shape, shape.n_rows
        masks = params["mask_embedding"].expand(n_texts, n_anchors, n_rows - 1, -1)
        x = torch.cat([anchor_rows.unsqueeze(2), masks], dim=2) * shape.embedding_scale
        offsets = torch.arange(n_rows, device=anchors.device)
        positions = (anchors.unsqueeze(-1) + offsets).flatten(1)
        mask = self._mask(context, anchors)
        x = x.flatten(1, 2)
        for i in range(shape.n_layers):
            x = self._layer(params, i, x, context, positions, mask)
        x = rms_norm(x, params["norm.weight"], shape.eps).unflatten(1, (n_anchors, n_rows))
        return x[:, :, n_rows - shape.n_slots :]

    def _layer(self, params: Params, i: int, x: Tensor, context: Context, positions: Tensor, mask: Tensor) -> Tensor:
        shape, prefix = self.shape, f"layers.{i}."
        h = rms_norm(x, params[f"{prefix}input_layernorm.weight"], shape.eps)
        before, after = self._convolutions(params, f"{prefix}attention_conv.", h)
        h = before(h)
        q = heads_of(params, f"{prefix}self_attn.q", h, shape.n_heads, shape)
        k = heads_of(params, f"{prefix}self_attn.k", h, shape.n_kv_heads, shape)
        v = heads_of(params, f"{prefix}self_attn.v", h, shape.n_kv_heads, shape)
        q, k = rotate(q, positions, shape.rope_theta), rotate(k, positions, shape.rope_theta)
        k = torch.cat([context.keys[i], k.transpose(1, 2)], dim=2)
        v = torch.cat([context.values[i], v.transpose(1, 2)], dim=2)
        x = x + after(F.linear(attend(q, k, v, mask), params[f"{prefix}self_attn.o_proj.weight"]))
        h = rms_norm(x, params[f"{prefix}post_attention_layernorm.weight"], shape.eps)
        before, after = self._convolutions(params, f"{prefix}mlp_conv.", h)
        return x + after(feed_forward(params, prefix, before(h), shape.act))

    def _convolutions(self, params: Params, prefix: str, x: Tensor) -> tuple[Convolution, Convolution]:
        """Return what is done before and after a sublayer of normed input x: nothing, or DFlash2's convolutions."""
        if self.shape.kind != "dflash2":
            return _nothing, _nothing
        shape = self.shape
        deltas = F.linear(x, params[f"{prefix}kernel_projection.weight"])
        deltas = deltas.unflatten(-1, (2, CONV_TAPS, shape.n_groups)).repeat_interleave(CONV_GROUP, dim=-1)
        kernels = params[f"{prefix}base_kernel"] + deltas

        def side(i: int) -> Convolution:
            return lambda y: _convolve(y, kernels[..., i, :, :], shape.n_rows)

        return side(0), side(1)

    def _mask(self, context: Context, anchors: Tensor) -> Tensor:
        """Return what each row sees, bool [B, A * S, L + A * S]: context before its anchor, and its own block."""
        (n_texts, n_anchors), n_rows = anchors.shape, self.shape.n_rows
        length = context.keys[0].shape[2]
        before = torch.arange(length, device=anchors.device) < anchors.unsqueeze(-1)
        before = before.unsqueeze(2).expand(-1, -1, n_rows, -1).flatten(1, 2)
        own = torch.eye(n_anchors, dtype=torch.bool, device=anchors.device)
        own = own.repeat_interleave(n_rows, 0).repeat_interleave(n_rows, 1)
        return torch.cat([before, own.expand(n_texts, -1, -1)], dim=-1)


def _nothing(x: Tensor) -> Tensor:
    return x


def _convolve(x: Tensor, kernels: Tensor, n_rows: int) -> Tensor:
    """Add to each row, by its own kernels [B, R, taps, E], the rows of its block before it."""
    blocks = x.unflatten(1, (-1, n_rows))
    total = torch.zeros_like(x)
    for t in range(CONV_TAPS):
        moved = F.pad(blocks, (0, 0, t, 0))[:, :, :n_rows].flatten(1, 2)
        total = total + kernels[:, :, t] * moved
    return total
