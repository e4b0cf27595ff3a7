"""Structural tags: free text in which certain beginnings oblige what follows, until their end. To Lark's notation.

Two notations are read. The older: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`. The newer:
`{"format": F}`, F one of

    {"type": "const_string", "value"}                    {"type": "any_text"}
    {"type": "json_schema", "json_schema"}               {"type": "regex", "pattern"}
    {"type": "sequence", "elements": [F]}                {"type": "or", "elements": [F]}
    {"type": "tag", "begin", "content": F, "end"}
    {"type": "triggered_tags", "triggers", "tags": [tag], "at_least_one"?, "stop_after_first"?}
    {"type": "tags_with_separator", "tags": [tag], "separator", "at_least_one"?, "stop_after_first"?}

Others are refused by name. Knows no vocabulary but its special tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tiercel.sampling.grammar_limits import GrammarLimits
from tiercel.sampling.schemas import SchemaRefused, check_regex, check_schema
from tiercel.text.lark import Lark

_DEPTH_MAX: Final = 16
_N_PARTS_MAX: Final = 1_000


def tags_to_lark(tags: Mapping[str, Any], limits: GrammarLimits, special: Mapping[str, int]) -> str:
    """Give the grammar of a structural tag, in either notation.

    Raises: SchemaRefused: it is malformed, or a schema in it is refused.
    """
    writer = _Writer(limits, special)
    if "structures" in tags:
        known = {"type", "structures", "triggers"}
        _check_keys("", tags, known)
        parts = _list("structures", tags.get("structures"))
        as_tags = [
            {"begin": _of(one, "begin"), "content": {"type": "json_schema", "json_schema": _of(one, "schema")}, "end":
            _of(one, "end")} for one in parts
        ]  # fmt: skip
        start = writer.triggered("", {"triggers": tags.get("triggers"), "tags": as_tags}, 0)
    else:
        _check_keys("", tags, {"type", "format"})
        start = writer.format("format", tags.get("format"), 0)
    return writer.lark.build(start)


class _Writer:
    def __init__(self, limits: GrammarLimits, special: Mapping[str, int]) -> None:
        self.lark = Lark(special)
        self._limits = limits
        self._n_parts = 0

    def format(self, where: str, given: Any, depth: int) -> str:
        """Give the expression of a format."""
        self._n_parts += 1
        if depth > _DEPTH_MAX or self._n_parts > _N_PARTS_MAX:
            raise SchemaRefused(
                f"{where}: formats nested more than {_DEPTH_MAX} deep, or more than {_N_PARTS_MAX} of them"
            )
        if not isinstance(given, Mapping):
            raise SchemaRefused(f"{where}: an object with a type is needed")
        kind = given.get("type")
        match kind:
            case "const_string":
                return self.lark.literal(_text(f"{where}.value", given.get("value")))
            case "any_text":
                return self.lark.any_text()
            case "json_schema":
                return self._schema(f"{where}.json_schema", given.get("json_schema"))
            case "regex":
                pattern = _text(f"{where}.pattern", given.get("pattern"))
                check_regex(f"{where}.pattern", pattern, self._limits)
                return self.lark.regex(pattern)
            case "sequence" | "or":
                parts = _list(f"{where}.elements", given.get("elements"))
                found = [self.format(f"{where}.elements[{i}]", one, depth + 1) for i, one in enumerate(parts)]
                return " ".join(found) if kind == "sequence" else self.lark.one_of(found)
            case "tag":
                begin = _text(f"{where}.begin", given.get("begin"))
                return f"{self.lark.literal(begin)} {self._rest(where, given, depth)}"
            case "triggered_tags":
                return self.triggered(where, given, depth)
            case "tags_with_separator":
                return self._separated(where, given, depth)
        raise SchemaRefused(
            f"{where}.type: got {str(kind)[:40]!r}; const_string, any_text, json_schema, regex, sequence, or, tag, "
            "triggered_tags or tags_with_separator is needed"
        )

    def triggered(self, where: str, given: Mapping[str, Any], depth: int) -> str:
        """Give the expression of free text with tags in it."""
        triggers = [_text("triggers", one) for one in _list(f"{where}.triggers", given.get("triggers"))]
        tags = _list(f"{where}.tags", given.get("tags"))
        if not triggers or not all(triggers) or not tags:
            raise SchemaRefused(f"{where}: a trigger, not empty, and a tag are needed")
        choices = []
        for i, tag in enumerate(tags):
            begin = _text(f"tags[{i}].begin", _of(tag, "begin"))
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise SchemaRefused(
                    f"{where}.tags[{i}].begin: got {begin[:40]!r}, which begins with none of the triggers"
                )
            rest = self.lark.literal(begin[len(trigger) :])
            choices.append(f"{self.lark.text_before(trigger)} {rest} {self._rest(f'tags[{i}]', tag, depth)}")
        one = self.lark.one_of(choices)
        if given.get("stop_after_first"):
            return one if given.get("at_least_one") else f"({one} | {self.lark.any_text()})"
        return f"{one}{'+' if given.get('at_least_one') else '*'} {self.lark.any_text()}"

    def _separated(self, where: str, given: Mapping[str, Any], depth: int) -> str:
        tags = _list(f"{where}.tags", given.get("tags"))
        if not tags or not all(isinstance(tag, Mapping) for tag in tags):
            raise SchemaRefused(f"{where}.tags: at least one tag is needed")
        found = [self.format(f"{where}.tags[{i}]", {**tag, "type": "tag"}, depth + 1) for i, tag in enumerate(tags)]
        one = self.lark.one_of(found)
        separator = self.lark.literal(_text(f"{where}.separator", given.get("separator")))
        some = one if given.get("stop_after_first") else f"{one} ({separator} {one})*"
        return some if given.get("at_least_one") else f"({some})?"

    def _rest(self, where: str, tag: Mapping[str, Any], depth: int) -> str:
        content = self.format(f"{where}.content", _of(tag, "content"), depth + 1)
        return f"{content} {self.lark.literal(_text(f'{where}.end', _of(tag, 'end')))}"

    def _schema(self, where: str, schema: Any) -> str:
        if not isinstance(schema, Mapping | bool) or schema is False:
            raise SchemaRefused(f"{where}: a JSON schema is needed")
        try:
            check_schema(schema, self._limits)
        except SchemaRefused as error:
            raise SchemaRefused(f"{where}, {error}") from None
        return self.lark.json(schema)


def _check_keys(where: str, given: Mapping[str, Any], known: set[str]) -> None:
    for key in given:
        if key not in known:
            raise SchemaRefused(f"{where}{key[:40]}: an unknown field; known are {', '.join(sorted(known))}")


def _of(given: Any, key: str) -> Any:
    if not isinstance(given, Mapping) or key not in given:
        raise SchemaRefused(f"{key}: it is missing in a tag; it is needed")
    return given[key]


def _list(where: str, given: Any) -> Sequence[Any]:
    if not isinstance(given, list) or len(given) > _N_PARTS_MAX:
        raise SchemaRefused(f"{where}: a list of up to {_N_PARTS_MAX} is needed")
    return given


def _text(where: str, given: Any) -> str:
    if not isinstance(given, str):
        raise SchemaRefused(f"{where}: text is needed")
    return given
