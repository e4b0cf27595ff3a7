"""`tiercel show`: describe a model, its arithmetic, its recorded program, and which kernel and format each op got."""

import sys
from collections.abc import Mapping
from typing import Any

from tiercel.base.errors import ConfigError
from tiercel.cli.options import SOURCE_OPTIONS, given_options
from tiercel.cli.parsing import CommandParser
from tiercel.cli.run import add_model_source, find_model
from tiercel.cli.run_request import RunRequest


def configure(parser: CommandParser) -> None:
    """Give `parser` what `show` takes."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a folder, .gguf file, catalogue name or org/name; or a config.json"
    )
    parser.add_argument("--memory", metavar="SIZE", help="say what fits in so much memory, such as 24GiB")
    parser.add_argument("--program", action="store_true", help="print the recorded program")
    parser.add_argument("--explain", action="store_true", help="say which kernel and format each op got, and why")
    parser.add_argument("--json", action="store_true", help="write JSON")
    add_model_source(parser)


def execute(args: Any) -> int:
    """Write what is known of the model."""
    from tiercel.cli import show_sizes

    memory = None if args.memory is None else show_sizes.read_memory(args.memory)
    needs_weights = bool(args.program or args.explain)
    config = show_sizes.config_named(args.model)
    name = str(config)
    if config is None:
        source = given_options(args, SOURCE_OPTIONS)
        request = RunRequest(args.model, None)
        found = find_model(request, offline=args.offline, config_only=not needs_weights, **source)
        config, name = show_sizes.config_named(str(found.path)), found.display_name
    if config is None:
        told = describe_model(str(found.path), program=args.program, explain=args.explain)
    elif needs_weights:
        raise ConfigError(f"show: {config} has no weights beside it, which decide the program; name a whole model")
    else:
        told = show_sizes.describe_config(config)
    told = dict(told)
    sizes = told.pop("sizes", None)
    if args.json:
        import json

        if sizes is not None:
            told["sizes"] = show_sizes.as_json(sizes, memory)
        json.dump({"model": name, **told}, sys.stdout, indent=2, default=str)
        print()
        return 0
    rows = [("model", name), *told.get("summary", ())]
    if sizes is not None:
        rows += show_sizes.rows_of(sizes, memory)
    width = max(len(str(key)) for key, _ in rows)
    for key, value in rows:
        print(f"{key:<{width}}  {value}")
    for part in ("program", "explain"):
        if told.get(part):
            print(f"\n{told[part]}".rstrip())
    return 0


def describe_model(model: str, *, program: bool, explain: bool) -> Mapping[str, Any]:
    """Ask the composition root. Tests put a fake here."""
    from tiercel.boot.summary import describe

    told: Mapping[str, Any] = describe(model, program=program, explain=explain)
    return told
