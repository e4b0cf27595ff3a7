"""Public reports about structured output elsewhere, each tried here; `docs/reports.md` lists the rows.

A model that says any tokens at random, masked by the form: what comes out must be what was asked for.
"""

import json

import jsonschema
import pytest
from kit import Rig, byte_tokenizer
from scripted import CHAT, COMPLETE, HI, LIMITS, Scripted, both_texts

N_TRIES = 3
ARRAY = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}}


@pytest.fixture(scope="module")
def rig():
    """A model of any tokens; its vocabulary is padded, as models pad theirs."""
    rig = Rig(tokenizer=byte_tokenizer, limits=LIMITS, max_num_batched_tokens=1024)
    yield rig
    rig.assert_idle()
    rig.close()


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def asked(rig, **fields):
    """Ask for a form; give the finished texts of a few tries, or the error of its refusal."""
    body = {"messages": HI, "max_tokens": 250, "n": N_TRIES, "seed": 1, "temperature": 1.0} | fields
    response = rig.ask("POST", CHAT, json=body)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        return None, response.json()["error"]
    choices = response.json()["choices"]
    return [c["message"]["content"] for c in choices if c["finish_reason"] == "stop"], None


KEYWORDS = {
    "minItems": ARRAY | {"minItems": 2, "maxItems": 4},
    "maxItems": ARRAY | {"maxItems": 2},
    "uniqueItems": ARRAY | {"uniqueItems": True, "maxItems": 3},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99},
    "exclusiveMinimum": {"type": "integer", "exclusiveMinimum": 5, "maximum": 99},
    "exclusiveMaximum": {"type": "number", "exclusiveMaximum": 5, "minimum": 0},
    "patternProperties": {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "maxProperties": 2},
    "minProperties": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "boolean"}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "null"}},
    "pattern and maxLength": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 4},
    "pattern and minLength": {"type": "string", "pattern": "^[ab]*$", "minLength": 3, "maxLength": 9},
    "minLength": {"type": "string", "minLength": 2, "maxLength": 5},
    "format": {"type": "string", "format": "date"},
    "required without properties": {"type": "object", "required": ["a"], "additionalProperties": {"type": "null"}},
    "const": {"const": {"a": [1, "é"]}},
    "enum": {"enum": [1, "one", None, True]},
    "anyOf": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "oneOf": {"oneOf": [{"type": "boolean"}, {"const": 3}]},
    "oneOf that overlaps": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 9}]},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"const": "a"}},
    "contains": ARRAY | {"contains": {"const": 3}, "maxItems": 3},
    "prefixItems": {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}], "items": False, "minItems": 2},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "$ref": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "boolean"}}},
    "$ref with siblings": {"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer", "minimum": 0}}},
    "type of two": {"type": ["boolean", "null"]},
    "nullable": {"type": "boolean", "nullable": True},
    "unevaluatedProperties": {"type": "object", "properties": {"a": {"type": "null"}}, "unevaluatedProperties": False},
    "an unknown keyword": {"type": "boolean", "least": 3},
    "a keyword of another type": {"type": "boolean", "minLength": 3},
    "nothing may be": {"type": "integer", "minimum": 3, "maximum": 2},
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_x104_a_keyword_is_kept_to_or_refused_by_name_and_never_dropped(rig, name):
    schema = KEYWORDS[name]
    texts, error = asked(rig, response_format=form(schema))
    if error is not None:
        assert error["param"] == "response_format.json_schema.schema"
        assert len(error["message"]) < 600
        return
    for text in texts:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    "schema",
    [ARRAY | {"minItems": 2, "maxItems": 5}, ARRAY | {"minItems": 3, "maxItems": 3}, ARRAY | {"minItems": 2}],
)
def test_v16880_v12131_bounds_of_a_list_are_kept_to(rig, schema):
    texts, error = asked(rig, response_format=form(schema))
    assert error is None
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


def test_x256_an_object_of_anything_is_an_object(rig):
    texts, error = asked(rig, response_format=form({"type": "object"}), max_tokens=250)
    assert error is None
    for text in texts:
        assert isinstance(json.loads(text), dict)
    assert (
        Scripted('{"a": [1, {}]}').whole(response_format=form({"type": "object"}))["choices"][0]["message"]["content"]
        == '{"a": [1, {}]}'
    )


