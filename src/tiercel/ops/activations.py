"""Gated activations by name: what parameters each has, and its definition. A feed-forward's act(gate, up).

    silu           g * sigmoid(g) * u                                        Shazeer 2020 (arXiv:2002.05202)
    gelu_tanh      g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3))) * u  Hendrycks and Gimpel 2016, section 2
    situ           beta * tanh(g / beta) * sigmoid(g) * up                   Kimi K3; up = linear_beta * tanh(u /
                                                                             linear_beta), or u if linear_beta is 0
    swiglu_clamp   h * sigmoid(alpha * h) * (v + 1)                          gpt-oss; h = min(g, limit),
                                                                             v = u within +-limit
    silu_clamp     min(g * sigmoid(g), limit) * v                            Ling 3; v = u within +-limit

The clamp of silu_clamp is behind the silu and that of swiglu_clamp before it: they are not one activation.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Lowered programs know the names, and a start from a kept plan imports no numpy.
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

ACTIVATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "silu": (),
        "gelu_tanh": (),
        "situ": ("beta", "linear_beta"),
        "swiglu_clamp": ("alpha", "limit"),
        "silu_clamp": ("limit",),
    }
)
"""Name -> its parameters, in the order of the native kernel's."""


def broken_activation(act: str, params: tuple[float, ...]) -> str | None:
    """Return what is wrong with an activation and its parameters, or None."""
    if act not in ACTIVATIONS:
        return f"act {act!r}; one of {', '.join(ACTIVATIONS)}"
    names = ACTIVATIONS[act]
    if len(params) != len(names):
        return f"{len(params)} parameters of {act}; {', '.join(names) or 'none'}"
    for name, value in zip(names, params, strict=True):
        # linear_beta 0 leaves the up-projection as it is.
        if not (0.0 < value < float("inf") or (value == 0.0 and name == "linear_beta")):
            return f"{act} with {name} {value}; a positive number"
    return None


def activated(gate: "Floats", up: "Floats", act: str, params: tuple[float, ...] = ()) -> "Floats":
    """Return act(gate, up); see the module.

    Shapes:
        gate, up  [..]  float32
        returns   [..]  float32; the factor made of the gate in float64, rounded once before the product
    """
    import numpy as np

    g, u = gate.astype(np.float64), up.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # exp(-g) may be infinite: g / inf is the right limit
        if act == "gelu_tanh":
            factor = 0.5 * g * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (g + 0.044715 * g**3)))
        elif act == "situ":
            beta, linear_beta = params
            factor = beta * np.tanh(g / beta) / (1.0 + np.exp(-g))
            u = linear_beta * np.tanh(u / linear_beta) if linear_beta else u
        elif act == "swiglu_clamp":
            alpha, limit = params
            h = np.minimum(g, limit)
            factor, u = h / (1.0 + np.exp(-alpha * h)), np.clip(u, -limit, limit) + 1.0
        else:
            factor = g / (1.0 + np.exp(-g))
            if act == "silu_clamp":
                factor, u = np.minimum(factor, params[0]), np.clip(u, -params[0], params[0])
        return np.asarray(factor.astype(np.float32) * u.astype(np.float32), np.float32)
