"""A file mapped read-only into memory, and the JSON text that lies beside it.

It knows sizes and bytes, no format. The map outlives `close` for as long as an array still views it. A file that
another process shortens while it is mapped kills this one (SIGBUS): model files are replaced, never rewritten.
"""

import contextlib
import json
import mmap
import stat
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tiercel.base.errors import ModelFileError, ModelNotFound

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

JSON_LIMIT_BYTES = 64 << 20
"""Largest JSON file read beside a checkpoint; an index of a 1 TB model has some 10 MB."""


class MappedFile:
    """One regular file as read-only memory."""

    def __init__(self, path: Path, map_: mmap.mmap | None = None) -> None:
        """Map the file at `path`, or take over a read-only map of all of it."""
        self.path = path
        self.map = self._mapped(path) if map_ is None else map_
        self.size = len(self.map)

    @cached_property
    def bytes(self) -> "npt.NDArray[np.uint8]":
        """The whole map, a view."""
        import numpy as np

        return np.frombuffer(self.map, np.uint8)

    @staticmethod
    def _mapped(path: Path) -> mmap.mmap:
        try:
            # Before opening: opening a named pipe waits for a writer.
            if not stat.S_ISREG(path.stat().st_mode):
                raise ModelFileError(f"{path}: not a regular file; a model file is needed")
            with path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ModelNotFound(f"{path}: no such file; check the path") from error
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}; check the path and its rights") from error
        except ModelFileError:
            raise
        except ValueError as error:
            raise ModelFileError(f"{path}: the file is empty; fetch it again") from error

    def release_pages(self, data: "npt.NDArray[np.uint8]") -> None:
        """Let go of what is resident of the map under `data`, a view of it; a later read takes it from the file again.

        Without effect for an array from elsewhere.
        """
        start = data.ctypes.data - self.bytes.ctypes.data
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        n_bytes = (start + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if not 0 <= start < self.size or n_bytes <= 0:
            return
        # Only advice: an older system may refuse it, and a closed map has nothing to let go of.
        with contextlib.suppress(OSError, ValueError):
            self.map.madvise(mmap.MADV_DONTNEED, first, n_bytes)

    def close(self) -> None:
        """Drop the map. Arrays taken from it stay valid; the memory goes when the last of them does."""
        self.__dict__.pop("bytes", None)
        try:
            self.map.close()
        except BufferError:
            # An array still views the map, which therefore frees itself when that array dies.
            return


def parse_json_object(raw: bytes, where: str, *, may_be_infinite: bool = False) -> dict[str, object]:
    """Parse bytes that must be one JSON object without duplicate keys, NaN or Infinity.

    With `may_be_infinite`, the word Infinity is read as the number.

    Raises:
        ModelFileError: anything else, including bad UTF-8 and nesting past the parser's depth.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ModelFileError(f"{where}: key {_first_duplicate(key for key, _ in pairs)!r} occurs twice")
        return found

    def refuse_constant(name: str) -> float:
        if may_be_infinite and name == "Infinity":
            return float("inf")
        raise ModelFileError(f"{where}: the number {name} is not JSON")

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse_constant)
    except ModelFileError:
        raise
    except RecursionError as error:
        raise ModelFileError(f"{where}: JSON nested too deeply") from error
    except ValueError as error:
        # Covers bad UTF-8, bad syntax and integers of thousands of digits. The text itself is not repeated.
        raise ModelFileError(f"{where}: not valid UTF-8 JSON; fetch the file again") from error
    if not isinstance(parsed, dict):
        raise ModelFileError(f"{where}: the JSON is a {type(parsed).__name__}; an object is needed")
    return parsed


def read_json_object(path: Path, *, may_be_infinite: bool = False) -> dict[str, object]:
    """Read a small JSON file as an object; see `parse_json_object`."""
    try:
        if path.stat().st_size > JSON_LIMIT_BYTES:
            raise ModelFileError(f"{path}: {path.stat().st_size} bytes; at most {JSON_LIMIT_BYTES} are read")
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path}: no such file; a complete checkpoint folder is needed") from error
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}; check its rights") from error
    return parse_json_object(raw, str(path), may_be_infinite=may_be_infinite)


def _first_duplicate(keys: Iterable[str]) -> str:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return ""
