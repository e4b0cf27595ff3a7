"""Sampling defaults that a model's `generation_config.json` states. Knows no engine."""

from collections.abc import Mapping
from typing import Any

from tiercel.base.errors import ConfigError, RequestError
from tiercel.protocol.params import SamplingParams

# Their name in generation_config.json -> ours.
_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def stated_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that the model's authors chose, by our names; what is null or absent is left
    out.
    """
    found = {ours: generation_config.get(theirs) for theirs, ours in _FIELDS.items()}
    return {
        name: value for name, value in found.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Refuse what a person wants instead of the model's choice, if no request could have it.

    Raises: ConfigError: a value is no number, or out of its range.
    """
    for name, value in overrides.items():
        try:
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise RequestError(f"{name}: got {value!r}; a number is needed")
            given: dict[str, Any] = {_FIELDS[name]: value}
            SamplingParams(**given)
        except RequestError as error:
            raise ConfigError(f"override_generation_config: {error}") from None


def default_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of a call that gives none: vLLM's defaults with the model's own over them."""
    return SamplingParams(**stated_defaults(generation_config))
