"""A drafter's folder: its config, and its tensors under one name each, whoever published them.

Names lose the prefix `model.`; EAGLE-3's `midlayer` is `layers.0`. `d2t`, of integers, becomes a vector: the target's
id of each of the drafter's own. What serves training only is left out. Knows files and names, no drafter's arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercel.base.errors import ModelFileError
from tiercel.loaders.checkpoint import Checkpoint, Tensor, open_checkpoint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tiercel.loaders.safetensors_file import SafetensorsFile

_D2T = "d2t"
# Tables of training, or that follow from others; a verifier's head is the target's.
_LEFT_OUT = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
_WITHOUT_WEIGHT = (
    "mask_embedding",
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
)


@dataclass(frozen=True)
class DraftFiles:
    """An open drafter. `target_ids`, int64 [V_draft], are the target's ids of its own vocabulary, if it has one."""

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    target_ids: "npt.NDArray[np.int64] | None"
    checkpoint: Checkpoint = field(repr=False)


def open_draft_files(path: Path) -> DraftFiles:
    """Open a drafter's folder: `config.json` and safetensors.

    Raises:
        ModelNotFound: nothing is at `path`.
        ModelFileError: what is there is damaged, incomplete, or no folder of safetensors.
    """
    checkpoint = open_checkpoint(path)
    try:
        if checkpoint.kind != "safetensors":
            raise ModelFileError(f"{path}: a GGUF file; a drafter is a folder of config.json and safetensors")
        tensors: dict[str, Tensor] = {}
        for published in checkpoint.tensors:
            name = canonical_name(published)
            if name in (_D2T, *_LEFT_OUT) or name.endswith("rotary_emb.inv_freq"):
                continue
            if name in tensors:
                raise ModelFileError(f"{path}: tensor {published} and another are both {name}; one of them is needed")
            found = replace(checkpoint.tensors[published], name=published)
            if name == "mask_embedding" and len(found.shape) == 2 and found.shape[0] == 1:
                found = replace(found, shape=found.shape[1:])
            tensors[name] = found
        return DraftFiles(path, checkpoint.config, tensors, _target_ids(checkpoint), checkpoint)
    except BaseException:
        checkpoint.close()
        raise


def canonical_name(published: str) -> str:
    """Return a published tensor's name as this package says it."""
    name = published.removeprefix("model.")
    name = "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
    bare = name.removesuffix(".weight")
    return bare if bare in _WITHOUT_WEIGHT else name


def _target_ids(checkpoint: Checkpoint) -> "npt.NDArray[np.int64] | None":
    import numpy as np

    files: tuple[SafetensorsFile, ...] = checkpoint.files  # type: ignore[assignment]
    for file in files:
        for published, entry in file.tensors.items():
            if canonical_name(published) != _D2T:
                continue
            types = {"I64": np.int64, "I32": np.int32}
            if entry.dtype not in types or len(entry.shape) != 1:
                raise ModelFileError(
                    f"{file.path}: tensor {published} is {entry.dtype} of shape {list(entry.shape)}; "
                    f"I64 of shape [draft_vocab_size] is needed"
                )
            offsets = np.frombuffer(file.data(entry).tobytes(), types[entry.dtype]).astype(np.int64)
            ids: npt.NDArray[np.int64] = offsets + np.arange(len(offsets))
            if len(np.unique(ids)) < len(ids):
                raise ModelFileError(
                    f"{file.path}: tensor {published} gives two of the drafter's tokens one id of the target; "
                    "offsets, target id minus own id, are needed"
                )
            return ids
    return None
