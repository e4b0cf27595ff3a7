"""A file of requests, answered by the server's own routes without a server: OpenAI's batch lines in, its answers out.

Each line goes through the app as a request of its own, gate and all, so a batch means what a server would answer. So
many run at once that the engine is busy, answers keep the order of the lines, and a line that is wrong is answered as
such, with its number, while the others go on. Knows no file: lines come and go as bytes.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, Literal

import msgspec

from tiercel.api import errors
from tiercel.api.http.gate import Gate
from tiercel.api.http.reading import parse
from tiercel.base.errors import RequestError

URLS: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/embeddings",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
    }
)
# Answers that wait for an earlier line's, beside those under way: bounds memory when one line takes long.
_WINDOW: Final = 8
# A step's length: the engine's queue was full, and each step may end a sequence.
_RETRY_S: Final = 0.05
_BOM: Final = b"\xef\xbb\xbf"

NumberedLine = tuple[int, bytes | None]


class BatchLine(msgspec.Struct, kw_only=True, frozen=True):
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


@dataclass(slots=True)
class BatchCounts:
    """Lines so far, blank ones apart, and those of them that were not answered with 200."""

    n_lines: int = 0
    n_failed: int = 0


def read_lines(file: BinaryIO, bytes_max: int) -> Iterator[NumberedLine]:
    """Give the lines that are not blank, with their numbers from 1; None for one of more than `bytes_max`."""
    number = 0
    while line := file.readline(bytes_max + 1):
        number += 1
        is_long = len(line) > bytes_max and not line.endswith(b"\n")
        while is_long and line and not line.endswith(b"\n"):
            line = file.readline(bytes_max)
        if number == 1:
            line = line.removeprefix(_BOM)
        if is_long:
            yield number, None
        elif line.strip():
            yield number, line


async def answer_batch(
    app: Gate,
    lines: Iterable[NumberedLine],
    write: Callable[[bytes], object],
    *,
    n_at_once: int,
    on_answer: Callable[[], object] = lambda: None,
) -> BatchCounts:
    """Answer lines, `n_at_once` at a time, and write an answer's line for each, in their order.

    `on_answer` is called for each answer as it comes. What `write` raises ends the run.
    """
    batch = _Batch(app, n_at_once, on_answer)
    pending: deque[asyncio.Task[bytes]] = deque()
    try:
        for number, line in lines:
            pending.append(asyncio.create_task(batch.answer(number, line)))
            while pending and (len(pending) >= _WINDOW * n_at_once or pending[0].done()):
                write(await pending.popleft())
        while pending:
            write(await pending.popleft())
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return batch.counts


class _Batch:
    """Answers lines. Owned by one run."""

    def __init__(self, app: Gate, n_at_once: int, on_answer: Callable[[], object]) -> None:
        self.counts = BatchCounts()
        self._app = app
        self._room = asyncio.Semaphore(n_at_once)
        self._on_answer = on_answer
        self._ids: set[str] = set()

    async def answer(self, number: int, line: bytes | None) -> bytes:
        """Give the answer's line to a line."""
        custom_id: str | None = None
        try:
            if line is None:
                bytes_max = self._app.service.settings.body_bytes_max
                raise RequestError(f"body: the line has more than {bytes_max} bytes; at most that many are read")
            custom_id = _custom_id(line)
            ask = parse(line, BatchLine)
            self._check(ask)
        except RequestError as error:
            status, body, request_id = 400, errors.error_body(400, str(error), error.param), uuid.uuid4().hex
        else:
            status, body, request_id = await self._ask(ask)
        self.counts.n_lines += 1
        self.counts.n_failed += status >= 400
        self._on_answer()
        answer = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": _error(number, body) if status >= 400 else None,
        }
        return msgspec.json.encode(answer) + b"\n"

    def _check(self, ask: BatchLine) -> None:
        if ask.custom_id in self._ids:
            raise RequestError(f"custom_id: {ask.custom_id[:64]!r} is an earlier line's too; one of its own is needed")
        self._ids.add(ask.custom_id)
        if ask.url not in URLS:
            raise RequestError(f"url: got {ask.url[:64]!r}; one of {', '.join(sorted(URLS))} is needed")
        if ask.body.get("stream"):
            raise RequestError("body.stream: a line is answered whole; leave it out")

    async def _ask(self, ask: BatchLine) -> tuple[int, Any, str]:
        content = msgspec.json.encode(ask.body)
        async with self._room:
            status, body, request_id = await _request(self._app, ask.url, content)
            while status == 429:  # only ever for now: others are under way
                await asyncio.sleep(_RETRY_S)
                status, body, request_id = await _request(self._app, ask.url, content)
        return status, msgspec.json.decode(body), request_id


async def _request(app: Gate, path: str, content: bytes) -> tuple[int, bytes, str]:
    """Post to the app as a connection would; give status, body and the request's id."""
    sent: list[dict[str, Any]] = []
    unread = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # the client stays: what would cancel it cancels this too
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    headers = dict(sent[0]["headers"])
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], body, headers[b"x-request-id"].decode()


def _custom_id(line: bytes) -> str | None:
    """Give a line's id, if it has one, however wrong it is otherwise."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    return custom_id if isinstance(custom_id, str) else None


def _error(number: int, body: Any) -> dict[str, Any]:
    error = body["error"]
    return {"code": error["type"], "message": f"line {number}: {error['message']}"}
