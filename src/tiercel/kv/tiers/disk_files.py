"""The files of a disk tier: where an object's record lies and how it gets there whole. Knows no queue and no capacity.

    PATH/<identity>/<two hex digits of the key>/<64 hex digits of the key>.kv    one record (`kv.tiers.record`)
    PATH/<identity>/<two hex digits of the key>/.<key>.<random>.tmp             a record being written, locked
    PATH/<identity>/index                                                         hints for eviction, written at close
    PATH/<identity>/about.json                                                    what the objects are, for people
    PATH/<identity>/lock                                                          locked by every tier that uses it

A file gets its name only when all its bytes are written, by a rename. Nothing is synced to the medium: after a power
cut a named file may have lost bytes, and its checksums then say so. A writer holds a lock on its temporary file, so one
that nobody locks was left by a process that died, and `clean` removes it.
"""

import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from tiercel._native import Background, read_file
from tiercel.kv.tiers.buffers import BufferPool
from tiercel.kv.tiers.identity import KEY_BYTES
from tiercel.kv.tiers.interface import Bytes
from tiercel.kv.tiers.record import InvalidRecord, RecordFormat, RecordHead

_SUFFIX, _TEMP_SUFFIX = ".kv", ".tmp"
INDEX, ABOUT, LOCK = "index", "about.json", "lock"
_IDENTITY, _SHARD = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{2}")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_SMALL_BYTES = 4096  # a write that is over before another thread has begun it


class FileOps:
    """The operating system's calls that a disk tier makes. Tests derive from it to make them fail. Raises OSError.

    `reads_past_cache`: what the page cache does not have is read past it.

    What it takes to write an object runs on a thread of the core that gives way to every other, as nobody waits for it:
    a core that stores is one that the step's other threads wait for. The interpreter's lock is never held there.
    """

    def __init__(self, *, reads_past_cache: bool = True) -> None:
        self._reads_past_cache = reads_past_cache

    @cached_property
    def _background(self) -> Background:
        return Background()

    def writer_cpu_s(self) -> float:
        """Return how long a processor has worked for that thread."""
        return self._background.cpu_s()

    def create(self, path: Path) -> int:
        """Make a file that was not there, for its owner only, locked until the descriptor returned is closed."""
        return self._background.create(str(path))

    def make_folder(self, path: Path, *, parents: bool) -> None:
        """Make a folder for its owner only."""
        path.mkdir(mode=0o700, parents=parents, exist_ok=True)

    def is_folder(self, path: Path) -> bool:
        """Say whether it is there."""
        return path.is_dir()

    def device(self, path: Path) -> int:
        """Return the number of the file system that it is on."""
        return path.stat().st_dev

    def read(self, path: Path, n_bytes: int) -> bytearray:
        """Return the file's first `n_bytes`, or fewer if it is shorter."""
        fd = os.open(path, _READ)
        try:
            n_file = os.fstat(fd).st_size
            if n_bytes < n_file:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # who wants a header gets no pages behind it
            data = bytearray(min(n_bytes, n_file))
            view, n_read = memoryview(data), 0
            while n_read < len(data):
                n = os.readv(fd, [view[n_read:]])
                if n == 0:
                    break
                n_read += n
            return data if n_read == len(data) else data[:n_read]
        finally:
            os.close(fd)

    def read_object(self, path: Path, buffer: memoryview) -> int:
        """Read a file into `buffer`, of whole pages; return the file's length, which is more than was read if too long.

        What the page cache has comes from there; anything else past it, as it would push out what others use, and the
        way through it takes half as long again. In the core, as each call of the system from here would hand the
        interpreter's lock around.
        """
        return read_file(str(path), buffer, self._reads_past_cache)

    def write(self, fd: int, data: Bytes) -> int:
        """Write some of the data; return how many bytes."""
        return os.write(fd, data) if len(data) <= _SMALL_BYTES else self._background.write(fd, data)

    def rename(self, path: Path, to: Path) -> None:
        """Give a file its name, in place of another of that name."""
        self._background.rename(str(path), str(to))

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def list(self, path: Path) -> Iterator[tuple[str, int, int]]:
        """Yield name, length and time (nanoseconds of Unix time) of a folder's files."""
        with os.scandir(path) as found:
            for entry in found:
                if entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    yield entry.name, status.st_size, status.st_mtime_ns


