"""Granite's calls: `<|tool_call|>[{...}]`, `<tool_call>[{...}]` with or without an end, `<function_call> {...}`.

Its reasoning, between spoken phrases, is in `think`.
"""

from typing import Final

from tiercel.text.parsers.interface import ToolSchemas
from tiercel.text.parsers.json_calls import JsonCalls
from tiercel.text.parsers.markers import Markers

OPENERS: Final = Markers(["<|tool_call|>", "<tool_call>", "<function_call>"])
CLOSERS: Final = Markers(["</tool_call>", "</function_call>"])


def granite(schemas: ToolSchemas) -> JsonCalls:
    """Make a parser of one output."""
    return JsonCalls(OPENERS, CLOSERS, schemas)
