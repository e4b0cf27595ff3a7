"""Rows of benchmarks that are scripts: as `tiercel bench` writes them, from measures taken by hand."""

import os
import statistics
import sys
from pathlib import Path
from typing import Any

from tiercel.bench import machine, rows
from tiercel.bench.offline import Told, make_row


def command_of() -> str:
    """Return how the script was called; of paths, the names."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *(Path(word).name for word in sys.argv[1:])])


def keep_row(told: Told, work: dict[str, Any], found: dict[str, dict[str, list[float]]], compared: str) -> None:
    """Write a row of what each contestant's measures were, run by run, and print what it says.

    `compared` says of which outputs it was seen that they are equal.
    """
    contestants = {
        name: rows.Contestant(
            machine.versions(("numpy",)),
            {},
            {measure: rows.spread(values) for measure, values in measures.items()},
            {"compared": compared},
        )
        for name, measures in found.items()
    }
    folder = Path(os.environ.get("RESULTS", Path(__file__).parent / "results"))
    row = make_row(told, {"work": work, "engine": {}}, contestants, {}, machine.describe())
    row = rows.append(folder / f"{told.bench}.jsonl", row)
    print(row["row"], told.case)
    for name, measures in found.items():
        print(f"  {name}", {measure: round(statistics.median(values), 4) for measure, values in measures.items()})
    print(*(f"  {one}" for one in row["reach"]), sep="\n")
