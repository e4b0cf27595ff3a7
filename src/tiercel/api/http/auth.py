"""Who may ask: keys, compared in constant time, and the few paths that need none. Knows no route.

Everything is guarded but what is listed here, so that a new route is safe before anybody thinks of it. The path is the
one of the request line, never one rebuilt from headers.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tiercel.base.errors import ConfigError

# What a prober without a key may know: that the process lives, and which version it is.
OPEN_PATHS: Final = frozenset({"/health", "/ping", "/ready", "/version"})
ANYBODY: Final = b""
METRICS_PATHS: Final = frozenset({"/metrics", "/metrics/"})


class Keys:
    """The keys, as digests. Frozen; without any, everybody may ask."""

    def __init__(self, keys: Iterable[str], *, has_open_metrics: bool) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)
        self._open = OPEN_PATHS | METRICS_PATHS if has_open_metrics else OPEN_PATHS

    def owner_of(self, scope: Mapping[str, Any]) -> bytes | None:
        """Give who asks: the digest of the key that is shown, or ANYBODY where none is needed. None: nobody who may."""
        if not self._digests or route_path(scope) in self._open:
            return ANYBODY
        owner = None
        for shown in _shown_keys(scope["headers"]):
            digest = _digest(shown)
            for known in self._digests:  # all of them, so that the time tells nothing
                if hmac.compare_digest(digest, known):
                    owner = known
        return owner


def read_key_file(path: str) -> tuple[str, ...]:
    """Read keys from a file, one a line; blank lines, and those that begin with #, are none.

    Raises: ConfigError: it cannot be read, or holds no key. Nothing of the file is in the message.
    """
    try:
        lines = Path(path).expanduser().read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"got {path[:200]!r}: {error.strerror}; need a file with a key a line") from error
    except UnicodeDecodeError:
        raise ConfigError(f"got {path[:200]!r}, which is not text; need a file with a key a line") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError(f"got {path[:200]!r}, which holds no key; need one a line")
    return keys


def route_path(scope: Mapping[str, Any]) -> str:
    """Give the path that routes are compared with: the request's, without the prefix the server is mounted under."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    if root and (path == root or path.startswith(f"{root}/")):
        return path[len(root) :] or "/"
    return path


def _shown_keys(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[bytes]:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield token.strip()
        elif name == b"x-api-key":
            yield value.strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
