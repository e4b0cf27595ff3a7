"""The state machine under every parser: its buffer, what it holds back, and what it says.

A family's parser is a subclass whose states are methods. A state looks at the text from `_pos` on, takes some of it
(`_take`) or goes to another state, and returns True; it returns False when only more text can tell. Whether it does may
depend on the text alone, never on where a piece ended: so any cut of the stream gives the same events.

Invariants:
1. Text taken = what was said + markers + `_attempt` (what may be a call and is content if it turns out to be none).
2. What stays in the buffer between pieces is shorter than a marker or a name: time is linear in the text.
3. Blanks around calls are the format's: those before the first word and behind the last are dropped once there was a
   call. Without a call the content is the text, letter by letter.
"""

import re
from collections.abc import Callable
from typing import Final

from tiercel.text.parsers.interface import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from tiercel.text.parsers.markers import WAIT, Markers

NAME_CHARS_MAX: Final = 256  # of a tool's or parameter's name, and of what else stands in a marker
_NOT_BLANK: Final = re.compile(r"\S")

State = Callable[[], bool]


class Machine:
    """What the families' parsers share."""

    def __init__(self) -> None:
        self._text = ""
        self._pos = 0
        self._is_last = False
        self._state: State = self._content
        self._events: list[Event] = []
        self._attempt: list[str] = []
        self._blank = ""
        self._has_content = False
        self._thought_blank = ""
        self._has_thought = False
        self._n_calls = 0
        self._is_in_call = False

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of text; give what it makes sure of."""
        self._text = self._text[self._pos :] + text
        self._pos = 0
        self._run_states()
        return self._told()

    def finish(self) -> list[Event]:
        """End the text; give what was held back."""
        self._is_last = True
        self._run_states()
        self._at_end()
        self._end_call()
        self._give_up()
        if self._blank and not self._n_calls:
            self._events.append(Content(self._blank))
        self._blank = ""
        return self._told()

    def _content(self) -> bool:
        """Read the answer up to a call."""
        raise NotImplementedError

    def _at_end(self) -> None:
        """Say what the end of the text makes sure of."""

    def _run_states(self) -> None:
        while self._pos < len(self._text) and self._state():
            pass

    def _told(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _take(self, n: int) -> str:
        taken = self._text[self._pos : self._pos + n]
        self._pos += n
        return taken

    def _take_attempt(self, n: int) -> str:
        """Take text that is content if no call comes of it."""
        taken = self._take(n)
        self._attempt.append(taken)
        return taken

    def _skip_blank(self) -> bool:
        """Take blanks of the format; return whether something else follows."""
        found = _NOT_BLANK.search(self._text, self._pos)
        end = found.start() if found else len(self._text)
        if end > self._pos:
            self._take_attempt(end - self._pos)
        return found is not None

    def _before(self, markers: Markers, *, drops_cut: bool = False) -> tuple[str, str | None]:
        """Take text up to the first of `markers`, and that marker itself if it is there.

        A marker that the end of the text cuts is text, or with `drops_cut` nothing.
        """
        end, marker = markers.find(self._text, self._pos, is_last=self._is_last and not drops_cut)
        before = self._take(end - self._pos)
        if marker is not None:
            self._pos += len(marker)
        elif self._is_last:
            self._pos = len(self._text)
        return before, marker

    def _next_is(self, markers: Markers) -> str | None:
        """Give the marker that comes next, `WAIT` when that cannot be told, None when it is other text.

        Inside of a call, a marker that the end of the text cuts is dropped.
        """
        marker = markers.at(self._text, self._pos, is_last=self._is_last and not self._is_in_call)
        if marker == WAIT and self._is_last:
            self._pos = len(self._text)
        return marker

    def _head(self, ends: Markers) -> tuple[str, str] | str | None:
        """Take a name up to one of `ends`, which stays: give both, `WAIT`, or None when the name is too long."""
        found = ends.find_near(self._text, self._pos, NAME_CHARS_MAX, is_last=self._is_last)
        if found is None:
            return None
        end, marker = found
        if marker is None:
            return None if self._is_last else WAIT
        return self._take_attempt(end - self._pos), marker

    def _say(self, text: str) -> None:
        """Give content. Blanks wait for what follows them."""
        if not text:
            return
        word_end = len(text.rstrip())
        if word_end == 0:
            self._blank += text
            return
        before = self._blank if self._has_content or not self._n_calls else ""
        said = before + text[:word_end]
        self._events.append(Content(said if before or not self._n_calls or self._has_content else said.lstrip()))
        self._has_content = True
        self._blank = text[word_end:]

    def _think(self, text: str) -> None:
        """Give reasoning. Blanks before its first word and behind its last are the format's."""
        word_end = len(text.rstrip())
        if word_end == 0:
            self._thought_blank += text
            return
        said = self._thought_blank + text[:word_end]
        self._events.append(Reasoning(said if self._has_thought else said.lstrip()))
        self._has_thought = True
        self._thought_blank = text[word_end:]

    def _give_up(self) -> bool:
        """Turn the attempt into content: no call came of it."""
        attempt, self._attempt = "".join(self._attempt), []
        self._say(attempt)
        return True

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        self._end_call()
        self._attempt.clear()
        self._is_in_call = True
        self._events.append(CallBegin(self._n_calls, _storable(name), None if call_id is None else _storable(call_id)))
        self._n_calls += 1

    def _say_arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._n_calls - 1, text))

    def _end_call(self) -> None:
        if self._is_in_call:
            self._is_in_call = False
            self._attempt.clear()
            self._events.append(CallEnd(self._n_calls - 1))

    def _to(self, state: State) -> bool:
        self._state = state
        return True


def _storable(name: str) -> str:
    """Give a name without halves of surrogate pairs, which JSON's escapes can spell and UTF-8 cannot hold."""
    return name.encode("utf-8", "replace").decode()
