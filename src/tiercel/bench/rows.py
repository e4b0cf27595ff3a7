"""What a measurement leaves behind: one row of JSON in `benchmarks/results/*.jsonl`, and the statistics in it.

A row has everything needed to judge it and to make it again; a row without checked outputs cannot be built. Does not
know how anything is measured.

    row            short id, from the content; prose cites it
    case, bench    what was measured, and the subcommand that measures it
    kind           "gate": stable enough to fail a change; "info": not
    date           when, UTC
    commit, is_dirty, command   of the program; is_dirty is null outside a checkout
    config         {"work": ..., "engine": ...}: every setting, defaults too
    machine        see `bench.machine`
    contestants    name -> {"versions", "config", "measures": measure -> spread, "outputs": how they were checked}
    ratios         peer -> measure -> ours / peer, of medians
    reach          the case's targets, what was got, and whether that reaches them
    skipped        peer -> why it has no measurement
"""

import datetime
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tiercel.base.errors import ConfigError

OURS = "tiercel"
KINDS = ("gate", "info")


@dataclass(frozen=True, slots=True)
class Spread:
    """How a measure was distributed over `n` runs. Percentiles are interpolated between neighbours, as numpy's are."""

    n: int
    min: float
    median: float
    p95: float
    max: float


@dataclass(frozen=True, slots=True)
class Contestant:
    """One contestant's share of a row. `outputs` says how its outputs were checked, and is never empty."""

    versions: Mapping[str, str]
    config: Mapping[str, Any]
    measures: Mapping[str, Spread]
    outputs: Mapping[str, Any]

    def __post_init__(self) -> None:
        assert self.outputs, "rows: outputs are compared before times are"
        assert self.measures, "rows: a contestant without a measure belongs to `skipped`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement. See the module's list."""

    case: str
    bench: str
    command: str
    config: Mapping[str, Any]
    machine: Mapping[str, Any]
    commit: str | None
    is_dirty: bool | None
    contestants: Mapping[str, Contestant]
    kind: str = "info"
    ratios: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    reach: Sequence[Mapping[str, Any]] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    date: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"case {self.case}: kind: got {self.kind!r}; need one of {', '.join(KINDS)}")

    def as_dict(self) -> dict[str, Any]:
        """Return the row as it is written, with its id."""
        told = asdict(self)
        told["date"] = self.date or datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        content = json.dumps(told, sort_keys=True, allow_nan=False)
        return {"row": hashlib.sha256(content.encode()).hexdigest()[:8], **told}


def spread(values: Sequence[float]) -> Spread:
    """Summarise the runs of one measure.

    Raises: AssertionError: there are none, or one is no finite number; whoever measures must have refused it.
    """
    assert values, "rows: a measure without a run"
    assert all(math.isfinite(value) for value in values), f"rows: not a finite measure: {values}"
    return Spread(
        n=len(values),
        min=min(values),
        median=percentile(values, 50),
        p95=percentile(values, 95),
        max=max(values),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of `values` lie, interpolated between neighbours."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def ratios(contestants: Mapping[str, Contestant]) -> dict[str, dict[str, float]]:
    """Return, for each peer and each measure both have, our median over the peer's."""
    ours = contestants[OURS].measures
    found: dict[str, dict[str, float]] = {}
    for name, peer in contestants.items():
        if name == OURS:
            continue
        shared = [measure for measure in ours if measure in peer.measures and peer.measures[measure].median]
        found[name] = {measure: ours[measure].median / peer.measures[measure].median for measure in shared}
    return found


def append(path: Path, row: Row) -> dict[str, Any]:
    """Add `row` to the end of a `.jsonl` file, which is made if it is not there; return what was written.

    Raises: ConfigError: the file cannot be written.
    """
    told = row.as_dict()
    line = json.dumps(told, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One write of a whole line: two runs that end together do not mix their rows.
        out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(out, line.encode())
        finally:
            os.close(out)
    except OSError as error:
        raise ConfigError(f"results file: {path.name}: {error.strerror}; need a file that can be written") from error
    return told


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Give the rows of a `.jsonl` file.

    Raises: ConfigError: the file cannot be read, or a line is no row.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"results file: {path.name}: {error}; need a file of rows") from None
    for n, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"results file: {path.name}:{n}: {error.msg}; need a row of JSON on each line") from None
        if not isinstance(row, dict) or not {"row", "case", "contestants"} <= row.keys():
            raise ConfigError(f"results file: {path.name}:{n}: need an object with row, case and contestants")
        yield row
