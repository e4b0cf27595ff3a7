"""One `.gguf` file, version 2 or 3, little-endian: metadata and tensor ranges, everything checked before use.

It knows the container, not what a key or a tensor means; see `gguf_map` for that. Every count is compared with the
bytes that are left before anything is allocated for it, sizes are Python integers, and every tensor's range lies
inside the file and outside every other's, before any of its bytes is touched.

Metadata values arrive as `int`, `float`, `bool`, `str`, a read-only numpy array (a view of the map), or a
`StringArray`. Keys, tensor names and single texts must be UTF-8. Texts inside arrays may be any bytes, because
vocabularies hold pieces of characters: `StringArray.raw(i)` gives the bytes, and reading it as text decodes with
`surrogateescape`, which loses nothing and keeps two different tokens different.

Source: the GGUF specification. We differ by limits (below) and by refusing arrays of arrays.
"""

import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, overload

import numpy as np
import numpy.typing as npt

from tiercel.base.errors import ModelFileError, TiercelError, UnsupportedModel
from tiercel.loaders.mapped_file import MappedFile
from tiercel.quant.formats import GGUF_TYPES, GGUF_TYPES_NOT_READ, Format

MAX_ENTRIES = 1 << 17  # keys, and tensors; the largest public models have some 3,000 tensors a file
MAX_KEY_BYTES = 65_535  # the specification's limit
MAX_NAME_BYTES = 1024  # the specification says 64; longer ones exist
MAX_TEXT_BYTES = 64 << 20  # a whole tokenizer.json may be one text
MAX_DIMS = 4
MAX_DIM = 1 << 40
MAX_ALIGNMENT = 65_536
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
# Value type id -> numpy type. The ids of the specification; 7 is checked to be 0 or 1.
_NUMBERS: Mapping[int, str] = MappingProxyType(
    {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8", 11: "<i8", 12: "<f8"}
)
# Smallest bytes of a key (length, one character, type, value) and of a tensor entry with one dimension.
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_U64 = struct.Struct("<Q")
# Strings walked between two looks at the bytes left; bounds what a false count can make the walk keep.
_WALK_STRIDE = 1 << 14


class StringArray(Sequence[str]):
    """An array of texts left in the file; each is decoded when it is asked for."""

    def __init__(self, buffer: mmap.mmap | bytes, marks: npt.NDArray[np.int64]) -> None:
        """Take the map and, for string i, `marks[i]`: where its 8-byte length begins; one more mark ends the last."""
        self._buffer = buffer
        self._marks = marks

    def __len__(self) -> int:
        return len(self._marks) - 1

    def __repr__(self) -> str:
        return f"<{len(self)} texts>"

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each text, int64 [n]."""
        return np.diff(self._marks) - 8

    def raw(self, index: int) -> bytes:
        """Return one text's bytes as the file has them."""
        index = range(len(self))[index]
        return bytes(self._buffer[self._marks[index] + 8 : self._marks[index + 1]])

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self.raw(index).decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list())

    def to_list(self) -> list[str]:
        """Decode all texts.

        Cost: a copy of the region and about 0.25 us a text: 13 ms for 50,000. Blanking the lengths and splitting at
        them, which needs no loop, was measured at 9 ms and not kept.
        """
        base = int(self._marks[0])
        region = self._buffer[base : int(self._marks[-1])]
        marks = (self._marks - base).tolist()
        return [region[a + 8 : b].decode("utf-8", "surrogateescape") for a, b in pairwise(marks)]


Value = int | float | bool | str | npt.NDArray[np.generic] | StringArray
"""What a metadata key can map to."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's entry. `shape` has numpy's order: the file's fastest dimension comes last."""

    name: str
    shape: tuple[int, ...]
    format: Format
    start: int  # bytes from the start of the file
    nbytes: int


