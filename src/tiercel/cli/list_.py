"""`tiercel list`: the models that have a short name, and which of them are here."""

import sys
from typing import Any

from tiercel.base.units import format_bytes
from tiercel.cli.parsing import CommandParser
from tiercel.hub.catalogue import load_catalogue
from tiercel.hub.store import ModelStore


def configure(parser: CommandParser) -> None:
    """Give `parser` what `list` takes."""
    parser.epilog = "Models of the Hugging Face hub are kept in that library's own cache and are not listed."
    parser.add_argument("--json", action="store_true", help="write JSON")


def execute(args: Any) -> int:
    """Write the table."""
    store = ModelStore()
    rows = list_rows(store)
    if args.json:
        import json

        json.dump({"folder": str(store.folder), "models": rows}, sys.stdout, indent=2)
        print()
        return 0
    cells = [("NAME", "SIZE", "HERE", "WHAT IT IS")]
    for row in rows:
        name = f"{row['name']} *" if row["is_default"] else row["name"]
        cells.append((name, format_bytes(row["size_bytes"]), "yes" if row["path"] else "-", row["description"]))
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    for name, size, here, what in cells:
        print(f"{name:<{widths[0]}}  {size:>{widths[1]}}  {here:<{widths[2]}}  {what}".rstrip())
    print(f"\n* the default. Fetched models are in {store.folder}")
    return 0


def list_rows(store: ModelStore) -> list[dict[str, Any]]:
    """Describe each catalogue model, then each stored one that the catalogue does not have."""
    catalogue = load_catalogue()
    rows: list[dict[str, Any]] = []
    for entry in catalogue.entries:
        path = store.find(entry)
        rows.append(
            {
                "name": entry.name,
                "description": f"{entry.description}; {entry.licence}",
                "size_bytes": entry.size_bytes,
                "sha256": entry.sha256,
                "is_default": entry.name == catalogue.default,
                "path": None if path is None else str(path),
            }
        )
    known = {row["path"] for row in rows}
    for stored in store.list_models():
        if str(stored.path) not in known:
            rows.append(
                {
                    "name": stored.name,
                    "description": f"(no longer in the catalogue: {stored.path.name})",
                    "size_bytes": stored.size_bytes,
                    "sha256": stored.sha256,
                    "is_default": False,
                    "path": str(stored.path),
                }
            )
    return rows
