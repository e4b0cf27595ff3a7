"""Public reports about the tokens of GGUF files elsewhere, each tried here; `docs/reports.md` lists the rows."""

import pytest
from tiny_vocabularies import byte_level, spm

from tiercel.base.errors import ModelFileError
from tiercel.text.tokenizer import Tokenizer


@pytest.mark.parametrize("make", [byte_level, spm])
def test_l7898_a_file_without_a_first_token_has_none(make):
    tokenizer = Tokenizer.from_gguf(make(bos_token_id=None))
    assert tokenizer.bos_id is None
    assert tokenizer.add_bos is False
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)


def test_l3966_a_first_token_that_is_wanted_and_not_there_is_refused():
    with pytest.raises(ModelFileError, match=r"add_bos_token.*bos_token_id is needed"):
        Tokenizer.from_gguf(byte_level(bos_token_id=None, add_bos_token=True))


@pytest.mark.parametrize("make", [byte_level, spm])
@pytest.mark.parametrize("adds", [False, True])
def test_l6947_whether_a_first_token_is_added_is_the_files_word(make, adds):
    tokenizer = Tokenizer.from_gguf(make(add_bos_token=adds))
    assert (tokenizer.encode("a")[0] == tokenizer.bos_id) is adds


@pytest.mark.parametrize("kind", [3, 4])
def test_s3427_a_mark_of_the_vocabulary_is_one_token(kind):
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<｜User｜>", "<｜Assistant｜>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], kind, kind]
    tokenizer = Tokenizer.from_gguf(metadata)
    user, assistant = (tokenizer.id_of(text) for text in ("<｜User｜>", "<｜Assistant｜>"))
    ids = tokenizer.encode("<｜User｜>hi<｜Assistant｜>", add_special_tokens=False)
    assert ids == [user, ord("h"), ord("i"), assistant]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<｜User｜>hi<｜Assistant｜>"
