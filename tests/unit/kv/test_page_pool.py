"""The page pool: examples of each rule, then random histories against a plain model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from tiercel.base.errors import ConfigError
from tiercel.kv.page_pool import PagePool


def keyed(pool: PagePool, *keys: bytes) -> list[int]:
    pages = pool.acquire(len(keys))
    assert pages is not None
    for page, key in zip(pages, keys, strict=True):
        pool.set_key(page, key)
    return pages


@pytest.mark.parametrize(("n_pages", "size"), [(-1, 16), (4, 0)])
def test_a_pool_of_fewer_pages_than_none_or_of_empty_pages_is_refused(n_pages, size):
    with pytest.raises(ConfigError, match=r"kv\.pool"):
        PagePool(n_pages, size)


def test_acquire_is_all_or_nothing():
    pool = PagePool(3, 4)
    assert pool.acquire(4) is None
    assert pool.n_free == 3
    pages = pool.acquire(3)
    assert sorted(pages) == [0, 1, 2]
    assert pool.acquire(1) is None
    assert pool.acquire(0) == []
    pool.check()


def test_release_of_a_shared_page_keeps_it():
    pool = PagePool(2, 4)
    first = keyed(pool, b"a")
    assert pool.match([b"a"]) == first
    pool.release(first)
    assert pool.n_used == 1
    pool.release(first)
    assert pool.n_used == 0
    pool.check()


def test_a_released_page_is_found_again_until_it_is_taken():
    pool = PagePool(2, 4)
    pages = keyed(pool, b"a")
    pool.release(pages)
    assert (pool.n_free, pool.n_cached) == (2, 1)
    assert pool.lookup([b"a"]) == pages
    pool.acquire(2)
    assert pool.lookup([b"a"]) == []
    assert pool.n_evicted == 1
    pool.check()


def test_the_deepest_page_of_a_chain_is_evicted_first():
    pool = PagePool(3, 4)
    pages = keyed(pool, b"a", b"b", b"c")
    pool.release(pages)
    assert pool.acquire(1) == [pages[2]]
    assert pool.match([b"a", b"b", b"c"]) == pages[:2]
    pool.check()


def test_junk_is_taken_before_anything_cached_and_newest_first():
    pool = PagePool(4, 4)
    a, b, c, d = pool.acquire(4)
    pool.set_key(a, b"a")
    pool.release([a])
    pool.release([b])
    pool.release([c])
    pool.release([d])
    assert pool.acquire(4) == [d, c, b, a]
    pool.check()


def test_a_match_takes_a_page_out_of_the_eviction_order():
    pool = PagePool(2, 4)
    old, new = keyed(pool, b"old", b"new")
    pool.release([old])
    pool.release([new])
    assert pool.match([b"old"]) == [old]
    assert pool.acquire(1) == [new]
    assert pool.acquire(1) is None
    pool.check()


def test_a_match_ends_at_the_first_unknown_key():
    pool = PagePool(3, 4)
    pages = keyed(pool, b"a", b"c")
    assert pool.lookup([b"a", b"b", b"c"]) == pages[:1]


def test_copies_are_kept_while_used_and_reduced_to_one_when_free():
    pool = PagePool(3, 4)
    (first,) = keyed(pool, b"a")
    (second,) = keyed(pool, b"a")
    pool.check()
    pool.release([first])  # the other copy is used: this one is junk
    assert pool.n_cached == 0
    assert pool.lookup([b"a"]) == [second]
    pool.release([second])
    assert pool.n_cached == 1
    pool.check()


def test_the_newest_of_two_free_copies_stays():
    pool = PagePool(3, 4)
    (first,) = keyed(pool, b"a")
    pool.release([first])
    second = pool.acquire(2)[0]
    assert second != first
    pool.set_key(second, b"a")
    pool.release([second])
    assert pool.lookup([b"a"]) == [second]
    assert pool.n_cached == 1
    pool.check()


def test_a_forgotten_key_cannot_be_matched_and_its_free_page_goes_first():
    pool = PagePool(3, 4)
    a, b = keyed(pool, b"a", b"b")
    (used,) = keyed(pool, b"a")
    pool.release([b])
    pool.release([a])
    pool.forget(b"a")
    pool.forget(b"a")
    assert pool.lookup([b"a"]) == []
    assert pool.acquire(1) == [a]
    assert pool.n_refs(used) == 1
    pool.check()


def test_reset_is_refused_while_a_page_is_used():
    pool = PagePool(2, 4)
    pages = keyed(pool, b"a")
    assert not pool.reset_cached()
    assert pool.lookup([b"a"]) == pages
    pool.release(pages)
    assert pool.reset_cached()
    assert pool.lookup([b"a"]) == []
    pool.check()


def test_a_second_release_is_our_own_broken_promise():
    pool = PagePool(1, 4)
    pages = pool.acquire(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(pages)


class PoolHistories(RuleBasedStateMachine):
    """Any history of chains: what is held stays what it was, and the counts add up."""

    chains = Bundle("chains")

    def __init__(self):
        super().__init__()
        self.pool = PagePool(7, 4)
        self.held = []  # (pages, keys or None)

    @rule(target=chains, n=st.integers(0, 4))
    def acquire(self, n):
        free = self.pool.n_free
        pages = self.pool.acquire(n)
        assert (pages is None) == (n > free)
        chain = (pages or [], [])
        self.held.append(chain)
        return chain

    @rule(target=chains, name=st.integers(0, 2), n=st.integers(1, 4))
    def match(self, name, n):
        keys = [bytes([name, i]) for i in range(n)]
        pages = self.pool.match(keys)
        assert [self.pool.key_of(p) for p in pages] == keys[: len(pages)]
        chain = (pages, keys[: len(pages)])
        self.held.append(chain)
        return chain

    @rule(chain=chains, name=st.integers(0, 2))
    def name_pages(self, chain, name):
        if not any(c is chain for c in self.held):
            return
        for i, page in enumerate(chain[0]):
            if self.pool.key_of(page) is None:
                self.pool.set_key(page, bytes([name, i]))

    @rule(chain=consumes(chains))
    def release(self, chain):
        self.held = [c for c in self.held if c is not chain]
        self.pool.release(chain[0])

    @rule(name=st.integers(0, 2), i=st.integers(0, 3))
    def forget(self, name, i):
        self.pool.forget(bytes([name, i]))
        assert self.pool.lookup([bytes([name, i])]) == []

    @precondition(lambda self: not any(pages for pages, _ in self.held))
    @rule()
    def reset(self):
        assert self.pool.reset_cached()
        assert self.pool.n_cached == 0

    @invariant()
    def counts_add_up(self):
        self.pool.check()
        refs = [sum(pages.count(p) for pages, _ in self.held) for p in range(7)]
        assert [self.pool.n_refs(p) for p in range(7)] == refs


TestPoolHistories = PoolHistories.TestCase
TestPoolHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
