"""What a person does with a disk tier's folder: look, verify, clear, export. Knows no tier and no identity beforehand.

An engine may use the folder meanwhile: files appear whole and may vanish at any time, which is no error here. No
symbolic link is followed. The format is `docs/formats/kv_disk.md`.
"""

import json
import os
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from tiercel.base.errors import ConfigError
from tiercel.kv.tiers.disk_files import (
    ABOUT,
    INDEX,
    LOCK,
    ObjectFile,
    identity_folders,
    is_temporary,
    is_used,
    object_files,
    shards,
)
from tiercel.kv.tiers.record import InvalidRecord, read_foreign


@dataclass(frozen=True, slots=True)
class IdentityStat:
    """What one model's folder holds. Times are seconds of Unix time."""

    name: str
    about: str
    page_size_tokens: int | None
    n_objects: int
    n_bytes: int
    n_being_written: int  # or left by a process that died
    oldest_s: float | None
    newest_s: float | None
    is_used: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What reading one object found: `reason` says why it is damaged, or is None."""

    file: ObjectFile
    reason: str | None
    kind: str = ""  # group and dtype
    is_expired: bool = False


def find_identities(path: Path, only: str | None = None) -> list[Path]:
    """Return the folders of identities under a disk tier's `path`, those whose name begins with `only`; sorted.

    Raises:
        ConfigError: `path` is no folder, holds other things and no identity, or nothing begins with `only`.
        OSError: it cannot be read.
    """
    if not path.is_dir():
        what = "no folder" if path.exists() else "nothing there"
        raise ConfigError(f"cache: {path}: {what}; need the folder that a disk tier's `path` names")
    found = identity_folders(path)
    if not found and any(path.iterdir()):
        raise ConfigError(
            f"cache: {path}: it holds no model's folder of a disk tier but other things; "
            "need the folder that a disk tier's `path` names"
        )
    if only is None:
        return found
    chosen = [folder for folder in found if folder.name.startswith(only)]
    if not chosen:
        known = ", ".join(folder.name for folder in found) or "nothing"
        raise ConfigError(f"cache: {path}: no model's folder begins with {only!r}; there are {known}")
    return chosen


def examine(folder: Path) -> IdentityStat:
    """Count what an identity's folder holds, without reading an object."""
    n_objects, n_bytes, oldest_s, newest_s = 0, 0, None, None
    for file in object_files(folder):
        n_objects += 1
        n_bytes += file.n_bytes
        oldest_s = file.written_s if oldest_s is None else min(oldest_s, file.written_s)
        newest_s = file.written_s if newest_s is None else max(newest_s, file.written_s)
    about = _about(folder)
    size = about.get("page_size_tokens")
    return IdentityStat(
        folder.name,
        _printable(str(about.get("about") or about.get("model_digest") or "")),
        size if isinstance(size, int) else None,
        n_objects,
        n_bytes,
        len(list(_temporaries(folder))),
        oldest_s,
        newest_s,
        is_used(folder),
    )


def verify(folder: Path) -> Iterator[Verdict]:
    """Read every object of an identity and say whether it is what its name and its folder promise."""
    return (verdict for verdict, _ in _read_all(folder))


def clear(folder: Path) -> int:
    """Remove an identity's objects and, if no engine uses it, its folder; return the objects' bytes.

    Raises:
        OSError: something cannot be removed.
    """
    n_bytes = 0
    for file in object_files(folder):
        file.path.unlink(missing_ok=True)
        n_bytes += file.n_bytes
    if is_used(folder):
        return n_bytes
    for path in [*_temporaries(folder), *(folder / name for name in (INDEX, ABOUT, LOCK))]:
        path.unlink(missing_ok=True)
    with suppress(OSError):  # not empty: an engine has begun to use it, or somebody put another thing there
        for shard in shards(folder):
            (folder / shard).rmdir()
        folder.rmdir()
    return n_bytes


