"""Whatever an accepted schema lets through validates under it: schemas of chance and by hand, walks of chance."""

import json
import random

import jsonschema
import pytest
from grammar_kit import Forms
from schema_maker import BY_HAND, SchemaMaker

from tiercel.base.errors import RequestError

N_SCHEMAS = 220
N_WALKS = 3


@pytest.fixture(scope="module")
def forms():
    forms = Forms()
    yield forms
    forms.close()


def check_walks(forms, schema, n_walks, **options):
    """Walk through a schema; give how many walks came to an end."""
    compiled = forms.compile(json=schema, **options)
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    checker = validator(schema, format_checker=validator.FORMAT_CHECKER)
    n_ended = 0
    for seed in range(n_walks):
        text = forms.walk(compiled.start(), seed)
        if text is not None:
            n_ended += 1
            checker.validate(json.loads(text))
    return n_ended


def test_outputs_of_two_hundred_schemas_of_chance_validate(forms):
    n_kept = n_ended = seed = 0
    refusals = []
    while n_kept < N_SCHEMAS:
        seed += 1
        schema = SchemaMaker(random.Random(seed)).root()
        try:
            n_ended += check_walks(forms, schema, N_WALKS)
            n_kept += 1
        except RequestError as error:  # two parts of it contradict each other: said, not ignored
            refusals.append(str(error))
    assert all("nsatisfiable" in one or "oneOf" in one for one in refusals), refusals
    assert n_ended > 2 * N_SCHEMAS
    assert len(refusals) < N_SCHEMAS // 4


@pytest.mark.parametrize("name", BY_HAND)
def test_outputs_of_a_schema_by_hand_validate(forms, name):
    assert check_walks(forms, BY_HAND[name], 12) > 2


@pytest.mark.parametrize("option", [{"disable_any_whitespace": True}, {"whitespace_pattern": " ?"}])
def test_blanks_are_as_asked_for(forms, option):
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    compiled = forms.compile(json=schema, disable_additional_properties=True, **option)
    for seed in range(10):
        text = forms.walk(compiled.start(), seed)
        assert text is None or not {"\n", "\t", "  "} & set(text)
        if "disable_any_whitespace" in option and text is not None:
            assert " " not in text


def test_blanks_do_not_go_on_for_ever(forms):
    constraint = forms.start({"json_object": True})
    forms.say(constraint, "{")
    blank = forms.tokenizer.encode(" ", add_special_tokens=False)[0]
    n = 0
    while blank in forms.allowed(constraint):
        constraint.accept(blank)
        n += 1
        assert n < 100
    assert n == 64


def test_a_strict_object_has_no_other_properties(forms):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    compiled = forms.compile(json=schema, disable_additional_properties=True)
    for seed in range(20):
        text = forms.walk(compiled.start(), seed)
        assert text is None or set(json.loads(text)) <= {"a"}
