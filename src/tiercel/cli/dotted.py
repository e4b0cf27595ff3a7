"""Parts of a JSON object as flags of their own: `--flag.key value`, `--flag.a.b=1`, `--flag.list+ x,y`."""

import json
from collections.abc import Sequence
from typing import Any

from tiercel.base.errors import ConfigError
from tiercel.base.options import parse_object


def gather(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Write the parts of each of `flags` as one flag with JSON, at the end; a part wins over the flag's own JSON.

    Raises: ConfigError: a part has no value, or is both an object and a value; the message names it.
    """
    kept: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        flag, dot, path = name.partition(".")
        if flag not in flags or not (dot or f"{flag}." in " ".join(words)):
            kept.append(word)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{name}: got no value; need one")
            value = rest.pop(0)
        whole = objects.setdefault(flag, {})
        if dot:
            _put(whole, path, value, name)
        else:
            try:
                objects[flag] = parse_object(value) | whole
            except ConfigError as error:
                raise ConfigError(f"{flag}: {error}") from None
    return kept + [f"{flag}={json.dumps(whole)}" for flag, whole in objects.items()]


def _put(whole: dict[str, Any], path: str, text: str, name: str) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        inner = whole.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{name}: {parent} has a value already; need one of the two")
        whole = inner
    if not last.rstrip("+"):
        raise ConfigError(f"{name}: got no key; need one, as in --flag.key")
    if last.endswith("+"):
        before = whole.setdefault(last[:-1], [])
        if not isinstance(before, list):
            raise ConfigError(f"{name}: {last[:-1]} has a value that is no list; need one of the two")
        before += [_value(one) for one in text.split(",")]
    elif isinstance(whole.get(last), dict):
        raise ConfigError(f"{name}: {last} has parts already; need one of the two")
    else:
        whole[last] = _value(text)


def _value(text: str) -> Any:
    """Read a part as JSON; what is none is the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
