"""DFlash, DFlash2 and DSpark against their formulas in numpy, by the definitions of ops and lowered for the core."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_drafters as tiny
from tiny_drafters import Block, E, L, V, draft_config, draft_tensors, write_drafter

from tiercel import _native
from tiercel.models.drafters.checkpoint import open_drafter
from tiercel.models.drafters.config import in_one_form
from tiercel.models.drafters.dflash import DFlash
from tiercel.models.registry import build_model
from tiercel.ops.passes import Passes, lower_and_fuse
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import StepPlan
from tiercel.quant.formats import Format
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.testing.fill import fill_by_name, tiny_checkpoint
from tiercel.testing.native import float_tensors, native_logits, native_runner

FIXTURES = Path(__file__).parent / "fixtures"
IDS = np.random.default_rng(5).integers(0, V - 1, 23).tolist()
LOWERINGS = {
    "recorded": lambda p: p,
    "fused": lower_and_fuse,
    "no-passes": lambda p: lower_and_fuse(p, Passes.none()),
}


class Pair:
    """A target with a drafter, both by definition."""

    def __init__(self, folder, config, tensors, lower=lambda p: p, **target_changes):
        self.target, self.weights, self.tensors = self.make_target(**target_changes)
        self.drafter = open_drafter(write_drafter(folder, config, tensors), self.target, self.tensors)
        self.model, self.first = self.drafter.model, self.target.info.next_layer
        self.all = {**self.tensors, **self.drafter.tensors}
        self.floats = self.weights | {name: t.float32() for name, t in self.drafter.tensors.items()}
        self.program = self.target.record(self.all, drafter=self.model)
        self.draft_program = self.model.record_draft(self.all, first=self.first)
        self.run_target = ReferenceExecutor(lower(self.program), self.floats, max_tokens=64)
        self.run_draft = ReferenceExecutor(lower(self.draft_program), self.floats, max_tokens=64)

    def make_target(self, **changes):
        return tiny.target(**changes)

    def taps(self, ids):
        """The streams that the drafter reads, from a program of its own."""
        executor = ReferenceExecutor(
            lower_and_fuse(self.target.record(self.tensors, taps=self.model.taps)), self.weights
        )
        executor.step([Chunk(0, ids)])
        return executor.last_hidden[:, : len(self.model.taps) * E]

    def block(self, last):
        return [last, *[self.model.mask_token_id] * (self.model.n_block_rows - 1)]

    def draft(self, *, sequences=((0, IDS),)):
        """Logits of the draft rows, and the rows' states, after each sequence's tokens but the last."""
        for sequence, ids in sequences:
            self.run_target.step([Chunk(sequence, ids[:-1])])
            self.run_draft.adopt(sequence, self.run_target, len(ids) - 1)
        n = self.model.n_draft_max
        logits = self.run_draft.step([Chunk(s, self.block(ids[-1]), n) for s, ids in sequences])
        return logits, self.run_draft


def definition(pair, tensors, **options):
    head = pair.weights["lm_head.weight"]
    if "d2t" in tensors:
        head = head[np.arange(len(tensors["d2t"])) + tensors["d2t"]]
    return Block(tensors, pair.weights["model.embed_tokens.weight"], tensors.get("lm_head.weight", head), **options)


CASES = {
    "dflash": ("dflash", {}, {}, {}),
    "dflash-no-qk-norm": ("dflash", {}, {"qk_norm": False}, {}),
    "dflash-causal": ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [-1, 1], "causal": True}},
        {"n_taps": 2}, {"causal": True}),
    "dflash-sliding": ("dflash", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}, {},
        {"causal": True, "window": 9}),
    "dflash-window-both-ways": ("dflash",
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "sliding_window_non_causal": True}, {},
        {"window": 9}),
    "dflash-from-anchor": ("dflash", {"sample_from_anchor": True}, {}, {}),
    "dflash2": ("dflash2", {}, {}, {}),
    "dflash2-own-vocabulary": ("dflash2", {"draft_vocab_size": 40}, {"n_draft": 40}, {}),
    "dspark": ("dspark", {}, {}, {}),
    "dspark-mask-row-for-itself": ("dspark", {"sample_from_anchor": False}, {}, {}),
    "dspark-own-vocabulary": ("dspark", {"draft_vocab_size": 40}, {"n_draft": 40, "qk_norm": False}, {}),
    "dspark-gated": ("dspark", {"markov_head_type": "gated"}, {"markov": "gated"}, {}),
}  # fmt: skip


@pytest.fixture(params=CASES, ids=str)
def case(request, tmp_path):
    kind, changes, made, run = CASES[request.param]
    tensors = draft_tensors(kind, **made)
    return tmp_path, draft_config(kind, **changes), tensors, run


@pytest.mark.parametrize("lower", LOWERINGS.values(), ids=LOWERINGS)
def test_context_and_block_are_what_the_formulas_say(case, lower):
    folder, config, tensors, run = case
    pair = Pair(folder, config, tensors, lower)
    reference = definition(pair, tensors)
    assert pair.program.kv_layers[-2:] == pair.draft_program.kv_layers == pair.model.kv_layers(L)
    logits, executor = pair.draft()
    context = reference.context(pair.taps(IDS[:-1]))
    kept = pair.run_target._sequences[0]
    for i, (k, v) in enumerate(context):
        np.testing.assert_allclose(kept.keys[pair.first + i], k, atol=2e-4)
        np.testing.assert_allclose(kept.values[pair.first + i], v, atol=2e-4)
    hidden, expected = reference.run(pair.block(IDS[-1]), context, **run)
    np.testing.assert_allclose(logits, expected[pair.model.first_logits_row :], atol=5e-4)
    np.testing.assert_allclose(executor.last_hidden, hidden, atol=5e-4)


def test_scales_a_cap_and_a_mask_vector_count(tmp_path):
    config = draft_config("dflash")
    config["dflash_config"] |= {
        "input_embedding_scale": 3.0,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 2.0,
    }
    tensors = draft_tensors("dflash")
    tensors["mask_embedding"] = np.random.default_rng(9).standard_normal((1, E)).astype(np.float32)
    pair = Pair(tmp_path, config, tensors, lower_and_fuse)
    assert pair.model.mask_token_id == -1
    tensors["mask_embedding"] = tensors["mask_embedding"][0]
    reference = definition(pair, tensors, scale=3.0, multiplier=0.5, softcap=2.0)
    logits, _ = pair.draft()
    _, expected = reference.run(pair.block(IDS[-1]), reference.context(pair.taps(IDS[:-1])))
    np.testing.assert_allclose(logits, expected[1:], atol=5e-4)


def test_an_embedding_and_a_head_of_its_own_are_used(tmp_path):
    rng = np.random.default_rng(8)
    tensors = draft_tensors("dspark")
    tensors |= {n: rng.standard_normal((V, E)).astype(np.float32) for n in ("embed_tokens.weight", "lm_head.weight")}
    pair = Pair(tmp_path, draft_config("dspark"), tensors)
    assert pair.model.shared_weights() == ()
    reference = Block(tensors, tensors["embed_tokens.weight"], tensors["lm_head.weight"])
    logits, _ = pair.draft()
    _, expected = reference.run(pair.block(IDS[-1]), reference.context(pair.taps(IDS[:-1])))
    np.testing.assert_allclose(logits, expected, atol=2e-3)


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_two_sequences_draft_as_each_alone(tmp_path, kind):
    config, tensors = draft_config(kind), draft_tensors(kind)
    sequences = ((0, IDS), (1, IDS[3:15]))
    both, _ = Pair(tmp_path, config, tensors).draft(sequences=sequences)
    alone = [Pair(tmp_path, config, tensors).draft(sequences=(one,))[0] for one in sequences]
    np.testing.assert_array_equal(both, np.concatenate(alone))


def test_convolutions_that_pass_rows_through_make_dflash2_dflash(tmp_path):
    tensors = draft_tensors("dflash2")
    plain = {n: w for n, w in tensors.items() if "conv" not in n and "selector" not in n}
    for name, w in tensors.items():
        if name.endswith("base_kernel"):
            w[:] = 0
            w[:, 0] = 1
        elif "kernel_projection" in name:
            w[:] = 0
    got, _ = Pair(tmp_path / "2", draft_config("dflash2"), tensors).draft()
    expected, _ = Pair(tmp_path / "1", draft_config("dflash"), plain).draft()
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("from_anchor", [True, False])
def test_without_its_head_dspark_is_a_parallel_head(tmp_path, from_anchor):
    """The bias and the confidence are no part of the draft pass: with W2 = 0 a row's best logit is its draft."""
    tensors = draft_tensors("dspark")
    plain = {n: w for n, w in tensors.items() if "head" not in n}
    config = draft_config("dspark", sample_from_anchor=from_anchor)
    dspark = Pair(tmp_path / "dspark", config, tensors)
    dflash = Pair(tmp_path / "dflash", draft_config("dflash", block_size=4, sample_from_anchor=from_anchor), plain)
    np.testing.assert_array_equal(dspark.draft()[0], dflash.draft()[0])
    assert dspark.model.n_draft_max == (4 if from_anchor else 3)


