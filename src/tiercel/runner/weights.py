"""From a checkpoint's tensors to the packed weights and small vectors that the native kernels read.

Each matrix is packed once, whoever uses it: a tied embedding serves the look-up and the head. Knows formats, not
models.
"""

from collections.abc import Callable, Mapping

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
# File pages let go after this many bytes of tensors: keeps the mapped file from being resident beside its packed copy.
_RELEASE_EVERY_BYTES = 16 << 20


class PackedWeightStore:
    """Packs weights on demand. `release_file_pages` is called now and then so that packed bytes do not count twice."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        expand_to_f32: bool,
        n_threads: int,
        release_file_pages: Callable[[], None],
    ) -> None:
        self._tensors = tensors
        self._expand = expand_to_f32
        self._n_threads = n_threads
        self._release = release_file_pages
        self._arena = _native.PackedArena()
        self._packed: dict[str, _native.PackedMatrix] = {}
        self._n_bytes_since_release = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all packed matrices so far."""
        return sum(w.nbytes for w in self._packed.values())

    def matrix(self, weight: Weight) -> _native.PackedMatrix:
        """Return the weight as tiles, packing it on first use; a format other than the file's means quantise it now."""
        if weight.name not in self._packed:
            self._packed[weight.name] = self._pack(weight)
        return self._packed[weight.name]

    def vector(self, weight: Weight) -> npt.NDArray[np.float32]:
        """Return a norm weight or bias as float32, plus one if the program asks for it. Refuses NaN and infinity."""
        values = self._tensors[weight.name].float32().reshape(-1)
        if not np.isfinite(values).all():
            raise ModelFileError(f"tensor {weight.name}: holds NaN or infinity; fetch the model again")
        return np.ascontiguousarray(values + np.float32(1) if weight.plus_one else values)

    def _pack(self, weight: Weight) -> _native.PackedMatrix:
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
            n_threads=self._n_threads,
            arena=self._arena,
        )
        self._n_bytes_since_release += rows.nbytes
        if self._n_bytes_since_release >= _RELEASE_EVERY_BYTES:
            self._release()
            self._n_bytes_since_release = 0
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
