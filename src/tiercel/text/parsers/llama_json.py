"""Llama 3's calls: `{"name": ..., "parameters": {...}}`, `;` between several, `<|python_tag|>` before them or not.

Without the tag, an object is a call only if all it has are a call's fields: an answer may be JSON of its own.
"""

from typing import Final

from tiercel.text.parsers.interface import ToolSchemas
from tiercel.text.parsers.json_calls import JsonCalls
from tiercel.text.parsers.markers import Markers

OPENERS: Final = Markers(["<|python_tag|>"])
CLOSERS: Final = Markers([])


def llama_json(schemas: ToolSchemas) -> JsonCalls:
    """Make a parser of one output."""
    return JsonCalls(OPENERS, CLOSERS, schemas, is_bare=True)
