"""`tiercel cache`: what is kept on disk is told, verified, removed and carried elsewhere; bad input is refused."""

import io
import json
import os
import shutil
import sys
import tarfile
import time
from dataclasses import replace
from threading import Event

import pytest

from tiercel.cli.main import main
from tiercel.kv.tiers.disk import DiskTier
from tiercel.kv.tiers.interface import Answer, Outcome
from tiercel.testing.tier_kit import IDENTITY, PATIENCE_S, TierDriver, body_of, bytes_of, key_of

OTHER = replace(IDENTITY, weights_digest="other", about="another-model")


def opened(path, identity=IDENTITY):
    woken = Event()
    tier = TierDriver(DiskTier(identity, path, 1 << 20, woken.set, time.monotonic), woken)
    assert tier.tier.drain(PATIENCE_S)
    return tier


@pytest.fixture
def kept(home):
    """A folder with 3 objects of one model and 2 of another, where an engine would have it."""
    for identity, ids in ((IDENTITY, [1, 2, 3]), (OTHER, [4, 5])):
        tier = opened(home / "kv", identity)
        tier.store(ids)
        tier.tier.close()
    return home / "kv"


def file_of(path, i):
    return path / IDENTITY.name() / key_of(i).hex()[:2] / f"{key_of(i).hex()}.kv"


def flip(path, i):
    data = bytearray(file_of(path, i).read_bytes())
    data[700] ^= 4
    file_of(path, i).write_bytes(data)