@pytest.mark.parametrize("kind", ["object", "array"])
@pytest.mark.parametrize("depth", [60, 5000])
def test_l25283_a_schema_that_is_nested_too_deeply_is_refused(rig, kind, depth):
    inner = '{"type":"null"}'
    begin = '{"type":"object","properties":{"a":' if kind == "object" else '{"type":"array","items":'
    end = "}}" if kind == "object" else "}"
    schema = begin * depth + inner + end * depth
    body = '{"messages":[{"role":"user","content":"hi"}],"response_format":{"type":"json_schema","json_schema":'
    body += f'{{"name":"x","schema":{schema}}}}}}}'
    response = rig.ask("POST", CHAT, content=body.encode(), headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "deep" in response.json()["error"]["message"]


PROPERTIES = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("more", "text", "is_ok"),
    [
        ({}, '{"a": true}', True),
        ({}, '{"a": true, "b": 1}', True),
        ({"additionalProperties": True}, '{"a": true, "b": [1]}', True),
        ({"additionalProperties": False}, '{"a": true}', True),
        ({"additionalProperties": False}, '{"a": true, "b": 1}', False),
        ({"additionalProperties": {"type": "null"}}, '{"a": true, "b": null}', True),
        ({"additionalProperties": {"type": "null"}}, '{"a": true, "b": 1}', False),
    ],
)
def test_l7789_other_properties_are_allowed_as_the_standard_says(more, text, is_ok):
    model = Scripted(text)
    ask = {"response_format": form(PROPERTIES | more)}
    said = model.whole(**ask)["choices"][0]["message"]["content"]
    # A text that breaks the form cannot be said: where its next token is masked, another one comes.
    assert (said == text) == is_ok


@pytest.mark.parametrize("regex", ["([abc]*)*", "((a*)*)*b", "(a|a)*c", "([abc]*)*d{3}", "(a?){50}a{50}"])
def test_x328_a_regex_of_stars_in_stars_is_bounded(rig, regex):
    response = rig.ask(
        "POST",
        COMPLETE,
        json={"prompt": "x", "max_tokens": 40, "structured_outputs": {"regex": regex}, "seed": 2, "temperature": 1},
    )
    assert response.status_code in (200, 400), response.text
    if response.status_code == 200:
        assert set(response.json()["choices"][0]["text"]) <= set("abcd")


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, 200),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": None}}, 400),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": ""}}, 400),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, 400),
        ({"type": "json_schema", "json_schema": None}, 400),
        ({"type": "json_schema", "json_schema": ""}, 400),
        ({"type": "json_schema", "json_schema": {}}, 400),
        ({"type": "json_schema"}, 400),
        ({}, 400),
    ],
)
def test_v52020_an_empty_schema_is_any_json_and_none_is_refused(rig, given, status):
    response = rig.ask("POST", CHAT, json={"messages": HI, "max_tokens": 900, "response_format": given, "seed": 5})
    assert response.status_code == status, response.text
    if status == 400:
        assert response.json()["error"]["param"].startswith("response_format")
    elif response.json()["choices"][0]["finish_reason"] == "stop":
        json.loads(response.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("value", ["", None, {}, [], 5])
def test_v52020_structured_outputs_of_nothing_are_refused_and_harm_nobody(rig, value):
    response = rig.ask("POST", CHAT, json={"messages": HI, "max_tokens": 99, "structured_outputs": {"json": value}})
    assert response.status_code == (200 if value == {} else 400), response.text


def test_v49227_a_stop_token_waits_until_the_form_may_end(rig):
    """A token that stops may stand in a string of the form: there it would cut the form in two."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    stops = [i for i in range(256) if chr(i).isalnum() and chr(i) != "a"]
    texts, error = asked(rig, response_format=form(schema), stop_token_ids=stops)
    assert error is None
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


def test_v49227_a_complete_form_ends_whatever_the_model_would_say():
    model = Scripted('{"a": true} and more')
    choice = model.whole(response_format=form(PROPERTIES | {"additionalProperties": False}))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"a": true}', "stop")


@pytest.mark.parametrize("vocab_size", [264, 320, 4096])
def test_v51727_a_vocabulary_of_another_width_than_the_models_is_masked_to_the_models(vocab_size):
    """More logits than tokens: those behind are never taken. (Fewer is refused when an engine is built.)"""
    rig = Rig(limits=LIMITS | {"vocab_size": vocab_size}, max_num_batched_tokens=1024)
    try:
        answer = rig.complete(
            structured_outputs={"regex": "[0-9]{20}"}, max_tokens=60, return_token_ids=True, temperature=2.0
        )
        (choice,) = answer["choices"]
        assert choice["text"].isdigit()
        assert max(choice["token_ids"]) < 259
        rig.assert_idle()
    finally:
        rig.close()


@pytest.mark.parametrize("text", ["(" * 500, "(" * 500 + "a" + ")" * 500, "[" * 500, "(?=a)b", "(a"])
@pytest.mark.parametrize("where", ["regex", "pattern"])
def test_jsonschema1538_a_regex_that_would_recurse_is_refused(rig, where, text):
    fields = {"structured_outputs": {"regex": text}}
    if where == "pattern":
        fields = {"response_format": form({"type": "string", "pattern": text})}
    response = rig.ask("POST", CHAT, json={"messages": HI, "max_tokens": 4} | fields)
    if text.endswith(")") and response.status_code == 200:
        return  # balanced, and compiled
    assert response.status_code == 400, response.text
    assert len(response.json()["error"]["message"]) < 1000


def test_a_form_streams_as_it_is_whole(monkeypatch):
    """Every form of a stream is that of the whole, at any number of tokens a step."""
    text = '{"a": true, "b": "é\\n"}'
    model = Scripted(text)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "string"}}}
    choice, _ = both_texts(monkeypatch, model, structured_outputs={"json": schema})
    assert choice["text"] == text
