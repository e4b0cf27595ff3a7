"""What requests hold: one struct for each route's body, and the fields that are known but not served.

Knows no engine: ranges of sampling values are `SamplingParams`' to check. A field of OpenAI's or vLLM's that is not
built yet is accepted only at the values at which it changes nothing (`NO_OPS`); one that never changes an answer is
accepted at any (`FREE`); every other name is refused. None and a missing field are the same.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

# Labels, and hints for whoever routes requests: they do not reach the model.
FREE: Final = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "session_id"}
)

_FUNCTIONS = "removed: tools and tool_choice are in its place"
_GUIDED = "removed: structured_outputs has json, regex, choice, grammar and whitespace_pattern in its place"
_MEDIA = "this model reads text only; leave it out"
_TRANSFER = "moving pages between servers is not there yet; leave it out"
_NOT_YET = "it is not there yet; leave it out"

# Field -> (values at which it changes nothing, why others are refused).
NO_OPS: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "store": ((False,), "answers are not stored here; leave it out"),
    "service_tier": (("auto", "default"), "there is one tier; leave it out"),
    "functions": ((), _FUNCTIONS),
    "function_call": (("none",), _FUNCTIONS),
    "guided_json": ((), _GUIDED),
    "guided_regex": ((), _GUIDED),
    "guided_choice": ((), _GUIDED),
    "guided_grammar": ((), _GUIDED),
    "guided_json_object": ((False,), _GUIDED),
    "guided_decoding_backend": ((), _GUIDED),
    "guided_whitespace_pattern": ((), _GUIDED),
    "modalities": ((["text"],), "answers are text; leave it out"),
    "audio": ((), "answers are text; leave it out"),
    "prediction": ((), _NOT_YET),
    "web_search_options": ((), "nothing is searched from here; leave it out"),
    "verbosity": (("medium",), "say in a message how long the answer should be"),
    "best_of": ((1,), "removed: ask for n answers with logprobs and choose among them"),
    "return_token_offsets": ((False,), _NOT_YET),
    "return_assistant_tokens_mask": ((False,), _NOT_YET),
    "routed_experts_prompt_start": ((), _NOT_YET),
    "media_io_kwargs": (({},), _MEDIA),
    "mm_processor_kwargs": (({},), _MEDIA),
    "prompt_embeds": ((), "prompts are text or token ids; leave it out"),
    "conversation": ((), "conversations are not kept here; previous_response_id goes on with a response"),
    "context_management": ((), "nothing is compacted here; truncation auto leaves out the oldest turns"),
    "moderation": ((), "nothing is moderated here; leave it out"),
    "background_options": ((), "background runs start at once; leave it out"),
    "prompt_cache_options": ((), "prefixes are cached by themselves; leave it out"),
    "suffix": (("",), "filling a gap is not there yet; leave it out"),
    "ec_transfer_params": ((), _TRANSFER),
    "vllm_xargs": (({},), "no plug-in reads it here; leave it out"),
}


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a stream tells besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Repetition(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """When an answer that only repeats itself is ended."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class Generation(msgspec.Struct, kw_only=True, frozen=True):
    """What chats and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
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
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Repetition | None = None
    stream_interval: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    cache_hint: dict[str, Any] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(Generation, kw_only=True, frozen=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    return_prompt_text: bool | None = None


class CompletionRequest(Generation, kw_only=True, frozen=True):
    """The body of /v1/completions. `prompt` has four shapes, which `completions` tells apart."""

    prompt: Any = None
    logprobs: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """The body of /tokenize: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None
