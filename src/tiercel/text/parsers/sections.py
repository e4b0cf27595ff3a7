"""Calls between special tokens, a header and JSON arguments in each: DeepSeek V3 and V3.1, Kimi K2.

Texts between the tokens that belong to no call are content, but behind a Kimi section, where there is none.
"""

from dataclasses import dataclass
from functools import cached_property

from tiercel.text.parsers.json_values import JsonValue
from tiercel.text.parsers.machine import Machine, State
from tiercel.text.parsers.markers import WAIT, Markers


@dataclass(frozen=True)
class SectionTexts:
    """What stands around calls.

    fence            opens the arguments, on a line behind the name, which then ends with its line; "": none does
    ends_content     nothing behind a section is content
    """

    section_begin: str
    section_end: str
    call_begin: str
    call_end: str
    header_end: str
    fence: str = ""
    ends_content: bool = False

    @cached_property
    def all(self) -> tuple[str, ...]:
        """Every marker."""
        return (self.section_begin, self.section_end, self.call_begin, self.call_end, self.header_end)

    @cached_property
    def openers(self) -> Markers:
        """What begins a call, or a section of them, in the answer."""
        return Markers(self.all)

    @cached_property
    def inside(self) -> Markers:
        """What may come between two calls."""
        return Markers([self.call_begin, self.section_end, self.call_end, self.section_begin])

    @cached_property
    def header_ends(self) -> Markers:
        """What ends a header; all but the first mean that there are no arguments."""
        return Markers([self.header_end, self.call_end, self.section_end, self.call_begin])

    @cached_property
    def name_ends(self) -> Markers:
        """What ends a name that stands behind the header."""
        return Markers(["\n", self.call_end, self.section_end, self.call_begin])

    @cached_property
    def after_arguments(self) -> Markers:
        """What comes behind the arguments."""
        return Markers([*self.inside.texts, "```"])

    @cached_property
    def fences(self) -> Markers:
        """What may open the arguments."""
        return Markers([self.fence, "{"])


class SectionCalls(Machine):
    """One output's parser."""

    def __init__(self, texts: SectionTexts) -> None:
        super().__init__()
        self._texts = texts
        self._value = JsonValue()
        self._is_muted = False

    def _content(self) -> bool:
        text, marker = self._before(self._texts.openers)
        if not self._is_muted:
            self._say(text)
        if marker is None:
            return False
        if marker in (self._texts.call_begin, self._texts.section_begin):
            self._attempt.append(marker)
            return self._to(self._header_of_call if marker == self._texts.call_begin else self._between)
        return True  # a stray one says nothing

    def _between(self) -> bool:
        """Read what comes before and after a call of a section."""
        if not self._skip_blank():
            return False
        marker = self._next_is(self._texts.inside)
        if marker == WAIT:
            return False
        if marker is None:
            self._give_up()
            return self._to(self._content)
        self._take_attempt(len(marker))
        if marker == self._texts.call_begin:
            return self._to(self._header_of_call)
        if marker == self._texts.section_end:
            self._attempt.clear()
            self._is_muted = self._texts.ends_content and bool(self._n_calls)
            return self._to(self._content)
        return True

    def _header_of_call(self) -> bool:
        head = self._head(self._texts.header_ends)
        if head == WAIT:
            return False
        if head is None:
            self._give_up()
            return self._to(self._content)
        header = head[0].strip()
        if head[1] != self._texts.header_end:
            return self._begin_named(header, self._without_arguments)
        self._take_attempt(len(head[1]))
        if self._texts.fence:
            return self._to(self._name_line)
        return self._begin_named(header, self._first_of_arguments)

    def _name_line(self) -> bool:
        head = self._head(self._texts.name_ends)
        if head == WAIT:
            return False
        if head is None:
            self._give_up()
            return self._to(self._content)
        return self._begin_named(head[0].strip(), self._fence if head[1] == "\n" else self._without_arguments)

    def _begin_named(self, header: str, then: State) -> bool:
        name, call_id = self._named(header)
        if not name:
            self._give_up()
            return self._to(self._content)
        self._begin_call(name, call_id)
        return self._to(then)

    def _named(self, header: str) -> tuple[str, str | None]:
        """Give the name and the id that a header holds. Overridden where it holds more than the name."""
        return header, None

    def _fence(self) -> bool:
        if not self._skip_blank():
            return False
        marker = self._next_is(self._texts.fences)
        if marker == WAIT:
            return False
        if marker == self._texts.fence:
            self._take_attempt(len(marker))
        return self._to(self._first_of_arguments)

    def _first_of_arguments(self) -> bool:
        if not self._skip_blank():
            return False
        marker = self._next_is(self._texts.after_arguments)
        if marker == WAIT:
            return False
        if marker is not None:
            return self._without_arguments()
        self._value = JsonValue()
        return self._to(self._arguments)

    def _without_arguments(self) -> bool:
        self._say_arguments("{}")
        return self._to(self._after)

    def _arguments(self) -> bool:
        text, end = self._value.feed(self._text, self._pos)
        self._take(end - self._pos)
        self._say_arguments(text)
        return self._to(self._after) if self._value.is_done else False

    def _after(self) -> bool:
        """Read what comes behind the arguments; what should not be there goes with the call."""
        text, marker = self._before(self._texts.after_arguments)
        del text
        if marker is None:
            return False
        if marker == "```":
            return True
        self._end_call()
        self._pos -= len(marker)
        return self._to(self._between)
