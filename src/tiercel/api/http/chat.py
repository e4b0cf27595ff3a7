"""/v1/chat/completions: a chat's messages to the assistant's next one, whole or streamed.

A stream has, in this order: for each choice a chunk with its role; chunks of text, reasoning and calls; for each choice
a chunk with its finish_reason; with `include_usage` one with the usage and no choice; `[DONE]`. Log-probabilities and
token ids travel with the first chunk that their step makes, or alone where it makes none. `parsing` reads the text.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tiercel.api.http import logprobs
from tiercel.api.http.answer import Envelope, Tally, envelope, has_usage, request_id_of, request_metrics, writes_ids
from tiercel.api.http.beams import beams_of
from tiercel.api.http.params import chat_params, check_stream
from tiercel.api.http.parsing import ParsedOutput, ParsePlan, parse_plan, thinking_marks
from tiercel.api.http.prompts import check_counts, check_prompt_logprobs, cut, encode, render_chat, with_one_bos
from tiercel.api.http.reading import read
from tiercel.api.http.responses import json_response
from tiercel.api.http.running import Running, close_started, until_gone
from tiercel.api.http.schema import ChatRequest
from tiercel.api.http.service import Service, Submission
from tiercel.api.http.sse import EventStream
from tiercel.api.http.structured import may_have_form
from tiercel.api.http.tools import ToolUse, form_of_tools, tool_use
from tiercel.base.errors import RequestError
from tiercel.protocol.params import SamplingParams
from tiercel.text.parsers.registry import ParserChoice

if TYPE_CHECKING:
    from tiercel.protocol.outputs import CompletionOutput, RequestOutput

_ROLE = "assistant"
_OTHER_FORM: Final = "structured_outputs"  # a form that is no response_format, which calls take the place of
# 64 Ki characters are taken apart in a few milliseconds; more is done on a thread.
INLINE_CHARS_MAX: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """What the answer needs to know of the prompt."""

    text: str
    token_ids: list[int]
    echo: str  # what the answer begins with, of the last message; "": nothing
    parsing: ParsePlan | None  # None: the text is the content


async def chat_completions(request: Request, service: Service) -> Response:
    """Serve one chat request."""
    ask = await read(request, service, ChatRequest)
    service.check_model(ask.model)
    check_stream(ask)
    request_id = request_id_of(request, ask)
    around = envelope(service, request_id, ask, "chat.completion")
    start = service.start(
        lambda: _prepare(service, ask, request), around.id, is_stream=bool(ask.stream), has_form=may_have_form(ask)
    )
    prepared, running = await until_gone(request.receive, start, on_unwanted=close_started)
    answer = _ChatAnswer(service, ask, prepared, around)
    if ask.stream:
        return EventStream(
            answer.frames(running),
            on_close=lambda: answer.end(running),
            write_stall_s=service.settings.write_stall_s,
            request_id=request_id,
        )
    try:
        return json_response(await until_gone(request.receive, answer.whole(running)))
    finally:
        answer.end(running)


def _prepare(service: Service, ask: ChatRequest, request: Request) -> tuple[PreparedChat, list[Submission]]:
    check_counts([message.get("content") for message in ask.messages], service.settings)
    return prepare_chat(service, ask, request)


def prepare_chat(service: Service, ask: ChatRequest, request: Request) -> tuple[PreparedChat, list[Submission]]:
    """Check, write and cut the prompt. Runs on a thread of the server."""
    service.check_generates()
    max_model_len = service.engine.max_model_len
    params = chat_params(
        ask,
        service.defaults,
        service.settings,
        max_model_len=max_model_len,
        max_logprobs=service.engine.client.core.config.max_logprobs,
    )
    use = tool_use(ask, service.settings)
    is_unknown = use.has_calls and not service.parsers.has_calls and not use.is_required
    if is_unknown and service.engine.tokenizer is not None:
        raise RequestError(
            "tools: it is not known how this model writes calls; --tool-call-parser of the server says it; send "
            "tool_choice none to only show the tools",
            param="tools",
        )
    text = render_chat(service, ask, ask.messages)
    parsers = service.parsers
    if use.has_form and ask.use_beam_search:
        raise RequestError(
            "tools: calls in a form cannot be kept to in a beam search; leave out use_beam_search, or send tool_choice "
            "auto or none",
            param="tools",
        )
    if use.has_form and service.engine.tokenizer is not None:
        params, parsers = _with_calls(service, use, params)
    parsing = parse_plan(service, ask, use, text, parsers, has_form=params.structured_outputs is not None)
    if parsing is not None and parsing.needs_special_tokens:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    is_cut_later = ask.truncate_prompt_tokens is not None
    token_ids = encode(service, text, add_special_tokens=bool(ask.add_special_tokens), is_cut_later=is_cut_later)
    if ask.add_special_tokens:
        token_ids = with_one_bos(service, token_ids)
    token_ids = cut(ask, token_ids, params.max_tokens, max_model_len)
    check_prompt_logprobs(service, params, len(token_ids))
    one = Submission(
        text=text,
        token_ids=token_ids,
        params=params,
        priority=priority_of(request, ask.priority),
        cache_salt=ask.cache_salt,
        thinking=thinking_marks(service, ask, text, before_calls=use.has_form),
        beams=beams_of(ask, params),
    )
    return PreparedChat(text, token_ids, _echo(ask), parsing), [one]


def _with_calls(service: Service, use: ToolUse, params: SamplingParams) -> tuple[SamplingParams, ParserChoice]:
    """Oblige the answer to be well-formed calls."""
    if use.is_named and params.structured_outputs is not None and params.structured_outputs.name == _OTHER_FORM:
        raise RequestError(
            "tool_choice: got a named tool with structured_outputs; the answer has one form; leave one of them out",
            param="tool_choice",
        )
    form, parsers = form_of_tools(service, use)
    if params.structured_outputs is not None and not use.is_required:
        raise RequestError(
            "tools: strict ones and another form of the answer; only one of them can be kept to; send tool_choice "
            "required or none, or leave strict out",
            param="tools",
        )
    return msgspec.structs.replace(params, structured_outputs=form), parsers


def _echo(ask: ChatRequest) -> str:
    last = ask.messages[-1]
    content = last.get("content")
    return content if ask.echo and last["role"] == _ROLE and isinstance(content, str) else ""


def priority_of(request: Request, of_body: int | None) -> int:
    """Give a request's priority: its header's, which a proxy sets, else its body's."""
    header = request.headers.get("x-vllm-priority", "")
    digits = header.removeprefix("-")
    if digits.isdigit() and digits.isascii() and len(digits) < 19:
        return int(header)
    return of_body or 0


