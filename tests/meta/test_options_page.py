"""docs/options.md is what the table of options says."""

from source_tree import ROOT

from tiercel.cli.options_page import page


def test_the_page_of_options_is_written_from_the_table():
    """Write it anew with `python -m tiercel.cli.options_page > docs/options.md`."""
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == page()
