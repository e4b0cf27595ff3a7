"""The table of options: each is declared once, at the field that holds it, and everything else follows from there.

A row is a field of `base.config.EngineOptions` (the engine's) or of `api.http.settings.ServerSettings` (the server's):

    max_logprobs: int = option(20, parse=parse_int_human, least=-1, group="model", help="…", why="…")

From it come the flag (`--max-logprobs`, of run, serve, run-batch and bench for the engine's rows, of serve for the
server's), the key of a `--config` file, the check of a Python keyword, the entry in `--help=all` and its line in
`docs/options.md` (`python tools/make_options_doc.py` writes that; a test compares). To add one: add the field, read it
where it is meant, write the page anew. vLLM's options that are gone or mean nothing here are `base.absent`'s.

Knows no part: what a value means is decided where it is used.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from tiercel.base.errors import ConfigError, UnknownOption

T = TypeVar("T")

_KEY: Final = "option"


class Option(NamedTuple):  # a dataclass takes a millisecond longer to make, at each start
    """One row.

    name, default  the field's own
    parse          how the text of a flag, of a file or of the environment is read; None: it is a switch
    flag           the long flag, if it is not the name with dashes
    why            the reason for the default
    choices        the only values; `aliases` are other words for them, `refused` values with a hint of their own
    least, most    bounds of a number
    many           "words": one flag takes several; "repeat": the flag may come several times; "list": its text is one,
                   of texts; "objects": its text is a list of JSON objects
    keys           of a JSON object: those it may have; None: it is no object
    is_inverse     the flag switches off what the field says is on
    is_common      shown by the short `--help`
    env            environment variables that give the value where neither flag nor file does, and how each is read
    """

    name: str = ""
    default: Any = None
    parse: Callable[[str], Any] | None = str
    flag: str = ""
    short: str | None = None
    metavar: str = ""
    help: str = ""
    why: str = ""
    group: str = ""
    choices: tuple[Any, ...] = ()
    aliases: Mapping[str, str] = {}
    refused: Mapping[str, str] = {}
    least: float | None = None
    most: float | None = None
    many: str = ""
    keys: tuple[str, ...] | None = None
    is_inverse: bool = False
    is_common: bool = False
    env: tuple[tuple[str, Callable[[str], Any]], ...] = ()

    @property
    def dest(self) -> str:
        """The flag's name with underscores: its key in a file."""
        return self.flag[2:].replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.parse is None

    def read(self, text: str) -> Any:
        """Read one value from text, and check it.

        Raises: ConfigError: it is not of the form, or out of range; the message has no name in it.
        """
        assert self.parse is not None, f"option {self.name}: a switch has no text"
        value = self.aliases.get(text, text)
        value = self.parse(value)
        if not self.many:
            self._check_value(value)
        return value

    def check(self, value: Any) -> None:
        """Refuse a value that the field cannot have.

        Raises: ConfigError: the message begins with the option's name.
        """
        if value is None and self.default is None:
            return
        try:
            if self.many:
                if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
                    kind = "objects" if self.many == "objects" else "texts"
                    raise ConfigError(f"got {value!r}; needs a list of {kind}")
                for one in value:
                    self._check_value(one)
            else:
                self._check_value(value)
        except ConfigError as error:
            raise type(error)(f"{self.name}: {error}") from None

    def _check_value(self, value: Any) -> None:
        if isinstance(value, str) and value in self.refused:
            raise UnknownOption(self.refused[value])
        if self.is_switch:
            if not isinstance(value, bool):
                raise ConfigError(f"got {value!r}; needs True or False")
        elif self.choices:
            if value not in self.choices:
                shown = ", ".join("None" if one is None else str(one) for one in self.choices)
                raise ConfigError(f"got {value!r}; needs one of {shown}")
        elif self.keys is not None or self.many == "objects":
            _check_object(value, self.keys or ())
        elif self.least is not None:
            self._check_number(value)
        elif (self.parse is str or self.many) and not isinstance(value, str):
            raise ConfigError(f"got {value!r}; needs text")

    def _check_number(self, value: Any) -> None:
        assert self.least is not None
        is_whole = isinstance(self.least, int)
        kinds = (int,) if is_whole else (int, float)
        kind = "a whole number" if is_whole else "a number"
        if not isinstance(value, kinds) or isinstance(value, bool) or not value >= self.least:
            raise ConfigError(f"got {value!r}; needs {kind} of {self.least:,g} or more".replace(",", ""))
        if self.most is not None and value > self.most:
            raise ConfigError(f"got {value!r}; at most {self.most:g} is taken; lower it or leave it out")


