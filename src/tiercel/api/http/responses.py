"""Answers in one piece: JSON, and errors in the shape of their route. Knows nothing of what is answered."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tiercel.api import errors
from tiercel.api.errors import Shape, anthropic_body, error_body
from tiercel.api.http.auth import route_path
from tiercel.base.errors import QueueFull, TiercelError

# How soon a refused client may try again: a step or two, and a request's length under load, are about a second.
RETRY_AFTER: Final[Mapping[str, str]] = {"retry-after": "1"}


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Give a value as JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def error_response(error: TiercelError, shape: Shape = error_body) -> Response:
    """Answer an error that was raised on purpose."""
    headers = RETRY_AFTER if isinstance(error, QueueFull) else None
    return json_response(errors.body_of(error, shape), errors.status_of(error), headers)


def http_error_response(error: HTTPException, shape: Shape = error_body) -> Response:
    """Answer a status that belongs to HTTP: a missing route, a wrong method, a body too large."""
    return json_response(shape(error.status_code, error.detail, None), error.status_code, error.headers)


def unexpected_response(request_id: str, shape: Shape = error_body) -> Response:
    """Answer an error that nobody foresaw; it is in the log, not in the answer."""
    return json_response(shape(500, errors.UNEXPECTED.format(request_id), None), 500)


def shape_of(scope: Mapping[str, Any]) -> Shape:
    """Give the shape of a request's errors: that which clients of its route read."""
    return anthropic_body if is_anthropic(route_path(scope)) else error_body


def is_anthropic(path: str) -> bool:
    """Whether a path is one that Anthropic's clients ask."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")