def told(capsys, *words):
    """Run a command with --json; return its exit code and report."""
    code = main(["cache", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def refused(capsys, *words):
    """Run a command that is wrong; return its message."""
    assert main(["cache", *words]) in (1, 2)
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_stat_counts_by_model(kept, capsys):
    code, report = told(capsys, "stat")
    assert code == 0
    by_name = {model["name"]: model for model in report["models"]}
    assert {name: model["n_objects"] for name, model in by_name.items()} == {IDENTITY.name(): 3, OTHER.name(): 2}
    ours = by_name[IDENTITY.name()]
    assert ours["n_bytes"] == sum(file_of(kept, i).stat().st_size for i in (1, 2, 3))
    assert (ours["about"], ours["page_size_tokens"], ours["is_used"]) == ("kit", 16, False)
    assert by_name[OTHER.name()]["about"] == "another-model"
    assert main(["cache", "stat"]) == 0
    said = capsys.readouterr().out
    assert "another-model, pages of 16" in said
    assert "5 objects, " in said


def test_an_empty_folder_is_nothing_and_no_error(home, tmp_path, capsys):
    (tmp_path / "kv").mkdir()
    assert told(capsys, "stat", str(tmp_path / "kv")) == (0, {"path": str(tmp_path / "kv"), "models": []})
    assert main(["cache", "clear", str(tmp_path / "kv")]) == 0


def test_verify_tells_every_damaged_object_and_exits_1(kept, capsys):
    assert told(capsys, "verify")[0] == 0
    flip(kept, 1)
    file_of(kept, 2).write_bytes(file_of(kept, 2).read_bytes()[:-1])
    code, report = told(capsys, "verify")
    assert (code, report["n_objects"]) == (1, 5)
    assert {d["file"]: d["reason"] for d in report["damaged"]} == {
        str(file_of(kept, 1)): "the body's checksum is wrong",
        str(file_of(kept, 2)): f"{file_of(kept, 3).stat().st_size - 1} bytes; needs {file_of(kept, 3).stat().st_size}",
    }
    assert main(["cache", "verify", "--id", OTHER.name()[:8]]) == 0
    assert "2 objects are whole, 0 damaged" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["swapped", "another model's", "empty", "no header", "half a header"])
def test_verify_finds_what_is_not_what_its_name_says(kept, capsys, what):
    path = file_of(kept, 1)
    if what == "swapped":
        shutil.copy(file_of(kept, 2), path)
    elif what == "another model's":
        other = next((kept / OTHER.name()).rglob("*.kv"))
        path = kept / IDENTITY.name() / other.parent.name / other.name
        path.parent.mkdir(exist_ok=True)
        shutil.copy(other, path)
    else:
        path.write_bytes({"empty": b"", "no header": bytes(1000)}.get(what, path.read_bytes()[:200]))
    code, report = told(capsys, "verify")
    assert code == 1
    assert [damaged["file"] for damaged in report["damaged"]] == [str(path)]


def test_clear_removes_objects_and_folders_of_the_chosen_model_only(kept, capsys):
    code, report = told(capsys, "clear", "--id", IDENTITY.name(), "--yes")
    assert (code, report["n_objects"], report["ids"]) == (0, 3, [IDENTITY.name()])
    assert not (kept / IDENTITY.name()).exists()
    assert len(list((kept / OTHER.name()).rglob("*.kv"))) == 2
    assert told(capsys, "clear", "--yes")[1]["n_objects"] == 2
    assert list(kept.iterdir()) == []


def test_clear_asks_a_person_and_refuses_where_there_is_none(kept, capsys, monkeypatch):
    assert "nobody to ask: Remove 5 objects" in refused(capsys, "clear")

    class Person(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Person("n\n"))
    assert "nothing is removed" in refused(capsys, "clear")
    monkeypatch.setattr(sys, "stdin", Person("y\n"))
    assert main(["cache", "clear"]) == 0
    assert list(kept.rglob("*.kv")) == []


@pytest.mark.parametrize("place", ["kv2", "kv2.tar"])
def test_what_is_exported_another_machine_can_use(kept, capsys, tmp_path, place):
    code, report = told(capsys, "export", "--id", IDENTITY.name()[:6], "--to", str(tmp_path / place))
    assert (code, report["n_objects"], report["damaged"]) == (0, 3, [])
    folder = tmp_path / "kv2"
    if place.endswith(".tar"):
        with tarfile.open(tmp_path / place) as archive:
            archive.extractall(folder, filter="tar")
    tier = opened(folder)
    assert [bytes_of(result) for result in tier.load([1, 2, 3])] == [body_of(i) for i in (1, 2, 3)]
    assert tier.tier.counters().n_invalid == 0
    tier.tier.close()
    modes = {p: p.stat().st_mode & 0o777 for p in folder.rglob("*")}
    assert all(mode == (0o700 if p.is_dir() else 0o600) for p, mode in modes.items())


def test_a_damaged_object_is_not_exported_and_told(kept, capsys, tmp_path):
    flip(kept, 2)
    code, report = told(capsys, "export", "--id", IDENTITY.name(), "--to", str(tmp_path / "to"))
    assert (code, len(report["damaged"])) == (1, 1)
    assert {path.stem for path in (tmp_path / "to").rglob("*.kv")} == {key_of(i).hex() for i in (1, 3)}


def test_export_overwrites_nothing(kept, capsys, tmp_path):
    for place in ("to", "to.tar"):
        words = ("export", "--id", OTHER.name(), "--to", str(tmp_path / place))
        assert main(["cache", *words]) == 0
        capsys.readouterr()
        assert "exists; need a new place" in refused(capsys, *words)
    (tmp_path / "file").write_text("")
    assert "exists; need a new place" in refused(capsys, "export", "--id", OTHER.name(), "--to", str(tmp_path / "file"))
    assert main(["cache", "export", "--id", IDENTITY.name(), "--to", str(tmp_path / "to")]) == 0, "beside another model"


def test_export_wants_one_model(kept, capsys, tmp_path):
    assert "has 2 models" in refused(capsys, "export", "--to", str(tmp_path / "to"))
    assert "required: --to" in refused(capsys, "export", "--id", IDENTITY.name())


def test_a_running_engine_is_told_and_survives_a_clear(kept, capsys):
    tier = opened(kept)
    report = told(capsys, "stat", "--id", IDENTITY.name())[1]
    assert report["models"][0]["is_used"] is True
    assert "An engine uses them" in refused(capsys, "clear")
    assert told(capsys, "verify")[0] == 0
    assert told(capsys, "clear", "--id", IDENTITY.name(), "--yes")[0] == 0
    assert tier.load([1])[0].outcome is Outcome.ABSENT
    assert tier.lookup(1) is Answer.MISS
    assert tier.store([1]) == [Outcome.DONE]
    assert bytes_of(tier.load([1])[0]) == body_of(1)
    tier.tier.close()
    assert told(capsys, "stat", "--id", IDENTITY.name())[1]["models"][0]["is_used"] is False


def test_a_file_that_a_dead_writer_left_is_counted_and_cleared(kept, capsys):
    (file_of(kept, 1).parent / f".{key_of(1).hex()}.0011.tmp").write_bytes(b"half")
    assert told(capsys, "stat", "--id", IDENTITY.name())[1]["models"][0]["n_being_written"] == 1
    assert told(capsys, "clear", "--yes")[0] == 0
    assert list(kept.iterdir()) == []


def test_a_wrong_place_is_refused_with_what_is_needed(kept, capsys, tmp_path):
    assert "nothing there; need the folder" in refused(capsys, "stat", str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    assert "no folder; need the folder" in refused(capsys, "verify", str(tmp_path / "file"))
    foreign = tmp_path / "foreign"
    (foreign / "photos").mkdir(parents=True)
    for command in ("stat", "verify", "clear"):
        assert "but other things" in refused(capsys, command, str(foreign), *(["--yes"] * (command == "clear")))
    assert (foreign / "photos").exists()
    assert "no model's folder begins with 'zz'" in refused(capsys, "stat", "--id", "zz")
    assert "need one of stat, verify, clear, export" in refused(capsys, "prune")


def test_other_things_in_a_models_folder_stay(kept, capsys):
    (kept / IDENTITY.name() / "notes.txt").write_text("mine")
    assert told(capsys, "clear", "--yes")[0] == 0
    assert (kept / IDENTITY.name() / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "about", [b"[" * 100_000, b"\xff", b"7", b'{"about": "\\u001b[2J", "page_size_tokens": "x"}', b""]
)
def test_what_is_written_about_a_model_is_never_believed(kept, capsys, about):
    """An exported folder comes from somebody else."""
    path = next(kept.rglob("about.json"))
    path.write_bytes(about)
    assert main(["cache", "stat", str(kept)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert main(["cache", "verify", str(kept)]) == 0


def test_a_symbolic_link_is_not_followed(kept, capsys, tmp_path):
    (kept / IDENTITY.name()).rename(tmp_path / "elsewhere")
    (kept / IDENTITY.name()).symlink_to(tmp_path / "elsewhere")
    assert [model["name"] for model in told(capsys, "stat")[1]["models"]] == [OTHER.name()]
    assert told(capsys, "clear", "--yes")[0] == 0
    assert len(list((tmp_path / "elsewhere").rglob("*.kv"))) == 3


def test_a_folder_without_rights_is_one_line(kept, capsys, monkeypatch):
    def scandir(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", scandir)
    assert f"cache: {kept}: Permission denied; need the rights" in refused(capsys, "stat")
