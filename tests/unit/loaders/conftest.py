import pytest


@pytest.fixture
def put(tmp_path):
    """Write bytes under a name and return the path."""

    def write(raw, name="model.gguf"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
        return path

    return write
