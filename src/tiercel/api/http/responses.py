"""Answers in one piece: JSON, and errors in their one shape. Knows nothing of what is answered."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tiercel.api import errors
from tiercel.base.errors import QueueFull, TiercelError

# How soon a refused client may try again: a step or two, and a request's length under load, are about a second.
RETRY_AFTER: Final[Mapping[str, str]] = {"retry-after": "1"}


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Give a value as JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def error_response(error: TiercelError) -> Response:
    """Answer an error that was raised on purpose."""
    return json_response(
        errors.body_of(error), errors.status_of(error), RETRY_AFTER if isinstance(error, QueueFull) else None
    )


def http_error_response(error: HTTPException) -> Response:
    """Answer a status that belongs to HTTP: a missing route, a wrong method, a body too large."""
    return json_response(errors.error_body(error.status_code, error.detail), error.status_code, error.headers)


def unexpected_response(request_id: str) -> Response:
    """Answer an error that nobody foresaw; it is in the log, not in the answer."""
    return json_response(errors.error_body(500, errors.UNEXPECTED.format(request_id)), 500)
