"""TLS: a server's certificate, and reading it again when its files change, without a connection less.

A connection takes the newest context that could be read, at its handshake, and keeps it. Files that are broken, or of
which only half is written, change nothing: the log says so once, and they are tried again when they change. Knows no
server. Owner: the server's event loop.
"""

import logging
import ssl
from pathlib import Path
from typing import Final

from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ConfigError

_log = logging.getLogger(__name__)

WATCH_S: Final = 2.0  # between two looks at the files: a certificate is replaced days before it ends

_Stamp = tuple[tuple[int, int, int] | None, ...]


class Tls:
    """The contexts of one server. `context` is what it listens with, from start to end."""

    def __init__(self, settings: ServerSettings) -> None:
        """Read the files.

        Raises: ConfigError: they cannot be read, or do not belong together.
        """
        self._settings = settings
        self._stamp = self._look()
        try:
            self.context, self._newest = make_context(settings), make_context(settings)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"ssl_certfile: {_why(error)}; a certificate's chain in PEM is needed, and its key, in the same "
                "file or as ssl_keyfile"
            ) from error
        self.context.sni_callback = self._choose

    def refresh(self) -> bool:
        """Look whether the files have changed, and read them if so; say whether there is a new certificate."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self._newest = make_context(self._settings)
        except (OSError, ValueError) as error:
            _log.error("the new certificate is not used, the old one stays: %s", _why(error))
            return False
        _log.info("new connections get the new certificate")
        return True

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Give a handshake the newest certificate, whatever name its client asks for."""
        del name, context
        connection.context = self._newest

    def _look(self) -> _Stamp:
        settings = self._settings
        return tuple(map(_stamp, (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)))


def make_context(settings: ServerSettings) -> ssl.SSLContext:
    """Make a context from the settings' files.

    Raises: OSError, ValueError: a file is missing, broken, or does not belong to the others.
    """
    assert settings.ssl_certfile is not None, "tls: asked for without a certificate"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, _no_password)
    context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
    if settings.ssl_ca_certs is not None:
        context.load_verify_locations(settings.ssl_ca_certs)
    if settings.ssl_ciphers is not None:
        context.set_ciphers(settings.ssl_ciphers)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_password() -> str:
    # Without this, OpenSSL would ask the terminal and the server would wait for it.
    raise ValueError("the key is encrypted; one that is not is needed")


def _stamp(path: str | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"{getattr(error, 'reason', None) or error.args[-1]}".lower().replace("_", " ")
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
