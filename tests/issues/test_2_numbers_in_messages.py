"""Messages about numbers that are too large said that they are no numbers, or showed another number."""

import pytest

from tiercel import SamplingParams
from tiercel.base.errors import RequestError
from tiercel.engine.admission import admit
from tiercel.engine.config import EngineConfig
from tiercel.testing.fake_runner import make_limits


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k", "logprobs"])
def test_a_number_that_is_too_large_is_told_the_largest(name):
    with pytest.raises(RequestError, match="9223372036854775807"):
        SamplingParams(**{name: 10**30})


def test_a_number_that_is_too_small_is_told_the_least_alone():
    with pytest.raises(RequestError, match=r"max_tokens: got 0; needs a whole number, 1 or more$"):
        SamplingParams(max_tokens=0)


def test_an_id_of_many_digits_is_shown_as_cut():
    with pytest.raises(RequestError, match=r"got ids 10000000000000000000\.\.\.; "):
        admit([1, 10**20], SamplingParams(), make_limits(), EngineConfig())
