"""A checkpoint on disk as a configuration and named tensors, whichever file format it came in.

`open_checkpoint` takes a folder of safetensors or a `.gguf` file. It knows where the bytes of each tensor are and in
what order its rows must be read; it does not know what a model computes, nor how kernels want their weights.

A `Checkpoint` owns its files. Its tensors are views of mapped memory: they stay valid after `close`, but a
`tokenizer_source` that is a GGUF file does not. Pickled checkpoints (`.bin`, `.pt`) are refused: loading a pickle runs
its author's code.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from tiercel.base.errors import ModelFileError, ModelNotFound, TiercelError, UnsupportedModel
from tiercel.loaders.mapped_file import MappedFile, read_json_object
from tiercel.quant.formats import Format

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    # Readers are imported when a file is read: a start from a kept plan reads none.
    from tiercel.loaders.gguf_file import GgufFile, GgufTensor, Value
    from tiercel.loaders.quantized_matrices import Matrix
    from tiercel.loaders.safetensors_file import SafetensorsFile

_INDEX = "model.safetensors.index.json"
_MODELOPT = "hf_quant_config.json"
_SINGLE = "model.safetensors"
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
_MAX_PARTS = 1024
_PART_KEYS = (("split.no", 0), ("split.count", 1))

# Bytes hashed at each end of a tensor: 9 MB of SmolLM2's 98, 6 ms instead of 70.
_SAMPLE_BYTES = 16 << 10


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named tensor: where its bytes are and how to read them.

    `row_permutation`, int [N], says that row i of the tensor is row `row_permutation[i]` of the stored bytes; of a
    vector, it orders the elements. None means stored order.
    """

    name: str
    shape: tuple[int, ...]  # numpy order; a matrix is [out, in]
    format: Format
    data: "npt.NDArray[np.uint8]"  # [nbytes], a view of the mapped file, which may be unaligned
    row_permutation: "npt.NDArray[np.intp] | None" = None
    matrix: "Matrix | None" = None
    """What makes rows of `format`, where the file has a matrix in parts; `data` then are its codes."""

    def row_range(self, begin: int, end: int) -> "npt.NDArray[np.uint8]":
        """Return rows begin to end of what `rows` returns, without making the others if they have to be made."""
        return self.rows()[begin:end] if self.matrix is None else self.matrix.rows(begin, end)

    def rows(self) -> "npt.NDArray[np.uint8]":
        """Return the stored bytes row by row.

        Shapes:
            returns  uint8 [N, row bytes]; N is the product of all dimensions but the last, 1 for a vector. A view of
                the file if there is no permutation, else a copy.
        """
        if not self.shape:
            return self.data.reshape(1, -1)
        n_rows = prod(self.shape[:-1])
        if self.matrix is not None:
            return self.matrix.rows(0, n_rows)
        if self.row_permutation is None:
            return self.data.reshape(n_rows, self.format.nbytes(self.shape[-1]))
        ordered = self.data.reshape(len(self.row_permutation), -1)[self.row_permutation]
        return ordered.reshape(n_rows, self.format.nbytes(self.shape[-1]))

    def float32(self) -> "npt.NDArray[np.float32]":
        """Return the values, float32 of `shape`, new memory."""
        from tiercel.quant.dequantize import dequantize

        return dequantize(self.rows(), self.format, self.shape)


