"""The engine's requests that answer one HTTP request, and a client that may go away meanwhile. Knows no shapes.

A `Running` is open from admission until `close`, which whoever started it calls in a `finally`: what still runs is then
freed within a step. Outputs are merged in the order they come; a slow reader gets fewer and larger ones.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from starlette.types import Receive

    from tiercel.api.http.request_log import OutputLog
    from tiercel.engine.beams import BeamHandle
    from tiercel.engine.client import RequestHandle
    from tiercel.engine.outputs import RequestSummary
    from tiercel.protocol.outputs import RequestOutput

T = TypeVar("T")
Handle: TypeAlias = "RequestHandle | BeamHandle"


class ClientGone(Exception):
    """The client closed its connection before there was an answer."""


class Running:
    """One engine request for each prompt."""

    def __init__(self, handles: Sequence[Handle], log: "OutputLog | None" = None) -> None:
        self.handles = tuple(handles)
        self._log = log
        self.on_close: Callable[[Running], None] | None = None

    def abort(self) -> None:
        """Stop producing; readers get last outputs that say "abort"."""
        for handle in self.handles:
            handle.abort()

    def close(self) -> None:
        """Free what still runs. Idempotent."""
        for handle in self.handles:
            handle.close()
        if self.on_close is not None:
            self.on_close(self)

    def summaries(self) -> "list[RequestSummary]":
        """Say what each prompt's request came to so far."""
        return [handle.summary() for handle in self.handles]

    def outputs(self) -> AsyncGenerator[tuple[int, "RequestOutput"], None]:
        """Give each prompt's index and output, as they come.

        Raises: the first error that ended one of them.
        """
        return self._outputs() if self._log is None else self._logged(self._log)

    async def _logged(self, log: "OutputLog") -> AsyncGenerator[tuple[int, "RequestOutput"], None]:
        async for i, output in self._outputs():
            log.see(i, output)
            yield i, output

    async def _outputs(self) -> AsyncGenerator[tuple[int, "RequestOutput"], None]:
        if len(self.handles) == 1:
            async for output in self.handles[0]:
                yield 0, output
            return
        # One place for each: while they wait for a slow reader, what is new piles up in their requests, merged.
        queue: asyncio.Queue[_News] = asyncio.Queue(len(self.handles))
        tasks = [asyncio.create_task(_forward(i, handle, queue)) for i, handle in enumerate(self.handles)]
        n_open = len(tasks)
        try:
            while n_open:
                i, news = await queue.get()
                if isinstance(news, Exception):
                    raise news
                if news is None:
                    n_open -= 1
                else:
                    yield i, news
        finally:
            await _end(*tasks)


# A prompt's index with an output, with the error that ended it, or with None at its end.
_News = tuple[int, "RequestOutput | Exception | None"]


async def _forward(i: int, handle: Handle, queue: "asyncio.Queue[_News]") -> None:
    ended_by: Exception | None = None
    try:
        async for output in handle:
            await queue.put((i, output))
    except Exception as error:  # noqa: BLE001  raised again by the reader, which would else wait for ever
        ended_by = error
    await queue.put((i, ended_by))


async def until_gone(
    receive: "Receive", work: Coroutine[Any, Any, T], *, on_unwanted: Callable[[T], object] = lambda _: None
) -> T:
    """Do `work` while the client is there.

    `on_unwanted` is given a result that came, but that the caller, cancelled just then, does not get.

    Requires: the request's body has been read.
    Raises: ClientGone: it went away, and `work` was cancelled; and what `work` raises.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        await _end(gone)
    except BaseException:
        await _end(task, gone)
        if not task.cancelled() and task.exception() is None:
            on_unwanted(task.result())
        raise
    return task.result()


def close_started(started: "tuple[Any, Running]") -> None:
    """Free what `Service.start` gave and nobody waits for any more: an `on_unwanted`."""
    started[1].close()


async def disconnected(receive: "Receive") -> None:
    """Wait until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
