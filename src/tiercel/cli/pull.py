"""`tiercel pull`: fetch a model to this machine, or check one that is here."""

import sys
from typing import Any

from tiercel.cli.options import SOURCE_OPTIONS, add_options, given_options
from tiercel.cli.parsing import CommandParser
from tiercel.cli.progress import FetchProgress
from tiercel.hub.catalogue import load_catalogue
from tiercel.hub.resolve import resolve
from tiercel.hub.store import store_in


def configure(parser: CommandParser) -> None:
    """Give `parser` what `pull` takes."""
    parser.epilog = "An interrupted fetch goes on where it can. Nothing is fetched that is here already."
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="a catalogue name or org/name; default: the default model"
    )
    parser.add_argument("--verify", action="store_true", help="hash a catalogue model again; fetch it if it differs")
    add_options(parser, SOURCE_OPTIONS)


def execute(args: Any) -> int:
    """Fetch the model and print where it is."""
    catalogue = load_catalogue()
    entry = catalogue.find(args.name or catalogue.default)
    with FetchProgress(args.name or catalogue.default) as progress:
        if args.verify and entry is not None:
            store = store_in(getattr(args, "download_dir", None))
            if store.find(entry) is not None and not store.verify(entry, progress):
                print(f"tiercel: {entry.name}: the stored file has changed; it is fetched again", file=sys.stderr)
        found = resolve(args.name, progress=progress, **given_options(args, SOURCE_OPTIONS))
    if args.verify and entry is None:
        print(f"tiercel: {args.name}: not a catalogue model; there is no digest to verify it by", file=sys.stderr)
    print(found.path)
    return 0
