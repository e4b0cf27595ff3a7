"""From messages or text to token ids, cut to length if asked. Runs on the server's threads; knows no engine state."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tiercel.api.http.history import has_tool_turns, normalised
from tiercel.api.http.schema import Generation
from tiercel.api.http.settings import NOT_TEMPLATE_KWARGS
from tiercel.base.errors import PromptTooLong, RequestError
from tiercel.text.tool_prompt import spelled_out

if TYPE_CHECKING:
    from tiercel.api.http.schema import ChatRequest, TokenizeRequest
    from tiercel.api.http.service import Service
    from tiercel.api.http.settings import ServerSettings
    from tiercel.protocol.params import SamplingParams

OWN_TEMPLATE_CHARS_MAX: Final = 64 << 10  # the longest of known models has some 20 Ki; it is compiled in tens of ms


def check_counts(contents: Sequence[Any], settings: "ServerSettings") -> None:
    """Refuse a chat for how many messages it has, or parts in one; `contents` are the messages' as they were sent.

    Raises: RequestError
    """
    n_most = settings.n_messages_max
    if len(contents) > n_most:
        raise RequestError(f"messages: got {len(contents)}; at most {n_most} are read; send fewer", param="messages")
    for i, content in enumerate(contents):
        if isinstance(content, list) and len(content) > settings.n_parts_max:
            raise _refused(i, "content", f"got {len(content)} parts; at most {settings.n_parts_max} are read")


def render_chat(service: "Service", ask: "ChatRequest | TokenizeRequest", messages: Sequence[Mapping[str, Any]]) -> str:
    """Write the text of a chat's prompt.

    Raises: RequestError: a message is malformed, or the template refuses it.
    """
    tools = ask.tools
    if service.settings.exclude_tools_when_tool_choice_none and getattr(ask, "tool_choice", None) == "none":
        tools = None
    own = _own_template(service, ask)
    template = service.template(has_tools=bool(tools)) if own is None else service.own_template(own)
    _check_messages(messages)
    knows_developer = service.template_knows_developer if own is None else "developer" in own
    takes_tools = service.template_takes_tools if own is None else "tools" in own
    messages = normalised(messages, knows_developer=knows_developer)
    if not takes_tools and (tools or has_tool_turns(messages)):
        messages, tools = spelled_out(messages, tools), None
    kwargs = template_kwargs(service, ask)
    continues = bool(ask.continue_final_message)
    if continues and ask.add_generation_prompt:
        raise RequestError(
            "continue_final_message: set together with add_generation_prompt; one of them is needed; send "
            "add_generation_prompt false",
            param="continue_final_message",
        )
    return template.render(
        messages,
        tools=tools,
        add_generation_prompt=not continues if ask.add_generation_prompt is None else ask.add_generation_prompt,
        continue_final_message=continues,
        documents=getattr(ask, "documents", None),
        **kwargs,
    )


def template_kwargs(service: "Service", ask: "ChatRequest | TokenizeRequest") -> dict[str, Any]:
    """Give the template's variables: the request's, then what its effort says of them, then the server's.

    Raises: RequestError: one is a field of the request, and no variable.
    """
    kwargs = dict(ask.chat_template_kwargs or {})
    kwargs.pop("chat_template", None)  # `_own_template` reads it
    for name in kwargs:
        if name in NOT_TEMPLATE_KWARGS:
            raise RequestError(
                f"chat_template_kwargs: got {name!r}; variables of the template are needed; set it as a field of the "
                "request",
                param="chat_template_kwargs",
            )
    effort = getattr(ask, "reasoning_effort", None)
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
        kwargs.setdefault("enable_thinking", effort != "none")
    return {**service.settings.default_chat_template_kwargs, **kwargs}


def _own_template(service: "Service", ask: "ChatRequest | TokenizeRequest") -> str | None:
    """Give the template that a request brings along.

    Raises: RequestError: it is too long, or this server runs only its model's.
    """
    name, source = "chat_template", ask.chat_template
    if source is None:
        name, source = "chat_template_kwargs", (ask.chat_template_kwargs or {}).get("chat_template")
    if source is None:
        return None
    if not service.settings.trusts_request_template:
        raise RequestError(
            f"{name}: a template of the request is a program of a stranger and is not run; leave it out, or start the "
            "server with --trust-request-chat-template",
            param=name,
        )
    if not isinstance(source, str) or not 0 < len(source) <= OWN_TEMPLATE_CHARS_MAX:
        raise RequestError(
            f"{name}: a template of 1 to {OWN_TEMPLATE_CHARS_MAX} characters is needed; leave it out", param=name
        )
    return source


def encode(service: "Service", text: str, *, add_special_tokens: bool, is_cut_later: bool) -> list[int]:
    """Cut a text into tokens; one that cannot fit is refused before any time is spent on it.

    Raises: PromptTooLong; RequestError: the model has no tokenizer.
    """
    tokenizer = service.tokenizer
    context = service.engine.max_model_len
    n_chars_max = context * tokenizer.max_chars_per_token
    if is_cut_later:
        return encode_any(service, text, add_special_tokens=add_special_tokens)
    if len(text) > n_chars_max:
        raise PromptTooLong(
            f"prompt: {len(text)} characters; no more than {n_chars_max} can fit a context of {context} tokens; "
            "shorten it",
            param="prompt",
        )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def with_one_bos(service: "Service", token_ids: list[int]) -> list[int]:
    """Leave out the BOS that encoding put before one that a chat's template wrote."""
    bos = service.tokenizer.bos_id
    return token_ids[1:] if bos is not None and token_ids[:2] == [bos, bos] else token_ids


