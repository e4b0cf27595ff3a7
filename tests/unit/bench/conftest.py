import socket

import pytest
from bench_fakes import FakeEngine, write_peers

from tiercel.bench import machine, ours


@pytest.fixture
def engine(monkeypatch):
    """The engine that the benchmarks open, instead of a real one."""
    fake = FakeEngine()
    monkeypatch.setattr(ours, "open_engine", lambda model, options: fake)
    return fake


@pytest.fixture
def peers(tmp_path):
    """Makes a folder of peers' scripts."""

    def make(fault="none", **options):
        return write_peers(tmp_path / "peers", fault, **options)

    return make


@pytest.fixture
def no_checkout(monkeypatch):
    """Run as if installed, far from any checkout."""
    monkeypatch.setattr(machine, "checkout", lambda: None)


@pytest.fixture
def closed_url():
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
