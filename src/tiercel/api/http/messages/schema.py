"""The bodies of /v1/messages and /v1/messages/count_tokens, strict in every block. Knows no engine.

`cache_control` is a hint that every request follows already: pages of a prefix seen before are not computed again.
`signature` is ours to give and nobody's to check: earlier thinking is text like any other. Blocks that only some
models read have a struct too, so that they are refused by name.
"""

from typing import Any, Literal

import msgspec


class _Block(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", forbid_unknown_fields=True):
    cache_control: dict[str, Any] | None = None


class TextBlock(_Block, kw_only=True, frozen=True, tag="text"):
    """Some text."""

    text: str
    citations: None = None


class ToolUseBlock(_Block, kw_only=True, frozen=True, tag="tool_use"):
    """A call that the assistant made."""

    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ThinkingBlock(_Block, kw_only=True, frozen=True, tag="thinking"):
    """What the assistant thought before it answered."""

    thinking: str
    signature: str | None = None


class ImageBlock(_Block, kw_only=True, frozen=True, tag="image"):
    """A picture."""

    source: dict[str, Any]


class DocumentBlock(_Block, kw_only=True, frozen=True, tag="document"):
    """A file."""

    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None


class RedactedThinkingBlock(_Block, kw_only=True, frozen=True, tag="redacted_thinking"):
    """Thinking that only the service it came from can read."""

    data: str


class ToolResultBlock(_Block, kw_only=True, frozen=True, tag="tool_result"):
    """What came of a call."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | ImageBlock | DocumentBlock | RedactedThinkingBlock


class Message(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One turn, or a part of one: turns of one role that follow each other are one."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None


class _Choice(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool | None = None


class ChooseAuto(_Choice, kw_only=True, frozen=True, tag="auto"):
    """The model calls tools or does not."""


class ChooseAny(_Choice, kw_only=True, frozen=True, tag="any"):
    """The model calls a tool."""


class ChooseTool(_Choice, kw_only=True, frozen=True, tag="tool"):
    """The model calls this tool."""

    name: str


class ChooseNone(_Choice, kw_only=True, frozen=True, tag="none"):
    """The model calls no tool."""


class _Thinking(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", forbid_unknown_fields=True):
    display: Literal["summarized", "omitted"] | None = None


class ThinkingEnabled(_Thinking, kw_only=True, frozen=True, tag="enabled"):
    """Think, for so many tokens at most."""

    budget_tokens: int


class ThinkingAdaptive(_Thinking, kw_only=True, frozen=True, tag="adaptive"):
    """Think as long as it takes."""


class ThinkingDisabled(_Thinking, kw_only=True, frozen=True, tag="disabled"):
    """Do not think."""


class OutputFormat(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How much effort, and in which form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """About whoever asks; it does not reach the model."""

    user_id: str | None = None


class CountRequest(msgspec.Struct, kw_only=True, frozen=True):
    """The body of /v1/messages/count_tokens: what decides the prompt."""

    messages: list[Message]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ChooseAuto | ChooseAny | ChooseTool | ChooseNone | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True, frozen=True):
    """The body of /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_salt: str | None = None
    priority: int | None = None
