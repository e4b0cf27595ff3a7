"""Draft heads of several modules in the native step, against the whole chain written here in float64.

A module's pass is over the whole text at once; nothing is kept from one text to the next. The target's rows are those
of the numpy definitions of its ops.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_drafters import rms, silu

from tiercel import _native
from tiercel.models.registry import build_model
from tiercel.ops.passes import lower_and_fuse
from tiercel.runner.capacity import Capacity
from tiercel.runner.drafting import Drafting
from tiercel.runner.native import NativeRunner, NativeSettings
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.runner.weights import PackedWeightStore
from tiercel.testing.draft_kit import drafted
from tiercel.testing.fill import fill_by_name
from tiercel.testing.native import float_tensors
from tiercel.testing.runner_kit import OTHER, OWN, PROMPT, Driver

N_DRAFTS = 4


def attended(q, k, v, scale):
    """Causal softmax attention of q [T, H, D] over k [S, K, D] and v [S, K, Dv], whose last T rows are q's."""
    each = q.shape[1] // k.shape[1]
    scores = np.einsum("thd,shd->hts", q, np.repeat(k, each, 1)) * scale
    behind = np.arange(len(k))[None] > np.arange(len(k) - len(q), len(k))[:, None]
    odds = np.exp(np.where(behind, -np.inf, scores - scores.max(-1, keepdims=True)))
    y = np.einsum("hts,shd->thd", odds / odds.sum(-1, keepdims=True), np.repeat(v, each, 1))
    return y.reshape(len(q), -1)


def angles_of(positions, n, theta):
    return (np.array(positions)[:, None] * theta ** (-np.arange(n) / n))[:, None]


