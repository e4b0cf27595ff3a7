"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, SmolLM (which writes a list).

A missing closing marker is forgiven. `granite` and others differ in the markers only.
"""

from typing import Final

from tiercel.text.parsers.interface import ToolSchemas
from tiercel.text.parsers.json_calls import JsonCalls
from tiercel.text.parsers.markers import Markers

OPENERS: Final = Markers(["<tool_call>"])
CLOSERS: Final = Markers(["</tool_call>"])


def hermes(schemas: ToolSchemas) -> JsonCalls:
    """Make a parser of one output."""
    return JsonCalls(OPENERS, CLOSERS, schemas)
