"""Two vocabularies side by side."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.spec.vocabulary_map import VocabularyMap

texts = st.lists(st.binary(max_size=4), max_size=30)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(texts, texts)
def test_what_is_shared_comes_back_as_itself(target, draft):
    found = VocabularyMap(target, draft)
    found.check()
    assert found.n_shared == len({one for one in target if one} & {one for one in draft if one})
    for i, text in enumerate(draft):
        assert found.to_target(i) in (-1, *[k for k, one in enumerate(target) if one == text])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(texts, texts)
def test_a_token_is_written_as_the_same_bytes_less_those_that_are_not_there(target, draft):
    found = VocabularyMap(target, [*draft, *(bytes([i]) for i in range(256))])
    whole = [*draft, *(bytes([i]) for i in range(256))]
    for i, text in enumerate(target):
        assert b"".join(whole[k] for k in found.to_draft([i])) == text


def test_longest_tokens_come_first_and_the_first_of_twins_counts():
    found = VocabularyMap([b"hello", b"a", b"a", b""], [b"he", b"hel", b"l", b"o", b"a", b"a"])
    assert found.to_draft([0]) == [1, 2, 3]
    assert found.to_draft([1, 2]) == [4, 4]
    assert found.to_draft([3, 99, -1]) == []
    assert [found.to_target(i) for i in range(6)] == [-1, -1, -1, -1, 1, -1]
    assert found.n_shared == 1


def test_bytes_that_are_not_there_are_left_out():
    assert VocabularyMap([b"xay"], [b"a"]).to_draft([0]) == [0]
