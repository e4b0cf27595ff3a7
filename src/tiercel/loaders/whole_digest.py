"""A checkpoint's digest over every byte, remembered between starts. For what outlives the process: a change in the
middle of a tensor, which `Checkpoint.digest` does not see, must not find what was computed before it.

Remembered is a digest under the files' names, sizes, inodes and times of change; the kernel sets the latter, and nobody
else. What cannot be read or written of that is computed again.
"""

import contextlib
import hashlib
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiercel.loaders.checkpoint import Checkpoint

_DIGEST = re.compile(r"[0-9a-f]{64}")


def whole_digest(checkpoint: "Checkpoint", folder: Path) -> str:
    """Return `checkpoint.full_digest()`, remembered in `folder`.

    Cost: reads all files when they are new or changed, about 1 GB/s.
    """
    place = folder / _state_of(checkpoint)
    with contextlib.suppress(OSError, ValueError):
        found = place.read_text("ascii")
        if _DIGEST.fullmatch(found):
            return found
    digest = checkpoint.full_digest()
    if folder / _state_of(checkpoint) == place:  # else they changed meanwhile, and nobody knows what was read
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = folder / f".{place.name}.{secrets.token_hex(4)}"
            temporary.write_text(digest, "ascii")
            temporary.replace(place)
    return digest


def _state_of(checkpoint: "Checkpoint") -> str:
    paths = {Path(getattr(file, "path", checkpoint.path)) for file in checkpoint.files}
    told = [checkpoint.digest()]  # of the configuration, which may lie in a file of its own
    for path in sorted(paths):
        found = path.stat()
        told.append(f"{path.resolve()} {found.st_size} {found.st_ino} {found.st_mtime_ns} {found.st_ctime_ns}")
    return hashlib.sha256("\n".join(told).encode("utf-8", "surrogateescape")).hexdigest()
