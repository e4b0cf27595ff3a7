"""/v1/messages and /v1/messages/count_tokens: Anthropic's requests, answered by the same chat as OpenAI's.

A stream has, in this order: `message_start` with the prompt's tokens, `ping`, for each block its start, its deltas and
its stop, `message_delta` with the reason of the end and all tokens, `message_stop`. What fails on the way is told by an
`error` event. Of the headers, `x-api-key` is a key as any, `anthropic-version` must be one whose shapes these are, and
`anthropic-beta` opens nothing: the fields it would allow are refused or known by themselves.
"""

import re
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tiercel.api import errors
from tiercel.api.http.answer import Tally
from tiercel.api.http.chat import PreparedChat, prepare_chat
from tiercel.api.http.messages.as_chat import as_chat
from tiercel.api.http.messages.blocks import Blocks, stop_of
from tiercel.api.http.messages.schema import CountRequest, MessagesRequest
from tiercel.api.http.parsing import ParsedOutput
from tiercel.api.http.prompts import check_counts, encode_any, render_chat
from tiercel.api.http.reading import read
from tiercel.api.http.responses import json_response
from tiercel.api.http.running import Running, close_started, until_gone
from tiercel.api.http.service import Service, Submission
from tiercel.api.http.sse import EventStream, named_frame
from tiercel.api.http.structured import form_named
from tiercel.api.http.tools import check_tools
from tiercel.base.errors import RequestError, RequestFailed

if TYPE_CHECKING:
    from tiercel.protocol.outputs import CompletionOutput, RequestOutput

_VERSION: Final = "2023-06-01"  # the first with these events; later ones changed nothing of what is served here
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
# 64 Ki characters are taken apart in a few milliseconds; more is done on a thread.
_INLINE_CHARS_MAX: Final = 64 << 10


class _MessageStream(EventStream):
    """A stream of named events, which `message_stop` or `error` ends."""

    @staticmethod
    def error_frame(status: int, message: str, param: str | None) -> bytes:
        return _event(errors.anthropic_body(status, message, param))


async def messages(request: Request, service: Service) -> Response:
    """Serve one message."""
    _check_version(request)
    ask = await read(request, service, MessagesRequest)
    service.check_model(ask.model)
    request_id: str = request.scope["state"]["request_id"]
    start = service.start(
        lambda: _prepare(service, ask, request),
        f"msg_{request_id}",
        is_stream=bool(ask.stream),
        has_form=bool(ask.tools) or ask.output_config is not None,
    )
    prepared, running = await until_gone(request.receive, start, on_unwanted=close_started)
    answer = _MessageAnswer(service, ask, prepared, f"msg_{request_id}")
    if ask.stream:
        return _MessageStream(
            answer.frames(running),
            on_close=lambda: answer.end(running),
            write_stall_s=service.settings.write_stall_s,
            request_id=request_id,
            terminator=b"",
        )
    try:
        return json_response(await until_gone(request.receive, answer.whole(running)))
    finally:
        answer.end(running)


async def count_tokens(request: Request, service: Service) -> Response:
    """Count the tokens of a message's prompt."""
    _check_version(request)
    ask = await read(request, service, CountRequest)
    service.check_model(ask.model)
    n_tokens = await service.in_thread(_count, service, ask)
    return json_response({"input_tokens": n_tokens, "context_management": {"original_input_tokens": n_tokens}})


def _check_version(request: Request) -> None:
    version = request.headers.get("anthropic-version", _VERSION)
    if not _DATE.fullmatch(version) or version < _VERSION:
        raise RequestError(
            f"anthropic-version: got {version[:40]!r}; {_VERSION} or later is needed; send that, or none"
        )


def _prepare(service: Service, ask: MessagesRequest, request: Request) -> tuple[PreparedChat, list[Submission]]:
    check_counts([message.content for message in ask.messages], service.settings)
    try:
        chat = as_chat(ask)
        if not service.parsers.has_reasoning:
            # Nothing that a client bounds: its words are the same for every model, and this one does not reason.
            chat = msgspec.structs.replace(chat, thinking_token_budget=None)
        prepared, submissions = prepare_chat(service, chat, request)
    except RequestError as error:
        raise _in_its_words(error) from None
    return prepared, [form_named(one, "output_config.format.schema") for one in submissions]


