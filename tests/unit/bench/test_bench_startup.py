import json
import subprocess
import sys

import pytest
from bench_fakes import PYTHON

from tiercel.base.errors import RequestFailed
from tiercel.bench import startup
from tiercel.bench.offline import Field
from tiercel.bench.peers import PeerFailed
from tiercel.bench.rows import OURS
from tiercel.cli import main


def process(script, name=OURS):
    return startup.Command(name, (sys.executable, "-c", script))


def field(**changes):
    return Field(**({"model": None, "options": {}, "n_warmups": 1, "n_rounds": 2, "deadline_s": 20.0} | changes))


def quiet(text):
    pass


STARTS = """
import json, sys
from tiercel.bench import startup

def start(script):
    started = startup.start(startup.Command("ours", (sys.executable, "-c", script)), deadline_s=20.0)
    return [started.first_byte_s, started.exit_s, started.text, started.peak_rss_bytes]

print(json.dumps([start("print(' Paris')"), start("x = b'x' * (256 << 20); print(' Paris')")]))
"""


def test_a_start_has_its_first_byte_before_its_end_and_its_own_memory():
    # In a process of its own: a child's mark of memory begins at its parent's size, and the tests' own is large.
    told = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, check=True, text=True, timeout=60)
    (first_byte_s, exit_s, text, small_bytes), (_, _, _, large_bytes) = json.loads(told.stdout)
    assert 0 < first_byte_s <= exit_s
    assert text == " Paris\n"
    assert 256 << 20 < large_bytes < 340 << 20
    assert small_bytes < large_bytes


def test_a_start_may_keep_compiled_modules_whatever_the_shell_says(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    started = startup.start(process("import sys; print(sys.dont_write_bytecode)"), deadline_s=20.0)
    assert started.text == "False\n"


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("import sys; print('x', flush=True); sys.exit('bad luck')", "died"),
        ("pass", "wrong"),
        ("import os; os.kill(os.getpid(), 9)", "died"),
        ("print('x' * (2 << 20))", "garbage"),
    ],
)
def test_a_start_that_goes_wrong_has_its_kind(script, kind):
    with pytest.raises(PeerFailed) as failure:
        startup.start(process(script), deadline_s=20.0)
    assert failure.value.kind == kind


def test_a_start_that_never_ends_is_stalled():
    with pytest.raises(PeerFailed) as failure:
        startup.start(process("import time; print('x', flush=True); time.sleep(600)"), deadline_s=0.3)
    assert failure.value.kind == "stalled"


def test_a_program_that_is_not_there_is_missing():
    with pytest.raises(PeerFailed) as failure:
        startup.start(startup.Command("peer", ("no-such-program-anywhere",)), deadline_s=1.0)
    assert failure.value.kind == "missing"


def test_a_peer_with_another_answer_is_left_out():
    commands = [process("print('Paris')"), process("print(' Paris')", "same"), process("print('Rome')", "other")]
    tally = startup.take_turns(commands, field(), quiet)
    assert {name: len(starts) for name, starts in tally.starts.items()} == {OURS: 2, "same": 2}
    assert "wrong" in tally.skipped["other"]


def test_a_peer_that_fails_is_left_out_and_ours_goes_on():
    commands = [process("print('Paris')"), process("raise SystemExit(4)", "peer")]
    tally = startup.take_turns(commands, field(), quiet)
    assert list(tally.starts) == [OURS]
    assert "died" in tally.skipped["peer"]


def test_ours_that_fails_ends_it_all():
    with pytest.raises(RequestFailed, match="bench startup"):
        startup.take_turns([process("raise SystemExit(4)")], field(), quiet)


def test_our_command_carries_the_options():
    words = startup.our_command("m.gguf", {"threads": 1, "enable_prefix_caching": False}).words
    assert words[1:5] == ("-m", "tiercel", "run", "--raw")
    assert words[-4:] == ("--threads", "1", "--no-enable-prefix-caching", startup.PROMPT)


@pytest.fixture
def small_model(tmp_path, monkeypatch):
    """A model's file, and a command in place of ours that answers at once."""
    monkeypatch.setattr(startup, "our_command", lambda model, options: process("print('Paris')"))
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def test_startup_writes_a_row_with_both(small_model, peers, capsys, no_checkout):
    words = ["--peer", f"fake={PYTHON}", "--peers-dir", str(peers()), "--num-iters", "2", "--json"]
    assert main.main(["bench", "startup", "-m", small_model, *words]) == 0
    row = json.loads(capsys.readouterr().out)
    assert {name: one["outputs"] for name, one in row["contestants"].items()} == {
        OURS: {"text": "Paris"},
        "fake": {"text": "Paris"},
    }
    assert row["contestants"]["fake"]["versions"] == {"fake": "1"}
    assert set(row["ratios"]["fake"]) == {"first_byte_s", "exit_s", "peak_rss_bytes"}
    assert row["config"]["work"]["parent_peak_rss_bytes"] > 0


def test_a_peer_that_is_not_there_is_skipped_before_anything_is_started(small_model, peers, capsys, no_checkout):
    words = ["--peer", "fake=no/such/python", "--peers-dir", str(peers()), "--num-iters", "1", "--json"]
    assert main.main(["bench", "startup", "-m", small_model, *words]) == 1
    row = json.loads(capsys.readouterr().out)
    assert list(row["contestants"]) == [OURS]
    assert "missing" in row["skipped"]["fake"]
