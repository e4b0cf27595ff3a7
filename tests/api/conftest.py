import pytest
from kit import Rig
from live import LiveServer


@pytest.fixture
def make_rig():
    """Make served engines that are closed, and idle, at the end."""
    rigs = []

    def make(**options):
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def make_live():
    """Make live servers on real sockets, closed at the end."""
    lives = []

    def make(**options):
        rig = Rig(settings={"port": 0, "shutdown_s": 0.0} | options.pop("settings", {}), **options)
        lives.append(LiveServer(rig))
        return lives[-1]

    yield make
    for live in lives:
        live.close()
        live.rig.close()


@pytest.fixture(scope="module")
def shared():
    """One served engine for tests that leave it idle."""
    rig = Rig()
    yield rig
    rig.close()


@pytest.fixture
def rig(shared):
    yield shared
    shared.assert_idle()
