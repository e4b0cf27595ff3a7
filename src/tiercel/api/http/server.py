"""Runs the HTTP server: takes its address, builds the engine, serves, and drains when told to stop.

States: bound (connections wait; a port in use is told before a model is loaded) -> serving -> draining (SIGTERM or
SIGINT: accepts nothing more, running requests go on for `shutdown_s`, then end with "abort"; a second signal is that
moment) -> ended. The engine's death ends the server too, so that whoever supervises it starts it again.
"""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn

from tiercel.api.http.app import make_app
from tiercel.api.http.facade import EngineFacade
from tiercel.api.http.gate import Gate
from tiercel.api.http.settings import ServerSettings
from tiercel.api.http.stats_log import keep_logging

_log = logging.getLogger(__name__)

_BACKLOG: Final = 2048
_WATCH_S: Final = 1.0
# After the last abort, streams only write what there is; a reader who takes nothing does not keep the process.
_LAST_WRITES_S: Final = 3


def serve(settings: ServerSettings, build: Callable[[], EngineFacade]) -> int:
    """Serve until a signal, and return the process's exit code: 0 after a drain, 1 when it could not be.

    `build` makes the engine, once the address is taken; what it raises is raised.
    """
    try:
        listener = bind(settings)
    except OSError as error:
        print(
            f"tiercel serve: {settings.host}:{settings.port} cannot be listened on: {error.strerror or error}; "
            "choose another with --port",
            file=sys.stderr,
        )
        return 1
    with listener:
        engine = build()
        try:
            return asyncio.run(_run(settings, engine, listener))
        finally:
            engine.close()


def bind(settings: ServerSettings) -> socket.socket:
    """Take the address. Connections wait until somebody accepts them.

    Raises: OSError: it is in use, or not this machine's.
    """
    found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted connections inherit it: one whose peer takes nothing is cut by the system, buffer and all.
            stall_ms = int(settings.write_stall_s * 1000)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def server_config(app: Gate) -> uvicorn.Config:
    """Give uvicorn's settings for an app: HTTP/1.1 only, nothing trusted from a proxy, no log of each request."""
    settings = app.service.settings
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_s) + _LAST_WRITES_S,
        h11_max_incomplete_event_size=settings.header_bytes_max,
    )


class _Server(uvicorn.Server):
    """uvicorn's server, with its signals left to us: it would end the process by the signal it got."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


class _Stopper:
    """Turns signals into a drain, then into its end."""

    def __init__(self, app: Gate, server: uvicorn.Server, loop: asyncio.AbstractEventLoop) -> None:
        self._service = app.service
        self._server = server
        self._loop = loop

    def on_signal(self) -> None:
        """Begin to drain; when that has begun, end it."""
        if self._service.is_draining:
            self._service.abort_all()
            return
        shutdown_s = self._service.settings.shutdown_s
        print(
            f"tiercel serve: stopping; {self._service.n_open} requests may go on for {shutdown_s:g} s", file=sys.stderr
        )
        self.stop()
        self._loop.call_later(shutdown_s, self._service.abort_all)

    def stop(self) -> None:
        """Accept nothing more, and end when nothing is under way."""
        self._service.begin_drain()
        self._server.should_exit = True


async def _run(settings: ServerSettings, engine: EngineFacade, listener: socket.socket) -> int:
    app = make_app(engine, settings)
    loop = asyncio.get_running_loop()
    server = _Server(server_config(app), lambda: _announce(settings, listener))
    stopper = _Stopper(app, server, loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Without a main thread or on other systems, whoever embeds the server stops it.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, stopper.on_signal)
    tasks = [asyncio.create_task(_watch(engine, stopper))]
    if settings.has_stats_log and settings.stats_interval_s:
        logging_ = keep_logging(lambda: engine.client.snapshot, settings.stats_interval_s)
        tasks.append(asyncio.create_task(logging_))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        app.service.close()
    return 0 if engine.client.is_alive else 1


async def _watch(engine: EngineFacade, stopper: _Stopper) -> None:
    """Stop the server when its engine has died: no request can be served by it any more."""
    while engine.client.is_alive:
        await asyncio.sleep(_WATCH_S)
    _log.critical("the engine has died; the server ends")
    print("tiercel serve: the engine has died; see its error above; the server ends", file=sys.stderr)
    stopper.stop()


def _announce(settings: ServerSettings, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"tiercel serve: {settings.model_id} at http://{shown}:{port}/v1", file=sys.stderr, flush=True)