class Tensors(Mapping[str, Tensor]):
    """The tensors by name. One whose type Tiercel cannot compute with is listed, and refused when it is asked for."""

    def __init__(self, known: Mapping[str, Tensor], unsupported: Mapping[str, str], where: str) -> None:
        self._known = known
        self._unsupported = unsupported
        self._where = where

    def with_others(self, others: Mapping[str, Tensor]) -> "Tensors":
        """Return these and others, which go before those of the same names."""
        return Tensors({**self._known, **others}, self._unsupported, self._where)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._unsupported:
            from tiercel.loaders.safetensors_file import FORMATS

            names = ", ".join(FORMATS)
            raise UnsupportedModel(
                f"{self._where}: tensor {name!r} has type {self._unsupported[name]}; {names} are read; convert it"
            )
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._unsupported

    def __iter__(self) -> Iterator[str]:
        yield from self._known
        yield from self._unsupported

    def __len__(self) -> int:
        return len(self._known) + len(self._unsupported)

    def renamed(self, rename: Callable[[str], str]) -> "Tensors":
        """Return them under other names."""
        known = {rename(name): tensor for name, tensor in self._known.items()}
        return Tensors(known, {rename(name): kind for name, kind in self._unsupported.items()}, self._where)

    def fitted(self, wanted: Mapping[str, Shape], others: Callable[[str], tuple[Shape, ...]]) -> "Tensors":
        """Return them with those that have one of a name's `others` shapes as the first elements, in the one wanted."""
        changed = {}
        for name, shape in wanted.items():
            found = self._known.get(name)
            if found is None or found.shape == shape or found.shape not in others(name):
                continue
            # Elements of a vector may be ordered, and a matrix made of parts: such have no first bytes.
            if found.row_permutation is None and found.matrix is None and not found.format.is_quantized:
                changed[name] = replace(found, shape=shape, data=found.data[: found.format.nbytes(prod(shape))])
        return Tensors({**self._known, **changed}, self._unsupported, self._where) if changed else self

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Name -> type of the tensors that cannot be read."""
        return self._unsupported


@dataclass(frozen=True, slots=True)
class Quantization:
    """The way in which matrices of a checkpoint are stored in parts: its name, how many, their bytes in the file and in
    the formats that they are computed in, and what a reader of the log should know.
    """

    scheme: str
    n_matrices: int
    file_bytes: int
    formats: Mapping[Format, int]
    notes: tuple[str, ...]

    def describe(self) -> str:
        """Say it in one line."""
        kept = ", ".join(f"{n / (1 << 20):.1f} MiB as {name}" for name, n in self.formats.items())
        return f"{self.scheme}: {self.n_matrices} matrices, {self.file_bytes / (1 << 20):.1f} MiB in the file, {kept}"


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint; see the module. Use it as a context, or `close` it."""

    path: Path
    kind: Literal["gguf", "safetensors"]
    config: dict[str, Any]
    """In the form of Hugging Face's `config.json`; built from the metadata of a GGUF file."""
    tensors: Tensors
    files: "tuple[GgufFile, ...] | tuple[SafetensorsFile, ...] | tuple[MappedFile, ...]" = field(repr=False)
    """Mapped files only, not parsed, if a kept plan said what is in them."""
    generation_config: dict[str, Any]
    """In the form of `generation_config.json`; empty if there is none."""
    metadata: "Mapping[str, Value]" = field(default_factory=lambda: MappingProxyType({}), repr=False)
    """A GGUF file's raw metadata; empty for safetensors."""
    norm_weights_include_one: bool = False
    """True if the stored weights of all norms already are Gemma's 1 + w."""
    quantization: "Quantization | None" = None
    """How matrices that lie in parts are stored; None if there are none."""
    known_digest: str | None = field(default=None, repr=False)
    """What `digest` returns, if somebody has computed it from these very files."""

    @property
    def tokenizer_source(self) -> "Path | GgufFile | MappedFile":
        """Where the tokenizer is: the folder, or the open GGUF file."""
        return self.path if self.kind == "safetensors" else self.files[0]  # type: ignore[return-value]

    def with_prefix(self, prefix: str, expected: Iterable[str]) -> "Checkpoint":
        """Return it with `prefix` before the names that are only with it those of `expected` weights.

        Backbones that were saved alone lack the name of what they are a part of.
        """
        wanted = set(expected)

        def rename(name: str) -> str:
            return prefix + name if name not in wanted and prefix + name in wanted else name

        return replace(self, tensors=self.tensors.renamed(rename))

    def fitted(self, wanted: Mapping[str, Shape], others: Callable[[str], tuple[Shape, ...]]) -> "Checkpoint":
        """Return it with each tensor that has another shape which its model knows in the shape that is wanted.

        What such a shape has more of is not read.
        """
        return replace(self, tensors=self.tensors.fitted(wanted, others))

    def release_pages(self, tensor: Tensor) -> None:
        """Let go of what is resident of a tensor's bytes: what was packed from them does not count twice."""
        for file in self.files:
            file.release_pages(tensor.data)

    def close(self) -> None:
        """Release the files. Tensors taken before stay valid."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def digest(self) -> str:
        """Identify the weights cheaply, for the keys of cached pages: 64 hexadecimal digits.

        SHA-256 over the configuration, every file's size and header, and of every tensor the first and the last 16 KiB.
        It tells apart checkpoints, quantizations, fine-tunes and truncations. It does not notice a change inside a
        large tensor alone; `full_digest` does.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return self.known_digest or self._hash(_SAMPLE_BYTES)

    def full_digest(self) -> str:
        """Identify the weights by every byte; otherwise as `digest`, and never equal to it.

        Cost: reads all files, about 1 GB/s.
        """
        if self.known_digest is not None:
            with open_checkpoint(self.path) as whole:
                return whole.full_digest()
        return self._hash(None)

    def digest_recipe(self) -> tuple[bytes, int, list[tuple[int, int]]]:
        """Return what `digest` is made of, of one parsed GGUF file: bytes, then how much of the file's beginning, then
        pieces of it (start, length).
        """
        (file,) = self.files
        assert not isinstance(file, MappedFile)
        before = self._digest_beginning(_SAMPLE_BYTES) + _file_beginning(file)
        pieces: list[tuple[int, int]] = []
        for tensor in file.tensors.values():
            if tensor.nbytes <= 2 * _SAMPLE_BYTES:
                pieces.append((tensor.start, tensor.nbytes))
            else:
                pieces.append((tensor.start, _SAMPLE_BYTES))
                pieces.append((tensor.start + tensor.nbytes - _SAMPLE_BYTES, _SAMPLE_BYTES))
        return before, len(file.header()), pieces

    def _digest_beginning(self, sample_bytes: int | None) -> bytes:
        text = json.dumps(self.config, sort_keys=True)
        return f"tiercel checkpoint 1 {self.kind} {sample_bytes}\n{text}".encode()

    def _hash(self, sample_bytes: int | None) -> str:
        sha = hashlib.sha256(self._digest_beginning(sample_bytes))
        for file in self.files:
            assert not isinstance(file, MappedFile)
            sha.update(_file_beginning(file))
            sha.update(file.header().data)
            for data in file.all_data():
                if sample_bytes is None or len(data) <= 2 * sample_bytes:
                    sha.update(data.data)
                else:
                    sha.update(data[:sample_bytes].data)
                    sha.update(data[-sample_bytes:].data)
        return sha.hexdigest()


