"""How the process's log looks: a line of text or an object of JSON each, with the id of the request it is about.

The id comes from the task that logs, so every line has it that is written while a request is answered, whoever writes
it; threads of the server inherit it. No key is ever logged: of a request's head only its method and path are.
"""

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ConfigError

# The request that this task answers; "" outside of one. `gate` writes it.
current_request_id: Final[ContextVar[str]] = ContextVar("tiercel_request_id", default="")

_TEXT: Final = "%(levelname)s %(asctime)s %(name)s%(about)s: %(message)s"


class RequestIdFilter(logging.Filter):
    """Gives each record its request's id, as `request_id`, and as `about` for people. Refuses none."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add to a record."""
        request_id = current_request_id.get()
        record.request_id = request_id
        record.about = f" [{request_id}]" if request_id else ""
        return True


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON; what is given as `extra={"fields": {...}}` stands beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Give the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", "")
        if request_id:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(settings: ServerSettings) -> None:
    """Make this process log as the settings say, on standard error. For the process's owner; tests make their own.

    Raises: ConfigError: the configuration file cannot be read, or is none.
    """
    if settings.log_config_file is not None:
        _configure(Path(settings.log_config_file))
        return
    handler = logging.StreamHandler()
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)


def _configure(path: Path) -> None:
    """Follow a file for `dictConfig`. It may name our filter and formatter, as `"()": "tiercel.api.http.logs.…"`."""
    from logging.config import dictConfig

    try:
        wanted = json.loads(path.read_text("utf-8"))
        dictConfig(wanted)
    except OSError as error:
        raise ConfigError(f"log_config_file: {path}: {error.strerror}; a file of JSON is needed") from error
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(
            f"log_config_file: {path}: {error}; JSON as logging.config.dictConfig takes it is needed"
        ) from error
