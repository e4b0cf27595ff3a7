"""Runs the HTTP server: takes its address, builds the engine, serves, and drains when told to stop.

States: bound (connections wait; a port in use is told before a model is loaded; a signal ends it at once) -> serving ->
draining (SIGTERM or SIGINT: accepts nothing more, running requests go on for `shutdown_s`, then end with "abort"; a
second signal is that moment) -> ended. The engine's death ends the server too, so that whoever supervises it starts it
again.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn

from tiercel.api.http.address import BACKLOG, Address, make_room, take_address
from tiercel.api.http.app import make_app
from tiercel.api.http.connection import Connection
from tiercel.api.http.facade import EngineFacade
from tiercel.api.http.gate import Gate
from tiercel.api.http.settings import ServerSettings
from tiercel.api.http.stats_log import keep_logging
from tiercel.api.http.tls import WATCH_S, Tls

_log = logging.getLogger(__name__)

_WATCH_S: Final = 1.0
# After the last abort, streams only write what there is; a reader who takes nothing does not keep the process.
_LAST_WRITES_S: Final = 3


def serve(settings: ServerSettings, build: Callable[[], tuple[EngineFacade, ServerSettings]]) -> int:
    """Serve until a signal, and return the process's exit code: 0 after a drain, 1 when it could not be.

    `build` finds the model and makes the engine, once the address is taken; what it raises is raised. Its settings are
    these with the name of what it found.

    Raises: ConfigError: the settings' files for TLS, or its middleware, are not what they should be.
    """
    tls = Tls(settings) if settings.has_tls else None
    make_room(settings.n_connections_max)
    try:
        address = take_address(settings)
    except OSError as error:
        where, flag = (settings.uds, "--uds") if settings.uds else (f"{settings.host}:{settings.port}", "--port")
        print(
            f"tiercel serve: {where} cannot be listened on: {error.strerror or error}; choose another with {flag}",
            file=sys.stderr,
        )
        return 1
    try:
        with _ended_by_sigterm():
            engine, settings = build()
        try:
            return asyncio.run(_run(settings, engine, address, tls))
        finally:
            engine.close()
    finally:
        address.close()


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """While a model is loaded, let SIGTERM end the process as an exit does: with what is taken given back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    is_ended = False

    def end(number: int, frame: object) -> None:
        # Says nothing: what it interrupts may be writing to the same stream, which may not be entered twice.
        nonlocal is_ended
        del number, frame
        is_ended = True
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit:
        if is_ended:
            _say("tiercel serve: stopped before it served")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def server_config(app: Gate, tls: Tls | None = None) -> uvicorn.Config:
    """Give uvicorn's settings for an app: HTTP/1.1 only, nothing trusted from a proxy, and requests logged by us."""
    settings = app.service.settings
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_s) + _LAST_WRITES_S,
        # Twice what the gate takes, so that it is the gate that refuses, and in words.
        h11_max_incomplete_event_size=2 * settings.header_bytes_max,
    )
    config.load()
    if tls is not None:
        config.ssl = tls.context
    return config


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
        self.stop()
        self._loop.call_later(shutdown_s, self._service.abort_all)
        _say(f"tiercel serve: stopping; {self._service.n_open} requests may go on for {shutdown_s:g} s")

    def stop(self) -> None:
        """Accept nothing more, and end when nothing is under way."""
        self._service.begin_drain()
        self._server.should_exit = True


async def _run(settings: ServerSettings, engine: EngineFacade, address: Address, tls: Tls | None) -> int:
    app = make_app(engine, settings)
    loop = asyncio.get_running_loop()
    server = _Server(server_config(app, tls), lambda: _announce(settings, address))
    stopper = _Stopper(app, server, loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Without a main thread or on other systems, whoever embeds the server stops it.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, stopper.on_signal)
    tasks = [asyncio.create_task(_watch(engine, stopper))]
    if settings.has_stats_log and settings.stats_interval_s:
        logging_ = keep_logging(lambda: engine.client.snapshot, settings.stats_interval_s)
        tasks.append(asyncio.create_task(logging_))
    if tls is not None and settings.enable_ssl_refresh:
        tasks.append(asyncio.create_task(_keep_fresh(tls)))
    try:
        await server.serve(sockets=[address.listener])
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
    _say("tiercel serve: the engine has died; see its error above; the server ends")
    stopper.stop()


def _say(text: str) -> None:
    """Tell standard error. Whoever read it may be gone, as `head` is: then nobody is told any more, and what could not
    be written does not make the process's end a failure.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


async def _keep_fresh(tls: Tls) -> None:
    """Look after the certificate, until cancelled."""
    while True:
        await asyncio.sleep(WATCH_S)
        tls.refresh()


def _announce(settings: ServerSettings, address: Address) -> None:
    page = f"; to chat, open {address.url.removesuffix('v1')}" if settings.has_page and settings.uds is None else ""
    print(f"tiercel serve: {settings.model_id} at {address.url}{page}", file=sys.stderr, flush=True)
