"""Limits of structured output, as an engine's option gives them."""

import pytest

from tiercel.base.errors import ConfigError
from tiercel.sampling.grammar_limits import GrammarLimits


def test_limits_are_set_by_name_and_vllms_words_for_what_is_so_anyway_are_taken():
    options = {"compile_cpu_s": 5, "backend": "guidance", "disable_any_whitespace": False}
    assert GrammarLimits.from_options(options) == GrammarLimits(compile_cpu_s=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile_cpu": 5}, "compile_cpu: unknown; known are"),
        ({"compile_cpu_s": 0}, "compile_cpu_s: got 0"),
        ({"backend": "xgrammar"}, "backend: got 'xgrammar'; only auto, guidance"),
        ({"disable_any_whitespace": True}, "disable_any_whitespace: got True"),
    ],
)
def test_limits_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        GrammarLimits.from_options(options)
