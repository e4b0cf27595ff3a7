"""From a checkpoint's tensors to the packed weights and small vectors that the native kernels read.

Each matrix is packed once, whoever uses it: a tied embedding serves the look-up and the head. Knows formats, not
models.
"""

from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np
import numpy.typing as npt

from tiercel import _native
from tiercel.base.errors import ModelFileError
from tiercel.loaders.checkpoint import Tensor
from tiercel.ops.program import Weight
from tiercel.quant.formats import Format
from tiercel.quant.quantize import quantize

# The order of enum class Format in kernels.hpp.
_FORMAT_CODES = {name: code for code, name in enumerate(Format)}
# Rows quantised at a time: bounds the float32 copy to some tens of MB at a 16k-wide matrix.
_QUANTIZE_ROWS = 512


class PackedWeightStore:
    """Packs weights. `release` is told each tensor whose file bytes are not needed any more: they would count twice.

    Owner: who builds a runner. `pack_all` uses threads of its own; everything else is for one thread.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        expand_to_f32: bool,
        n_threads: int,
        release: Callable[[Tensor], None],
    ) -> None:
        self._tensors = tensors
        self._expand = expand_to_f32
        self._n_threads = n_threads
        self._release = release
        self._arena = _native.PackedArena()
        self._packed: dict[str, _native.PackedMatrix] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all packed matrices so far."""
        return sum(w.nbytes for w in self._packed.values())

    def matrix(self, weight: Weight) -> _native.PackedMatrix:
        """Return the weight as tiles, packing it on first use; a format other than the file's means quantise it now."""
        if weight.name not in self._packed:
            self._packed[weight.name] = self._pack(weight, self._n_threads)
        return self._packed[weight.name]

    def pack_all(self, weights: Iterable[Weight]) -> None:
        """Pack many matrices, several at a time: one thread a matrix, all of them for one that is a large part of all.

        Raises: the first error of any matrix.
        """
        todo = sorted({w.name: w for w in weights}.values(), key=lambda w: w.nbytes, reverse=True)
        share = sum(w.nbytes for w in todo) / self._n_threads
        waiting: SimpleQueue[Weight] = SimpleQueue()
        for weight in todo:
            if weight.nbytes > share:
                self.matrix(weight)
            else:
                waiting.put(weight)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                while not errors:
                    weight = waiting.get_nowait()
                    self._packed[weight.name] = self._pack(weight, 1)
            except Empty:
                return
            except BaseException as error:  # noqa: BLE001 a thread's boundary: raised again below
                errors.append(error)

        threads = [Thread(target=work, name="tiercel-pack") for _ in range(self._n_threads - 1)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def vector(self, weight: Weight) -> npt.NDArray[np.float32]:
        """Return a norm weight or bias as float32, plus one if the program asks for it. Refuses NaN and infinity."""
        values = self._tensors[weight.name].float32().reshape(-1)
        if not np.isfinite(values).all():
            raise ModelFileError(f"tensor {weight.name}: holds NaN or infinity; fetch the model again")
        return np.ascontiguousarray(values + np.float32(1) if weight.plus_one else values)

    def _pack(self, weight: Weight, n_threads: int) -> _native.PackedMatrix:
        tensor = self._tensors[weight.name]
        n, k = weight.shape
        order = None
        if tensor.format == weight.format:
            rows = tensor.data.reshape(n, tensor.format.nbytes(k))
            if tensor.row_permutation is not None:
                order = np.ascontiguousarray(tensor.row_permutation, dtype=np.int32)
        else:
            rows = self._quantized(tensor, weight)
        packed = _native.PackedMatrix(
            format=_FORMAT_CODES[weight.format],
            rows=rows,
            row_order=order,
            k=k,
            expand_to_f32=self._expand and weight.format.is_quantized,
            n_threads=n_threads,
            arena=self._arena,
        )
        self._release(tensor)
        return packed

    def _quantized(self, tensor: Tensor, weight: Weight) -> npt.NDArray[np.uint8]:
        n, k = weight.shape
        out = np.empty((n, weight.format.nbytes(k)), np.uint8)
        stored = tensor.rows()
        for first in range(0, n, _QUANTIZE_ROWS):
            part = stored[first : first + _QUANTIZE_ROWS]
            values = Tensor(
                tensor.name, (len(part), k), tensor.format, np.ascontiguousarray(part).reshape(-1)
            ).float32()
            out[first : first + len(part)] = quantize(values, weight.format)
        return out
