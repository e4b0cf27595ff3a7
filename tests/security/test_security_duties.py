"""The table of duties is whole: each has a test of its name, or a reason that still holds."""

import re

import pytest
from duties import ABSENT, DUTIES
from source_tree import functions_of, python_files

from tiercel.api.http.app import ROUTES
from tiercel.api.http.schema import NO_OPS

_NAMED = re.compile(r"test_((?:CVE|GHSA|GO|PYSEC|POC|PR|DESIGN)_.+)")


def test_every_duty_has_a_test_of_its_name_or_a_reason():
    names = {
        function.name
        for path in python_files("tests")
        for function in functions_of(path)
        if _NAMED.match(function.name)
    }
    wanted = {f"test_{ids[0].replace('-', '_')}_" for ids, reason in DUTIES if reason is None}
    missing = {one for one in wanted if not any(name.startswith(one) for name in names)}
    assert not missing
    strangers = {name for name in names if not any(name.startswith(one) for one in wanted)}
    assert not strangers


def test_no_duty_is_listed_twice():
    ids = [one for row, _ in DUTIES for one in row]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("reason", sorted({reason for _, reason in DUTIES if reason is not None}))
def test_what_does_not_exist_still_does_not(reason):
    """When this fails, what was missing has come: its duties are due, so give them tests."""
    route, field = ABSENT[reason]
    assert route is None or route not in {path for _, path, _ in ROUTES}
    assert field is None or field in NO_OPS