def _file_beginning(file: "GgufFile | SafetensorsFile") -> bytes:
    return f"\n{file.size} {len(file.header())} {len(file.tensors)}\n".encode()


class LateMetadata(Mapping[str, "Value"]):
    """A GGUF file's metadata, read when it is first asked for. Owns the file from then on."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _found(self) -> "Mapping[str, Value]":
        from tiercel.loaders.gguf_file import GgufFile

        return GgufFile(self._path).metadata

    def __getitem__(self, key: str) -> "Value":
        return self._found[key]

    def __iter__(self) -> "Iterator[str]":
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder with `config.json` and safetensors, a folder with one GGUF model, or a `.gguf` file.

    A GGUF model split into `-00001-of-0000N.gguf` parts is opened by its first part.

    Raises:
        ModelNotFound: nothing is at `path`.
        ModelFileError: what is there is damaged, incomplete, ambiguous or a pickle.
        UnsupportedModel: a GGUF file of a kind that Tiercel does not compute.
    """
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ModelNotFound(f"{path}: no such file or folder; a model folder or a .gguf file is needed")
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix in _PICKLES:
        raise _pickle_error(path)
    hint = "give the folder that holds it" if path.suffix == ".safetensors" else "a folder or a .gguf file is needed"
    raise ModelFileError(f"{path}: not a model Tiercel opens; {hint}")


def _pickle_error(path: Path) -> ModelFileError:
    return ModelFileError(
        f"{path}: pickled weights can run code when they are loaded and are never opened; safetensors or GGUF is "
        "needed; convert the checkpoint, or choose a repository that has model.safetensors"
    )


def _open_folder(folder: Path) -> Checkpoint:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise ModelFileError(f"{folder}: cannot be listed: {error.strerror}; check its rights") from error
    safetensors = [name for name in names if name.endswith(".safetensors")]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if safetensors:
        return _open_safetensors(folder, safetensors)
    if ggufs:
        first_parts = [name for name in ggufs if _part(name) in (None, 1)]
        if len(first_parts) != 1:
            raise ModelFileError(
                f"{folder}: {len(first_parts)} GGUF models ({', '.join(first_parts[:4])}); give the path of one of them"
            )
        return _open_gguf(folder / first_parts[0])
    pickles = [name for name in names if Path(name).suffix in _PICKLES]
    if pickles:
        raise _pickle_error(folder / pickles[0])
    raise ModelFileError(f"{folder}: no .safetensors and no .gguf file; a complete model folder is needed")


