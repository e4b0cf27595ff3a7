"""One HTTP/1.1 request to a server that may do anything, and every way that can fail, by kind.

Just enough for a load generator: a request is sent, and pieces of the body come as the server sends them, each with
the time it came. `h11` knows the protocol. Follows no redirect, keeps no connection.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from tiercel.base.errors import ConfigError

FAILURES = {
    "refused": "no connection could be made",
    "stalled": "nothing came for as long as --timeout says",
    "died": "the connection ended inside the answer",
    "garbage": "what came is not HTTP, not JSON, or not an answer of this kind",
    "status": "an HTTP status other than 200",
    "short": "the answer ended without a token",
}
_MOST_BYTES = 64 << 20  # of one answer: a server that never ends must not fill the memory


class ExchangeFailed(Exception):
    """Inside this package only: one exchange failed; `kind` is one of `FAILURES`."""

    def __init__(self, kind: str, what: str) -> None:
        assert kind in FAILURES
        super().__init__(f"{kind}: {what}")
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is, and what every request to it carries."""

    host: str
    port: int
    is_tls: bool
    base_path: str
    headers: tuple[tuple[str, str], ...] = ()


def read_url(url: str, headers: tuple[tuple[str, str], ...] = ()) -> Server:
    """Read `http://host:port/path`.

    Raises: ConfigError: it is no such address.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        port, parts = None, urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"base-url: got {url!r}; need an address such as http://127.0.0.1:8000")
    is_tls = parts.scheme == "https"
    return Server(parts.hostname, port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"), headers)


async def exchange(
    server: Server, method: str, path: str, body: bytes = b"", *, timeout_s: float
) -> AsyncGenerator[tuple[float, bytes], None]:
    """Send a request and give the pieces of its answer's body, each with the `perf_counter` time it came.

    Raises: ExchangeFailed: it did not go well; after a status other than 200, with the beginning of the body.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                server.host, server.port, ssl=ssl.create_default_context() if server.is_tls else None
            )
    except TimeoutError:
        raise ExchangeFailed("stalled", f"no connection in {timeout_s:g} s") from None
    except OSError as error:
        raise ExchangeFailed("refused", error.strerror or type(error).__name__) from None
    try:
        async for piece in _converse(server, method, path, body, reader, writer, timeout_s):
            yield piece
    except TimeoutError:
        raise ExchangeFailed("stalled", f"nothing came for {timeout_s:g} s") from None
    except OSError as error:
        raise ExchangeFailed("died", error.strerror or type(error).__name__) from None
    finally:
        writer.close()
        with contextlib.suppress(OSError, ssl.SSLError, TimeoutError):
            async with asyncio.timeout(1.0):
                await writer.wait_closed()


async def _converse(
    server: Server,
    method: str,
    path: str,
    body: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    timeout_s: float,
) -> AsyncGenerator[tuple[float, bytes], None]:
    protocol = h11.Connection(h11.CLIENT)
    headers = [
        ("host", f"{server.host}:{server.port}"),
        ("content-length", str(len(body))),
        ("content-type", "application/json"),
        ("connection", "close"),
        *server.headers,
    ]
    head = h11.Request(method=method, target=server.base_path + path, headers=headers)
    writer.write((protocol.send(head) or b"") + (protocol.send(h11.Data(data=body)) or b""))
    writer.write(protocol.send(h11.EndOfMessage()) or b"")
    async with asyncio.timeout(timeout_s):
        await writer.drain()
    status, wrong, n_bytes, is_over = 0, b"", 0, False
    while True:
        try:
            event = protocol.next_event()
        except h11.RemoteProtocolError as error:
            raise ExchangeFailed("died" if is_over else "garbage", str(error)) from None
        if event is h11.NEED_DATA:
            async with asyncio.timeout(timeout_s):
                received = await reader.read(1 << 16)
            came_s = time.perf_counter()
            n_bytes, is_over = n_bytes + len(received), not received
            if n_bytes > _MOST_BYTES:
                raise ExchangeFailed("garbage", f"an answer of more than {_MOST_BYTES} bytes")
            protocol.receive_data(received)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            if status == 200:
                yield came_s, bytes(event.data)
            else:
                wrong += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            break
        elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            raise ExchangeFailed("died", "the connection ended before the answer")
    if status != 200:
        raise ExchangeFailed("status", f"{status}: {wrong[:200].decode(errors='replace')}")


async def events(pieces: AsyncGenerator[tuple[float, bytes], None]) -> AsyncGenerator[tuple[float, str], None]:
    """Give the `data:` of each server-sent event in a body, with the time its last piece came."""
    rest = b""
    async for came_s, piece in pieces:
        rest += piece
        *lines, rest = rest.split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                try:
                    yield came_s, line[5:].strip().decode()
                except UnicodeDecodeError:
                    raise ExchangeFailed("garbage", "an event that is not UTF-8") from None
