"""Input items: what clients send, checked and brought into the one form in which they are kept and given back.

Knows no chat. Read are messages (also the easy form and plain text), function calls and their outputs, reasoning, and
references to items of stored responses. A key that would change an item's meaning and is not read is refused.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tiercel.api.http.history import check_json_object
from tiercel.base.errors import RequestError

if TYPE_CHECKING:
    from tiercel.api.http.settings import ServerSettings

Item = dict[str, Any]

_TEXT_PARTS: Final = ("input_text", "output_text", "text")
_ROLES: Final = ("user", "assistant", "system", "developer")
_PREFIXES: Final[Mapping[str, str]] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
# Labels of an item; none reaches the model.
_LABELS: Final = frozenset({"type", "id", "status", "phase", "caller", "created_by"})
_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "message": frozenset({"role", "content"}),
    "function_call": frozenset({"call_id", "name", "arguments"}),
    "function_call_output": frozenset({"call_id", "output", "name"}),
    "reasoning": frozenset({"summary", "content"}),
}
_PART_KEYS: Final = frozenset({"type", "text", "annotations", "logprobs"})


def new_id(prefix: str) -> str:
    """Make an id that nobody can guess."""
    return f"{prefix}_{uuid.uuid4().hex}"


def check_counts(given: str | Sequence[Any], settings: "ServerSettings") -> None:
    """Refuse an input for how many items it has, or parts in one.

    Raises: RequestError
    """
    if isinstance(given, str):
        return
    if len(given) > settings.n_messages_max:
        raise _refused("input", f"got {len(given)} items; at most {settings.n_messages_max} are read; send fewer")
    for i, item in enumerate(given):
        for name in ("content", "output"):
            parts = item.get(name) if isinstance(item, Mapping) else None
            if isinstance(parts, list) and len(parts) > settings.n_parts_max:
                raise _refused(f"input[{i}].{name}", f"got {len(parts)} parts; at most {settings.n_parts_max} are read")


def read_items(given: str | Sequence[Any], earlier: Sequence[Item], known: Mapping[str, Item]) -> list[Item]:
    """Read a request's input, which goes on after the items of `earlier`. `known` are those that may be referred to.

    Raises: RequestError: an item is malformed; `param` names the field.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items: list[Item] = []
    call_ids = {item["call_id"] for item in earlier if item["type"] == "function_call"}
    for i, one in enumerate(given):
        item = _read_item(f"input[{i}]", one, known)
        if item["type"] == "function_call":
            call_ids.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in call_ids:
            raise _refused(
                f"input[{i}].call_id", f"got {item['call_id'][:80]!r}, the output of no call before it; send its call"
            )
        items.append(item)
    return items


def _read_item(where: str, given: Any, known: Mapping[str, Item]) -> Item:
    if not isinstance(given, Mapping):
        raise _refused(where, "an object is needed, as in {role, content}")
    kind = given.get("type")
    if kind is None:
        kind = "message" if "role" in given else "item_reference" if set(given) == {"id"} else None
    if kind == "item_reference":
        return _referred(where, given, known)
    if not isinstance(kind, str) or kind not in _KEYS:
        raise _refused(
            f"{where}.type", f"got {str(kind)[:40]!r}; {', '.join(_KEYS)} and item_reference are what is read here"
        )
    for name, value in given.items():
        if value is not None and name not in _KEYS[kind] and name not in _LABELS:
            _check_harmless(where, name, value)
    item_id = given.get("id")
    if not isinstance(item_id, str | None):
        raise _refused(f"{where}.id", "text is needed; leave it out")
    item = {"id": item_id or new_id(_PREFIXES[kind]), "type": kind}
    status = given.get("status")
    if status not in (None, "completed", "incomplete", "in_progress"):
        raise _refused(f"{where}.status", "completed, incomplete or in_progress is needed; leave it out")
    read = {
        "message": _message,
        "function_call": _call,
        "function_call_output": _call_output,
        "reasoning": _reasoning,
    }[kind]
    return item | read(where, given) | {"status": status or "completed"}


