"""DSpark drafters in Kimi K3's layout: against their formulas in numpy, and in the native step beside K3's states."""

import numpy as np
import pytest
import tiny_drafters
import tiny_latent_drafters as tiny
from test_drafters_block import IDS, LOWERINGS, Pair, draft_natively
from test_drafters_in_the_step import Ready
from tiny_latent_drafters import LatentBlock, V, draft_config, draft_tensors, tapped, write_drafter

from tiercel import _native
from tiercel.models.drafters.checkpoint import open_drafter
from tiercel.ops.passes import lower_and_fuse
from tiercel.quant.formats import Format
from tiercel.testing.draft_kit import DraftingRunnerContract, drafted
from tiercel.testing.native import native_logits, native_runner
from tiercel.testing.runner_kit import GREEDY, OWN, PROMPT, RANDOM, Driver
from tiercel.testing.state_kit import StatefulRunnerContract

NORMED = {"fc_norm": True, "aux_hidden_stream": "attn_res", "target_layer_ids": [-1, 2, 3, 4], "num_target_layers": 4}
CASES = {
    "as-published": ({}, {}, {}),
    "mixed-and-normed-taps": (NORMED, {"n_taps": 4, "tap_norms": True}, {}),
    "causal": ({"dflash_config": {"causal": True}, "rope_parameters": None}, {}, {"causal": True}),
    "mask-rows-for-themselves": ({"sample_from_anchor": False, "block_size": 5}, {}, {}),
    "without-confidence": ({"enable_confidence_head": None, "block_size": 4}, {"confidence": False}, {}),
    "of-a-llama": ({"target_layer_ids": [0, 2, 3], "target_num_hidden_layers": 7}, {}, {}),
}


def made_target(name):
    return tiny_drafters.target() if name == "of-a-llama" else tiny.target()


def taps_of(pair, config, ids):
    """What a config says that its drafter reads of the target."""
    stream = config.get("aux_hidden_stream", "prefix")
    return tapped(pair.target, pair.weights, config["target_layer_ids"], stream, ids)


class LatentPair(Pair):
    """A target of Kimi K3's kind, or a llama, with such a drafter."""

    def __init__(self, folder, name, tensors=None, lower=lambda p: p):
        changes, made, self.run = CASES[name]
        self.draft_config, self.w = draft_config(**changes), draft_tensors(**made) if tensors is None else tensors
        self.make_target = lambda: made_target(name)
        super().__init__(folder, self.draft_config, self.w, lower)

    def taps(self, ids):
        return taps_of(self, self.draft_config, ids)

    def definition(self):
        embedding, head = (self.weights[name] for name in self.target.ends())
        return LatentBlock(self.w, embedding, head, self.draft_config)


@pytest.mark.parametrize("lower", LOWERINGS.values(), ids=LOWERINGS)
@pytest.mark.parametrize("name", CASES)
def test_context_and_block_are_what_the_formulas_say(tmp_path, name, lower):
    pair = LatentPair(tmp_path, name, lower=lower)
    reference = pair.definition()
    assert pair.program.kv_layers[-2:] == pair.draft_program.kv_layers == pair.model.kv_layers(pair.first)
    logits, executor = pair.draft()
    context = reference.context(pair.taps(IDS[:-1]))
    for i, (latent, pe) in enumerate(context):
        rows = pair.run_target._sequences[0].keys[pair.first + i][:, 0]
        # Pairs are kept as halves, here and in the queries.
        np.testing.assert_allclose(rows, np.concatenate([latent, pe[:, 0::2], pe[:, 1::2]], 1), atol=2e-4)
    hidden, expected = reference.run(pair.block(IDS[-1]), context, **pair.run)
    np.testing.assert_allclose(logits, expected[pair.model.first_logits_row :], atol=5e-4)
    np.testing.assert_allclose(executor.last_hidden, hidden, atol=5e-4)


def test_what_such_a_drafter_says_of_itself(tmp_path):
    pair = LatentPair(tmp_path, "as-published")
    model = pair.model
    assert (model.kind, model.name, model.n_block_rows, model.n_draft_max, model.first_logits_row) == (
        *("block", "dspark"),
        *(7, 7, 0),
    )
    assert (model.taps, model.tap_stream, model.mask_token_id) == ((0, 3, 4), "prefix", tiny.MASK)
    read = {w.name for w in pair.draft_program.weights()} | {w.name for w in pair.program.weights()}
    assert set(model.draft_weights()) - set(model.head().weights.values()) <= read
    assert set(model.shared_weights()) == {"model.embed_tokens.weight", "lm_head.weight"} <= read
    assert "draft.embed_tokens.weight" not in pair.drafter.tensors
    assert model.head().weights.keys() == {"w1", "w2", "confidence", "confidence_bias"}
    assert model.extended(pair.target.info).kv_layers == pair.program.kv_layers


