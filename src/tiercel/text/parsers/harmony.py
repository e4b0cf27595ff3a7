"""gpt-oss's messages: `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`.

`analysis` is reasoning; `final`, and `commentary` for nobody, are content; a message `to=functions.NAME`, before or
behind the channel's name, is a call. The prompt ends with `<|start|>assistant`: a text begins inside of a header.
"""

import re
from typing import Final

from tiercel.text.parsers.interface import ToolSchemas
from tiercel.text.parsers.json_values import JsonValue
from tiercel.text.parsers.machine import Machine
from tiercel.text.parsers.markers import WAIT, Markers

TEXTS: Final = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
# What stands before the answer, behind all reasoning.
ANSWERS: Final = (
    "<|channel|>final<|message|>",
    "<|channel|>final <|constrain|>json<|message|>",
    "<|channel|>final<|constrain|>json<|message|>",
)
# What opens and what closes the channel of reasoning.
THOUGHTS: Final = (("<|channel|>analysis<|message|>",), ("<|end|>",))
_MARKS: Final = Markers(TEXTS)
_HEADER_FIRST: Final = Markers(["to=", *TEXTS])
_BODY_ENDS: Final = Markers(["<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"])
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")


class Harmony(Machine):
    """One output's parser. Without `has_calls`, a call's message is content."""

    def __init__(self, schemas: ToolSchemas, *, has_calls: bool) -> None:
        super().__init__()
        del schemas  # arguments are JSON already
        self._has_calls = has_calls
        self._header = ""
        self._channel = ""
        self._value = JsonValue()
        self._kind = ""
        self._has_arguments = False
        self._is_framed = False  # a mark of the header has been read
        self._state = self._beginning

    def _beginning(self) -> bool:
        """Tell a header from an answer that has none."""
        if not self._skip_blank():
            return False
        marker = self._next_is(_HEADER_FIRST)
        if marker == WAIT:
            return False
        if marker is None:
            self._give_up()
            return self._to(self._content)
        return self._to(self._in_header)

    def _content(self) -> bool:
        """Read text outside of any message: there should be none."""
        text, marker = self._before(_MARKS)
        self._say(text)
        if marker is None:
            return False
        self._pos -= len(marker)
        self._header = self._channel = ""
        return self._to(self._in_header)

    def _in_header(self) -> bool:
        head = self._head(_MARKS)
        if head == WAIT:
            return False
        if head is None and self._is_last and self._is_framed:
            self._take(len(self._text) - self._pos)  # a header that is cut says nothing
            self._attempt.clear()
            return True
        if head is None:
            self._give_up()
            return self._to(self._content)
        self._is_framed = True
        self._take_attempt(len(head[1]))
        if self._channel == "<|channel|>":
            self._channel = head[0].strip() or "final"
        self._header += f"{head[0]} "
        if head[1] == "<|channel|>":
            self._channel = head[1]
        elif head[1] == "<|message|>":
            return self._begin_body()
        elif head[1] != "<|constrain|>":
            self._attempt.clear()
            self._header = self._channel = ""
            if head[1] != "<|start|>":
                self._is_framed = False
                return self._to(self._beginning)
        return True

    def _begin_body(self) -> bool:
        recipient = _RECIPIENT.search(self._header)
        channel = self._channel.partition(" ")[0]
        self._header = self._channel = ""
        if recipient is not None and self._has_calls and recipient[1] not in ("assistant", "user"):
            self._begin_call(recipient[1].removeprefix("functions.") or recipient[1])
            self._value = JsonValue()
            self._has_arguments = False
            return self._to(self._call_first)
        self._attempt.clear()
        self._kind = channel if recipient is None else "final"
        return self._to(self._body)

    def _body(self) -> bool:
        text, marker = self._before(_BODY_ENDS)
        if self._kind == "analysis":
            self._think(text)
        else:
            self._say(text)
        if marker is None:
            return False
        self._pos -= len(marker)
        return self._to(self._in_header)

    def _call_first(self) -> bool:
        if not self._skip_blank():
            return False
        marker = self._next_is(_BODY_ENDS)
        if marker == WAIT:
            return False
        if marker is not None:
            self._say_arguments("{}")
        self._has_arguments = self._text[self._pos] == "{"
        return self._to(self._call_body)

    def _call_body(self) -> bool:
        text, marker = self._before(_BODY_ENDS, drops_cut=True)
        if not self._has_arguments:
            self._say_arguments(text)  # of a tool that takes no JSON
        elif not self._value.is_done:
            self._say_arguments(self._value.feed(text, 0)[0])
        if marker is None:
            return False
        self._end_call()
        self._pos -= len(marker)
        return self._to(self._in_header)
