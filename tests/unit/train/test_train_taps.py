"""What is kept of texts is what the target computes of them, whatever is computed beside them."""

import numpy as np
import pytest

from tiercel import LLM
from tiercel.base.config import EngineOptions
from tiercel.base.errors import TiercelError, UnsupportedModel
from tiercel.boot.plan import make_plan
from tiercel.protocol.params import SamplingParams
from tiercel.testing.tiny_model import write_tiny_encoder, write_tiny_model
from tiercel.train.shape import KINDS
from tiercel.train.taps import TapFiles, TapRunner, record_taps
from tiercel.train.target import DraftSizes, Target
from tiercel.train.texts import Conversation

TAPS, E = (1, 2), 64


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", config={"num_hidden_layers": 4})


@pytest.fixture(scope="module")
def texts(model):
    """Greedy answers of the engine, of several lengths."""
    prompts = [list(range(40, 40 + n)) for n in (5, 17, 30, 9, 3)]
    with LLM(str(model), threads=1, max_model_len=128, max_num_seqs=4, speculative="off") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
    made, begin = [], 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = np.array([*prompt, *output.outputs[0].token_ids], np.int32)
        made.append(Conversation(ids, len(prompt), True, True, 0, begin))
        begin += len(ids)
    return made


def plan_of(model, **options):
    usual = {"threads": 1, "max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 100}
    return make_plan(EngineOptions(model=str(model), speculative="off", **{**usual, **options}))


def rows_of(model, texts, **options):
    plan = plan_of(model, **options)
    runner = TapRunner(plan, TAPS)
    try:
        return list(runner.rows([one.token_ids for one in texts]))
    finally:
        runner.close()
        plan.checkpoint.close()


def test_the_last_rows_are_those_that_the_target_answered_by(model, texts):
    plan = plan_of(model)
    with plan.checkpoint:
        head = Target(plan).head()
    for one, rows in zip(texts, rows_of(model, texts), strict=True):
        assert rows.shape == (len(one.token_ids), 3 * E)
        answered = (rows[one.answer_start - 1 : -1, 2 * E :].astype(np.float32) @ head.T).argmax(1)
        assert answered.tolist() == one.token_ids[one.answer_start :].tolist()


def test_a_text_alone_has_the_rows_that_it_has_beside_others(model, texts):
    beside = rows_of(model, texts)
    for one, rows in zip(texts, beside, strict=True):
        (alone,) = rows_of(model, [one], max_num_seqs=1)
        assert np.array_equal(alone.view(np.uint16), rows.view(np.uint16))


def test_shards_that_are_there_are_not_computed_again(model, texts, tmp_path):
    shards = [texts[:2], [], texts[2:]]
    made = []

    def make_runner():
        made.append(TapRunner(plan_of(model), TAPS))
        return made[-1]

    record_taps(make_runner, tmp_path, shards, 3 * E, lambda _: None)
    whole = (tmp_path / "taps-00002.npy").read_bytes()
    (tmp_path / "taps-00002.npy").unlink()
    record_taps(make_runner, tmp_path, shards, 3 * E, lambda _: None)
    assert (tmp_path / "taps-00002.npy").read_bytes() == whole
    record_taps(make_runner, tmp_path, shards, 3 * E, lambda _: None)
    assert len(made) == 2
    files = TapFiles(tmp_path, [texts[:2]], n_taps=2, hidden=E)
    assert np.array_equal(files.rows(texts[1]), rows_of(model, [texts[1]])[0])


def test_values_beyond_float16_are_told(model, tmp_path):
    loud = write_tiny_model(tmp_path / "loud", config={"num_hidden_layers": 4})
    from safetensors.numpy import load_file, save_file

    weights = load_file(loud / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"] *= 1e7
    save_file(weights, str(loud / "model.safetensors"))
    with pytest.raises(TiercelError, match="more than float16 holds; leave out the last of the taps"):
        rows_of(loud, [Conversation(np.arange(9, dtype=np.int32), 2, True, True)])


def test_a_target_that_cannot_be_tapped_is_refused(model, tmp_path):
    plan = plan_of(write_tiny_encoder(tmp_path / "encoder"), max_model_len=None)
    with plan.checkpoint, pytest.raises(UnsupportedModel, match="pooling model generates nothing"):
        Target(plan)
    plan = plan_of(model)
    with plan.checkpoint, pytest.raises(UnsupportedModel, match="tap 3 is none of its layers"):
        Target(plan).shape(sizes("dspark", taps=(3,)), 1.0)


def sizes(kind, **changes):
    usual = {"n_layers": 1, "n_slots": 4, "rank": 8, "topk": 4, "draft_vocab": 32}
    return DraftSizes(kind=kind, **{**usual, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_has_its_targets_layer_with_the_norms_folded_in(model, kind):
    plan = plan_of(model)
    with plan.checkpoint:
        target = Target(plan)
        shape = target.shape(sizes(kind), 1.5)
        layer = target.layer(3)
        stored = plan.checkpoint.tensors
        q = stored["model.layers.3.self_attn.q_proj.weight"].float32()
        norm = stored["model.layers.3.input_layernorm.weight"].float32()
    assert (shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.ffn) == (4, 2, 16, 96)
    assert np.array_equal(layer["self_attn.q_proj.weight"], q * norm)
    assert np.array_equal(layer["input_layernorm.weight"], np.ones(E, np.float32))
    wide = 2 if kind == "eagle3" else 1
    assert shape.shapes()["layers.0.self_attn.q_proj.weight"] == (64, wide * 64)
