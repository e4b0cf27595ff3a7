"""SentencePiece vocabularies are encoded as SentencePiece would."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vocabularies import spm, spm_by_the_book

from tiercel.text.spm_merges import derive_merges
from tiercel.text.tokenizer import Tokenizer


def _slow_merges(tokens: list[str], scores: np.ndarray, is_joined: np.ndarray) -> list[tuple[str, str]]:
    known = {t for t, j in zip(tokens, is_joined, strict=True) if j}
    found = [
        (-float(scores[i]), i, -cut, token[:cut], token[cut:])
        for i, token in enumerate(tokens)
        if is_joined[i]
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    return [(left, right) for *_, left, right in sorted(found)]


@given(
    tokens=st.lists(st.text("abc▁é😀", min_size=1, max_size=7), min_size=1, max_size=60, unique=True),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_every_cut_into_two_tokens_is_a_merge_in_the_order_of_scores(tokens, seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(-9, 1, len(tokens)).astype(np.float32)  # with ties
    is_joined = rng.random(len(tokens)) < 0.9
    assert derive_merges(tokens, scores, is_joined) == _slow_merges(tokens, scores, is_joined)


def test_a_large_vocabulary_loses_no_merge_to_hashing():
    rng = np.random.default_rng(7)
    letters = np.array(list("abcdefgh"))
    tokens = sorted({"".join(rng.choice(letters, rng.integers(1, 8))) for _ in range(20_000)})
    scores = -rng.permutation(len(tokens)).astype(np.float32)
    is_joined = np.ones(len(tokens), bool)
    assert derive_merges(tokens, scores, is_joined) == _slow_merges(tokens, scores, is_joined)


def test_a_vocabulary_of_single_letters_has_no_merges():
    assert derive_merges(["a", "b"], np.zeros(2, np.float32), np.ones(2, bool)) == []
    assert derive_merges([], np.zeros(0, np.float32), np.ones(0, bool)) == []


@given(
    words=st.lists(st.text("ab▁c", min_size=2, max_size=5), min_size=1, max_size=25, unique=True),
    seed=st.integers(0, 1000),
    text=st.text("abc ", max_size=24),
)
@settings(max_examples=200, deadline=None)
def test_encoding_joins_as_sentencepiece_does(words, seed, text):
    words = [w for w in words if w != "▁▁▁"] or ["ab"]
    scores = -np.random.default_rng(seed).permutation(len(words)).astype(np.float32)
    metadata = spm(words, scores, add_space_prefix=False)
    tokenizer = Tokenizer.from_gguf(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    # Three spaces are a user-defined token, which is found before any joining.
    expected = [
        token
        for i, part in enumerate(text.split("   "))
        for token in ([*(["   "] if i else []), *spm_by_the_book(metadata, part)])
    ]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokens[i].replace("▁▁▁", "   ") if tokens[i] == "▁▁▁" else tokens[i] for i in ids] == expected


def test_letters_outside_the_vocabulary_become_their_bytes():
    tokenizer = Tokenizer.from_gguf(spm(add_space_prefix=False))
    ids = tokenizer.encode("😀", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