def _count(service: Service, ask: CountRequest) -> int:
    check_counts([message.content for message in ask.messages], service.settings)
    try:
        chat = as_chat(ask)
        if chat.tools is not None:
            check_tools(chat.tools, service.settings)
        return len(encode_any(service, render_chat(service, chat, chat.messages), add_special_tokens=False))
    except RequestError as error:
        raise _in_its_words(error) from None


def _in_its_words(error: RequestError) -> RequestError:
    """Name a tool's fields as the request did."""
    text, param = (
        None if text is None else text.replace(".function.parameters", ".input_schema").replace(".function.", ".")
        for text in (str(error), error.param)
    )
    return type(error)(text or "", param=param)


class _MessageAnswer:
    """Makes one answer, whole or in frames, and keeps count."""

    def __init__(self, service: Service, ask: MessagesRequest, prepared: PreparedChat, message_id: str) -> None:
        self._service = service
        self._ask = ask
        self._id = message_id
        self._tally = Tally(len(prepared.token_ids))
        self._blocks = Blocks()
        plan = prepared.parsing
        self._parsed = None if plan is None else ParsedOutput(service, plan, message_id)

    def end(self, running: Running) -> None:
        """Free the engine's request and note its size."""
        running.close()
        self._service.metrics.note_request(1, self._tally.n_completion)

    async def whole(self, running: Running) -> dict[str, Any]:
        """Wait for the end; give the whole message."""
        last: RequestOutput | None = None
        async for _, output in running.outputs():
            last = output
        assert last is not None, "messages: the engine gave no output and no error"
        self._tally.add(0, last, 1)
        (one,) = last.outputs
        if len(one.text) > _INLINE_CHARS_MAX:
            await self._service.in_thread(self._events, one)
        else:
            self._events(one)
        stop, sequence = self._stop(one)
        return self._message(self._blocks.content(), stop, sequence)

    async def frames(self, running: Running) -> AsyncGenerator[bytes, None]:
        """Give the events as they come, several at once when several are ready."""
        has_begun = False
        async for _, output in running.outputs():
            self._tally.add(0, output, 1)
            (one,) = output.outputs
            ready = [] if has_begun else self._beginning()
            has_begun = True
            ready += self._events(one)
            if one.finish_reason is not None:
                ready += self._ending(one)
            if ready:
                yield b"".join(map(_event, ready))

    def _events(self, one: "CompletionOutput") -> list[dict[str, Any]]:
        is_last = one.finish_reason is not None
        if self._parsed is not None:
            is_cut = one.finish_reason == "length"
            deltas = self._parsed.push(one.text, one.token_ids, is_last=is_last, is_cut=is_cut)
        else:
            deltas = [{"content": one.text}]
        events = self._blocks.push(deltas)
        return [*events, *self._blocks.finish()] if is_last else events

    def _beginning(self) -> list[dict[str, Any]]:
        message = self._message([], None, None)
        message["usage"]["output_tokens"] = 0
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def _ending(self, one: "CompletionOutput") -> list[dict[str, Any]]:
        stop, sequence = self._stop(one)
        delta = {"stop_reason": stop, "stop_sequence": sequence}
        return [{"type": "message_delta", "delta": delta, "usage": self._usage()}, {"type": "message_stop"}]

    def _stop(self, one: "CompletionOutput") -> tuple[str, str | None]:
        if one.finish_reason == "abort":
            # There is no such reason there, and half an answer must not pass for one.
            raise RequestFailed("server: the answer was ended before it was complete; send the request again")
        if one.finish_reason == "length" and self._tally.n_completion < self._ask.max_tokens:
            return "model_context_window_exceeded", None
        stops = self._ask.stop_sequences or ()
        return stop_of(one.finish_reason, one.stop_reason, stops, has_calls=self._blocks.has_calls)

    def _message(self, content: list[dict[str, Any]], stop: str | None, sequence: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._service.settings.model_id,
            "content": content,
            "stop_reason": stop,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        tally = self._tally
        return {
            "input_tokens": tally.n_prompt - tally.n_cached,
            "cache_read_input_tokens": tally.n_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": tally.n_completion,
        }


def _event(event: dict[str, Any]) -> bytes:
    return named_frame(event["type"], event)
