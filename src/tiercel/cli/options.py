"""From rows of the table (`base.options`) to flags, and back to values. The sampling options of `run` have theirs here.

Holds no default: an option that is not given is not passed on, so that a default lives in one place, the field's.
"""

import argparse
from collections.abc import Iterable
from typing import Any

from tiercel.base.config import engine_rows
from tiercel.base.options import Option, parse_float
from tiercel.base.units import parse_int_human
from tiercel.cli.parsing import CommandParser, RepeatedAction, checked

ENGINE_OPTIONS = engine_rows()
SOURCE_OPTIONS = engine_rows("source")


def _sampling(name: str, parse: Any, does: str, why: str = "", *, is_common: bool = False) -> Option:
    flag = "--" + name.replace("_", "-")
    metavar = "X" if parse is parse_float else "N"
    return Option(
        name=name, flag=flag, parse=parse, metavar=metavar, help=does, why=why, group="sampling", is_common=is_common
    )


SAMPLING_OPTIONS = (
    _sampling(
        "max_tokens", parse_int_human, "end the answer after so many tokens", "where the model ends it", is_common=True
    ),
    _sampling("min_tokens", parse_int_human, "do not end the answer before so many tokens"),
    _sampling(
        "temperature", parse_float, "0 always takes the likeliest token; higher is more varied", "0.7", is_common=True
    ),
    _sampling("top_p", parse_float, "sample from the likeliest tokens that together have this probability", "0.95"),
    _sampling("top_k", parse_int_human, "sample from this many likeliest tokens; 0 is all"),
    _sampling("min_p", parse_float, "drop tokens below this fraction of the likeliest one's probability"),
    _sampling("seed", parse_int_human, "makes sampling repeat itself"),
    _sampling("repetition_penalty", parse_float, "above 1 makes tokens that were seen less likely"),
    _sampling("presence_penalty", parse_float, "above 0 makes tokens that were answered less likely"),
    _sampling("frequency_penalty", parse_float, "above 0 makes tokens less likely each time they are answered"),
)


def add_options(parser: CommandParser, options: Iterable[Option]) -> None:
    """Give `parser` a flag for each of `options`, under its group's title; a switch also gets `--no-<flag>`."""
    for option in options:
        parser.rows[option.flag] = option
        group = parser.group(option.group)
        names = [name for name in (option.short, option.flag) if name]
        more: dict[str, Any] = {"dest": option.dest, "default": argparse.SUPPRESS, "help": _help(option)}
        if option.is_switch:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **more)
            continue
        more |= {"type": checked(option.read), "metavar": option.metavar or "VALUE"}
        if option.many == "words":
            more["nargs"] = "+"
        elif option.many == "repeat":
            more["action"] = RepeatedAction
        group.add_argument(*names, **more)


def add_engine_options(parser: CommandParser, options: Iterable[Option] = ENGINE_OPTIONS) -> None:
    """Give `parser` the engine's flags, a file of options, and what is to be said of vLLM's that are none here."""
    parser.knows_vllm = True
    parser.add_argument("--config", metavar="FILE", help="a YAML file of options, by their names; flags win over it")
    add_options(parser, options)


def given_options(args: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """Collect the values of `options` that were written, by keyword name."""
    found = {}
    for option in options:
        if hasattr(args, option.dest):
            value = getattr(args, option.dest)
            found[option.name] = not value if option.is_inverse else tuple(value) if option.many else value
    return found


def _help(option: Option) -> str:
    text = option.help.replace("%", "%%")
    if option.choices:
        text += f" ({', '.join(str(one) for one in option.choices if one is not None)})"
    return text
