"""Kimi K3's tree: `<|open|>NAME ATTRIBUTES<|sep|>` and `<|close|>NAME<|sep|>` around everything a message has.

Its channels: `think` is reasoning, `response` is content, `tools` holds `call`s, and those their `argument`s. Text in
no channel is content too: the prompt may have opened one.
"""

import re
from typing import Final

from tiercel.text.parsers.arguments import TaggedArguments
from tiercel.text.parsers.interface import ToolSchemas
from tiercel.text.parsers.machine import Machine
from tiercel.text.parsers.markers import WAIT, Markers

TEXTS: Final = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
ANSWERS: Final = ("<|open|>response<|sep|>",)  # what stands before the answer, behind all reasoning
THOUGHTS: Final = (("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",))  # what opens and closes reasoning
_MARKS: Final = Markers(TEXTS)
_HEAD_ENDS: Final = Markers(["<|sep|>", "<|open|>", "<|close|>", "<|end_of_msg|>"])
_ATTRIBUTE: Final = re.compile(r'([\w-]+)="([^"]*)"')


class Tree(Machine):
    """One output's parser. Without `has_calls`, what stands in `tools` is content."""

    def __init__(self, schemas: ToolSchemas, *, is_open: bool, has_calls: bool) -> None:
        super().__init__()
        self._schemas = schemas
        self._has_calls = has_calls
        self._path = ["think"] if is_open else []
        self._arguments = TaggedArguments({})
        self._mark = ""

    def _content(self) -> bool:
        text, marker = self._before(_MARKS, drops_cut=self._is_in_call)
        self._put(text)
        if marker is None:
            return False
        if marker in ("<|open|>", "<|close|>"):
            self._mark = marker
            self._attempt.append(marker)
            return self._to(self._tag)
        if marker == "<|end_of_msg|>":
            self._leave_to(0)
        return True

    def _put(self, text: str) -> None:
        top = self._path[-1] if self._path else ""
        if top == "think":
            self._think(text)
        elif top == "argument" and self._is_in_call:
            self._say_arguments(self._arguments.push(text))
        elif not self._is_in_call:
            self._say(text)

    def _tag(self) -> bool:
        head = self._head(_HEAD_ENDS)
        if head == WAIT:
            return False
        if head is None and self._is_last:
            self._take(len(self._text) - self._pos)  # a tag that is cut says nothing
            self._attempt.clear()
            return True
        if head is None:
            self._give_up()
            return self._to(self._content)
        if head[1] == "<|sep|>":
            self._take(len(head[1]))
        self._attempt.clear()
        name, _, rest = head[0].strip().partition(" ")
        if self._mark == "<|open|>":
            self._enter(name, rest)
        elif name in self._path:
            self._leave_to(len(self._path) - 1 - self._path[::-1].index(name))
        return self._to(self._content)

    def _enter(self, name: str, rest: str) -> None:
        found = {key: _unescaped(value) for key, value in _ATTRIBUTE.findall(rest)}
        is_in_call = self._is_in_call
        if name == "call" and self._has_calls and found.get("tool") and not is_in_call:
            self._begin_call(found["tool"])
            self._arguments = TaggedArguments(self._schemas.properties(found["tool"]))
        elif name == "argument" and is_in_call and self._path[-1:] == ["call"]:
            kind = found.get("type")
            self._say_arguments(self._arguments.begin(found.get("key", ""), types=frozenset({kind}) if kind else None))
        elif is_in_call:
            return
        self._path.append(name)

    def _leave_to(self, depth: int) -> None:
        """Leave the elements above a depth."""
        while len(self._path) > depth:
            left = self._path.pop()
            if left == "argument" and self._is_in_call:
                self._say_arguments(self._arguments.end())
            elif left == "call" and self._is_in_call:
                self._say_arguments(self._arguments.close())
                self._end_call()


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")
