import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.base.errors import ConfigError
from tiercel.base.units import format_bytes, parse_bytes, parse_int_human

INTS = [
    ("4096", 4096),
    ("1k", 1000),
    ("1K", 1024),
    ("25.6k", 25600),
    ("2m", 2_000_000),
    ("2M", 2 * 1024**2),
    ("1g", 10**9),
    ("1G", 1024**3),
    ("1T", 1024**4),
    ("-1", -1),
    (" 7 ", 7),
    ("0.001k", 1),
]
NOT_INTS = ["", "k", "1.5", "25.6K", "1kk", "0x10", "1_000", "1e3", "nan", "0.0001k", "٣", "1" * 31, "--1"]

SIZES = [
    ("4096", 4096),
    ("2GiB", 2 * 1024**3),
    ("1.5 MiB", 1536 * 1024),
    ("500MB", 500_000_000),
    ("500mb", 500_000_000),
    ("10kB", 10_000),
    ("7B", 7),
    ("2G", 2 * 1024**3),
    ("2g", 2 * 10**9),
]
NOT_SIZES = ["", "-1", "2 GiBs", "iB", "1iB", "0.3B", "GiB", "1.5", "1PiB"]


@pytest.mark.parametrize(("text", "value"), INTS)
def test_a_human_integer_has_its_value(text, value):
    assert parse_int_human(text) == value


@pytest.mark.parametrize("text", NOT_INTS)
def test_what_is_no_whole_number_is_refused_with_what_was_got(text):
    with pytest.raises(ConfigError, match="got"):
        parse_int_human(text)


@pytest.mark.parametrize(("text", "value"), SIZES)
def test_a_size_has_its_bytes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", NOT_SIZES)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError):
        parse_bytes(text)


@given(st.text(max_size=12))
def test_any_text_is_a_number_or_a_config_error(text):
    for parse in (parse_int_human, parse_bytes):
        with contextlib.suppress(ConfigError):
            assert isinstance(parse(text), int)


@given(st.integers(0, 2**50))
def test_a_shown_size_reads_back_within_its_last_digit(n_bytes):
    number, unit = format_bytes(n_bytes).split()
    one = parse_bytes(f"1{unit}")
    assert abs(float(number) * one - n_bytes) <= 0.051 * one


def test_a_size_just_below_a_unit_is_shown_in_that_unit():
    assert format_bytes(1024**2 - 1) == "1.0 MiB"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(98362432) == "93.8 MiB"