class _Cursor:
    """Reads forward through the header and never past the end of the file."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self.at = 0

    @property
    def n_left(self) -> int:
        return self._file.size - self.at

    def fail(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self._file.path}: byte {self.at}: {what}")

    def skip(self, n_bytes: int, what: str) -> int:
        """Pass `n_bytes` and return where they began."""
        if n_bytes > self.n_left:
            raise self.fail(f"{what} needs {n_bytes} bytes and {self.n_left} are left; the file is truncated")
        start, self.at = self.at, self.at + n_bytes
        return start

    def u32(self, what: str) -> int:
        start = self.skip(4, what)
        return int.from_bytes(self._file.map[start : start + 4], "little")

    def u64(self, what: str) -> int:
        start = self.skip(8, what)
        return int.from_bytes(self._file.map[start : start + 8], "little")

    def text(self, limit: int, what: str) -> str:
        length = self.u64(f"the length of {what}")
        if length > limit:
            raise self.fail(f"{what} has {length} bytes; at most {limit} are read")
        start = self.skip(length, what)
        try:
            return self._file.map[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def count(self, n: int, min_bytes: int, what: str) -> int:
        """Check a claimed count against the bytes that so many things need at least."""
        if n * min_bytes > self.n_left:
            raise self.fail(f"{n} {what} need at least {n * min_bytes} bytes and {self.n_left} are left")
        return n

    def value(self, what: str) -> Value:
        kind = self.u32(f"the type of {what}")
        if kind == _STRING:
            return self.text(MAX_TEXT_BYTES, what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _NUMBERS:
            raise self.fail(f"{what} has value type {kind}; 0 to 12 are defined")
        number = self._numbers(kind, 1, what)[0]
        return number.item()  # type: ignore[no-any-return]

    def _array(self, what: str) -> Value:
        kind = self.u32(f"the element type of {what}")
        n = self.u64(f"the length of {what}")
        if kind == _STRING:
            return self._strings(self.count(n, 8, f"texts in {what}"), what)
        if kind == _ARRAY:
            raise self.fail(f"{what} is an array of arrays; arrays of numbers or texts are read")
        if kind not in _NUMBERS:
            raise self.fail(f"{what} has element type {kind}; 0 to 12 are defined")
        return self._numbers(kind, n, what)

    def _numbers(self, kind: int, n: int, what: str) -> npt.NDArray[np.generic]:
        dtype = np.dtype(_NUMBERS[kind])
        start = self.skip(n * dtype.itemsize, what)
        found = self._file.bytes[start : self.at].view(dtype)
        if kind != _BOOL:
            return found
        if n and int(found.max()) > 1:
            raise self.fail(f"{what} holds a truth value that is neither 0 nor 1")
        return found.view(np.bool_)

    def _strings(self, n: int, what: str) -> StringArray:
        """Walk over `n` texts. Only their places are kept: 8 bytes each, as many as their lengths take in the file."""
        marks = np.empty(n + 1, np.int64)
        size, buffer, unpack = self._file.size, self._file.map, _U64.unpack_from
        at = self.at
        for first in range(0, n, _WALK_STRIDE):
            places = []
            try:
                for _ in range(min(_WALK_STRIDE, n - first)):
                    places.append(at)
                    at += 8 + unpack(buffer, at)[0]
            except (struct.error, OverflowError):
                # Past the end of the file, or so far past it that the place is no machine integer.
                at = size + 1
            if at > size:
                raise self.fail(f"a text in {what} runs past the end of the file")
            marks[first : first + len(places)] = places
        marks[n] = self.at = at
        return StringArray(buffer, marks)


class GgufFile:
    """An open `.gguf` file. It owns its map; close it when its tensors are no longer needed.

    `metadata` maps every key to its value, `tensors` every tensor's name to its entry, both in file order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        try:
            cursor = _Cursor(self._file)
            self.version = _version(cursor)
            n_tensors = _entries(cursor, "tensors", _MIN_TENSOR_BYTES)
            n_keys = _entries(cursor, "keys", _MIN_KEY_BYTES)
            self.metadata: Mapping[str, Value] = MappingProxyType(_metadata(cursor, n_keys))
            self.alignment = _alignment(self.metadata, path)
            entries = _named(cursor, n_tensors, "tensor", MAX_NAME_BYTES, _tensor_entry)
            self.data_start = -(-cursor.at // self.alignment) * self.alignment
            self.tensors: Mapping[str, GgufTensor] = MappingProxyType(self._placed(entries))
        except TiercelError:
            self._file.close()
            raise

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self._file.size

    def header(self) -> npt.NDArray[np.uint8]:
        """Return the bytes before the tensor data."""
        return self._file.bytes[: self.data_start]

    def data(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes, uint8 [nbytes], a view of the map."""
        return self._file.bytes[tensor.start : tensor.start + tensor.nbytes]

    def all_data(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Return each tensor's bytes, in the order of `tensors`."""
        return map(self.data, self.tensors.values())

    def release_pages(self, data: npt.NDArray[np.uint8]) -> None:
        """Let go of a tensor's resident bytes; see `MappedFile.release_pages`."""
        self._file.release_pages(data)

    def close(self) -> None:
        """Release the map. Arrays taken from it stay valid; texts that were not read yet do not."""
        self._file.close()

    def _placed(self, entries: dict[str, "_Entry"]) -> dict[str, GgufTensor]:
        """Turn offsets into checked ranges of the file."""
        placed = {name: self._tensor(name, entry) for name, entry in entries.items()}
        reached = self.data_start
        for tensor in sorted(placed.values(), key=lambda t: t.start):
            if tensor.start < reached:
                raise ModelFileError(f"{self.path}: tensor {tensor.name!r} overlaps the tensor before it")
            reached = tensor.start + tensor.nbytes
        return placed

    def _tensor(self, name: str, entry: "_Entry") -> GgufTensor:
        where = f"{self.path}: tensor {name!r}"
        kind = GGUF_TYPES.get(entry.type_id)
        if kind is None:
            known = GGUF_TYPES_NOT_READ.get(entry.type_id)
            names = ", ".join(f.name for f in GGUF_TYPES.values())
            if known is None:
                raise ModelFileError(f"{where} has type {entry.type_id}, which does not exist; {names} are read")
            raise UnsupportedModel(
                f"{where} has format {known}; {names} are read; choose another quantization of this model"
            )
        if entry.shape[-1] % kind.group:
            raise ModelFileError(
                f"{where}: rows of {entry.shape[-1]} weights in {kind.name}; a multiple of {kind.group} is needed"
            )
        nbytes = kind.nbytes(prod(entry.shape))
        if entry.offset % self.alignment:
            raise ModelFileError(f"{where} starts at byte {entry.offset}; a multiple of {self.alignment} is needed")
        start = self.data_start + entry.offset
        if start + nbytes > self.size:
            raise ModelFileError(
                f"{where}: {kind.name} of shape {list(entry.shape)} takes bytes {start} to {start + nbytes} and the "
                f"file has {self.size}; the file is truncated; fetch it again, or join it with its other pieces"
            )
        return GgufTensor(name, entry.shape, kind, start, nbytes)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as the header tells of it, unchecked against the data."""

    shape: tuple[int, ...]
    type_id: int
    offset: int  # bytes from the start of the data


def _version(cursor: _Cursor) -> int:
    if cursor.u32("the magic") != int.from_bytes(b"GGUF", "little"):
        raise cursor.fail("the file does not begin with GGUF; a .gguf file is needed")
    version = cursor.u32("the version")
    if version in (2 << 24, 3 << 24):
        raise UnsupportedModel(f"{cursor.fail('a big-endian file')}; little-endian files are read; convert it")
    if version not in (2, 3):
        raise UnsupportedModel(f"{cursor.fail(f'GGUF version {version}')}; versions 2 and 3 are read; convert it")
    return version


def _entries(cursor: _Cursor, what: str, min_bytes: int) -> int:
    n = cursor.u64(f"the number of {what}")
    if n > MAX_ENTRIES:
        raise cursor.fail(f"{n} {what}; at most {MAX_ENTRIES} are read")
    return cursor.count(n, min_bytes, what)


def _metadata(cursor: _Cursor, n: int) -> dict[str, Value]:
    return _named(cursor, n, "key", MAX_KEY_BYTES, lambda cursor, what: cursor.value(what))


_T = TypeVar("_T")


def _named(cursor: _Cursor, n: int, kind: str, limit: int, read: Callable[[_Cursor, str], _T]) -> dict[str, _T]:
    """Read `n` pairs of a name and what follows it; names are not empty and occur once."""
    found: dict[str, _T] = {}
    for _ in range(n):
        name = cursor.text(limit, f"a {kind}'s name")
        if not name or name in found:
            raise cursor.fail(f"{kind} {name[:80]!r} occurs twice" if name else f"a {kind} without a name")
        found[name] = read(cursor, f"{kind} {name[:80]!r}")
    return found


def _tensor_entry(cursor: _Cursor, what: str) -> _Entry:
    n_dims = cursor.u32(f"the dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.fail(f"{what} has {n_dims} dimensions; 1 to {MAX_DIMS} are read")
    dims = [cursor.u64(f"a dimension of {what}") for _ in range(n_dims)]
    for dim in dims:
        if not 1 <= dim <= MAX_DIM:
            raise cursor.fail(f"{what} has a dimension of {dim}; 1 to {MAX_DIM} are read")
    return _Entry(tuple(reversed(dims)), cursor.u32(f"the type of {what}"), cursor.u64(f"the offset of {what}"))


def _alignment(metadata: Mapping[str, Value], path: Path) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise ModelFileError(
            f"{path}: general.alignment is {str(value)[:24]}; a power of two from 8 to {MAX_ALIGNMENT} is needed"
        )
    return value
