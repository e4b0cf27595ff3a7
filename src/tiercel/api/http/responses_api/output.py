"""A chat's deltas as output items, and the events that tell of them, in OpenAI's order. Knows no request.

One item is open at a time: what is of another kind ends it. The items do not depend on how the text was cut: white
space alone is no item beside others, so it is held until something follows it. States: open, then closed, once.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tiercel.api.http.responses_api.items import Item, new_id

Emit = Callable[[str, Mapping[str, Any]], None]
Entries = Sequence[Mapping[str, Any]]
COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"
# Kind of text -> the id's prefix, the type of its part, and of the events of its pieces.
_TEXTS: Final[Mapping[str, tuple[str, str, str]]] = {
    "message": ("msg", "output_text", "response.output_text"),
    "reasoning": ("rs", "reasoning_text", "response.reasoning_text"),
}
_CALL: Final = "function_call"
_ARGUMENTS: Final = "response.function_call_arguments"


class Output:
    """The items of one response. `items` are those that have ended."""

    def __init__(self, emit: Emit) -> None:
        self.items: list[Item] = []
        self._emit = emit
        self._kind: str | None = None  # of the open item, or of the text that is held for one
        self._is_open = False
        self._item: Item = {}
        self._call_idx: int | None = None
        self._pieces: list[str] = []
        self._entries: list[Mapping[str, Any]] = []

    def push(self, deltas: Sequence[Mapping[str, Any]], entries: Entries = ()) -> None:
        """Take the next deltas of a chat. `entries` are the log-probabilities of their content."""
        for delta in deltas:
            if "tool_calls" in delta:
                self._call(delta["tool_calls"][0])
            elif "reasoning" in delta:
                self._text("reasoning", delta["reasoning"], ())
            else:
                self._text("message", delta["content"], entries)
                entries = ()

    def close(self, status: str) -> None:
        """End the last item as the response ends. One that said nothing has an empty message."""
        is_failed = status not in (COMPLETED, INCOMPLETE)
        if self._is_open:
            self._end_item(COMPLETED if status == COMPLETED else INCOMPLETE)
        elif not self.items and not is_failed:
            held, entries = ("".join(self._pieces), self._entries) if self._kind == "message" else ("", [])
            self._begin_text("message")
            if held:
                self._piece(held, entries)
            self._end_item(status)

    def _text(self, kind: str, text: str, entries: Entries) -> None:
        if self._is_open and self._kind == kind:
            self._piece(text, entries)
            return
        if self._is_open:
            self._end_item(COMPLETED)
        if self._kind != kind:
            self._kind, self._pieces, self._entries = kind, [], []
        self._pieces.append(text)
        self._entries += entries
        if text.strip():
            held, held_entries = "".join(self._pieces), self._entries
            self._begin_text(kind)
            self._piece(held, held_entries)

    def _begin_text(self, kind: str) -> None:
        prefix, part, _ = _TEXTS[kind]
        self._begin({"id": new_id(prefix), "type": kind, "status": IN_PROGRESS, **_told(kind, [])}, kind)
        self._emit("response.content_part.added", {**self._place(), "part": _part(part, "", [])})

    def _begin(self, item: Item, kind: str) -> None:
        self._kind, self._is_open, self._item = kind, True, item
        self._pieces, self._entries = [], []
        self._emit("response.output_item.added", {"output_index": len(self.items), "item": item})

    def _piece(self, text: str, entries: Entries) -> None:
        assert self._kind is not None, "output: text for no item"
        self._pieces.append(text)
        self._entries += entries
        event = {**self._place(), "delta": text}
        if self._kind == "message":
            event["logprobs"] = list(entries)
        self._emit(f"{_TEXTS[self._kind][2]}.delta", event)

    def _call(self, part: Mapping[str, Any]) -> None:
        function = part["function"]
        if "id" in part:
            if self._is_open:
                self._end_item(COMPLETED)
            item = {"id": new_id("fc"), "type": _CALL, "status": IN_PROGRESS, "arguments": ""}
            self._begin(item | {"call_id": part["id"], "name": function["name"]}, _CALL)
        if function["arguments"]:
            self._pieces.append(function["arguments"])
            self._emit(f"{_ARGUMENTS}.delta", {**self._item_place(), "delta": function["arguments"]})

    def _end_item(self, status: str) -> None:
        text = "".join(self._pieces)
        if self._kind == _CALL:
            # A call that is whole is so whatever ended the response; one that is not is so too.
            done = {"status": COMPLETED if _is_object(text) else INCOMPLETE, "arguments": text}
            told = {**self._item_place(), "name": self._item["name"], "arguments": text}
            self._emit(f"{_ARGUMENTS}.done", told)
        else:
            assert self._kind is not None, "output: nothing to end"
            _, kind, event = _TEXTS[self._kind]
            part = _part(kind, text, self._entries)
            told = {**self._place(), "text": text}
            self._emit(f"{event}.done", told | ({"logprobs": self._entries} if self._kind == "message" else {}))
            self._emit("response.content_part.done", {**self._place(), "part": part})
            done = {"status": status, **_told(self._kind, [part])}
        self._item = self._item | done
        self._emit("response.output_item.done", {"output_index": len(self.items), "item": self._item})
        self.items.append(self._item)
        self._kind, self._is_open = None, False
        self._pieces, self._entries = [], []

    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self.items)}

    def _place(self) -> dict[str, Any]:
        return {**self._item_place(), "content_index": 0}


def _told(kind: str, parts: list[Item]) -> Item:
    return {"role": "assistant", "content": parts} if kind == "message" else {"summary": [], "content": parts}


def _part(kind: str, text: str, entries: Entries) -> Item:
    part: Item = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": list(entries)} if kind == "output_text" else part


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False
