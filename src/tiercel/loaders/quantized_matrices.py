"""Gathers the parts of a safetensors checkpoint's quantised matrices (codes, scales, zero points), a tensor a matrix.

The rest of Tiercel then sees `...q_proj.weight` with a shape and a format that kernels compute with, whose rows are
made of the parts when they are packed. Each scheme goes to the smallest format that holds its values exactly; which,
stands in docs/decisions/0007. Which scheme a checkpoint has, `quantization_config` says.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.loaders.quantization_config import Kind, Scheme
from tiercel.quant.formats import Format

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Bytes = npt.NDArray[np.uint8]
    _Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as the file has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: "_Bytes"

    def told(self) -> str:
        """Say what it is."""
        return f"tensor {self.name} is {self.dtype} of shape {list(self.shape)}"

    def needs(self, dtypes: tuple[str, ...], *shapes: tuple[int, ...], of: "Stored | None" = None) -> None:
        """Refuse another type, or a shape that is none of these."""
        if self.dtype not in dtypes or (shapes and self.shape not in shapes):
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            beside = f" beside {of.name} of shape {list(of.shape)}" if of is not None else ""
            raise ModelFileError(
                f"{self.told()}; {' or '.join(dtypes)}{' of shape ' if wanted else ''}{wanted} is needed{beside}; "
                "the quantization_config and the weights are not of one model"
            )

    def array(self) -> "npt.NDArray[Any]":
        """Return the elements, a copy only where the file has them unaligned; int32 as uint32."""
        import ml_dtypes
        import numpy as np

        types = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F16": "<f2", "F32": "<f4"}
        types |= {"U8": "u1", "F8_E8M0": "u1", "I32": "<u4", "I64": "<i8"}
        found: npt.NDArray[Any] = np.ascontiguousarray(self.data).view(np.dtype(types[self.dtype]))
        return found.reshape(self.shape)

    def finite(self) -> "_Floats":
        """Return the numbers as float32.

        Raises: ModelFileError: one is NaN or infinite.
        """
        import numpy as np

        values = self.array().astype(np.float32)
        if not np.isfinite(values).all():
            raise ModelFileError(f"{self.told()} and holds NaN or infinity; finite scales are needed; fetch it again")
        return values


class Matrix(ABC):
    """A matrix in parts. `shape` is [out, in]; `n_bytes` is what its parts take in the file."""

    def __init__(self, name: str, shape: tuple[int, ...], codes: Stored, n_bytes: int) -> None:
        self.name, self.shape, self.codes, self.n_bytes = name, shape, codes, n_bytes

    @property
    @abstractmethod
    def format(self) -> Format:
        """The format of `rows`."""

    @abstractmethod
    def rows(self, begin: int, end: int) -> "_Bytes":
        """Return rows begin to end as `format` lays them out: [end - begin, format.nbytes(K)].

        Raises: ModelFileError: a scale is NaN or infinite.
        """


class Mxfp4(Matrix):
    """E2M1 codes; a power of two for each 32 columns."""

    format = Format.MXFP4

    def __init__(self, name: str, codes: Stored, scales: Stored, n_bytes: int) -> None:
        *lead, half = codes.shape
        scales.needs(("U8", "F8_E8M0"), (*lead, half // 16), of=codes)
        super().__init__(name, (*lead, 2 * half), codes, n_bytes)
        self._scales = scales
        self._taken = slice(None)

    def taken(self, name: str, rows: slice) -> "Mxfp4":
        """Return the matrix of some of the rows, counted over all leading dimensions; no byte is copied."""
        part = Mxfp4(name, self.codes, self._scales, self.n_bytes)
        part.shape, part._taken = (len(range(prod(self.shape[:-1]))[rows]), self.shape[-1]), rows
        return part

    def rows(self, begin: int, end: int) -> "_Bytes":
        """See `Matrix.rows`."""
        from tiercel.quant.fp4 import E8M0_NAN, mxfp4_rows

        exponents = self._scales.array().reshape(-1, self.shape[-1] // 32)[self._taken][begin:end]
        if (exponents == E8M0_NAN).any():
            raise ModelFileError(f"{self._scales.told()} and holds 255, which is NaN; finite scales are needed")
        return mxfp4_rows(self.codes.array().reshape(-1, self.shape[-1] // 2)[self._taken][begin:end], exponents)


class Nvfp4(Matrix):
    """E2M1 codes; an E4M3 scale for each 16 columns; one float32 factor."""

    format = Format.NVFP4

    def __init__(
        self, name: str, codes: Stored, scales: Stored, factor: Stored, n_bytes: int, *, divides: bool
    ) -> None:
        n, half = codes.shape
        scales.needs(("F8_E4M3",), (n, half // 8), of=codes)
        factor.needs(("F32", "BF16"), (), (1,), of=codes)
        super().__init__(name, (n, 2 * half), codes, n_bytes)
        self._scales, self._factor, self._divides = scales, factor, divides

    def rows(self, begin: int, end: int) -> "_Bytes":
        """See `Matrix.rows`."""
        import numpy as np

        from tiercel.quant.fp4 import nvfp4_rows

        factor = self._factor.finite().reshape(())
        if self._divides and factor == 0:
            raise ModelFileError(f"{self._factor.told()} and is 0; a global scale above 0 is needed; fetch it again")
        groups = self._scales.shape[1]
        part = Stored(
            self._scales.name, "F8_E4M3", (end - begin, groups), self._scales.data[begin * groups : end * groups]
        )
        scales = part.finite()
        with np.errstate(over="ignore"):
            scales = (scales / factor if self._divides else scales * factor).astype(np.float32)
        if not np.isfinite(scales).all():
            raise ModelFileError(
                f"{self._scales.told()}; with {self._factor.told()} a scale is infinite; fetch it again"
            )
        return nvfp4_rows(self.codes.array()[begin:end], scales)


class Fp8(Matrix):
    """E4M3 numbers with a scale of the whole, of each row, or of each block."""

    def __init__(self, name: str, codes: Stored, scales: Stored, n_bytes: int, block: tuple[int, int] | None) -> None:
        n, k = codes.shape
        if block is None:
            scales.needs(("F32", "BF16", "F16"), (), (1,), (1, 1), (n, 1), (n,), of=codes)
        else:
            scales.needs(("F32", "BF16", "F8_E8M0", "U8"), (-(-n // block[0]), -(-k // block[1])), of=codes)
        super().__init__(name, (n, k), codes, n_bytes)
        self._stored, self._block = scales, block or (1 if prod(scales.shape) == n else n, k)

    @cached_property
    def _scales(self) -> "_Floats":
        """[rows of blocks, columns of blocks]."""
        if self._stored.dtype in ("U8", "F8_E8M0"):
            from tiercel.quant.fp4 import E8M0_NAN, e8m0

            exponents: _Bytes = self._stored.array()
            if (exponents == E8M0_NAN).any():
                raise ModelFileError(f"{self._stored.told()} and holds 255, which is NaN; finite scales are needed")
            return e8m0(exponents)
        return self._stored.finite().reshape(-1, self._stored.shape[1] if len(self._stored.shape) == 2 else 1)

    @cached_property
    def format(self) -> Format:
        """BF16 if the scales are powers of two, which it then holds exactly; else F32, one rounding a weight."""
        from tiercel.quant.fp8 import are_powers_of_two

        return Format.BF16 if are_powers_of_two(self._scales) else Format.F32

    def rows(self, begin: int, end: int) -> "_Bytes":
        """See `Matrix.rows`."""
        import numpy as np

        from tiercel.quant.fp8 import E4M3, bf16_rows

        k = self.shape[1]
        values = E4M3[self.codes.data[begin * k : end * k].reshape(-1, k)]
        if np.isnan(values).any():
            raise ModelFileError(f"{self.codes.told()} and holds NaN; numbers are needed; fetch it again")
        of_rows = self._scales[np.arange(begin, end) // self._block[0]]
        with np.errstate(over="ignore"):
            values *= np.repeat(of_rows, self._block[1], axis=1)[:, :k]
        if not np.isfinite(values).all():
            raise ModelFileError(f"{self._stored.told()}; with {self.codes.name} a weight is infinite; fetch it again")
        return bf16_rows(values) if self.format is Format.BF16 else values.view(np.uint8)


class Int4(Matrix):
    """Integers of four bits with scales and zero points for each `group` columns, or those that `g_idx` says."""

    def __init__(self, name: str, parts: "_Parts", n_bytes: int, scheme: Scheme) -> None:
        codes, zeros, scales = parts.need("qweight"), parts.need("qzeros"), parts.need("scales")
        self._is_awq = scheme.kind == "awq"
        k, n = (codes.shape[0], codes.shape[1] * 8) if self._is_awq else (codes.shape[0] * 8, codes.shape[1])
        self._group = scheme.group or k
        n_groups = -(-k // self._group)
        scales.needs(("F16", "BF16", "F32"), (n_groups, n), of=codes)
        zeros.needs(("I32",), (n_groups, n // 8), of=codes)
        self._order = parts.take("g_idx")
        if self._order is not None:
            self._order.needs(("I32",), (k,), of=codes)
        super().__init__(name, (n, k), codes, n_bytes)
        self._scales, self._packed_zeros, self._offset = scales, zeros, scheme.zero_offset

    @cached_property
    def _zeros(self) -> "npt.NDArray[np.int8]":
        """[N, groups]."""
        import numpy as np

        from tiercel.quant.int4 import along_outputs

        unpacked = along_outputs(self._packed_zeros.array(), is_awq=self._is_awq)
        return unpacked.astype(np.int8) + np.int8(self._offset)

    @cached_property
    def _groups(self) -> "npt.NDArray[np.int64]":
        """Which group each column belongs to, [K]."""
        import numpy as np

        k = self.shape[1]
        if self._order is None:
            return np.arange(k) // self._group
        found = self._order.array().astype(np.int64)
        n_groups = self._zeros.shape[1]
        if found.size and found.max() >= n_groups:  # a negative number reads as a large one
            raise ModelFileError(f"{self._order.told()} and holds {found.max()}; groups 0 to {n_groups - 1} are there")
        return found

    @cached_property
    def _group_of_32(self) -> "npt.NDArray[np.int64] | None":
        """Which group each run of 32 columns belongs to; None if columns of several lie in one run."""
        if self.shape[1] % 32:
            return None
        runs = self._groups.reshape(-1, 32)
        return runs[:, 0] if (runs == runs[:, :1]).all() else None

    @cached_property
    def format(self) -> Format:
        """Q4_0 if all zero points are 8, Q5_0 if not, F32 if its columns or scales fit neither."""
        import numpy as np

        scales = self._scales.array().astype(np.float32)
        with np.errstate(over="ignore"):
            fits = np.array_equal(scales.astype(np.float16).astype(np.float32), scales)
        if self._group_of_32 is None or not fits:
            return Format.F32
        return Format.Q4_0 if (self._zeros == 8).all() else Format.Q5_0

    def rows(self, begin: int, end: int) -> "_Bytes":
        """See `Matrix.rows`."""
        import numpy as np

        from tiercel.quant.int4 import group_rows

        codes = self._codes(begin, end)
        differences = codes.astype(np.int8) - self._zeros[begin:end][:, self._groups]
        scales = self._finite_scales[:, begin:end].T
        if self.format is Format.F32:
            return (scales[:, self._groups] * differences.astype(np.float32)).view(np.uint8)
        return group_rows(differences, scales[:, self._group_of_32].astype(np.float16), self.format)

    @cached_property
    def _finite_scales(self) -> "_Floats":
        """[groups, N]."""
        return self._scales.finite()

    def _codes(self, begin: int, end: int) -> "_Bytes":
        """Return q of rows begin to end, [end - begin, K]."""
        from tiercel.quant.int4 import along_inputs, along_outputs

        packed: npt.NDArray[np.uint32] = self.codes.array()
        if not self._is_awq:
            return along_inputs(packed[:, begin:end])
        first = begin // 8
        return along_outputs(packed[:, first : -(-end // 8)], is_awq=True)[begin - first * 8 :][: end - begin]


class PackedInt4(Int4):
    """The same as compressed-tensors packs it: along the inputs; zero points (none: all 8) along the outputs."""

    def __init__(self, name: str, codes: Stored, parts: "_Parts", scheme: Scheme) -> None:
        scales, zeros, order = parts.need("weight_scale"), parts.take("weight_zero_point"), parts.take("weight_g_idx")
        n, k = codes.shape[0], codes.shape[1] * 8
        self._group = scheme.group or k
        n_groups = -(-k // self._group)
        scales.needs(("F16", "BF16", "F32"), (n, n_groups), of=codes)
        if zeros is not None:
            zeros.needs(("I32",), (-(-n // 8), n_groups), of=codes)
        if order is not None:
            order.needs(("I32",), (k,), of=codes)
        Matrix.__init__(self, name, (n, k), codes, parts.n_bytes)
        self._scales, self._stored_zeros, self._order = scales, zeros, order

    @cached_property
    def _zeros(self) -> "npt.NDArray[np.int8]":
        """[N, groups]."""
        import numpy as np

        from tiercel.quant.int4 import ZERO_4, along_inputs

        if self._stored_zeros is None:
            return np.full(self._scales.shape, ZERO_4, np.int8)
        return np.ascontiguousarray(along_inputs(self._stored_zeros.array()).T[: self.shape[0]]).view(np.int8)

    @cached_property
    def _finite_scales(self) -> "_Floats":
        return self._scales.finite().T

    def _codes(self, begin: int, end: int) -> "_Bytes":
        from tiercel.quant.int4 import along_inputs

        return along_inputs(self.codes.array()[begin:end].T)


_EXPERT = re.compile(r"\.experts\.\d+\.")
# Each holds what the ones before it of the same scheme hold.
_WIDTHS = (Format.Q4_0, Format.Q5_0, Format.BF16, Format.F32)


class _Parts:
    """The parts of one module; what is taken is counted as read."""

    def __init__(self, module: str, stored: Mapping[str, Stored], read: set[str], scheme: Scheme) -> None:
        self.module, self._stored, self._read, self._scheme = module, stored, read, scheme
        self.n_bytes = 0

    def take(self, suffix: str) -> Stored | None:
        found = self._stored.get(f"{self.module}.{suffix}")
        if found is not None:
            self._read.add(found.name)
            self.n_bytes += found.data.nbytes
        return found

    def need(self, *suffixes: str) -> Stored:
        for suffix in suffixes:
            if (found := self.take(suffix)) is not None:
                return found
        raise ModelFileError(
            f"tensor {self.module}.{suffixes[0]} is missing; {self._scheme.name} needs it beside the codes of "
            f"{self.module}; fetch the checkpoint again, all of its parts"
        )


# What each kind's codes may be called, and with what type: the first part of a matrix that is looked for.
_CODES: Mapping[Kind, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "mxfp4": (("weight_packed", ("U8",)), ("weight", ("U8",))),
    "nvfp4": (("weight_packed", ("U8",)), ("weight", ("U8",))),
    "fp8": (("weight", ("F8_E4M3",)),),
    "gptq": (("qweight", ("I32",)),),
    "awq": (("qweight", ("I32",)),),
    "int4": (("weight_packed", ("I32",)),),
}
# What only says how to round activations, or keys and values; this engine rounds them less.
_NOT_NEEDED = (
    "input_scale",
    "input_scale_2",
    "input_global_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "output_scale",
)
_COMPANIONS = (
    *(
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_global_scale",
        "weight_zero_point",
    ),
    *("qweight", "qzeros", "scales", "g_idx", "weight_shape", "pre_quant_scale", "weight_g_idx"),
)


def gather_matrices(scheme: Scheme, stored: Mapping[str, Stored]) -> tuple[dict[str, Matrix], set[str]]:
    """Return the quantised matrices by canonical name, and the names of all tensors that they are made of.

    Raises:
        ModelFileError: a part is missing, has another shape than the rest, or belongs to nothing.
        UnsupportedModel: a part asks for arithmetic that is not done.
    """
    read: set[str] = set()
    found: dict[str, Matrix] = {}
    for name, part in stored.items():
        module, _, suffix = name.rpartition(".")
        if (suffix, part.dtype) in {(s, t) for s, types in _CODES[scheme.kind] for t in types}:
            parts = _Parts(module, stored, read, scheme)
            if scheme.is_ignored(module):
                raise ModelFileError(
                    f"{part.told()}, which is quantised; the quantization_config says that {module} is not; "
                    "the config and the weights are not of one model"
                )
            parts.take(suffix)
            logical = f"{module}.weight"
            if logical in found or (logical != name and logical in stored):
                raise ModelFileError(f"{part.told()} and there is {logical} too; one of them is needed")
            found[logical] = _matrix(scheme, logical, part, parts)
        elif scheme.kind == "mxfp4" and name.endswith("_blocks"):
            found |= _expert_blocks(part, stored, read)
    _refuse_left(scheme, stored, read)
    _agree(found)
    return found, read


def _agree(matrices: Mapping[str, Matrix]) -> None:
    """Give the experts of one kind in a layer one format, as their kernel needs: the narrowest that holds all."""
    alike: dict[str, list[Matrix]] = {}
    for name, matrix in matrices.items():
        if _EXPERT.search(name):
            alike.setdefault(_EXPERT.sub(".experts.{}.", name), []).append(matrix)
    for experts in alike.values():
        formats = {matrix.format for matrix in experts}
        if len(formats) > 1:
            for matrix in experts:
                # What a cached property was, or will be, computed as.
                matrix.__dict__["format"] = max(formats, key=_WIDTHS.index)


def _matrix(scheme: Scheme, name: str, codes: Stored, parts: _Parts) -> Matrix:
    if len(codes.shape) != 2 or not prod(codes.shape):
        raise ModelFileError(f"{codes.told()}; a matrix is needed; the config and the weights are not of one model")
    if scheme.kind in ("gptq", "awq"):
        return Int4(name, parts, parts.n_bytes, scheme)
    if scheme.kind == "fp8":
        scales = parts.need("weight_scale_inv", "weight_scale") if scheme.block else parts.need("weight_scale")
        matrix: Matrix = Fp8(name, codes, scales, parts.n_bytes, scheme.block)
        return matrix
    columns = codes.shape[1] * (8 if scheme.kind == "int4" else 2)
    if columns % 32 and scheme.kind != "int4":
        raise UnsupportedModel(f"{codes.told()}; rows of a multiple of 32 weights are needed, they have {columns}")
    shape = parts.take("weight_shape")
    if shape is not None:
        shape.needs(("I64",), (2,), of=codes)
        if (told := tuple(map(int, shape.array()))) != (codes.shape[0], columns):
            raise ModelFileError(f"{shape.told()} and says {list(told)}; {[codes.shape[0], columns]} is needed")
    if scheme.kind == "int4":
        return PackedInt4(name, codes, parts, scheme)
    scales = parts.need("weight_scale")
    if scheme.kind == "mxfp4":
        return Mxfp4(name, codes, scales, parts.n_bytes)
    factor = parts.need("weight_global_scale" if scheme.divides else "weight_scale_2")
    return Nvfp4(name, codes, scales, factor, parts.n_bytes, divides=scheme.divides)


def _expert_blocks(blocks: Stored, stored: Mapping[str, Stored], read: set[str]) -> dict[str, Matrix]:
    """Gather gpt-oss' layout: all experts' matrices at once, [X, N, K / 32, 16] beside [X, N, K / 32]."""
    name = blocks.name.removesuffix("_blocks")
    scales = stored.get(f"{name}_scales")
    if scales is None:
        raise ModelFileError(f"tensor {name}_scales is missing; {blocks.name} needs it; fetch the checkpoint again")
    if len(blocks.shape) != 4 or blocks.shape[3] != 16 or blocks.dtype != "U8":
        raise ModelFileError(f"{blocks.told()}; U8 of shape [experts, rows, groups, 16] is needed")
    x, n, groups, _ = blocks.shape
    scales.needs(("U8", "F8_E8M0"), (x, n, groups), of=blocks)
    read |= {blocks.name, scales.name}
    codes = Stored(blocks.name, "U8", (x, n, groups * 16), blocks.data)
    return {name: Mxfp4(name, codes, scales, blocks.data.nbytes + scales.data.nbytes)}


def _refuse_left(scheme: Scheme, stored: Mapping[str, Stored], read: set[str]) -> None:
    for name, part in stored.items():
        if name in read:
            continue
        module, _, suffix = name.rpartition(".")
        if suffix == "pre_quant_scale":
            raise UnsupportedModel(
                f"{part.told()}: activations would have to be multiplied with it, which is not done; "
                "use a checkpoint where it is folded into the weights"
            )
        if suffix in _NOT_NEEDED:
            read.add(name)
        elif suffix in _COMPANIONS or name.endswith("_scales"):
            raise ModelFileError(
                f"{part.told()} and belongs to no matrix of {scheme.name}: {module}'s codes are missing; "
                "fetch the checkpoint again, all of its parts"
            )