@pytest.mark.parametrize("name", CASES)
def test_it_changes_no_bit_of_its_target_and_ragged_chunks_leave_the_same_pages(tmp_path, name):
    pair = LatentPair(tmp_path, name)
    for weights in (None, Format.Q8_0):
        planned = {name: t for name, t in pair.tensors.items()} | pair.drafter.planned(weights)
        plain = native_runner(pair.target.record(pair.tensors), pair.tensors, n_threads=1)
        both = native_runner(pair.target.record(planned, drafter=pair.model), pair.all, n_threads=1)
        try:
            expected, found = native_logits(plain, IDS, [len(IDS)]), []
            for chunks in ([len(IDS)], [1, 7, 1, 14], [1] * len(IDS)):
                assert native_logits(both, IDS, chunks).tobytes() == expected.tobytes()
                found.append([bytes(page) for page in both.read_pages([0, 1])])
            assert found[0] == found[1] == found[2]
        finally:
            plain.close()
            both.close()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", _native.kernel_levels())
def test_the_core_drafts_what_the_formulas_say_beside_others_on_any_threads(tmp_path, name, level):
    pair = LatentPair(tmp_path, name)
    reference, texts = pair.definition(), [(0, IDS), (1, IDS[4:])]
    runner, pages = native_runner(pair.program, pair.all, level=level, n_threads=1), {}
    for slot, ids in texts:
        native_logits(runner, ids[:-1], [len(ids) - 1])
        pages[slot] = [bytes(page) for page in runner.read_pages([0, 1])]
    runner.close()
    both = draft_natively(pair, pages, texts, level)
    for (slot, ids), got in zip(texts, both, strict=True):
        _, expected = reference.run(pair.block(ids[-1]), reference.context(pair.taps(ids[:-1])), **pair.run)
        np.testing.assert_allclose(got, expected[pair.model.first_logits_row :], atol=2e-3)
        assert draft_natively(pair, pages, [(slot, ids)], level, n_threads=2).tobytes() == got.tobytes()


class LatentReady(Ready):
    """Such a pair, recorded for the step; see `Ready`."""

    def __init__(self, folder, name="as-published", format=Format.F32, *, w2=4.0):
        changes, made, self.run = CASES[name]
        self.kind, self.config, self.w = "dspark", draft_config(**changes), draft_tensors(**made)
        for part in (n for n in self.w if n.endswith("o_proj.weight")):
            self.w[part] *= 4
        self.w["markov_head.markov_w2.weight"] *= w2
        self.target, self.weights, tensors = made_target(name)
        self.drafter = open_drafter(write_drafter(folder, self.config, self.w), self.target, tensors)
        self.record(tensors, format)

    def taps(self, ids):
        return taps_of(self, self.config, ids)

    def rows(self, ids):
        """The block's hidden rows and logits after a text, from the first draft's row on."""
        embedding, head = (self.weights[n] for n in self.target.ends())
        block = LatentBlock(self.w, embedding, head, self.config)
        rows = [ids[-1], *[self.model.mask_token_id] * (self.model.n_block_rows - 1)]
        hidden, logits = block.run(rows, block.context(self.taps(ids[:-1])), **self.run)
        return hidden[self.model.first_logits_row :], logits[self.model.first_logits_row :]

    def drafts(self, ids):
        return self._walk(ids[-1], *self.rows(ids))


def steps_of(ready, n_steps=6):
    """Generate by drafting and verifying; gives after each step the tokens known, and what was drafted."""
    runner = ready.runner()
    driver = Driver(runner)
    driver.admit(0, PROMPT, 48)
    driver.step((0, 0, 4), n_draft=ready.n)
    tokens = [*PROMPT, *driver.step((0, 4, 7), samples=[0], n_draft=ready.n).row_token.tolist()]
    for _ in range(n_steps):
        plan = (0, len(tokens) - 1, ready.n + 1)
        result = driver.step(plan, samples=[0], drafts={0: OWN}, n_draft=ready.n)
        tokens += result.row_token.tolist()
        yield list(tokens), drafted(result)[0]
    runner.close()


