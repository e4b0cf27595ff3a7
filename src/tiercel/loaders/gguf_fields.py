"""Reading an architecture's metadata so that nothing is ignored: each key is honoured, known to be neutral, or refused.

`Fields` hands out the values under one architecture's prefix and remembers which were asked for. `finish` refuses the
file if any key was not: a key nobody read may change the arithmetic. It knows no architecture; see `gguf_map`.
"""

import logging
from collections.abc import Mapping
from math import isfinite

import numpy as np

from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.loaders.gguf_file import StringArray, Value

_log = logging.getLogger(__name__)

_MAX_COUNT = (1 << 31) - 1


class Fields:
    """The keys `<arch>.*` of a GGUF file. One reader, then `finish`."""

    def __init__(self, metadata: Mapping[str, Value], arch: str, where: str) -> None:
        self._metadata = metadata
        self._arch = arch
        self._where = where
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Tell whether the file sets `key`."""
        return f"{self._arch}.{key}" in self._metadata

    def _take(self, key: str) -> Value | None:
        self._read.add(f"{self._arch}.{key}")
        return self._metadata.get(f"{self._arch}.{key}")

    def wrong(self, key: str, got: object, needed: str) -> ModelFileError:
        """Build the error for a value that no such field can have."""
        text = "nothing" if got is None else str(got)[:40]
        return ModelFileError(f"{self._where}: {self._arch}.{key} is {text}; {needed} is needed; fetch the file again")

    def refuse(self, key: str, got: object, needed: str) -> UnsupportedModel:
        """Build the error for a value that is legal but that Tiercel does not compute."""
        return UnsupportedModel(
            f"{self._where}: {self._arch}.{key} is {str(got)[:80]}; Tiercel computes {self._arch} with {needed}; "
            "choose another model"
        )

    def count(self, key: str, default: int | None = None) -> int:
        """Read an integer of 1 or more. A list, one number a layer, is read if its numbers are all the same."""
        value = self._take(key)
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.integer) and value.size:
            if not np.all(value == value[0]):
                raise self.refuse(key, f"a list from {value.min()} to {value.max()}", "the same number in every layer")
            value = int(value[0])
        if type(value) is not int or not 1 <= value <= _MAX_COUNT:
            raise self.wrong(key, value, f"an integer from 1 to {_MAX_COUNT}")
        return value

    def count_or_zero(self, key: str) -> int:
        """Read an integer of 0 or more; absent is 0, the way files write "off"."""
        if not self.has(key):
            return 0
        value = self._take(key)
        return 0 if type(value) is int and value == 0 else self.count(key)

    def real(self, key: str, default: float | None = None) -> float:
        """Read a finite number of 0 or more, as the shortest decimal that gives the file's float32."""
        value = self._take(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not isfinite(value) or not 0 <= value < 1e38:  # type: ignore[arg-type,operator]
            raise self.wrong(key, value, "a finite number of 0 or more")
        return shortest(float(value))  # type: ignore[arg-type]

    def assumed(self, key: str, value: object) -> None:
        """Say in the log what a field is taken to be that the file should have and has not."""
        if not self.has(key):
            _log.warning(
                "%s: %s.%s is missing; %s is taken; if its answers are no good, convert the model again",
                self._where,
                self._arch,
                key,
                value,
            )

    def text(self, key: str, default: str) -> str:
        """Read a text."""
        value = self._take(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, value, "a text")
        return value

    def flags_or_count(self, key: str, default: int) -> int | list[bool]:
        """Read one number, or one truth value a layer."""
        value = self._metadata.get(f"{self._arch}.{key}")
        if isinstance(value, np.ndarray) and value.dtype == np.bool_:
            self._take(key)
            return [bool(flag) for flag in value]
        return self.count(key, default)

    def neutral(self, key: str, *neutral: int | float | str | bool) -> None:
        """Accept `key` only if it is absent or has one of the values that change nothing."""
        value = self._take(key)
        if value is None:
            return
        if isinstance(value, np.ndarray | StringArray) or value not in neutral:
            raise self.refuse(key, value, " or ".join(str(v) for v in neutral))

    def ignored(self, key: str) -> None:
        """Note a key that says nothing about the arithmetic."""
        self._take(key)

    def finish(self) -> None:
        """Refuse the file if it holds a key under the prefix that nobody read.

        Raises:
            UnsupportedModel: names the keys.
        """
        rest = sorted(k for k in self._metadata if k.startswith(f"{self._arch}.") and k not in self._read)
        if rest:
            named = ", ".join(f"{key} = {str(self._metadata[key])[:40]}" for key in rest[:8])
            raise UnsupportedModel(
                f"{self._where}: {named}: Tiercel does not know these fields of {self._arch} and they may change the "
                "result; choose another conversion of the model"
            )


def scalar(metadata: Mapping[str, Value], key: str, default: int | str, where: str) -> int | float | str:
    """Read one value of any key, absent as `default`.

    Raises:
        ModelFileError: it is a list, which nothing may be compared with by `==`.
    """
    value = metadata.get(key, default)
    if isinstance(value, np.ndarray | StringArray):
        raise ModelFileError(f"{where}: {key} is a list; one value is needed; fetch the file again")
    return value


def shortest(value: float) -> float:
    """Return the double whose decimal text is the shortest that still rounds to `value` as a float32.

    Files hold 1e-5 as a float32, 9.99999975e-06; a configuration shows and hashes the number that was meant.
    """
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value
