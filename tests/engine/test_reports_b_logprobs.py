"""A public report about log-probabilities elsewhere, tried on the native runner; `docs/reports.md` lists the rows."""

import math

import pytest

from tiercel import LLM, SamplingParams
from tiercel.testing.tiny_model import write_tiny_model


@pytest.mark.parametrize("temperature", [0.0, 0.3, 2.0])
def test_p349_logprobs_are_normalised_over_the_whole_vocabulary(tmp_path, temperature):
    folder = write_tiny_model(tmp_path / "tiny")
    with LLM(str(folder), threads=1, max_num_seqs=2, max_num_batched_tokens=64, max_logprobs=-1) as llm:
        params = SamplingParams(max_tokens=4, temperature=temperature, seed=1, logprobs=-1, prompt_logprobs=-1)
        (output,) = llm.generate("hello", params, use_tqdm=False)
    positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(positions) >= 5
    for position in positions:
        assert math.fsum(math.exp(one.logprob) for one in position.values()) == pytest.approx(1, abs=1e-4)
