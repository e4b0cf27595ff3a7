"""The page pool: which pages of KV memory are in use, by how many, and what the pages nobody uses still hold.

It counts; the bytes are the runner's. One owner: the scheduler. Not thread-safe. A page is in one of three states:

    used     at least one reference                         -> `acquire`, `match`, `pin` make it so
    cached   no reference, and a key that names its content  -> `release` of a page that has a key
    junk     no reference, no key                            -> `release` of a page without one; `reset_cached`

Cached and junk pages are threaded on one list, and `acquire` takes from its head: junk first (it goes to the head,
newest first), then cached pages, the longest unused first. A sequence's pages are released tail first, so of one
chain the deepest page is taken first and what remains can still be matched from its start.

Invariants, verified by `check`:
1. A page is on the free list exactly when it has no reference; the list's links agree in both directions.
2. Every key is in the index with exactly the pages that carry it.
3. Of the pages that carry one key at most one is free: a further copy can serve nobody, so it becomes junk.
4. n_free + n_used == n_pages, and n_cached counts the free pages that have a key.

Several used pages may carry one key: sequences that computed the same tokens at the same time each keep their own
page, so that a page table only ever grows at its end.
"""

from collections.abc import Callable, Iterable, Sequence

from tiercel.base.errors import ConfigError
from tiercel.kv.page_keys import PageKey