def export(folder: Path, to: Path) -> Iterator[Verdict]:
    """Copy an identity's objects so that `to` can be a disk tier's path; damaged ones are told, and left out.

    `to` is a folder, new or with other models, or, by a name that ends in .tar, an archive to be unpacked into one.

    Raises:
        ConfigError: `to` exists and is no such folder, or holds this model already.
        OSError: it cannot be written.
    """
    is_archive = to.suffix == ".tar"
    taken = to if is_archive or (to.exists() and not to.is_dir()) else to / folder.name
    if taken.exists():
        raise ConfigError(f"cache: {taken} exists; need a new place to export to")
    return _export(folder, _TarSink(to) if is_archive else _FolderSink(to))


def _export(folder: Path, sink: "_TarSink | _FolderSink") -> Iterator[Verdict]:
    with sink:
        for name in (ABOUT, INDEX):
            with suppress(FileNotFoundError):
                sink.put(f"{folder.name}/{name}", _read(folder / name), 0.0)
        for verdict, record in _read_all(folder):
            if verdict.reason is None:
                path = verdict.file.path
                sink.put(f"{folder.name}/{path.parent.name}/{path.name}", record, verdict.file.written_s)
            yield verdict


def _read_all(folder: Path) -> Iterator[tuple[Verdict, bytes]]:
    for file in object_files(folder):
        try:
            record = _read(file.path)
        except FileNotFoundError:
            continue  # an engine gave it up
        except OSError as error:
            yield Verdict(file, f"it cannot be read: {error.strerror}"), b""
        else:
            yield _judge(folder, file, record), record


class _FolderSink:
    def __init__(self, to: Path) -> None:
        self._to = to

    def __enter__(self) -> None:
        self._to.mkdir(mode=0o700, parents=True, exist_ok=True)

    def __exit__(self, *error: object) -> None:
        pass

    def put(self, name: str, data: bytes, written_s: float) -> None:
        path = self._to / name
        for parent in reversed(path.relative_to(self._to).parents[:-1]):
            (self._to / parent).mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)


class _TarSink:
    def __init__(self, to: Path) -> None:
        self._to = to
        self._folders: set[str] = set()

    def __enter__(self) -> None:
        fd = os.open(self._to, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._tar = tarfile.open(fileobj=os.fdopen(fd, "w+b"), mode="w", format=tarfile.PAX_FORMAT)

    def __exit__(self, *error: object) -> None:
        self._tar.close()
        assert self._tar.fileobj is not None
        self._tar.fileobj.close()

    def put(self, name: str, data: bytes, written_s: float) -> None:
        for parent in [str(p) for p in reversed(Path(name).parents) if str(p) not in (".", *self._folders)]:
            info = tarfile.TarInfo(parent)
            info.type, info.mode = tarfile.DIRTYPE, 0o700
            self._tar.addfile(info)
            self._folders.add(parent)
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.mtime = len(data), 0o600, written_s
        self._tar.addfile(info, BytesIO(data))


def _judge(folder: Path, file: ObjectFile, record: bytes) -> Verdict:
    try:
        head, identity_name, kind = read_foreign(record)
    except (InvalidRecord, ValueError, KeyError, TypeError, RecursionError) as error:
        return Verdict(file, str(error))
    if identity_name != folder.name:
        return Verdict(file, f"it belongs to {identity_name}", kind)
    if head.key != file.key:
        return Verdict(file, "it is another object's", kind)
    return Verdict(file, None, kind, head.ends_s is not None and head.ends_s <= time.time())


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        return file.read()


def _about(folder: Path) -> dict[str, object]:
    try:
        about = json.loads(_read(folder / ABOUT))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def _printable(text: str) -> str:
    """Return what a terminal may be shown of a file that somebody else may have written."""
    return "".join(char if char.isprintable() else "?" for char in text[:200])


def _temporaries(folder: Path) -> Iterator[Path]:
    for name in ["", *shards(folder)]:
        with suppress(FileNotFoundError):
            for entry in os.scandir(folder / name):
                if is_temporary(entry.name) and entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)
