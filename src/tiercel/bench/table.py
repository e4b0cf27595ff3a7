"""Rows as people read them: a few lines after a run, and one Markdown table of the newest row of each case."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiercel.base.units import format_bytes
from tiercel.bench.rows import OURS

# The one measure of each bench that a table of all shows, of both sides.
HEADLINES = {
    "latency": ("decode_tok_s", "prefill_tok_s", "latency_s"),
    "throughput": ("output_tok_s",),
    "startup": ("first_byte_s",),
    "serve": ("output_throughput",),
}
_UNITS = (("_tok_s", "tok/s"), ("_gb_s", "GB/s"), ("_per_s", "/s"), ("_ms", "ms"), ("_us", "µs"), ("_s", "s"))


def describe(row: Mapping[str, Any]) -> str:
    """Return what one row says, for a terminal."""
    lines = [f"{row['case']} ({row['bench']}), row {row['row']}"]
    for name, one in row["contestants"].items():
        lines.append(f"  {name}")
        for measure, of_it in one["measures"].items():
            told = [show(measure, of_it[part]) for part in ("min", "median", "p95", "max")]
            lines.append(
                f"    {measure:<20} min {told[0]}  median {told[1]}  p95 {told[2]}  max {told[3]}  n {of_it['n']}"
            )
    for name, of_peer in row["ratios"].items():
        told = [f"{measure} {ratio:.2f}" for measure, ratio in of_peer.items()]
        lines.append(f"  {OURS} / {name}: " + ", ".join(told))
    for name, why in row["skipped"].items():
        lines.append(f"  {name} is left out: {why}")
    for target in row["reach"]:
        lines.append(f"  {describe_target(target)}")
    return "\n".join(lines)


def describe_target(target: Mapping[str, Any]) -> str:
    """Return whether one target of a case is reached."""
    # A ratio to a peer has no unit.
    measure = "" if target.get("against") else target["measure"]
    sign, bound = (">=", target["at_least"]) if "at_least" in target else ("<=", target["at_most"])
    against = f" / {target['against']}" if target.get("against") else ""
    got = "not measured" if target["got"] is None else show(measure, target["got"])
    claim = f"{target['measure']}{against} {sign} {show(measure, bound)}"
    return f"{'reached' if target['is_reached'] else 'NOT reached'}: {claim}, got {got}"


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table of the newest row of each case: medians, beside each peer's, with the row's id."""
    newest: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row["case"] not in newest or row["date"] >= newest[row["case"]]["date"]:
            newest[row["case"]] = row
    lines = ["| case | measure | Tiercel | peer | ratio | row |", "| --- | --- | --: | --: | --: | --- |"]
    for case in sorted(newest):
        lines += _table_lines(newest[case])
    return "\n".join(lines) + "\n"


def show(measure: str, value: float) -> str:
    """Return a measure's value with the unit its name ends in."""
    if measure.endswith("_bytes"):
        return format_bytes(int(value))
    if measure.endswith("_frac"):
        return f"{value:.1%}"
    for ending, unit in (
        ("_tok_s", "tok/s"),
        ("_gb_s", "GB/s"),
        ("_per_s", "/s"),
        ("_ms", "ms"),
        ("_us", "µs"),
        ("_s", "s"),
    ):
        if measure.endswith(ending):
            return f"{_digits(value)} {unit}"
    return _digits(value)


def _table_lines(row: Mapping[str, Any]) -> list[str]:
    ours = row["contestants"][OURS]["measures"]
    wanted: Sequence[str] = [measure for measure in HEADLINES.get(row["bench"], ()) if measure in ours][:1]
    if row["bench"] == "startup" and "peak_rss_bytes" in ours:
        wanted = [*wanted, "peak_rss_bytes"]
    if "gain_over_single" in ours:
        wanted = [*wanted, "gain_over_single"]
    lines = []
    for measure in wanted or list(ours)[:1]:
        mine = show(measure, ours[measure]["median"])
        peers = [name for name in row["contestants"] if name != OURS and measure in row["ratios"].get(name, {})]
        for name in peers or [""]:
            theirs = f"{name} {show(measure, row['contestants'][name]['measures'][measure]['median'])}" if name else "–"
            ratio = f"{row['ratios'][name][measure]:.2f}" if name else "–"
            lines.append(f"| {row['case']} | {measure} | {mine} | {theirs} | {ratio} | `{row['row']}` |")
    return lines


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
