"""`tiercel show`: describe a model, its recorded program, and which kernel and format each op got and why."""

import sys
from collections.abc import Mapping
from typing import Any

from tiercel.cli.options import SOURCE_OPTIONS, given_options
from tiercel.cli.parsing import CommandParser
from tiercel.cli.run import add_model_source, find_model
from tiercel.cli.run_request import RunRequest


def configure(parser: CommandParser) -> None:
    """Give `parser` what `show` takes."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder, .gguf file, catalogue name or org/name")
    parser.add_argument("--program", action="store_true", help="print the recorded program")
    parser.add_argument("--explain", action="store_true", help="say which kernel and format each op got, and why")
    parser.add_argument("--json", action="store_true", help="write JSON")
    add_model_source(parser)


def execute(args: Any) -> int:
    """Write what is known of the model."""
    found = find_model(RunRequest(args.model, None), offline=args.offline, **given_options(args, SOURCE_OPTIONS))
    told = describe_model(str(found.path), program=args.program, explain=args.explain)
    if args.json:
        import json

        json.dump({"model": found.display_name, **told}, sys.stdout, indent=2, default=str)
        print()
        return 0
    rows = [("model", found.display_name), *told.get("summary", ())]
    width = max(len(str(key)) for key, _ in rows)
    for key, value in rows:
        print(f"{key:<{width}}  {value}")
    for part in ("program", "explain"):
        if told.get(part):
            print(f"\n{told[part]}".rstrip())
    return 0


def describe_model(model: str, *, program: bool, explain: bool) -> Mapping[str, Any]:
    """Ask the composition root. Tests put a fake here."""
    from tiercel.boot import describe

    told: Mapping[str, Any] = describe(model, program=program, explain=explain)
    return told
