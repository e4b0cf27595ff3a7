"""gpt-oss' experts, which lie in stacks, as a tensor each; codes stay where they are in the file.

`<..>.experts.gate_up_proj` has a row of the gate, then a row of the up-projection, in turns: MXFP4 blocks [X, 2F, H],
or floats stored inputs first, [X, H, 2F]; `down_proj` is [X, H, F] or, of floats, [X, F, H]. Biases are [X, 2F] and
[X, H]. Expert e of them becomes `<..>.experts.<e>.{gate,up,down}_proj.{weight,bias}`. Whether these are the right
number and shapes is the model's to check. Source: the released checkpoints' tensors.
"""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tiercel.base.errors import ModelFileError
from tiercel.loaders.checkpoint import Tensor
from tiercel.loaders.quantized_matrices import Matrix, Mxfp4, Stored
from tiercel.quant.formats import Format

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_STACK = re.compile(r"(?P<prefix>.+\.experts)\.(?P<kind>gate_up_proj|down_proj)(?P<bias>_bias)?")
_MAX_EXPERTS = 4096


class TransposedMatrix(Matrix):
    """A float matrix stored inputs first, [in, columns]; its rows are the columns from `first` on, `step` apart."""

    def __init__(self, name: str, stored: Stored, format: Format, first: int, step: int) -> None:
        k, n = stored.shape
        super().__init__(name, (len(range(first, n, step)), k), stored, stored.data.nbytes)
        self._format, self._columns = format, slice(first, None, step)

    @property
    def format(self) -> Format:
        """The stored format."""
        return self._format

    def rows(self, begin: int, end: int) -> "npt.NDArray[np.uint8]":
        """See `Matrix.rows`."""
        import numpy as np

        size = self._format.group_bytes
        elements = self.codes.data.view(np.dtype(f"u{size}")).reshape(self.codes.shape)
        rows = np.ascontiguousarray(elements[:, self._columns][:, begin:end].T)
        return rows.view(np.uint8).reshape(end - begin, -1)


def split_interleaved(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return the tensors with each stack replaced by its experts, in its place.

    Raises:
        ModelFileError: an expert is there twice, a stack has another number of dimensions or an odd number of rows, or
            more experts than any model.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _STACK.fullmatch(name)
        if match is None:
            parts: Iterator[Tensor] = iter((tensor,))
        elif match["bias"]:
            parts = _biases(tensor, match["prefix"], match["kind"], where)
        else:
            parts = _matrices(tensor, match["prefix"], match["kind"], where)
        for one in parts:
            if one.name in found:
                raise ModelFileError(f"{where}: tensor {one.name} is there twice, one of them in {name}; one is needed")
            found[one.name] = one
    return found


def _matrices(tensor: Tensor, prefix: str, kind: str, where: str) -> Iterator[Tensor]:
    is_float = tensor.matrix is None
    kinds = _kinds(kind)
    n_rows = _check(tensor, 3, 2 if is_float else 1, len(kinds), where)
    n_experts, step = tensor.shape[0], len(kinds)
    for e in range(n_experts):
        data = tensor.data.reshape(n_experts, -1)[e]
        for first, one in enumerate(kinds):
            name = f"{prefix}.{e}.{one}.weight"
            if isinstance(tensor.matrix, Mxfp4):
                matrix: Matrix = tensor.matrix.taken(name, slice(e * n_rows + first, (e + 1) * n_rows, step))
            else:
                stored = Stored(tensor.name, tensor.format.upper(), tensor.shape[1:], data)
                matrix = TransposedMatrix(name, stored, tensor.format, first, step)
            yield Tensor(name, matrix.shape, matrix.format, data, matrix=matrix)


def _biases(tensor: Tensor, prefix: str, kind: str, where: str) -> Iterator[Tensor]:
    kinds = _kinds(kind)
    _check(tensor, 2, 1, len(kinds), where)
    rows = tensor.data.reshape(*tensor.shape, tensor.format.group_bytes)
    for e in range(tensor.shape[0]):
        for first, one in enumerate(kinds):
            bias = rows[e, first :: len(kinds)]
            yield Tensor(f"{prefix}.{e}.{one}.bias", (len(bias),), tensor.format, bias.reshape(-1))


def _kinds(kind: str) -> tuple[str, ...]:
    return ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)


def _check(tensor: Tensor, n_dimensions: int, axis: int, n_kinds: int, where: str) -> int:
    """Return how many rows an expert has in the stack."""
    shape = tensor.shape
    if len(shape) != n_dimensions or shape[0] > _MAX_EXPERTS or shape[axis] % n_kinds:
        turns = ", and as many rows of the gate as of the up-projection" if n_kinds > 1 else ""
        raise ModelFileError(
            f"{where}: tensor {tensor.name} has shape {list(shape)}; {n_dimensions} dimensions, at most {_MAX_EXPERTS} "
            f"experts along the first{turns}, are needed"
        )
    return shape[axis]
