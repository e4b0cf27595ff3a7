"""Calls of tags, each argument in its own: Qwen3-Coder, GLM, MiniMax, DeepSeek from V3.2 on.

JSON is made of the arguments as they come; a string passes on letter by letter. Missing closing tags are forgiven where
what comes next tells that a value, or a call, is over.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from tiercel.text.parsers.arguments import TaggedArguments
from tiercel.text.parsers.interface import ToolSchemas
from tiercel.text.parsers.machine import Machine
from tiercel.text.parsers.markers import WAIT, Markers

_ATTRIBUTE: Final = re.compile(r"""([\w-]+)=("[^"]*"|'[^']*'|[^\s"']+)""")


@dataclass(frozen=True)
class TagTexts:
    """The tags.

    wrapper, wrapper_end   around calls
    call, call_end         around one; "": it is the wrapper that is, and the name follows it
    key, key_end           around a parameter's name
    value, value_end       around its value; "" for `value`: it follows the name
    has_attributes         names are attributes: name="N"
    strips_lines           a line end behind the value's tag, and one before its end, are the format's
    is_bare                a call may come without the wrapper
    """

    wrapper: str
    wrapper_end: str
    call: str
    call_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    has_attributes: bool = False
    strips_lines: bool = False
    is_bare: bool = False
    other_wrappers: tuple[str, ...] = ()

    @cached_property
    def wrappers(self) -> tuple[str, ...]:
        """What opens a wrapper."""
        return (self.wrapper, *self.other_wrappers)

    @cached_property
    def wrapper_ends(self) -> tuple[str, ...]:
        """What closes a wrapper."""
        return (self.wrapper_end, *(f"</{text[1:]}" for text in self.other_wrappers))

    @cached_property
    def openers(self) -> Markers:
        """What begins calls in the answer."""
        return Markers([*self.wrappers, self.call if self.is_bare else ""])

    @cached_property
    def in_wrapper(self) -> Markers:
        """What may come between calls."""
        return Markers([*self.wrappers, self.call, *self.wrapper_ends])

    @cached_property
    def in_call(self) -> Markers:
        """What may come between parameters."""
        return Markers([self.key, self.call_end, *self.wrapper_ends, self.call])

    @cached_property
    def name_ends(self) -> Markers:
        """What ends a call's name."""
        return Markers([">"] if self.call else ["\n", self.key, *self.wrapper_ends])

    @cached_property
    def key_ends(self) -> Markers:
        """What ends a parameter's name."""
        return Markers([self.key_end])

    @cached_property
    def values(self) -> Markers:
        """What begins a value."""
        return Markers([self.value])

    @cached_property
    def value_ends(self) -> Markers:
        """What ends a value: its tag, or on a line of its own the next one's or the call's."""
        others = (self.key, self.call_end, *self.wrapper_ends)
        return Markers([self.value_end, *(f"\n{text}" for text in others if text)])


