"""Parsers one behind another: what hides special tokens, what tells reasoning apart, what finds calls.

The text goes through `Hidden` first, which takes out the special tokens that no parser reads; the content that comes
out at the end goes through another, for those that one does read and that stood where they mean nothing.
"""

from collections.abc import Iterable, Sequence

from tiercel.text.parsers.interface import CallBegin, Content, Event, OutputParser, Reasoning
from tiercel.text.parsers.markers import Hidden, Markers


class Chain:
    """An `OutputParser` of several. Each gets the content of the one before."""

    def __init__(self, parsers: Sequence[OutputParser], *, unread: Markers, read: Markers) -> None:
        self._parsers = parsers
        self._first = Hidden(unread)
        self._content = Hidden(read)
        self._reasoning = Hidden(read)

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of text."""
        shown = self._first.feed(text)
        return self._shown(self._through(0, [Content(shown)])) if shown else []

    def finish(self) -> list[Event]:
        """End the text."""
        events: list[Event] = [Content(self._first.finish())]
        for i, parser in enumerate(self._parsers):
            events = [*self._through(i, events, n=1), *parser.finish()]
        events = self._shown(events)
        events += _if_any(Reasoning(self._reasoning.finish()))
        events += _if_any(Content(self._content.finish()))
        return events

    def _through(self, first: int, events: Iterable[Event], n: int | None = None) -> list[Event]:
        """Give events' content to the parsers from `first` on, `n` of them."""
        last = len(self._parsers) if n is None else first + n
        done = list(events)
        for parser in self._parsers[first:last]:
            done = [new for event in done for new in (_fed(parser, event))]
        return done

    def _shown(self, events: Iterable[Event]) -> list[Event]:
        shown: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                shown += _if_any(Reasoning(self._reasoning.finish()))
                shown += _if_any(Content(self._content.feed(event.text)))
            elif isinstance(event, Reasoning):
                shown += _if_any(Content(self._content.finish()))
                shown += _if_any(Reasoning(self._reasoning.feed(event.text)))
            else:
                if isinstance(event, CallBegin):
                    shown += _if_any(Reasoning(self._reasoning.finish()))
                    shown += _if_any(Content(self._content.finish()))
                shown.append(event)
        return shown


def _fed(parser: OutputParser, event: Event) -> list[Event]:
    return parser.feed(event.text) if isinstance(event, Content) else [event]


def _if_any(event: Content | Reasoning) -> list[Event]:
    return [event] if event.text else []
