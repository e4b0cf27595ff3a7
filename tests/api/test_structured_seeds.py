"""Odd values of structured fields, which generators of requests hardly find: none of them makes the server fail."""

import json

import pytest
from kit import error_of
from scripted import CHAT, COMPLETE, HI

FORMS = [
    {"regex": "("},
    {"regex": "[z-a]"},
    {"regex": "a{3,1}"},
    {"regex": "(?<=a)b"},
    {"regex": "(?P<n>a)(?P=n)"},
    {"regex": "\\1"},
    {"regex": "\\p{Nope}"},
    {"regex": "\x00"},
    {"regex": "\ud7ff\U0010ffff"},
    {"regex": "a{1000000}"},
    {"regex": ""},
    {"regex": "$^"},
    {"regex": "(?i)ß"},
    {"regex": 5},
    {"choice": []},
    {"choice": [""]},
    {"choice": ["a", "a"]},
    {"choice": [1]},
    {"choice": ["\x00", "\U0010ffff"]},
    {"grammar": ""},
    {"grammar": "start: "},
    {"grammar": "root ::= root"},
    {"grammar": 'start: /(/ "a"'},
    {"grammar": "%import x"},
    {"json": ""},
    {"json": "{"},
    {"json": "[]"},
    {"json": []},
    {"json": {"pattern": "("}},
    {"json": {"type": "string", "pattern": "(?!a)b"}},
    {"json": {"type": "string", "format": "regex"}},
    {"json": {"$ref": "#"}},
    {"json": {"$ref": "#/nowhere"}},
    {"json": {"$ref": "http://x.example/y"}},
    {"json": {"$ref": 5}},
    {"json": {"type": "nope"}},
    {"json": {"type": []}},
    {"json": {"enum": []}},
    {"json": {"const": 1e308}},
    {"json": {"minimum": 5, "maximum": 1}},
    {"json": {"type": "string", "minLength": -1}},
    {"json": {"type": "string", "maxLength": 10**30}},
    {"json": {"type": "array", "minItems": 10**9}},
    {"json": {"multipleOf": 0}},
    {"json": {"type": "object", "patternProperties": {"(": {}}}},
    {"json": {"properties": {"a": 5}}},
    {"json": {"properties": {"\x00": {"const": "\x00"}}, "required": ["\x00"]}},
    {"json": {"anyOf": []}},
    {"json": {"not": {}}},
    {"json": False},
    {"json_object": False},
    {"json_object": "yes"},
    {"structural_tag": "{"},
    {"structural_tag": {"type": "structural_tag"}},
    {"structural_tag": json.dumps({"structures": [{"begin": "", "end": "", "schema": {}}], "triggers": [""]})},
    {"regex": "a", "whitespace_pattern": "("},
    {"json": {}, "whitespace_pattern": "("},
    {"json": {}, "whitespace_pattern": 5},
    {"regex": "a", "choice": ["a"]},
    {},
]


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: json.dumps(form)[:50])
def test_a_form_that_is_odd_is_answered_or_refused(rig, path, form):
    body = ({"messages": HI} if path == CHAT else {"prompt": "x"}) | {"max_tokens": 4, "structured_outputs": form}
    response = rig.ask("POST", path, json=body)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert error_of(response.json(), 400)["message"]


@pytest.mark.parametrize("pattern", ["(", "(?<=a)b", "\x00", "a{1000000}", "[[:nope:]]"])
def test_a_pattern_of_a_tool_or_a_format_is_answered_or_refused(rig, pattern):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    for fields in (
        {"tools": [tool], "tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}},
    ):
        response = rig.ask("POST", CHAT, json={"messages": HI, "max_tokens": 4} | fields)
        assert response.status_code in (200, 400), response.text