def option(default: T, *, is_shown: bool = True, **row: Any) -> T:
    """Declare a dataclass field that is an option. `row` are `Option`'s fields; `is_shown` False leaves it out of the
    object's repr.
    """
    made = Option(default=default, **row)
    if isinstance(default, dict):
        value: Any = field(default_factory=dict, metadata={_KEY: made}, repr=is_shown)
    else:
        value = field(default=default, metadata={_KEY: made}, repr=is_shown)
    declared: T = value
    return declared


@cache
def options_of(kind: type) -> tuple[Option, ...]:
    """Give the rows that a dataclass declares, in its order."""
    rows = []
    for one in dataclasses.fields(kind):
        row: Option | None = one.metadata.get(_KEY)
        if row is not None:
            flag = row.flag or "--" + one.name.replace("_", "-")
            rows.append(row._replace(name=one.name, flag=flag))
    return tuple(rows)


def from_environment(rows: tuple[Option, ...], environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the values that environment variables give; the first variable of a row that is set counts.

    Raises: ConfigError: a value is not of the form; the message names the variable.
    """
    found: dict[str, Any] = {}
    for row in rows:
        for variable, parse in row.env:
            text = environ.get(variable)
            if not text:
                continue
            try:
                found[row.name] = parse(text)
                row.check(found[row.name])
            except ConfigError as error:
                raise ConfigError(f"environment {variable}: {error}") from None
            break
    return found


def parse_float(text: str) -> float:
    """Read a finite decimal number.

    Raises:
        ConfigError: `text` is not one.
    """
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value or value in (float("inf"), float("-inf")):
        raise ConfigError(f"got {text!r}; need a number such as 0.7")
    return value


def parse_object(text: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: `text` is none, or has a key twice.
    """
    import json  # only who writes an object pays for it

    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"got {text[:200]!r}, which is no JSON ({error}); need an object such as {{...}}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"got {text[:200]!r}; need a JSON object such as {{...}}")
    return value


def parse_list(text: str) -> tuple[str, ...]:
    """Read a list of texts: JSON, or words between commas; nothing is an empty one.

    Raises:
        ConfigError: `text` is JSON of something else.
    """
    if not text.lstrip().startswith("["):
        return tuple(word.strip() for word in text.split(",") if word.strip())
    import json  # as above

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'got {text[:200]!r}, which is no JSON ({error}); need a list such as ["a", "b"]') from None
    if not all(isinstance(one, str) for one in value):
        raise ConfigError(f'got {text[:200]!r}; need a list of texts such as ["a", "b"]')
    return tuple(value)


def parse_objects(text: str) -> tuple[dict[str, Any], ...]:
    """Read a JSON list of objects, or one object.

    Raises:
        ConfigError: `text` is something else.
    """
    import json  # as above

    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"got {text[:200]!r}, which is no JSON ({error}); need a list such as [{{...}}]") from None
    found = [value] if isinstance(value, dict) else value
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ConfigError(f"got {text[:200]!r}; need a JSON list of objects such as [{{...}}]")
    return tuple(found)


def parse_template(text: str) -> str:
    """Read a chat template: a file's path, or the template itself, which is known by its braces or lines.

    Raises:
        ConfigError: it is neither, or the file is not UTF-8.
    """
    if any(sign in text for sign in "{}\n"):
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"got {text[:200]!r}: {why}; need a file with a chat template, or the template") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _check_object(value: Any, keys: tuple[str, ...]) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"got {value!r}; needs an object (a dict, or JSON such as {{...}})")
    for key in value:
        if keys and key not in keys:
            raise ConfigError(f"got {key!r}; known are {', '.join(keys)}")
