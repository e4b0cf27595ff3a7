import sys
from pathlib import Path

import pytest

# What these tests attack with, from the tests of each part.
TESTS = Path(__file__).parent.parent
for part in ("api", "meta", "unit/hub", "unit/loaders", "unit/text/parsers"):
    sys.path.insert(0, str(TESTS / part))


@pytest.fixture
def put(tmp_path):
    """Write bytes under a name and return the path."""

    def write(raw, name="model.gguf"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
        return path

    return write


@pytest.fixture
def make_rig():
    """Make served engines that are closed at the end."""
    from kit import Rig

    rigs = []

    def make(**options):
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture(scope="module")
def shared():
    from kit import Rig

    rig = Rig()
    yield rig
    rig.close()


@pytest.fixture
def rig(shared):
    yield shared
    shared.assert_idle()
