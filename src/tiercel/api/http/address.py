"""Where a server listens: a TCP port or a Unix socket, taken before anything is loaded. Knows no engine.

Connections to a taken address wait until somebody accepts them.
"""

import contextlib
import logging
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Final

from tiercel.api.http.settings import ServerSettings

_log = logging.getLogger(__name__)

BACKLOG: Final = 2048
_PROBE_S: Final = 1.0
_N_OTHER_FILES: Final = 256  # open beside connections: the model's, the log's, those of threads and libraries


class Address:
    """A taken address. Closed once, last."""

    def __init__(self, listener: socket.socket, url: str, uds: Path | None = None) -> None:
        self.listener = listener
        self.url = url  # for people; of a Unix socket it is its path
        self._uds = uds
        self._inode = uds.stat().st_ino if uds is not None else 0

    def close(self) -> None:
        """Give it back. A socket's file goes too, unless another server has put its own there."""
        self.listener.close()
        if self._uds is not None:
            with contextlib.suppress(OSError):
                if self._uds.stat().st_ino == self._inode:
                    self._uds.unlink()


def make_room(n_connections: int) -> None:
    """Let this process have so many connections open, as far as the system's administrator lets it."""
    if sys.platform == "win32":
        return
    import resource

    wanted = n_connections + _N_OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft in (-1, resource.RLIM_INFINITY) or soft >= wanted:
        return
    most = wanted if hard in (-1, resource.RLIM_INFINITY) else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        _log.warning(
            "%d files may be open, and %d connections may need %d: raise ulimit -n", most, n_connections, wanted
        )


def take_address(settings: ServerSettings) -> Address:
    """Take the address of the settings.

    Raises: OSError: it is in use, not this machine's, or there is something else.
    """
    return _take_uds(Path(settings.uds)) if settings.uds is not None else _take_port(settings)


def _take_port(settings: ServerSettings) -> Address:
    found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted connections inherit it: one whose peer takes nothing is cut by the system, buffer and all.
            stall_ms = int(settings.write_stall_s * 1000)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
        listener.bind(address)
        _listen(listener)
    except OSError:
        listener.close()
        raise
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return Address(listener, f"{'https' if settings.has_tls else 'http'}://{shown}:{port}{settings.root_path}/v1")


def _take_uds(path: Path) -> Address:
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # before it listens: until then nobody gets in
        _listen(listener)
    except OSError:
        listener.close()
        raise
    return Address(listener, str(path), path)


def _listen(listener: socket.socket) -> None:
    listener.listen(BACKLOG)
    listener.setblocking(False)


def _remove_stale(path: Path) -> None:
    """Remove a socket that its server has left behind; whatever else is there stays, and is told by `bind`."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise FileExistsError(17, f"{os.strerror(17)}, and is no socket", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError:
            pass  # it answers in some way, or is not ours to open
