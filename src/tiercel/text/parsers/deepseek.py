"""DeepSeek's calls: V3 and V3.1 between special tokens with JSON arguments, V3.2 and V4 in DSML tags.

V4 wraps arguments in one more object now and then, a parameter `arguments` or `input` that the tool does not have: that
object is the arguments.
"""

from collections.abc import Mapping
from typing import Any, Final

from tiercel.text.parsers.arguments import TaggedArguments
from tiercel.text.parsers.interface import ToolSchemas
from tiercel.text.parsers.json_values import read_json
from tiercel.text.parsers.sections import SectionCalls, SectionTexts
from tiercel.text.parsers.tagged import TaggedCalls, TagTexts

_MARK: Final = "｜DSML｜"
V3: Final = SectionTexts(
    section_begin="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    call_begin="<｜tool▁call▁begin｜>",
    call_end="<｜tool▁call▁end｜>",
    header_end="<｜tool▁sep｜>",
    fence="```json",
)
V31: Final = SectionTexts(
    section_begin="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    call_begin="<｜tool▁call▁begin｜>",
    call_end="<｜tool▁call▁end｜>",
    header_end="<｜tool▁sep｜>",
)
DSML: Final = TagTexts(
    wrapper=f"<{_MARK}tool_calls>",
    wrapper_end=f"</{_MARK}tool_calls>",
    call=f"<{_MARK}invoke",
    call_end=f"</{_MARK}invoke>",
    key=f"<{_MARK}parameter",
    key_end=">",
    value="",
    value_end=f"</{_MARK}parameter>",
    has_attributes=True,
    other_wrappers=(f"<{_MARK}function_calls>",),
)
_WRAPPING: Final = frozenset({"arguments", "input"})


def deepseek_v3() -> SectionCalls:
    """Make a parser of one output of V3."""
    return SectionCalls(V3)


def deepseek_v31() -> SectionCalls:
    """Make a parser of one output of V3.1."""
    return SectionCalls(V31)


class DeepSeekV4(TaggedCalls):
    """One output's parser, of V3.2 and V4."""

    def __init__(self, schemas: ToolSchemas) -> None:
        super().__init__(DSML, schemas)

    def _new_arguments(self, name: str) -> TaggedArguments:
        properties = self._schemas.properties(name)
        return _Unwrapping(properties) if not _WRAPPING & properties.keys() else TaggedArguments(properties)


class _Unwrapping(TaggedArguments):
    """Holds a first parameter that may be a wrapper until it is known whether it is the only one."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        super().__init__(properties)
        self._may_wrap = False
        self._held = ""  # the parameter, written as one
        self._inner = ""  # its text

    def begin(self, key: str, *, types: frozenset[str] | None = None, is_whole: bool = False) -> str:
        """Begin a value; a second one shows that the first wrapped nothing."""
        before, self._held = self._held, ""
        self._may_wrap = not self._is_open and key in _WRAPPING
        return before + super().begin(key, types=types, is_whole=is_whole or self._may_wrap)

    def end(self) -> str:
        """End the value."""
        if not self._may_wrap:
            return super().end()
        self._may_wrap = False
        self._inner = "".join(self._parts).strip()
        self._held = super().end()
        return ""

    def close(self) -> str:
        """End the arguments."""
        if self._may_wrap:
            self.end()
        if not self._held:
            return super().close()
        try:
            is_object = isinstance(read_json(self._inner), dict)
        except ValueError:
            is_object = False
        return self._inner if is_object else self._held + "}"
