"""The search for stop strings."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.text.stop_strings import StopStrings

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=5)


def _by_definition(stops, text, *, include):
    """The match that ends first; of those that end together, the one listed first."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def _feed(stops, chunks, *, include):
    search = StopStrings(stops, include_in_output=include)
    out, matched = "", None
    for chunk in chunks:
        piece, matched = search.feed(chunk)
        out += piece
        if matched is not None:
            break
    return out + search.finish(), matched


@given(stops=STOPS, text=st.text("ab\nc", max_size=40), include=st.booleans(), cuts=st.lists(st.integers(0, 40)))
@settings(max_examples=500, deadline=None)
def test_any_cut_of_the_text_finds_what_the_definition_says(stops, text, include, cuts):
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    chunks = [text[a:b] for a, b in pairwise(edges)]
    assert _feed(stops, chunks, include=include) == _by_definition(stops, text, include=include)
    assert _feed(stops, [text], include=include) == _by_definition(stops, text, include=include)


@given(stops=STOPS, text=st.text("ab\nc", max_size=40))
@settings(max_examples=300, deadline=None)
def test_only_the_beginning_of_a_stop_string_is_held_back(stops, text):
    search = StopStrings(stops, include_in_output=False)
    fed = out = ""
    for letter in text:
        piece, matched = search.feed(letter)
        if matched is not None:
            return
        fed, out = fed + letter, out + piece
        held = fed[len(out) :]
        longest = max(
            (n for s in stops for n in range(len(s)) if fed.endswith(s[:n]) and n),
            default=0,
        )
        assert len(held) == longest


def test_nothing_is_held_back_when_the_stop_string_is_output_anyway():
    search = StopStrings(["END"], include_in_output=True)
    assert search.feed("the E") == ("the E", None)
    assert search.feed("ND more") == ("ND", "END")


def test_the_match_that_ends_first_wins_though_another_began_before_it():
    assert _feed(["abcde", "cd"], ["abcdef"], include=False) == ("ab", "cd")


def test_of_matches_that_end_together_the_first_listed_wins():
    assert _feed(["bc", "abc"], ["xabc"], include=False) == ("xa", "bc")
    assert _feed(["abc", "bc"], ["xabc"], include=False) == ("x", "abc")


def test_text_after_a_match_is_dropped():
    search = StopStrings(["."], include_in_output=False)
    assert search.feed("a.b") == ("a", ".")
    assert search.feed("c") == ("", ".")
    assert search.matched == "."
    assert search.finish() == ""


def test_what_is_held_back_is_given_at_the_end():
    search = StopStrings(["abc"], include_in_output=False)
    assert search.feed("xab") == ("x", None)
    assert search.finish() == "ab"
    assert search.finish() == ""


def test_without_stop_strings_everything_passes():
    assert StopStrings([], include_in_output=False).feed("anything") == ("anything", None)


def test_an_empty_stop_string_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="empty stop string"):
        StopStrings([""], include_in_output=False)
