"""`StructuredOutputsParams`: what form a request's text must have, under vLLM's names.

Knows no grammar and no vocabulary: `sampling.grammar` says which schemas and expressions can be kept to. Invariants,
from construction on:
1. Exactly one form is given.
2. A schema is kept as JSON text, in `json`, whatever it came as; a structural tag likewise.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import force_setattr

from tiercel.base.errors import RequestError

FORMS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the text. One of:

        json             a JSON schema, as a mapping or as text
        regex            a regular expression that the whole text matches
        choice           the texts to choose from
        grammar          a context-free grammar, in Lark's notation or GBNF's
        json_object      True: any JSON object
        structural_tag   text in which tags begin pieces of a form (`sampling.structural_tags`)

    Of JSON only:
        disable_any_whitespace          no blanks outside of strings
        disable_additional_properties   objects of a schema that names no `additionalProperties` have none
        whitespace_pattern              what blanks may be; without it, up to 64 spaces and line ends

    `param` of errors begins with `name`, what the client called it.

    Raises:
        RequestError: there is no form or more than one, or one has the wrong type.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    name: str = "structured_outputs"

    def __post_init__(self) -> None:
        given = [form for form in FORMS if getattr(self, form) is not None]
        if len(given) != 1:
            got = ", ".join(given) or "none"
            raise self.refused(f"got {got}; one of {', '.join(FORMS)} is needed")
        self._check_type(given[0])
        for flag in ("disable_any_whitespace", "disable_additional_properties"):
            if type(getattr(self, flag)) is not bool:
                raise self.refused("true or false is needed", flag)
        if self.whitespace_pattern is not None and not isinstance(self.whitespace_pattern, str):
            raise self.refused("text is needed", "whitespace_pattern")
        is_json = given[0] in ("json", "json_object")
        for option in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(self, option) and not is_json:
                raise self.refused(f"got it with {given[0]}; only JSON has it; leave it out", option)
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise self.refused("got it with disable_any_whitespace; leave one of them out", "whitespace_pattern")

    @property
    def form(self) -> str:
        """Which form it is."""
        return next(form for form in FORMS if getattr(self, form) is not None)

    def refused(self, why: str, field: str = "") -> RequestError:
        """Make an error that names the field as the client knows it."""
        param = f"{self.name}.{field}" if field else self.name
        return RequestError(f"{param}: {why}", param=param)

    def _check_type(self, form: str) -> None:
        value = getattr(self, form)
        if form in ("json", "structural_tag"):
            force_setattr(self, form, self._as_json(form, value))
        elif form == "json_object":
            if value is not True:
                raise self.refused("got false; true is needed; leave it out", form)
        elif form == "choice":
            is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
            if not is_list or not value or not all(isinstance(one, str) and one for one in value):
                raise self.refused("a list of texts is needed, none of them empty", form)
            force_setattr(self, form, tuple(value))
        elif not isinstance(value, str) or not value.strip():
            raise self.refused(f"got {value!r:.40}; text is needed", form)
        elif "\0" in value:
            raise self.refused("it holds a NUL; text without is needed", form)

    def _as_json(self, form: str, value: Any) -> str:
        """Give a schema or a tag as JSON text, whatever it came as."""
        kinds = (dict, bool) if form == "json" else (dict,)
        try:
            read = msgspec.json.decode(value) if isinstance(value, str) else value
            if isinstance(read, Mapping):
                read = dict(read)
            if not isinstance(read, kinds):
                raise self.refused("a JSON object is needed", form)
            return msgspec.json.encode(read).decode()
        except RecursionError:
            raise self.refused("it is nested too deeply; flatten it", form) from None
        except RequestError:
            raise
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise self.refused(f"it is not JSON ({str(error)[:100]}); a JSON object is needed", form) from None
