"""The cache of compiled tokenizers."""

import pytest
from tiny_vocabularies import byte_level, spm

from tiercel.base.errors import ConfigError
from tiercel.text.compiled import cached
from tiercel.text.tokenizer import Tokenizer

DIGEST = "ab" * 32


class _Builder:
    def __init__(self, metadata):
        self.metadata = metadata
        self.n_calls = 0

    def __call__(self):
        self.n_calls += 1
        return Tokenizer.from_gguf(self.metadata)


@pytest.mark.parametrize("metadata", [byte_level("llama-bpe", chat_template="x"), spm(), byte_level("qwen2")])
def test_what_is_loaded_equals_what_was_built(tmp_path, metadata):
    build = _Builder(metadata)
    first = cached(build, tmp_path / "new", DIGEST)
    second = cached(build, tmp_path / "new", DIGEST)
    assert build.n_calls == 1
    assert second.to_json() == first.to_json()
    assert second.extras == first.extras
    assert second.special_ids == first.special_ids
    assert second.encode("the hello <|im_end|> 世界 ") == first.encode("the hello <|im_end|> 世界 ")


def test_bytes_of_tokens_that_are_not_utf8_are_loaded_too(tmp_path):
    metadata = spm()
    metadata["tokenizer.ggml.tokens"][-1] = "\udcff"
    build = _Builder(metadata)
    cached(build, tmp_path, DIGEST)
    loaded = cached(build, tmp_path, DIGEST)
    assert loaded.token_bytes(loaded.vocab_size - 1) == b"\xff"
    assert build.n_calls == 1


@pytest.mark.parametrize("where", [0, 25, 100, -1])
def test_a_damaged_file_is_built_again(tmp_path, where):
    build = _Builder(spm())
    cached(build, tmp_path, DIGEST)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    cached(build, tmp_path, DIGEST)
    assert build.n_calls == 2
    cached(build, tmp_path, DIGEST)
    assert build.n_calls == 2


@pytest.mark.parametrize("n_bytes", [0, 10, 60, 500])
def test_a_cut_file_is_built_again(tmp_path, n_bytes):
    build = _Builder(spm())
    cached(build, tmp_path, DIGEST)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:n_bytes])
    cached(build, tmp_path, DIGEST)
    assert build.n_calls == 2


def test_a_file_under_another_name_is_not_taken(tmp_path):
    build = _Builder(spm())
    cached(build, tmp_path, DIGEST)
    (path,) = tmp_path.iterdir()
    path.rename(path.with_name(f"{'cd' * 32}.tokenizer"))
    cached(build, tmp_path, "cd" * 32)
    assert build.n_calls == 2


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path):
    (tmp_path / "file").write_text("")
    build = _Builder(spm())
    assert cached(build, tmp_path / "file" / "below", DIGEST).encode("he")
    assert build.n_calls == 1


def test_nothing_but_the_cache_file_is_left_behind(tmp_path):
    cached(_Builder(spm()), tmp_path, DIGEST)
    assert [path.name for path in tmp_path.iterdir()] == [f"{DIGEST}.tokenizer"]


@pytest.mark.parametrize("digest", ["", "../x", "AB" * 32, "a" * 31, f"{'a' * 64}\n"])
def test_a_digest_that_is_not_one_is_refused(tmp_path, digest):
    with pytest.raises(ConfigError, match="digest"):
        cached(_Builder(spm()), tmp_path, digest)
