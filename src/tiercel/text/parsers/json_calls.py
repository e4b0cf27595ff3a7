"""Calls written as JSON objects, `{"name": ..., "arguments": {...}}`, one or several, in a list or not.

The arguments pass on as they come, as the model wrote them. What begins like a call and is none is content, whole.
Base of `hermes`, `llama_json`, `granite` and the older `mistral`.
"""

from collections.abc import Callable
from typing import Final

from tiercel.text.parsers.interface import ToolSchemas
from tiercel.text.parsers.json_values import JsonValue, read_json
from tiercel.text.parsers.machine import NAME_CHARS_MAX, Machine
from tiercel.text.parsers.markers import WAIT, Markers

_NAMES: Final = frozenset({"name", "tool_name", "function"})
_ARGUMENTS: Final = frozenset({"arguments", "parameters", "args"})
_OTHERS: Final = frozenset({"type", "id", "index", "description", "tool_call_id"})
_KEYS: Final = _NAMES | _ARGUMENTS | _OTHERS
_SEPARATORS: Final = Markers([",", ";"])
_TAIL_CHARS: Final = frozenset("}];,")


class JsonCalls(Machine):
    """Calls as JSON, in a block between markers; `is_bare` lets one begin at a brace in the text, too.

    A bare object is a call only if it has both a name and arguments, or names a tool of the request.
    """

    def __init__(self, openers: Markers, closers: Markers, schemas: ToolSchemas, *, is_bare: bool = False) -> None:
        super().__init__()
        self._openers = openers
        self._closers = closers
        self._schemas = schemas
        self._starts = Markers([*openers.texts, "{"]) if is_bare else openers
        self._is_marked = False
        self._is_list = False
        self._reset()

    def _reset(self) -> None:
        self._name = ""
        self._early = ""  # arguments that came before the name
        self._has_arguments = False
        self._is_wrapped = False  # the object is the value of "function" in another
        self._key_name = ""
        self._value = JsonValue()
        self._parts: list[str] = []
        self._then: Callable[[str], bool] = self._take_key

    def _content(self) -> bool:
        text, marker = self._before(self._starts)
        self._say(text)
        if marker is None:
            return False
        self._attempt.append(marker)
        self._is_marked = marker != "{"
        self._is_list = False
        if self._is_marked:
            return self._to(self._block)
        self._reset()
        return self._to(self._key)

    def _block(self) -> bool:
        """Read what comes after the opening marker, or after a call in a list: the next object."""
        if not self._skip_blank():
            return False
        letter = self._text[self._pos]
        if letter == "[" and not self._is_list:
            self._is_list = True
            self._take_attempt(1)
            return True
        if letter == "{":
            self._take_attempt(1)
            self._reset()
            return self._to(self._key)
        if letter == "]" and self._is_list and not self._n_calls:
            return self._fail()
        if letter == "]" and self._is_list:
            self._take(1)
            return self._to(self._tail)
        return self._fail()

    def _key(self) -> bool:
        if not self._skip_blank():
            return False
        letter = self._text[self._pos]
        if letter == '"':
            return self._collect(self._take_key)
        if letter == "}":
            self._take_attempt(1)
            return self._close_object()
        if letter == ",":
            self._take_attempt(1)
            return True
        return self._fail()

    def _collect(self, then: Callable[[str], bool]) -> bool:
        """Read a value whole, for `then`."""
        self._value = JsonValue()
        self._parts = []
        self._then = then
        return self._to(self._collecting)

    def _collecting(self) -> bool:
        start = self._pos
        text, end = self._value.feed(self._text, start)
        self._take_attempt(end - start)
        self._parts.append(text)
        return self._then("".join(self._parts)) if self._value.is_done else False

    def _take_key(self, text: str) -> bool:
        try:
            self._key_name = str(read_json(text))
        except ValueError:
            return self._fail()
        if self._is_marked or self._is_in_call or self._key_name in _KEYS:
            return self._to(self._colon)
        self._fail()
        # What is inside of an object that is no call is none either.
        self._value = JsonValue(depth=2 if self._is_wrapped else 1)
        return self._to(self._other_object)

    def _other_object(self) -> bool:
        _, end = self._value.feed(self._text, self._pos)
        self._say(self._take(end - self._pos))
        return self._to(self._content) if self._value.is_done else False

    def _colon(self) -> bool:
        if not self._skip_blank():
            return False
        if self._text[self._pos] != ":":
            return self._fail()
        self._take_attempt(1)
        return self._to(self._value_start)

    def _value_start(self) -> bool:
        if not self._skip_blank():
            return False
        letter = self._text[self._pos]
        if self._key_name in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            if letter in "{[" and self._name:
                self._begin_call(self._name)
                self._value = JsonValue()
                return self._to(self._arguments)
            return self._collect(self._take_arguments)
        if self._key_name == "function" and letter == "{" and not self._is_wrapped:
            self._is_wrapped = True
            self._take_attempt(1)
            return self._to(self._key)
        if self._key_name in _NAMES and not self._name:
            return self._collect(self._take_name) if letter == '"' else self._fail()
        return self._collect(lambda text: self._to(self._key))

    def _take_name(self, text: str) -> bool:
        try:
            name = read_json(text)
        except ValueError:
            return self._fail()
        if not name or len(name) > NAME_CHARS_MAX:
            return self._fail()
        self._name = name
        if self._has_arguments:
            self._begin_call(name)
            self._say_arguments(self._early)
        return self._to(self._key)

    def _take_arguments(self, text: str) -> bool:
        text = _unpacked(text)
        if not self._name:
            self._early = text
        else:
            self._begin_call(self._name)
            self._say_arguments(text)
        return self._to(self._key)

    def _arguments(self) -> bool:
        start = self._pos
        text, end = self._value.feed(self._text, start)
        self._take(end - start)
        self._say_arguments(text)
        return self._to(self._key) if self._value.is_done else False

    def _close_object(self) -> bool:
        if self._is_wrapped:
            self._is_wrapped = False
            return True
        if not self._is_in_call:
            if not self._name or not (self._is_marked or self._schemas.knows(self._name)):
                return self._fail()
            self._begin_call(self._name)
            self._say_arguments("{}")
        self._end_call()
        return self._to(self._between)

    def _fail(self) -> bool:
        """Go on without a call: what was begun ends, what was not is content."""
        was_in_call = self._is_in_call
        self._end_call()
        self._give_up()
        return self._to(self._tail if self._is_marked and was_in_call else self._content)

    def _between(self) -> bool:
        """Read what comes between calls."""
        if not self._skip_blank():
            return False
        if self._is_list:
            if self._text[self._pos] == ",":
                self._take_attempt(1)
                return True
            return self._to(self._block if self._text[self._pos] in "{]" else self._tail)
        if self._next_is(_SEPARATORS) is not None:
            self._take_attempt(1)
            return True
        if self._text[self._pos] == "{":
            return self._to(self._block)
        return self._to(self._tail)

    def _tail(self) -> bool:
        """Read what ends a block: its marker, or what models put there by mistake."""
        if not self._skip_blank():
            return False
        marker = self._next_is(self._closers)
        if marker == WAIT:
            return False
        if marker is not None:
            self._take(len(marker))
            self._attempt.clear()
            return self._to(self._content)
        if self._is_marked and self._text[self._pos] in _TAIL_CHARS:
            self._take(1)
            return True
        return self._give_up() and self._to(self._content)

    def _at_end(self) -> None:
        if self._state in (self._between, self._tail):
            self._attempt.clear()


def _unpacked(text: str) -> str:
    """Give arguments that are JSON inside of a string as that JSON, and none as an empty object."""
    if text == "null":
        return "{}"
    if not text.startswith('"'):
        return text
    try:
        inner: str = read_json(text)
        if isinstance(read_json(inner), dict) and inner.encode():
            return inner
    except ValueError:
        pass
    return text