class TaggedCalls(Machine):
    """One output's parser."""

    def __init__(self, texts: TagTexts, schemas: ToolSchemas) -> None:
        super().__init__()
        self._texts = texts
        self._schemas = schemas
        self._arguments = TaggedArguments({})
        self._line_end = ""  # one that ends the value so far

    def _content(self) -> bool:
        text, marker = self._before(self._texts.openers)
        self._say(text)
        if marker is None:
            return False
        self._attempt.append(marker)
        is_call = marker == self._texts.call or not self._texts.call
        return self._to(self._name if is_call else self._in_wrapper)

    def _in_wrapper(self) -> bool:
        if not self._skip_blank():
            return False
        marker = self._next_is(self._texts.in_wrapper)
        if marker == WAIT:
            return False
        if marker is None:
            self._give_up()
            return self._to(self._content)
        self._take_attempt(len(marker))
        if marker in self._texts.wrapper_ends:
            self._settle()
            return self._to(self._content)
        return self._to(self._name) if marker == self._texts.call or not self._texts.call else True

    def _settle(self) -> None:
        """Forget a wrapper's end; without a call in it, it is content."""
        if self._n_calls:
            self._attempt.clear()
        else:
            self._give_up()

    def _name(self) -> bool:
        head = self._head(self._texts.name_ends)
        if head == WAIT:
            return False
        name = self._read_name(head[0]) if head is not None else ""
        if head is None or not name or "<" in name:
            self._give_up()
            return self._to(self._content)
        if head[1] in (">", "\n"):
            self._take_attempt(1)
        self._begin_call(name)
        self._arguments = self._new_arguments(name)
        return self._to(self._in_call)

    def _new_arguments(self, name: str) -> TaggedArguments:
        return TaggedArguments(self._schemas.properties(name))

    def _read_name(self, head: str) -> str:
        return attributes(head).get("name", "") if self._texts.has_attributes else head.strip().strip("\"'")

    def _in_call(self) -> bool:
        """Read what comes between parameters."""
        if not self._skip_blank():
            return False
        marker = self._next_is(self._texts.in_call)
        if marker == WAIT:
            return False
        if marker == self._texts.key:
            self._take(len(marker))
            return self._to(self._key)
        if marker is not None and marker == self._texts.call_end:
            self._take(len(marker))
            return self._close_call()
        if marker is not None:
            return self._close_call()
        self._take(1)  # what stands between parameters and is none has no place in the call
        return True

    def _key(self) -> bool:
        head = self._head(self._texts.key_ends)
        if head == WAIT:
            return False
        if head is None:
            return self._close_call()
        self._take(len(head[1]))
        self._begin_value(head[0])
        return self._to(self._value_tag if self._texts.value else self._value_start)

    def _begin_value(self, head: str) -> None:
        if self._texts.has_attributes:
            found = attributes(head)
            is_string = found.get("string")
            types = None if is_string is None else frozenset({"string" if is_string == "true" else "unknown"})
            self._say_arguments(self._arguments.begin(found.get("name", ""), types=types))
        else:
            self._say_arguments(self._arguments.begin(head.strip().strip("\"'")))

    def _value_tag(self) -> bool:
        if not self._skip_blank():
            return False
        marker = self._next_is(self._texts.values)
        if marker == WAIT:
            return False
        if marker is not None:
            self._take(len(marker))
        return self._to(self._value_start)

    def _value_start(self) -> bool:
        self._line_end = ""
        if self._texts.strips_lines and self._text[self._pos] == "\n":
            # A line end may also belong to what ends an empty value.
            marker = self._next_is(self._texts.value_ends)
            if marker == WAIT:
                return False
            if marker is None:
                self._take(1)
        return self._to(self._value)

    def _value(self) -> bool:
        text, marker = self._before(self._texts.value_ends, drops_cut=True)
        self._push(text)
        if marker is None:
            return False
        self._say_arguments(self._arguments.end())
        if marker != self._texts.value_end:
            self._pos -= len(marker)
        return self._to(self._in_call)

    def _push(self, text: str) -> None:
        if not text:
            return
        text = self._line_end + text
        self._line_end = ""
        if self._texts.strips_lines and text.endswith("\n"):
            text, self._line_end = text[:-1], "\n"
        self._say_arguments(self._arguments.push(text))

    def _close_call(self) -> bool:
        self._say_arguments(self._arguments.close())
        self._end_call()
        self._attempt.clear()
        return self._to(self._in_wrapper)

    def _at_end(self) -> None:
        if self._is_in_call and self._state == self._in_call:
            self._close_call()
        if self._state == self._in_wrapper and self._n_calls:
            self._attempt.clear()


def attributes(text: str) -> Mapping[str, str]:
    """Read a tag's attributes, quoted in either way or not at all."""
    return {found[1]: found[2].strip("\"'") for found in _ATTRIBUTE.finditer(text)}
