"""One connection of the server: uvicorn's, with an end for clients that do not send what they began.

uvicorn times a connection that waits for its next request, but neither one that never sends a first nor one that sends
a head a byte at a time; here both have `read_stall_s` for a whole head. Bodies are timed by `reading`, writes by `sse`.
What is no HTTP is refused in the words of every other error. Nobody who only connects can flood the log.
"""

import asyncio
from typing import Any, Final

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from tiercel.api.errors import error_body
from tiercel.api.http.gate import Gate

# Connections beyond the bound that are still told so; more are closed unheard, before there are no files left.
_N_TOLD: Final = 128
_REFUSAL: Final = msgspec.json.encode(
    error_body(400, "request: what came is not HTTP/1.1, or its head is too long; send a request, as curl does")
)
_REFUSAL_HEADERS: Final = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(_REFUSAL)).encode()),
    (b"connection", b"close"),
]


class Connection(H11Protocol):
    """A connection. Its head's timer runs from its begin, or from a later head's first byte, to that head's end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        app = self.config.app
        assert isinstance(app, Gate), "connection: it serves another app than ours"
        self._service = app.service
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it, and begin to wait for its first head."""
        assert isinstance(transport, asyncio.Transport), "connection: got no transport to write to"
        super().connection_made(transport)
        self._service.n_connections += 1
        if self._service.n_connections > self._service.settings.n_connections_max + _N_TOLD:
            transport.abort()
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._service.n_connections -= 1
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, and see whether a head is whole now, or begun."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, and close."""
        del msg
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head = h11.Response(status_code=400, headers=_REFUSAL_HEADERS, reason=b"Bad Request")
            for event in (head, h11.Data(data=_REFUSAL), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            # It was the body that broke: whoever waits for it is told that the client is gone, and may not answer.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: anybody can ask for an upgrade, as often as they like; the request is served without."""

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._service.settings.read_stall_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
