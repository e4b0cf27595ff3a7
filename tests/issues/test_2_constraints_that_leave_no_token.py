"""A request whose constraints left no token was told that the model's logits hold a NaN."""

import pytest

from tiercel import LLM, SamplingParams
from tiercel.base.errors import RequestFailed
from tiercel.testing.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with LLM(str(folder), threads=1, max_num_seqs=2) as llm:
        yield llm


@pytest.mark.parametrize("logprobs", [None, 2])
def test_the_error_names_the_constraints(llm, logprobs):
    params = SamplingParams(
        temperature=0.0, max_tokens=3, allowed_token_ids=[ord("x")], bad_words=["x"], logprobs=logprobs
    )
    with pytest.raises(RequestFailed, match="constraints leave no token") as caught:
        llm.generate("hello", params, use_tqdm=False)
    assert "NaN" not in str(caught.value)


def test_its_prompt_stays_cached(llm):
    prompt = "the same forty letters, and a few more.."
    params = {"temperature": 0.0, "max_tokens": 1}
    llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
    with pytest.raises(RequestFailed):
        llm.generate(prompt, SamplingParams(**params, allowed_token_ids=[5], bad_words=["\x05"]), use_tqdm=False)
    assert llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].num_cached_tokens == 32
