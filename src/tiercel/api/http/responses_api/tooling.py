"""Tools of a request in the shape of chats, and errors about them in the words of this route.

Only functions are tools here: what OpenAI runs itself (searches, interpreters, remote servers) is refused by name.
`tools` of chats checks the rest.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.exceptions import HTTPException

from tiercel.base.errors import RequestError

_TOOL_KEYS: Final = frozenset({"type", "name", "description", "parameters", "strict"})
_MODES: Final = ("auto", "required")
# A chat's name of a field -> the one of this route.
_NAMES: Final[Mapping[str, str]] = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
_FIRST_NAME: Final = re.compile(r"^(\w+)")


def to_chat_tools(tools: Sequence[Any]) -> list[Any]:
    """Give tools in the shape of chats.

    Raises: RequestError: one is no function, or says what is not read here.
    """
    return [_to_chat_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]


def _to_chat_tool(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise _refused(where, "an object of type function is needed")
    if tool.get("type") != "function":
        raise _refused(
            f"{where}.type",
            f"got {str(tool.get('type'))[:40]!r}; no tools are run here; declare it as a function, and run it",
        )
    for name, value in tool.items():
        if name not in _TOOL_KEYS and value not in (None, False):
            raise _refused(f"{where}.{name[:64]}", "it is not read here; leave it out")
    function = {name: value for name, value in tool.items() if name in _TOOL_KEYS - {"type"} and value is not None}
    return {"type": "function", "function": function}


def to_chat_choice(choice: Any, tools: list[Any] | None) -> tuple[Any, list[Any] | None]:
    """Give a choice, and the tools it leaves, in the shape of chats.

    Only the tools that `allowed_tools` lists are shown to the model: that is how the others are kept out.
    Raises: RequestError: it is of a kind that is not read here.
    """
    if not isinstance(choice, Mapping):
        return choice, tools
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}, tools
    if kind != "allowed_tools":
        raise _refused(
            "tool_choice.type", f"got {str(kind)[:40]!r}; function or allowed_tools is needed, or auto, none, required"
        )
    if choice.get("mode") not in _MODES:
        raise _refused("tool_choice.mode", f"got {str(choice.get('mode'))[:40]!r}; auto or required is needed")
    allowed = choice.get("tools")
    if not isinstance(allowed, list) or not allowed:
        raise _refused("tool_choice.tools", "a list of tools is needed, as in {type, name}")
    by_name = {tool["function"].get("name"): tool for tool in tools or ()}
    for i, one in enumerate(allowed):
        name = one.get("name") if isinstance(one, Mapping) and one.get("type") == "function" else None
        if not isinstance(name, str) or name not in by_name:
            raise _refused(
                f"tool_choice.tools[{i}]", f"got {str(name)[:64]!r}, which is none of tools; name one of them"
            )
    names = [one["name"] for one in allowed]
    return choice["mode"], [tool for name, tool in by_name.items() if name in names]


def in_own_words(error: RequestError) -> RequestError:
    """Give a chat's error with the names that fields have on this route; the same kind of error."""
    param = error.param
    if param is None:
        return error
    named = _FIRST_NAME.sub(lambda found: _NAMES.get(found[1], found[1]), param)
    named = named.replace("].function", "]") if named.startswith("tools[") else named
    named = named.replace("text.format.json_schema", "text.format")
    message = str(error)
    if message.startswith(param):
        message = named + message[len(param) :]
    return type(error)(message, param=named)


def refusal_in_own_words(error: HTTPException) -> HTTPException:
    """Do the same for what a chat answers with a status of its own."""
    detail = _FIRST_NAME.sub(lambda found: _NAMES.get(found[1], found[1]), error.detail)
    return HTTPException(error.status_code, detail.replace("].function", "]", 1), error.headers)


def _refused(param: str, why: str) -> RequestError:
    return RequestError(f"{param}: {why}", param=param)
