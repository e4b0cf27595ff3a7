"""Files of a run: whole or not there, and never mixed with those of other options."""

import errno

import pytest

from tiercel.base.errors import ConfigError, TiercelError
from tiercel.train import store


def fail_with(code, after=b"half"):
    def write(file):
        file.write(after)
        raise OSError(code, "it failed")

    return write


def test_a_file_that_is_not_complete_has_no_name(tmp_path):
    path = tmp_path / "x"
    store.write_whole(path, lambda file: file.write(b"first"))
    with pytest.raises(TiercelError, match="no space is left on its disk; what was complete before is kept"):
        store.write_whole(path, fail_with(errno.ENOSPC))
    assert path.read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["x"]


def test_a_write_that_is_interrupted_leaves_what_was_there(tmp_path):
    def write(file):
        raise KeyboardInterrupt

    store.write_text(tmp_path / "x", "first")
    with pytest.raises(KeyboardInterrupt):
        store.write_whole(tmp_path / "x", write)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("x", "first")]


def test_a_disk_that_is_too_small_is_told_before(tmp_path):
    store.check_room(tmp_path, 1, "the taps")
    with pytest.raises(TiercelError, match=r"the taps need .* and the disk of .* has"):
        store.check_room(tmp_path, 1 << 60, "the taps")


def test_a_folder_is_gone_on_with_by_the_same_options_only(tmp_path):
    folder = tmp_path / "out"
    store.open_folder(folder, "drafter", {"seed": 0, "taps": [1, 2]})
    store.open_folder(folder, "drafter", {"seed": 0, "taps": (1, 2)})
    with pytest.raises(ConfigError, match="seed was 0 and is 1; give those again to go on, or another folder"):
        store.open_folder(folder, "drafter", {"seed": 1, "taps": [1, 2]})
    with pytest.raises(ConfigError, match="kind was 'drafter' and is 'data'"):
        store.open_folder(folder, "data", {"seed": 0, "taps": [1, 2]})


def test_a_folder_of_something_else_is_not_written_to(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds something that is no drafter of this command"):
        store.open_folder(tmp_path, "drafter", {})
    with pytest.raises(ConfigError, match="holds something"):
        store.open_folder(tmp_path / "thesis.txt", "drafter", {})
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / store.MANIFEST).write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        store.open_folder(tmp_path / "made", "drafter", {})
