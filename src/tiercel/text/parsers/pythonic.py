"""Calls as Python's: `[f(a=1, b="x"), g()]`, alone or between marks, or one a line between marks (OLMo 3).

Nothing is run: a value's end is found by its brackets and quotes, and it is read as a literal. What is no literal is a
string of its text. Each argument passes on when it is complete.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from tiercel.text.parsers.arguments import TaggedArguments
from tiercel.text.parsers.json_values import read_literal, to_json
from tiercel.text.parsers.machine import NAME_CHARS_MAX, Machine, State
from tiercel.text.parsers.markers import WAIT, Markers

_WORD: Final = re.compile(r"[A-Za-z_][\w.\-]*")
_OUTSIDE: Final = re.compile(r"[\"'()\[\]{},]")
_QUOTES: Final = ("'''", '"""')
_IN_STRING: Final = {quote: re.compile(rf"[{quote}\\\n\r]") for quote in "'\""}


@dataclass(frozen=True)
class PythonicTexts:
    """The marks around calls. `is_bare`: a text may begin with them, without a mark."""

    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    is_bare: bool = False

    @cached_property
    def openers(self) -> Markers:
        """What begins calls."""
        return Markers(self.begins)

    @cached_property
    def closers(self) -> Markers:
        """What ends them."""
        return Markers(self.ends)


PLAIN: Final = PythonicTexts(("<|python_start|>",), ("<|python_end|>",), is_bare=True)
LFM2: Final = PythonicTexts(("<|tool_call_start|>",), ("<|tool_call_end|>",))
OLMO3: Final = PythonicTexts(("<function_calls>",), ("</function_calls>",))


