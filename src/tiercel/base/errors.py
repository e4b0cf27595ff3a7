"""The tree of errors. Every error Tiercel raises on purpose is here; none carries a path's content or a secret.

A message has the form `where: what was got; what is needed; what to do`. Each class also derives from the built-in
it resembles, so that callers who do not know Tiercel catch what they expect. `api.http.errors` gives each a status.
"""


class TiercelError(Exception):
    """Root of all errors raised on purpose."""


class ConfigError(TiercelError, ValueError):
    """A setting's value is wrong, or two settings contradict each other."""


class UnknownOption(ConfigError, TypeError):
    """An option that does not exist, or that was removed; the message names the nearest one or the reason."""


class ModelFileError(TiercelError, ValueError):
    """A model file is truncated, inconsistent or hostile."""


class UnsupportedModel(TiercelError, NotImplementedError):
    """A model, format or field that changes the arithmetic and that Tiercel does not implement."""


class ModelNotFound(TiercelError, FileNotFoundError):
    """A model name that names no folder, file, catalogue entry or reachable hub repository."""


class DownloadError(TiercelError, OSError):
    """A download failed, or what arrived is not what the catalogue promises."""


class ShapeError(TiercelError, ValueError):
    """An op's operands do not fit its contract."""


class RequestError(TiercelError, ValueError):
    """A request is refused. `param` is the field at fault, in the request's own words, or None."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """The prompt, or prompt and max_tokens together, exceed what one sequence may hold."""


class UnknownModel(RequestError, LookupError):
    """A request names a model that this server does not serve."""


class UnknownResponse(RequestError, LookupError):
    """A request names a stored response that is not there: it never was, it is gone, or it is another key's."""


class QueueFull(RequestError):
    """The waiting queue is at its bound; the same request may succeed later."""


class RequestFailed(TiercelError, RuntimeError):
    """A request that was accepted could not be finished; the message says why. Others are not harmed."""


class NoTokenAllowed(RequestFailed):
    """A request's own constraints contradict each other: at some place of its text no token may come."""


class FormFailed(RequestFailed):
    """A request's form cost more than its bound while its answer was made: the form's doing, and no server's fault."""


class TrainingFailed(TiercelError, RuntimeError):
    """Training a drafter went wrong by itself: its numbers are none any more. What was saved before is kept."""


class OutOfPages(TiercelError, MemoryError):
    """The page pool cannot hold what is asked of it."""


class EngineDead(TiercelError, RuntimeError):
    """The engine's thread has ended; no request can be served by it any more."""
