"""Numbers of a JSON schema that its compiler would not keep to exactly: it holds them as 64-bit floats.

Pure functions over decoded JSON. `schemas` refuses what is found here.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeGuard

_EXACT_MAX: Final = 2**53  # whole numbers beyond it have no float of their own
_INT64_MAX: Final = 2**63 - 1
_HIGH: Final = ("maximum", "exclusiveMaximum")


def lost_number(node: Mapping[str, Any]) -> str | None:
    """Say which number of a schema's own keywords could be broken by an answer; None: none could."""
    return _lost_value(node) or _lost_bound(node) or _lost_end(node)


def _lost_value(node: Mapping[str, Any]) -> str | None:
    for key in ("const", "enum"):
        for number in _numbers(node.get(key)):
            if isinstance(number, int) and abs(number) > _EXACT_MAX:
                return f"{key} holds {number}; whole numbers up to {_EXACT_MAX} are kept to; write it as a text"
    return None


def _lost_bound(node: Mapping[str, Any]) -> str | None:
    for key in ("minimum", "exclusiveMinimum", *_HIGH):
        bound = node.get(key)
        if not _is_number(bound) or abs(bound) <= _EXACT_MAX or not math.isfinite(bound):
            continue
        kept = min(int(float(bound)), _INT64_MAX)
        is_narrow = kept <= bound if key in _HIGH else kept >= bound
        # An exclusive bound that is moved excludes another number than it says.
        if not is_narrow or (key.startswith("exclusive") and kept != bound):
            return f"{key} of {bound}; whole numbers up to {_EXACT_MAX} are kept to; lower it or leave it out"
    return None


def _lost_end(node: Mapping[str, Any]) -> str | None:
    """Where less than 1 lies between the bounds, llguidance 1.9.1 lets a whole exclusive one be met."""
    if node.get("type") == "integer":
        return None
    lows = [bound for key in ("minimum", "exclusiveMinimum") if _is_number(bound := node.get(key))]
    highs = [bound for key in _HIGH if _is_number(bound := node.get(key))]
    if not lows or not highs or min(highs) - max(lows) >= 1:
        return None
    for key, plain in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        bound = node.get(plain) if node.get(key) is True else node.get(key)  # True: as draft 4 writes it
        if _is_number(bound) and float(bound).is_integer():
            return f"{key} of {bound} less than 1 from the other bound cannot be kept to; use {plain}"
    return None


def _numbers(value: Any) -> Iterator[int | float]:
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, list):
            todo += one
        elif _is_number(one):
            yield one


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
