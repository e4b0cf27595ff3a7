import pytest
from tiny_wheels import Shelf


@pytest.fixture
def make_shelf(tmp_path):
    def make(pieces=(b"first piece, ", b"second piece, ", b"third piece"), name="tiny"):
        folder = tmp_path / f"shelf-{name}"
        folder.mkdir()
        return Shelf(folder, list(pieces), name)

    return make