def _part(name: str) -> int | None:
    match = _PART_NAME.fullmatch(name)
    return int(match["part"]) if match else None


def _open_gguf(path: Path) -> Checkpoint:
    from tiercel.loaders.gguf_map import map_model
    from tiercel.loaders.gguf_vocabulary import generation_config

    files = _open_parts(path)
    try:
        tensors: dict[str, GgufTensor] = {}
        owner: dict[str, GgufFile] = {}
        for file in files:
            for name, entry in file.tensors.items():
                if name in tensors:
                    raise ModelFileError(
                        f"{file.path}: tensor {name!r} is in an earlier part too; fetch all parts again"
                    )
                tensors[name], owner[name] = entry, file
        metadata = files[0].metadata
        _check_tensor_count(metadata, len(tensors), path)
        mapped = map_model(metadata, tensors, lambda entry: owner[entry.name].data(entry), path)
    except TiercelError:
        for file in files:
            file.close()
        raise
    known = {}
    for name, entry in tensors.items():
        place = mapped.places[name]
        known[place.name] = Tensor(
            place.name, entry.shape, entry.format, owner[name].data(entry), place.row_permutation
        )
    if any(len(tensor.shape) == 3 for tensor in known.values()):
        from tiercel.loaders.stacked_experts import split_experts

        try:
            known = split_experts(known, str(path))
        except TiercelError:
            for file in files:
                file.close()
            raise
    return Checkpoint(
        path=path,
        kind="gguf",
        config=mapped.config,
        tensors=Tensors(known, {}, str(path)),
        files=files,
        generation_config=generation_config(metadata, str(path)),
        metadata=metadata,
        norm_weights_include_one=mapped.norm_weights_include_one,
    )


def _open_parts(path: Path) -> "tuple[GgufFile, ...]":
    """Open a GGUF model's only file, or all of its parts in order."""
    from tiercel.loaders.gguf_fields import scalar
    from tiercel.loaders.gguf_file import GgufFile

    first = GgufFile(path)
    files = [first]
    try:
        n_parts = scalar(first.metadata, "split.count", 1, str(path))
        if type(n_parts) is not int or not 0 <= n_parts <= _MAX_PARTS:
            raise ModelFileError(f"{path}: split.count is {str(n_parts)[:24]}; 1 to {_MAX_PARTS} is needed")
        if n_parts > 1:
            match = _PART_NAME.fullmatch(path.name)
            if match is None or int(match["part"]) != 1 or int(match["parts"]) != n_parts:
                raise ModelFileError(
                    f"{path}: one of {n_parts} parts; give the first, named ...-00001-of-{n_parts:05}.gguf, with the "
                    "others beside it"
                )
            for part in range(2, n_parts + 1):
                files.append(GgufFile(path.with_name(f"{match['stem']}-{part:05}-of-{n_parts:05}.gguf")))
        for number, file in enumerate(files):
            says = [scalar(file.metadata, key, default, str(file.path)) for key, default in _PART_KEYS]
            if says != [number, n_parts]:
                raise ModelFileError(f"{file.path}: says it is another part than its name; fetch all parts again")
    except TiercelError:
        for file in files:
            file.close()
        raise
    return tuple(files)


def _check_tensor_count(metadata: "Mapping[str, Value]", n_tensors: int, path: Path) -> None:
    from tiercel.loaders.gguf_fields import scalar

    claimed = scalar(metadata, "split.tensors.count", n_tensors, str(path))
    if claimed != n_tensors:
        raise ModelFileError(
            f"{path}: its parts hold {n_tensors} tensors, {str(claimed)[:24]} are needed; fetch all parts"
        )


