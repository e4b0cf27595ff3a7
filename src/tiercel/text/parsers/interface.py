"""What a parser is given and what it gives. Knows no family of models.

Order of events, for each parser: a call's are `CallBegin`, then `CallArguments`, then `CallEnd`, and no other event is
between them; indices count 0, 1, 2. A stream that is cut inside a call still ends it, its arguments unfinished.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins. `id` is the model's own name for it, None where its format has none."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments: the pieces together are JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A tool call is over."""

    index: int


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


class OutputParser(Protocol):
    """One output's text, taken apart. It belongs to one output; nothing is fed after `finish`."""

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of text; give what it makes sure of."""

    def finish(self) -> list[Event]:
        """End the text; give what was held back."""


class ToolSchemas:
    """The parameters of a request's tools: what turns a value's text into JSON of its type."""

    def __init__(self, parameters: Mapping[str, Any] | None = None) -> None:
        self._parameters = parameters or {}

    @classmethod
    def of_tools(cls, tools: Sequence[Mapping[str, Any]]) -> "ToolSchemas":
        """Read tools in the form of OpenAI's chat requests, already checked."""
        return cls({tool["function"]["name"]: tool["function"].get("parameters") for tool in tools})

    def knows(self, name: str) -> bool:
        """Whether the request has a tool of this name."""
        return name in self._parameters

    def properties(self, name: str) -> Mapping[str, Any]:
        """Give the schemas of a tool's parameters; none for an unknown tool."""
        parameters = self._parameters.get(name)
        found = parameters.get("properties") if isinstance(parameters, Mapping) else None
        return found if isinstance(found, Mapping) else {}


def merged(events: Iterable[Event]) -> list[Event]:
    """Put neighbouring pieces of one kind together: what is left does not depend on how the text was cut."""
    done: list[Event] = []
    for event in events:
        last = done[-1] if done else None
        if isinstance(event, Content) and isinstance(last, Content):
            done[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            done[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            done[-1] = CallArguments(event.index, last.text + event.text)
        else:
            done.append(event)
    return done
