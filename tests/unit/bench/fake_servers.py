"""Servers on loopback, each with one way to behave, in a thread with its own event loop."""

import asyncio
import contextlib
import json
import threading


def completion(text, finish_reason=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def event(told):
    return f"data: {told if isinstance(told, str) else json.dumps(told)}\n\n".encode()


def good_events(n=3):
    yield event(completion("", None))
    for i in range(n):
        yield event(completion(f" t{i}"))
    yield event(completion("", "length"))
    yield event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": n}})
    yield event("[DONE]")


async def chunks(writer, parts):
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for part in parts:
        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        await writer.drain()
    writer.write(b"0\r\n\r\n")


async def good(writer, n):
    await chunks(writer, good_events())


async def stalls(writer, n):
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    await writer.drain()
    await asyncio.sleep(600)


async def dies(writer, n):
    part = event(completion(" one"))
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
    await writer.drain()


async def dies_at_once(writer, n):
    pass


async def no_http(writer, n):
    writer.write(b"\x00\x01 what is this\r\n\r\n")


async def no_json(writer, n):
    await chunks(writer, [b"data: {half a\n\n", event("[DONE]")])


async def no_completion(writer, n):
    await chunks(writer, [event([1, 2]), event("[DONE]")])


async def busy(writer, n):
    writer.write(b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nbusy")


async def empty(writer, n):
    await chunks(writer, [event(completion("", "stop")), event("[DONE]")])


async def error_in_stream(writer, n):
    await chunks(writer, [event(completion(" one")), event({"error": {"message": "engine died"}})])


async def no_end(writer, n):
    await chunks(writer, [event(completion(" one"))])


async def dies_now_and_then(writer, n):
    await (dies(writer, n) if n % 2 else good(writer, n))


class FakeServer:
    """Serves `behave(writer, n)` to the n-th completion; `/v1/models` always works. Notes what was asked. `metrics`
    are the pages of metrics that it shows, one after the other."""

    def __init__(self, behave, metrics=()):
        self.asked = []
        self._metrics = list(metrics)
        self._behave = behave
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._answer, "127.0.0.1", 0), self._loop)
        self._server = started.result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *how):
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self):
        self._server.close()
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _answer(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = next(int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line)
                body = await reader.readexactly(size)
                if " /v1/models " in head:
                    told = json.dumps({"data": [{"id": "m"}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(told), told))
                elif " /metrics " in head:
                    told = self._metrics.pop(0) if self._metrics else None
                    status = b"404 Not Found" if told is None else b"200 OK"
                    told = told or b""
                    writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(told), told))
                else:
                    self.asked.append((head, json.loads(body)))
                    await self._behave(writer, len(self.asked))
                await writer.drain()
            finally:
                writer.close()
