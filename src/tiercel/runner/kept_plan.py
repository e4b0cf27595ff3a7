"""What a plan is, once it is decided, in a form that can be kept: see `ready`, which packs by the first half of it.

Knows how a kept plan is taken from a checkpoint that was read, and how a checkpoint is made of it without reading.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from tiercel.loaders.checkpoint import Checkpoint, LateMetadata, Tensor, Tensors
from tiercel.loaders.mapped_file import MappedFile
from tiercel.models.info import ModelInfo
from tiercel.ops.lowered import Lowered
from tiercel.ops.place import Placement
from tiercel.ops.program import Weight
from tiercel.quant.formats import Format
from tiercel.runner.ready import Begun, Kept, KeptTensor, Recipe, matrices
from tiercel.runner.weights import FORMAT_CODES

if TYPE_CHECKING:
    from tiercel.loaders.gguf_file import GgufFile


class Decided(msgspec.Struct, frozen=True):
    """The second half of a kept plan: all but the tensors."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    norm_weights_include_one: bool
    info: ModelInfo
    program: Lowered
    placement: Placement
    max_len_tokens: int
    identity: str


def decided(begun: Begun) -> Decided:
    """Read the second half.

    Raises: msgspec.MsgspecError: it is none.
    """
    return msgspec.msgpack.decode(begun.kept.later, type=Decided)


def checkpoint_of(begun: Begun, plan: Decided, path: Path) -> Checkpoint:
    """Make the checkpoint that the kept plan was made of; its file is not parsed. Ask `begun.is_same` before."""
    file = MappedFile(path, begun.map)
    known = LateTensors({kept.name: kept for kept in begun.kept.tensors}, file)
    return Checkpoint(
        path=path,
        kind="gguf",
        config=plan.config,
        tensors=Tensors(known, {}, str(path)),
        files=(file,),
        generation_config=plan.generation_config,
        metadata=LateMetadata(path),
        norm_weights_include_one=plan.norm_weights_include_one,
        known_digest=begun.kept.digest,
    )


class LateTensors(Mapping[str, Tensor]):
    """The tensors of a kept plan, each made when it is asked for: numpy is not imported before."""

    def __init__(self, kept: Mapping[str, KeptTensor], file: MappedFile) -> None:
        self._kept = kept
        self._file = file

    def __getitem__(self, name: str) -> Tensor:
        import numpy as np

        kept = self._kept[name]
        data = self._file.bytes[kept.start : kept.start + kept.nbytes]
        order = None if kept.row_order is None else np.frombuffer(kept.row_order, "<i4").astype(np.intp)
        return Tensor(kept.name, kept.shape, Format(kept.format), data, order)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def kept_of(
    key: str, checkpoint: Checkpoint, plan: Decided, packed: list[Weight], *, expand_to_f32: bool
) -> Kept | None:
    """Return what is to be kept; None for several files, stacked experts, and what is no GGUF."""
    if checkpoint.kind != "gguf" or len(checkpoint.files) != 1:
        return None
    file = cast("GgufFile", checkpoint.files[0])
    if len(checkpoint.tensors) != len(file.tensors):
        return None  # experts that the file stacks: more tensors than it has entries
    before, head_bytes, pieces = checkpoint.digest_recipe()
    import numpy as np

    tensors = []
    # A checkpoint lists its tensors in the file's order, under other names.
    for tensor, entry in zip(checkpoint.tensors.values(), file.tensors.values(), strict=True):
        assert (tensor.shape, tensor.format, tensor.data.nbytes) == (entry.shape, entry.format, entry.nbytes)
        order = tensor.row_permutation
        row_order = None if order is None else np.ascontiguousarray(order, "<i4").tobytes()
        tensors.append(KeptTensor(tensor.name, tensor.shape, str(tensor.format), entry.start, entry.nbytes, row_order))
    jobs = {}
    for weight in packed:
        if checkpoint.tensors[weight.name].format is not weight.format or weight.rows is not None:
            return None
        code, k = FORMAT_CODES[weight.format], weight.shape[1]
        jobs[weight.name] = (code, weight.format.nbytes(k), k, expand_to_f32 and weight.format.is_quantized)
    return Kept(
        key=key,
        digest=checkpoint.digest(),
        recipe=Recipe(file.size, before, head_bytes, pieces),
        tensors=tensors,
        matrices=matrices(tensors, jobs),
        later=msgspec.msgpack.encode(plan),
    )
