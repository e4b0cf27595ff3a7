"""What `--help` shows: the command's own flags and the common ones of the table; `--help=all` every one; `--help=GROUP`
those of a group with their defaults; `--help=FLAG` all that is known of one, or why it is none here.
"""

import argparse
import difflib
import textwrap
from typing import TYPE_CHECKING, Any

from tiercel.base import absent
from tiercel.base.config import engine_rows
from tiercel.base.errors import ConfigError

if TYPE_CHECKING:
    from tiercel.base.options import Option
    from tiercel.cli.parsing import CommandParser

# vLLM's names of groups, where ours differ.
_GROUPS = {"frontend": "server", "modelconfig": "model", "cacheconfig": "cache", "schedulerconfig": "scheduler"}
_WIDTH = 100


def help_text(parser: "CommandParser", about: str) -> str:
    """Give the help about "" (the short one), "all", a group or a flag.

    Raises: ConfigError: there is no such group or flag; the message names the nearest.
    """
    if about.lower() == "all":
        return parser.format_help()
    if not about:
        return _short(parser)
    title = _GROUPS.get(about.lower(), about.lower())
    if title in parser.titles:
        flags = [flag for action in parser.titles[title]._group_actions for flag in action.option_strings]
        rows = [parser.rows[flag] for flag in flags if flag in parser.rows]
        return f"{title}:\n" + "\n".join(map(describe, rows))
    flag = "--" + about.lstrip("-").replace("_", "-")
    row = parser.rows.get(flag) or parser.rows.get(flag.replace("--no-", "--", 1))
    if row is not None:
        return describe(row)
    action = parser.action_of(flag[2:])
    if action is not None:
        return f"{', '.join(action.option_strings) or action.dest}\n    {action.help or ''}\n"
    name = flag[2:].replace("-", "_")
    if parser.knows_vllm and absent.is_listed(name):
        return f"{flag}\n    {absent.described(name)}\n"
    near = difflib.get_close_matches(flag, parser.flags, n=1) or difflib.get_close_matches(title, parser.titles, n=1)
    hint = f"did you mean {near[0]}?" if near else f"groups are {', '.join(parser.titles)}"
    raise ConfigError(f"{parser.prog} --help={about[:80]}: no such group or flag; {hint}")


def describe(row: "Option") -> str:
    """Give all that is known of an option."""
    names = ", ".join(name for name in (row.short, row.flag) if name)
    off = f", --no-{row.flag[2:]}" if row.is_switch else f" {row.metavar or 'VALUE'}"
    lines = [f"{names}{off}", *_wrapped(row.help)]
    if row.choices:
        lines += _wrapped("one of " + ", ".join(str(one) for one in row.choices if one is not None))
    lines += _wrapped(f"default: {default_text(row)}")
    if row.env:
        lines += _wrapped("environment: " + ", ".join(name for name, _ in row.env))
    return "\n".join(lines) + "\n"


def default_text(row: "Option") -> str:
    """Write an option's default as a flag would have it, and why it is that."""
    if row.is_switch and row.default is not None:
        shown = "on" if bool(row.default) != row.is_inverse else "off"
        return f"{shown} ({row.why})" if row.why else shown
    if row.default is None or row.default in ((), {}, ""):
        return row.why or "none"
    shown = ",".join(row.default) if isinstance(row.default, tuple) else str(row.default)
    return f"{shown} ({row.why})" if row.why else shown


def command_of(flag: str) -> str | None:
    """Name a command that has this flag in the table."""
    from tiercel.api.http.settings import server_rows
    from tiercel.cli.options import SAMPLING_OPTIONS

    flag = flag.replace("--no-", "--", 1)
    if flag in {row.flag for row in SAMPLING_OPTIONS}:
        return "tiercel run"
    rows = (*server_rows(), *engine_rows(), *engine_rows("source"))
    return "tiercel serve" if flag in {row.flag for row in rows} else None


def _short(parser: "CommandParser") -> str:
    if not parser.rows:
        return parser.format_help()
    own = [group.title for group in parser._action_groups if group.title not in parser.titles]
    return _page(parser, [str(title) for title in own], list(parser.titles))


def _page(parser: "CommandParser", whole: list[str], titles: list[str]) -> str:
    """Write the groups of `whole`, the common flags of all, and the names of the others."""
    out = parser._get_formatter()
    out.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    out.add_text(parser.description)
    for group in parser._action_groups:
        if str(group.title) in whole:
            _section(out, str(group.title), group._group_actions)
    common = [a for group in parser.titles.values() for a in group._group_actions if _is_common(parser, a)]
    if titles and common:
        _section(out, "often used", common)
    out.add_text(parser.epilog)
    text = out.format_help()
    if titles:
        counts = ", ".join(f"{title} ({len(parser.titles[title]._group_actions)})" for title in titles)
        text += "\n" + "\n".join(_wrapped(f"More, by group: {counts}.", indent="")) + "\n"
        text += f"`{parser.prog} --help=GROUP`, `--help=FLAG` and `--help=all` show them.\n"
    return text


def _section(out: argparse.HelpFormatter, title: str, actions: Any) -> None:
    out.start_section(title)
    out.add_arguments(actions)
    out.end_section()


def _is_common(parser: "CommandParser", action: argparse.Action) -> bool:
    return any(flag in parser.rows and parser.rows[flag].is_common for flag in action.option_strings)


def _wrapped(text: str, indent: str = "    ") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
