"""A priority that is no whole number was compared with others in the queue and ended the engine with TypeError."""

import numpy as np
import pytest

from tiercel import LLM, SamplingParams
from tiercel.base.errors import RequestError
from tiercel.testing.tiny_model import write_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with LLM(str(folder), threads=1, max_num_seqs=2, scheduling_policy="priority") as llm:
        yield llm


@pytest.mark.parametrize("priority", ["high", 1.5, float("nan"), None, [1], True])
def test_a_priority_that_is_no_whole_number_is_refused_and_others_go_on(llm, priority):
    with pytest.raises(RequestError, match=r"priority: got .* a whole number is needed") as caught:
        llm.client.submit("hello", GREEDY, priority=priority)
    assert caught.value.param == "priority"
    assert len(llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize("priority", [1.5, None, "ab", {0: 1}])
def test_generate_names_the_argument(llm, priority):
    with pytest.raises(RequestError, match="priority: got"):
        llm.generate(["a"], GREEDY, use_tqdm=False, priority=priority)


def test_numbers_of_numpy_are_numbers(llm):
    outputs = list(llm.client.submit("hello", GREEDY, priority=np.int64(2)))
    assert outputs[-1].finished


@pytest.mark.parametrize("request_id", [5, b"x", ["x"]])
def test_a_request_id_that_is_no_text_is_refused(llm, request_id):
    with pytest.raises(RequestError, match=r"request_id: got .* text is needed"):
        llm.client.submit("hello", GREEDY, request_id=request_id)
