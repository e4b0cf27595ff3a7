"""Rows as people read them: a few lines after a run, and one Markdown table of the newest row of each case.

The table can be put into a document, between two marks (`put_into`); a test holds README.md to it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tiercel.base.errors import ConfigError
from tiercel.base.units import format_bytes
from tiercel.bench.rows import OURS

# What a table of all shows of each bench, beside the targets of its case.
HEADLINES = {
    "context": ("long_tok_s",),
    "latency": ("decode_tok_s", "prefill_tok_s", "latency_s"),
    "ops": ("step_us",),
    "served": ("served_tok_s",),
    "startup": ("first_byte_s", "peak_rss_bytes"),
    "throughput": ("output_tok_s",),
}
MARKS = ("<!-- rows: made by `tiercel bench table` -->", "<!-- end of rows -->")
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
        accepted = one["outputs"].get("accepted_by_position_frac")
        if accepted is not None:
            lines.append(f"    accepted by position {' '.join(f'{frac:.2f}' for frac in accepted) or 'none'}")
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
    """Return a table of the newest row of each case, with each of its targets, and its headline beside each peer.

    Numbers are medians. What was not measured is a dash, never a number. A row of a processor with other features than
    most rows' has those features behind it: its numbers are not to be compared with theirs.
    """
    newest: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row["case"] not in newest or row["date"] >= newest[row["case"]]["date"]:
            newest[row["case"]] = row
    lines = [
        "| case | measure | Tiercel | peer | ratio | target | reached | row |",
        "| --- | --- | --: | --: | --: | --: | --- | --- |",
    ]
    usual = Counter(map(_features, newest.values())).most_common(1)
    for case in sorted(newest):
        row = newest[case]
        mark = "" if _features(row) == usual[0][0] else f" ({', '.join(_features(row)) or 'other processor'})"
        lines += [line.removesuffix(" |") + f"{mark} |" for line in _table_lines(row)]
    return "\n".join(lines) + "\n"


def put_into(text: str, table: str) -> str:
    """Return `text`, a document, with `table` between its two marks.

    Raises: ConfigError: it has no such marks.
    """
    head, mark, rest = text.partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    if not mark or not end:
        raise ConfigError(f"bench table: into: need the lines {MARKS[0]} and {MARKS[1]}, for the table between them")
    return f"{head}{mark}\n\n{table}\n{end}{tail}"


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


def _features(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(row.get("machine", {}).get("features", ()))


def _table_lines(row: Mapping[str, Any]) -> list[str]:
    lines, named = [], set()
    for target in row["reach"]:
        measure, peer = target["measure"], target.get("against")
        named.add(peer)
        lines.append(_line(row, measure, peer, _bound(target), "yes" if target["is_reached"] else "no"))
    ours = row["contestants"][OURS]["measures"]
    headlines = [name for name in HEADLINES.get(row["bench"], ()) if name in ours]
    # Beside peers and measures without a target: the first that both have.
    for peer in [name for name in row["ratios"] if name not in named]:
        measure = next((name for name in headlines if name in row["ratios"][peer]), None)
        if measure is not None:
            lines.append(_line(row, measure, peer, "–", "–"))
    if not lines and headlines:
        lines.append(_line(row, headlines[0], None, "–", "–"))
    return lines


def _line(row: Mapping[str, Any], measure: str, peer: str | None, bound: str, reached: str) -> str:
    contestants = row["contestants"]
    mine = contestants[OURS]["measures"].get(measure)
    theirs = None if peer is None else contestants.get(peer, {}).get("measures", {}).get(measure)
    ratio = None if peer is None else row["ratios"].get(peer, {}).get(measure)
    cells = [
        row["case"],
        measure,
        "–" if mine is None else show(measure, mine["median"]),
        "–" if peer is None else f"{peer} {'–' if theirs is None else show(measure, theirs['median'])}",
        "–" if ratio is None else f"{ratio:.2f}",
        bound,
        reached if ratio is not None or (peer is None and mine is not None) else "not measured",
        f"`{row['row']}`",
    ]
    return f"| {' | '.join(cells)} |"


def _bound(target: Mapping[str, Any]) -> str:
    sign, bound = ("≥", target["at_least"]) if "at_least" in target else ("≤", target["at_most"])
    return f"{sign} {bound:.2f} ×" if target.get("against") else f"{sign} {show(target['measure'], bound)}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