class ObjectFolder:
    """One identity's files under `path`. Any thread may call, and any number of processes."""

    def __init__(self, path: Path, fmt: RecordFormat, ops: FileOps, buffers: BufferPool) -> None:
        self.path = path / fmt.identity.name()
        self._fmt = fmt
        self._ops = ops
        self._buffers = buffers
        self._device: int | None = None  # that the folder was on when it was opened

    def open(self) -> None:
        """Make the folder, or see that it is ours alone.

        Raises:
            OSError: it cannot be made, or belongs to another user, who could have written what we read.
        """
        self._ops.make_folder(self.path.parent, parents=True)
        self._ops.make_folder(self.path, parents=False)
        status = self.path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{self.path.name} is no folder of this user")
        if stat.S_IMODE(status.st_mode) & 0o077:
            self.path.chmod(0o700)
        self._device = self._ops.device(self.path)
        about = self.path / ABOUT
        if not about.exists():
            with suppress(OSError):  # a full disk can be read
                self._publish(about, [json.dumps(asdict(self._fmt.identity), indent=2).encode()])

    def claim(self) -> int | None:
        """Show others that the folder is used, until the descriptor returned is closed; None: no locks here."""
        with suppress(OSError):
            fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                os.utime(fd)  # when it was used last
            except OSError:
                os.close(fd)
                raise
            return fd
        return None

    def writer_cpu_s(self) -> float:
        """Return how long a processor has worked on writing, beside the threads that call."""
        return self._ops.writer_cpu_s()

    def is_there(self) -> bool:
        """Say whether the folder still exists."""
        return self._ops.is_folder(self.path)

    def may_be_opened(self) -> bool:
        """Say whether `open` finds, or makes, the folder where it was: not where its disk was taken away.

        Raises OSError.
        """
        if self._device is None or self.is_there():
            return True
        left = next(path for path in self.path.parents if self._ops.is_folder(path))
        return self._ops.device(left) == self._device

    def path_of(self, key: bytes) -> Path:
        """Return where an object is, or would be."""
        name = key.hex()
        return self.path / name[:2] / (name + _SUFFIX)

    def head(self, key: bytes) -> RecordHead:
        """Return what an object's header says.

        Raises:
            OSError: it is not there, or cannot be read.
            InvalidRecord: it is not that object.
        """
        found = self._fmt.read_header(self._ops.read(self.path_of(key), self._fmt.header_bytes))
        if found.key != key:
            raise InvalidRecord("another object's record")
        return found

    def read(self, key: bytes, group_idx: int) -> tuple[RecordHead, memoryview]:
        """Return what an object's header says, and its bytes, verified. Raises as `head` does."""
        needed = self._fmt.record_bytes(group_idx)
        buffer = self._buffers.take(needed)
        n_bytes = self._ops.read_object(self.path_of(key), buffer)
        if n_bytes != needed:
            raise InvalidRecord(f"{n_bytes} bytes; needs {needed}")
        record = buffer[:needed].toreadonly()
        body = self._fmt.open(record, key, group_idx)
        return self._fmt.read_header(record), body

    def write(self, head: RecordHead, body: Bytes) -> None:
        """Publish an object. Raises OSError, and then leaves nothing."""
        path = self.path_of(head.key)
        parts = [self._fmt.header(head, body), body]
        try:
            self._publish(path, parts)
        except FileNotFoundError:  # the first of its shard
            self._ops.make_folder(path.parent, parents=False)
            self._publish(path, parts)

    def remove(self, key: bytes) -> None:
        """Remove an object, if it is there."""
        with suppress(FileNotFoundError):
            self._ops.unlink(self.path_of(key))

    def scan(self) -> Iterator[tuple[bytes, int, int]]:
        """Yield key, file length and time of every object, and remove what dead writers left."""
        self._clean_all(self.path, [name for name, _, _ in self._ops.list(self.path)])
        for i in range(256):
            folder = self.path / f"{i:02x}"
            try:
                names = list(self._ops.list(folder))
            except FileNotFoundError:
                continue
            for name, n_bytes, written_ns in names:
                key = key_of_file(name)
                if key is not None and key[0] == i:
                    yield key, n_bytes, written_ns
            self._clean_all(folder, [name for name, _, _ in names])

    def read_index(self) -> tuple[bytes | None, int]:
        """Return what `write_index` wrote, if anything can be read, and when."""
        try:
            written_ns = (self.path / INDEX).lstat().st_mtime_ns
            return bytes(self._ops.read(self.path / INDEX, 1 << 28)), written_ns
        except OSError:
            return None, 0

    def write_index(self, data: bytes) -> None:
        """Publish the hints. Raises OSError."""
        self._publish(self.path / INDEX, [data])

    def _publish(self, path: Path, parts: Sequence[Bytes]) -> None:
        temp = path.parent / f".{path.stem}.{secrets.token_hex(8)}{_TEMP_SUFFIX}"
        fd = self._ops.create(temp)
        try:
            for part in parts:
                view = memoryview(part)
                while len(view):
                    view = view[self._ops.write(fd, view) :]
            self._ops.rename(temp, path)
        except BaseException:
            with suppress(OSError):
                self._ops.unlink(temp)
            raise
        finally:
            os.close(fd)

    def _clean_all(self, folder: Path, names: Sequence[str]) -> None:
        for name in names:
            if is_temporary(name):
                with suppress(OSError):
                    self._clean(folder / name)

    def _clean(self, temp: Path) -> None:
        fd = os.open(temp, _READ)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its writer lives
            self._ops.unlink(temp)
        finally:
            os.close(fd)


