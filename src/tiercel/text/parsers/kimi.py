"""Kimi's calls. K2: sections of special tokens, a header `functions.NAME:INDEX`, which is the call's id, and JSON.

K3 writes a tree: `<|open|>tools<|sep|>`, in it `call tool="N" index="1"`, in it `argument key="K" type="string"`; its
answer and its reasoning are channels of the same kind, `response` and `think`. `tree` is its parser.
"""

from typing import Final

from tiercel.text.parsers.sections import SectionCalls, SectionTexts

K2: Final = SectionTexts(
    section_begin="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    call_begin="<|tool_call_begin|>",
    call_end="<|tool_call_end|>",
    header_end="<|tool_call_argument_begin|>",
    ends_content=True,
)


class KimiK2(SectionCalls):
    """One output's parser."""

    def __init__(self) -> None:
        super().__init__(K2)

    def _named(self, header: str) -> tuple[str, str | None]:
        full = header.removeprefix("functions.")
        bare, colon, index = full.rpartition(":")
        return (bare if colon and index.strip().isdigit() else full), header
