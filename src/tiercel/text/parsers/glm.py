"""GLM's calls, from 4.5 on: `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>`."""

from typing import Final

from tiercel.text.parsers.interface import ToolSchemas
from tiercel.text.parsers.tagged import TaggedCalls, TagTexts

TEXTS: Final = TagTexts(
    wrapper="<tool_call>",
    wrapper_end="</tool_call>",
    call="",
    call_end="",
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
)


def glm(schemas: ToolSchemas) -> TaggedCalls:
    """Make a parser of one output."""
    return TaggedCalls(TEXTS, schemas)
