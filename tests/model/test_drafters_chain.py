"""EAGLE-3 against its formulas in numpy, and a model's own draft head as a drafter."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_drafters as tiny
from tiny_drafters import E, H, K, L, V, attend, draft_config, draft_tensors, heads, rms, rotated, silu

from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.models.drafters.checkpoint import open_drafter, open_mtp
from tiercel.models.registry import build_model
from tiercel.ops.passes import lower_and_fuse
from tiercel.quant.formats import Format
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.testing.fill import fill_by_name
from tiercel.testing.native import float_tensors, native_logits, native_runner

IDS = np.random.default_rng(6).integers(0, V, 19).tolist()
USUAL_TAPS = (1, L // 2 - 1, L - 4)


class Eagle3:
    """EAGLE-3 by its formulas, over a growing store of keys and values."""

    def __init__(self, w, embed, config):
        self.w, self.embed, self.config = w, embed, config
        self.k, self.v = np.empty((0, K, tiny.D)), np.empty((0, K, tiny.D))

    def given(self, taps):
        """The row of each token's taps [T, n * E]."""
        x = taps.astype(np.float64)
        if self.config.get("fc_norm"):
            parts = np.split(x, x.shape[1] // E, axis=1)
            x = np.concatenate([rms(part, self.w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], 1)
        if self.config.get("norm_before_fc"):
            x = rms(x, self.w["input_norm.weight"])
        return x @ self.w["fc.weight"].T

    def run(self, ids, given):
        """Logits of rows with the tokens `ids`, and what the next pass is given."""
        w, start = {n.removeprefix("midlayer."): a for n, a in self.w.items()}, len(self.k)
        positions = start + np.arange(len(ids))
        normed = rms(given, w["hidden_norm.weight"])
        x = np.concatenate(
            [rms(self.embed[ids] * self.config.get("input_embedding_scale", 1.0), w["input_layernorm.weight"]), normed],
            1,
        )
        q, k, v = (heads(x @ w[f"self_attn.{n}_proj.weight"].T, m) for n, m in (("q", H), ("k", K), ("v", K)))
        self.k, self.v = np.concatenate([self.k, rotated(k, positions)]), np.concatenate([self.v, v])
        visible = np.arange(len(self.k))[None] <= positions[:, None]
        stream = normed if self.config.get("norm_before_residual") else given
        stream = stream + attend(rotated(q, positions), self.k, self.v, visible) @ w["self_attn.o_proj.weight"].T
        h = rms(stream, w["post_attention_layernorm.weight"])
        gate, up = h @ w["mlp.gate_proj.weight"].T, h @ w["mlp.up_proj.weight"].T
        stream = stream + (silu(gate) * up) @ w["mlp.down_proj.weight"].T
        out = rms(stream, w["norm.weight"])
        return out @ w["lm_head.weight"].T, out if self.config.get("norm_output") else stream


CASES = {
    "plain": {},
    "norm-before-residual": {"norm_before_residual": True},
    "norm-before-fc-and-output": {"norm_before_fc": True, "norm_output": True},
    "norm-of-each-tap": {"fc_norm": True},
    "taps-by-layer": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True}},
    "taps-counted-from-the-embeddings": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]},
    "taps-said-twice-and-scaled-embeddings": {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]},
        "eagle_aux_hidden_state_layer_ids": [0, 3, 5],
        "input_embedding_scale": 3.0,
    },
}
TAPS = {"taps-by-layer": (0, 2, 4), "taps-counted-from-the-embeddings": (-1, 2, 4)}
TAPS["taps-said-twice-and-scaled-embeddings"] = (-1, 2, 4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lower", [lambda p: p, lower_and_fuse], ids=["recorded", "fused"])
def test_eagle3_is_what_the_formulas_say(tmp_path, name, lower):
    """A prompt in chunks, then two passes of one row, each given what the one before gave."""
    target, weights, target_tensors = tiny.target()
    config, tensors = draft_config("eagle3", **CASES[name]), draft_tensors("eagle3")
    rng = np.random.default_rng(2)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + 0.1 * rng.standard_normal(3 * E).astype(np.float32)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": 1 + 0.1 * rng.standard_normal(E).astype(np.float32) for i in range(3)}
    drafter = open_drafter(tiny.write_drafter(tmp_path, config, tensors), target, target_tensors)
    model = drafter.model
    assert model.taps == TAPS.get(name, USUAL_TAPS)
    assert (model.kind, model.n_block_rows, model.first_logits_row) == ("chain", 1, 0)
    both = {**target_tensors, **drafter.tensors}
    floats = weights | {n: t.float32() for n, t in drafter.tensors.items()}
    run_target = ReferenceExecutor(lower_and_fuse(target.record(both, drafter=model)), floats)
    draft_program = model.record_draft(both, first=L)
    assert draft_program.kv_layers == model.kv_layers(L)
    assert model.context_kv_layers(L) == ()
    run_draft = ReferenceExecutor(lower(draft_program), floats)
    tapped = ReferenceExecutor(lower_and_fuse(target.record(target_tensors, taps=model.taps)), weights)
    tapped.step([Chunk(0, IDS[:-1])])
    reference = Eagle3(tensors, weights["model.embed_tokens.weight"].astype(np.float64), config)
    given = reference.given(tapped.last_hidden[:, : 3 * E])
    expected, state = reference.run(IDS[1:], given)

    rows, begin = [], 0
    for n in (5, 1, len(IDS) - 7):
        run_target.step([Chunk(0, IDS[begin : begin + n])])
        ours = run_target.last_hidden
        np.testing.assert_allclose(ours, given[begin : begin + n], atol=5e-4)
        rows.append(run_draft.step([Chunk(0, IDS[1:][begin : begin + n], given=ours)]))
        begin += n
    np.testing.assert_allclose(np.concatenate(rows), expected, atol=1e-3)
    for token in (17, 90):
        np.testing.assert_allclose(run_draft.last_hidden[-1], state[-1], atol=1e-3)
        expected, state = reference.run([token], state[-1:])
        logits = run_draft.step([Chunk(0, [token], given=run_draft.last_hidden[-1:])])
        np.testing.assert_allclose(logits, expected, atol=1e-3)


def test_eagle3_changes_no_bit_of_its_target_and_what_it_is_given_depends_on_no_chunks(tmp_path):
    target, _, target_tensors = tiny.target()
    folder = tiny.write_drafter(tmp_path, draft_config("eagle3"), draft_tensors("eagle3"))
    drafter = open_drafter(folder, target, target_tensors)
    both = {**target_tensors, **drafter.tensors}
    planned = {**target_tensors, **drafter.planned(Format.Q8_0)}
    plain = native_runner(target.record(target_tensors), target_tensors, n_threads=1)
    tapped = native_runner(target.record(planned, drafter=drafter.model), both, n_threads=1)
    try:
        n = len(IDS)
        expected = native_logits(plain, IDS, [n])
        assert native_logits(tapped, IDS, [n]).tobytes() == expected.tobytes()
        whole = tapped.last_hidden(n)
        assert native_logits(tapped, IDS, [3, n - 10, 7]).tobytes() == expected.tobytes()
        assert tapped.last_hidden(7).tobytes() == whole[-7:].tobytes()
    finally:
        plain.close()
        tapped.close()


def fixture(name, n_modules=1):
    path = Path(__file__).parent / "mtp_fixtures" / f"{name}.json"
    field = "mtp_num_hidden_layers" if "qwen" in name else "num_nextn_predict_layers"
    config = json.loads(path.read_text())["config"] | {field: n_modules}
    model = build_model(config)
    shapes = model.expected_weights() | model.mtp_weights()
    weights = {n: fill_by_name(n, shape, norms_add_one=model.norms_add_one) for n, shape in shapes.items()}
    return model, weights, float_tensors(weights)


NAMES = sorted(path.stem for path in (Path(__file__).parent / "mtp_fixtures").glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_models_own_head_drafts_by_its_own_program(name):
    target, _, tensors = fixture(name)
    drafter = open_mtp(target, tensors)
    model, first = drafter.model, target.info.next_layer
    assert (model.name, model.kind, model.taps) == ("mtp", "chain", ())
    assert target.record(tensors, drafter=model).text() == target.record(tensors, keeps_hidden=True).text()
    program = model.record_draft(tensors, first=first)
    assert program.text() == target.record_mtp(tensors).text()
    assert model.kv_layers(first) == program.kv_layers
    assert {w.name for w in program.weights()} == set(model.draft_weights()) | set(model.shared_weights())
    assert set(drafter.planned()) == set(model.draft_weights())
    assert model.head().n_vocab == target.info.vocab_size


def test_a_checkpoint_without_a_whole_head_is_refused_by_tensor():
    target, _, tensors = fixture("qwen3_5")
    first, *_, last = target.mtp_weights()
    with pytest.raises(ModelFileError, match="no draft head"):
        open_mtp(target, {n: t for n, t in tensors.items() if n != first})
    with pytest.raises(ModelFileError, match=last):
        open_mtp(target, {n: t for n, t in tensors.items() if n != last})
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM has no draft head"):
        open_mtp(tiny.target()[0], {})


@pytest.mark.parametrize("name", ["deepseek_v3_experts", "ling", "qwen3_5", "qwen3_5_moe"])
def test_a_further_module_is_the_firsts_arithmetic_over_weights_and_keys_of_its_own(name):
    """What is all modules' in Qwen3.5 it shares: the join, and the norms around the layer."""
    target, weights, _ = fixture(name, n_modules=3)
    first, third = (list(target.mtp_module_weights(module)) for module in (0, 2))
    shared = {"fc", "norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"} if "qwen" in name else set()
    assert {part.split(".")[1] for part in set(first) & set(third)} == shared
    weights |= {b: weights[a] for a, b in zip(first, third, strict=True)}
    given = np.random.default_rng(2).standard_normal((len(IDS), target.info.hidden_size)).astype(np.float32)
    found = []
    for module in (0, 2):
        program = target.record_mtp(float_tensors(weights), module=module)
        assert [layer.index for layer in program.kv_layers] == [target.info.next_layer + module]
        found.append(ReferenceExecutor(program, weights).step([Chunk(0, IDS, given=given)]))
    np.testing.assert_array_equal(*found)
    assert open_mtp(target, float_tensors(weights)).model.n_modules == 3
    with pytest.raises(UnsupportedModel, match="of 4 modules but of 3"):
        target.record_mtp({}, module=3)


@pytest.mark.parametrize("name", ["deepseek_v3_experts", "qwen3_5"])
def test_a_checkpoint_of_fewer_modules_than_its_config_says_is_refused_by_tensor(name):
    """But for who makes no more drafts than it has."""
    target, _, tensors = fixture(name, n_modules=2)
    missing = next(n for n in target.mtp_module_weights(1) if n not in target.mtp_module_weights(0))
    fewer = {n: t for n, t in tensors.items() if n != missing}
    with pytest.raises(ModelFileError, match=missing):
        open_mtp(target, fewer)
    assert open_mtp(target, fewer, n_draft=1).model.n_modules == 1


def test_layers_of_a_head_that_do_not_follow_the_targets_are_refused():
    target, _, tensors = fixture("qwen3_5")
    with pytest.raises(UnsupportedModel, match="draft head's layers"):
        open_mtp(target, tensors).model.kv_layers(99)
