"""The stream's response by itself: how it ends, whoever ends it."""

import asyncio

import pytest

from tiercel.api.http.sse import DONE, EventStream, frame
from tiercel.base.errors import RequestFailed


class Client:
    """Takes `n_taken` messages, then no more; goes away when told."""

    def __init__(self, n_taken=1000):
        self.n_taken = n_taken
        self.sent = []
        self.leaves = asyncio.Event()

    async def receive(self):
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if len(self.sent) >= self.n_taken:
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent)


class Stream:
    def __init__(self, values, *, then=None):
        self.is_closed = False
        self.is_ended = False
        self._values = values
        self._then = then

    async def frames(self):
        try:
            for value in self._values:
                yield frame(value)
            if self._then == "wait":
                await asyncio.Event().wait()
            elif self._then is not None:
                raise self._then
        finally:
            self.is_ended = True

    def response(self):
        def on_close():
            self.is_closed = True

        return EventStream(self.frames(), on_close=on_close, write_stall_s=0.02, request_id="r")


def run(stream, make_client=Client, *, leaves=False):
    async def once():
        client = make_client()
        if leaves:
            client.leaves.set()
        await asyncio.wait_for(stream.response()({"type": "http"}, client.receive, client.send), 5)
        return client

    client = asyncio.run(once())
    assert stream.is_closed
    return client


def test_a_stream_ends_with_its_terminator():
    client = run(Stream([{"a": 1}, {"b": 2}]))
    assert client.body == b'data: {"a":1}\n\ndata: {"b":2}\n\n' + DONE
    assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("error", [RequestFailed("it failed"), KeyError("private")])
def test_an_error_is_a_frame_before_the_terminator(error):
    client = run(Stream([{"a": 1}], then=error))
    first, told, done, rest = client.body.split(b"\n\n")
    assert (first, done, rest) == (b'data: {"a":1}', b"data: [DONE]", b"")
    assert b'"code":500' in told
    assert b"private" not in told


def test_a_client_that_leaves_ends_a_stream_that_waits():
    stream = Stream([{"a": 1}], then="wait")
    run(stream, leaves=True)
    assert stream.is_ended


def test_a_reader_that_takes_nothing_ends_the_stream():
    stream = Stream([{"a": 1}] * 10, then="wait")
    client = run(stream, lambda: Client(n_taken=3))
    assert stream.is_ended
    assert len(client.sent) == 3


def test_a_server_that_is_cancelled_frees_the_request():
    stream = Stream([{"a": 1}], then="wait")

    async def once():
        client = Client()
        task = asyncio.create_task(stream.response()({"type": "http"}, client.receive, client.send))
        while len(client.sent) < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(once())
    assert stream.is_closed
    assert stream.is_ended


def test_no_value_breaks_its_frame():
    assert frame({"text": "a\n\ndata: b\r\n\u2028"}).count(b"\n") == 2