class Pythonic(Machine):
    """One output's parser."""

    def __init__(self, texts: PythonicTexts) -> None:
        super().__init__()
        self._texts = texts
        self._arguments = TaggedArguments({})
        self._name = ""
        self._key = ""
        self._is_list = False
        self._parts: list[str] = []
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        if texts.is_bare:
            self._state = self._bare

    def _bare(self) -> bool:
        """Read the beginning of the text: calls may stand there without a mark."""
        if not self._skip_blank():
            return False
        if self._text[self._pos] == "[":
            return self._to(self._list)
        self._give_up()
        return self._to(self._content)

    def _content(self) -> bool:
        text, marker = self._before(self._texts.openers)
        self._say(text)
        if marker is None:
            return False
        self._attempt.append(marker)
        return self._to(self._list)

    def _list(self) -> bool:
        if not self._skip_blank():
            return False
        self._is_list = self._text[self._pos] == "["
        if self._is_list:
            self._take_attempt(1)
        return self._to(self._call)

    def _call(self) -> bool:
        """Read a name and an opening bracket."""
        if not self._skip_blank():
            return False
        word = self._word()
        if word is None:
            return False
        if not word or self._text[self._pos + len(word)] != "(":
            return self._fail()
        self._name = word
        self._take_attempt(len(word) + 1)
        return self._to(self._first_key)

    def _word(self) -> str | None:
        """Give the word that comes next, "" when none does, None when it may go on."""
        found = _WORD.match(self._text, self._pos)
        if found is None or len(found.group()) > NAME_CHARS_MAX:
            return ""
        if found.end() == len(self._text):
            return "" if self._is_last else None
        return found.group()

    def _first_key(self) -> bool:
        if not self._skip_blank():
            return False
        if self._text[self._pos] == ")":
            return self._begun(self._key_or_end)
        return self._keyword(is_first=True)

    def _begun(self, then: State) -> bool:
        self._begin_call(self._name)
        self._arguments = TaggedArguments({})
        return self._to(then)

    def _key_or_end(self) -> bool:
        """Read what comes behind a value."""
        if not self._skip_blank():
            return False
        letter = self._text[self._pos]
        if letter == ")":
            self._take(1)
            self._say_arguments(self._arguments.close())
            self._end_call()
            return self._to(self._between)
        if letter == ",":
            self._take(1)
            return True
        return self._keyword(is_first=False)

    def _keyword(self, *, is_first: bool) -> bool:
        word = self._word()
        if word is None:
            return False
        if not word:
            return self._fail()
        # Blanks may stand before the sign: both are looked at together, so that a failure leaves both as they were.
        end = self._pos + len(word)
        while end < len(self._text) and self._text[end] == " " and end - self._pos <= 2 * NAME_CHARS_MAX:
            end += 1
        if end == len(self._text) and not self._is_last:
            return False
        if self._text[end : end + 1] != "=":
            return self._fail()
        if is_first:
            self._begun(self._value)
        self._key = word
        self._take(end + 1 - self._pos)
        self._parts, self._depth, self._quote = [], 0, ""
        return self._to(self._value)

    def _value(self) -> bool:
        """Read a value up to the comma or bracket behind it."""
        if self._quote:
            return self._in_string()
        found = _OUTSIDE.search(self._text, self._pos)
        if found is None:
            self._parts.append(self._take(len(self._text) - self._pos))
            return False
        self._parts.append(self._take(found.start() - self._pos))
        letter = found.group()
        if letter in "\"'":
            return self._open_quote(letter)
        if self._depth == 0 and letter in ",)]}":
            self._say_arguments(self._arguments.set(self._key, _value_of("".join(self._parts))))
            return self._to(self._key_or_end) if letter in ",)" else self._fail()
        self._depth += letter in "([{"
        self._depth -= letter in ")]}"
        self._parts.append(self._take(1))
        return True

    def _open_quote(self, letter: str) -> bool:
        ahead = self._text[self._pos : self._pos + 3]
        if ahead == letter * len(ahead) and len(ahead) < 3 and not self._is_last:
            return False
        self._quote = ahead if ahead in _QUOTES else letter
        self._parts.append(self._take(len(self._quote)))
        return True

    def _in_string(self) -> bool:
        if self._is_escaped:
            self._is_escaped = False
            self._parts.append("\\" + self._take(1))
            return True
        found = _IN_STRING[self._quote[0]].search(self._text, self._pos)
        if found is None:
            self._parts.append(self._take(len(self._text) - self._pos))
            return False
        self._parts.append(self._take(found.start() - self._pos))
        letter = found.group()
        if letter == self._quote[0]:
            return self._close_quote()
        self._take(1)
        if letter == "\\":
            self._is_escaped = True
        else:
            self._parts.append("\\n" if letter == "\n" else "\\r")
        return True

    def _close_quote(self) -> bool:
        n = len(self._quote)
        ahead = self._text[self._pos : self._pos + n]
        if len(ahead) < n and ahead == self._quote[: len(ahead)] and not self._is_last:
            return False
        self._parts.append(self._take(n if ahead == self._quote else 1))
        if ahead == self._quote:
            self._quote = ""
        return True

    def _between(self) -> bool:
        """Read what comes behind a call."""
        if not self._skip_blank():
            return False
        marker = self._next_is(self._texts.closers)
        if marker == WAIT:
            return False
        if marker is not None:
            self._take(len(marker))
            return self._settled()
        letter = self._text[self._pos]
        if letter == "]" and self._is_list:
            self._take(1)
            return self._to(self._behind)
        if letter == ",":
            self._take_attempt(1)
            return self._to(self._call)
        return self._to(self._call) if not self._is_list and self._texts.begins else self._fail()

    def _behind(self) -> bool:
        """Read what comes behind a list: its closing mark, if it has one."""
        if not self._skip_blank():
            return False
        marker = self._next_is(self._texts.closers)
        if marker == WAIT:
            return False
        if marker is None:
            return self._fail()
        self._take(len(marker))
        return self._settled()

    def _settled(self) -> bool:
        self._attempt.clear()
        return self._to(self._content)

    def _fail(self) -> bool:
        self._end_call()
        self._give_up()
        return self._to(self._content)

    def _at_end(self) -> None:
        if self._state in (self._between, self._behind):
            self._attempt.clear()


def _value_of(text: str) -> object:
    """Read a value; what is none is its text."""
    bare = text.strip()
    try:
        value = read_literal(bare)
        to_json(value)
    except ValueError:
        return bare
    return value
