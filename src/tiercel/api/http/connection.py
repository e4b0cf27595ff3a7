"""One connection of the server: uvicorn's, with an end for clients that do not send what they began.

uvicorn times a connection that waits for its next request, but neither one that never sends a first nor one that sends
a head a byte at a time; here both have `read_stall_s` for a whole head. Bodies are timed by `reading`, writes by `sse`.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from tiercel.api.http.gate import Gate


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

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._service.settings.read_stall_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
