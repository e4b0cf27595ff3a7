"""Layers of the operator's own around the routes: ASGI classes or functions, named by their import path.

They are inside the gate: what they see has an id, a key and bounded headers, and what they raise is answered as any
error. Code named here is run; names come from the command line and the configuration file, never from a request.
"""

import importlib
import inspect
import logging
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiercel.api.http.responses import shape_of, unexpected_response
from tiercel.base.errors import ConfigError

_log = logging.getLogger(__name__)


def with_layers(app: ASGIApp, paths: Sequence[str]) -> ASGIApp:
    """Put the layers that are named by `paths` around `app`, the first as the outermost.

    Raises: ConfigError: a path names nothing, or no layer.
    """
    if not paths:
        return app
    layered = app
    for path in reversed(paths):
        layered = _layer(layered, path)
    return _Answering(layered)


def _layer(app: ASGIApp, path: str) -> ASGIApp:
    found = _find(path)
    if inspect.isclass(found):
        return _made(found, app, path)
    if inspect.iscoroutinefunction(found):
        from starlette.middleware.base import BaseHTTPMiddleware

        return BaseHTTPMiddleware(app, dispatch=found)
    raise ConfigError(
        f"middleware: {path} is neither a class nor an async function; an ASGI class, or a function of "
        "(request, call_next), is needed"
    )


def _made(kind: Any, app: ASGIApp, path: str) -> ASGIApp:
    try:
        layer: ASGIApp = kind(app)
    except TypeError as error:
        raise ConfigError(f"middleware: {path} cannot be made ({error}); a class of (app) is needed") from error
    return layer


def _find(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"middleware: {path} cannot be imported ({error}); package.module.name is needed, of something that "
            "Python finds"
        ) from error


class _Answering:
    """Answers what a layer raises."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def told(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, told)
        except Exception:  # a request's boundary: logged with its id, and answered to it alone
            request_id = scope["state"]["request_id"]
            _log.error("request %s: a middleware failed", request_id, exc_info=True)
            if has_begun:
                raise
            await unexpected_response(request_id, shape_of(scope))(scope, receive, send)
