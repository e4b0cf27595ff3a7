"""POST /v1/responses: a response whole, as a stream, or in the background.

What runs in the foreground ends with its client: one whose client goes away is freed within a step, and not stored.
What runs in the background goes on whoever listens, until it ends, is cancelled or deleted, or the server ends; its
record is in the store from its admission on. A stored response can be found before its last event is sent.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response

from tiercel.api.http.chat import INLINE_CHARS_MAX
from tiercel.api.http.reading import read
from tiercel.api.http.responses import json_response
from tiercel.api.http.responses_api.answer import Answer, event_frame, told
from tiercel.api.http.responses_api.asking import Asked, echo, prepare
from tiercel.api.http.responses_api.event_log import EventLog, EventsGone
from tiercel.api.http.responses_api.items import Item, new_id
from tiercel.api.http.responses_api.schema import ResponsesRequest
from tiercel.api.http.responses_api.store import Record
from tiercel.api.http.running import Running, close_started, until_gone
from tiercel.api.http.service import Service
from tiercel.api.http.sse import EventStream
from tiercel.api.http.tracing import note_running, take_over
from tiercel.base.errors import QueueFull, RequestError, TiercelError

if TYPE_CHECKING:
    from starlette.types import Scope

_log = logging.getLogger(__name__)

# 64 KiB: what a log grows by before the store is asked for room, some 250 tokens; asking takes tens of microseconds.
_BYTES_UNSEEN_MAX: Final = 64 << 10


async def create(request: Request, service: Service) -> Response:
    """Serve one request for a response."""
    ask = await read(request, service, ResponsesRequest)
    service.check_model(ask.model)
    owner: bytes = request.scope["state"]["owner"]
    earlier = _conversation(service, owner, ask.previous_response_id)
    known = service.responses.items_of(owner) if _has_references(ask) else {}
    if ask.background:
        service.responses.check_room()
    response_id = new_id("resp")
    created_s = int(service.clock())
    start = service.start(
        lambda: prepare(service, ask, request, earlier, known),
        response_id,
        is_stream=bool(ask.stream or ask.background),
        has_form=bool(ask.tools) or (ask.text is not None and ask.text.format is not None),
    )
    asked, running = await until_gone(request.receive, start, on_unwanted=close_started)
    making = _Making(service, asked, owner, echo(asked, service, response_id, created_s), running)
    request_id: str = request.scope["state"]["request_id"]
    if ask.background:
        return making.in_background(request.scope, request_id)
    if ask.stream:
        frames = making.frames(request_id)
        return _stream(service, frames, request_id, making.end)
    try:
        return json_response(await until_gone(request.receive, making.whole()))
    finally:
        making.end()


def stream_of(service: Service, log: EventLog, after: int, request_id: str) -> EventStream:
    """Answer with the events of a response in the background, from the one after `after` on."""
    return _stream(service, _logged(log, after), request_id, lambda: None)


class _Making:
    """Makes one response, and keeps it if it is to be kept."""

    def __init__(
        self, service: Service, asked: Asked, owner: bytes, about: Mapping[str, Any], running: Running
    ) -> None:
        self._service = service
        self._asked = asked
        self._running = running
        self._ready: list[bytes] = []
        ask = asked.ask
        self._log = EventLog(service.settings.event_log_bytes_max) if ask.background else None
        sink = self._log.add if self._log is not None else self._ready.append if ask.stream else None
        self._answer = Answer(service, asked, about, sink)
        self._owner = owner
        self._is_stored = bool(about["store"])

    def end(self) -> None:
        """Free the engine's request and note its size."""
        self._running.close()
        self._service.metrics.note_request(1, self._answer.n_tokens)

    async def whole(self) -> dict[str, Any]:
        """Wait for the end; give the response."""
        answer = self._answer
        async for _, output in self._running.outputs():
            if len(output.outputs[0].text) > INLINE_CHARS_MAX:
                await self._service.in_thread(answer.take, output)
            else:
                answer.take(output)
        assert answer.is_ended, "responses: the engine gave no last output and no error"
        self._keep()
        return answer.shape()

    async def frames(self, request_id: str) -> AsyncGenerator[bytes, None]:
        """Give the events as they come, several at once when several are ready."""
        self._answer.begin()
        yield self._taken()
        try:
            async for _, output in self._running.outputs():
                self._answer.take(output)
                if self._answer.is_ended:
                    self._keep()
                if self._ready:
                    yield self._taken()
        except Exception as error:  # noqa: BLE001  a request's boundary: logged with its id, and told as an event
            self._fail(error, request_id)
            self._keep()
        if self._ready:
            yield self._taken()

    def in_background(self, scope: "Scope", request_id: str) -> Response:
        """Go on without the client; answer with the response as it is now, or with its events."""
        service, log = self._service, self._log
        assert log is not None, "responses: a response in the background without a log"
        record = Record(self._owner, self._answer, self._asked.items, service.clock(), log)
        try:
            service.responses.check_room()
        except QueueFull:
            self.end()
            raise
        record.running = self._running
        take_over(self._running)
        service.n_open += 1
        self._answer.begin()
        service.responses.put(record)
        record.task = asyncio.create_task(self._run(log, scope, request_id))
        record.task.add_done_callback(lambda _: self._ended(record))
        if service.is_draining:
            service.responses.begin_drain()
        if self._asked.ask.stream:
            return stream_of(service, log, -1, request_id)
        return json_response(self._answer.shape())

    async def _run(self, log: EventLog, scope: "Scope", request_id: str) -> None:
        tracer, n_bytes_seen = self._service.tracer, 0
        try:
            with nullcontext() if tracer is None else tracer.request(scope, request_id):
                note_running(self._running)
                async for _, output in self._running.outputs():
                    self._answer.take(output)
                    if log.n_bytes - n_bytes_seen > _BYTES_UNSEEN_MAX:
                        n_bytes_seen = log.n_bytes
                        self._service.responses.keep_bounds()
        except Exception as error:  # noqa: BLE001  a request's boundary: logged with its id, and told as an event
            self._fail(error, request_id)

    def _ended(self, record: Record) -> None:
        """Whatever ended its task, the end of the event loop included, the response has ended too."""
        assert record.log is not None, "responses: a response in the background without a log"
        self._answer.fail("server: it has ended")
        record.running = record.task = None
        record.log.end()
        record.ended.set()
        record.count_answer()
        self._service.responses.settle(record)
        self.end()
        self._service.n_open -= 1

    def _fail(self, error: Exception, request_id: str) -> None:
        if not isinstance(error, TiercelError):
            _log.error("request %s: its response failed", request_id, exc_info=error)
        self._answer.fail(told(error, request_id))

    def _keep(self) -> None:
        if self._is_stored:
            self._is_stored = False  # once
            record = Record(self._owner, self._answer, self._asked.items, self._service.clock())
            record.count_answer()
            self._service.responses.put(record)

    def _taken(self) -> bytes:
        ready = b"".join(self._ready)
        self._ready.clear()
        return ready


