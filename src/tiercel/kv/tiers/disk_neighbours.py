"""Other models' folders under a disk tier's path: what they hold, and who gives way. Knows no queue.

One capacity holds for all that is under a path. When room is needed, the models that no running tier uses give way
first, the one used longest ago before the others, and of each what is worth least (`disk_index`). Models that are in
use have an equal share each: whoever holds more than that gives way to whoever wants more; nobody else does.

Counts are of the last `count`, and of what was removed here since: others write and remove meanwhile. Used by one
thread at a time, the tier's writer. Whatever goes wrong with another's file leaves it where it is.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tiercel.kv.tiers.disk_files import INDEX, LOCK, FileOps, identity_folders, is_used, object_files
from tiercel.kv.tiers.disk_index import DiskIndex, Found, read_hints
from tiercel.kv.tiers.record import HEADER_BYTES_MAX, peek_depth


@dataclass(slots=True)
class _Neighbour:
    folder: Path
    n_bytes: int
    is_used: bool
    last_used_s: float


class Neighbours:
    """The folders beside `own`. `capacity_bytes` is that of all together, `own` included."""

    def __init__(self, own: Path, capacity_bytes: int, ops: FileOps) -> None:
        self._own = own
        self._capacity_bytes = capacity_bytes
        self._ops = ops
        self._found: list[_Neighbour] = []

    @property
    def used_bytes(self) -> int:
        """What they hold."""
        return sum(it.n_bytes for it in self._found)

    def count(self) -> None:
        """See what is there. Raises OSError: the path cannot be read."""
        self._found = [_look_at(folder) for folder in identity_folders(self._own.parent) if folder != self._own]

    def free(self, n_bytes: int) -> tuple[int, int]:
        """Remove at least `n_bytes` of who must give way, if there is so much; return objects and bytes removed."""
        n_removed, n_bytes_removed = 0, 0
        for it in self._givers():
            wanted = min(n_bytes - n_bytes_removed, self._spare_bytes(it))
            if wanted > 0:
                n, freed = self._free_of(it, wanted)
                n_removed += n
                n_bytes_removed += freed
        return n_removed, n_bytes_removed

    def _givers(self) -> list[_Neighbour]:
        idle = sorted((it for it in self._found if not it.is_used), key=lambda it: it.last_used_s)
        return idle + sorted((it for it in self._found if it.is_used), key=self._spare_bytes, reverse=True)

    def _spare_bytes(self, it: _Neighbour) -> int:
        if not it.is_used:
            return it.n_bytes
        return it.n_bytes - self._capacity_bytes // (1 + sum(one.is_used for one in self._found))

    def _free_of(self, it: _Neighbour, n_bytes: int) -> tuple[int, int]:
        """Remove what is worth least of one; return objects and bytes removed."""
        try:
            hints = read_hints(bytes(self._ops.read(it.folder / INDEX, 1 << 28)), it.folder.name)
        except OSError:
            hints = {}
        files = {}
        with suppress(OSError):
            files = {file.key: file for file in object_files(it.folder)}
        index = DiskIndex(0)
        found = {}
        for key, file in files.items():
            hint = hints.get(key)
            if hint is None:
                found[key] = Found(file.n_bytes, self._depth(file.path))
            else:
                found[key] = Found(file.n_bytes, hint.depth, hint.is_pinned, hint.expires_s)
        index.merge(found, hints)
        held_bytes = index.used_bytes
        index.capacity_bytes = max(0, held_bytes - n_bytes)
        victims = index.make_room(0) or []
        n_removed, n_freed = 0, 0
        for key in victims:
            with suppress(OSError):
                self._ops.unlink(files[key].path)
                n_removed += 1
                n_freed += files[key].n_bytes
        it.n_bytes = held_bytes - n_freed
        return n_removed, n_freed

    def _depth(self, path: Path) -> int:
        try:
            return peek_depth(self._ops.read(path, HEADER_BYTES_MAX))
        except OSError:
            return 0


def _look_at(folder: Path) -> _Neighbour:
    n_bytes, last_used_s, used = 0, 0.0, True  # what cannot be seen is taken to be used
    with suppress(OSError):
        n_bytes = sum(file.n_bytes for file in object_files(folder))
    with suppress(OSError):
        used = is_used(folder)
    for name in (INDEX, LOCK):
        with suppress(OSError):
            last_used_s = max(last_used_s, (folder / name).lstat().st_mtime)
    return _Neighbour(folder, n_bytes, used, last_used_s)
