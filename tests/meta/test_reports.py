"""`docs/reports.md` and the tests of public reports name each other."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split(" | ")]
    for line in (ROOT / "docs/reports.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| report"))
]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
REASON = re.compile(r"does not apply: [^`]{10,}")


def names_in(path):
    return re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.M)


def test_every_row_is_tested_or_says_why_not():
    assert len(ROWS) == 95
    for cells in ROWS:
        assert len(cells) == 3, cells
        assert bool(NAMED.findall(cells[2])) != bool(REASON.fullmatch(cells[2])), cells


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: cells[0])
def test_a_rows_tests_are_there_and_have_its_number(cells):
    numbers = re.findall(r"\d{2,}", cells[0])
    assert numbers
    for path, name in NAMED.findall(cells[2]):
        assert name in names_in(ROOT / path)
        assert any(number in name for number in numbers)


def test_every_test_of_a_report_is_on_the_page():
    shown = {pair for cells in ROWS for pair in NAMED.findall(cells[2])}
    there = set()
    for path in (ROOT / "tests").rglob("test_*reports*.py"):
        if path != Path(__file__):
            there |= {
                (path.relative_to(ROOT).as_posix(), n) for n in names_in(path) if re.match(r"test_[a-z]+\d{2}", n)
            }
    # Some stand among the tests of what they are about.
    assert {pair for pair in shown if "reports" in pair[0]} == there
