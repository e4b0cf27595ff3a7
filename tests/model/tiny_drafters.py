"""Tiny drafters of random numbers, as folders in the published layouts, and what they compute, in plain numpy.

The definitions here are written from the papers' formulas in float64 and share no code with the package.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tiercel.models.registry import build_model
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.native import float_tensors

E, F, H, K, D, V, L = 64, 96, 4, 2, 16, 128, 7
THETA, EPS = 10000.0, 1e-5
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": E,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "head_dim": D,
    "vocab_size": V,
    "max_position_embeddings": 256,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
}
MASK = 127


def target(**changes):
    """The target model, its weights and its tensors."""
    config = TARGET | changes
    weights = tiny_checkpoint(config)
    return build_model(config), weights, float_tensors(weights)


def draft_config(kind, **changes):
    """A published config of the kind; None takes a field away."""
    config = {
        "architectures": [
            {
                "dflash": "DFlashDraftModel",
                "dflash2": "DFlash2DraftModel",
                "dspark": "Qwen3DSparkModel",
                "eagle3": "LlamaForCausalLMEagle3",
            }[kind]
        ],
        "model_type": "qwen3",
        "hidden_size": E,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": H,
        "num_key_value_heads": K,
        "head_dim": D,
        "vocab_size": V,
        "max_position_embeddings": 256,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if kind == "eagle3":
        config |= {"num_hidden_layers": 1, "draft_vocab_size": 48, "eagle_config": {"use_aux_hidden_state": True}}
    if kind in ("dflash", "dflash2"):
        config |= {"block_size": 5, "num_target_layers": L}
        config["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": [0, 2, 3]}
    if kind == "dflash2":
        config["dflash_config"] |= {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": 4,
        }
    if kind == "dspark":
        config |= {"block_size": 4, "mask_token_id": MASK, "target_layer_ids": [0, 2, 3], "markov_rank": 8}
        config |= {"markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
    config |= changes
    return {name: value for name, value in config.items() if value is not None}


def draft_tensors(kind, seed=0, *, qk_norm=True, n_draft=None, markov="vanilla", n_layers=2, n_taps=3):
    """Random tensors of `draft_config`, by published names."""
    rng = np.random.default_rng(seed)

    def matrix(n, k):
        return (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)

    def norm(n):
        return (1 + 0.1 * rng.standard_normal(n)).astype(np.float32)

    tensors = {"fc.weight": matrix(E, n_taps * E), "norm.weight": norm(E)}
    n_layers = 1 if kind == "eagle3" else n_layers
    for i in range(n_layers):
        p = "midlayer" if kind == "eagle3" else f"layers.{i}"
        n_in = 2 * E if kind == "eagle3" else E
        tensors |= {f"{p}.input_layernorm.weight": norm(E), f"{p}.post_attention_layernorm.weight": norm(E)}
        tensors |= {f"{p}.self_attn.{a}_proj.weight": matrix(n * D, n_in) for a, n in (("q", H), ("k", K), ("v", K))}
        tensors[f"{p}.self_attn.o_proj.weight"] = matrix(E, H * D)
        tensors |= {f"{p}.mlp.{a}_proj.weight": matrix(80, E) for a in ("gate", "up")}
        tensors[f"{p}.mlp.down_proj.weight"] = matrix(E, 80)
        if qk_norm and kind != "eagle3":
            tensors |= {f"{p}.self_attn.{a}_norm.weight": norm(D) for a in ("q", "k")}
        if kind == "dflash2":
            for conv in ("attention_conv", "mlp_conv"):
                tensors[f"{p}.{conv}.base_kernel"] = rng.standard_normal((2, 2, E)).astype(np.float32) * 0.5
                tensors[f"{p}.{conv}.kernel_projection.weight"] = matrix(2 * 2 * E // 16, E) * 0.3
    if kind == "eagle3":
        tensors["midlayer.hidden_norm.weight"] = norm(E)
        tensors["lm_head.weight"] = matrix(n_draft or 48, E)
        tensors |= vocabulary(n_draft or 48, rng)
        return tensors
    tensors["hidden_norm.weight"] = norm(E)
    if n_draft:
        tensors |= vocabulary(n_draft, rng)
    if kind == "dflash2":
        prefix = "candidate_selector"
        tensors[f"{prefix}.predecessor_codebook"] = matrix(V, 8)
        tensors[f"{prefix}.successor_codebook"] = matrix(n_draft or V, 8)
        tensors[f"{prefix}.hidden_projection.weight"] = matrix(8, E)
    if kind == "dspark":
        tensors |= {
            "markov_head.markov_w1.weight": matrix(V, 8),
            "markov_head.markov_w2.weight": matrix(n_draft or V, 8),
        }
        tensors |= {"confidence_head.proj.weight": matrix(1, E + 8), "confidence_head.proj.bias": norm(1)}
        if markov == "gated":
            tensors |= {"markov_head.gate_proj.weight": matrix(8, E + 8), "markov_head.gate_proj.bias": norm(8)}
        if markov == "rnn":
            tensors |= {"markov_head.joint_proj.weight": matrix(24, E + 16), "markov_head.joint_proj.bias": norm(24)}
    return tensors


def vocabulary(n, rng):
    """A vocabulary of n of the target's tokens, as checkpoints say it."""
    ids = np.sort(rng.choice(V, n, replace=False)).astype(np.int64)
    return {"d2t": ids - np.arange(n), "t2d": np.isin(np.arange(V), ids)}


