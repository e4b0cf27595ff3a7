"""Routes of models that embed, classify and score, over tiny models on the native runner."""

import base64
import types

import numpy as np
import openai
import pytest
from kit import Rig
from live import LiveServer

from tiercel import LLM
from tiercel.api.http.app import make_app
from tiercel.api.http.facade import EngineFacade
from tiercel.api.http.settings import ServerSettings
from tiercel.testing.tiny_model import write_tiny_encoder

TEXTS = ["a cat", "the other text", "12"]


class ServedModel(Rig):
    """A tiny model behind the server, asked in this process."""

    def __init__(self, folder, settings=None, **config):
        self.llm = LLM(str(write_tiny_encoder(folder, config=config)), threads=2)
        engine = self.llm.engine
        self.runner, self.core, self.client = engine.runner, engine.client.core, engine.client
        self.facade = EngineFacade(client=engine.client, tokenizer=engine.tokenizer)
        self.settings = ServerSettings(**({"served_names": ("tiny",)} | (settings or {})))
        self.app = make_app(self.facade, self.settings)
        self.service = self.app.service

    def close(self):
        self.service.close()
        self.llm.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    pair = {"architectures": ["BertForSequenceClassification"], "num_labels": 1}
    labels = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "no", "1": "yes", "2": "so"}}
    made = types.SimpleNamespace(
        embedder=ServedModel(tmp_path_factory.mktemp("e"), matryoshka_dimensions=[8, 16]),
        scorer=ServedModel(tmp_path_factory.mktemp("s"), **pair),
        classifier=ServedModel(tmp_path_factory.mktemp("c"), **labels),
    )
    yield made
    for rig in vars(made).values():
        rig.assert_idle()
        rig.close()


def vectors_of(rig, texts):
    return [one.outputs.embedding for one in rig.llm.embed(texts)]


def test_embeddings_are_those_of_the_library_in_order(models):
    rig = models.embedder
    answer = rig.post("/v1/embeddings", {"input": TEXTS, "model": "tiny"})
    assert answer["object"] == "list"
    assert answer["id"].startswith("embd-")
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(i, "embedding") for i in range(3)]
    assert [one["embedding"] for one in answer["data"]] == vectors_of(rig, TEXTS)
    n_tokens = sum(len(one.prompt_token_ids) for one in rig.llm.embed(TEXTS))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == n_tokens


def test_token_ids_and_text_embed_alike(models):
    rig = models.embedder
    ids = rig.llm.embed(TEXTS[0])[0].prompt_token_ids
    by_text, by_ids, by_lists = (
        rig.post("/v1/embeddings", {"input": given})["data"][0]["embedding"] for given in (TEXTS[0], ids, [ids])
    )
    assert by_text == by_ids == by_lists


def test_base64_holds_the_same_floats(models):
    rig = models.embedder
    (expected,) = vectors_of(rig, TEXTS[:1])

    def raw(**fields):
        data = rig.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"} | fields)["data"]
        return base64.b64decode(data[0]["embedding"])

    assert np.frombuffer(raw(), "<f4").tolist() == expected
    assert np.frombuffer(raw(endianness="big"), ">f4").tolist() == expected
    np.testing.assert_allclose(np.frombuffer(raw(embed_dtype="float16"), "<f2"), expected, atol=1e-3)


def test_dimensions_cut_a_model_that_was_trained_for_it(models):
    rig = models.embedder
    short = rig.post("/v1/embeddings", {"input": TEXTS[0], "dimensions": 8})["data"][0]["embedding"]
    whole = np.array(vectors_of(rig, TEXTS[:1])[0])[:8]
    np.testing.assert_allclose(short, whole / np.linalg.norm(whole), rtol=1e-5)
    assert rig.refused("/v1/embeddings", {"input": "x", "dimensions": 9})["param"] == "dimensions"


def test_the_official_client_reads_the_embeddings(models):
    rig = models.embedder
    rig.settings = ServerSettings(served_names=("tiny",), port=0, shutdown_s=0.0)
    live = LiveServer(rig)
    try:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.embeddings.create(model="tiny", input=TEXTS)
            plain = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float", dimensions=16)
            with pytest.raises(openai.BadRequestError, match="at most 64 fit"):
                client.embeddings.create(model="tiny", input="y" * 70)
    finally:
        live.close()
    assert [one.embedding for one in answer.data] == vectors_of(rig, TEXTS)
    assert len(plain.data[0].embedding) == 16


def test_pooling_gives_vectors_of_texts_and_of_tokens(models):
    rig = models.embedder
    assert [one["data"] for one in rig.post("/pooling", {"input": TEXTS})["data"]] == vectors_of(rig, TEXTS)
    (one,) = rig.post("/pooling", {"input": TEXTS[0], "task": "token_embed"})["data"]
    (expected,) = rig.llm.encode(TEXTS[0], pooling_task="token_embed")
    assert one["object"] == "pooling"
    assert one["data"] == expected.outputs.data.tolist()


def test_classify_names_the_likeliest_label(models):
    rig = models.classifier
    (one,) = rig.post("/classify", {"input": TEXTS[0]})["data"]
    (expected,) = rig.llm.classify(TEXTS[0])
    assert one["probs"] == expected.outputs.probs
    assert one["num_classes"] == 3
    assert one["label"] == ("no", "yes", "so")[int(np.argmax(one["probs"]))]
    (raw,) = rig.post("/classify", {"input": TEXTS[0], "use_activation": False})["data"]
    np.testing.assert_allclose(np.exp(raw["probs"]) / np.exp(raw["probs"]).sum(), one["probs"], rtol=1e-5)


@pytest.mark.parametrize("which", ["embedder", "scorer"])
def test_scores_and_ranks_are_those_of_the_library(models, which):
    rig = getattr(models, which)
    expected = [one.outputs.score for one in rig.llm.score("a cat", TEXTS)]
    for body in ({"text_1": "a cat", "text_2": TEXTS}, {"queries": ["a cat"] * 3, "documents": TEXTS}):
        answer = rig.post("/v1/score", body)
        assert [(one["index"], one["score"]) for one in answer["data"]] == list(enumerate(expected))
    best = sorted(range(3), key=lambda i: -expected[i])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = rig.post(path, {"query": "a cat", "documents": TEXTS, "top_n": 2})
        assert [one["index"] for one in answer["results"]] == best[:2]
        assert [one["relevance_score"] for one in answer["results"]] == [expected[i] for i in best[:2]]
        assert answer["results"][0]["document"]["text"] == TEXTS[best[0]]
    without = rig.post("/rerank", {"query": "a cat", "documents": TEXTS, "return_documents": False})
    assert "document" not in without["results"][0]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "y" * 70}, "prompt"),
        ("/v1/embeddings", {"input": [1000]}, "prompt"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "bytes"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/classify", {"input": "x"}, "task"),
        ("/pooling", {"input": "x", "task": "token_classify"}, "task"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "i"}, "instruction"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 3}, "max_tokens_per_doc"),
        ("/v1/completions", {"prompt": "x"}, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "model"),
    ],
)
def test_what_an_embedder_cannot_do_is_refused_by_its_field(models, path, body, param):
    assert models.embedder.refused(path, body)["param"] == param


def test_a_long_text_is_cut_where_that_is_asked_for(models):
    cut = models.embedder.post("/v1/embeddings", {"input": "y" * 70, "truncate_prompt_tokens": -1})
    assert cut["usage"]["prompt_tokens"] == 64


def test_a_classifier_of_many_labels_scores_no_pairs(models):
    error = models.classifier.refused("/score", {"text_1": "a", "text_2": "b"})
    assert "it has 3 labels" in error["message"]
