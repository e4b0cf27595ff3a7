"""A tiny DSpark drafter in Kimi K3's published layout, of random numbers, and what it computes, in plain numpy.

The definitions are written from the published facts in float64 and share no code with the package.
"""

import json
from pathlib import Path

import numpy as np
import tiny_drafters as tiny
from tiny_drafters import E, V, rms, silu

from tiercel.models.registry import build_model
from tiercel.ops.passes import lower_and_fuse
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.native import float_tensors

K3 = json.loads((Path(__file__).parent / "kimi_k3.json").read_text())["config"]
F, H, Q_RANK, RANK, NOPE, ROPE, V_DIM, N_LAYERS, MARKOV, MASK = 80, 4, 32, 32, 16, 8, 24, 2, 8, 126
EPS, THETA = 1e-3, 50000.0  # large, so that a norm with another would be seen
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 16}
YARN |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}


def target(config=K3):
    """The target model, its weights and its tensors."""
    config = {"architectures": ["KimiLinearForCausalLM"], **config}
    weights = tiny_checkpoint(config)
    return build_model(config), weights, float_tensors(weights)


def draft_config(**changes):
    """A published config at tiny sizes; None takes a field away."""
    config = {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "hidden_size": E,
        "intermediate_size": F,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": H,
        "num_key_value_heads": H,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V_DIM,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "vocab_size": V,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 64,
        "rope_theta": THETA,
        "rope_parameters": YARN,
        "num_target_layers": 3,
        "target_hidden_size": E,
        "target_num_hidden_layers": 6,
        "target_layer_ids": [0, 3, 4],
        "mask_token_id": MASK,
        "bos_token_id": 1,
        "markov_rank": MARKOV,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return {name: value for name, value in (config | changes).items() if value is not None}


def draft_tensors(seed=0, *, n_taps=3, tap_norms=False, confidence=True):
    """Random tensors of `draft_config`, by published names; the copy of the embedding is another than the target's."""
    rng = np.random.default_rng(seed)

    def matrix(n, k):
        return (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)

    def norm(n):
        return (1 + 0.1 * rng.standard_normal(n)).astype(np.float32)

    tensors = {
        "context_proj.weight": matrix(E, n_taps * E),
        "context_norm.weight": norm(E),
        "final_norm.weight": norm(E),
        "embed_tokens.weight": matrix(V, E),
        "markov_head.markov_w1.weight": matrix(V, MARKOV),
        "markov_head.markov_w2.weight": matrix(V, MARKOV),
    }
    if confidence:
        tensors |= {"confidence_head.proj.weight": matrix(1, E + MARKOV), "confidence_head.proj.bias": norm(1)}
    if tap_norms:
        tensors |= {f"fc_norm.{i}.weight": 1 + norm(E) for i in range(n_taps)}
    for i in range(N_LAYERS):
        p = f"layers.{i}"
        tensors |= {
            f"{p}.input_layernorm.weight": norm(E),
            f"{p}.post_attention_layernorm.weight": norm(E),
            f"{p}.self_attn.q_a_proj.weight": matrix(Q_RANK, E),
            f"{p}.self_attn.q_a_layernorm.weight": norm(Q_RANK),
            f"{p}.self_attn.q_b_proj.weight": matrix(H * (NOPE + ROPE), Q_RANK),
            f"{p}.self_attn.kv_a_proj_with_mqa.weight": matrix(RANK + ROPE, E),
            f"{p}.self_attn.kv_a_layernorm.weight": norm(RANK),
            f"{p}.self_attn.kv_b_proj.weight": matrix(H * (NOPE + V_DIM), RANK),
            f"{p}.self_attn.o_proj.weight": matrix(E, H * V_DIM),
            f"{p}.mlp.gate_proj.weight": matrix(F, E),
            f"{p}.mlp.up_proj.weight": matrix(F, E),
            f"{p}.mlp.down_proj.weight": matrix(E, F),
        }
    return tensors


def frequencies(params):
    """Each rotated pair's frequency: YaRN's, as DeepSeek V3 has it, or plain ones."""
    f = THETA ** (-2.0 * np.arange(ROPE // 2) / ROPE)
    if params is None:
        return f

    def pair_with(turns):
        """The pair, as a real number, that turns so often over the length trained on."""
        length = params["original_max_position_embeddings"]
        return ROPE * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(THETA))

    low, high = np.floor(pair_with(params["beta_fast"])), np.ceil(pair_with(params["beta_slow"]))
    low, high = max(low, 0), min(high, ROPE - 1)
    slow = np.clip((np.arange(ROPE // 2) - low) / max(high - low, 1e-3), 0, 1)
    return f * (1 - slow) + f / params["factor"] * slow


class LatentBlock:
    """The drafter by its formulas; `w` are tensors by published names, `embed` and `head` the target's."""

    def __init__(self, w, embed, head, config):
        self.w, self.embed, self.head = w, embed, head
        params = config.get("rope_parameters")
        self.frequencies, growth = frequencies(params), 1.0
        if params is not None:
            growth = 0.1 * params["mscale_all_dim"] * np.log(params["factor"]) + 1
        self.scale = (NOPE + ROPE) ** -0.5 * growth**2

    def rotated(self, x, positions):
        """Rotate [T, n, ROPE], whose pairs are neighbours, in place of them."""
        angles = positions[:, None] * self.frequencies
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        y = np.empty_like(x)
        y[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        y[..., 1::2] = x[..., 1::2] * cos + x[..., 0::2] * sin
        return y

    def latents(self, i, x, positions):
        """What rows leave in layer i: the normed latent, and the rotated part that all heads share."""
        p = f"layers.{i}.self_attn"
        a = x @ self.w[f"{p}.kv_a_proj_with_mqa.weight"].T.astype(np.float64)
        latent = rms(a[:, :RANK], self.w[f"{p}.kv_a_layernorm.weight"], EPS)
        return latent, self.rotated(a[:, None, RANK:], positions)[:, 0]

    def context(self, taps):
        """Latent rows of each layer, of target rows [T, n_taps * E] at positions 0 .."""
        taps = taps.astype(np.float64)
        if "fc_norm.0.weight" in self.w:
            parts = np.split(taps, taps.shape[1] // E, axis=1)
            taps = np.concatenate([rms(x, self.w[f"fc_norm.{i}.weight"], EPS) for i, x in enumerate(parts)], axis=1)
        f = rms(taps @ self.w["context_proj.weight"].T, self.w["context_norm.weight"], EPS)
        return [self.latents(i, f, np.arange(len(taps))) for i in range(N_LAYERS)]

    def attention(self, i, h, context, positions, visible):
        """Layer i's attention, with every head's keys and values made of the latent rows."""
        p = f"layers.{i}.self_attn"
        own = self.latents(i, h, positions)
        latent, pe = (np.concatenate([a, b]) for a, b in zip(context[i], own, strict=True))
        small = rms(h @ self.w[f"{p}.q_a_proj.weight"].T, self.w[f"{p}.q_a_layernorm.weight"], EPS)
        q = (small @ self.w[f"{p}.q_b_proj.weight"].T).reshape(len(h), H, NOPE + ROPE)
        q = np.concatenate([q[..., :NOPE], self.rotated(q[..., NOPE:], positions)], -1)
        kv = (latent @ self.w[f"{p}.kv_b_proj.weight"].T).reshape(-1, H, NOPE + V_DIM)
        y = np.empty((len(h), H, V_DIM))
        for head in range(H):
            k = np.concatenate([kv[:, head, :NOPE], pe], -1)
            scores = np.where(visible, q[:, head] @ k.T * self.scale, -np.inf)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            y[:, head] = scores / scores.sum(-1, keepdims=True) @ kv[:, head, NOPE:]
        return y.reshape(len(h), -1) @ self.w[f"{p}.o_proj.weight"].T

    def run(self, ids, context, *, causal=False):
        """Hidden rows and logits of a block [last token, mask ..] behind the context."""
        start = len(context[0][0])
        positions, at = start + np.arange(len(ids)), np.arange(start + len(ids))
        end = positions if causal else np.full_like(positions, at[-1])
        x, visible = self.embed[ids].astype(np.float64), at[None] <= end[:, None]
        for i in range(N_LAYERS):
            p = f"layers.{i}"
            h = rms(x, self.w[f"{p}.input_layernorm.weight"], EPS)
            x = x + self.attention(i, h, context, positions, visible)
            h = rms(x, self.w[f"{p}.post_attention_layernorm.weight"], EPS)
            gate, up = (h @ self.w[f"{p}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (silu(gate) * up) @ self.w[f"{p}.mlp.down_proj.weight"].T
        hidden = rms(x, self.w["final_norm.weight"], EPS)
        return hidden, hidden @ self.head.T


class TapReader:
    """Stands for a drafter that has a target's program give its taps out, and nothing else."""

    reads_hidden = False

    def __init__(self, taps, stream):
        self.taps, self.tap_stream = taps, stream

    def context_weights(self):
        """Return that it has no weights."""
        return {}

    def record_context(self, rec, options, taps, first):
        """Give out the taps side by side."""
        found = taps[0]
        for tap in taps[1:]:
            found = rec.join(found, tap)
        return found


def tapped(model, weights, taps, stream, ids):
    """The streams after these layers, side by side, from a program of their own."""
    reader = TapReader(tuple(taps), stream)
    program = model.record(float_tensors(weights), keeps_hidden=True, drafter=reader)
    executor = ReferenceExecutor(lower_and_fuse(program), weights)
    executor.step([Chunk(0, ids)])
    return executor.last_hidden


def write_drafter(folder, config, tensors):
    """Write a drafter's folder."""
    return tiny.write_drafter(folder, config, tensors)
