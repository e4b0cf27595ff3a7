"""`tiercel cache`: what a disk tier of the KV cache keeps. A family of commands, with a table of its own; what is done
to the files is in `tiercel.kv.tiers.disk_tools`.

Exit codes beside the usual ones: 1 also when `verify` or `export` met a damaged object, or a question was not answered
with yes.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiercel.base.errors import ConfigError, TiercelError
from tiercel.base.units import format_bytes
from tiercel.cli.parsing import CommandParser
from tiercel.hub.store import default_folder

_N_SHOWN = 20  # damaged objects; the rest is counted


@dataclass(frozen=True, slots=True)
class _Command:
    does: str
    execute: Callable[[Any], int]


def main(words: Sequence[str]) -> int:
    """Run the cache command that `words` write and return the exit code."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] not in COMMANDS:
        raise ConfigError(
            f"cache: got {words[0]!r}; need one of {', '.join(COMMANDS)}; `tiercel cache --help` says more"
        )
    command = COMMANDS[words[0]]
    parser = CommandParser(f"tiercel cache {words[0]}", command.does)
    configure(parser, words[0])
    args = parser.parse(words[1:])
    try:
        return command.execute(args)
    except OSError as error:
        raise TiercelError(
            f"cache: {error.filename or args.path}: {error.strerror or error}; need the rights of who runs the engine, "
            "and a disk that answers"
        ) from error


def configure(parser: CommandParser, command: str) -> None:
    """Give `parser` what the command takes."""
    default = default_path()
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        type=Path,
        default=default,
        help=f"the folder that a disk tier's `path` names (default: {default})",
    )
    parser.add_argument("--id", metavar="ID", help="only the model whose id, as `stat` shows it, begins with this")
    parser.add_argument("--json", action="store_true", help="write JSON")
    if command == "clear":
        parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    if command == "export":
        parser.add_argument(
            "--to", metavar="PLACE", type=Path, required=True, help="a new folder, or a file whose name ends in .tar"
        )


def default_path() -> Path:
    """Return where KV is kept unless somebody says otherwise: `kv`, beside the models."""
    return default_folder().parent / "kv"


def _help() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: tiercel cache COMMAND [PATH] [...]",
            "",
            "Look after the keys and values that a disk tier keeps over restarts.",
            "",
            *(f"  {name:<{width}}  {command.does}" for name, command in COMMANDS.items()),
            "",
            "An engine may run beside them all. `tiercel cache COMMAND --help` says what each takes.",
        ]
    )


def _stat(args: Any) -> int:
    from tiercel.kv.tiers.disk_tools import examine, find_identities

    stats = [examine(folder) for folder in find_identities(args.path.expanduser(), args.id)]
    if args.json:
        _write({"path": str(args.path), "models": [asdict(stat) for stat in stats]})
        return 0
    cells = [("ID", "OBJECTS", "SIZE", "NEWEST", "IN USE", "WHAT IT IS")]
    for stat in stats:
        about = f"{stat.about or '-'}{f', pages of {stat.page_size_tokens}' if stat.page_size_tokens else ''}"
        newest = "-" if stat.newest_s is None else _when(stat.newest_s)
        used = "yes" if stat.is_used else "-"
        cells.append((stat.name, str(stat.n_objects), format_bytes(stat.n_bytes), newest, used, about))
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    for line in cells:
        print(
            "  ".join([*(f"{cell:<{width}}" for cell, width in zip(line[:5], widths, strict=True)), line[5]]).rstrip()
        )
    n_bytes = sum(stat.n_bytes for stat in stats)
    print(f"\n{sum(stat.n_objects for stat in stats)} objects, {format_bytes(n_bytes)}, in {args.path}")
    return 0


def _verify(args: Any) -> int:
    from tiercel.kv.tiers.disk_tools import find_identities, verify

    folders = find_identities(args.path.expanduser(), args.id)
    return _tell(args, (verdict for folder in folders for verdict in verify(folder)), {})


def _export(args: Any) -> int:
    from tiercel.kv.tiers.disk_tools import export, find_identities

    folders = find_identities(args.path.expanduser(), args.id)
    if len(folders) != 1:
        names = ", ".join(folder.name for folder in folders) or "none"
        raise ConfigError(f"cache export: {args.path} has {len(folders)} models ({names}); choose one by --id")
    to = args.to.expanduser()
    return _tell(args, export(folders[0], to), {"id": folders[0].name, "to": str(to)})


def _tell(args: Any, verdicts: Any, more: dict[str, str]) -> int:
    """Say what reading found; return 1 if something was damaged."""
    n_objects, n_bytes, n_expired = 0, 0, 0
    damaged: list[dict[str, str]] = []
    for verdict in verdicts:
        n_objects += 1
        n_bytes += verdict.file.n_bytes
        n_expired += verdict.is_expired
        if verdict.reason is not None:
            damaged.append({"file": str(verdict.file.path), "reason": verdict.reason})
            if not args.json and len(damaged) <= _N_SHOWN:
                print(f"{verdict.file.path}: {verdict.reason}")
    if args.json:
        counts = {"n_objects": n_objects, "n_bytes": n_bytes, "n_expired": n_expired, "damaged": damaged}
        _write({"path": str(args.path)} | more | counts)
    else:
        left_out = "; they are left out" if more else "; an engine removes them when it meets them"
        where = f", in {more['to']}" if more else ""
        print(
            f"{n_objects - len(damaged)} objects are whole, {len(damaged)} damaged{left_out if damaged else ''} "
            f"({format_bytes(n_bytes)} read, {n_expired} expired){where}"
        )
    return 1 if damaged else 0


def _clear(args: Any) -> int:
    from tiercel.kv.tiers.disk_tools import clear, examine, find_identities

    folders = find_identities(args.path.expanduser(), args.id)
    stats = [examine(folder) for folder in folders]
    n_objects, n_bytes = sum(stat.n_objects for stat in stats), sum(stat.n_bytes for stat in stats)
    if folders and not args.yes:
        used = " An engine uses them, and will compute anew." if any(stat.is_used for stat in stats) else ""
        question = (
            f"Remove {n_objects} objects ({format_bytes(n_bytes)}) of {len(folders)} models in {args.path}?{used}"
        )
        if not sys.stdin.isatty():
            raise ConfigError(f"cache clear: nobody to ask: {question} Say --yes to mean it")
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing is removed", file=sys.stderr)
            return 1
    freed = sum(clear(folder) for folder in folders)
    if args.json:
        _write({"path": str(args.path), "n_objects": n_objects, "n_bytes": freed, "ids": [f.name for f in folders]})
    else:
        print(f"{n_objects} objects ({format_bytes(freed)}) removed")
    return 0


def _when(unix_s: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _write(report: dict[str, Any]) -> None:
    json.dump(report, sys.stdout, indent=2)
    print()


COMMANDS = {
    "stat": _Command("say what is kept, for which models", _stat),
    "verify": _Command("read every object and say which are damaged", _verify),
    "clear": _Command("remove what is kept", _clear),
    "export": _Command("copy one model's objects for another machine", _export),
}
