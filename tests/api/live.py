"""A server on a real port of this machine, run by a thread, and clients that behave badly."""

import asyncio
import socket
import threading
from contextlib import contextmanager

from kit import DEADLINE_S, wait_until

from tiercel.api.http.address import take_address
from tiercel.api.http.server import _Server, server_config
from tiercel.api.http.tls import Tls


class LiveServer:
    """Serves a rig over a socket until closed."""

    def __init__(self, rig):
        self.rig = rig
        self.tls = Tls(rig.settings) if rig.settings.has_tls else None
        self._address = take_address(rig.settings)
        listener = self._address.listener
        self.port = None if rig.settings.uds else listener.getsockname()[1]
        self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"
        started = threading.Event()
        self.server = _Server(server_config(rig.app, self.tls), started.set)
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[listener])))
        self._thread.start()
        assert started.wait(DEADLINE_S)

    def close(self):
        self.server.should_exit = True
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._address.close()

    @property
    def n_connections(self):
        return len(self.server.server_state.connections)

    @contextmanager
    def connection(self, *, receive_bytes=None):
        """Open a raw connection; a small `receive_bytes` makes a slow reader felt at once."""
        raw = socket.socket()
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        raw.settimeout(DEADLINE_S)
        raw.connect(("127.0.0.1", self.port))
        try:
            yield raw
        finally:
            raw.close()


def http_post(path, body, *headers):
    """Write a request by hand."""
    head = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + body


def read_until(raw, mark):
    """Read until a mark has come."""
    data = b""
    while mark not in data:
        piece = raw.recv(65536)
        assert piece, f"closed before {mark!r}: {data[-300:]!r}"
        data += piece
    return data


__all__ = ["LiveServer", "http_post", "read_until", "wait_until"]
