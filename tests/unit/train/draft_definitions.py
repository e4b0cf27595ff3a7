"""What published drafters compute, in float64 numpy, written from the papers' formulas, with no code of the package.

Each class takes the tensors of `model.safetensors` and the fields of `config.json`.
"""

import numpy as np


def norm(x, w, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * w


def rotated(x, positions, theta):
    """x [.., H, D], halves against halves."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def silu(x):
    return x / (1 + np.exp(-x))


def attended(q, k, v, seen):
    """q [R, H, D], k and v [C, K, D], seen bool [R, C]."""
    group = q.shape[1] // k.shape[1]
    out = np.zeros_like(q)
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h // group].T / np.sqrt(q.shape[-1])
        scores = np.where(seen, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, h // group]
    return out.reshape(len(q), -1)


class Published:
    """A drafter's folder, read."""

    def __init__(self, tensors, config, embedding, head):
        self.t = {name: one.astype(np.float64) for name, one in tensors.items() if name != "d2t"}
        self.c = {**config, **config.get("dflash_config", {})}
        d2t = tensors.get("d2t")
        self.ids = np.arange(len(head)) if d2t is None else np.arange(len(d2t)) + d2t
        self.embedding, self.head = embedding.astype(np.float64), head.astype(np.float64)[self.ids]
        self.eps, self.theta = self.c["rms_norm_eps"], self.c["rope_theta"]

    def heads(self, name, x):
        y = x @ self.t[f"{name}_proj.weight"].T
        return y.reshape(len(x), -1, self.c["head_dim"])

    def mlp(self, prefix, x):
        gate, up = (x @ self.t[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return (silu(gate) * up) @ self.t[f"{prefix}mlp.down_proj.weight"].T


class Block(Published):
    """DSpark and DFlash2."""

    def rows(self, taps, anchor, token):
        """The normed rows of the block of `token` at position `anchor`, over the context rows taps [anchor, W]."""
        t, c = self.t, self.c
        f = norm(taps @ t["fc.weight"].T, t["hidden_norm.weight"], self.eps)
        n_rows = c["block_size"]
        x = np.concatenate([self.embedding[None, token], np.tile(t["mask_embedding"], (n_rows - 1, 1))])
        x = x * c["input_embedding_scale"]
        at = anchor + np.arange(n_rows)
        for i in range(c["num_hidden_layers"]):
            p = f"layers.{i}."
            k_context = rotated(self.heads(f"{p}self_attn.k", f), np.arange(anchor), self.theta)
            v_context = self.heads(f"{p}self_attn.v", f)
            h = norm(x, t[f"{p}input_layernorm.weight"], self.eps)
            delta = self.deltas(f"{p}attention_conv.", h)
            h = self.mixed(f"{p}attention_conv.", h, delta, 0)
            q = rotated(self.heads(f"{p}self_attn.q", h), at, self.theta)
            k = np.concatenate([k_context, rotated(self.heads(f"{p}self_attn.k", h), at, self.theta)])
            v = np.concatenate([v_context, self.heads(f"{p}self_attn.v", h)])
            y = attended(q, k, v, np.ones((n_rows, len(k)), bool)) @ t[f"{p}self_attn.o_proj.weight"].T
            x = x + self.mixed(f"{p}attention_conv.", y, delta, 1)
            h = norm(x, t[f"{p}post_attention_layernorm.weight"], self.eps)
            delta = self.deltas(f"{p}mlp_conv.", h)
            y = self.mlp(p, self.mixed(f"{p}mlp_conv.", h, delta, 0))
            x = x + self.mixed(f"{p}mlp_conv.", y, delta, 1)
        return norm(x, t["norm.weight"], self.eps)

    def deltas(self, prefix, x):
        name = f"{prefix}kernel_projection.weight"
        if name not in self.t:
            return None
        n_taps = self.c["conv_kernel_size"]
        return (x @ self.t[name].T).reshape(len(x), 2, n_taps, -1)

    def mixed(self, prefix, x, delta, side):
        if delta is None:
            return x
        out = np.zeros_like(x)
        group = self.c["conv_group_size"]
        for row in range(len(x)):
            for tap in range(min(self.c["conv_kernel_size"], row + 1)):
                kernel = self.t[f"{prefix}base_kernel"][side, tap] + np.repeat(delta[row, side, tap], group)
                out[row] += kernel * x[row - tap]
        return out

    def drafts(self, taps, anchor, token):
        """Greedy drafts, target ids, and the chance that DSpark's confidence head, or the selector, gives each."""
        h = self.rows(taps, anchor, token)
        return self.markov(h, token) if "markov_rank" in self.c else self.selected(h[1:], token)

    def markov(self, h, token):
        t, tokens, chances = self.t, [], []
        for row in h:
            before = t["markov_head.markov_w1.weight"][token]
            unary = self.head @ row
            topk = self.c.get("dspark_draft_topk") or len(unary)
            unary[np.argsort(-unary)[topk:]] = -np.inf
            logits = unary + t["markov_head.markov_w2.weight"] @ before
            c = t["confidence_head.proj.weight"][0] @ np.concatenate([row, before]) + t["confidence_head.proj.bias"][0]
            chances.append(1 / (1 + np.exp(-c)))
            token = self.ids[logits.argmax()]
            tokens.append(int(token))
        return tokens, chances

    def selected(self, h, token):
        name, tokens, chances = "candidate_selector.", [], []
        for row in h:
            unary = self.head @ row
            best = np.argsort(-unary, kind="stable")[: self.c["selector_top_k"]]
            a = self.t[f"{name}predecessor_codebook"][token]
            ph = self.t[f"{name}hidden_projection.weight"] @ row
            scores = unary[best] + self.t[f"{name}successor_codebook"][best] @ (a * ph)
            p = np.exp(scores - scores.max())
            chances.append(float(p.max() / p.sum()))
            token = self.ids[best[scores.argmax()]]
            tokens.append(int(token))
        return tokens, chances


class Chain(Published):
    """EAGLE-3."""

    def drafts(self, taps, anchor, token_ids, n):
        """Greedy drafts after token_ids[anchor], over the rows taps [anchor, W] before it, and their probabilities."""
        t, p = self.t, "midlayer."
        given = list(taps @ t["fc.weight"].T)
        said = list(token_ids[1 : anchor + 1])
        tokens, chances = [], []
        for _ in range(n):
            g, e = np.array(given), self.embedding[said] * self.c["input_embedding_scale"]
            at = np.arange(len(g))
            h = np.concatenate(
                [norm(e, t[f"{p}input_layernorm.weight"], self.eps), norm(g, t[f"{p}hidden_norm.weight"], self.eps)], 1
            )
            q, k = (rotated(self.heads(f"{p}self_attn.{one}", h), at, self.theta) for one in "qk")
            y = attended(q, k, self.heads(f"{p}self_attn.v", h), np.tri(len(g), dtype=bool))
            x = g + y @ t[f"{p}self_attn.o_proj.weight"].T
            x = x + self.mlp(p, norm(x, t[f"{p}post_attention_layernorm.weight"], self.eps))
            logits = self.head @ norm(x[-1], t["norm.weight"], self.eps)
            tokens.append(int(self.ids[logits.argmax()]))
            odds = np.exp(logits - logits.max())
            chances.append(float(odds.max() / odds.sum()))
            given.append(x[-1])
            said.append(tokens[-1])
        return tokens, chances
