"""A cached tokenizer was taken whatever version had built it: a corrected cutting of texts never reached old caches."""

import pytest

from tiercel.testing.tiny_model import byte_tokenizer_json
from tiercel.text import compiled
from tiercel.text.tokenizer import Tokenizer

DIGEST = "ab" * 32


@pytest.fixture
def builds(tmp_path):
    """Calls give the cached tokenizer; `.n` counts how often it was built."""

    class Builds:
        n = 0

        def build(self):
            self.n += 1
            return Tokenizer.from_json(byte_tokenizer_json(), {})

        def __call__(self):
            return compiled.cached(self.build, tmp_path, DIGEST)

    return Builds()


def test_the_same_version_reads_its_file(builds):
    builds()
    assert builds().encode("abc") == [97, 98, 99]
    assert builds.n == 1


def test_another_version_builds_again(builds, monkeypatch):
    builds()
    monkeypatch.setattr(compiled, "__version__", "0.0.0")
    builds()
    assert builds.n == 2
    builds()
    assert builds.n == 2


def test_another_version_of_the_library_builds_again(builds, monkeypatch):
    import tokenizers

    builds()
    monkeypatch.setattr(tokenizers, "__version__", "0.0.0")
    builds()
    assert builds.n == 2
