"""A model's own draft head (multi-token prediction) as a drafter: draft k of a chain is module k's.

Its programs are `Model.record_mtp`'s and its tensors are the target checkpoint's. For more drafts than modules the last
is run again, a place further, on what it gave itself: there it has keys of its own for all places before, made of
tokens as far ahead as it was trained for, and of what it is given only the row is a stand-in. Source for the modules'
chain: DeepSeek-AI 2024 (arXiv:2412.19437), section 2.2. vLLM begins again with the first module there, whose trained
distance is another. Of modules for more drafts than are asked for nothing is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.models.drafters.interface import DraftModel, HeadSpec, Shapes
from tiercel.models.model import Model, RecordOptions, Tensor
from tiercel.models.weights import check_mtp_weights
from tiercel.ops.program import KvLayer, Program, Value
from tiercel.ops.recorder import ComputeDtype, Recorder
from tiercel.quant.formats import Format

_MAX_DRAFTS = 16


class Mtp(DraftModel):
    """The draft head of `target`, or as much of it as `n_draft` drafts need.

    Raises:
        UnsupportedModel: the architecture has none.
    """

    kind = "chain"
    reads_hidden = True

    def __init__(self, target: Model, n_draft: int = _MAX_DRAFTS) -> None:
        self.n_modules = min(target.n_mtp_modules, n_draft)
        if not self.n_modules:
            raise UnsupportedModel(
                f"models: {target.info.architecture} has no draft head; speculate in another way than mtp"
            )
        self.target = target

    @classmethod
    def of_checkpoint(cls, target: Model, tensors: Mapping[str, Tensor], n_draft: int = _MAX_DRAFTS) -> "Mtp":
        """Return the drafter of a checkpoint that has the head's tensors.

        Raises:
            UnsupportedModel: the architecture has no draft head.
            ModelFileError: the checkpoint has none, or one that is not whole.
        """
        found = cls(target, n_draft)
        if not target.has_mtp(tensors):
            raise ModelFileError(
                f"models: {target.info.architecture}: the checkpoint has no draft head; its first tensor, "
                f"{next(iter(target.mtp_weights()))}, is needed; choose another checkpoint, or speculate in another way"
            )
        check_mtp_weights(target, tensors, found.n_modules)
        return found

    @property
    def name(self) -> str:
        """What it is called."""
        return "mtp"

    @property
    def taps(self) -> tuple[int, ...]:
        """No layers: it reads what the target's head reads."""
        return ()

    @property
    def n_draft_max(self) -> int:
        """Passes of a chain."""
        return _MAX_DRAFTS

    def draft_weights(self) -> Shapes:
        """Return the shapes of the head's tensors, which are the target checkpoint's, by its names."""
        return self.target.mtp_weights(self.n_modules)

    def shared_weights(self) -> tuple[str, ...]:
        """Return the target's tensors that the head's programs read too."""
        own, read = self.draft_weights(), (w.name for program in self._programs() for w in program.weights())
        return tuple(dict.fromkeys(name for name in read if name not in own))

    def kv_layers(self, first: int) -> tuple[KvLayer, ...]:
        """Return the head's layers of keys and values.

        Raises:
            UnsupportedModel: they are not those right behind the target's last.
        """
        layers = tuple(layer for program in self._programs() for layer in program.kv_layers)
        if [layer.index for layer in layers] != list(range(first, first + len(layers))):
            raise UnsupportedModel(
                f"models: {self.target.info.architecture}: the draft head's layers are {[x.index for x in layers]}; "
                f"those from {first} on are needed; speculate in another way"
            )
        return layers

    def record_context(self, rec: Recorder, options: RecordOptions, taps: Sequence[Value], first: int) -> Value | None:
        """Write nothing: what the target gives its head is kept by its own forward."""
        del rec, options, taps, first
        return None

    def record_draft(
        self,
        tensors: Mapping[str, Tensor],
        *,
        first: int,
        module: int = 0,
        compute_dtype: ComputeDtype = ComputeDtype.AUTO,
        max_len_tokens: int | None = None,
        norm_weights_include_one: bool = False,
    ) -> Program:
        """Record one pass of a module."""
        self.kv_layers(first)
        return self.target.record_mtp(
            tensors,
            module=module,
            compute_dtype=compute_dtype,
            max_len_tokens=max_len_tokens,
            norm_weights_include_one=norm_weights_include_one,
        )

    def head(self) -> HeadSpec:
        """Return a plain head over the target's vocabulary."""
        return HeadSpec(kind="plain", n_vocab=self.target.info.vocab_size)

    def _programs(self) -> tuple[Program, ...]:
        """Record with formats of no importance, to know their layers and the tensors they share."""
        shapes = self.target.expected_weights() | self.draft_weights()
        tensors = {name: _Float(shape) for name, shape in shapes.items()}
        return tuple(self.target.record_mtp(tensors, module=module) for module in range(self.n_modules))


@dataclass(frozen=True, slots=True)
class _Float:
    shape: tuple[int, ...]
    format: Format = Format.F32
