"""A digest over every byte is remembered exactly as long as no file changes."""

import os

import model_bytes as mb
import pytest

from tiercel.loaders.checkpoint import Checkpoint, open_checkpoint
from tiercel.loaders.whole_digest import whole_digest


@pytest.fixture
def model(put, tmp_path):
    put(b'{"model_type": "llama", "hidden_size": 3}', "config.json")
    values = bytes(1 << 17)
    put(mb.safetensors({"w": ("F32", (1 << 15,), values)}), "model.safetensors")
    return tmp_path


@pytest.fixture
def n_reads(monkeypatch):
    """How often all files were read."""
    counted, full_digest = [], Checkpoint.full_digest
    monkeypatch.setattr(Checkpoint, "full_digest", lambda self: counted.append(1) or full_digest(self))
    return counted


def digest(model):
    with open_checkpoint(model) as checkpoint:
        return whole_digest(checkpoint, model / "kept")


def change(model, place=1 << 16):
    """Change a byte in place and put the file's time back."""
    file = model / "model.safetensors"
    times = file.stat()
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(b"\x01")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_files_are_read_once_and_again_when_one_changed(model, n_reads):
    first = digest(model)
    assert digest(model) == first
    assert len(n_reads) == 1
    with open_checkpoint(model) as checkpoint:
        assert checkpoint.full_digest() == first
    change(model)
    assert digest(model) != first
    assert len(n_reads) == 3


@pytest.mark.parametrize("kept", [b"", b"x" * 64, b"\xff" * 64, b"0" * 63])
def test_what_is_no_digest_is_not_believed(model, n_reads, kept):
    first = digest(model)
    (place,) = (model / "kept").iterdir()
    place.write_bytes(kept)
    assert digest(model) == first
    assert len(n_reads) == 2


def test_a_folder_that_cannot_be_written_costs_another_reading_only(model, n_reads):
    (model / "kept").write_text("a file")
    assert digest(model) == digest(model)
    assert len(n_reads) == 2


def test_files_that_change_while_they_are_read_are_not_remembered(model, monkeypatch):
    full_digest = Checkpoint.full_digest

    def changing(checkpoint):
        found = full_digest(checkpoint)
        change(model)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "full_digest", changing)
        stale = digest(model)
    assert not (model / "kept").exists()
    assert digest(model) != stale
