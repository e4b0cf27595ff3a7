"""A stream of pieces equals the whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vocabularies import byte_level, spm

from tiercel.text.detokenizer import Detokenizer
from tiercel.text.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer.from_gguf(byte_level())
SPM = Tokenizer.from_gguf(spm())
SPM_BARE = Tokenizer.from_gguf(spm(add_space_prefix=False))
TOKENIZERS = {"byte_level": BYTE_LEVEL, "spm": SPM, "spm_bare": SPM_BARE}


def _ids(tokenizer):
    n = tokenizer.vocab_size
    # Texts give whole characters cut into bytes; the rest is any id, with a few that do not exist.
    spelled = st.sampled_from("é你好😀👩‍👧 he世界a\n").map(lambda c: tokenizer.encode(c, add_special_tokens=False))
    parts = st.lists(st.integers(-2, n + 3).map(lambda i: [i]) | spelled, max_size=24)
    return parts.map(lambda several: [i for part in several for i in part])


def _stream(tokenizer, prompt, ids, cuts, *, skip):
    stream = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    pieces, start = [], 0
    for end in [*sorted({min(c, len(ids)) for c in cuts}), len(ids)]:
        pieces.append(stream.push(ids[start:end]))
        start = end
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text
    return pieces


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans(), cuts=st.lists(st.integers(0, 60), max_size=40))
@settings(max_examples=200, deadline=None)
def test_pieces_of_any_cut_join_to_the_decoded_whole(name, data, skip, cuts):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(_ids(tokenizer))
    pieces = _stream(tokenizer, [], ids, cuts, skip=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_prompt_and_output_decode_to_what_the_stream_continues(name, data, skip):
    tokenizer = TOKENIZERS[name]
    prompt, ids = data.draw(_ids(tokenizer)), data.draw(_ids(tokenizer))
    before = Detokenizer(tokenizer, [], skip_special_tokens=skip).push(prompt)
    output = "".join(_stream(tokenizer, prompt, ids, range(len(ids)), skip=skip))
    assert before + output == tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_no_piece_holds_a_part_of_a_character(name, data):
    tokenizer = TOKENIZERS[name]
    text = data.draw(st.text("aé你😀 \n", max_size=20))
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = _stream(tokenizer, [], ids, range(len(ids)), skip=True)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


def test_bytes_that_cannot_become_a_character_are_not_held_back():
    stream = Detokenizer(BYTE_LEVEL, [])
    assert stream.push([0xF0, 0x9F]) == ""
    assert stream.push([ord("a")]) == "\ufffda"
    assert stream.push([0xFF]) == "\ufffd"
    assert stream.push([0xE4, 0xBD]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_at_most_three_bytes_are_held_back():
    stream = Detokenizer(BYTE_LEVEL, [])
    given_so_far = 0
    for n in range(1, 200):
        given_so_far += len(stream.push([0x9F]))
        assert n - given_so_far <= 3


def test_a_character_begun_by_the_prompt_is_finished():
    assert Detokenizer(BYTE_LEVEL, [ord("a"), 0xF0, 0x9F]).push([0x98, 0x80, ord("!")]) == "😀!"


def test_a_leading_space_is_kept_after_text_and_dropped_at_the_beginning():
    word = SPM.id_of("▁hello")
    assert Detokenizer(SPM, [SPM.bos_id]).push([word, word]) == "hello hello"
    assert Detokenizer(SPM, SPM.encode("he")).push([word]) == " hello"
    assert Detokenizer(SPM_BARE, []).push([word]) == " hello"


def test_special_tokens_are_skipped_only_when_asked():
    ids = [BYTE_LEVEL.id_of("<|im_end|>"), ord("a"), BYTE_LEVEL.id_of("<think>")]
    assert Detokenizer(BYTE_LEVEL, []).push(ids) == "a<think>"
    assert Detokenizer(BYTE_LEVEL, [], skip_special_tokens=False).push(ids) == "<|im_end|>a<think>"


def test_pushing_after_the_end_is_a_mistake_of_ours():
    stream = Detokenizer(BYTE_LEVEL, [])
    stream.finish()
    with pytest.raises(AssertionError, match="push after finish"):
        stream.push([1])


def _window(decoder, words):
    """A tokenizer whose decoder is not byte for byte."""
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Backend

    from tiercel.text.backend import Traits

    backend = Backend(models.WordLevel(dict(zip(words, range(len(words)), strict=True)), unk_token=words[0]))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", normalized=False, special=True)])
    return Tokenizer(backend, Traits())


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=100, deadline=None)
def test_other_decoders_stream_as_they_decode(data, skip):
    from tokenizers import decoders

    for decoder, words in (
        (decoders.Metaspace(), ["?", "▁he", "llo", "▁a", "b", "é"]),
        (decoders.WordPiece(cleanup=False), ["?", "he", "##llo", "a", "##b", "é"]),
    ):
        tokenizer = _window(decoder, words)
        assert tokenizer.byte_decoding is None
        ids = data.draw(st.lists(st.integers(0, len(words) + 2), max_size=30))
        prompt = data.draw(st.lists(st.integers(0, len(words) - 1), max_size=12))
        pieces = _stream(tokenizer, [], ids, range(len(ids)), skip=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
        stream = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
        assert tokenizer.decode(prompt) + stream.push(ids) + stream.finish() == tokenizer.decode(
            [*prompt, *ids], skip_special_tokens=skip
        )


def test_a_long_stream_costs_the_same_for_every_token():
    """Counts decoded bytes, not time: the whole must not be decoded again."""
    stream = Detokenizer(BYTE_LEVEL, [])
    seen = []
    real = stream._stream._decoder

    class Counting:
        def decode(self, data, final=False):
            seen.append(len(data))
            return real.decode(data, final)

    stream._stream._decoder = Counting()
    for i in range(500):
        stream.push([i % 128])
    assert max(seen) == 1
