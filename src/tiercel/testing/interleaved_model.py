"""Lays a tiny gpt-oss' experts out as released checkpoints have them: stacked, gate and up in turns, perhaps MXFP4."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercel.testing.fill import fill, tiny_checkpoint

Array = npt.NDArray[Any]

_KINDS: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = np.array([*_SIZES, *(-size for size in _SIZES)], np.float32)


def stack_experts(weights: Mapping[str, Array], n_experts: int) -> dict[str, Array]:
    """Return the tensors with each layer's experts stacked: matrices [X, in, out], biases [X, out]."""
    found = {name: w for name, w in weights.items() if ".experts." not in name}
    for layer in dict.fromkeys(name.split(".experts.")[0] for name in weights if ".experts." in name):
        for kind, halves in _KINDS.items():
            for part, suffix in (("weight", ""), ("bias", "_bias")):
                each = [[weights[f"{layer}.experts.{e}.{h}.{part}"].T for h in halves] for e in range(n_experts)]
                stack = np.stack([np.stack(parts, axis=-1) for parts in each])
                found[f"{layer}.experts.{kind}{suffix}"] = np.ascontiguousarray(stack.reshape(*stack.shape[:-2], -1))
    return found


def mxfp4_experts(config: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return a checkpoint whose experts' matrices are MXFP4, and every weight's values by canonical name.

    Codes and exponents follow from the stacks' names.
    """
    values, n_experts = tiny_checkpoint(config), int(config["num_local_experts"])
    stored = stack_experts(values, n_experts)
    for name in [name for name, w in stored.items() if ".experts." in name and w.ndim == 3]:
        x, k, n = stored.pop(name).shape
        codes = (_uniform(f"{name}_blocks", (x, n, k)) * 16).astype(np.uint8)
        exponents = (121 + _uniform(f"{name}_scales", (x, n, k // 32)) * 3).astype(np.uint8)
        stored[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(x, n, k // 32, 16)
        stored[f"{name}_scales"] = exponents
        matrices = _E2M1[codes] * np.repeat(np.exp2(exponents.astype(np.float32) - 127), 32, axis=-1)
        prefix, kind = name.rsplit(".", 1)
        for first, half in enumerate(_KINDS[kind]):
            for e in range(x):
                values[f"{prefix}.{e}.{half}.weight"] = matrices[e, first :: len(_KINDS[kind])]
    return stored, values


def _uniform(name: str, shape: tuple[int, ...]) -> Array:
    """Return numbers in 0 .. 1, 1 excluded."""
    return np.clip(fill(name, shape, base=0.5, amp=0.5 / sqrt(3.0)), 0.0, np.float32(1.0 - 2.0**-24))