class PagePool:
    """Reference counts, keys and the free list of `n_pages` pages. Every operation costs O(1) a page.

    A pool of no pages is that of a model that keeps no keys and values.
    """

    def __init__(self, n_pages: int, page_size_tokens: int) -> None:
        if n_pages < 0 or page_size_tokens < 1:
            raise ConfigError(
                f"kv.pool: {n_pages} pages of {page_size_tokens} tokens; no fewer than none, of one token each, are "
                "needed; raise kv_cache_memory_bytes"
            )
        self.n_pages = n_pages
        self.page_size_tokens = page_size_tokens
        self.n_evicted = 0  # keys dropped to make room, ever
        # Told the page and the key of what is about to be evicted: the last moment at which its bytes are there.
        self.on_evict: Callable[[int, PageKey], None] | None = None
        self._n_free = n_pages
        self._n_cached = 0
        # Plain lists: indexing one is several times cheaper in CPython than indexing an array.
        self._n_refs = [0] * n_pages
        self._keys: list[PageKey | None] = [None] * n_pages
        # Entry n_pages is the list's sentinel: its next is the head, its previous the tail.
        self._next = [*range(1, n_pages + 1), 0]
        self._prev = [n_pages, *range(n_pages)]
        self._index: dict[PageKey, int | dict[int, None]] = {}  # a page, or the pages when there are several

    @property
    def n_free(self) -> int:
        """Pages that `acquire` can hand out; those that are cached among them."""
        return self._n_free

    @property
    def n_used(self) -> int:
        """Pages with a reference."""
        return self.n_pages - self._n_free

    @property
    def n_cached(self) -> int:
        """Pages without a reference whose content can still be matched."""
        return self._n_cached

    def n_refs(self, page_id: int) -> int:
        """Sequences that hold the page."""
        return self._n_refs[page_id]

    def key_of(self, page_id: int) -> PageKey | None:
        """Give the key that names the page's content, if it has one."""
        return self._keys[page_id]

    def acquire(self, n: int) -> list[int] | None:
        """Take `n` pages with one reference each, or None, and no change, when fewer are free."""
        if n > self._n_free:
            return None
        following, keys, n_refs = self._next, self._keys, self._n_refs
        sentinel = self.n_pages
        page_ids = []
        page_id = following[sentinel]
        for _ in range(n):
            page_ids.append(page_id)
            n_refs[page_id] = 1
            key = keys[page_id]
            if key is not None:
                if self.on_evict is not None:
                    self.on_evict(page_id, key)
                self._forget(page_id)
                self._n_cached -= 1
                self.n_evicted += 1
            page_id = following[page_id]
        following[sentinel] = page_id
        self._prev[page_id] = sentinel
        self._n_free -= n
        return page_ids

    def lookup(self, keys: Iterable[PageKey]) -> list[int]:
        """Find the pages of the longest run of known keys, from the first on, without holding them."""
        index = self._index
        page_ids = []
        for key in keys:
            found = index.get(key)
            if found is None:
                break
            page_ids.append(found if isinstance(found, int) else next(iter(found)))
        return page_ids

    def pin(self, page_ids: Iterable[int]) -> None:
        """Add a reference to each page. A free one leaves the free list; it is no longer up for eviction."""
        n_refs = self._n_refs
        for page_id in page_ids:
            if n_refs[page_id] == 0:
                self._unlink(page_id)
                self._n_free -= 1
                if self._keys[page_id] is not None:
                    self._n_cached -= 1
            n_refs[page_id] += 1

    def match(self, keys: Iterable[PageKey]) -> list[int]:
        """Find the pages of the longest run of known keys, and hold them."""
        page_ids = self.lookup(keys)
        self.pin(page_ids)
        return page_ids

    def release(self, page_ids: Sequence[int]) -> None:
        """Give back one reference of each page of a chain, given in the order of the sequence."""
        n_refs = self._n_refs
        for page_id in reversed(page_ids):
            n = n_refs[page_id] - 1
            assert n >= 0, f"kv.pool: page {page_id} is released more often than it was acquired"
            n_refs[page_id] = n
            if n == 0:
                self._free(page_id)

    def set_key(self, page_id: int, key: PageKey) -> None:
        """Name a used page's content, so that others can match it.

        Requires: every slot of the page holds, or will hold before any later step reads it, what the key says.
        """
        assert self._n_refs[page_id] > 0, f"kv.pool: page {page_id} is free and cannot be given a key"
        assert self._keys[page_id] is None, f"kv.pool: page {page_id} has a key already"
        self._keys[page_id] = key
        known = self._index.get(key)
        if known is None:
            self._index[key] = page_id
        elif isinstance(known, int):
            self._index[key] = {known: None, page_id: None}
        else:
            known[page_id] = None

    def forget(self, key: PageKey) -> None:
        """Make what a key names unfindable; without effect when nothing has the key. Free pages become junk."""
        found = self._index.get(key)
        if found is None:
            return
        for page_id in [found] if isinstance(found, int) else list(found):
            self._drop_key(page_id)

    def reset_cached(self) -> bool:
        """Forget every key. False, and no change, while any page is in use."""
        if self.n_used:
            return False
        self._index.clear()
        self._keys = [None] * self.n_pages
        self._n_cached = 0
        return True

    def check(self) -> None:
        """Raise AssertionError when an invariant of the module's docstring does not hold. Cost: O(n_pages)."""
        n_linked, n_cached = 0, 0
        sentinel = self.n_pages
        is_linked = [False] * self.n_pages
        page_id, before = self._next[sentinel], sentinel
        while page_id != sentinel:
            assert not is_linked[page_id], f"kv.pool: page {page_id} is on the free list twice"
            assert self._prev[page_id] == before, f"kv.pool: page {page_id}'s links disagree"
            is_linked[page_id] = True
            n_linked += 1
            n_cached += self._keys[page_id] is not None
            page_id, before = self._next[page_id], page_id
        assert self._prev[sentinel] == before, "kv.pool: the free list's tail is wrong"
        assert n_linked == self._n_free, f"kv.pool: {n_linked} pages linked, {self._n_free} counted as free"
        assert n_cached == self._n_cached, f"kv.pool: {n_cached} pages cached, {self._n_cached} counted"
        for page_id, n_refs in enumerate(self._n_refs):
            assert n_refs >= 0, f"kv.pool: page {page_id} has {n_refs} references"
            assert is_linked[page_id] == (n_refs == 0), f"kv.pool: page {page_id}, {n_refs} references, wrong list"
        self._check_index()

    def _check_index(self) -> None:
        n_indexed = 0
        for key, found in self._index.items():
            page_ids = [found] if isinstance(found, int) else list(found)
            assert page_ids, "kv.pool: a key without pages"
            n_indexed += len(page_ids)
            assert all(self._keys[p] == key for p in page_ids), f"kv.pool: pages {page_ids} do not carry their key"
            n_free = sum(self._n_refs[p] == 0 for p in page_ids)
            assert n_free <= 1, f"kv.pool: {n_free} free copies of one key: {page_ids}"
        n_keyed = sum(key is not None for key in self._keys)
        assert n_indexed == n_keyed, f"kv.pool: {n_keyed} pages carry keys, {n_indexed} are indexed"

    def _free(self, page_id: int) -> None:
        key = self._keys[page_id]
        if key is not None and isinstance(self._index[key], dict):
            self._make_sole_copy(page_id, key)
            key = self._keys[page_id]
        self._n_free += 1
        if key is None:
            self._link_first(page_id)
        else:
            self._n_cached += 1
            self._link_last(page_id)

    def _make_sole_copy(self, page_id: int, key: PageKey) -> None:
        """Keep invariant 3 for a page about to be free: it stays findable only if it is the best copy, the newest."""
        copies = self._index[key]
        assert isinstance(copies, dict)
        for other_id in copies:
            if self._n_refs[other_id] > 0:
                self._forget(page_id)  # a used copy outlives this one
                return
        for other_id in [p for p in copies if p != page_id]:
            self._drop_key(other_id)

    def _drop_key(self, page_id: int) -> None:
        self._forget(page_id)
        if self._n_refs[page_id] == 0:
            self._n_cached -= 1
            self._unlink(page_id)
            self._link_first(page_id)

    def _forget(self, page_id: int) -> None:
        key = self._keys[page_id]
        assert key is not None
        self._keys[page_id] = None
        found = self._index[key]
        if isinstance(found, int):
            del self._index[key]
            return
        del found[page_id]
        if len(found) == 1:
            self._index[key] = next(iter(found))

    def _unlink(self, page_id: int) -> None:
        before, after = self._prev[page_id], self._next[page_id]
        self._next[before] = after
        self._prev[after] = before

    def _link_first(self, page_id: int) -> None:
        self._link_between(page_id, self.n_pages, self._next[self.n_pages])

    def _link_last(self, page_id: int) -> None:
        self._link_between(page_id, self._prev[self.n_pages], self.n_pages)

    def _link_between(self, page_id: int, before: int, after: int) -> None:
        self._next[before] = page_id
        self._prev[after] = page_id
        self._prev[page_id] = before
        self._next[page_id] = after