def encode_any(service: "Service", text: str, *, add_special_tokens: bool) -> list[int]:
    """Cut a text into tokens, whether or not it fits the model's context.

    Raises: RequestError: it is too long even to be counted, or the model has no tokenizer.
    """
    n_chars_max = service.settings.tokenize_chars_max
    if len(text) > n_chars_max:
        raise RequestError(f"prompt: {len(text)} characters; at most {n_chars_max} are cut at once", param="prompt")
    return service.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_prompt_logprobs(service: "Service", params: "SamplingParams", n_tokens: int) -> None:
    """Refuse more log-probabilities of prompts, `n_tokens` long together, than memory should hold.

    Raises: RequestError
    """
    n = params.prompt_logprobs
    if n is None:
        return
    n_entries = n_tokens * (1 + (service.engine.vocab_size if n == -1 else n))
    most = service.settings.n_prompt_logprobs_max
    if n_entries > most:
        raise RequestError(
            f"prompt_logprobs: got {n} for {n_tokens} tokens, which makes {n_entries}; at most {most} are given; lower "
            "it, or send a shorter prompt",
            param="prompt_logprobs",
        )


def cut(ask: Generation, token_ids: list[int], max_tokens: int | None, max_model_len: int) -> list[int]:
    """Keep as many tokens of a prompt as `truncate_prompt_tokens` says; by default the last ones.

    Raises: RequestError: so many leave no room for the answer.
    """
    n = ask.truncate_prompt_tokens
    if n is None:
        return token_ids
    room = max_model_len - (max_tokens or 1)
    if not -1 <= n <= room:
        raise RequestError(
            f"truncate_prompt_tokens: got {n}; 0 to {room} leave room for the answer in a context of {max_model_len}, "
            "and -1 takes what does",
            param="truncate_prompt_tokens",
        )
    n = room if n == -1 else n
    if len(token_ids) <= n:
        return token_ids
    return token_ids[:n] if ask.truncation_side == "right" else token_ids[len(token_ids) - n :]


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise RequestError("messages: it is empty; at least one message is needed", param="messages")
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _refused(i, "role", "a role is needed, as in user")
        if message.get("tool_calls") is None and message.get("content") is None and role != "assistant":
            raise _refused(i, "content", "it is missing; text is needed")
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(i, content)
        elif content is not None and not isinstance(content, str):
            raise _refused(i, "content", f"got {type(content).__name__}; text or a list of parts is needed")


def _check_parts(i: int, parts: list[Any]) -> None:
    for k, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise _refused(
                i, f"content[{k}]", f"got a part of type {str(kind)[:40]!r}; this model reads parts of type text only"
            )


def _refused(i: int, field: str, why: str) -> RequestError:
    param = f"messages[{i}].{field}"
    return RequestError(f"{param}: {why}", param=param)
