"""Server-sent events: frames, and the response that writes them until the client is gone or stops reading.

Knows no shapes. States of a stream: not started -> writing -> ended; whichever way it ends, `on_close` has been called
before the response returns, so the engine's request is freed within a step.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiercel.api import errors
from tiercel.api.http.running import disconnected
from tiercel.base.errors import TiercelError

_log = logging.getLogger(__name__)

DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_encoder: Final = msgspec.json.Encoder()


def frame(value: Any) -> bytes:
    """Give one event. JSON holds no line ends, so one line is enough."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def named_frame(name: str, value: Any) -> bytes:
    """Give one event with a name."""
    return b"event: " + name.encode() + b"\n" + frame(value)


class EventStream(Response):
    """A response of frames as they come, then its terminator. What fails after its start is told in a frame."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        on_close: Callable[[], None],
        write_stall_s: float,
        request_id: str,
        terminator: bytes = DONE,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", **_HEADERS})
        self._frames = frames
        self._on_close = on_close
        self._write_stall_s = write_stall_s
        self._request_id = request_id
        self._terminator = terminator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the stream; return when it is written, or when nobody reads it any more."""
        tasks: list[asyncio.Task[None]] = []
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            tasks = [asyncio.create_task(self._write(send)), asyncio.create_task(disconnected(receive))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            self._on_close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._frames.aclose()

    async def _write(self, send: Send) -> None:
        watch = _StallWatch(self._write_stall_s)
        try:
            async for piece in self._told():
                watch.begin()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                watch.end()
        except asyncio.CancelledError:
            if not watch.is_stalled:
                raise
            _log.info("request %s: its reader took nothing for %g s; dropped", self._request_id, self._write_stall_s)
            return
        finally:
            watch.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _told(self) -> AsyncGenerator[bytes, None]:
        """Give the frames, then an error's if one ended them, then the terminator."""
        try:
            async for piece in self._frames:
                yield piece
        except TiercelError as error:
            yield self.error_frame(*errors.told_of(error))
        except Exception:  # noqa: BLE001  a request's boundary: logged, and answered to it alone
            _log.error("request %s: its stream failed", self._request_id, exc_info=True)
            yield self.error_frame(500, errors.UNEXPECTED.format(self._request_id), None)
        if self._terminator:
            yield self._terminator

    @staticmethod
    def error_frame(status: int, message: str, param: str | None) -> bytes:
        """Give the frame that tells an error. Routes of another shape derive their own."""
        return frame(errors.error_body(status, message, param))


class _StallWatch:
    """Cancels the task that made it when one of its writes takes longer than `limit_s`.

    One timer for the whole stream, set again only when it runs out: a timer for each frame was a seventh of what a
    frame costs, which the cores that compute the tokens pay.
    """

    def __init__(self, limit_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.is_stalled = False
        self._task = task
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None
        self._timer = self._loop.call_later(limit_s, self._look)

    def begin(self) -> None:
        """Note that a write begins."""
        self._began_s = self._loop.time()

    def end(self) -> None:
        """Note that it is done."""
        self._began_s = None

    def close(self) -> None:
        """Watch no more."""
        self._timer.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        began_s = now_s if self._began_s is None else self._began_s
        left_s = began_s + self._limit_s - now_s
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self.is_stalled = True
        self._task.cancel()
