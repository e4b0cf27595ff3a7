"""prompt_logprobs with skip_reading_prefix_cache=False ended the whole engine as soon as the prompt was cached.

Positions that are found in the cache are not computed, so they have no logits to score; the engine's own assertion
about that killed its loop and every other request. The combination is refused now, by name.
"""

import msgspec
import pytest

from tiercel import SamplingParams
from tiercel.base.errors import RequestError


def test_prompt_logprobs_with_a_cache_that_must_be_read_are_refused():
    with pytest.raises(RequestError, match="skip_reading_prefix_cache: got False; needs true or null") as caught:
        SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)
    assert caught.value.param == "skip_reading_prefix_cache"


@pytest.mark.parametrize("given", [None, True])
def test_prompt_logprobs_do_not_read_the_cache(given):
    assert SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=given).skip_reading_prefix_cache is True


def test_the_other_outputs_of_a_scored_request_may_read_it():
    scored = SamplingParams(n=2, prompt_logprobs=1)
    other = msgspec.structs.replace(scored, n=1, prompt_logprobs=None, skip_reading_prefix_cache=None)
    assert other.skip_reading_prefix_cache is False