def test_a_drafter_changes_no_bit_of_its_target_and_ragged_chunks_leave_the_same_pages(case):
    folder, config, tensors, _ = case
    pair = Pair(folder, config, tensors)
    for weights in (None, Format.Q8_0):
        planned = {name: t for name, t in pair.tensors.items()} | pair.drafter.planned(weights)
        plain = native_runner(pair.target.record(pair.tensors), pair.tensors, n_threads=1)
        both = native_runner(pair.target.record(planned, drafter=pair.model), pair.all, n_threads=1)
        try:
            expected = native_logits(plain, IDS, [len(IDS)])
            found = []
            for chunks in ([len(IDS)], [1, 7, 1, 14], [1] * len(IDS)):
                # Pages never written to begin as zeros; what lies behind the end is not compared.
                assert native_logits(both, IDS, chunks).tobytes() == expected.tobytes()
                found.append(both.read_pages([0, 1]))
            assert [bytes(p) for p in found[0]] == [bytes(p) for p in found[1]] == [bytes(p) for p in found[2]]
        finally:
            plain.close()
            both.close()


def draft_natively(pair, pages, slots, level=None, n_threads=1):
    """Logits of each slot's block after its text but the last token, over pages that the target's runner left."""
    runner = native_runner(pair.draft_program, pair.all, level=level, n_threads=n_threads)
    try:
        own = len(runner.read_pages([0])[0])
        for slot, ids in slots:
            row = pair.block(ids[-1])
            runner.admit(slot, [*ids[:-1], *row], len(ids) - 1 + len(row), SamplingParams(temperature=0.0), 0, ())
            runner.set_pages(slot, 0, [4 * slot + i for i in range(4)])
            # A page has the layers one after the other, the drafter's last.
            runner.write_pages([4 * slot + i for i in range(2)], [page[-own:] for page in pages[slot]])
        n = pair.model.n_block_rows
        starts = [len(ids) - 1 for _, ids in slots]
        arrays = (np.array(x, np.int32) for x in ([slot for slot, _ in slots], starts, [n] * len(slots)))
        no, yes = (np.array([flag] * len(slots)) for flag in (False, True))
        runner.submit(StepPlan(0, *arrays, no, yes, n_logprobs=None))
        runner.collect()
        return runner.last_logits(n * len(slots)).reshape(len(slots), n, -1)[:, pair.model.first_logits_row :]
    finally:
        runner.close()