class _ChatAnswer:
    """Makes one answer, whole or in frames, and keeps count."""

    def __init__(self, service: Service, ask: ChatRequest, prepared: PreparedChat, around: Envelope) -> None:
        self._service = service
        self._ask = ask
        self._prepared = prepared
        self._around = around
        self._n = ask.n or 1
        self._role = service.settings.response_role
        self._texts = logprobs.TokenTexts(service.engine.tokenizer, as_ids=writes_ids(ask, service.settings))
        self._tally = Tally(len(prepared.token_ids))
        self._has_role = [False] * self._n
        plan = prepared.parsing
        self._parsed = None if plan is None else [ParsedOutput(service, plan, around.id) for _ in range(self._n)]
        # A token's text tells what it is of.
        self._hides_tokens = plan is not None and plan.has_reasoning and not plan.includes_reasoning
        self._has_usage, self._has_running_usage = has_usage(ask, service.settings)

    def end(self, running: Running) -> None:
        """Free the engine's request and note its size."""
        running.close()
        self._service.metrics.note_request(self._n, max(self._tally.n_by_choice.values(), default=0))

    async def whole(self, running: Running) -> dict[str, Any]:
        """Wait for the end; give the whole answer."""
        last: RequestOutput | None = None
        async for _, output in running.outputs():
            last = output
        assert last is not None, "chat: the engine gave no output and no error"
        self._tally.add(0, last, self._n)
        if self._parsed is not None and sum(len(one.text) for one in last.outputs) > INLINE_CHARS_MAX:
            await self._service.in_thread(self._parse_whole, last, self._parsed)
        elif self._parsed is not None:
            self._parse_whole(last, self._parsed)
        ask, prepared = self._ask, self._prepared
        return self._around.around(
            [self._choice(one) for one in last.outputs],
            usage=self._usage(),
            metrics=request_metrics(self._service.settings, running),
            prompt_logprobs=logprobs.prompt_logprobs(last.prompt_logprobs, self._texts),
            prompt_token_ids=prepared.token_ids if ask.return_token_ids else None,
            prompt_text=prepared.text if ask.return_prompt_text else None,
        )

    def _parse_whole(self, last: "RequestOutput", parsed: list[ParsedOutput]) -> None:
        for one in last.outputs:
            parsed[one.index].push(one.text, one.token_ids, is_last=True, is_cut=one.finish_reason == "length")

    def _choice(self, one: "CompletionOutput") -> dict[str, Any]:
        echo, finish_reason = self._prepared.echo, one.finish_reason
        message = {"role": self._role, "content": echo + one.text, "refusal": None}
        if self._parsed is not None:
            finish_reason = self._parsed[one.index].finish_reason(finish_reason, one.stop_reason)
            message = self._parsed[one.index].message(self._role, echo)
        choice = {
            "index": one.index,
            "message": message,
            "logprobs": self._logprobs(one),
            "finish_reason": finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self._ask.return_token_ids and not self._hides_tokens:
            choice["token_ids"] = one.token_ids
        return choice

    def _usage(self) -> dict[str, Any]:
        if self._parsed is not None and self._prepared.parsing is not None and self._prepared.parsing.has_reasoning:
            self._tally.n_reasoning = sum(one.n_reasoning for one in self._parsed)
        return self._tally.usage()

    def _logprobs(self, one: "CompletionOutput") -> dict[str, Any] | None:
        if one.logprobs is None or self._hides_tokens:
            return None
        named = self._ask.logprob_token_ids
        return logprobs.chat_logprobs(one.logprobs, self._ask.top_logprobs or 0, self._texts, named=named)

    async def frames(self, running: Running) -> AsyncGenerator[bytes, None]:
        """Give the answer's frames as they come, several at once when several are ready."""
        async for _, output in running.outputs():
            self._tally.add(0, output, self._n)
            ready = [piece for one in output.outputs for piece in self._of_output(one)]
            if ready:
                yield b"".join(ready)
        if self._has_usage:
            metrics = request_metrics(self._service.settings, running)
            yield self._around.frame([], usage=self._usage(), metrics=metrics)

    def _of_output(self, one: "CompletionOutput") -> list[bytes]:
        ready = []
        if not self._has_role[one.index]:
            self._has_role[one.index] = True
            ready += self._beginning(one.index)
        finish_reason = one.finish_reason
        deltas = [{"content": one.text}] if one.text else []
        if self._parsed is not None:
            parsed = self._parsed[one.index]
            is_cut = finish_reason == "length"
            deltas = parsed.push(one.text, one.token_ids, is_last=finish_reason is not None, is_cut=is_cut)
            finish_reason = parsed.finish_reason(finish_reason, one.stop_reason)
        entries = self._logprobs(one)
        token_ids = one.token_ids if self._ask.return_token_ids and not self._hides_tokens else None
        if not deltas and ((one.logprobs and entries) or token_ids):
            deltas = [{"content": ""}]
        for delta in deltas:
            ready.append(self._chunk(one.index, delta, entries, token_ids=token_ids))
            entries = token_ids = None
        if finish_reason is not None:
            ready.append(self._chunk(one.index, {}, None, finish_reason, stop_reason=one.stop_reason))
        return ready

    def _beginning(self, index: int) -> list[bytes]:
        delta = {"role": self._role, "content": ""}
        ids = self._prepared.token_ids if self._ask.return_token_ids else None
        text = self._prepared.text if self._ask.return_prompt_text else None
        ready = [self._chunk(index, delta, None, prompt_token_ids=ids, prompt_text=text)]
        if self._prepared.echo:
            ready.append(self._chunk(index, {"content": self._prepared.echo}, None))
        return ready

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        entries: dict[str, Any] | None,
        finish_reason: str | None = None,
        *,
        stop_reason: int | str | None = None,
        token_ids: list[int] | None = None,
        **more: Any,
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": entries, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        if token_ids is not None:
            choice["token_ids"] = token_ids
        usage = self._usage() if self._has_running_usage else None
        return self._around.frame([choice], usage=usage, **more)
