import io
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from tiercel.cli import run
from tiercel.hub.resolve import ResolvedModel


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def home(monkeypatch, tmp_path):
    """An empty store and working folder, and no setting of the outer environment."""
    monkeypatch.setenv("TIERCEL_HOME", str(tmp_path / "home"))
    for name in ("TIERCEL_TRACEBACK", "TIERCEL_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return tmp_path / "home"


@pytest.fixture
def engines(home, monkeypatch):
    """Engines opened by `run`, in order; each is a fake, and each model is taken to be there."""
    opened = []
    settings = {}

    def open_engine(model, options):
        opened.append(FakeEngine(model, **settings, **options))
        return opened[-1]

    def resolve(name, **options):
        return ResolvedModel(Path("/models") / (name or "default"), name or "default", "path")

    monkeypatch.setattr(run, "open_engine", open_engine)
    monkeypatch.setattr(run, "resolve", resolve)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    opened_list = _Opened(opened, settings)
    return opened_list


class _Opened:
    def __init__(self, opened, settings):
        self.opened = opened
        self.settings = settings

    @property
    def only(self):
        assert len(self.opened) == 1
        return self.opened[0]


@pytest.fixture
def pipe_in(monkeypatch):
    def put(text):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))

    return put


@pytest.fixture
def terminal():
    return Terminal
