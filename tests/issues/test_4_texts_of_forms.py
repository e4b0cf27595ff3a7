"""A choice that spells the token of the end was answered by nothing; one with DEL was refused in words of a grammar."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "sampling"))

from grammar_kit import EOS, Forms

from tiercel.base.errors import RequestError


@pytest.fixture(scope="module")
def forms():
    forms = Forms()
    yield forms
    forms.close()


@pytest.mark.parametrize("name", ["choice", "regex", "grammar"])
def test_text_that_spells_the_end_does_not_end(forms, name):
    text = f"{EOS}x"
    form = {"choice": [text], "regex": text.replace("|", r"\|"), "grammar": f'start: "{text}"'}[name]
    constraint = forms.start({name: form})
    allowed = forms.allowed(constraint)
    assert allowed
    assert forms.eos_id not in allowed
    assert forms.walk(constraint, 0) == text


@pytest.mark.parametrize("char", [chr(i) for i in range(1, 33)] + ["\x7f", "\x85", "\u2028", "\ufeff", '"', "\\", "/"])
def test_a_choice_may_hold_any_character(forms, char):
    assert forms.walk(forms.start({"choice": [f"a{char}b"]}), 0) == f"a{char}b"


@pytest.mark.parametrize("regex", ["a{1000}{1000}", "((a{100}){100}){100}"])
def test_an_expression_too_large_to_follow_is_refused_before_it_is_begun(forms, regex):
    with pytest.raises(RequestError, match=r"structured_outputs\.regex"):
        forms.compile(regex=regex)
