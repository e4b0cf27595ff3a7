"""What is checked of a JSON schema before a compiler sees it: its size, its references, and keywords that would be
lost.

The compiler (llguidance) refuses keywords that it cannot keep to, by their names. Here are the rest: limits, and the
few cases in which it would keep to less than the schema says. Pure functions over decoded JSON.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from tiercel.sampling.grammar_limits import GrammarLimits
from tiercel.sampling.schema_numbers import lost_number

_REPEAT: Final = re.compile(r"\{(\d*),?(\d*)\}")
# Keywords whose value is a schema, a list of them, or a mapping to them.
_ONE: Final = ("items", "additionalProperties", "additionalItems", "contentSchema")
_LIST: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions")
# The compiler refuses most of these itself; named here so that each is refused with its place.
_NOT_KEPT: Final = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
     "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
     "$dynamicRef", "$recursiveRef", "x-guidance"}
)  # fmt: skip


class SchemaRefused(ValueError):
    """A schema cannot be kept to. The message begins with the place, as a JSON pointer, and names the keyword."""


def check_schema(schema: Any, limits: GrammarLimits) -> None:
    """Refuse a schema that is too large or asks for what is not kept to.

    Raises: SchemaRefused
    """
    _check_size(schema, limits)
    for pointer, node in subschemas(schema, limits.schema_depth_max):
        if isinstance(node, Mapping):
            _check_node(pointer, node, limits)
            _check_loop(schema, pointer, node)


def _check_loop(schema: Any, pointer: str, node: Mapping[str, Any]) -> None:
    """Refuse a reference that leads, over nothing but references and `allOf`, to itself: it says nothing."""
    if not isinstance(node.get("$ref"), str):
        return
    seen: list[Any] = []
    todo = _same_place(schema, node)
    while todo:
        one = todo.pop()
        if one is node:
            raise SchemaRefused(f"{_shown(pointer)}: $ref {node['$ref'][:60]!r} leads back to itself; say what it is")
        if not any(one is other for other in seen):
            seen.append(one)
            todo += _same_place(schema, one)


def _same_place(schema: Any, node: Any) -> list[Any]:
    """Give the schemas that a value must meet for `node` itself: what it refers to, and the parts of its `allOf`."""
    if not isinstance(node, Mapping):
        return []
    parts = node.get("allOf")
    found = list(parts) if isinstance(parts, list) else []
    ref = node.get("$ref")
    return found if not isinstance(ref, str) else [*found, _at(schema, ref)]


def _at(schema: Any, ref: str) -> Any:
    """Give what `#` or `#/...` points at; None where there is nothing, which the compiler refuses."""
    place = schema
    for name in unquote(ref.removeprefix("#")).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        elif isinstance(place, Mapping):
            place = place.get(name)
        else:
            return None
    return place


def subschemas(schema: Any, depth_max: int) -> Iterator[tuple[str, Any]]:
    """Give a schema and all in it, each with its JSON pointer.

    Raises: SchemaRefused: they are nested more than `depth_max` deep.
    """
    todo: list[tuple[str, Any, int]] = [("", schema, 1)]
    while todo:
        pointer, node, depth = todo.pop()
        if depth > depth_max:
            raise SchemaRefused(f"{_shown(pointer)}: schemas nested more than {depth_max} deep; flatten it")
        yield pointer, node
        if isinstance(node, Mapping):
            todo += [(f"{pointer}/{where}", inner, depth + 1) for where, inner in _inner(node)]


def _inner(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _ONE:
        if isinstance(node.get(key), Mapping):
            yield key, node[key]
    for key in _LIST:
        if isinstance(node.get(key), list):
            yield from ((f"{key}/{i}", one) for i, one in enumerate(node[key]))
    for key in _NAMED:
        if isinstance(node.get(key), Mapping):
            yield from ((f"{key}/{name}", one) for name, one in node[key].items() if isinstance(one, Mapping | bool))


def _check_size(schema: Any, limits: GrammarLimits) -> None:
    n_nodes = 0
    level = [schema]
    while level:
        n_nodes += len(level)
        if n_nodes > limits.n_schema_nodes_max:
            raise SchemaRefused(f"the schema: more than {limits.n_schema_nodes_max} values in it; make it smaller")
        level = [inner for outer in level for inner in _values(outer)]


def _values(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return list(node.values())
    return node if isinstance(node, list) else []


def _check_node(pointer: str, node: Mapping[str, Any], limits: GrammarLimits) -> None:
    where = _shown(pointer)
    for key in node:
        if key in _NOT_KEPT:
            raise SchemaRefused(f"{where}: {key} cannot be kept to; leave it out")
    ref = node.get("$ref")
    if isinstance(ref, str) and not ref.startswith("#"):
        raise SchemaRefused(
            f"{where}: $ref {ref[:60]!r} leads out of the schema; only #/... does not; put it into $defs"
        )
    enum = node.get("enum")
    if isinstance(enum, list) and len(enum) > limits.n_choices_max:
        raise SchemaRefused(f"{where}: enum of {len(enum)} values; at most {limits.n_choices_max} are taken")
    lost = lost_number(node)
    if lost is not None:
        raise SchemaRefused(f"{where}: {lost}")
    patterns = [node["pattern"]] if isinstance(node.get("pattern"), str) else []
    if isinstance(node.get("patternProperties"), Mapping):
        patterns += node["patternProperties"]
    for pattern in patterns:
        check_regex(f"{where}: pattern", pattern, limits)


def check_regex(where: str, pattern: str, limits: GrammarLimits) -> None:
    """Refuse an expression that is too long, or repeats too often.

    Raises: SchemaRefused
    """
    if len(pattern.encode()) > limits.regex_bytes_max:
        raise SchemaRefused(f"{where} of {len(pattern)} characters; at most {limits.regex_bytes_max} bytes are taken")
    if "\0" in pattern:
        raise SchemaRefused(f"{where} holds a NUL; one without is needed")
    for found in _REPEAT.finditer(pattern):
        if any(len(bound) > 9 or int(bound or 0) > limits.n_repeats_max for bound in found.groups()):
            raise SchemaRefused(f"{where} repeats {found[0][:40]} times; at most {limits.n_repeats_max} are taken")


def closed(schema: Any, depth_max: int) -> Any:
    """Return a schema in which objects with `properties` and without a word on others allow no others.

    Parts of an `allOf` stay as they are: closed, none would allow what the next one asks for.
    """
    if depth_max < 0 or not isinstance(schema, dict):
        return schema
    done = dict(schema)
    for key in ("items", "additionalProperties"):
        if isinstance(done.get(key), dict):
            done[key] = closed(done[key], depth_max - 1)
    for key in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(done.get(key), list):
            done[key] = [closed(one, depth_max - 1) for one in done[key]]
    for key in ("properties", "$defs", "definitions"):
        if isinstance(done.get(key), dict):
            done[key] = {name: closed(one, depth_max - 1) for name, one in done[key].items()}
    is_combined = any(key in done for key in ("allOf", "anyOf", "oneOf", "patternProperties", "$ref"))
    if "properties" in done and "additionalProperties" not in done and not is_combined:
        done["additionalProperties"] = False
    return done


def _shown(pointer: str) -> str:
    """Write a JSON pointer without its first slash: errors that look like a path of this machine are blotted out."""
    return pointer[1:121] or "the schema"
