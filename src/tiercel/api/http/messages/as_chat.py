"""A request for a message, as the chat that means the same. Knows no prompt: what a chat may hold, `chat` checks.

Turns of one role that follow each other are one. A last turn of the assistant is the beginning of its answer, which
goes on from there. Refusals name the fields that the client sent.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tiercel.api.http.messages import schema
from tiercel.api.http.messages.schema import Block, CountRequest, Message, MessagesRequest, TextBlock, Tool
from tiercel.api.http.schema import ChatRequest
from tiercel.base.errors import RequestError
from tiercel.protocol.params import N_STOP_MAX, STOP_CHARS_MAX

# Claude Code's first block, which is another one in each session: no prefix would ever be found again behind it.
_BILLING: Final = "x-anthropic-billing-header:"
_THINKING_TOKENS_MIN: Final = 1024  # as Anthropic's
# A way of saying that nothing is taken out of the context.
_KEEPS_ALL: Final = {"type": "clear_thinking_20251015", "keep": "all"}

Placed = tuple[str, Block]  # a block, and where it was in the request


def as_chat(ask: CountRequest) -> ChatRequest:
    """Give the chat that a request means.

    Raises: RequestError: something has no meaning here; `param` names the field.
    """
    _check(ask)
    messages = _system(ask.system) + _history(ask.messages)
    is_begun = messages[-1]["role"] == "assistant"
    if is_begun and messages[-1].get("tool_calls"):
        raise _refused("messages", "the last turn is a call; its result is needed after it")
    fields: dict[str, Any] = {"messages": messages, "model": ask.model, "chat_template_kwargs": {}}
    if is_begun:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    fields |= _tools(ask)
    fields |= _thinking(ask)
    fields["chat_template_kwargs"] |= ask.chat_template_kwargs or {}
    if isinstance(ask, MessagesRequest):
        fields |= {
            "max_tokens": ask.max_tokens,
            "stream": ask.stream,
            "stop": ask.stop_sequences,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k,
            "cache_salt": ask.cache_salt,
            "priority": ask.priority,
        }
    return ChatRequest(**fields)


def _check(ask: CountRequest) -> None:
    if not ask.messages:
        raise _refused("messages", "it is empty; at least one message is needed")
    edits = (ask.context_management or {}).get("edits") or []
    if not isinstance(edits, list) or any(edit != _KEEPS_ALL for edit in edits):
        raise _refused("context_management", "nothing is taken out of a context here; leave it out")
    if isinstance(ask, MessagesRequest):
        if ask.max_tokens < 1:
            raise _refused("max_tokens", f"got {ask.max_tokens}; 1 or more is needed")
        stops = ask.stop_sequences or ()
        if len(stops) > N_STOP_MAX or not all(0 < len(stop) <= STOP_CHARS_MAX for stop in stops):
            raise _refused("stop_sequences", f"up to {N_STOP_MAX} texts of 1 to {STOP_CHARS_MAX} characters are needed")


def _system(system: str | Sequence[TextBlock] | None) -> list[dict[str, Any]]:
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    told = [text for text in texts if text and not text.startswith(_BILLING)]
    return [{"role": "system", "content": _content(told)}] if told else []


def _history(messages: Sequence[Message]) -> list[dict[str, Any]]:
    turns: list[tuple[str, list[Placed]]] = []
    for i, message in enumerate(messages):
        blocks = list(_placed(f"messages[{i}].content", message.content))
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    told: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for role, blocks in turns:
        if role == "assistant":
            told.append(_of_assistant(blocks, names))
        elif role == "user":
            told += _of_user(blocks, names)
        else:
            told.append({"role": role, "content": _content([_only_text(one).text for one in blocks])})
    return told


def _placed(where: str, content: str | Sequence[Block]) -> Iterable[Placed]:
    if isinstance(content, str):
        yield where, TextBlock(text=content)
        return
    if not content:
        raise _refused(where, "it is empty; some text is needed")
    for i, block in enumerate(content):
        yield f"{where}[{i}]", block


def _of_assistant(blocks: Sequence[Placed], names: dict[str, str]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in blocks:
        if isinstance(block, schema.ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, schema.ToolUseBlock):
            if block.id in names:
                raise _refused(f"{where}.id", "another call has it too; an id of its own is needed")
            names[block.id] = block.name
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            texts.append(_only_text((where, block)).text)
    # One text: what goes on from its end, or was told around a call, is one in the chat.
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _of_user(blocks: Sequence[Placed], names: Mapping[str, str]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    texts: list[str] = []
    for where, block in blocks:
        if isinstance(block, schema.ToolResultBlock):
            if texts:
                told.append({"role": "user", "content": _content(texts)})
                texts = []
            told.append(_result(where, block, names))
        else:
            texts.append(_only_text((where, block)).text)
    if texts:
        told.append({"role": "user", "content": _content(texts)})
    return told


def _result(where: str, block: schema.ToolResultBlock, names: Mapping[str, str]) -> dict[str, Any]:
    name = names.get(block.tool_use_id)
    if name is None:
        raise _refused(f"{where}.tool_use_id", f"got {block.tool_use_id[:64]!r}, which is no earlier call's id")
    if isinstance(block.content, list):
        parts = [_only_text((f"{where}.content[{i}]", part)).text for i, part in enumerate(block.content)]
        text = "\n".join(parts)
    else:
        text = block.content or ""
    if block.is_error:  # a chat has no field for it, and the model must know
        text = f"Error: {text}" if text else "Error"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": text}


def _only_text(placed: Placed) -> TextBlock:
    where, block = placed
    if isinstance(block, TextBlock):
        return block
    kind = block.__struct_config__.tag
    if isinstance(block, schema.ImageBlock | schema.DocumentBlock):
        raise _refused(where, f"got a block of type {kind!r}; this model reads text only; leave it out")
    if isinstance(block, schema.RedactedThinkingBlock):
        raise _refused(where, "only the service that it came from can read it; leave it out")
    raise _refused(where, f"got a block of type {kind!r}, which has no place in this role's turn")


def _content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _tools(ask: CountRequest) -> dict[str, Any]:
    choice = ask.tool_choice
    if ask.tools is None or (not ask.tools and choice is None):
        if choice is not None and not isinstance(choice, schema.ChooseNone):
            raise _refused("tool_choice", "got one without tools; send tools, or leave it out")
        return {}
    fields: dict[str, Any] = {"tools": [_tool(tool) for tool in ask.tools]}
    if choice is None:
        return fields
    if isinstance(choice, schema.ChooseTool):
        if all(tool.name != choice.name for tool in ask.tools):
            raise _refused("tool_choice.name", f"got {choice.name[:64]!r}, which is none of tools; name one of them")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif isinstance(choice, schema.ChooseAny):
        fields["tool_choice"] = "required"
    else:
        fields["tool_choice"] = "none" if isinstance(choice, schema.ChooseNone) else "auto"
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _thinking(ask: CountRequest) -> dict[str, Any]:
    """Say in a chat's fields whether to think, how long, with which effort, and in which form to answer."""
    fields: dict[str, Any] = {}
    thinking, config = ask.thinking, ask.output_config
    if thinking is not None:
        is_on = not isinstance(thinking, schema.ThinkingDisabled)
        fields["chat_template_kwargs"] = {"enable_thinking": is_on}
        if thinking.display == "omitted":
            fields["include_reasoning"] = False
    if isinstance(thinking, schema.ThinkingEnabled):
        fields["thinking_token_budget"] = _budget(ask, thinking.budget_tokens)
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if config is not None and config.format is not None:
        form = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": config.format.schema, "strict": True},
        }
        fields["response_format"] = form
    return fields


def _budget(ask: CountRequest, n_tokens: int) -> int:
    if n_tokens < _THINKING_TOKENS_MIN:
        raise _refused("thinking.budget_tokens", f"got {n_tokens}; {_THINKING_TOKENS_MIN} or more is needed")
    if isinstance(ask, MessagesRequest) and n_tokens >= ask.max_tokens:
        raise _refused("thinking.budget_tokens", f"got {n_tokens}; less than max_tokens, {ask.max_tokens}, is needed")
    return n_tokens


def _refused(param: str, why: str) -> RequestError:
    return RequestError(f"{param}: {why}", param=param)
