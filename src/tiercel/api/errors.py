"""What a client is told when something goes wrong: a row for each error of `base.errors`, and one formatter for all.

Knows no transport: `http.responses` makes answers of it. A message never carries a path of this machine, an address in
memory, or the text of an error that was not raised for clients to read.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from tiercel.base import errors

# Status -> the `type` that OpenAI's clients and vLLM's users know it by.
TYPES: Final[Mapping[int, str]] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    499: "ClientClosedRequestError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}

# The same, as Anthropic's clients know it.
ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
}

# Status, message and field at fault -> the body of an answer.
Shape = Callable[[int, str, str | None], dict[str, Any]]

# The nearest row up the tree counts, so that a new error has an answer before it has a row (a test asks for the row).
STATUSES: Final[Mapping[type[errors.TiercelError], int]] = {
    errors.TiercelError: 500,
    errors.ConfigError: 500,  # of this server, not of the request
    errors.UnknownOption: 400,
    errors.ModelFileError: 500,
    errors.UnsupportedModel: 501,
    errors.ModelNotFound: 404,
    errors.DownloadError: 500,
    errors.ShapeError: 500,
    errors.RequestError: 400,
    errors.PromptTooLong: 400,
    errors.UnknownModel: 404,
    errors.UnknownResponse: 404,
    errors.QueueFull: 429,
    errors.RequestFailed: 500,
    errors.NoTokenAllowed: 400,  # seen only when the text came there, and yet of the request alone
    errors.FormFailed: 400,
    errors.TrainingFailed: 500,  # of a command; no server trains
    errors.OutOfPages: 500,
    errors.EngineDead: 500,
}

_ADDRESS: Final = re.compile(r"\s*\bat 0x[0-9a-fA-F]+|\b0x[0-9a-fA-F]{6,}")
_PATH: Final = re.compile(r"(?<![\w./])(?:[A-Za-z]:)?[/\\][\w.\-+@]+(?:[/\\][\w.\-+@]+)+")
_CHARS_MAX: Final = 2000
UNEXPECTED: Final = (
    "the server failed on this request; the reason is in its log; send it again, or report request id {}"
)


def status_of(error: errors.TiercelError) -> int:
    """Give the HTTP status of an error."""
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Give the shape that errors have on every route but Anthropic's."""
    kind = TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def anthropic_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Give Anthropic's shape, which has no place for `param`: messages begin with it."""
    del param
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def body_of(error: errors.TiercelError, shape: Shape = error_body) -> dict[str, Any]:
    """Give the body for an error that was raised on purpose."""
    return shape(*told_of(error))


def told_of(error: errors.TiercelError) -> tuple[int, str, str | None]:
    """Give the status, message and field at fault of an error that was raised on purpose."""
    param = error.param if isinstance(error, errors.RequestError) else None
    if param is None and isinstance(error, errors.UnknownModel):
        param = "model"
    return status_of(error), cleaned(str(error)), param


def cleaned(message: str) -> str:
    """Take addresses and paths of this machine out of a message, and its end if it is long."""
    text = _PATH.sub("<path>", _ADDRESS.sub("", message))
    return text if len(text) <= _CHARS_MAX else f"{text[:_CHARS_MAX]}..."
