"""Each note in changes/ belongs to an issue and is of a known kind, so that a release can gather them."""

import re

from source_tree import ROOT, text_of

KINDS = re.findall(r"^\| `(\w+)` \|", text_of(ROOT / "changes" / "README.md"), re.MULTILINE)
NOTES = sorted(path for path in (ROOT / "changes").iterdir() if path.name != "README.md")


def test_a_note_is_named_after_its_issue_and_kind():
    form = re.compile(rf"\d+\.({'|'.join(KINDS)})(\.\d+)?\.md")
    assert KINDS
    assert [path.name for path in NOTES if not form.fullmatch(path.name)] == []


def test_a_note_says_something():
    assert [path.name for path in NOTES if not text_of(path).strip()] == []
