"""Tools in words, for a chat template that has no place for them: what hermes models are told, and how they answer.

It rewrites messages and knows nothing else: a template that names `tools` itself never comes here.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_BEFORE: Final = (
    "You can call functions to help with a request. These are described here by JSON schemas, one a line:\n<tools>\n"
)
_AFTER: Final = (
    "\n</tools>\nTo call functions, write each call in this form, with the function's name and a JSON object of its "
    'arguments:\n<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>\n'
    "The results come in the next message. When no function is needed, answer in words."
)


def spelled_out(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[Mapping[str, Any]]:
    """Write tools into the system message, and calls and their results in a chat as text."""
    told: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            _add_result(told, _text(message.get("content")))
        elif message.get("tool_calls"):
            told.append(_with_calls(message))
        else:
            told.append(message)
    if not tools:
        return told
    words = _BEFORE + "\n".join(_dumped(tool["function"]) for tool in tools) + _AFTER
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": f"{_text(told[0].get('content'))}\n\n{words}"}, *told[1:]]
    return [{"role": "system", "content": words}, *told]


def _add_result(told: list[Mapping[str, Any]], text: str) -> None:
    """Put results that follow each other into one turn: templates want turns to alternate."""
    result = f"<tool_response>\n{text}\n</tool_response>"
    if told and told[-1].get("is_tool_result"):
        told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{result}"}
    else:
        told.append({"role": "user", "content": result, "is_tool_result": True})


def _with_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    pieces = [_text(message.get("content"))] if message.get("content") else []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        shown = {"name": function["name"], "arguments": arguments}
        pieces.append(f"<tool_call>\n{_dumped(shown)}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(pieces)}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
