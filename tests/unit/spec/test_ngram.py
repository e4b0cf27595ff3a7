"""Prompt lookup against a search by hand."""

import random

import pytest

from tiercel.base.errors import ConfigError
from tiercel.spec.drafters.ngram import NgramDrafter


def searched(tokens, n_min, n_max, k):
    for n in range(n_max, n_min - 1, -1):
        if n > len(tokens):
            continue
        for end in range(n, len(tokens)):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                return tokens[end : end + k]
    return None


@pytest.mark.parametrize("seed", range(5))
def test_the_drafts_are_those_of_a_search_from_the_start(seed):
    rng = random.Random(seed)
    sequence = NgramDrafter(n_min=2, n_max=4).begin([], shares=True)
    tokens = []
    for _ in range(120):
        more = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        tokens += more
        sequence.extend(more)
        sequence.check()
        proposal = sequence.propose(3)
        assert (None if proposal is None else proposal.token_ids) == searched(tokens, 2, 4, 3)


def test_the_example_of_the_definition():
    sequence = NgramDrafter(n_min=3, n_max=3).begin([1, 2, 3, 4, 1, 2, 3], shares=False)
    assert sequence.propose(2).token_ids == [4, 1]


@pytest.mark.parametrize(("n_min", "n_max"), [(0, 3), (4, 3)])
def test_limits_that_contradict_are_refused(n_min, n_max):
    with pytest.raises(ConfigError, match="prompt_lookup_min"):
        NgramDrafter(n_min=n_min, n_max=n_max)
