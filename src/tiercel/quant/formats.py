"""The formats a weight can have in a file: their names, group sizes and byte counts.

A row of a matrix is a run of *file groups*: `group` weights share one scale (or one super-scale) and take
`group_bytes` bytes. Rows never share a group. Source: the GGUF specification and the layouts of ggml's block types;
MXFP4 is the one of the OCP microscaling specification in ggml's order. NVFP4's group is ours, because files keep it in
three tensors (see `quant.fp4`).
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType

from tiercel.base.errors import ShapeError


class Format(enum.StrEnum):
    """A weight format. Its value is the name people write, as in `--quantization q8_0`."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q8_0 = "q8_0"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"

    @property
    def group(self) -> int:
        """How many weights one file group holds: 1, 32 or 256."""
        return _LAYOUT[self][0]

    @property
    def group_bytes(self) -> int:
        """How many bytes one file group takes."""
        return _LAYOUT[self][1]

    @property
    def bits_per_weight(self) -> float:
        """Stored bits for each weight, scales included."""
        return self.group_bytes * 8 / self.group

    @property
    def is_quantized(self) -> bool:
        """True for the formats whose weights share scales; F32, F16 and BF16 are plain numbers."""
        return self.group > 1

    def nbytes(self, n_weights: int) -> int:
        """Bytes of a run of `n_weights` weights, in unbounded integers.

        Raises:
            ShapeError: the count is negative or no multiple of the group.
        """
        if n_weights < 0 or n_weights % self.group:
            raise ShapeError(
                f"quant.formats: {n_weights} weights cannot be stored as {self.value}; "
                f"a multiple of {self.group} is needed; choose a format with a smaller group"
            )
        return n_weights // self.group * self.group_bytes


# Weights a group, bytes a group. Q*_0: f16 scale + quants; Q*_1 adds an f16 minimum; Q5_* add 4 bytes of high bits.
# Of 32 weights, MXFP4: an exponent byte + 16 bytes of codes; NVFP4: two f32 scales, of 16 weights each, + 16.
# Of 256 weights, Q4_K: 2 + 2 + 12 scales + 128; Q5_K: 32 bytes of high bits more; Q6_K: 128 + 64 + 16 scales + 2.
_LAYOUT: Mapping[Format, tuple[int, int]] = MappingProxyType(
    {
        Format.F32: (1, 4),
        Format.F16: (1, 2),
        Format.BF16: (1, 2),
        Format.Q4_0: (32, 18),
        Format.Q4_1: (32, 20),
        Format.Q5_0: (32, 22),
        Format.Q5_1: (32, 24),
        Format.Q8_0: (32, 34),
        Format.Q4_K: (256, 144),
        Format.Q5_K: (256, 176),
        Format.Q6_K: (256, 210),
        Format.MXFP4: (32, 17),
        Format.NVFP4: (32, 24),
    }
)

GGUF_TYPES: Mapping[int, Format] = MappingProxyType(
    {
        0: Format.F32,
        1: Format.F16,
        2: Format.Q4_0,
        3: Format.Q4_1,
        6: Format.Q5_0,
        7: Format.Q5_1,
        8: Format.Q8_0,
        12: Format.Q4_K,
        13: Format.Q5_K,
        14: Format.Q6_K,
        30: Format.BF16,
        39: Format.MXFP4,
    }
)
"""Tensor type id in a GGUF file -> format, for the types Tiercel reads."""

GGUF_TYPES_NOT_READ: Mapping[int, str] = MappingProxyType(
    {
        9: "Q8_1",
        10: "Q2_K",
        11: "Q3_K",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        20: "IQ4_NL",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        29: "IQ1_M",
        34: "TQ1_0",
        35: "TQ2_0",
    }
)
"""Tensor type id -> its usual name, for the types that exist but that Tiercel refuses; used in messages only."""
