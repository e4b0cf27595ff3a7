"""How many bytes a checkpoint's tensors take, from its config alone: `dtype` and `quantization_config`, no file opened.

What a quantised checkpoint leaves unquantised its config says (`quantization_config.Scheme.ignored`); embeddings,
norms and all that is no matrix are no part of any scheme. Knows names and shapes, not models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from tiercel.base.errors import UnsupportedModel
from tiercel.loaders.quantization_config import Scheme, read_scheme
from tiercel.quant.formats import Format

_DTYPES: Mapping[str, Format] = {"float32": Format.F32, "float16": Format.F16, "bfloat16": Format.BF16}
# A router is a parameter of its own, which no scheme of linear layers means.
_NO_LINEAR = ("embed_tokens", "embeddings.", "lm_head", ".gate.weight")


@dataclass(frozen=True, slots=True)
class StoredSizes:
    """What a config says of how tensors are stored: `base` where they are not quantised, `scheme` where they are."""

    base: Format
    is_said: bool
    scheme: Scheme | None

    def n_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the bytes of a tensor of this name and shape, or of so many rows of it."""
        scheme = self.scheme
        if scheme is None or not self._is_quantized(name, shape, scheme):
            return self.base.nbytes(prod(shape))
        n, k = shape
        if scheme.kind == "mxfp4":
            return n * (k // 2 + -(-k // 32))
        if scheme.kind == "nvfp4":
            return n * (k // 2 + -(-k // 16)) + 4
        if scheme.kind == "fp8":
            if scheme.block is None:
                return n * k + 4 * n
            return n * k + 4 * -(-n // scheme.block[0]) * -(-k // scheme.block[1])
        # Four bits a code and a zero point, a float16 a scale.
        n_groups = -(-k // scheme.group) if scheme.group else 1
        return n * (k // 2 + 2 * n_groups) + n * n_groups // 2

    def describe(self) -> str:
        """Say it in a few words."""
        base = f"{self.base}{'' if self.is_said else ', as the config names no dtype'}"
        return base if self.scheme is None else f"{self.scheme.name}, the rest {base}"

    def _is_quantized(self, name: str, shape: tuple[int, ...], scheme: Scheme) -> bool:
        if len(shape) != 2 or not name.endswith(".weight") or any(word in name for word in _NO_LINEAR):
            return False
        return not scheme.is_ignored(name.removesuffix(".weight"))


def stored_sizes(config: Mapping[str, Any], where: str) -> StoredSizes:
    """Read how a checkpoint's tensors are stored.

    Raises:
        UnsupportedModel: the dtype, or the quantisation, is none that is read.
        ModelFileError: the config contradicts itself.
    """
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    given = next((c[name] for c in (config, inner) for name in ("dtype", "torch_dtype") if c.get(name)), None)
    if given is not None and (not isinstance(given, str) or given not in _DTYPES):
        raise UnsupportedModel(f"{where}: dtype is {str(given)[:60]!r}; the known ones are {', '.join(_DTYPES)}")
    base = Format.BF16 if given is None else _DTYPES[given]
    return StoredSizes(base, given is not None, read_scheme(config, where))
