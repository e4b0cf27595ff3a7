"""The form a request asks its text to have: `response_format` of OpenAI's, `structured_outputs` of vLLM's.

Knows no grammar: what a form holds is checked where it is compiled, by names of the request's own fields.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tiercel.base.errors import RequestError
from tiercel.protocol.structured import FORMS, StructuredOutputsParams

if TYPE_CHECKING:
    from tiercel.api.http.schema import Generation
    from tiercel.api.http.service import Submission

_OPTIONS: Final = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_TYPES: Final = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_FIELDS: Final = frozenset({"name", "description", "schema", "strict"})


def form_of(ask: "Generation") -> StructuredOutputsParams | None:
    """Give the form that a request asks for; None: any text.

    Raises: RequestError: it is malformed, or two are asked for; `param` names the field.
    """
    by_format = _of_response_format(ask.response_format)
    if ask.structured_outputs is None:
        return by_format
    if by_format is not None:
        raise RequestError(
            "structured_outputs: got it with response_format; one form is needed; leave one of them out",
            param="structured_outputs",
        )
    return _of_structured_outputs(ask.structured_outputs)


def may_have_form(ask: "Generation") -> bool:
    """Whether a form may have to be compiled for a request; it is not checked yet."""
    tools = getattr(ask, "tools", None)
    return ask.response_format is not None or ask.structured_outputs is not None or bool(tools)


def form_named(one: "Submission", name: str) -> "Submission":
    """Have errors about a submission's form begin with `name`: what its route calls the form's schema."""
    form = one.params.structured_outputs
    if form is None or not form.name.startswith("response_format"):
        return one
    form = msgspec.structs.replace(form, name=name)
    return dataclasses.replace(one, params=msgspec.structs.replace(one.params, structured_outputs=form))


def _of_structured_outputs(given: Mapping[str, Any]) -> StructuredOutputsParams:
    for key in given:
        if key not in FORMS and key not in _OPTIONS:
            param = f"structured_outputs.{key[:40]}"
            raise RequestError(f"{param}: an unknown field; known are {', '.join(FORMS + _OPTIONS)}", param=param)
    return StructuredOutputsParams(**{key: value for key, value in given.items() if value is not None})


def _of_response_format(given: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind not in _TYPES:
        raise _refused("type", f"got {str(kind)[:40]!r}; {', '.join(_TYPES)} is needed")
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=dict(given), name="response_format")
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, name="response_format")
    named = given.get("json_schema")
    if not isinstance(named, Mapping):
        raise _refused("json_schema", "an object with a name and a schema is needed")
    for key in named:
        if key not in _SCHEMA_FIELDS:
            raise _refused(f"json_schema.{key[:40]}", "an unknown field; leave it out")
    strict, schema = named.get("strict"), named.get("schema")
    if not isinstance(strict, bool | None):
        raise _refused("json_schema.strict", "true or false is needed; leave it out")
    if not isinstance(schema, Mapping):
        raise _refused("json_schema.schema", "a JSON schema is needed")
    return StructuredOutputsParams(
        json=schema, disable_additional_properties=bool(strict), name="response_format.json_schema.schema"
    )


def _refused(field: str, why: str) -> RequestError:
    param = f"response_format.{field}"
    return RequestError(f"{param}: {why}", param=param)