def gated(x, w, prefix):
    """A gated feed-forward."""
    gate, up, down = (w[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


class DeepseekModule:
    """A module of DeepSeek V3, without absorbing anything; rows at position 0 have no token."""

    field = "num_nextn_predict_layers"
    theta = 10000.0

    def __init__(self, w, config, module):
        self.w, self.config, self.prefix = w, config, f"model.layers.{config['num_hidden_layers'] + module}"
        self.head, self.table = w["lm_head.weight"], w["model.embed_tokens.weight"]
        self.keys, self.values = None, None

    def of(self, name):
        return self.w[f"{self.prefix}.{name}.weight"]

    def run(self, ids, given):
        """Return logits and what is given on, of rows that follow those run before."""
        start = 0 if self.keys is None else len(self.keys)
        positions = np.arange(start, start + len(ids))
        token = self.table[ids] * (positions > 0)[:, None]
        joined = np.concatenate([rms(token, self.of("enorm")), rms(given, self.of("hnorm"))], -1)
        x = joined @ self.of("eh_proj").T
        x = x + self.attention(rms(x, self.of("input_layernorm")), positions)
        x = x + self.mixture(rms(x, self.of("post_attention_layernorm")))
        x = rms(x, self.of("shared_head.norm"))
        return x @ self.head.T, x

    def keep(self, k, v):
        self.keys = k if self.keys is None else np.concatenate([self.keys, k])
        self.values = v if self.values is None else np.concatenate([self.values, v])

    def attention(self, h, positions):
        c = self.config
        n, nope, rope = (c[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
        q = rms(h @ self.of("self_attn.q_a_proj").T, self.of("self_attn.q_a_layernorm"))
        q = (q @ self.of("self_attn.q_b_proj").T).reshape(len(h), n, nope + rope)
        row = h @ self.of("self_attn.kv_a_proj_with_mqa").T
        latent = rms(row[:, : c["kv_lora_rank"]], self.of("self_attn.kv_a_layernorm"))
        kv = (latent @ self.of("self_attn.kv_b_proj").T).reshape(len(h), n, nope + c["v_head_dim"])
        angles = angles_of(positions, rope // 2, self.theta)

        def turned(x):
            """Neighbouring columns together."""
            a, b = x[..., ::2], x[..., 1::2]
            pairs = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
            return np.stack(pairs, -1).reshape(x.shape)

        q = np.concatenate([q[..., :nope], turned(q[..., nope:])], -1)
        shared = turned(row[:, None, c["kv_lora_rank"] :])
        self.keep(np.concatenate([kv[..., :nope], np.repeat(shared, n, 1)], -1), kv[..., nope:])
        return attended(q, self.keys, self.values, (nope + rope) ** -0.5) @ self.of("self_attn.o_proj").T

    def mixture(self, h):
        c, prefix = self.config, f"{self.prefix}.mlp"
        scores = 1 / (1 + np.exp(-(h @ self.of("mlp.gate").T)))
        chosen = np.argsort(-(scores + self.w[f"{prefix}.gate.e_score_correction_bias"]), -1)[
            :, : c["num_experts_per_tok"]
        ]
        y = gated(h, self.w, f"{prefix}.shared_experts")
        for t, experts in enumerate(chosen):
            shares = scores[t, experts] / scores[t, experts].sum() * c["routed_scaling_factor"]
            y[t] += sum(s * gated(h[t], self.w, f"{prefix}.experts.{e}") for s, e in zip(shares, experts, strict=True))
        return y


class QwenModule(DeepseekModule):
    """A module of Qwen3.5, dense: gated attention, and the join and outer norms that all modules share."""

    field = "mtp_num_hidden_layers"

    def __init__(self, w, config, module):
        super().__init__(w, config, module)
        self.prefix = f"mtp.layers.{module}"

    def run(self, ids, given):
        w, start = self.w, 0 if self.keys is None else len(self.keys)
        norms = (1 + w[f"mtp.pre_fc_norm_{name}.weight"] for name in ("embedding", "hidden"))
        joined = np.concatenate([rms(x, norm) for x, norm in zip((self.table[ids], given), norms, strict=True)], -1)
        x = joined @ w["mtp.fc.weight"].T
        x = x + self.attention(rms(x, 1 + self.of("input_layernorm")), np.arange(start, start + len(ids)))
        x = x + gated(rms(x, 1 + self.of("post_attention_layernorm")), w, f"{self.prefix}.mlp")
        x = rms(x, 1 + w["mtp.norm.weight"])
        return x @ self.head.T, x

    def attention(self, h, positions):
        c, d = self.config, self.config["head_dim"]
        both = (h @ self.of("self_attn.q_proj").T).reshape(len(h), c["num_attention_heads"], 2, d)
        q = rms(both[:, :, 0], 1 + self.of("self_attn.q_norm"))
        k = rms((h @ self.of("self_attn.k_proj").T).reshape(len(h), -1, d), 1 + self.of("self_attn.k_norm"))
        n = int(d * c["rope_parameters"]["partial_rotary_factor"]) // 2
        angles = angles_of(positions, n, c["rope_parameters"]["rope_theta"])

        def turned(x):
            """The first columns, as two halves."""
            a, b = x[..., :n], x[..., n : 2 * n]
            halves = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
            return np.concatenate([*halves, x[..., 2 * n :]], -1)

        self.keep(turned(k), (h @ self.of("self_attn.v_proj").T).reshape(len(h), -1, d))
        y = attended(turned(q), self.keys, self.values, d**-0.5) / (1 + np.exp(-both[:, :, 1].reshape(len(h), -1)))
        return y @ self.of("self_attn.o_proj").T


FAMILIES = {"deepseek_v3_experts": DeepseekModule, "qwen3_5": QwenModule}


class Ready:
    """A model whose head has so many modules, in numpy and in the core."""

    def __init__(self, name, n_modules):
        self.kind, self.n_modules = FAMILIES[name], n_modules
        path = Path(__file__).parent / "mtp_fixtures" / f"{name}.json"
        self.config = json.loads(path.read_text())["config"] | {self.kind.field: n_modules}
        if "deepseek" in name:  # plain rotations and a choice without groups, which are no part of a chain
            rope = {"rope_type": "default", "rope_theta": self.kind.theta}
            self.config |= {"rope_parameters": rope, "n_group": 1, "topk_group": 1}
        model = build_model(self.config)
        shapes = model.expected_weights() | model.mtp_weights()
        self.weights = {n: fill_by_name(n, s, norms_add_one=model.norms_add_one) for n, s in shapes.items()}
        self.exact = {n: w.astype(np.float64) for n, w in self.weights.items()}
        tensors = float_tensors(self.weights)
        self.target = lower_and_fuse(model.record(tensors, keeps_hidden=True))
        self.programs = tuple(lower_and_fuse(model.record_mtp(tensors, module=m)) for m in range(n_modules))

    def runner(self):
        head = _native.make_draft_head("plain", self.target.output.width, self.target.output.width, {})
        store = PackedWeightStore(float_tensors(self.weights), expand_to_f32=False, n_threads=1)
        settings = NativeSettings(64, 64, "float32", 1, max_draft_rows=24)
        drafting = Drafting(self.programs, "chain", N_DRAFTS, head)
        return NativeRunner(self.target, store, Capacity(16, 1, 16, 64, 3), settings, drafting=drafting)

    def drafts(self, ids):
        """What follows a text whose last token has no row of the target yet, and how sure the head is of it."""
        target = ReferenceExecutor(self.target, self.weights, max_tokens=100)
        target.step([Chunk(0, ids[:-1])])
        modules = [self.kind(self.exact, self.config, m) for m in range(self.n_modules)]
        rows, given, found, sure = list(ids[1:]), target.last_hidden.astype(np.float64), [], []
        for k in range(N_DRAFTS):
            if k >= self.n_modules:
                rows, given = rows[-1:], given[-1:]
            logits, given = modules[min(k, self.n_modules - 1)].run(rows, given)
            odds = np.exp(logits[-1] - logits[-1].max())
            found.append(int(odds.argmax()))
            sure.append(odds.max() / odds.sum())
            rows = [*rows[1:], found[-1]]
        return found, sure


@pytest.mark.parametrize("n_modules", [2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_drafts_what_the_chain_of_modules_picks_whatever_was_computed_before(name, n_modules):
    """Two texts side by side, in chunks of other lengths; drafts that come, and drafts that do not."""
    ready = Ready(name, n_modules)
    runner = ready.runner()
    driver, seen = Driver(runner), set()
    texts = {0: list(PROMPT), 2: list(OTHER)}
    driver.admit(0, PROMPT, 48)
    driver.admit(2, OTHER, 48)
    driver.step((2, 0, 1), (0, 0, 4), n_draft=N_DRAFTS)
    driver.step((0, 4, 1), (2, 1, 1), n_draft=N_DRAFTS)
    plans = [(0, 5, 6), (2, 2, 3)]
    for i in range(8):
        # Foretold: two that the target says and one that it does not; then what the heads drafted.
        alone = {"drafts": None if i == 0 else {s: foretold(ready, texts[s], i) for s in texts}}
        step = driver.step(*plans, samples=[0, 2], n_draft=N_DRAFTS, **alone)
        for s, token in zip(step.row_seq.tolist(), step.row_token.tolist(), strict=True):
            texts[2 * s].append(token)
        for (drafts, sure), text in zip(drafted(step), texts.values(), strict=True):
            expected, confidences = ready.drafts(text)
            assert drafts == expected
            np.testing.assert_allclose(sure, confidences, rtol=2e-3)
            seen.add(tuple(drafts))
        plans = [(slot, len(text) - 1, N_DRAFTS + 1) for slot, text in texts.items()]
    assert len(seen) > 4
    assert len(texts[0]) > len(PROMPT) + 8
    runner.close()


def foretold(ready, text, i):
    """Drafts of a step: by the target itself, greedy, so that some come; else the heads'."""
    if i % 2:
        return OWN
    known = list(text)
    for _ in range(i // 2 + 1):
        logits = ReferenceExecutor(ready.target, ready.weights, max_tokens=100).step([Chunk(0, known)])
        known.append(int(logits[-1].argmax()))
    return len(text), [*known[len(text) :], 0]
