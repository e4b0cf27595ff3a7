"""Qwen3-Coder's calls: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, in lines.

`<function=` alone is a call too. One line end on either side of a value is the format's.
"""

from typing import Final

from tiercel.text.parsers.interface import ToolSchemas
from tiercel.text.parsers.tagged import TaggedCalls, TagTexts

TEXTS: Final = TagTexts(
    wrapper="<tool_call>",
    wrapper_end="</tool_call>",
    call="<function=",
    call_end="</function>",
    key="<parameter=",
    key_end=">",
    value="",
    value_end="</parameter>",
    strips_lines=True,
    is_bare=True,
)
SEED: Final = TagTexts(
    wrapper="<seed:tool_call>",
    wrapper_end="</seed:tool_call>",
    call="<function=",
    call_end="</function>",
    key="<parameter=",
    key_end=">",
    value="",
    value_end="</parameter>",
    strips_lines=True,
    is_bare=True,
)
MINIMAX: Final = TagTexts(
    wrapper="<minimax:tool_call>",
    wrapper_end="</minimax:tool_call>",
    call="<invoke",
    call_end="</invoke>",
    key="<parameter",
    key_end=">",
    value="",
    value_end="</parameter>",
    has_attributes=True,
)


def qwen3_coder(schemas: ToolSchemas) -> TaggedCalls:
    """Make a parser of one output."""
    return TaggedCalls(TEXTS, schemas)