def _check_harmless(where: str, name: str, value: Any) -> None:
    if (name == "async" and value is False) or (name == "namespace" and value == ""):
        return
    why = "it is not read here; leave it out"
    if name == "encrypted_content":
        why = "nothing is encrypted here, so it cannot be read; send the reasoning as content, or leave it out"
    raise _refused(f"{where}.{name[:64]}", why)


def _referred(where: str, given: Mapping[str, Any], known: Mapping[str, Item]) -> Item:
    item = known.get(given["id"]) if isinstance(given.get("id"), str) else None
    if item is None:
        raise _refused(
            f"{where}.id", f"got {str(given.get('id'))[:80]!r}, an item of no stored response; send the item itself"
        )
    return item


def _message(where: str, given: Mapping[str, Any]) -> Item:
    role = given.get("role")
    if role not in _ROLES:
        raise _refused(f"{where}.role", f"got {str(role)[:40]!r}; {', '.join(_ROLES)} are known")
    is_own = role == "assistant"
    return {"role": role, "content": _parts(f"{where}.content", given.get("content"), is_own=is_own)}


def _parts(where: str, content: Any, *, is_own: bool) -> list[Item]:
    if isinstance(content, str):
        return [_text_part(content, is_own=is_own)]
    if not isinstance(content, list):
        raise _refused(where, "text or a list of parts is needed")
    return [_part(f"{where}[{k}]", part, is_own=is_own) for k, part in enumerate(content)]


def _part(where: str, part: Any, *, is_own: bool) -> Item:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if is_own and kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "refusal", "refusal": part["refusal"]}
    if kind not in _TEXT_PARTS:
        shown = kind if isinstance(part, Mapping) else type(part).__name__
        raise _refused(where, f"got a part of type {str(shown)[:40]!r}; this model reads parts of type input_text only")
    if not isinstance(part.get("text"), str):
        raise _refused(f"{where}.text", "text is needed")
    for name, value in part.items():
        if name not in _PART_KEYS and value is not None:
            raise _refused(f"{where}.{name[:64]}", "it is not read here; leave it out")
    return _text_part(part["text"], is_own=is_own)


def _text_part(text: str, *, is_own: bool) -> Item:
    if is_own:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def _call(where: str, given: Mapping[str, Any]) -> Item:
    arguments = given.get("arguments")
    if not isinstance(arguments, str):
        raise _refused(f"{where}.arguments", "a JSON object as text is needed")
    if arguments:
        check_json_object(f"{where}.arguments", arguments)
    return {
        "call_id": _needed(where, given, "call_id"),
        "name": _needed(where, given, "name"),
        "arguments": arguments,
    }


def _call_output(where: str, given: Mapping[str, Any]) -> Item:
    output = given.get("output")
    read = output if isinstance(output, str) else _parts(f"{where}.output", output, is_own=False)
    return {"call_id": _needed(where, given, "call_id"), "output": read}


def _reasoning(where: str, given: Mapping[str, Any]) -> Item:
    parts = {}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        given_parts = given.get(name) or []
        if not isinstance(given_parts, list):
            raise _refused(f"{where}.{name}", "a list of parts is needed")
        for k, part in enumerate(given_parts):
            if not isinstance(part, Mapping) or part.get("type") != kind or not isinstance(part.get("text"), str):
                raise _refused(f"{where}.{name}[{k}]", f"a part of type {kind} with text is needed")
        parts[name] = [{"type": kind, "text": part["text"]} for part in given_parts]
    return parts


def _needed(where: str, given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value:
        raise _refused(f"{where}.{name}", "it is missing; text is needed")
    return value


def _refused(param: str, why: str) -> RequestError:
    return RequestError(f"{param}: {why}", param=param)
