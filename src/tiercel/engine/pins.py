"""Pages that requests asked to keep in the pool for a while (`cache_hint`). Knows no sequence. Owner: the scheduler.

A pin is a hint: it holds a reference on pages of an ended sequence until its time is over, and gives it up at once when
a running or a waiting sequence needs the room, the oldest first. So pins never make a request wait or fail.

Invariant, verified by `check`: a pinned page has a key.
"""

from collections.abc import Sequence

from tiercel.kv.page_pool import PagePool

DEFAULT_TTL_S = 300.0


class Pins:
    """Pinned chains of one pool, in the order in which they came."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pins: dict[int, tuple[float, list[int]]] = {}  # until when, pages
        self._n_ever = 0
        self.n_given_up = 0

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def n_pages(self) -> int:
        """Pages that pins hold; one that several hold counts as often."""
        return sum(len(page_ids) for _, page_ids in self._pins.values())

    def hold(self, page_ids: Sequence[int], until_s: float) -> None:
        """Keep the leading ones of a chain's pages that have keys. Requires: they are in use."""
        n_keyed = next((i for i, page_id in enumerate(page_ids) if self._pool.key_of(page_id) is None), len(page_ids))
        if n_keyed == 0:
            return
        self._pool.pin(page_ids[:n_keyed])
        self._pins[self._n_ever] = until_s, list(page_ids[:n_keyed])
        self._n_ever += 1

    def expire(self, now_s: float) -> None:
        """Let go of what was to be kept until now."""
        for i in [i for i, (until_s, _) in self._pins.items() if until_s <= now_s]:
            self._pool.release(self._pins.pop(i)[1])

    def surrender(self) -> bool:
        """Give up the oldest pin; False: there is none."""
        if not self._pins:
            return False
        self._pool.release(self._pins.pop(next(iter(self._pins)))[1])
        self.n_given_up += 1
        return True

    def clear(self) -> None:
        """Give up all."""
        while self.surrender():
            pass

    def held_pages(self) -> list[int]:
        """Return the pages that pins hold, one entry a reference."""
        return [page_id for _, page_ids in self._pins.values() for page_id in page_ids]

    def check(self) -> None:
        """Raise AssertionError when the invariant is broken."""
        for page_id in self.held_pages():
            assert self._pool.key_of(page_id) is not None, f"engine.pins: page {page_id} is pinned and unknown"
