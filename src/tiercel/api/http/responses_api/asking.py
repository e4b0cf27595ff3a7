"""A request checked and turned into a chat, and what its response repeats of it. Runs on the server's threads.

Sampling, templates, tools and constraints are `chat`'s; here is only what chats do not have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.exceptions import HTTPException

from tiercel.api.http.chat import PreparedChat, prepare_chat
from tiercel.api.http.prompts import encode, render_chat
from tiercel.api.http.responses_api.items import Item, check_counts, read_items
from tiercel.api.http.responses_api.messages import Message, to_messages
from tiercel.api.http.responses_api.schema import ResponsesRequest, TextConfig
from tiercel.api.http.responses_api.tooling import in_own_words, refusal_in_own_words, to_chat_choice, to_chat_tools
from tiercel.api.http.schema import ChatRequest
from tiercel.api.http.structured import form_named
from tiercel.base.errors import PromptTooLong, RequestError

if TYPE_CHECKING:
    from starlette.requests import Request

    from tiercel.api.http.service import Service, Submission
    from tiercel.protocol.params import SamplingParams

LOGPROBS: Final = "message.output_text.logprobs"
# Of tools that OpenAI runs and of media: an answer here has none, so there is nothing to include.
_NOTHING_TO_INCLUDE: Final = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_FORMS: Final = ("text", "json_object", "json_schema")
_N_TOP_MAX: Final = 20
_N_LABELS_MAX, _LABEL_NAME_CHARS_MAX, _LABEL_CHARS_MAX = 16, 64, 512
# Fields that mean the same in a chat.
_SAME: Final = tuple(set(ResponsesRequest.__struct_fields__) & set(ChatRequest.__struct_fields__) - {"stream_options"})


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as its answer needs it. `items` are the input's, with those of earlier responses before them."""

    chat: PreparedChat
    ask: ResponsesRequest
    params: "SamplingParams"
    items: Sequence[Item]

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer's text comes with log-probabilities."""
        return self.params.logprobs is not None


def check_include(include: Sequence[str]) -> None:
    """Refuse what no answer of this server has.

    Raises: RequestError
    """
    for i, one in enumerate(include):
        if one == "reasoning.encrypted_content":
            raise _refused(f"include[{i}]", f"got {one!r}; reasoning is not encrypted here: it is in content as it is")
        if one != LOGPROBS and one not in _NOTHING_TO_INCLUDE:
            raise _refused(f"include[{i}]", f"got {one[:80]!r}; {LOGPROBS} is what can be included")


def prepare(
    service: "Service",
    ask: ResponsesRequest,
    request: "Request",
    earlier: Sequence[Item],
    known: Mapping[str, Item],
) -> tuple[Asked, "list[Submission]"]:
    """Check a request, write its prompt and cut it. `earlier` is the conversation that it goes on with.

    Raises: RequestError, HTTPException: as for a chat, in this route's words.
    """
    _check(ask)
    _check_store(ask, service.settings.n_stored_max)
    asked = ask.input if ask.input is not None else []
    check_counts(asked, service.settings)
    given = read_items(asked, earlier, known)
    items = [*earlier, *given]
    if not items:
        raise _refused("input", "it is missing; text or a list of items is needed; send it")
    try:
        messages = to_messages(ask.instructions, items, knows_developer=service.template_knows_developer)
        chat = _to_chat(ask, messages)
        if ask.truncation == "auto":
            chat = _shortened(service, chat)
        prepared, submissions = prepare_chat(service, chat, request)
    except HTTPException as error:
        raise refusal_in_own_words(error) from None
    except RequestError as error:
        raise in_own_words(error) from None
    submissions = [form_named(one, "text.format.schema") for one in submissions]
    return Asked(prepared, ask, submissions[0].params, items), submissions


def _to_chat(ask: ResponsesRequest, messages: list[Message]) -> ChatRequest:
    tools = None if ask.tools is None else to_chat_tools(ask.tools)
    choice, tools = to_chat_choice(ask.tool_choice, tools or None)
    has_logprobs = LOGPROBS in (ask.include or ())
    return ChatRequest(
        **{name: getattr(ask, name) for name in _SAME if name not in ("tools", "tool_choice", "top_logprobs")},
        messages=messages,
        max_completion_tokens=ask.max_output_tokens,
        reasoning_effort=ask.reasoning.effort if ask.reasoning else None,
        response_format=_to_chat_format(ask.text),
        tools=tools,
        tool_choice=choice if tools or choice != "auto" else None,
        logprobs=has_logprobs or None,
        top_logprobs=ask.top_logprobs if has_logprobs else None,
    )


def _check(ask: ResponsesRequest) -> None:
    check_include(ask.include or ())
    if ask.prompt is not None:
        raise _refused("prompt", "prompts are not kept here; send the text itself as instructions and input")
    if ask.stream_options is not None and not ask.stream:
        raise _refused("stream_options", "got some without a stream; leave it out")
    _check_numbers(ask)
    _check_labels(ask.metadata or {})
    if ask.service_tier not in (None, "auto", "default"):
        raise _refused("service_tier", f"got {ask.service_tier[:40]!r}; there is one tier; leave it out")
    if ask.text is not None:
        _check_text(ask.text.format, ask.text.verbosity)
    for name in ("summary", "generate_summary"):
        if ask.reasoning is not None and getattr(ask.reasoning, name) in ("concise", "detailed"):
            raise _refused(
                f"reasoning.{name}",
                "no summaries are written here: an answer has its reasoning as it is; leave it out, or say auto",
            )
    if ask.cache_salt == "":
        raise _refused("cache_salt", "it is empty; some text is needed; leave it out")


