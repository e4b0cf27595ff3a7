"""Numbers as people write them: `25.6k`, `64K`, `2GiB`. Knows nothing of which setting a number is for.

A lower-case suffix counts in thousands and an upper-case one in 1024s (`1k` = 1000, `1K` = 1024), as vLLM's flags do.
A decimal point is taken only with a suffix in thousands or a byte unit, and only if the result is a whole number.
"""

import re
from decimal import Decimal

from tiercel.base.errors import ConfigError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_HUMAN_INT = re.compile(r"(?P<number>[+-]?\d{1,30}(?:\.\d{1,30})?)(?P<suffix>[kmgtKMGT]?)", re.ASCII)
_BYTES = re.compile(
    r"(?P<number>\d{1,30}(?:\.\d{1,30})?)\s*(?P<prefix>[kmgt]?)(?P<unit>ib|b|)", re.ASCII | re.IGNORECASE
)


def parse_int_human(text: str) -> int:
    """Read a whole number as people write it: digits, or digits with one of k m g t (1000s) or K M G T (1024s).

    Raises:
        ConfigError: `text` is no such number, or not a whole one, or has a decimal point before a 1024s suffix.
    """
    match = _HUMAN_INT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"got {text!r}; need a whole number such as 4096, 4k (4000), 4K (4096) or 25.6k")
    number, suffix = match["number"], match["suffix"]
    if "." in number and not suffix.islower():
        raise ConfigError(f"got {text!r}; a decimal point needs a suffix in thousands: k, m, g or t, as in 25.6k")
    base = 1024 if suffix.isupper() else 1000
    return _whole(Decimal(number) * base ** _POWERS[suffix.lower()], text)


def parse_bytes(text: str) -> int:
    """Read a number of bytes as people write it: `2GiB`, `1.5 MiB`, `500MB`, `4096`, or a human integer such as `2G`.

    `KiB MiB GiB TiB` are powers of 1024 and `kB MB GB TB` powers of 1000, in any case; a bare letter is read as
    `parse_int_human` does.

    Raises:
        ConfigError: `text` is no such size, is negative, or is not a whole number of bytes.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"got {text!r}; need a size in bytes such as 2GiB, 500MB or 4096")
    prefix, unit = match["prefix"], match["unit"].lower()
    if not unit:
        return parse_int_human(f"{match['number']}{prefix}")
    if unit == "ib" and not prefix:
        raise ConfigError(f"got {text!r}; need a size in bytes such as 2GiB, 500MB or 4096")
    base = 1024 if unit == "ib" else 1000
    return _whole(Decimal(match["number"]) * base ** _POWERS[prefix.lower()], text)


def format_bytes(n_bytes: int) -> str:
    """Write `n_bytes` for a person, in powers of 1024 with at most one decimal: `512 B`, `93.8 MiB`."""
    if abs(n_bytes) < KIB:
        return f"{n_bytes} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    size, idx = n_bytes / KIB, 0
    # From 1023.95 on, a size would print as 1024.0 of its unit.
    while abs(size) >= 1023.95 and idx + 1 < len(units):
        size, idx = size / KIB, idx + 1
    return f"{size:.1f} {units[idx]}"


def _whole(value: Decimal, text: str) -> int:
    if value != value.to_integral_value():
        raise ConfigError(f"got {text!r}, which is {value}; need a whole number")
    return int(value)
