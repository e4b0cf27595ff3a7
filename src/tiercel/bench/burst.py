"""Many streamed completions at once, from one thread that costs next to nothing, and what came of each.

The load generator shares the cores with the server it measures, so what it takes is taken from the server: raw sockets,
answers parsed only when all have ended, and a pause between reads, so that it wakes once for the pieces of many
streams. On two cores with 32 streams it takes 1 % of one of them; `Burst.client_cpu_s` says how much it was. Knows
nothing of rows. For load that comes in time, and on any server, see `serve`.
"""

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import h11

from tiercel.base.errors import RequestFailed
from tiercel.bench.http_client import FAILURES, Server

_PAUSE_S = 0.002
_PIECE_BYTES = 1 << 16
_MOST_BYTES = 64 << 20  # of one answer: a server that never ends must not fill the memory


class BurstFailed(RequestFailed):
    """A request of a burst failed; `kind` is one of `http_client.FAILURES`."""

    def __init__(self, kind: str, what: str) -> None:
        assert kind in FAILURES
        super().__init__(f"server: {kind}: {what}")
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer: its text, and the token ids if they were asked for."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Burst:
    """What a burst gave. `elapsed_s`: from before the first connection to the last byte."""

    answers: tuple[Streamed, ...]
    elapsed_s: float
    client_cpu_s: float


def send(server: Server, path: str, bodies: Sequence[bytes], *, timeout_s: float = 60.0) -> Burst:
    """Send all of `bodies` at once, each on a connection of its own, and read the answers to their ends.

    Raises: BurstFailed: one could not be sent, or its answer is not a whole stream of completions.
    """
    with contextlib.ExitStack() as open_:
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        connections = [open_.enter_context(_connect(server, path, body, timeout_s)) for body in bodies]
        came, end_s = _read_all(connections, timeout_s)
        elapsed_s, client_cpu_s = end_s - start_s, time.thread_time() - start_cpu_s
    return Burst(tuple(_read_answer(b"".join(pieces)) for pieces in came), elapsed_s, client_cpu_s)


def _connect(server: Server, path: str, body: bytes, timeout_s: float) -> socket.socket:
    head = (
        f"POST {server.base_path}{path} HTTP/1.1\r\nhost: {server.host}:{server.port}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    try:
        connection = socket.create_connection((server.host, server.port), timeout_s)
    except OSError as error:
        raise BurstFailed("refused", error.strerror or type(error).__name__) from None
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head.encode() + body)
        connection.setblocking(False)
    except OSError as error:
        connection.close()
        raise BurstFailed("died", error.strerror or type(error).__name__) from None
    return connection


def _read_all(connections: Sequence[socket.socket], timeout_s: float) -> tuple[list[list[bytes]], float]:
    """Read each connection to its end; return the pieces of each, and when the last one came."""
    pieces: list[list[bytes]] = [[] for _ in connections]
    n_bytes, last_s = [0] * len(connections), time.perf_counter()
    with selectors.DefaultSelector() as ready:
        for i, connection in enumerate(connections):
            ready.register(connection, selectors.EVENT_READ, i)
        while ready.get_map():
            found = ready.select(timeout_s)
            if not found:
                raise BurstFailed("stalled", f"nothing came for {timeout_s:g} s")
            now_s = time.perf_counter()
            for key, _ in found:
                i = key.data
                try:
                    piece = connections[i].recv(_PIECE_BYTES)
                except OSError as error:
                    raise BurstFailed("died", error.strerror or type(error).__name__) from None
                if not piece:
                    ready.unregister(key.fileobj)
                    continue
                last_s = now_s
                pieces[i].append(piece)
                n_bytes[i] += len(piece)
                if n_bytes[i] > _MOST_BYTES:
                    raise BurstFailed("garbage", f"an answer of more than {_MOST_BYTES} bytes")
            time.sleep(_PAUSE_S)
    return pieces, last_s


def _read_answer(received: bytes) -> Streamed:
    text, token_ids, is_ended, is_done = "", list[int](), False, False
    for line in _body(received).split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            is_done = True
            break
        try:
            told = json.loads(data)
            if told.get("error"):
                raise BurstFailed("died", f"an error in the stream: {str(told['error'])[:200]}")
            for choice in told["choices"]:
                text += choice["text"]
                token_ids += choice.get("token_ids") or ()
                is_ended = is_ended or choice["finish_reason"] is not None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BurstFailed("garbage", f"an event that is no completion: {data[:80]!r}") from None
    if not (is_ended and is_done):
        raise BurstFailed("died" if text else "garbage", "the stream ended without its end")
    return Streamed(text, tuple(token_ids))


def _body(received: bytes) -> bytes:
    """Take the body out of a whole answer."""
    protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_BYTES)
    protocol.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    protocol.send(h11.EndOfMessage())
    protocol.receive_data(received)
    protocol.receive_data(b"")
    status, body = 0, bytearray()
    while True:
        try:
            event = protocol.next_event()
        except h11.RemoteProtocolError as error:
            raise BurstFailed("died" if status or not received else "garbage", str(error)) from None
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            break
        else:
            raise BurstFailed("died", "the connection ended before the answer")
    if status != 200:
        raise BurstFailed("status", f"{status}: {bytes(body[:200]).decode(errors='replace')}")
    return bytes(body)