def _check_store(ask: ResponsesRequest, n_stored_max: int) -> None:
    if ask.background and ask.store is False:
        raise _refused("background", "got true with store false; what runs in the background is found in the store")
    for name in ("store", "background"):
        if getattr(ask, name) and not n_stored_max:
            raise _refused(name, "got true; this server keeps no responses (--max-stored-responses 0); leave it out")


def _check_numbers(ask: ResponsesRequest) -> None:
    n_top = ask.top_logprobs
    if n_top is not None and not 0 <= n_top <= _N_TOP_MAX:
        raise _refused("top_logprobs", f"got {n_top}; 0 to {_N_TOP_MAX} is needed")
    if n_top and LOGPROBS not in (ask.include or ()):
        raise _refused("top_logprobs", f"got {n_top} without log-probabilities; add {LOGPROBS} to include")
    for name in ("max_output_tokens", "max_tool_calls"):
        n = getattr(ask, name)
        if n is not None and n < 1:
            raise _refused(name, f"got {n}; 1 or more is needed")


def _check_labels(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _N_LABELS_MAX:
        raise _refused("metadata", f"got {len(metadata)} pairs; at most {_N_LABELS_MAX} are kept")
    for name, value in metadata.items():
        if len(name) > _LABEL_NAME_CHARS_MAX or len(value) > _LABEL_CHARS_MAX:
            raise _refused(
                "metadata",
                f"{name[:64]!r} is too long; names of {_LABEL_NAME_CHARS_MAX} and values of {_LABEL_CHARS_MAX} "
                "characters are kept",
            )


def _check_text(form: Mapping[str, Any] | None, verbosity: str | None) -> None:
    if verbosity not in (None, "medium"):
        raise _refused("text.verbosity", "say in a message how long the answer should be; leave it out")
    kind = "text" if form is None else form.get("type")
    if kind not in _FORMS:
        raise _refused("text.format.type", f"got {str(kind)[:40]!r}; {', '.join(_FORMS)} is needed")


def _to_chat_format(text: TextConfig | None) -> dict[str, Any] | None:
    """Give a form of text in the shape of chats: they have a schema's fields one level deeper."""
    form = None if text is None else text.format
    if form is None or form["type"] != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def _shortened(service: "Service", chat: ChatRequest) -> ChatRequest:
    """Leave out whole turns, oldest first, until the prompt fits; what the system said stays.

    A turn begins with a user's message, so no call loses its output. The last turn stays too: too long, it is refused.
    """
    messages = chat.messages
    n_head = next((i for i, one in enumerate(messages) if one["role"] not in ("system", "developer")), 0)
    begins = [i for i, one in enumerate(messages) if one["role"] == "user" and i > n_head]
    tried = [chat, *(msgspec.structs.replace(chat, messages=messages[:n_head] + messages[i:]) for i in begins)]
    # The fewer messages, the shorter the prompt: halve the range in which the first that fits must be.
    low, high = 0, len(tried) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(service, tried[middle]) else (middle + 1, high)
    return tried[low]


def _fits(service: "Service", chat: ChatRequest) -> bool:
    room = service.engine.max_model_len - (chat.max_completion_tokens or 1)
    try:
        text = render_chat(service, chat, chat.messages)
        return len(encode(service, text, add_special_tokens=False, is_cut_later=False)) <= room
    except PromptTooLong:
        return False


def echo(asked: Asked, service: "Service", response_id: str, created_s: int) -> dict[str, Any]:
    """Give what a response says of its request, defaults filled in."""
    ask, params = asked.ask, asked.params
    reasoning = ask.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_s,
        "background": bool(ask.background),
        "instructions": ask.instructions,
        "max_output_tokens": ask.max_output_tokens,
        "max_tool_calls": ask.max_tool_calls,
        "metadata": ask.metadata or {},
        "model": service.settings.model_id,
        "parallel_tool_calls": ask.parallel_tool_calls is not False,
        "previous_response_id": ask.previous_response_id,
        "prompt_cache_key": ask.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning else None,
        },
        "safety_identifier": ask.safety_identifier,
        "service_tier": "default",
        "store": ask.store is not False and service.settings.n_stored_max > 0,
        "temperature": params.temperature,
        "text": {"format": (ask.text and ask.text.format) or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": ask.tool_choice or "auto",
        "tools": [{**tool, "strict": bool(tool.get("strict"))} for tool in ask.tools or ()],
        "top_logprobs": ask.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": ask.truncation or "disabled",
        "user": ask.user,
    }


def _refused(param: str, why: str) -> RequestError:
    return RequestError(f"{param}: {why}", param=param)
