"""Items as the messages of a chat. Knows no request; the items have been read by `items`, or made by `output`.

An assistant's reasoning, text and calls that follow one another are one message, as models write them in one turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tiercel.api.http.history import check_json_object
from tiercel.api.http.responses_api.items import Item
from tiercel.base.errors import RequestError

Message = dict[str, Any]
_OF_SYSTEM: Final = ("system", "developer")


def to_messages(instructions: str | None, items: Sequence[Item], *, knows_developer: bool) -> list[Message]:
    """Make a chat of items, led by the instructions.

    Templates take one leading message of the system: instructions and the system's first messages are joined by a
    blank line, a developer's too unless the template knows developers.
    Raises: RequestError: an earlier answer ended inside a call.
    """
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if item["type"] == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        elif item["type"] == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])})
        else:
            _add_to_turn(messages, item)
    return _led_by_one(messages, _OF_SYSTEM[:1] if knows_developer else _OF_SYSTEM)


def _add_to_turn(messages: list[Message], item: Item) -> None:
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if item["type"] == "function_call":
        _check_whole(item)
        if last is None:
            messages.append(last := {"role": "assistant", "content": None})
        function = {"name": item["name"], "arguments": item["arguments"]}
        last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
        return
    is_begun = last is not None and (last["content"] is not None or "tool_calls" in last)
    if last is None or is_begun:
        messages.append(last := {"role": "assistant", "content": None})
    if item["type"] == "reasoning":
        text = "".join(part["text"] for part in item.get("content") or item["summary"])
        if text:
            last["reasoning"] = last.get("reasoning", "") + text
    else:
        last["content"] = _content(item["content"])


def _check_whole(item: Item) -> None:
    try:
        check_json_object("arguments", item["arguments"] or "{}")
    except RequestError:
        raise RequestError(
            f"previous_response_id: that response ended inside its call of {item['name'][:64]!r}, whose arguments are "
            "no JSON object; go on from the response before it",
            param="previous_response_id",
        ) from None


def _content(content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    texts = [part["refusal"] if part["type"] == "refusal" else part["text"] for part in content]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _led_by_one(messages: list[Message], roles: Sequence[str]) -> list[Message]:
    n = 0
    while n < len(messages) and messages[n]["role"] in roles:
        n += 1
    if n < 2:
        return messages
    return [{"role": messages[0]["role"], "content": "\n\n".join(map(_plain, messages[:n]))}, *messages[n:]]


def _plain(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
