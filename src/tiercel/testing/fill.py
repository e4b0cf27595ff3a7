"""Weights that follow from their names, so that a fixture is a config and an outside implementation's logits only.

Each element is base + amp * sqrt(3) * (2u - 1), where u in 0..1 comes from a splitmix64 step of the tensor name's
FNV-1a hash plus the element's flat index: uniform, with standard deviation amp. Source: splitmix64, Steele, Lea and
Flood 2014.
"""

from collections.abc import Mapping
from math import prod, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def fill(name: str, shape: tuple[int, ...], *, base: float, amp: float) -> Floats:
    """Return the tensor of that name.

    Shapes:
        returns  shape  float32
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        z = np.arange(prod(shape), dtype=np.uint64) + np.uint64(_fnv1a(name)) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    u = (z >> np.uint64(40)).astype(np.float64) / 2.0**24
    return np.asarray(base + amp * sqrt(3.0) * (2.0 * u - 1.0)).astype(np.float32).reshape(shape)


def fill_by_name(name: str, shape: tuple[int, ...], *, norms_add_one: bool = False) -> Floats:
    """Return the tensor with the base and amplitude that its kind has.

    Norm weights lie around one, or around zero where the model adds the one; biases around zero with 0.1; the embedding
    has 0.5; a matrix has one over the root of its last axis, so that products keep their size.
    """
    if "norm" in name.lower() and name.endswith(".weight"):
        norms_add_one = norms_add_one and "linear_attn" not in name  # Qwen3.5's norm of outputs is a plain one
        return fill(name, shape, base=0.0 if norms_add_one else 1.0, amp=0.1)
    if name.endswith(".bias"):
        return fill(name, shape, base=0.0, amp=0.1)
    amp = 0.5 if "embed_tokens" in name or name.startswith("backbone.embeddings") else 1.0 / sqrt(shape[-1])
    return fill(name, shape, base=0.0, amp=amp)


def tiny_checkpoint(config: Mapping[str, Any], *, has_mtp: bool = False) -> dict[str, Floats]:
    """Return every weight that the config's model needs, by canonical name, in float32; its draft head's if asked."""
    from tiercel.models.registry import build_model

    model = build_model(config)
    adds_one = model.norms_add_one
    shapes = model.expected_weights() | (model.mtp_weights() if has_mtp else {})
    return {name: fill_by_name(name, shape, norms_add_one=adds_one) for name, shape in shapes.items()}


def _fnv1a(text: str) -> int:
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value
