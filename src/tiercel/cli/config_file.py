"""`--config FILE.yaml`: flags, written in a file by their names, with `-` or `_`, flat or under their groups' titles.

A value is that of the flag: a number or text (`25.6k` too), a list where a flag takes several, a mapping where it takes
a JSON object, true or false for a switch (false is `--no-…`, and nothing else). `model` is the command's model. What a
flag refuses is refused here, with the file's and the key's name.
"""

import argparse
import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tiercel.base import absent
from tiercel.base.errors import ConfigError, UnknownOption

if TYPE_CHECKING:
    from tiercel.cli.parsing import CommandParser

_NOT_HERE: Final = ("config", "help")


def apply(parser: "CommandParser", name: str) -> dict[str, Any]:
    """Make what the file says the defaults of `parser`, and return it.

    Raises: ConfigError: it cannot be read, is no YAML, or says what no flag may say; the message names file and key.
    """
    values: dict[str, Any] = {}
    for key, value in _flat(parser, _load(name), name):
        action = _action(parser, key, value, name)
        if action is None:
            continue
        if action.dest in values:
            raise ConfigError(f"{name}: {key}: it is there twice; need it once")
        values[action.dest] = _value(parser, action, key, value, name)
        action.required = False
    parser.set_defaults(**values)
    return values


def _load(name: str) -> dict[Any, Any]:
    if Path(name).suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{name}: got a file of another kind; need one that ends in .yaml or .yml")
    import yaml

    try:
        text = Path(name).read_text(encoding="utf-8")
        _refuse_twice(yaml.compose(text, yaml.SafeLoader), name)
        found = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}; need a file that can be read") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: it is no YAML: {' '.join(str(error).split())[:300]}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: got a {type(found).__name__}; need names of options with their values")
    return found


def _refuse_twice(node: Any, name: str) -> None:
    """Refuse a key that is there twice, of which YAML would take the last."""
    if not isinstance(getattr(node, "value", None), list):
        return
    if node.id != "mapping":
        for one in node.value:
            _refuse_twice(one, name)
        return
    keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{name}: {key}: it is there twice; need it once")
    for _, value in node.value:
        _refuse_twice(value, name)


def _flat(parser: "CommandParser", found: dict[Any, Any], name: str) -> list[tuple[str, Any]]:
    """List keys and values, those of groups too. A group is a mapping whose key is a group's title and no flag."""
    pairs: list[tuple[str, Any]] = []
    for key, value in found.items():
        if not isinstance(key, str):
            raise ConfigError(f"{name}: got {key!r} as a name; need that of an option, in quotes if YAML takes it else")
        if isinstance(value, dict) and key.lower() in parser.titles and parser.action_of(_dashed(key)) is None:
            pairs += _flat(parser, value, name)
        else:
            pairs.append((key, value))
    return pairs


def _action(parser: "CommandParser", key: str, value: Any, name: str) -> argparse.Action | None:
    """Find the flag of a key; None: it is one of vLLM's that changes nothing."""
    flag = _dashed(key)
    plain = flag.replace("-", "_")
    action = parser.action_of(flag)
    if action is not None and flag not in _NOT_HERE and not flag.startswith("no-"):
        return action
    if flag in parser.removed:
        raise UnknownOption(f"{name}: {key}: {parser.removed[flag]}")
    if absent.is_listed(plain):
        why = absent.why_not(plain, value)
        if why is None:
            return None
        raise UnknownOption(f"{name}: {key}: {why}")
    if flag in _NOT_HERE:
        raise UnknownOption(f"{name}: {key}: a file cannot say that; leave it out")
    if flag.startswith("no-") and parser.action_of(flag[3:]) is not None:
        raise UnknownOption(f"{name}: {key}: need {flag[3:]}: false")
    known = [one[2:] for one in parser.flags if not one.startswith("--no-")]
    near = difflib.get_close_matches(flag, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"`{parser.prog} --help=all` lists what there is"
    raise UnknownOption(f"{name}: {key}: no option of {parser.prog}; {hint}")


def _value(parser: "CommandParser", action: argparse.Action, key: str, value: Any, name: str) -> Any:
    where = f"{name}: {key}"
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: got {_shown(value)}; need true or false")
        if isinstance(action, argparse._StoreConstAction):
            return action.const if value else action.default
        return value
    row = next((parser.rows[flag] for flag in action.option_strings if flag in parser.rows), None)
    is_list = action.nargs in ("+", "*") or type(action).__name__ in ("RepeatedAction", "_AppendAction")
    if is_list:
        values = value if isinstance(value, list) else [value]
        return [_one(action, one, where) for one in values]
    if row is not None and row.many in ("list", "objects") and isinstance(value, list):
        import json

        value = json.dumps(value)
    if row is not None and row.keys is not None:
        if not isinstance(value, dict | str):
            raise ConfigError(f"{where}: got {_shown(value)}; need names with values, as of a JSON object")
        import json

        value = value if isinstance(value, str) else json.dumps(value)
    return _one(action, value, where)


def _one(action: argparse.Action, value: Any, where: str) -> Any:
    if value is None:
        raise ConfigError(f"{where}: got no value; need one, or leave the key out")
    if isinstance(value, bool | list | dict):
        raise ConfigError(
            f"{where}: got {_shown(value)}; need one value: text or a number; put words that YAML "
            "takes for something else in quotes"
        )
    text = str(value)
    parse = action.type if callable(action.type) else str
    try:
        found = parse(text)
    except (argparse.ArgumentTypeError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from None
    if action.choices is not None and found not in action.choices:
        raise ConfigError(f"{where}: got {text!r}; need one of {', '.join(map(str, action.choices))}")
    return found


def _dashed(key: str) -> str:
    return key.replace("_", "-")


def _shown(value: Any) -> str:
    if value is None:
        return "no value"
    return str(value).lower() if isinstance(value, bool) else f"{type(value).__name__} {str(value)[:80]!r}"
