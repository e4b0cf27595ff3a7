"""Page keys: equal only when everything that changes a page's bytes is equal."""

import itertools
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.kv.page_keys import PageKeys, extend, root_key

ROOTS = {
    "plain": root_key("w", "f16", 16),
    "weights": root_key("w2", "f16", 16),
    "dtype": root_key("w", "bf16", 16),
    "size": root_key("w", "f16", 32),
    "version": root_key("w", "f16", 16, version=2),
    "salt": root_key("w", "f16", 16, salt="a"),
    "other salt": root_key("w", "f16", 16, salt="b"),
    "empty salt": root_key("w", "f16", 16, salt=""),
    "moved border": root_key("wf", "16", 16),
}


def test_each_part_of_a_root_changes_it():
    for one, other in itertools.combinations(ROOTS, 2):
        assert ROOTS[one] != ROOTS[other], (one, other)


def test_keys_are_the_same_in_another_process():
    code = "from tiercel.kv.page_keys import *; print(extend(root_key('w','f16',16), list(range(40)), 16)[-1].hex())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.strip() == extend(ROOTS["plain"], list(range(40)), 16)[-1].hex()


def test_only_full_pages_have_keys():
    assert len(extend(ROOTS["plain"], list(range(47)), 16)) == 2
    assert extend(ROOTS["plain"], [], 16) == []


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 7), st.lists(st.integers(0, 40), max_size=6))
def test_keys_grown_piece_by_piece_are_those_of_the_whole(tokens, size, cuts):
    grown = PageKeys(b"root", size)
    for cut in sorted(c for c in cuts if c <= len(tokens)):
        grown.extend(tokens[:cut])
    assert grown.extend(tokens) == extend(b"root", tokens, size)
    grown.check(tokens)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_keys_agree_exactly_as_far_as_the_tokens_do(one, other):
    a, b = extend(b"r", one, 2), extend(b"r", other, 2)
    n_equal = sum(
        1 for _ in itertools.takewhile(lambda i: one[:i] == other[:i], range(2, min(len(one), len(other)) + 1, 2))
    )
    assert a[:n_equal] == b[:n_equal]
    assert not set(a[n_equal:]) & set(b[n_equal:])
