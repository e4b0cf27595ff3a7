import os

import pytest
from bench_fakes import PYTHON, continue_ids

from tiercel.base.errors import ConfigError
from tiercel.bench.contest import Request
from tiercel.bench.peers import Peer, PeerFailed, about, environment, peer_command, read_peer

REQUESTS = [Request((1, 2, 3), 4), Request((9,), 2)]


@pytest.fixture
def open_peer(peers):
    opened = []

    def open_(fault="none", *, deadline_s=20.0, **options):
        command = peer_command("fake", PYTHON, peers(fault, **options))
        opened.append(Peer("fake", command, n_threads=2, deadline_s=deadline_s))
        return opened[-1]

    yield open_
    for peer in opened:
        peer.close()
        peer.close()


def load(peer, model="m.gguf"):
    peer.load(model, max_len_tokens=8, max_num_seqs=2)
    return peer


def test_a_peer_loads_and_answers(open_peer):
    peer = load(open_peer())
    run = peer.generate(REQUESTS)
    assert run.token_ids == (continue_ids([1, 2, 3], 4), continue_ids([9], 2))
    assert (run.elapsed_s, run.first_token_s) == (1.0, (0.25, 0.25))
    assert peer.versions == {"fake": "1"}
    assert peer.config["asked"]["n_threads"] == 2


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("dies", "died", "exit code 3; it said: out of luck"),
        ("is killed", "died", "signal 9"),
        ("writes garbage", "garbage", "not JSON"),
        ("answers a list", "garbage", "not an object"),
        ("refuses", "refused", "no memory"),
        ("gives ids that are text", "garbage", "token_ids"),
        ("tells no time", "garbage", "elapsed_s"),
        ("tells NaN", "garbage", "elapsed_s"),
    ],
)
def test_every_way_to_fail_has_its_kind(open_peer, fault, kind, said):
    peer = load(open_peer(fault))
    with pytest.raises(PeerFailed, match=said) as failure:
        peer.generate(REQUESTS)
    assert (failure.value.kind, failure.value.peer) == (kind, "fake")


def test_a_peer_that_hangs_is_stalled_after_its_deadline(open_peer):
    peer = load(open_peer("hangs", deadline_s=5.0))
    peer._deadline_s = 0.05
    with pytest.raises(PeerFailed) as failure:
        peer.generate(REQUESTS)
    assert failure.value.kind == "stalled"
    pid = peer._process.pid
    peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_interpreter_that_is_not_there_is_missing(peers):
    with pytest.raises(PeerFailed) as failure:
        Peer("fake", peer_command("fake", PYTHON.with_name("no-python"), peers()), n_threads=1)
    assert failure.value.kind == "missing"
    with pytest.raises(PeerFailed) as failure:
        about("fake", peer_command("fake", PYTHON.with_name("no-python"), peers()))
    assert failure.value.kind == "missing"


def test_a_peer_tells_its_versions_without_loading(peers):
    assert about("fake", peer_command("fake", PYTHON, peers())) == {"fake": "1"}


def test_an_unknown_peer_names_the_known(peers):
    with pytest.raises(ConfigError, match="known are fake"):
        peer_command("other", PYTHON, peers())


@pytest.mark.parametrize("text", ["", "llama_cpp", "llama_cpp=", "=python", "a/b=python"])
def test_a_peer_is_named_with_its_interpreter(text):
    with pytest.raises(ConfigError, match="NAME=PYTHON"):
        read_peer(text)


def test_a_peer_does_not_import_our_packages(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "src")
    told = environment(3)
    assert "PYTHONPATH" not in told
    assert told["OMP_NUM_THREADS"] == "3"
