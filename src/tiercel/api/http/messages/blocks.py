"""A chat's deltas as content blocks, whole and as events: one block is open at a time, in the order of the text.

States: no block open -> one open -> ... -> ended (`finish`). Whitespace is held back until more text comes, so that
none stands alone between thinking and calls; an answer without anything else is one block of text, maybe empty.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = dict[str, Any]


class Blocks:
    """The blocks of one message. Owned by its answer."""

    def __init__(self) -> None:
        self._open: dict[str, Any] | None = None  # the last block of `_content`; its text comes in `_pieces`
        self._pieces: list[str] = []
        self._held = ""
        self._content: list[dict[str, Any]] = []

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called."""
        return any(block["type"] == "tool_use" for block in self._content)

    def push(self, deltas: Iterable[Mapping[str, Any]]) -> list[Event]:
        """Take a chat's next deltas; give the events they make."""
        events: list[Event] = []
        for delta in deltas:
            for call in delta.get("tool_calls", ()):
                self._call(call, events)
            if delta.get("reasoning"):
                self._text("thinking", delta["reasoning"], events)
            if delta.get("content"):
                self._text("text", delta["content"], events)
        return events

    def finish(self) -> list[Event]:
        """End the last block; give the events."""
        events: list[Event] = []
        if not self._content:
            self._begin({"type": "text", "text": ""}, events)
            if self._held:
                self._add("text", self._held, events)
        self._end(events)
        return events

    def content(self) -> list[dict[str, Any]]:
        """Give all blocks. Requires: `finish` was called.

        A call that its end cut short is no call a client could make: what there is of it is text.
        """
        return [_whole_call(block) if block["type"] == "tool_use" else block for block in self._content]

    def _text(self, kind: str, text: str, events: list[Event]) -> None:
        if self._open is None or self._open["type"] != kind:
            if kind == "text":
                text = self._held + text
                self._held = ""
                if not text.strip():
                    self._held = text
                    return
            self._begin({"type": kind, kind: ""}, events)
        self._add(kind, text, events)

    def _call(self, call: Mapping[str, Any], events: list[Event]) -> None:
        function = call["function"]
        if "id" in call:
            self._begin({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}, events)
        if function["arguments"]:
            self._add("input_json", function["arguments"], events)

    def _begin(self, block: dict[str, Any], events: list[Event]) -> None:
        self._end(events)
        self._open = block
        self._content.append(block)
        if block["type"] != "text":
            self._held = ""
        shown = {**block, "signature": ""} if block["type"] == "thinking" else dict(block)
        events.append({"type": "content_block_start", "index": self._index, "content_block": shown})

    def _add(self, kind: str, text: str, events: list[Event]) -> None:
        self._pieces.append(text)
        field = "partial_json" if kind == "input_json" else kind
        events.append(self._delta({"type": f"{kind}_delta", field: text}))

    def _end(self, events: list[Event]) -> None:
        block = self._open
        if block is None:
            return
        text = "".join(self._pieces)
        if block["type"] == "tool_use":
            block["input"] = text
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            # Clients hand back only thinking that is signed; nobody here checks it.
            block["signature"] = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()
            events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
        events.append({"type": "content_block_stop", "index": self._index})
        self._open = None
        self._pieces = []

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self._content) - 1


def stop_of(
    reason: str | None, stop_reason: int | str | None, stops: Sequence[str], *, has_calls: bool
) -> tuple[str, str | None]:
    """Give Anthropic's reason for an end, and the sequence that stopped it."""
    if reason == "length":
        return "max_tokens", None
    if isinstance(stop_reason, str) and stop_reason in stops:
        return "stop_sequence", stop_reason
    return ("tool_use" if has_calls else "end_turn"), None


def _whole_call(block: dict[str, Any]) -> dict[str, Any]:
    text = block["input"]
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        return {**block, "input": arguments}
    return {"type": "text", "text": f"{block['name']}{text}"}