def _conversation(service: Service, owner: bytes, previous_id: str | None) -> list[Item]:
    """Give the items that a request goes on with.

    Raises: UnknownResponse; RequestError: that response has not ended, or not by itself.
    """
    if previous_id is None:
        return []
    record = service.responses.get(owner, previous_id, "previous_response_id")
    if not record.answer.is_ended:
        raise RequestError(
            f"previous_response_id: {previous_id} is still in progress; wait for its end, or cancel it",
            param="previous_response_id",
        )
    return record.conversation


def _has_references(ask: ResponsesRequest) -> bool:
    return isinstance(ask.input, list) and any(
        isinstance(one, dict) and (one.get("type") == "item_reference" or set(one) == {"id"}) for one in ask.input
    )


async def _logged(log: EventLog, after: int) -> AsyncGenerator[bytes, None]:
    try:
        async for frames in log.read(after):
            yield frames
    except EventsGone as gone:
        yield event_frame(
            "error",
            {
                "type": "error",
                "code": "events_gone",
                "message": f"starting_after: the events before {gone.first} are no longer kept; ask for the response",
                "param": "starting_after",
                "sequence_number": gone.first - 1,
            },
        )


def _stream(
    service: Service, frames: AsyncGenerator[bytes, None], request_id: str, on_close: Callable[[], None]
) -> EventStream:
    return EventStream(
        frames,
        on_close=on_close,
        write_stall_s=service.settings.write_stall_s,
        request_id=request_id,
        terminator=b"",  # the last event says that it is the last
    )
