"""A start kept on disk: what was decided about a checkpoint the last time, so that packing it can begin at once.

Reading a header, recording a program, lowering and placing it take longer than packing; all of it follows from the
file's header, the options and our own code. `save` keeps the result; `begin` finds it, checks that it was made of
exactly this, and starts threads that pack. Only a single `.gguf` file that is used in its own formats is kept.

What is believed: the kept file's own digest; its `key` (version, our sources' and the core's sizes and times, options,
path); and the checkpoint's digest, computed again from the file as it is now while its weights are being packed. A
doubt about any of them is a miss: the caller then plans as if nothing were kept. No numpy is imported to begin.
"""

import contextlib
import hashlib
import json
import mmap
import os
import stat
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tiercel import __version__, _native

_BEGINNING = b"tiercel ready plan 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_MOST_BYTES = 64 << 20
# What a plan is made by: a change of any of these files makes kept plans misses, in a checkout as in an upgrade.
_MAKERS = ("boot", "loaders", "models", "ops", "quant", "runner", "_native")


class Recipe(msgspec.Struct, frozen=True):
    """What a one-file checkpoint's digest is the SHA-256 of: `prefix`, then the head, then pieces of its tensors."""

    size_bytes: int
    before: bytes
    head_bytes: int
    pieces: list[tuple[int, int]]  # start and length


class KeptTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's entry in the file. `row_order`, little-endian int32, is its row permutation."""

    name: str
    shape: tuple[int, ...]
    format: str
    start: int
    nbytes: int
    row_order: bytes | None


class KeptMatrix(msgspec.Struct, frozen=True, array_like=True):
    """A matrix to pack: which tensor, its format as the core numbers it, bytes of a row, columns, whether expanded."""

    tensor_idx: int
    format_code: int
    row_bytes: int
    n_columns: int
    is_expanded: bool


class Kept(msgspec.Struct, frozen=True):
    """What the file holds. `later` is a second message, for when more of Tiercel is imported."""

    key: str
    digest: str
    recipe: Recipe
    tensors: list[KeptTensor]
    matrices: list[KeptMatrix]
    later: bytes


class ReadyWeights(msgspec.Struct, frozen=True):
    """What needs no more reading, by tensor name: packed matrices, and vectors as float32 views of the file."""

    matrices: Mapping[str, _native.PackedMatrix]
    vectors: Mapping[str, "memoryview[float]"]


class Begun:
    """A start under way: the map, and threads that pack from it. Owner: one thread. Either `join` or drop it."""

    def __init__(self, kept: Kept, map_: mmap.mmap, n_threads: int) -> None:
        self.kept = kept
        self.map = map_
        self._arena = _native.PackedArena()
        view = memoryview(map_)
        jobs = []
        for matrix in kept.matrices:
            tensor = kept.tensors[matrix.tensor_idx]
            n_rows = tensor.nbytes // matrix.row_bytes
            rows = view[tensor.start : tensor.start + tensor.nbytes].cast("B", (n_rows, matrix.row_bytes))
            order = None if tensor.row_order is None else memoryview(tensor.row_order).cast("i")
            jobs.append((matrix.format_code, rows, matrix.n_columns, order, matrix.is_expanded))
        self._packing = _native.Packing(jobs, self._arena, n_threads - 1, True)
        self._digest = _Digesting(map_, kept.recipe)

    def is_same(self) -> bool:
        """Whether the file is the one that the plan was made of. Waits for its digest."""
        return self._digest.result() == self.kept.digest

    def join(self) -> ReadyWeights:
        """Help until all is packed."""
        names = (self.kept.tensors[matrix.tensor_idx].name for matrix in self.kept.matrices)
        view = memoryview(self.map)
        vectors = {
            one.name: view[one.start : one.start + one.nbytes].cast("f")
            for one in self.kept.tensors
            if len(one.shape) == 1 and one.format == "f32" and one.row_order is None
        }
        return ReadyWeights(dict(zip(names, self._packing.join(), strict=True)), vectors)


def key_of(path: Path, options: Mapping[str, Any]) -> str:
    """Return what a plan depends on, except the checkpoint's bytes.

    Raises: OSError: our own sources are not where they can be looked at; then nothing is to be kept.
    """
    home = Path(_native.__file__).parent.parent
    made_by = [_state(Path(_native._core.__file__))]
    for name in _MAKERS:
        with os.scandir(home / name) as entries:
            made_by += sorted((entry.name, *_numbers(entry.stat())) for entry in entries if entry.name.endswith(".py"))
    return json.dumps([__version__, _native.kernel_levels()[-1], str(path), dict(options), made_by], default=str)


def _state(path: Path) -> tuple[str, int, int]:
    return (path.name, *_numbers(path.stat()))


def _numbers(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def place_of(folder: Path, path: Path, options: Mapping[str, Any]) -> Path:
    """Return the file in `folder` that keeps the plan of this model with these options."""
    name = hashlib.sha256(json.dumps([str(path), dict(options)], default=str).encode()).hexdigest()[:40]
    return folder / f"{name}.plan"


def begin(place: Path, key: str, path: Path, n_threads: int) -> Begun | None:
    """Start packing by the plan kept at `place`; None if there is none for exactly this, or it is damaged.

    The caller must ask `is_same` before it believes anything of it.
    """
    with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError, KeyError, IndexError, MemoryError):
        if place.stat().st_size > _MOST_BYTES:
            return None
        data = place.read_bytes()
        start = len(_BEGINNING) + _DIGEST_BYTES
        payload = memoryview(data)[start:]
        if data[:start] != _BEGINNING + hashlib.sha256(payload).digest():
            return None
        kept = msgspec.msgpack.decode(payload, type=Kept)
        if kept.key != key:
            return None
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_size != kept.recipe.size_bytes:
                return None
            map_ = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
        return Begun(kept, map_, n_threads)
    return None


class _Digesting:
    """Computes a checkpoint's digest on a thread of its own: two calls, both without the interpreter's lock."""

    def __init__(self, map_: mmap.mmap, recipe: Recipe) -> None:
        self._map, self._recipe = map_, recipe
        self._found: str | None = None
        self._thread = threading.Thread(target=self._run, name="tiercel-digest", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Ranges past the file's end are refused; the digest then is nobody's.
        with contextlib.suppress(ValueError, MemoryError):
            pieces = _native.gather(self._map, [(0, self._recipe.head_bytes), *self._recipe.pieces])
            sha = hashlib.sha256(self._recipe.before)
            sha.update(pieces)
            self._found = sha.hexdigest()

    def result(self) -> str | None:
        self._thread.join()
        return self._found


def save(place: Path, kept: Kept) -> None:
    """Keep a plan, whole or not at all; one that cannot be written is done without."""
    import tempfile

    payload = msgspec.msgpack.encode(kept)
    with contextlib.suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f"{place.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_BEGINNING + hashlib.sha256(payload).digest() + payload)
            Path(name).replace(place)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def matrices(tensors: Sequence[KeptTensor], jobs: Mapping[str, tuple[int, int, int, bool]]) -> list[KeptMatrix]:
    """Return the matrices in the order in which they are packed best, the largest first."""
    order = sorted((i for i, t in enumerate(tensors) if t.name in jobs), key=lambda i: -tensors[i].nbytes)
    return [KeptMatrix(i, *jobs[tensors[i].name]) for i in order]
