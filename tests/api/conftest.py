import pytest
from kit import Rig


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
