"""From a drafter's folder, or a model's own draft head, to a `DraftModel` with its tensors, checked against its target.

Everything that can be wrong between a drafter and a target is refused here, by the name of the field or tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tiercel.base.errors import ModelFileError
from tiercel.loaders.checkpoint import Tensor
from tiercel.loaders.draft_checkpoint import DraftFiles, open_draft_files
from tiercel.models.drafters.config import WHERE, in_one_form
from tiercel.models.drafters.dflash import DFlash
from tiercel.models.drafters.dflash2 import DFlash2
from tiercel.models.drafters.dspark import DSpark
from tiercel.models.drafters.dspark_mla import DSparkMla
from tiercel.models.drafters.eagle3 import Eagle3
from tiercel.models.drafters.interface import DraftModel
from tiercel.models.drafters.mtp import Mtp
from tiercel.models.fields import ConfigFields
from tiercel.models.model import Model
from tiercel.quant.formats import Format

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_KINDS: Mapping[str, type[DFlash | DFlash2 | DSpark | Eagle3]] = {
    "dflash": DFlash,
    "dflash2": DFlash2,
    "dspark": DSpark,
    "eagle3": Eagle3,
}
# A published layout of a kind that is another class.
_LAYOUTS: Mapping[str, type[DSparkMla]] = {"K3DSparkModel": DSparkMla}
_HEAD = "draft.lm_head.weight"
# What a drafter's float matrices are rounded to, whatever the target's are: drafts come as often, and a pass takes half
# of the time (docs/log.md).
USUAL_WEIGHTS: Final = Format.Q8_0
_FLOATS = (Format.F32, Format.F16, Format.BF16)


@dataclass(frozen=True, slots=True)
class PlannedDraftTensor:
    """Shape and format of a drafter's tensor as it will be used."""

    shape: tuple[int, ...]
    format: Format


@dataclass(frozen=True)
class DraftCheckpoint:
    """A drafter and its tensors by canonical name. Owner: who opened it; `close` when its weights are packed.

    `d2t`, int32 [V_draft], is target id minus own id; None where the vocabularies are one. `trained_on` is the digest
    of the target that it was trained for, if the files say so.
    """

    model: DraftModel
    tensors: Mapping[str, Tensor]
    d2t: "npt.NDArray[np.int32] | None" = None
    trained_on: str | None = None
    files: DraftFiles | None = field(default=None, repr=False)

    @property
    def digest(self) -> str:
        """What tells its weights from others'; of a model's own draft head, which is in the model's, empty."""
        return "" if self.files is None else self.files.checkpoint.digest()

    def planned(self, weights: Format | None = USUAL_WEIGHTS) -> dict[str, PlannedDraftTensor]:
        """Return shape and format of each tensor that ops read. `weights`: that of float matrices; None: their own."""
        of_head = set(self.model.head().weights.values())
        planned = {}
        for name, tensor in self.tensors.items():
            if name in of_head:
                continue
            found = tensor.format
            # The coefficients of short convolutions are few, and multiply everything.
            is_matrix = len(tensor.shape) == 2 and tensor.shape[1] % 32 == 0 and "kernel_projection" not in name
            if weights is not None and is_matrix and found in _FLOATS:
                found = weights
            planned[name] = PlannedDraftTensor(tensor.shape, found)
        return planned

    def head_arrays(self) -> "dict[str, npt.NDArray[np.float32]]":
        """Return the head's tensors by role, float32; see `HeadSpec`.

        Raises:
            ModelFileError: one holds NaN or infinity.
        """
        found = {}
        for role, name in self.model.head().weights.items():
            found[role] = _finite(name, self.tensors[name])
        return found

    def close(self) -> None:
        """Release the files. Tensors taken before stay valid."""
        if self.files is not None:
            self.files.checkpoint.close()


