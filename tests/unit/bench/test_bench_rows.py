import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.base.errors import ConfigError
from tiercel.bench import rows, table
from tiercel.bench.rows import Contestant, Row, spread

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


def make_row(case="c", date="2026-01-01T00:00:00Z", median=2.0, **changes):
    ours = Contestant({"tiercel": "0"}, {}, {"latency_s": spread([1.0, median, 3.0])}, {"digest": "d"})
    peer = Contestant({"peer": "1"}, {}, {"latency_s": spread([4.0])}, {"digest": "d"})
    both = {"tiercel": ours, "peer": peer}
    fields = {
        "case": case,
        "bench": "latency",
        "command": "tiercel bench latency",
        "config": {},
        "machine": {},
        "commit": None,
        "is_dirty": None,
        "contestants": both,
        "ratios": rows.ratios(both),
        "date": date,
    }
    return Row(**(fields | changes))


@given(NUMBERS)
def test_a_spread_is_numpys(values):
    told = spread(values)
    assert (told.n, told.min, told.max) == (len(values), min(values), max(values))
    assert math.isclose(told.median, np.percentile(values, 50), rel_tol=1e-9, abs_tol=1e-6)
    assert math.isclose(told.p95, np.percentile(values, 95), rel_tol=1e-9, abs_tol=1e-6)


@given(NUMBERS)
def test_a_spread_is_in_order(values):
    told = spread(values)
    assert told.min <= told.median <= told.max
    assert told.p95 <= told.max


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_no_spread_is_made_of_nothing_or_of_what_is_no_number(values):
    with pytest.raises(AssertionError):
        spread(values)


def test_a_contestant_without_checked_outputs_has_no_place_in_a_row():
    with pytest.raises(AssertionError, match="before times"):
        Contestant({}, {}, {"latency_s": spread([1.0])}, {})


def test_a_ratio_is_ours_over_the_peers_median():
    assert make_row().ratios == {"peer": {"latency_s": 0.5}}


def test_a_written_row_reads_back(tmp_path):
    path = tmp_path / "results" / "latency.jsonl"
    first, second = rows.append(path, make_row()), rows.append(path, make_row(case="d"))
    assert list(rows.read(path)) == json.loads(json.dumps([first, second]))


def test_a_rows_id_is_its_contents():
    assert make_row().as_dict()["row"] == make_row().as_dict()["row"]
    assert make_row().as_dict()["row"] != make_row(median=2.5).as_dict()["row"]


@pytest.mark.parametrize("line", ["{", "[1]", '{"row": "x"}'])
def test_a_line_that_is_no_row_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "r.jsonl"
    rows.append(path, make_row())
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=r"r\.jsonl:2"):
        list(rows.read(path))


def test_a_results_file_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="results file"):
        rows.append(tmp_path / "file" / "r.jsonl", make_row())


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="gate, info"):
        make_row(kind="maybe")


def test_the_table_has_the_newest_row_of_each_case_and_cites_it():
    old, new = make_row().as_dict(), make_row(date="2026-02-01T00:00:00Z", median=2.5).as_dict()
    other = make_row(case="b").as_dict()
    lines = table.markdown([new, old, other]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| b", "| c"]
    assert lines[3] == f"| c | latency_s | 2.5 s | peer 4 s | 0.62 | – | – | `{new['row']}` |"


def test_the_table_marks_rows_of_another_processor_than_most():
    made = {case: make_row(case=case).as_dict() for case in "abc"}
    made["b"]["machine"] = {"features": ["avx", "avx2"]}
    for case in "ac":
        made[case]["machine"] = {"features": ["avx", "avx2", "avx512f"]}
    lines = table.markdown(made.values()).splitlines()[2:]
    assert [line.rsplit("| ", 1)[1] for line in lines] == [
        f"`{made['a']['row']}` |",
        f"`{made['b']['row']}` (avx, avx2) |",
        f"`{made['c']['row']}` |",
    ]


@pytest.mark.parametrize(
    ("target", "got", "cells"),
    [
        ({"measure": "latency_s", "against": "peer", "at_most": 0.625}, 0.5, "2 s | peer 4 s | 0.50 | ≤ 0.62 × | yes"),
        (
            {"measure": "latency_s", "against": "other", "at_least": 2},
            None,
            "2 s | other – | – | ≥ 2.00 × | not measured",
        ),
        ({"measure": "latency_s", "at_most": 1.0}, 2.0, "2 s | – | – | ≤ 1 s | no"),
        ({"measure": "read_frac", "at_least": 0.7}, None, "– | – | – | ≥ 70.0% | not measured"),
    ],
)
def test_the_table_puts_what_was_got_beside_each_target(target, got, cells):
    row = make_row().as_dict()
    row["reach"] = [target | {"got": got, "is_reached": got == 0.5}]
    lines = table.markdown([row]).splitlines()
    assert lines[2] == f"| c | {target['measure']} | {cells} | `{row['row']}` |"


def test_the_table_goes_between_its_marks():
    document = f"before\n{table.MARKS[0]}\nold\n{table.MARKS[1]}\nafter\n"
    made = table.put_into(document, "| new |\n")
    assert made == f"before\n{table.MARKS[0]}\n\n| new |\n\n{table.MARKS[1]}\nafter\n"
    assert table.put_into(made, "| new |\n") == made


@pytest.mark.parametrize("document", ["", table.MARKS[0], f"{table.MARKS[1]} {table.MARKS[0]}"])
def test_a_document_without_marks_is_refused(document):
    with pytest.raises(ConfigError, match="between them"):
        table.put_into(document, "x")


def test_a_target_that_was_not_measured_is_not_reached():
    said = table.describe_target(
        {"measure": "decode_tok_s", "against": "peer", "at_least": 1.0, "got": None, "is_reached": False}
    )
    assert said == "NOT reached: decode_tok_s / peer >= 1, got not measured"
