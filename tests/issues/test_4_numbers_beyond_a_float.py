"""Forms of whole numbers beyond 2**53, and exclusive bounds close to another, were broken by answers of status 200."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "sampling"))

from grammar_kit import Forms

from tiercel.base.errors import RequestError

BIG = 2**53


@pytest.fixture(scope="module")
def forms():
    forms = Forms()
    yield forms
    forms.close()


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"const": 1234567890123456789}, "const holds 1234567890123456789"),
        ({"enum": ["a", {"id": -BIG - 1}]}, "enum holds"),
        ({"type": "integer", "minimum": 10**30}, "minimum of"),
        ({"type": "integer", "minimum": 1e40}, "minimum of"),
        ({"type": "integer", "minimum": BIG + 1}, "minimum of"),
        ({"type": "integer", "maximum": BIG + 3}, "maximum of"),
        ({"type": "integer", "exclusiveMinimum": BIG + 1}, "exclusiveMinimum of"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum of 0"),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "exclusiveMaximum of 0"),
        ({"type": "number", "exclusiveMinimum": 2, "exclusiveMaximum": 2.5}, "exclusiveMinimum of 2"),
        ({"type": "number", "minimum": 2, "exclusiveMinimum": True, "maximum": 2.5}, "exclusiveMinimum of 2"),
    ],
)
def test_a_number_that_would_be_lost_is_refused_by_name(forms, schema, named):
    schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    with pytest.raises(RequestError, match=f"properties/x: {named}"):
        forms.compile(json=schema)


@pytest.mark.parametrize(
    ("schema", "met", "broken"),
    [
        ({"const": BIG}, str(BIG), str(BIG - 1)),
        ({"type": "integer", "maximum": 2**63 - 1}, str(2**63 - 1), str(2**63)),
        ({"type": "integer", "minimum": BIG - 2, "maximum": BIG}, str(BIG - 1), str(BIG - 3)),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2}, "1", "0"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.5", "0"),
        ({"type": "number", "exclusiveMinimum": 0.1, "maximum": 0.2}, "0.11", "0.1"),
        ({"type": "number", "minimum": 0, "maximum": 0.5}, "0", "0.6"),
    ],
)
def test_a_number_that_is_kept_to_is_taken(forms, schema, met, broken):
    assert is_met(forms, schema, met)
    assert not is_met(forms, schema, broken)


def is_met(forms, schema, text):
    constraint = forms.start({"json": schema})
    for token_id in forms.tokenizer.encode(text, add_special_tokens=False):
        if constraint.is_complete or token_id not in forms.allowed(constraint):
            return False
        constraint.accept(token_id)
    return constraint.may_end
