"""What every request passes first: an id, the key, the limits of its headers, and the count of what is under way.

Plain ASGI around the routes; knows none of them but which ones generate. What a handler raises beyond the foreseen is
answered in `app`; this only notes the status that went out. Before even the key stands `cross_origin`.
"""

import time
import uuid
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiercel.api.http.answer import is_good_id
from tiercel.api.http.auth import METRICS_PATHS, OPEN_PATHS, Keys, route_path
from tiercel.api.http.cross_origin import with_origins
from tiercel.api.http.logs import current_request_id
from tiercel.api.http.page import page_response
from tiercel.api.http.responses import RETRY_AFTER, http_error_response, is_anthropic, shape_of
from tiercel.api.http.tracing import HeaderWarner

if TYPE_CHECKING:
    from starlette.responses import Response

    from tiercel.api.http.service import Service

GENERATION_PATHS: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate"}
)
_NOT_COUNTED: Final = OPEN_PATHS | METRICS_PATHS | {"/load"}


class Gate:
    """The outermost layer of the app."""

    def __init__(self, app: ASGIApp, service: "Service") -> None:
        self.service = service
        self._app = app
        settings = service.settings
        self._untraced = HeaderWarner()
        self._keys = Keys(settings.keys, has_open_metrics=settings.has_open_metrics)
        self._entry = with_origins(self._http, settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            # A proxy may or may not take its prefix off; `route_path` does where it is still there.
            root = self.service.settings.root_path
            path = f"{root}/" if root and scope["path"] == root else scope["path"]
            await self._entry({**scope, "root_path": root, "path": path}, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_s = time.monotonic()
        status = 499  # what it stays when nothing could be sent
        request_id, has_own = _request_id(scope)
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "has_own_id": has_own, "handler": "none"}

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *((name, request_id.encode()) for name in id_headers)]
            await send(message)

        path = route_path(scope)
        id_headers = (b"x-request-id", b"request-id") if is_anthropic(path) else (b"x-request-id",)
        token = current_request_id.set(request_id)
        try:
            refusal = self._refusal(scope, path)
            if refusal is not None:
                await refusal(scope, receive, told)
            elif path in GENERATION_PATHS:
                with self._traced(scope, request_id):
                    await self._counted(scope, receive, told)
            else:
                await self._app(scope, receive, told)
        finally:
            elapsed_s = time.monotonic() - start_s
            if path not in _NOT_COUNTED:
                self.service.metrics.note_http(scope["state"]["handler"], _method(scope), status, elapsed_s)
            self.service.log.answered(_method(scope), path, status, elapsed_s)
            current_request_id.reset(token)

    def _traced(self, scope: Scope, request_id: str) -> AbstractContextManager[None]:
        if self.service.tracer is not None:
            return self.service.tracer.request(scope, request_id)
        self._untraced.look(scope)
        return nullcontext()

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.service.n_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.service.n_open -= 1

    def _refusal(self, scope: Scope, path: str) -> "Response | None":
        settings, headers = self.service.settings, scope["headers"]
        n_bytes = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > settings.n_headers_max or n_bytes > settings.header_bytes_max:
            return _refused(
                scope,
                431,
                f"headers: {len(headers)} of {n_bytes} bytes; at most {settings.n_headers_max} of "
                f"{settings.header_bytes_max} bytes are read; send fewer",
                {"connection": "close"},
            )
        names = {name for name, _ in headers}
        if b"content-length" in names and b"transfer-encoding" in names:
            # RFC 9112, 6.1: a proxy may have read the other length, so what follows may be another client's.
            return _refused(
                scope,
                400,
                "headers: got content-length and transfer-encoding; one of them is needed; leave one out",
                {"connection": "close"},
            )
        n_connections = self.service.n_connections
        if n_connections > settings.n_connections_max and path not in OPEN_PATHS:
            return _refused(
                scope,
                503,
                f"server: {n_connections} connections are open; at most {settings.n_connections_max} are served; try "
                "again later",
                {**RETRY_AFTER, "connection": "close"},
            )
        owner = self._keys.owner_of(scope)
        scope["state"]["owner"] = owner
        if owner is None:
            if path == "/" and settings.has_page and scope["method"] == "GET":
                return page_response(401)  # it asks for the key itself
            return _refused(
                scope,
                401,
                "key: none that this server knows; send one as Authorization: Bearer KEY, or as x-api-key: KEY",
                {"www-authenticate": "Bearer"},
            )
        if path in GENERATION_PATHS:
            if self.service.is_draining:
                return _refused(
                    scope,
                    503,
                    "server: it is shutting down; send the request to another, or later",
                    {**RETRY_AFTER, "connection": "close"},
                )
            if self.service.n_open >= settings.n_open_max:
                return _refused(
                    scope,
                    429,
                    f"server: {self.service.n_open} requests are under way, the most it takes; try again later",
                    dict(RETRY_AFTER),
                )
        return None


def _request_id(scope: Scope) -> tuple[str, bool]:
    """Give the request's id, and whether the client chose it; a bad one is replaced."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1").strip()
            if is_good_id(text):
                return text, True
            break
    return uuid.uuid4().hex, False


def _refused(scope: Scope, status: int, message: str, headers: dict[str, str]) -> "Response":
    return http_error_response(HTTPException(status, message, headers), shape_of(scope))


def _method(scope: Scope) -> str:
    """Give the method; what is none of the usual ones is one, so that a client cannot make up labels."""
    method: str = scope["method"]
    return method if method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS") else "other"