def is_used(folder: Path) -> bool:
    """Say whether a tier, in whatever process, has claimed an identity's folder. Raises OSError."""
    try:
        fd = os.open(folder / LOCK, _READ)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def is_temporary(name: str) -> bool:
    """Say whether a file of that name is one being written."""
    return name.startswith(".") and name.endswith(_TEMP_SUFFIX)


def key_of_file(name: str) -> bytes | None:
    """Return the key of the object that a file of that name holds, or None: it holds none."""
    if len(name) != 2 * KEY_BYTES + len(_SUFFIX) or not name.endswith(_SUFFIX):
        return None
    try:
        key = bytes.fromhex(name[: 2 * KEY_BYTES])
    except ValueError:
        return None
    return key if key.hex() + _SUFFIX == name else None


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """One object's file, as a listing gives it."""

    path: Path
    key: bytes
    n_bytes: int
    written_s: float


def identity_folders(path: Path) -> list[Path]:
    """Return the folders of identities under a disk tier's `path`, sorted. Raises OSError."""
    names = sorted(entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
    return [path / name for name in names if _IDENTITY.fullmatch(name)]


def shards(folder: Path) -> list[str]:
    """Return the names of an identity's folders of objects. Raises OSError."""
    entries = os.scandir(folder)
    return [e.name for e in entries if _SHARD.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]


def object_files(folder: Path) -> Iterator[ObjectFile]:
    """Yield an identity's objects, in the order of their keys. Raises OSError: the folder cannot be read."""
    for shard in sorted(shards(folder)):
        try:
            entries = sorted(os.scandir(folder / shard), key=lambda entry: entry.name)
        except FileNotFoundError:
            continue
        for entry in entries:
            key = key_of_file(entry.name)
            if key is None or key.hex()[:2] != shard or not entry.is_file(follow_symlinks=False):
                continue
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                yield ObjectFile(Path(entry.path), key, status.st_size, status.st_mtime)