def open_drafter(path: Path, target: Model, target_tensors: Mapping[str, Tensor]) -> DraftCheckpoint:
    """Open a drafter's folder for a target.

    Without a head of its own the drafter's is the target's; with a vocabulary of its own, its rows of it.

    Raises:
        ModelNotFound: nothing is at `path`.
        ModelFileError: the files are damaged or incomplete, or a field or tensor is of another target.
        UnsupportedModel: it asks for arithmetic that is not implemented.
    """
    files = open_draft_files(path)
    try:
        kind, config = in_one_form(files.config)
        model = read_drafter(kind, config, target, frozenset(files.tensors))
        head = model.head()
        d2t = _checked_d2t(files, head.n_vocab, target.info.vocab_size, is_needed=head.d2t is not None)
        tensors = {f"draft.{name}": tensor for name, tensor in files.tensors.items()}
        tensors = {name: tensor for name, tensor in tensors.items() if not model.may_ignore(name)}
        wanted = model.draft_weights()
        if _HEAD in wanted and _HEAD not in tensors and files.target_ids is not None:
            tensors[_HEAD] = _rows_of(target_tensors[target.ends()[1]], files.target_ids)
        _check_tensors(str(path), wanted, tensors)
        for role, name in head.weights.items():
            if role.startswith("confidence"):
                _finite(name, tensors[name])
        trained_on = config.get("target_digest")
        return DraftCheckpoint(model, tensors, d2t, trained_on if isinstance(trained_on, str) else None, files)
    except BaseException:
        files.checkpoint.close()
        raise


def read_drafter(kind: str, config: Mapping[str, Any], target: Model, names: frozenset[str]) -> DraftModel:
    """Return the drafter that a config in one form says; `names` are its checkpoint's tensors, as published.

    Raises:
        ModelFileError, UnsupportedModel: as `open_drafter`.
    """
    said = config.get("architectures")
    layout = _LAYOUTS.get(said[0]) if isinstance(said, list) and said and isinstance(said[0], str) else None
    made: DraftModel = (layout or _KINDS[kind]).from_config(config, target, names)
    return made


def open_mtp(target: Model, target_tensors: Mapping[str, Tensor], n_draft: int | None = None) -> DraftCheckpoint:
    """Return a target checkpoint's own draft head; with `n_draft` only as many modules as that many drafts need.

    Raises:
        UnsupportedModel: the architecture has none.
        ModelFileError: the checkpoint has none, or one that is not whole.
    """
    model = Mtp.of_checkpoint(target, target_tensors, *([] if n_draft is None else [n_draft]))
    return DraftCheckpoint(model, {name: target_tensors[name] for name in model.draft_weights()})


def _checked_d2t(files: DraftFiles, n_draft: int, n_target: int, *, is_needed: bool) -> "npt.NDArray[np.int32] | None":
    import numpy as np

    ids, fields = files.target_ids, ConfigFields(files.config, WHERE)
    if ids is None or not is_needed:
        if is_needed:
            raise fields.broken("draft_vocab_size", n_draft, f"a tensor d2t, or the target's {n_target},")
        is_plain = ids is None or np.array_equal(ids, np.arange(n_draft))
        if not is_plain:
            raise fields.broken("draft_vocab_size", n_draft, "no tensor d2t, as the vocabularies are of one size,")
        return None
    if len(ids) != n_draft:
        raise fields.broken("draft_vocab_size", n_draft, f"{len(ids)}, the length of tensor d2t,")
    if ids.min() < 0 or ids.max() >= n_target:
        raise ModelFileError(
            f"{files.path}: tensor d2t makes target tokens {ids.min()} to {ids.max()}; 0 to {n_target - 1} are needed; "
            "the drafter is of another target"
        )
    return (ids - np.arange(n_draft)).astype(np.int32)


def _rows_of(tensor: Tensor, ids: "npt.NDArray[np.int64]") -> Tensor:
    """Return some rows of a matrix as a tensor of its own."""
    import numpy as np

    rows = np.ascontiguousarray(tensor.rows()[ids])
    return Tensor(_HEAD, (len(ids), tensor.shape[1]), tensor.format, rows.reshape(-1))


def _check_tensors(where: str, wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise ModelFileError(
            f"{where}: tensor {_first(missing)} is missing; shape {list(wanted[missing[0]])} is needed; "
            f"{len(tensors)} tensors are there; check that all files are, and that config.json is theirs"
        )
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ModelFileError(
                f"{where}: tensor {tensors[name].name} has shape {list(tensors[name].shape)}; {list(shape)} is needed; "
                "the config and the weights are not of one drafter, or it is of another target"
            )
    extra = [name for name in tensors if name not in wanted]
    if extra:
        raise ModelFileError(
            f"{where}: tensor {_first([tensors[name].name for name in extra])} of shape "
            f"{list(tensors[extra[0]].shape)} is read by nothing; the drafter's {len(wanted)} tensors are needed; "
            "check that config.json is theirs"
        )


def _finite(name: str, tensor: Tensor) -> "npt.NDArray[np.float32]":
    import numpy as np

    values = tensor.float32()
    if not np.isfinite(values).all():
        raise ModelFileError(f"tensor {name.removeprefix('draft.')}: holds NaN or infinity; fetch the drafter again")
    return values


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
