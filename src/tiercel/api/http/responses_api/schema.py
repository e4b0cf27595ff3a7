"""The body of /v1/responses. What chats have too is passed on by its name; `asking` checks the rest.

Three fields stay open (`input`, `tools`, `tool_choice`): their shapes are told apart in `items` and `tooling`.
"""

from typing import Any, Literal

import msgspec

from tiercel.api.http.schema import ReasoningEffort

Summary = Literal["auto", "concise", "detailed"]


class ReasoningConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How much is thought, and what is told of it."""

    effort: ReasoningEffort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None  # the older name


class TextConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What form the answer has."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a stream tells besides its events."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, frozen=True):
    """The body of /v1/responses: OpenAI's fields, then those of vLLM that chats have too."""

    input: str | list[Any] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prompt: dict[str, Any] | None = None  # refused: prompts are not kept here
    prompt_cache_key: str | None = None
    reasoning: ReasoningConfig | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[Any] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None

    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    cache_hint: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
