"""Rotary tables: from a config's rope_parameters (or older rope_scaling, rope_theta) to frequencies and a magnitude.

Kinds: default, linear, dynamic, llama3, yarn, longrope, proportional, and `tiercel_freq_factors` (GGUF files hold
divisors of the frequencies instead of the scaling's parameters). Others are refused by name.

Tables are fixed for a program: dynamic and longrope, whose frequencies change with the length, take the length from the
program's `max_len_tokens`. Where we differ from transformers: it changes the table while a text grows, so that keys
rotated before and after do not fit each other.

Source: default, Su et al. 2021 (arXiv:2104.09864); linear, Chen et al. 2023 (arXiv:2306.15595); yarn, Peng et al. 2023
(arXiv:2309.00071); longrope, Ding et al. 2024 (arXiv:2402.13753); llama3, the Llama 3.1 release.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercel.models.fields import ConfigFields

_Reals = npt.NDArray[np.float64]

_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ORIGINAL = "original_max_position_embeddings"
_KINDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "default": frozenset({_ORIGINAL}),
        "linear": frozenset({"factor", _ORIGINAL}),
        "dynamic": frozenset({"factor", _ORIGINAL}),
        "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}),
        "yarn": frozenset(
            {"factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", _ORIGINAL}
        ),
        "longrope": frozenset({"factor", "short_factor", "long_factor", "attention_factor", _ORIGINAL}),
        "proportional": frozenset({"factor"}),
        "tiercel_freq_factors": frozenset({"freq_factors"}),
    }
)
_MAX_REACH_TOKENS = 1 << 31
_NEWER_NAMES: Mapping[str, str] = MappingProxyType({"su": "longrope"})


@dataclass(frozen=True, slots=True)
class RopeTable:
    """What a rotation needs: one frequency for each rotated pair, and what cosine and sine are multiplied with."""

    inv_freq: npt.NDArray[np.float32]
    magnitude: float


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """One checked set of parameters. `table` is where they meet the program's length."""

    kind: str
    theta: float
    head_dim: int
    dim: int
    max_position: int
    original: int
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def max_len_tokens(self) -> int:
        """The length that the scaling was made for."""
        if self.kind == "yarn":
            return max(self.max_position, int(self.original * self.factor))
        return int(self.max_position * self.factor) if self.kind == "linear" else self.max_position

    def table(self, max_len_tokens: int) -> RopeTable:
        """Return frequencies and magnitude for texts of up to `max_len_tokens`."""
        f = self._frequencies(max_len_tokens)
        return RopeTable(f.astype(np.float32), self.magnitude)

    def _frequencies(self, max_len_tokens: int) -> _Reals:
        if self.kind == "proportional":
            rotated = int(self.dim // 2)
            f = self.theta ** (-2.0 * np.arange(rotated) / self.head_dim)
            return np.concatenate([f, np.zeros(self.head_dim // 2 - rotated)]) / self.factor
        theta = self.theta
        if self.kind == "dynamic":
            length = max(max_len_tokens, self.max_position)
            stretch = self.factor * length / self.max_position - (self.factor - 1.0)
            theta *= stretch ** (self.dim / (self.dim - 2))
        f = theta ** (-2.0 * np.arange(self.dim // 2) / self.dim)
        if self.kind == "linear":
            return np.asarray(f / self.factor)
        if self.kind == "llama3":
            return self._llama3(f)
        if self.kind == "yarn":
            return self._yarn(f)
        if self.kind in ("longrope", "tiercel_freq_factors"):
            is_long = self.kind == "longrope" and max_len_tokens > self.original
            return np.asarray(f / np.array(self.long_factors if is_long else self.short_factors))
        return np.asarray(f)

    def _llama3(self, f: _Reals) -> _Reals:
        wavelength = 2.0 * math.pi / f
        slow, fast = self.original / self.low_freq_factor, self.original / self.high_freq_factor
        share = (self.original / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        between = (1.0 - share) * f / self.factor + share * f
        return np.where(wavelength > slow, f / self.factor, np.where(wavelength < fast, f, between))

    def _yarn(self, f: _Reals) -> _Reals:
        def pair_with(turns: float) -> float:
            return self.dim * math.log(self.original / (turns * 2.0 * math.pi)) / (2.0 * math.log(self.theta))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        high += 0.001 if low == high else 0.0
        ramp = np.clip((np.arange(self.dim // 2) - low) / (high - low), 0.0, 1.0)
        return np.asarray(f * (1.0 - ramp) + f / self.factor * ramp)


def read_rope(fields: ConfigFields, *, head_dim: int, max_position: int, default_theta: float) -> RopeParameters:
    """Read the one rotation of a model from `rope_parameters`, or from `rope_scaling`, `rope_theta` and its kin.

    Raises:
        UnsupportedModel: the kind, or one of its parameters, is not implemented.
        ModelFileError: a parameter is missing or makes no sense.
    """
    scaling, newer = fields.raw("rope_scaling"), fields.raw("rope_parameters")
    params = newer if newer is not None else scaling if scaling is not None else {}
    if not isinstance(params, Mapping):
        raise fields.broken("rope_scaling" if newer is None else "rope_parameters", params, "an object")
    merged = dict(params)
    if newer is not None and scaling is not None and dict(scaling) != merged:
        raise fields.refused("rope_scaling", scaling, "rope_parameters says something else; keep one of them")
    for name in ("rope_theta", "partial_rotary_factor", _ORIGINAL):
        value = fields.raw(name)
        if value is not None:
            merged.setdefault(name, value)
    return parse_rope(merged, head_dim=head_dim, max_position=max_position, default_theta=default_theta)


def parse_rope(params: Mapping[str, Any], *, head_dim: int, max_position: int, default_theta: float) -> RopeParameters:
    """Check one set of parameters.

    Raises:
        UnsupportedModel: the kind, or one of its parameters, is not implemented.
        ModelFileError: a parameter is missing or makes no sense.
    """
    fields = ConfigFields(params, "config: rope_parameters")
    named = [fields.raw("rope_type"), fields.raw("type")]
    given = next((name for name in named if name is not None), "default")
    kind = _NEWER_NAMES.get(given, given) if isinstance(given, str) else given
    if not isinstance(kind, str) or kind not in _KINDS:
        raise fields.refused("rope_type", given, f"the known kinds are {', '.join(_KINDS)}")
    for name, value in params.items():
        if value is not None and name not in _COMMON | _KINDS[kind]:
            raise fields.refused(name, value, f"rope_type {kind!r} has no such parameter here")
    partial = fields.positive("partial_rotary_factor", 1.0)
    dim = int(head_dim * partial)
    if partial > 1.0 or (kind != "proportional" and (dim % 2 or dim < 2)) or head_dim % 2:
        raise fields.broken("partial_rotary_factor", partial, f"an even part of head_dim {head_dim}")
    if kind == "dynamic" and dim < 4:
        raise fields.broken("partial_rotary_factor", partial, "at least 4 rotated columns")
    original = fields.size(_ORIGINAL, max_position)
    needs_factor = kind in ("linear", "dynamic", "llama3")
    factor = fields.positive("factor") if needs_factor else fields.positive("factor", 1.0)
    if kind in ("yarn", "longrope") and not fields.has("factor"):
        factor = max_position / original
    theta = fields.positive("rope_theta", default_theta)
    _check_reach(fields, kind, theta, factor, max_position=max_position, original=original)
    base = RopeParameters(
        kind=kind,
        theta=theta,
        head_dim=head_dim,
        dim=dim,
        max_position=max_position,
        original=original,
        factor=factor,
    )
    return replace(base, **_of_kind(fields, kind, dim, factor, original))


def _check_reach(
    fields: ConfigFields, kind: str, theta: float, factor: float, *, max_position: int, original: int
) -> None:
    """Refuse what would divide by zero, or stretch a text to no length or to one that no machine holds."""
    reach = {"linear": max_position * factor, "yarn": max(max_position, original * factor)}.get(kind, max_position)
    if not 1.0 <= reach < _MAX_REACH_TOKENS:
        raise fields.broken("factor", factor, f"one that makes the length 1 to {_MAX_REACH_TOKENS - 1} tokens")
    if kind == "yarn" and theta <= 1.0:
        raise fields.broken("rope_theta", theta, "a number above 1")
    if kind == "longrope" and original < 2 and not fields.has("attention_factor"):
        raise fields.broken(_ORIGINAL, original, "an integer above 1, or attention_factor,")


def _of_kind(fields: ConfigFields, kind: str, dim: int, factor: float, original: int) -> dict[str, Any]:
    if kind == "llama3":
        low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
        if not low < high:
            raise fields.broken("high_freq_factor", high, f"more than low_freq_factor {low}")
        return {"low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        return {
            "beta_fast": fields.positive("beta_fast", 32.0),
            "beta_slow": fields.positive("beta_slow", 1.0),
            "truncate": fields.flag("truncate", default=True),
            "magnitude": _yarn_magnitude(fields, factor),
        }
    if kind == "longrope":
        usual = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 and original > 1 else 1.0
        return {
            "magnitude": fields.positive("attention_factor", usual),
            "short_factors": _divisors(fields, "short_factor", dim // 2),
            "long_factors": _divisors(fields, "long_factor", dim // 2),
        }
    return {"short_factors": _divisors(fields, "freq_factors", dim // 2)} if kind == "tiercel_freq_factors" else {}


def _yarn_magnitude(fields: ConfigFields, factor: float) -> float:
    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    mscale, mscale_all = fields.real("mscale", 0.0), fields.real("mscale_all_dim", 0.0)
    usual = grown(mscale) / grown(mscale_all) if mscale and mscale_all else grown(1.0)
    return fields.positive("attention_factor", usual)


def _divisors(fields: ConfigFields, name: str, n: int) -> tuple[float, ...]:
    values = fields.raw(name)
    is_list = isinstance(values, list | tuple) and len(values) == n
    if not is_list or not all(isinstance(v, int | float) and 0.0 < v < float("inf") for v in values):
        raise fields.broken(name, values, f"a list of {n} positive numbers")
    return tuple(float(v) for v in values)
