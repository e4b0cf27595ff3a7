"""Whoever forbade the tokens that the form needs was told, by a status of 500, that the server had failed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "api"))

from kit import Rig

MESSAGE = "constraints leave no token"


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.close()


@pytest.mark.parametrize(
    "more",
    [
        {"structured_outputs": {"regex": "a{3}"}, "stop_token_ids": [ord("a")]},
        {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [ord("b")]},
    ],
)
def test_it_is_the_request_that_is_refused(rig, more):
    error = rig.refused("/v1/completions", {"prompt": "hello", "max_tokens": 8, "temperature": 0} | more)
    assert MESSAGE in error["message"]
    rig.assert_idle()
