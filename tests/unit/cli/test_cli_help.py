"""`--help`: short by itself, all of it on request, and about one group or flag."""

import pytest

from tiercel.api.http.settings import server_rows
from tiercel.base.config import engine_rows
from tiercel.cli.main import main
from tiercel.cli.run import _DEFAULTS

ROWS = (*engine_rows(), *engine_rows("source"), *server_rows())


@pytest.fixture
def said(home, capsys):
    def of(*words, code=0):
        assert main([*words]) == code
        told = capsys.readouterr()
        return told.err if code else told.out

    return of


def test_the_short_help_fits_a_screen_and_names_the_groups(said):
    text = said("serve", "--help")
    assert len(text.splitlines()) < 50
    assert "--port" in text
    assert "--block-size" not in text
    assert all(f"{row.group} (" in text for row in ROWS)


def test_all_of_it_has_every_flag_once(said):
    text = said("serve", "--help=all")
    assert all(f"  {row.flag}" in text or f", {row.flag}" in text for row in ROWS)


@pytest.mark.parametrize("about", ["cache", "Cache", "CacheConfig"])
def test_a_group_has_its_flags_and_no_others(said, about):
    text = said("serve", f"--help={about}")
    shown = {row.flag for row in ROWS if f"{row.flag} " in text or f"{row.flag}," in text}
    assert shown == {row.flag for row in ROWS if row.group == "cache"}


@pytest.mark.parametrize("title", sorted({row.group for row in ROWS}))
def test_the_help_of_a_group_tells_each_default(said, title):
    text = said("serve", f"--help={title}")
    rows = [row for row in ROWS if row.group == title]
    assert text.startswith(f"{title}:\n")
    assert text.count("    default: ") == len(rows)
    assert [line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("-")] == [
        row.short or row.flag for row in rows
    ]


@pytest.mark.parametrize("about", ["max-model-len", "max_model_len", "--max-model-len"])
def test_a_flag_tells_its_default_and_why(said, about):
    assert said("serve", f"--help={about}").splitlines() == [
        "--max-model-len TOKENS",
        "    the most tokens a sequence may have; auto or -1: what fits",
        "    default: the model's own, or what fits",
    ]


def test_a_flag_tells_the_variable_that_gives_it(said):
    assert "VLLM_CPU_KVCACHE_SPACE" in said("serve", "--help=kv-cache-memory-bytes")


def test_a_flag_that_is_none_here_tells_why(said):
    assert "only 1 is taken" in said("serve", "--help=tensor-parallel-size")
    assert "removed" in said("serve", "--help=swap_space")


def test_help_about_nothing_known_names_the_nearest(said):
    assert "did you mean --max-model-len?" in said("serve", "--help=max-modle-len", code=2)
    assert "groups are" in said("serve", "--help=zzzz", code=2)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.flag)
def test_every_row_says_what_it_does_and_why_its_default_is_that(row):
    assert row.help
    assert row.why
    assert row.group
    assert row.metavar or row.is_switch
    assert row.is_switch or row.parse is not None
    if row.default is not None:
        row.check(row.default)


def test_run_shows_first_how_long_and_how_varied_an_answer_is(said):
    short = said("run", "--help")
    assert "--max-tokens N" in short
    assert "--temperature X" in short


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_the_help_of_a_sampling_flag_tells_the_default_of_run(said, name):
    assert f"default: {_DEFAULTS[name]}\n" in said("run", f"--help={name}")
