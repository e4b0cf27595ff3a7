"""Texts that are pooled: through the scheduler on the fake runner, and through `LLM` on tiny models."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tiercel import LLM
from tiercel.base.errors import ConfigError, PromptTooLong, RequestError, RequestFailed, UnsupportedModel
from tiercel.engine.client import EngineClient
from tiercel.engine.config import EngineConfig
from tiercel.engine.core import EngineCore
from tiercel.engine.pooling import Pooler
from tiercel.models.pooling import PoolingSpec
from tiercel.protocol.pooling import PoolingParams
from tiercel.testing.fake_runner import FakeRunner, early_at_random, expected_values, fake_row, make_limits
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.tiny_model import CONFIG, write_tiny_encoder, write_tiny_model

WIDTH = 6
LAST = PoolingSpec(tasks=("embed", "token_embed"), method="last", dimensions=(2, 4))
TOKENS = PoolingParams(task="token_embed", use_activation=False)


@pytest.fixture
def make_client():
    clients = []

    def make(spec=LAST, *, limits=None, **options):
        runner = FakeRunner(make_limits(row_width=WIDTH, **(limits or {})), **options)
        config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=8, check_each_step=True)
        core = EngineCore(runner, config)
        clients.append(EngineClient(core, weights_digest="fake", kv_dtype="float16", pooler=Pooler(spec, WIDTH)))
        core.start()
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def ids_of(n, seed=0):
    return [int(i) for i in np.random.default_rng(seed).integers(0, 97, n)]


def rows_of(ids):
    return np.array([fake_row(value, WIDTH) for value in expected_values(ids)], np.float32)


def pool(client, texts, params):
    found = dict(client.pool_many([(ids, None) for ids in texts], params))
    return [found[i] for i in range(len(texts))]


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_every_token_come_in_order_however_the_text_is_cut_into_steps(make_client, seed):
    client = make_client(runs_early=early_at_random(seed))
    texts = [ids_of(n, seed + n) for n in (1, 2, 7, 8, 9, 17, 40, 63, 64, 5, 1)]
    for ids, output in zip(texts, pool(client, texts, TOKENS), strict=True):
        np.testing.assert_array_equal(output.outputs.data, rows_of(ids))
        assert output.prompt_token_ids == ids


def test_the_last_row_is_the_same_when_the_beginning_was_cached(make_client):
    client = make_client()
    ids = ids_of(30)
    plain = PoolingParams(use_activation=False)
    miss, hit = (pool(client, [ids], plain)[0] for _ in range(2))
    assert (miss.num_cached_tokens, hit.num_cached_tokens) == (0, 28)
    np.testing.assert_array_equal(miss.outputs.data, rows_of(ids)[-1])
    np.testing.assert_array_equal(hit.outputs.data, rows_of(ids)[-1])
    # What was cached has no rows: a task of tokens computes all.
    assert pool(client, [ids], TOKENS)[0].num_cached_tokens == 0


def test_a_model_that_must_see_a_text_whole_gets_it_in_one_step(make_client):
    client = make_client(limits={"needs_whole": True, "max_step_tokens": 8, "max_logits_rows": 8})
    texts = [ids_of(n, n) for n in (8, 3, 8, 1, 4, 5, 8, 2, 7)]
    for ids, output in zip(texts, pool(client, texts, TOKENS), strict=True):
        np.testing.assert_array_equal(output.outputs.data, rows_of(ids))
    with pytest.raises(PromptTooLong, match=r"9 tokens; at most 8 fit in one step.*max_num_batched_tokens"):
        pool(client, [ids_of(9)], TOKENS)


def test_a_text_whose_rows_hold_a_nan_fails_alone(make_client):
    client = make_client(nan_token_id=96)
    bad, good = [1, 96, 3], [1, 2, 3]
    outputs = pool(client, [bad, good], TOKENS)
    assert isinstance(outputs[0], RequestFailed)
    np.testing.assert_array_equal(outputs[1].outputs.data, rows_of(good))


def test_embeddings_are_cut_before_they_get_length_one(make_client):
    client = make_client()
    ids = ids_of(10)
    row = rows_of(ids)[-1].astype(np.float64)
    (whole,) = pool(client, [ids], PoolingParams())
    (short,) = pool(client, [ids], PoolingParams(dimensions=2))
    np.testing.assert_allclose(whole.outputs.data, row / np.linalg.norm(row), rtol=1e-6)
    np.testing.assert_allclose(short.outputs.data, row[:2] / np.linalg.norm(row[:2]), rtol=1e-6)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"task": "classify"}, "task"),
        ({"dimensions": 3}, "dimensions"),
        ({"dimensions": 7}, "dimensions"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
    ],
)
def test_what_a_model_cannot_do_is_refused_by_its_field(make_client, params, param):
    with pytest.raises(RequestError) as refused:
        pool(make_client(), [[1, 2]], PoolingParams(**params))
    assert refused.value.param == param


@pytest.mark.parametrize("ids", [[], [97], [-1]])
def test_texts_that_are_none_are_refused(make_client, ids):
    with pytest.raises(RequestError, match="prompt"):
        pool(make_client(), [ids], None)


def test_a_text_of_token_ids_is_cut_where_it_is_asked(make_client):
    client = make_client()
    ids = ids_of(20)
    for side, kept in (("right", ids[:5]), ("left", ids[-5:])):
        params = PoolingParams(truncate_prompt_tokens=5, truncation_side=side)
        assert pool(client, [ids], params)[0].prompt_token_ids == kept
    with pytest.raises(PromptTooLong, match="65 tokens; at most 64 fit"):
        pool(client, [ids_of(65)], None)
    assert len(pool(client, [ids_of(65)], PoolingParams(truncate_prompt_tokens=-1))[0].prompt_token_ids) == 64


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    with LLM(str(write_tiny_encoder(tmp_path_factory.mktemp("encoder"))), threads=2) as llm:
        yield llm


def test_a_text_embeds_to_the_same_bits_alone_and_among_others(encoder):
    texts = ["a", "hello there", "12 monkeys", "x" * 40, "the end"]
    together = [one.outputs.embedding for one in encoder.embed(texts)]
    assert together == [encoder.embed(text)[0].outputs.embedding for text in texts]
    assert all(len(vector) == 64 for vector in together)
    np.testing.assert_allclose([np.linalg.norm(vector) for vector in together], 1.0, rtol=1e-6)


def test_a_texts_rows_are_those_that_its_vector_is_made_of(encoder):
    raw = PoolingParams(use_activation=False)
    (rows,) = encoder.encode("hello", raw, pooling_task="token_embed")
    (vector,) = encoder.embed("hello", pooling_params=raw)
    assert rows.outputs.data.shape == (7, 64)  # [CLS] h ##e ##l ##l ##o [SEP]
    assert rows.prompt_token_ids == [2, 11, 44, 51, 51, 54, 3]
    assert vector.outputs.embedding == rows.outputs.data[0].tolist()


def test_a_long_text_is_refused_or_cut_between_its_frame(encoder):
    with pytest.raises(PromptTooLong, match="72 tokens; at most 64 fit"):
        encoder.embed("y" * 70)
    (cut,) = encoder.embed("y" * 70, pooling_params=PoolingParams(truncate_prompt_tokens=10))
    assert (cut.prompt_token_ids[0], cut.prompt_token_ids[-1], len(cut.prompt_token_ids)) == (2, 3, 10)
    assert cut.outputs.embedding == encoder.embed("y" * 8)[0].outputs.embedding
    with pytest.raises(RequestError, match="leaves it no token"):
        encoder.embed("y", pooling_params=PoolingParams(truncate_prompt_tokens=2))


def test_an_embedder_scores_texts_by_the_cosine(encoder):
    a, b = (np.array(one.outputs.embedding) for one in encoder.embed(["abc", "abd"]))
    scores = [one.outputs.score for one in encoder.score("abc", ["abc", "abd"])]
    np.testing.assert_allclose(scores, [1.0, a @ b], rtol=1e-6)
    with pytest.raises(RequestError, match="data_1"):
        encoder.score(["a", "b"], ["c"])


def test_a_model_that_pools_does_not_generate_and_the_other_way_round(encoder, tmp_path):
    with pytest.raises(RequestError, match="it pools and does not generate"):
        encoder.generate("hello")
    with pytest.raises(RequestError, match="this model does embed and token_embed"):
        encoder.classify("hello")
    with LLM(str(write_tiny_model(tmp_path)), threads=1) as llm, pytest.raises(RequestError, match="does not pool"):
        llm.embed("hello")


def test_a_classifier_of_pairs_tells_its_texts_apart(tmp_path):
    config = {"architectures": ["BertForSequenceClassification"], "num_labels": 1}
    with LLM(str(write_tiny_encoder(tmp_path, config=config)), threads=2) as llm:
        one, other = (llm.score(*pair)[0].outputs.score for pair in (("ab", "cd"), ("abc", "d")))
        assert 0.0 < one < 1.0
        assert one != other
        many = llm.score("ab", ["cd", "ef", "cd"])
        assert [many[0].outputs, many[2].outputs] == [llm.score("ab", "cd")[0].outputs] * 2
        assert many[0].prompt_token_ids == [2, 4, 41, 3, 6, 43, 3]


def test_a_classifier_gives_probabilities_of_its_labels(tmp_path):
    config = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "no", "1": "yes", "2": "so"}}
    with LLM(str(write_tiny_encoder(tmp_path, config=config)), threads=2) as llm:
        assert llm.client.pooler.spec.labels == ("no", "yes", "so")
        (probable,) = llm.classify("abc")
        (logits,) = llm.classify("abc", pooling_params=PoolingParams(use_activation=False))
        weights = np.exp(logits.outputs.probs)
        np.testing.assert_allclose(probable.outputs.probs, weights / weights.sum(), rtol=1e-5)
        with pytest.raises(RequestError, match="it has 3 labels; one is needed"):
            llm.score("a", "b")


@pytest.fixture
def decoder_folder(tmp_path):
    """Write a decoder as sentence-transformers saves embedders: the backbone's names, and how it is pooled."""
    folder = write_tiny_model(tmp_path, config={"architectures": ["LlamaForCausalLM"]})
    bare = {n.removeprefix("model."): w for n, w in tiny_checkpoint(CONFIG).items() if n != "lm_head.weight"}
    save_file(bare, str(folder / "model.safetensors"))
    modules = [
        {"type": "x.Transformer", "path": ""},
        {"type": "x.Pooling", "path": "1_Pooling"},
        {"type": "x.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder


def test_a_decoder_embeds_by_its_last_token_in_chunks_and_from_the_cache(decoder_folder):
    texts = ["a text " * 20, "another", "a text " * 20 + "!"]
    with LLM(str(decoder_folder), threads=2) as llm:
        whole = [one.outputs.embedding for one in llm.embed(texts)]
        assert llm.embed(texts[0])[0].num_cached_tokens > 0
        assert [llm.embed(text)[0].outputs.embedding for text in texts] == whole
        (rows,) = llm.encode(texts[0], pooling_task="token_embed")
        assert rows.outputs.data[-1].tolist() == whole[0]
    with LLM(str(decoder_folder), threads=1, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        assert [one.outputs.embedding for one in llm.embed(texts)] == whole
        (chunked,) = llm.encode(texts[0], pooling_task="token_embed")
        np.testing.assert_array_equal(chunked.outputs.data, rows.outputs.data)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"modules.json": [{"type": "x.Dense", "path": "2_Dense"}]}, "module Dense is not implemented"),
        ({"modules.json": [{"type": "x.Pooling", "path": "../other"}]}, "a folder of the model is needed"),
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "pooling by pooling_mode_max_tokens"),
        ({"1_Pooling/config.json": {}}, "pooling by nothing"),
    ],
)
def test_files_that_ask_for_another_pooling_are_refused(decoder_folder, files, error):
    for name, value in files.items():
        (decoder_folder / name).write_text(json.dumps(value))
    with pytest.raises((UnsupportedModel, ValueError), match=error):
        LLM(str(decoder_folder))


def test_what_a_model_does_can_be_named(tmp_path):
    with LLM(str(write_tiny_model(tmp_path / "decoder")), runner="pooling", threads=1) as llm:
        assert len(llm.embed("hello")[0].outputs.embedding) == 64
    with pytest.raises(ConfigError, match="BertModel pools"):
        LLM(str(write_tiny_encoder(tmp_path / "encoder")), runner="generate")


def test_a_reward_model_rates_each_token(tmp_path):
    config = {"architectures": ["Qwen2ForRewardModel"], "model_type": "qwen2"}
    folder = write_tiny_model(tmp_path, config=config)
    with LLM(str(folder), threads=1) as llm:
        (raw,) = llm.reward("good", pooling_params=PoolingParams(use_activation=False))
        (rated,) = llm.reward("good")
    assert raw.outputs.data.shape == (4, 1)
    np.testing.assert_allclose(rated.outputs.data, 1 / (1 + np.exp(-raw.outputs.data)), rtol=1e-5)
