"""One `.safetensors` file: header checked, tensors as ranges of the mapped file.

It knows names, types and bytes, not what a tensor is for. Every range is checked when the file is opened: inside the
file, as long as type and shape say, and together covering the data without overlap or gap. Sizes are Python integers,
so no product can wrap. Source: the safetensors format description (8-byte length, JSON header, data).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from tiercel.base.errors import ModelFileError
from tiercel.loaders.mapped_file import MappedFile, parse_json_object
from tiercel.quant.formats import Format

HEADER_LIMIT_BYTES = 100_000_000
"""Longest header; the limit of the reference implementation."""

_MAX_DIMS = 8
_MAX_DIM = 1 << 40
_MAX_NAME_CHARS = 1024

FORMATS: Mapping[str, Format] = MappingProxyType({"F32": Format.F32, "F16": Format.F16, "BF16": Format.BF16})
"""Type name in the header -> format, for the types Tiercel computes with."""

# Types that may lie in a checkpoint (masks, position tables) without being used; their size is checked all the same.
_OTHER_TYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "F8_E8M0": 1,
        "U16": 2,
        "I16": 2,
        "U32": 4,
        "I32": 4,
        "U64": 8,
        "I64": 8,
        "F64": 8,
        "C64": 8,
    }
)


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """A tensor's entry. `format` is None when Tiercel cannot compute with `dtype`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    nbytes: int

    @property
    def format(self) -> Format | None:
        """The weight format, or None for a type that only `tensors` may list."""
        return FORMATS.get(self.dtype)


class SafetensorsFile:
    """An open `.safetensors` file. It owns its map; close it, or use it as a context."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        try:
            self.header_bytes = self._header_length()
            header = parse_json_object(self._file.map[8 : 8 + self.header_bytes], f"{path}: header")
            self.metadata = _metadata(header.pop("__metadata__", {}), path)
            self.tensors: Mapping[str, SafetensorsTensor] = MappingProxyType(self._tensors(header))
        except ModelFileError:
            self._file.close()
            raise

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self._file.size

    def header(self) -> npt.NDArray[np.uint8]:
        """Return the bytes before the data."""
        return self._file.bytes[: 8 + self.header_bytes]

    def data(self, tensor: SafetensorsTensor) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes, uint8 [nbytes], a view of the map."""
        return self._file.bytes[tensor.start : tensor.start + tensor.nbytes]

    def all_data(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Return each tensor's bytes, in the order of `tensors`."""
        return map(self.data, self.tensors.values())

    def release_pages(self, data: npt.NDArray[np.uint8]) -> None:
        """Let go of a tensor's resident bytes; see `MappedFile.release_pages`."""
        self._file.release_pages(data)

    def close(self) -> None:
        """Release the map; arrays taken from it stay valid."""
        self._file.close()

    def _header_length(self) -> int:
        if self.size < 8:
            raise ModelFileError(f"{self.path}: {self.size} bytes; a safetensors file has at least 8; fetch it again")
        length = int.from_bytes(self._file.map[:8], "little")
        if length > min(HEADER_LIMIT_BYTES, self.size - 8):
            raise ModelFileError(
                f"{self.path}: the header claims {length} bytes; {self.size - 8} bytes follow and at most "
                f"{HEADER_LIMIT_BYTES} are read; the file is truncated or not safetensors; fetch it again"
            )
        return length

    def _tensors(self, header: dict[str, object]) -> dict[str, SafetensorsTensor]:
        data_start = 8 + self.header_bytes
        found = {name: _entry(name, entry, data_start, self.path) for name, entry in header.items()}
        reached = data_start
        for tensor in sorted(found.values(), key=lambda t: (t.start, t.nbytes)):
            if tensor.start != reached:
                kind = "overlaps the tensor before it" if tensor.start < reached else "leaves a gap before it"
                raise ModelFileError(
                    f"{self.path}: tensor {tensor.name!r} {kind}: it starts at byte {tensor.start - data_start} of the "
                    f"data, {reached - data_start} is needed"
                )
            reached += tensor.nbytes
        if reached != self.size:
            raise ModelFileError(
                f"{self.path}: the tensors end at byte {reached} and the file has {self.size}; both must be equal; "
                "the file is truncated or has been appended to; fetch it again"
            )
        return found


def _metadata(raw: object, path: Path) -> Mapping[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise ModelFileError(f"{path}: __metadata__ must map names to texts")
    return MappingProxyType(raw)


def _entry(name: str, raw: object, data_start: int, path: Path) -> SafetensorsTensor:
    where = f"{path}: tensor {name[:80]!r}"
    if not 0 < len(name) <= _MAX_NAME_CHARS or not name.isprintable():
        raise ModelFileError(f"{where}: a name has 1 to {_MAX_NAME_CHARS} printable characters")
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise ModelFileError(f"{where}: its entry must hold dtype, shape and data_offsets, and nothing else")
    dtype = raw["dtype"]
    shape = _integers(raw["shape"], f"{where}: shape", _MAX_DIM)
    if len(shape) > _MAX_DIMS:
        raise ModelFileError(f"{where}: {len(shape)} dimensions; at most {_MAX_DIMS} are read")
    offsets = _integers(raw["data_offsets"], f"{where}: data_offsets", 1 << 62)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelFileError(f"{where}: data_offsets {list(offsets[:4])}; two ascending numbers are needed")
    nbytes = offsets[1] - offsets[0]
    if not isinstance(dtype, str):
        raise ModelFileError(f"{where}: its dtype is a {type(dtype).__name__}; a text is needed")
    known = FORMATS[dtype].group_bytes if dtype in FORMATS else _OTHER_TYPE_BYTES.get(dtype)
    # A type newer than this table has an unknown size; its range is still inside the file and nobody can use it.
    if known is not None and known * prod(shape) != nbytes:
        raise ModelFileError(
            f"{where}: {nbytes} bytes of data; {dtype} of shape {list(shape)} needs {known * prod(shape)}"
        )
    return SafetensorsTensor(name, dtype, shape, data_start + offsets[0], nbytes)


def _integers(raw: object, where: str, limit: int) -> tuple[int, ...]:
    if not isinstance(raw, list):
        raise ModelFileError(f"{where}: a {type(raw).__name__}; a list of integers is needed")
    for value in raw:
        if type(value) is not int or not 0 <= value <= limit:  # bool is an int to isinstance
            raise ModelFileError(f"{where}: {str(value)[:24]!r}; integers from 0 to {limit} are needed")
    return tuple(raw)