# As a model of its own, as here, a program takes the tokens that it has logits of.
@pytest.mark.parametrize("case", [name for name in CASES if "own-vocabulary" not in name], indirect=True)
@pytest.mark.parametrize("level", _native.kernel_levels())
def test_the_core_drafts_what_the_formulas_say_beside_others_on_any_threads(case, level):
    folder, config, tensors, run = case
    pair = Pair(folder, config, tensors)
    reference, texts = definition(pair, tensors), [(0, IDS), (1, IDS[4:])]
    runner = native_runner(pair.program, pair.all, level=level, n_threads=1)
    pages = {}
    for slot, ids in texts:
        native_logits(runner, ids[:-1], [len(ids) - 1])
        pages[slot] = [bytes(page) for page in runner.read_pages([0, 1])]
    runner.close()
    both = draft_natively(pair, pages, texts, level)
    for (slot, ids), got in zip(texts, both, strict=True):
        _, expected = reference.run(pair.block(ids[-1]), reference.context(pair.taps(ids[:-1])), **run)
        np.testing.assert_allclose(got, expected[pair.model.first_logits_row :], atol=2e-3)
        assert draft_natively(pair, pages, [(slot, ids)], level, n_threads=2).tobytes() == got.tobytes()


@pytest.mark.parametrize(
    "name", ["gemma3_pattern_3_softcap", "qwen3_moe", "qwen3_5", "deepseek_v3_experts", "lfm2", "ling", "mamba2"]
)
def test_every_family_of_targets_keeps_context_whatever_the_chunks(name):
    config = json.loads((FIXTURES / f"{name}.json").read_text())["config"]
    target, weights = build_model(config), tiny_checkpoint(config)
    tensors, width = float_tensors(weights), target.info.hidden_size
    theta = next(iter(target.rope_thetas), 10000.0)
    sizes = {"hidden_size": width, "vocab_size": target.info.vocab_size, "num_target_layers": target.n_tap_layers}
    config = draft_config("dflash", **sizes, rope_theta=theta)
    config["dflash_config"] = {"target_layer_ids": [-1, 1], "mask_token_id": 1}
    model = DFlash.from_config(in_one_form(config)[1], target, frozenset())
    own = {n: fill_by_name(n, shape) for n, shape in model.draft_weights().items()}
    both = {**tensors, **float_tensors(own)}
    program = target.record(both, drafter=model)
    assert model.extended(target.info).kv_layers == program.kv_layers
    plain = native_runner(target.record(tensors), tensors, n_threads=1)
    with_context = native_runner(program, both, n_threads=1)
    try:
        expected, pages = native_logits(plain, IDS, [len(IDS)]), []
        for chunks in ([len(IDS)], [1, 7, 1, 14]):
            assert native_logits(with_context, IDS, chunks).tobytes() == expected.tobytes()
            pages.append([bytes(page) for page in with_context.read_pages([0, 1])])
        assert pages[0] == pages[1]
    finally:
        plain.close()
        with_context.close()


def test_what_a_drafter_says_of_itself(tmp_path):
    pair = Pair(tmp_path, draft_config("dflash2"), draft_tensors("dflash2"))
    model = pair.model
    assert (model.kind, model.n_block_rows, model.n_draft_max, model.first_logits_row) == ("block", 5, 4, 1)
    assert model.taps == (0, 2, 3)
    assert model.mask_token_id == tiny.MASK
    layers = model.kv_layers(L)
    assert [layer.index for layer in layers] == [L, L + 1]
    head = model.head()
    assert (head.kind, head.rank, head.topk, head.n_vocab, head.d2t) == ("selector", 8, 4, V, None)
    assert {role: a.shape for role, a in pair.drafter.head_arrays().items()} == {
        "predecessor": (V, 8),
        "successor": (V, 8),
        "projection": (8, E),
    }
    read = {w.name for w in pair.draft_program.weights()} | {w.name for w in pair.program.weights()}
    assert set(model.draft_weights()) - set(head.weights.values()) <= read
    assert set(model.shared_weights()) == {"model.embed_tokens.weight", "lm_head.weight"}
