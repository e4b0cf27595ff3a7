"""What a model is to the rest of Tiercel: facts, the weights it needs, and a forward pass to record."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import msgspec

from tiercel.base.errors import UnsupportedModel
from tiercel.models.info import ModelInfo
from tiercel.models.pooling import PoolingSpec
from tiercel.ops.program import Program, Value
from tiercel.ops.recorder import ComputeDtype, Recorder
from tiercel.quant.formats import Format

if TYPE_CHECKING:
    from tiercel.models.drafters.interface import DraftModel


TapStream = Literal["residual", "prefix", "attn_res"]
"""What a tap is of: the one residual stream; of a model with a residual bank the running row, which most checkpoints
call `prefix`, or what the next layer's attention mixes of it and the bank. Without a bank the first two are one.
"""


class RecordOptions(msgspec.Struct, frozen=True):
    """What a forward pass is recorded for. `max_len_tokens` fixes rotary tables that depend on the length."""

    max_len_tokens: int
    norm_weights_include_one: bool = False
    tap_stream: TapStream = "residual"


class Tensor(Protocol):
    """What a model needs to know of a checkpoint's tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, as the checkpoint has them."""
        ...

    @property
    def format(self) -> Format:
        """Format of its elements."""
        ...


class Model(ABC):
    """One model: an architecture with its config read and checked. `norms_add_one`: norms multiply by 1 + weight."""

    norms_add_one: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a config dict in Hugging Face's names.

        Raises:
            UnsupportedModel: a field asks for arithmetic that is not implemented.
            ModelFileError: a field is missing or makes no sense.
        """

    @property
    @abstractmethod
    def info(self) -> ModelInfo:
        """Facts about the model."""

    @property
    def pooling(self) -> PoolingSpec | None:
        """How a pooling model's rows become its answers; None: the model gives logits."""
        return None

    @abstractmethod
    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight that the forward pass reads, by canonical name."""

    @abstractmethod
    def may_ignore(self, name: str) -> bool:
        """Tell whether a checkpoint's tensor may be left unread, because the model needs no such value."""

    def other_shapes(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return what else a weight's shape may be in a checkpoint, whose first elements are then the weight."""
        del name
        return ()

    @abstractmethod
    def forward(self, rec: Recorder, options: RecordOptions) -> Value:
        """Write one step in ops and return its logits, or a pooling model's rows."""

    @property
    def n_tap_layers(self) -> int:
        """Layers after which a drafter may read a stream, but for the last; 0: it may read none."""
        return 0

    @property
    def tap_streams(self) -> tuple[TapStream, ...]:
        """The streams that a drafter may read after its layers."""
        return "residual", "prefix"

    def ends(self) -> tuple[str, str]:
        """Return the names of the embedding and of the head, which a drafter may share.

        Raises:
            UnsupportedModel: the model has no such two matrices.
        """
        raise UnsupportedModel(
            f"models: no drafter can share {self.info.architecture}'s head; speculate in another way"
        )

    @property
    def rope_thetas(self) -> frozenset[float]:
        """The bases of its rotations of keys; none where positions are not said so."""
        return frozenset()

    def check_taps(self, taps: Sequence[int], stream: TapStream = "residual") -> None:
        """Check that the stream can be read after these layers; -1 is the embeddings.

        Raises:
            UnsupportedModel: one cannot; the last layer's never can.
        """
        n = 0 if self.pooling is not None or stream not in self.tap_streams else self.n_tap_layers
        if taps and not n:
            raise UnsupportedModel(
                f"models: {self.info.architecture} has no {stream} stream for drafters; speculate in another way"
            )
        for i in taps:
            if not -1 <= i < n - 1:
                raise UnsupportedModel(
                    f"models: {self.info.architecture}: tap {i} is none of its layers -1 (embeddings) to {n - 2}; "
                    "choose others"
                )
        if len(set(taps)) < len(taps):
            raise UnsupportedModel(f"models: taps {list(taps)} name a layer twice; name each once")

    @property
    def n_mtp_modules(self) -> int:
        """Modules of the model's own draft head, one for each of its first drafts; 0 for a model without."""
        return 0

    def mtp_module_weights(self, module: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight that only the draft head's module reads; some may be all modules'."""
        del module
        return {}

    def mtp_weights(self, n_modules: int | None = None) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight that only the draft head's first modules read, or all; none without a head.

        A checkpoint that has the first of them has the head.
        """
        found: dict[str, tuple[int, ...]] = {}
        for module in range(self.n_mtp_modules if n_modules is None else n_modules):
            found |= self.mtp_module_weights(module)
        return found

    def has_mtp(self, names: Container[str]) -> bool:
        """Tell whether the tensors of these names have a draft head among them."""
        return next(iter(self.mtp_weights()), None) in names

    def forward_mtp(self, rec: Recorder, options: RecordOptions, module: int) -> Value:
        """Write one step of the draft head's module in ops and return its logits."""
        del rec, options, module
        raise UnsupportedModel(f"models: {self.info.architecture} has no draft head; speculate in another way")

    def record(
        self,
        tensors: Mapping[str, Tensor],
        *,
        compute_dtype: ComputeDtype = ComputeDtype.AUTO,
        max_len_tokens: int | None = None,
        norm_weights_include_one: bool = False,
        keeps_hidden: bool = False,
        drafter: "DraftModel | None" = None,
        taps: Sequence[int] = (),
    ) -> Program:
        """Record a step for weights of the given shapes and formats.

        With `keeps_hidden` it gives out, beside the logits, what a draft head reads of every token. With a `drafter` it
        computes and keeps, or gives out, what that reads; its tensors are among `tensors`. With `taps` it gives out the
        residual streams after those layers (-1: the embeddings) and the final normed rows, side by side: for training.

        Raises:
            ModelFileError: a weight is missing or has another shape than the config asks for.
            ShapeError: the config's sizes do not fit an op's contract.
            UnsupportedModel: a layer cannot be tapped.
        """
        assert drafter is None or not taps, "taps are for training; a drafter says its own"
        read = taps if drafter is None else drafter.taps
        stream: TapStream = "residual" if drafter is None else drafter.tap_stream
        self.check_taps(read, stream)
        keeps_hidden = keeps_hidden or bool(taps) or (drafter is not None and drafter.reads_hidden)
        wanted = self.expected_weights() if drafter is None else self.expected_weights() | drafter.context_weights()
        rec = self._recorder(tensors, wanted, compute_dtype, keeps_hidden=keeps_hidden, taps=read)
        options = self._options(max_len_tokens, norm_weights_include_one, stream)
        output = self.forward(rec, options)
        if taps:
            rec.give_out(_joined(rec, [*rec.tapped(), *([] if rec.hidden is None else [rec.hidden])]))
        if drafter is not None:
            given = drafter.record_context(rec, options, rec.tapped(), self.info.next_layer)
            if given is not None:
                rec.give_out(given)
        return rec.finish(output, is_pooling=self.pooling is not None)

    def record_mtp(
        self,
        tensors: Mapping[str, Tensor],
        *,
        module: int = 0,
        compute_dtype: ComputeDtype = ComputeDtype.AUTO,
        max_len_tokens: int | None = None,
        norm_weights_include_one: bool = False,
    ) -> Program:
        """Record a step of a module of the model's own draft head (multi-token prediction), a program like a model's.

        Module s's row at position t takes token t + s + 1 and, as its given row, what module s - 1 gave out at t, the
        first what the model, recorded with `keeps_hidden`, did; its logits are of token t + s + 2. What the last gives
        out may be given to its own next step.

        Raises:
            UnsupportedModel: the model has no such module.
            ModelFileError, ShapeError: as `record`.
        """
        if not 0 <= module < self.n_mtp_modules:
            n = self.n_mtp_modules
            raise UnsupportedModel(
                f"models: {self.info.architecture} has no draft head, or none of {module + 1} modules but of {n}; "
                "speculate in another way"
            )
        wanted = self.mtp_module_weights(module) | self.expected_weights()
        rec = self._recorder(tensors, wanted, compute_dtype, keeps_hidden=True)
        return rec.finish(self.forward_mtp(rec, self._options(max_len_tokens, norm_weights_include_one), module))

    def _options(
        self, max_len_tokens: int | None, norm_weights_include_one: bool, tap_stream: TapStream = "residual"
    ) -> RecordOptions:
        length = self.info.max_len_tokens if max_len_tokens is None else max_len_tokens
        return RecordOptions(length, norm_weights_include_one, tap_stream)

    def _recorder(
        self,
        tensors: Mapping[str, Tensor],
        wanted: Iterable[str],
        compute_dtype: ComputeDtype,
        *,
        keeps_hidden: bool,
        taps: Sequence[int] = (),
    ) -> Recorder:
        # Only what is read is looked at: what may be ignored can have a format that nothing reads.
        needed = {name: tensors[name] for name in wanted if name in tensors}
        shapes = {name: tuple(tensor.shape) for name, tensor in needed.items()}
        formats = {name: tensor.format for name, tensor in needed.items()}
        dtype = ComputeDtype(compute_dtype)
        return Recorder(self.info.architecture, shapes, formats, dtype, keeps_hidden=keeps_hidden, taps=taps)


def _joined(rec: Recorder, rows: Sequence[Value]) -> Value:
    found = rows[0]
    for other in rows[1:]:
        found = rec.join(found, other)
    return found