def _open_safetensors(folder: Path, names: list[str]) -> Checkpoint:
    from tiercel.loaders.safetensors_file import SafetensorsFile
    from tiercel.loaders.stacked_experts import STACKING_MODEL_TYPES, split_experts

    # A step's longest length is no length in Mamba2's configs, and Python writes that as Infinity.
    config = read_json_object(folder / "config.json", may_be_infinite=True)
    if "quantization_config" not in config and (folder / _MODELOPT).exists():
        # Where ModelOpt wrote it before it wrote into config.json.
        found = read_json_object(folder / _MODELOPT).get("quantization")
        config["quantization_config"] = {**found, "quant_method": "modelopt"} if isinstance(found, dict) else found
    generation = folder / "generation_config.json"
    placed = _index(folder, names)
    files: list[SafetensorsFile] = []
    try:
        known: dict[str, Tensor] = {}
        unsupported: dict[str, str] = {}
        for file_name, wanted in placed.items():
            file = SafetensorsFile(folder / file_name)
            files.append(file)
            _add_tensors(file, wanted, known, unsupported)
        quantization = _gather(config, placed, files, known, unsupported, str(folder))
        if config.get("model_type") in STACKING_MODEL_TYPES:
            known = split_experts(known, str(folder))
        elif config.get("model_type") == "gpt_oss":
            from tiercel.loaders.interleaved_experts import split_interleaved

            known = split_interleaved(known, str(folder))
        generation_settings = read_json_object(generation) if generation.exists() else {}
    except TiercelError:
        for file in files:
            file.close()
        raise
    return Checkpoint(
        path=folder,
        kind="safetensors",
        config=config,
        tensors=Tensors(known, unsupported, str(folder)),
        files=tuple(files),
        generation_config=generation_settings,
        quantization=quantization,
    )


def _gather(
    config: dict[str, Any],
    placed: "dict[str, set[str] | None]",
    files: "list[SafetensorsFile]",
    known: dict[str, Tensor],
    unsupported: dict[str, str],
    where: str,
) -> Quantization | None:
    """Put each matrix that lies in parts in place of its parts."""
    from tiercel.loaders.quantization_config import read_scheme

    scheme = read_scheme(config, where)
    if scheme is None:
        return None
    from tiercel.loaders.quantized_matrices import Stored, gather_matrices

    stored = {
        name: Stored(name, entry.dtype, entry.shape, file.data(entry))
        for file, wanted in zip(files, placed.values(), strict=True)
        for name, entry in file.tensors.items()
        if wanted is None or name in wanted
    }
    matrices, read = gather_matrices(scheme, stored)
    if not matrices:
        raise ModelFileError(
            f"{where}: no tensor is stored as {scheme.name}, as config.json's quantization_config says; "
            "the config and the weights are not of one model"
        )
    for name in read:
        known.pop(name, None)
        unsupported.pop(name, None)
    formats: dict[Format, int] = {}
    for name, matrix in matrices.items():
        known[name] = Tensor(name, matrix.shape, matrix.format, matrix.codes.data, matrix=matrix)
        formats[matrix.format] = formats.get(matrix.format, 0) + matrix.format.nbytes(prod(matrix.shape))
    n_bytes = sum(matrix.n_bytes for matrix in matrices.values())
    return Quantization(scheme.name, len(matrices), n_bytes, formats, scheme.notes)


def _add_tensors(
    file: "SafetensorsFile", wanted: set[str] | None, known: dict[str, Tensor], unsupported: dict[str, str]
) -> None:
    """Add the wanted tensors of a file, or all."""
    for name in file.tensors if wanted is None else sorted(wanted):
        entry = file.tensors.get(name)
        if entry is None:
            raise ModelFileError(
                f"{file.path}: {_INDEX} puts tensor {name[:80]!r} there and it is missing; fetch all again"
            )
        if entry.format is None:
            unsupported[name] = entry.dtype
        else:
            known[name] = Tensor(name, entry.shape, entry.format, file.data(entry))


def _index(folder: Path, names: list[str]) -> dict[str, set[str] | None]:
    """Tell which files make up the model, and which tensors count in each; None means all.

    `model.safetensors` comes first, as in transformers; then the index; then a single file of any name. Files and
    tensors that an index does not name are not part of the model.
    """
    if _SINGLE in names:
        return {_SINGLE: None}
    if not (folder / _INDEX).exists():
        if len(names) != 1:
            raise ModelFileError(
                f"{folder}: {len(names)} .safetensors files and no {_INDEX}; it is needed to tell which belong together"
            )
        return {names[0]: None}
    weight_map = read_json_object(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{folder / _INDEX}: weight_map is missing or empty; it must map tensors to files")
    placed: dict[str, set[str] | None] = {}
    wanted: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        # Only names that the folder listing gave: no path can lead out of the folder.
        if not isinstance(name, str) or name not in names:
            raise ModelFileError(
                f"{folder / _INDEX}: tensor {tensor[:80]!r} is in {str(name)[:80]!r}; a .safetensors file of the "
                "folder is needed; fetch the checkpoint again, all of its parts"
            )
        wanted.setdefault(name, set()).add(tensor)
    placed.update(sorted(wanted.items()))
    return placed
