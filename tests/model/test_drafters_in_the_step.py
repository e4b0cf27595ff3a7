"""Published drafters in the native step: what is drafted is what the papers' formulas pick, and nothing else changes.

The draft passes are the numpy ones of `tiny_drafters`, and the heads are written here, in float64.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny_drafters as tiny
from test_drafters_chain import Eagle3
from tiny_drafters import Block, E, V, draft_config, draft_tensors, write_drafter

from tiercel import _native
from tiercel.models.drafters.checkpoint import open_drafter
from tiercel.ops.passes import lower_and_fuse
from tiercel.quant.formats import Format
from tiercel.runner.capacity import Capacity
from tiercel.runner.drafting import Drafting
from tiercel.runner.native import NativeRunner, NativeSettings
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.runner.weights import PackedWeightStore
from tiercel.testing.draft_kit import DraftingRunnerContract, drafted
from tiercel.testing.runner_kit import GREEDY, OWN, PROMPT, RANDOM, Driver

CASES = {
    "dflash-from-anchor": ("dflash", {"sample_from_anchor": True}, {}),
    "dflash-mask-vector": ("dflash", {}, {}),
    "dflash2": ("dflash2", {}, {}),
    "dflash2-own-vocabulary": ("dflash2", {"draft_vocab_size": 40}, {"n_draft": 40}),
    "dspark": ("dspark", {}, {}),
    "dspark-masks-for-themselves": ("dspark", {"sample_from_anchor": False}, {}),
    "dspark-own-vocabulary": ("dspark", {"draft_vocab_size": 40}, {"n_draft": 40}),
    "dspark-gated": ("dspark", {"markov_head_type": "gated"}, {"markov": "gated"}),
    "dspark-rnn": ("dspark", {"markov_head_type": "rnn"}, {"markov": "rnn"}),
    "dspark-of-the-best-six": ("dspark", {"dspark_draft_topk": 6}, {}),
    "eagle3": ("eagle3", {}, {}),
}


class Ready:
    """A target and a drafter, recorded; and the drafts that the formulas make of a text."""

    def __init__(self, folder, name, format=Format.F32):
        kind, changes, made = CASES[name]
        self.kind, self.config, self.w = kind, draft_config(kind, **changes), draft_tensors(kind, **made)
        if "vector" in name:
            self.w["mask_embedding"] = np.random.default_rng(3).standard_normal(E).astype(np.float32)
        for part in (n for n in self.w if n.endswith("o_proj.weight")):  # so that the text says as much as the masks
            self.w[part] *= 4
        for part in ("markov_head.markov_w2.weight", "candidate_selector.successor_codebook"):
            if part in self.w:  # so that the token before says as much as the row
                self.w[part] *= 4
        self.target, self.weights, tensors = tiny.target()
        self.drafter = open_drafter(write_drafter(folder, self.config, self.w), self.target, tensors)
        self.record(tensors, format)

    def record(self, tensors, format):
        self.model = self.drafter.model
        self.tensors = {**tensors, **self.drafter.tensors}
        flat = {n: t.shape for n, t in self.tensors.items() if len(t.shape) < 3}
        formats = {n: format if s[1:] and s[1] % 32 == 0 else Format.F32 for n, s in flat.items()}
        planned = {n: SimpleNamespace(shape=s, format=formats[n]) for n, s in flat.items()}
        planned = self.tensors | planned | self.drafter.planned(None if format is Format.F32 else format)
        self.program = lower_and_fuse(self.target.record(planned, drafter=self.model))
        self.draft_program = lower_and_fuse(self.model.record_draft(planned, first=self.target.info.next_layer))
        self.n = min(self.model.n_draft_max, 4)

    def runner(self, *, drafts=True, n_threads=1):
        spec, model = self.model.head(), self.model
        head = _native.make_draft_head(
            spec.kind,
            spec.n_vocab,
            V,
            self.drafter.head_arrays(),
            markov=spec.markov,
            topk=spec.topk,
            confidence_reads_markov=spec.confidence_reads_markov,
            d2t=self.drafter.d2t,
        )
        rows = (model.n_block_rows, model.first_logits_row, model.mask_token_id)
        drafting = Drafting((self.draft_program,), model.kind, self.n, head, *rows) if drafts else None
        store = PackedWeightStore(self.tensors, expand_to_f32=False, n_threads=1)
        capacity = Capacity(16, 1, 16, 64, 3, n_snapshots=2, snapshot_spacing_tokens=16)
        settings = NativeSettings(64, 64, "float32", n_threads, max_draft_rows=24)
        return NativeRunner(self.program, store, capacity, settings, drafting=drafting)

    def taps(self, ids):
        tensors = {name: self.tensors[name] for name in self.weights}
        program = lower_and_fuse(self.target.record(tensors, taps=self.model.taps))
        executor = ReferenceExecutor(program, self.weights)
        executor.step([Chunk(0, ids)])
        return executor.last_hidden[:, : len(self.model.taps) * E]

    def ids(self):
        return np.arange(len(self.w["d2t"])) + self.w["d2t"] if "d2t" in self.w else np.arange(V)

    def drafts(self, ids):
        """The drafts after a text whose last token has no row of the target yet, and how sure the head is of them."""
        embed = self.weights["model.embed_tokens.weight"].astype(np.float64)
        if self.kind == "eagle3":
            return self._chain(ids, embed)
        block = Block(self.w, embed, self.weights["lm_head.weight"][self.ids()])
        rows = [ids[-1], *[self.model.mask_token_id] * (self.model.n_block_rows - 1)]
        hidden, logits = block.run(rows, block.context(self.taps(ids[:-1])))
        first = self.model.first_logits_row
        return self._walk(ids[-1], hidden[first:], logits[first:])

    def _chain(self, ids, embed):
        eagle = Eagle3(self.w, embed, self.config)
        logits, state = eagle.run(ids[1:], eagle.given(self.taps(ids[:-1])))
        found, sure = [], []
        for _ in range(self.n):
            pick = int(logits[-1].argmax())
            found.append(int(self.ids()[pick]))
            sure.append(softmax(logits[-1])[pick])
            logits, state = eagle.run([found[-1]], state[-1:])
        return found, sure

    def _walk(self, token, hidden, logits):
        w, found, sure, state = self.w, [], [], np.zeros(8)
        for h, row in zip(hidden[: self.n], logits, strict=False):
            scores, confidence = row, None
            if self.kind == "dflash2":
                best = np.argsort(-row, kind="stable")[:4]
                edge = w["candidate_selector.predecessor_codebook"][token]
                edge = edge * (w["candidate_selector.hidden_projection.weight"] @ h)
                scores = np.full(len(row), -np.inf)
                scores[best] = row[best] + w["candidate_selector.successor_codebook"][best] @ edge
            elif self.kind == "dspark":
                e = w["markov_head.markov_w1.weight"][token].astype(np.float64)
                z = w["confidence_head.proj.weight"][0] @ np.concatenate([h, e]) + w["confidence_head.proj.bias"][0]
                confidence = 1 / (1 + np.exp(-z))
                bias, state = self._bias(e, h, state)
                scores = row + bias
                topk = self.config.get("dspark_draft_topk")
                if topk:
                    scores[np.argsort(-row, kind="stable")[topk:]] = -np.inf
            pick = int(scores.argmax())
            token = int(self.ids()[pick])
            found.append(token)
            sure.append(softmax(scores)[pick] if confidence is None else confidence)
        return found, sure

    def _bias(self, e, h, state):
        w2, kind = self.w["markov_head.markov_w2.weight"], self.config["markov_head_type"]
        if kind == "gated":
            z = self.w["markov_head.gate_proj.weight"] @ np.concatenate([h, e]) + self.w["markov_head.gate_proj.bias"]
            e = e / (1 + np.exp(-z))
        if kind == "rnn":
            z = self.w["markov_head.joint_proj.weight"] @ np.concatenate([state, e, h])
            gate, candidate, out = np.split(z + self.w["markov_head.joint_proj.bias"], 3)
            gate = 1 / (1 + np.exp(-gate))
            return w2 @ np.tanh(out), gate * state + (1 - gate) * np.tanh(candidate)
        return w2 @ e, state


def softmax(x):
    y = np.exp(x - x.max())
    return y / y.sum()


@pytest.mark.parametrize("name", CASES)
def test_a_step_drafts_what_the_formulas_pick_whatever_was_rejected_before(tmp_path, name):
    ready = Ready(tmp_path, name)
    runner = ready.runner()
    driver = Driver(runner)
    driver.admit(0, PROMPT, 48)
    driver.step((0, 0, 4), n_draft=ready.n)
    tokens = [*PROMPT, *driver.step((0, 4, 7), samples=[0], n_draft=ready.n).row_token.tolist()]
    seen = set()
    for _ in range(8):
        plan = (0, len(tokens) - 1, ready.n + 1)
        result = driver.step(plan, samples=[0], drafts={0: OWN}, n_draft=ready.n)
        tokens += result.row_token.tolist()
        ((drafts, sure),) = drafted(result)
        expected, confidences = ready.drafts(tokens)
        assert drafts == expected
        np.testing.assert_allclose(sure, confidences, atol=2e-3)
        seen.add(tuple(drafts))
    assert len(seen) > 1
    runner.close()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("format", [Format.F32, Format.Q8_0], ids=str)
def test_what_is_emitted_is_what_the_target_alone_emits(tmp_path, name, format):
    ready = Ready(tmp_path, name, format)
    for params in (GREEDY, RANDOM):
        found = []
        for drafts in (False, True):
            runner = ready.runner(drafts=drafts, n_threads=1 + drafts)
            driver = Driver(runner)
            driver.admit(0, PROMPT, 48, params=params)
            n = ready.n if drafts else 0
            tokens = driver.step((0, 0, len(PROMPT)), samples=[0], n_draft=n).row_token.tolist()
            while len(tokens) < 20:
                plan = (0, len(PROMPT) + len(tokens) - 1, n + 1)
                own = {"drafts": {0: OWN}} if drafts else {}
                tokens += driver.step(plan, samples=[0], n_draft=n, **own).row_token.tolist()
            found.append(tokens[:20])
            runner.close()
        assert found[0] == found[1]


@pytest.fixture(scope="class", autouse=True)
def folder(request, tmp_path_factory):
    if request.cls is not None:
        request.cls.ready = Ready(tmp_path_factory.mktemp("drafter"), request.cls.case)


class _Published(DraftingRunnerContract):
    some_come = False

    def make_runner(self):
        return self.ready.runner()


class TestDSpark(_Published):
    case = "dspark-own-vocabulary"


class TestDFlash2(_Published):
    case = "dflash2"


class TestEagle3(_Published):
    case = "eagle3"
