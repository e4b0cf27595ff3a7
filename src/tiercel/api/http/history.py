"""A chat's messages as templates want them: what clients of all ages send, checked and made the same.

Knows no template; `prompts` asks for what one needs. Reasoning of earlier turns has both of its names; a call's
arguments are known to be JSON.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tiercel.base.errors import RequestError

Message = Mapping[str, Any]


def normalised(messages: Sequence[Message], *, knows_developer: bool) -> list[dict[str, Any]]:
    """Make messages the same. Without `knows_developer`, a developer's are the system's.

    Requires: each has a role, and content that is text, parts of text or none.
    Raises: RequestError: an earlier call is malformed; `param` names the field.
    """
    done = []
    for i, message in enumerate(messages):
        new = {key: value for key, value in message.items() if value is not None or key == "content"}
        if new["role"] == "developer" and not knows_developer:
            new["role"] = "system"
        reasoning = new.get("reasoning", new.get("reasoning_content"))
        if new["role"] == "assistant" and isinstance(reasoning, str):
            new["reasoning"] = new["reasoning_content"] = reasoning
        if "tool_calls" in new:
            _check_calls(f"messages[{i}].tool_calls", new["tool_calls"])
            if not new["tool_calls"]:
                del new["tool_calls"]
        done.append(new)
    return done


def has_tool_turns(messages: Sequence[Message]) -> bool:
    """Whether a chat has calls or their results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def _check_calls(where: str, calls: Any) -> None:
    if not isinstance(calls, list):
        raise _refused(where, "a list of calls is needed")
    for k, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise _refused(f"{where}[{k}]", "an object of type function is needed")
        if not isinstance(function.get("name"), str):
            raise _refused(f"{where}[{k}].function.name", "the tool's name is needed")
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments:
            check_json_object(f"{where}[{k}].function.arguments", arguments)
        elif not isinstance(arguments, str | Mapping | None):
            raise _refused(f"{where}[{k}].function.arguments", "a JSON object as text is needed")


def check_json_object(where: str, text: str) -> None:
    """Refuse what is no JSON object.

    Raises: RequestError
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _refused(where, "it is not JSON; a JSON object as text is needed") from None
    if not isinstance(value, dict):
        raise _refused(where, "a JSON object as text is needed")


def _refused(param: str, why: str) -> RequestError:
    return RequestError(f"{param}: {why}", param=param)
