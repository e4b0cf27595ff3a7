"""A choice that spells the token of the end was answered by nothing; one with DEL was refused in words of a grammar."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "sampling"))

from grammar_kit import EOS, Forms

from tiercel.base.errors import FormFailed, RequestError


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


def test_an_end_that_a_grammar_names_last_ends_its_text(forms):
    constraint = forms.start({"grammar": f'start: "ab" {EOS}'})
    forms.say(constraint, "ab")
    assert forms.allowed(constraint) == [forms.eos_id]
    constraint.accept(forms.eos_id)
    assert constraint.is_complete


def test_an_end_that_a_grammar_names_before_other_text_is_no_empty_answer(forms):
    constraint = forms.start({"grammar": f'start: {EOS} "ab"'})
    assert forms.allowed(constraint) == [forms.eos_id]
    with pytest.raises(FormFailed, match="goes on behind the token that ends a text"):
        constraint.accept(forms.eos_id)
    assert not constraint.is_complete


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"properties": {"x": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}},
    ],
)
def test_references_that_lead_back_to_themselves_are_refused_as_that(forms, schema):
    with pytest.raises(RequestError, match=r"\$ref '#.*' leads back to itself"):
        forms.compile(json=json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"type": "null"}}},
    ],
)
def test_references_with_a_value_between_may_come_back(forms, schema):
    assert forms.allowed(forms.start({"json": json.dumps(schema)}))
