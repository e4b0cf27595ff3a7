"""A call's arguments where each value stands between tags: JSON is made of them as they come.

A value's type is its parameter's in the tool's schema. Text of a string passes on at once; anything else waits for its
end, is read as its type, and is a string if it cannot be. What the schema does not know is a string.
"""

from collections.abc import Mapping
from typing import Any, Final

from tiercel.text.parsers.json_values import is_finite, read_json, read_literal, string_piece, to_json

_DEPTH_MAX: Final = 8  # of anyOf in anyOf
_UNKNOWN: Final = frozenset({"unknown"})


class TaggedArguments:
    """Writes one call's arguments. Each method returns the JSON text that it makes sure of."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self._properties = properties
        self._types: frozenset[str] = frozenset()
        self._key = ""
        self._parts: list[str] = []
        self._is_open = False  # the brace has been written
        self._is_in_value = False
        self._is_streamed = False

    def begin(self, key: str, *, types: frozenset[str] | None = None, is_whole: bool = False) -> str:
        """Begin a value. `types` are known from elsewhere than the schema; `is_whole` waits for its end."""
        self._key = key
        self._types = types or types_of(self._properties.get(key, {"type": "string"}))
        self._is_in_value = True
        self._is_streamed = self._types == {"string"} and not is_whole
        return self._written_key() + '"' if self._is_streamed else ""

    def push(self, text: str) -> str:
        """Take a piece of the value."""
        if self._is_streamed:
            return string_piece(text)
        self._parts.append(text)
        return ""

    def end(self) -> str:
        """End the value."""
        self._is_in_value = False
        if self._is_streamed:
            return '"'
        text = "".join(self._parts)
        self._parts.clear()
        return self._written_key() + converted(text, self._types)

    def set(self, key: str, value: Any) -> str:
        """Write a value that is known."""
        self._key = key
        return self._written_key() + to_json(value)

    def close(self) -> str:
        """End the arguments."""
        if self._is_in_value:
            return self.end() + "}"
        return "}" if self._is_open else "{}"

    def _written_key(self) -> str:
        before = ", " if self._is_open else "{"
        self._is_open = True
        return f"{before}{to_json(self._key)}: "


def types_of(schema: Any, depth: int = 0) -> frozenset[str]:
    """Give the JSON types that a schema allows; with "unknown" among them when it does not say."""
    if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
        return _UNKNOWN
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list) and kind and all(isinstance(one, str) for one in kind):
        return frozenset(kind)
    for name in ("anyOf", "oneOf"):
        if isinstance(some := schema.get(name), list) and some:
            return frozenset().union(*(types_of(one, depth + 1) for one in some))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return frozenset(_type_of(value) for value in values)
    return _UNKNOWN


def converted(text: str, types: frozenset[str]) -> str:
    """Write a value's text as JSON of one of `types`, else as a string."""
    bare = text.strip()
    if types - {"string"} and bare:
        try:
            value = _read(bare, types)
        except ValueError:
            pass
        else:
            found = _type_of(value)
            is_number = found == "integer" and "number" in types
            if found in types or is_number or "unknown" in types:
                return to_json(value)
    return to_json(text)


def _read(text: str, types: frozenset[str]) -> Any:
    lowered = text.lower()
    if "boolean" in types and lowered in ("true", "false"):
        return lowered == "true"
    if "null" in types and lowered in ("null", "none"):
        return None
    if types & {"integer", "number"}:
        try:
            value = read_json(text)
        except ValueError:
            value = None
        if isinstance(value, float) and is_finite(value) and "number" not in types and value.is_integer():
            return int(value)
        if value is not None and _type_of(value) in ("integer", "number"):
            to_json(value)
            return value
    value = read_literal(text)
    to_json(value)
    return value


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"
