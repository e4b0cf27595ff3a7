import subprocess

import pytest

from tiercel.bench import machine


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["bench", "latency"], "tiercel bench latency"),
        (["-m", "/home/someone/models/a.gguf"], "tiercel -m a.gguf"),
        (["--model=/home/someone/a.gguf"], "tiercel --model=a.gguf"),
        (["--peer", "llama_cpp=/home/someone/venv/bin/python"], "tiercel --peer llama_cpp=PYTHON"),
        (["--peer=llama_cpp=/home/someone/venv/bin/python"], "tiercel --peer=llama_cpp=PYTHON"),
        (["-m", "org/name"], "tiercel -m org/name"),
        (["--output", "benchmarks/results/x.jsonl"], "tiercel --output benchmarks/results/x.jsonl"),
    ],
)
def test_a_command_is_told_without_the_paths_of_this_machine(words, told):
    assert machine.command(words) == told


def test_a_message_is_told_without_the_paths_of_this_machine():
    assert machine.without_paths("no file /home/me/venv/bin/python here") == "no file python here"
    assert machine.without_paths("12 tok/s, and/or org/name") == "12 tok/s, and/or org/name"


def test_a_machine_is_described_without_its_name():
    import socket

    told = machine.describe()
    assert told["n_cpus_usable"] >= 1
    assert socket.gethostname() not in str(told).split()


@pytest.fixture
def checkout(tmp_path):
    def git(*words):
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
        subprocess.run(["git", *identity, "-C", tmp_path, *words], check=True, capture_output=True)

    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("a = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    return tmp_path


def test_code_that_is_not_the_commits_is_dirty(checkout, monkeypatch):
    monkeypatch.setattr(machine, "_code_digest", lambda folder: "same")
    head, is_dirty = machine.commit(checkout)
    assert (len(head), is_dirty) == (40, False)
    (checkout / "src/a.py").write_text("a = 2\n")
    assert machine.commit(checkout) == (head, True)


def test_rows_that_were_written_do_not_make_a_checkout_dirty(checkout, monkeypatch):
    monkeypatch.setattr(machine, "_code_digest", lambda folder: "same")
    (checkout / "benchmarks/results").mkdir(parents=True)
    (checkout / "benchmarks/results/x.jsonl").write_text("{}\n")
    assert machine.commit(checkout)[1] is False


def test_an_installed_package_that_differs_from_the_checkout_is_dirty(checkout):
    assert machine.commit(checkout)[1] is True


def test_outside_a_checkout_the_commit_is_not_known(tmp_path):
    assert machine.commit(None) == (None, None)
    assert machine.commit(tmp_path) == (None, None)
