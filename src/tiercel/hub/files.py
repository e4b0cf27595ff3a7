"""Files that only this user reads and that are written whole: the calls `store` and `joining` share. Holds no state."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 1 << 20


def open_private(path: Path) -> BinaryIO:
    """Open for reading and writing, unbuffered, created for this user alone; a link in its place is refused."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "r+b", buffering=0)


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write `data` whole; an unbuffered file may take less at a time."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def read_chunks(file: BinaryIO, n_bytes: int) -> Iterator[bytes]:
    """Yield the next `n_bytes` of `file`, or what there is of them, in pieces."""
    while n_bytes > 0 and (chunk := file.read(min(n_bytes, CHUNK_BYTES))):
        n_bytes -= len(chunk)
        yield chunk


def sync_folder(folder: Path) -> None:
    """Put on disk which names `folder` has: a rename is there for certain only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
