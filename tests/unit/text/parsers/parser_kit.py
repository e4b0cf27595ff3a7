"""What the parsers' tests share: feeding a text in any pieces, and reading what comes of it."""

import json
from dataclasses import dataclass, field
from functools import cache

from tiercel.text.parsers.interface import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Reasoning,
    ToolSchemas,
    merged,
)
from tiercel.text.parsers.registry import ParserChoice

SCHEMAS = ToolSchemas(
    {
        "f": {
            "type": "object",
            "properties": {
                "s": {"type": "string"},
                "i": {"type": "integer"},
                "x": {"type": "number"},
                "b": {"type": "boolean"},
                "l": {"type": "array"},
                "o": {"type": "object"},
                "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "any": {},
            },
        },
        "g": None,
    }
)


@dataclass
class Read:
    """What a text says, put together and checked for the order of its events."""

    content: str = ""
    reasoning: str = ""
    calls: list = field(default_factory=list)
    ids: list = field(default_factory=list)

    @property
    def json_calls(self):
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


@cache
def choice_of(calls, reasoning, special):
    """Make a choice once, as a server does: its marks are compiled with the first parser."""
    return ParserChoice(calls, reasoning, frozenset(special))


def parser_of(calls=None, reasoning=None, *, is_thinking=False, special=(), schemas=SCHEMAS):
    return choice_of(calls, reasoning, tuple(special)).make(
        schemas, has_calls=calls is not None, is_thinking=is_thinking
    )


def events_of(pieces, make):
    parser = make()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*events, *parser.finish()])


def read(events):
    """Put events together, checking that calls are whole and counted."""
    said, open_call = Read(), None
    for event in events:
        if isinstance(event, CallBegin):
            assert open_call is None
            assert event.index == len(said.calls)
            assert event.name
            open_call = event.index
            said.calls.append((event.name, ""))
            said.ids.append(event.id)
        elif isinstance(event, CallArguments):
            assert event.index == open_call
            name, so_far = said.calls[-1]
            said.calls[-1] = (name, so_far + event.text)
        elif isinstance(event, CallEnd):
            assert event.index == open_call
            open_call = None
        else:
            assert open_call is None
            assert event.text
            if isinstance(event, Content):
                said.content += event.text
            else:
                assert isinstance(event, Reasoning)
                said.reasoning += event.text
    assert open_call is None
    return said


def cuts(text):
    """Give the text whole, at each place in two, and in pieces of one, two, three and seven letters."""
    yield [text]
    for i in range(1, len(text)):
        yield [text[:i], text[i:]]
    for n in (1, 2, 3, 7):
        yield [text[i : i + n] for i in range(0, len(text), n)]


def parsed(text, **options):
    """Parse a text in all its cuts; return what all of them say."""
    whole = events_of([text], lambda: parser_of(**options))
    for pieces in cuts(text):
        assert events_of(pieces, lambda: parser_of(**options)) == whole, pieces
    return read(whole)
