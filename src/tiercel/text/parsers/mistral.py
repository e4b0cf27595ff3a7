"""Mistral's calls: `[TOOL_CALLS]NAME[ARGS]{...}`, with `[CALL_ID]ID` before the arguments in some, and the older
`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`. A call's id has nine letters and digits.
"""

from typing import Final

from tiercel.text.parsers.interface import ToolSchemas
from tiercel.text.parsers.json_calls import JsonCalls
from tiercel.text.parsers.json_values import JsonValue
from tiercel.text.parsers.markers import WAIT, Markers

OPENERS: Final = Markers(["[TOOL_CALLS]"])
CLOSERS: Final = Markers([])
TEXTS: Final = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_NAME_ENDS: Final = Markers(["[ARGS]", "[CALL_ID]", "{"])
_ID_ENDS: Final = Markers(["[ARGS]", "{"])


class Mistral(JsonCalls):
    """One output's parser."""

    def __init__(self, schemas: ToolSchemas) -> None:
        super().__init__(OPENERS, CLOSERS, schemas)
        self._call_name = ""
        self._call_id: str | None = None

    def _block(self) -> bool:
        if not self._skip_blank():
            return False
        if self._is_list or self._text[self._pos] in "[{":
            return super()._block()
        return self._to(self._named)

    def _named(self) -> bool:
        """Read `NAME[ARGS]`, or a name and a brace."""
        head = self._head(_NAME_ENDS)
        if head == WAIT:
            return False
        if head is None or not head[0].strip():
            return self._fail()
        self._call_name, self._call_id = head[0].strip(), None
        if head[1] == "[CALL_ID]":
            self._take_attempt(len(head[1]))
            return self._to(self._identified)
        return self._to(self._before_arguments)

    def _identified(self) -> bool:
        head = self._head(_ID_ENDS)
        if head == WAIT:
            return False
        if head is None:
            return self._fail()
        self._call_id = head[0].strip() or None
        return self._to(self._before_arguments)

    def _before_arguments(self) -> bool:
        if self._text[self._pos] != "{":
            self._take_attempt(len("[ARGS]"))
        return self._to(self._first_brace)

    def _first_brace(self) -> bool:
        if not self._skip_blank():
            return False
        if self._text[self._pos] != "{":
            return self._fail()
        self._begin_call(self._call_name, self._call_id)
        self._value = JsonValue()
        return self._to(self._named_arguments)

    def _named_arguments(self) -> bool:
        text, end = self._value.feed(self._text, self._pos)
        self._take(end - self._pos)
        self._say_arguments(text)
        if not self._value.is_done:
            return False
        self._end_call()
        return self._to(self._content)