def write_drafter(folder: Path, config, tensors):
    """Write a drafter's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(w) for name, w in tensors.items()}, folder / "model.safetensors")
    return folder


def rms(x, w, eps=EPS):
    """Root mean square norm."""
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def rotated(x, positions):
    """Rotate heads [T, n, D] as two halves."""
    angles = positions[:, None] * THETA ** (-2.0 * np.arange(D // 2) / D)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def heads(x, n):
    """Rows as heads [T, n, D]."""
    return x.reshape(len(x), n, D)


def silu(x):
    """Swish."""
    return x / (1 + np.exp(-x))


def attend(q, k, v, visible):
    """Softmax attention of q [T, H, D] over k, v [S, K, D], where visible [T, S]."""
    y = np.empty_like(q)
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h // (H // K)].T / np.sqrt(D)
        scores = np.where(visible, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        y[:, h] = scores / scores.sum(-1, keepdims=True) @ v[:, h // (H // K)]
    return y.reshape(len(q), -1)


class Block:
    """A block drafter by its formulas; `w` are tensors by published names, `embed` and `head` the target's."""

    def __init__(self, w, embed, head, *, n_layers=2, scale=1.0, multiplier=1.0, softcap=0.0):
        self.w, self.embed, self.head, self.n_layers = w, embed, head, n_layers
        self.scale, self.multiplier, self.softcap = scale, multiplier, softcap

    def keys(self, i, x, positions):
        k = heads(x @ self.w[f"layers.{i}.self_attn.k_proj.weight"].T, K)
        if f"layers.{i}.self_attn.k_norm.weight" in self.w:
            k = rms(k, self.w[f"layers.{i}.self_attn.k_norm.weight"])
        return rotated(k, positions), heads(x @ self.w[f"layers.{i}.self_attn.v_proj.weight"].T, K)

    def context(self, taps):
        """Keys and values of each layer, of target rows [T, n_taps * E] at positions 0 .."""
        f = rms(taps.astype(np.float64) @ self.w["fc.weight"].T, self.w["hidden_norm.weight"])
        return [self.keys(i, f, np.arange(len(taps))) for i in range(self.n_layers)]

    def convolved(self, i, name, h, part):
        if f"layers.{i}.{name}.base_kernel" not in self.w:
            return part(h)
        base = self.w[f"layers.{i}.{name}.base_kernel"].astype(np.float64)
        delta = (h @ self.w[f"layers.{i}.{name}.kernel_projection.weight"].T).reshape(len(h), 2, 2, E // 16)

        def conv(x, side):
            y = np.zeros_like(x)
            for row in range(len(x)):
                for tap in range(2):
                    if row >= tap:
                        y[row] += (base[side, tap] + np.repeat(delta[row, side, tap], 16)) * x[row - tap]
            return y

        return conv(part(conv(h, 0)), 1)

    def run(self, ids, context, *, causal=False, window=0):
        """Hidden rows and logits of a block [last token, mask ..] behind the context; id -1 is the mask vector."""
        start = len(context[0][0])
        positions = start + np.arange(len(ids))
        x = (
            np.stack([self.w["mask_embedding"] if t < 0 else self.embed[t] for t in ids]).astype(np.float64)
            * self.scale
        )
        at = np.arange(start + len(ids))
        end = positions if causal else np.full_like(positions, start + len(ids) - 1)
        visible = at[None] <= end[:, None]
        if window:
            visible &= at[None] > end[:, None] - window
        for i in range(self.n_layers):
            p = f"layers.{i}"

            def attention(h, i=i, p=p):
                q = heads(h @ self.w[f"{p}.self_attn.q_proj.weight"].T, H)
                if f"{p}.self_attn.q_norm.weight" in self.w:
                    q = rms(q, self.w[f"{p}.self_attn.q_norm.weight"])
                own_k, own_v = self.keys(i, h, positions)
                k, v = (np.concatenate([a, b]) for a, b in zip(context[i], (own_k, own_v), strict=True))
                return attend(rotated(q, positions), k, v, visible) @ self.w[f"{p}.self_attn.o_proj.weight"].T

            def mlp(h, p=p):
                gate, up = (h @ self.w[f"{p}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
                return (silu(gate) * up) @ self.w[f"{p}.mlp.down_proj.weight"].T

            x = x + self.convolved(i, "attention_conv", rms(x, self.w[f"{p}.input_layernorm.weight"]), attention)
            x = x + self.convolved(i, "mlp_conv", rms(x, self.w[f"{p}.post_attention_layernorm.weight"]), mlp)
        hidden = rms(x, self.w["norm.weight"])
        logits = hidden @ self.head.T * self.multiplier
        return hidden, self.softcap * np.tanh(logits / self.softcap) if self.softcap else logits