@pytest.mark.parametrize("name", [n for n in CASES if n != "without-confidence"])
def test_a_step_drafts_what_the_formulas_pick_whatever_was_rejected_before(tmp_path, name):
    ready, seen = LatentReady(tmp_path, name), set()
    for tokens, (drafts, sure) in steps_of(ready):
        expected, confidences = ready.drafts(tokens)
        assert drafts == expected
        np.testing.assert_allclose(sure, confidences, atol=2e-3)
        seen.add(tuple(drafts))
    assert len(seen) > 1


def test_without_its_bias_each_row_is_drafted_by_itself(tmp_path):
    """With W2 = 0 it is a parallel head: a row's best logit is its draft, whatever was drafted before it."""
    ready, with_bias = LatentReady(tmp_path / "0", w2=0.0), LatentReady(tmp_path / "4")
    differs = False
    for tokens, (drafts, _) in steps_of(ready):
        _, logits = ready.rows(tokens)
        assert drafts == logits[: ready.n].argmax(1).tolist()
        differs |= with_bias.drafts(tokens)[0] != drafts
    assert differs


@pytest.mark.parametrize("name", ["as-published", "mixed-and-normed-taps"])
@pytest.mark.parametrize("format", [Format.F32, Format.Q8_0], ids=str)
def test_what_is_emitted_is_what_the_target_alone_emits(tmp_path, name, format):
    ready = LatentReady(tmp_path, name, format)
    for params in (GREEDY, RANDOM):
        found = []
        for drafts in (False, True):
            runner = ready.runner(drafts=drafts, n_threads=1 + drafts)
            driver, n = Driver(runner), ready.n if drafts else 0
            driver.admit(0, PROMPT, 48, params=params)
            tokens = driver.step((0, 0, len(PROMPT)), samples=[0], n_draft=n).row_token.tolist()
            while len(tokens) < 20:
                plan = (0, len(PROMPT) + len(tokens) - 1, n + 1)
                own = {"drafts": {0: OWN}} if drafts else {}
                tokens += driver.step(plan, samples=[0], n_draft=n, **own).row_token.tolist()
            found.append(tokens[:20])
            runner.close()
        assert found[0] == found[1]


@pytest.mark.parametrize("n_rejected", range(5))
def test_what_is_drafted_after_rejected_drafts_is_what_a_fresh_runner_drafts(tmp_path, n_rejected):
    """To the last bit of its confidences too, whether all four came or none, over states that were tried on a copy."""
    ready = LatentReady(tmp_path, format=Format.Q8_0)
    plain, runner = ready.runner(drafts=False), ready.runner()
    alone, driver = Driver(plain), Driver(runner)
    alone.admit(0, PROMPT, 48)
    want = [*PROMPT, *alone.generate(0, len(PROMPT), 12)]
    driver.admit(0, PROMPT, 48)
    driver.step((0, 0, 4), n_draft=4)
    driver.step((0, 4, len(PROMPT) - 4), samples=[0], n_draft=4)
    n = len(PROMPT) + 1
    for n_foretold in (4, 1, 0, 2):
        n_right = min(4 - n_rejected, n_foretold)
        foretold = [*want[n : n + n_right], *((t + 1) % 100 for t in want[n + n_right : n + n_foretold])]
        step = driver.step((0, n - 1, n_foretold + 1), samples=[0], drafts={0: (n, foretold)}, n_draft=4)
        n += n_right + 1
        assert step.row_token.tolist() == want[n - n_right - 1 : n]
        fresh = Driver(runner)
        fresh.admit(1, want[: n - 1], 48, n_prompt=len(PROMPT))
        assert drafted(step) == drafted(fresh.step((1, 0, n - 1), samples=[1], n_draft=4))
    plain.close()
    runner.close()


@pytest.fixture(scope="class", autouse=True)
def made(request, tmp_path_factory):
    if request.cls is not None:
        request.cls.ready = LatentReady(tmp_path_factory.mktemp("drafter"))


class TestLatentDSpark(StatefulRunnerContract, DraftingRunnerContract):
    some_come = False

    def make_runner(self):
        return self.ready.runner()


def test_its_head_has_the_targets_vocabulary(tmp_path):
    ready = LatentReady(tmp_path)
    assert ready.draft_program.output.width == V
    assert lower_and_fuse(ready.target.record(ready.tensors, drafter=ready.model)).hidden is None
