"""What pages of other origins may do with this server: nothing, unless it was told so. Knows no route and no key.

It stands before the key: a browser asks whether it may ask (a preflight, without a key), and an error must say that the
page may read it.
"""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from tiercel.api.http.responses import http_error_response
from tiercel.api.http.settings import ServerSettings

# Besides those that a page may always read.
_EXPOSED = ("x-request-id", "request-id", "retry-after")


def with_origins(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """Give `app` as the settings' origins may use it."""
    if not settings.allowed_origins:
        return app
    return _Origins(
        app,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=_EXPOSED,
    )


class _Origins(CORSMiddleware):
    """Starlette's, with our errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        headers = {name: response.headers[name] for name in response.headers if name.startswith(("access", "vary"))}
        message = (
            f"origin: {bytes(response.body).decode()}; see --allowed-origins, --allowed-methods, --allowed-headers"
        )
        return http_error_response(HTTPException(400, message, headers))
