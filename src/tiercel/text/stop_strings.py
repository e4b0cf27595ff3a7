"""Finds the first stop string in a text that comes in pieces, and holds back only what may yet become one.

The match is the one that *ends* first; of several that end together, the one listed first. It does not depend on how
the text is cut into pieces. Each stop string has an automaton (Knuth, Morris, Pratt 1977) whose state is the length of
its longest beginning that the text so far ends with; so each character costs the same whatever the strings are.

States: searching, then matched or finished. A matcher belongs to one sequence.
Invariant: text fed = text returned + text held back (before a match).
"""

from collections.abc import Sequence
from typing import Final


class StopStrings:
    """One sequence's search for its stop strings."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        assert all(stops), "text.stop_strings: an empty stop string; the API refuses those"
        self._automata = [_Automaton(stop) for stop in stops]
        self._first_letters: Final = frozenset(stop[0] for stop in stops)
        self._includes_stop = include_in_output
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._matched

    def feed(self, new_text: str) -> tuple[str, str | None]:
        """Take the next piece of text.

        Returns: the text that is now sure to be output, and the stop string if one was found. After a match the text
        is cut at the stop string (behind it with `include_in_output`), and whatever is fed is dropped.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._held and self._first_letters.isdisjoint(new_text) and not self._is_inside():
            return new_text, None
        for i, letter in enumerate(new_text):
            for automaton in self._automata:
                automaton.advance(letter)
            for automaton in self._automata:
                if automaton.is_complete:
                    return self._match(self._held + new_text[: i + 1], automaton.stop)
        return self._release(self._held + new_text), None

    def finish(self) -> str:
        """End the search; return what was held back."""
        held, self._held = self._held, ""
        return held

    def _is_inside(self) -> bool:
        return any(automaton.n_matched for automaton in self._automata)

    def _match(self, text: str, stop: str) -> tuple[str, str]:
        self._matched, self._held = stop, ""
        return (text if self._includes_stop else text[: len(text) - len(stop)]), stop

    def _release(self, text: str) -> str:
        # A stop string that will be output anyway need not be waited for.
        n_held = 0 if self._includes_stop else max((a.n_matched for a in self._automata), default=0)
        cut = len(text) - n_held
        self._held = text[cut:]
        return text[:cut]


class _Automaton:
    """Counts how much of one stop string the text ends with."""

    __slots__ = ("_fallback", "n_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.n_matched = 0
        # fallback[n]: the longest beginning of `stop` that its first n letters also end with, n itself aside.
        self._fallback = [0] * (len(stop) + 1)
        n = 0
        for i in range(1, len(stop)):
            while n and stop[i] != stop[n]:
                n = self._fallback[n]
            n += stop[i] == stop[n]
            self._fallback[i + 1] = n

    @property
    def is_complete(self) -> bool:
        return self.n_matched == len(self.stop)

    def advance(self, letter: str) -> None:
        n = self.n_matched
        while n and letter != self.stop[n]:
            n = self._fallback[n]
        self.n_matched = n + (letter == self.stop[n])
