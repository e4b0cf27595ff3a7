"""Public reports about sampling elsewhere, tried on the native runner; `docs/reports.md` lists the rows."""

import math

import pytest

from tiercel import LLM, SamplingParams
from tiercel.base.errors import RequestFailed
from tiercel.testing.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with LLM(str(folder), threads=1, max_num_seqs=2, max_num_batched_tokens=64, max_logprobs=-1) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 0.3, 2.0])
def test_p349_logprobs_are_normalised_over_the_whole_vocabulary(llm, temperature):
    params = SamplingParams(max_tokens=4, temperature=temperature, seed=1, logprobs=-1, prompt_logprobs=-1)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(positions) >= 5
    for position in positions:
        assert math.fsum(math.exp(one.logprob) for one in position.values()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_v57986_only_allowed_tokens_come_and_none_at_all_is_an_error(llm, temperature):
    ids = [ord("a"), ord("b")]
    params = {"allowed_token_ids": ids, "max_tokens": 12, "temperature": temperature, "seed": 3}
    (output,) = llm.generate("hello", SamplingParams(**params, bad_words=["a"]), use_tqdm=False)
    assert set(output.outputs[0].token_ids) == {ord("b")}
    with pytest.raises(RequestFailed, match="allowed_token_ids, bad_words"):
        llm.generate("hello", SamplingParams(**params, bad_words=["a", "b"]), use_tqdm=False)
    (output,) = llm.generate("hello", SamplingParams(**params), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12
