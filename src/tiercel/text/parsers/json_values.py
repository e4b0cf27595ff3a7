"""One JSON value in a stream: where it ends, and its text, mended where models go wrong.

Mended are, each so that what was given before stays right: line ends and other control characters inside strings, a
backslash before what JSON has no escape for, a comma before a closing bracket. All else passes as the model wrote it.
"""

import ast
import json
import math
import re
from typing import Any, Final

LITERAL_CHARS_MAX: Final = 64 << 10  # of a value that Python's own reader is tried on
_IN_STRING: Final = re.compile(r'["\\\x00-\x1f]')
_OUTSIDE: Final = re.compile(r'["{}\[\],]')
_SCALAR_END: Final = re.compile(r"[\s,;}\]<\"'{\[(]")
_BLANK: Final = re.compile(r"\s*")
_OPENING: Final = frozenset("{[")
_CLOSING: Final = frozenset("}]")
_ESCAPES: Final = frozenset('"\\/bfnrtu')


class JsonValue:
    """Follows one value through text. States: before it, in it, then done. With `depth`, inside so many brackets."""

    def __init__(self, depth: int = 0) -> None:
        self.is_done = False
        # The first character of an object, a list or a string, "0" for numbers and words, "" before it.
        self.kind = "{" if depth else ""
        self._depth = depth
        self._is_in_string = False
        self._is_escaped = False
        self._held = ""  # a comma, and blanks after it

    def feed(self, text: str, start: int) -> tuple[str, int]:
        """Take text from `start` on. Returns: the value's next text, and where what was taken ends.

        Requires: at the value's beginning, the text there is not blank.
        """
        out: list[str] = []
        pos = start
        if not self.kind and pos < len(text):
            first = text[pos]
            self.kind = first if first in '{["' else "0"
        while pos < len(text) and not self.is_done:
            if self.kind == "0":
                pos = self._scalar(text, pos, out)
            elif self._is_in_string:
                pos = self._string(text, pos, out)
            else:
                pos = self._outside(text, pos, out)
        return "".join(out), pos

    def finish(self) -> None:
        """End the text: a number or word ends with it."""
        if self.kind == "0":
            self.is_done = True

    def _scalar(self, text: str, pos: int, out: list[str]) -> int:
        found = _SCALAR_END.search(text, pos)
        end = found.start() if found else len(text)
        out.append(text[pos:end])
        self.is_done = found is not None
        return end

    def _string(self, text: str, pos: int, out: list[str]) -> int:
        if self._is_escaped:
            self._is_escaped = False
            if text[pos] in _ESCAPES:
                out.append("\\" + text[pos])
                return pos + 1
            out.append("\\\\")
        found = _IN_STRING.search(text, pos)
        if found is None:
            out.append(text[pos:])
            return len(text)
        out.append(text[pos : found.start()])
        letter = found.group()
        if letter == "\\":
            self._is_escaped = True
        elif letter == '"':
            out.append(letter)
            self._is_in_string = False
            self.is_done = self._depth == 0
        else:
            out.append(json.dumps(letter)[1:-1])
        return found.end()

    def _outside(self, text: str, pos: int, out: list[str]) -> int:
        if self._held:
            blank = _BLANK.match(text, pos)
            assert blank is not None, "json_values: a pattern that matches everything did not"
            self._held += blank.group()
            pos = blank.end()
            if pos == len(text):
                return pos
            out.append(self._held[1:] if text[pos] in _CLOSING else self._held)
            self._held = ""
        found = _OUTSIDE.search(text, pos)
        if found is None:
            out.append(text[pos:])
            return len(text)
        out.append(text[pos : found.start()])
        letter = found.group()
        if letter == ",":
            self._held = letter
            return found.end()
        out.append(letter)
        if letter == '"':
            self._is_in_string = True
        else:
            self._depth += 1 if letter in _OPENING else -1
            self.is_done = self._depth == 0
        return found.end()


def to_json(value: Any) -> str:
    """Write a value as JSON, as the model would: letters as they are.

    Raises: ValueError: it is no value of JSON's, as an infinity is not.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return text if _is_storable(text) else json.dumps(value, allow_nan=False)


def string_piece(text: str) -> str:
    """Write a piece of a string, without its quotes: pieces can be put together."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_json(text: str) -> Any:
    """Read JSON.

    Raises: ValueError: it is not JSON, or nested or long beyond what is read.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_literal(text: str) -> Any:
    """Read JSON, or what Python would write for it: its quotes, `True`, `None`, trailing commas.

    Raises: ValueError: it is neither, or not a value that JSON has.
    """
    try:
        return read_json(text)
    except ValueError:
        if len(text) > LITERAL_CHARS_MAX:
            raise
    try:
        value = ast.literal_eval(text)
        to_json(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"it is no literal: {type(error).__name__}") from None
    return value


def is_finite(value: float) -> bool:
    """Whether JSON can hold a number."""
    return math.isfinite(value)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
