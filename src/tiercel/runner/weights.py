"""From a checkpoint's tensors to the packed weights and small vectors that the native kernels read.

Each matrix is packed once, whoever uses it: a tied embedding serves the look-up and the head. Knows formats, not
models.
"""

import math
from array import array
from collections.abc import Iterable, Mapping
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from tiercel import _native
from tiercel.base.errors import ModelFileError
from tiercel.loaders.checkpoint import Tensor
from tiercel.ops.program import Weight
from tiercel.quant.formats import Format
from tiercel.runner.ready import ReadyWeights

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The order of enum class Format in kernels.hpp.
FORMAT_CODES = {name: code for code, name in enumerate(Format)}
# Rows quantised at a time: bounds the float32 copy to some tens of MB at a 16k-wide matrix.
_QUANTIZE_ROWS = 512


class PackedWeightStore:
    """Packs weights; `ready` are those that somebody has packed or found already.

    With `releases`, tensors are views of a file's map, whose pages are given back once they are packed: they would
    count twice.

    Owner: who builds a runner. `pack_all` uses threads of its own; everything else is for one thread.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        expand_to_f32: bool,
        n_threads: int,
        releases: bool = False,
        ready: ReadyWeights | None = None,
    ) -> None:
        self._tensors = tensors
        self._expand = expand_to_f32
        self._n_threads = n_threads
        self._releases = releases
        self._arena = _native.PackedArena()
        self._ready = ReadyWeights({}, {}) if ready is None else ready
        self._packed = dict(self._ready.matrices)
        for name, matrix in self._packed.items():
            _refuse_infinite(name, matrix)

    @property
    def nbytes(self) -> int:
        """Bytes of all packed matrices so far."""
        return sum(w.nbytes for w in self._packed.values())

    def matrix(self, weight: Weight) -> _native.PackedMatrix:
        """Return the weight as tiles, packing it on first use; a format other than the file's means quantise it now."""
        if weight.key not in self._packed:
            self.pack_all([weight])
        return self._packed[weight.key]

    def pack_all(self, weights: Iterable[Weight]) -> None:
        """Pack those of the matrices that are not yet packed, on all threads, the largest first.

        Raises: the first error of any matrix; `ModelFileError` of one that holds NaN or infinity, in a scale or itself.
        """
        todo = {w.key: w for w in weights if w.key not in self._packed}
        ready: list[Weight] = []
        unlike: list[Weight] = []
        for weight in sorted(todo.values(), key=lambda w: w.nbytes, reverse=True):
            tensor = self._tensors[weight.name]
            is_ready = tensor.format == weight.format and tensor.matrix is None
            (ready if is_ready else unlike).append(weight)
        jobs = [self._job(weight) for weight in ready]
        packing = _native.Packing(jobs, self._arena, self._n_threads - 1, self._releases)
        for weight, matrix in zip(ready, packing.join(), strict=True):
            _refuse_infinite(weight.name, matrix)
            self._packed[weight.key] = matrix
        self._make_all(unlike)

    def vector(self, weight: Weight) -> "array[float]":
        """Return a norm weight or bias as float32, plus one if the program asks for it. Refuses NaN and infinity."""
        stored = None if weight.plus_one else self._ready.vectors.get(weight.name)
        found = array("f", self._float32(weight) if stored is None else stored)
        # No sum of so few float32 leaves the range of a float64.
        if not math.isfinite(sum(found)):
            raise _holds_infinity(weight.name)
        return found

    def head_matrices(self, weight: Weight, n_heads: int, n_keys: int, *, values: bool) -> "npt.NDArray[np.float32]":
        """Return one part of a latent attention's weight [H * (keys + values), rank], for the core's per-head products.

        Its values are the checkpoint's, expanded: no `quantization` rounds them, as every token's keys go through them.

        Shapes:
            returns  keys: [H * keys * pad16(rank)]; values: [H * rank * pad16(v)]  float32, flat

        Raises:
            ModelFileError: it holds NaN or infinity.
        """
        import numpy as np

        whole = self._tensors[weight.name].float32().reshape(n_heads, -1, weight.shape[1])
        part = whole[:, n_keys:].swapaxes(1, 2) if values else whole[:, :n_keys]
        if not np.isfinite(part).all():
            raise _holds_infinity(weight.name)
        padded = np.zeros((*part.shape[:2], -(-part.shape[2] // 16) * 16), np.float32)
        padded[..., : part.shape[2]] = part
        return padded.reshape(-1)

    def _float32(self, weight: Weight) -> bytes:
        import numpy as np

        values = self._tensors[weight.name].float32().reshape(-1)
        return (values + np.float32(1) if weight.plus_one else values).tobytes()

    def _job(self, weight: Weight) -> "tuple[int, npt.NDArray[np.uint8], int, npt.NDArray[np.int32] | None, bool]":
        import numpy as np

        tensor = self._tensors[weight.name]
        k = weight.shape[1]
        rows = tensor.data.reshape(-1, tensor.format.nbytes(k))
        given = tensor.row_permutation
        order = None if given is None else np.ascontiguousarray(given, dtype=np.int32)
        if weight.rows is not None:
            found = _row_ids(weight.rows, len(rows))
            order = np.ascontiguousarray(found if order is None else order[found], dtype=np.int32)
        return FORMAT_CODES[weight.format], rows, k, order, self._is_expanded(weight)

    def _is_expanded(self, weight: Weight) -> bool:
        return self._expand and weight.format.is_quantized

    def _make_all(self, weights: list[Weight]) -> None:
        """Make the rows that the file has otherwise, and pack, several at a time: one thread a matrix."""
        waiting: SimpleQueue[Weight] = SimpleQueue()
        for weight in weights:
            waiting.put(weight)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                while not errors:
                    weight = waiting.get_nowait()
                    self._packed[weight.key] = self._make(weight)
            except Empty:
                return
            except BaseException as error:  # noqa: BLE001 a thread's boundary: raised again below
                errors.append(error)

        n_others = min(self._n_threads, len(weights)) - 1
        threads = [Thread(target=work, name="tiercel-pack") for _ in range(n_others)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _make(self, weight: Weight) -> _native.PackedMatrix:
        made = _native.PackedMatrix(
            format=FORMAT_CODES[weight.format],
            rows=self._made_rows(self._tensors[weight.name], weight),
            k=weight.shape[1],
            expand_to_f32=self._is_expanded(weight),
            arena=self._arena,
        )
        _refuse_infinite(weight.name, made)
        return made

    def _made_rows(self, tensor: Tensor, weight: Weight) -> "npt.NDArray[np.uint8]":
        import numpy as np

        from tiercel.quant.quantize import quantize

        n, k = weight.shape
        out = np.empty((n, weight.format.nbytes(k)), np.uint8)
        stored = tensor.rows() if tensor.matrix is None or weight.rows is not None else None
        if weight.rows is not None and stored is not None:
            stored = stored[_row_ids(weight.rows, len(stored))]
        for first in range(0, n, _QUANTIZE_ROWS):
            end = min(first + _QUANTIZE_ROWS, n)
            part = tensor.row_range(first, end) if stored is None else stored[first:end]
            if tensor.format == weight.format:
                out[first:end] = part
                continue
            values = Tensor(
                tensor.name, (len(part), k), tensor.format, np.ascontiguousarray(part).reshape(-1)
            ).float32()
            try:
                out[first:end] = quantize(values, weight.format)
            except ModelFileError as error:
                raise ModelFileError(f"tensor {tensor.name}, from row {first}: {error}") from None
        return out


def _refuse_infinite(name: str, matrix: _native.PackedMatrix) -> None:
    if not matrix.is_finite:
        raise _holds_infinity(name)


def _holds_infinity(name: str) -> ModelFileError:
    return ModelFileError(f"tensor {name}: holds NaN or infinity; fetch the model again")


def _row_ids(rows: tuple[int, int, int], n: int) -> "npt.NDArray[np.intp]":
    """Return the rows, of n, that `Weight.rows` names."""
    import numpy as np

    period, start, count = rows
    return (np.arange(0, n, period)[:, None] + np.arange(start, start + count)).reshape(-1)
