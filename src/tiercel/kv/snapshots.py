"""The snapshot store: of which prefixes a recurrent state is kept, in which places, and which one gives way to another.

It counts; the bytes are the runner's. It knows neither pages nor requests. One owner: the scheduler. Not thread-safe. A
snapshot is the state of a sequence after the tokens that a page key stands for, so it is found by that key. Its place
is in one of three states:

    free       `give_up`, `drop`, `forget`, `reset`, or eviction by `reserve`, makes it so
    reserved   a step that will save into it is planned or under way     -> `reserve`
    kept       it can be found                                           -> `keep`

Kept snapshots form a tree: a snapshot's parent is that of the longest kept prefix of its own, or the root, which stands
for the empty prefix and has no place. What a snapshot saves is what lies between its parent and it, as that is what
would be computed again without it; `worth` weighs this against its bytes, and what is worth least gives way.

Invariants, verified by `check`:
1. Each place is free, or of exactly one snapshot; n_free + n_reserved + n_kept == n_places, but for those that were
   forgotten while somebody still reads them.
2. The index has exactly the kept snapshots, each under its own key.
3. A snapshot's parent is the longest kept prefix of its own, and has it among its children.
4. A pinned snapshot is kept, or forgotten and its place not free.
"""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct, field

from tiercel.base.errors import ConfigError
from tiercel.kv.page_keys import PageKey

# Of a snapshot whose one continuation is kept too: only what leaves the sequence right there asks for it again.
_PASSED_FRAC = 1 / 16


def worth(n_tokens_saved: int, n_bytes: int, *, n_uses: int = 0, age: int = 0, is_passed: bool = False) -> float:
    """Return what a byte of a kept state is worth: tokens that it saves computing, times the chance that it will.

    `n_uses` is how often it was found, `age` how much has been kept or found since, `is_passed` that one state kept
    further on is all that continues it. Grows with tokens and uses, falls with bytes and age, and is never negative.
    """
    chance = (1 + n_uses) / (1 + age)
    return n_tokens_saved * chance * (_PASSED_FRAC if is_passed else 1.0) / n_bytes


class Snapshot(Struct, eq=False):
    """A place and what it holds. Owner: the store that made it; others read, and hand it back."""

    place_idx: int
    n_tokens: int
    coming_key: PageKey | None = None  # of a reserved one, where it is known
    key: PageKey | None = None  # of a kept one
    chain: Sequence[PageKey] = ()  # the keys of its pages and perhaps of later ones
    parent: "Snapshot | None" = None
    children: "dict[Snapshot, None]" = field(default_factory=dict)
    n_uses: int = 0
    n_pins: int = 0
    n_holds: int = 0
    used_at: int = 0


class SnapshotStore:
    """Who has which of `n_places` places. Each holds one state of `state_bytes`."""

    def __init__(self, n_places: int, state_bytes: int, page_size_tokens: int) -> None:
        if n_places < 1 or state_bytes < 1:
            raise ConfigError(
                f"kv.snapshots: {n_places} places of {state_bytes} bytes; at least one of each is needed; "
                "raise kv_cache_memory_bytes or switch prefix caching off"
            )
        self.n_places = n_places
        self.n_saved = 0  # kept, ever
        self.n_hits = 0  # found and used, ever
        self.n_evicted = 0  # given up for another, ever
        self._state_bytes = state_bytes
        self._page_size = page_size_tokens
        self._free = list(range(n_places - 1, -1, -1))
        self._kept: dict[PageKey, Snapshot] = {}
        self._reserved: dict[Snapshot, None] = {}
        self._forgotten: dict[Snapshot, None] = {}  # pinned ones that nobody may find any more
        self._root = Snapshot(-1, 0)
        self._clock = 0

    @property
    def n_free(self) -> int:
        """Places that hold nothing."""
        return len(self._free)

    @property
    def n_reserved(self) -> int:
        """Places that a step under way saves into."""
        return len(self._reserved)

    @property
    def n_kept(self) -> int:
        """Snapshots that can be found."""
        return len(self._kept)

    @property
    def n_pinned(self) -> int:
        """Snapshots that a load still needs."""
        return sum(s.n_pins > 0 for s in self._snapshots())

    def find(self, key: PageKey) -> Snapshot | None:
        """Give the state after the tokens that `key` stands for, if it is kept. Counts nothing."""
        return self._kept.get(key)

    def is_known(self, key: PageKey) -> bool:
        """Whether it is kept, or a step under way will save it."""
        return key in self._kept or any(s.coming_key == key for s in self._reserved)

    def reserved(self) -> Iterable[Snapshot]:
        """Give those that steps under way will save."""
        return self._reserved.keys()

    def can_reserve(self, n_tokens_saved: int, *, n_uses: int = 0) -> bool:
        """Whether `reserve` would find a place."""
        return bool(self._free) or self._victim(n_tokens_saved, n_uses) is not None

    def reserve(
        self,
        n_tokens: int,
        n_tokens_saved: int,
        *,
        key: PageKey | None = None,
        n_uses: int = 0,
        is_awaited: bool = False,
    ) -> Snapshot | None:
        """Take a place for the state after `n_tokens`, if need be from the snapshot that is worth least.

        `n_tokens_saved` is what it is expected to save, and `key` its key where all tokens are known. None when all
        that could give way is worth more; with `is_awaited` nothing is, as somebody will use it at once.
        """
        if not self._free:
            victim = self._victim(n_tokens_saved, 1 << 40 if is_awaited else n_uses)
            if victim is None:
                return None
            self.drop(victim)
            self.n_evicted += 1
        snapshot = Snapshot(self._free.pop(), n_tokens, coming_key=key, n_uses=n_uses)
        self._reserved[snapshot] = None
        return snapshot

    def keep(self, snapshot: Snapshot, chain: Sequence[PageKey]) -> Snapshot:
        """Make a reserved one findable: its state is that after the pages that `chain` begins with.

        Requires: `chain` only ever grows at its end; the step that saves it came to a good end.
        Returns: the snapshot that is kept: the older one where its key is known already, and its place is free again.
        """
        self._unreserve(snapshot)
        assert snapshot.n_tokens % self._page_size == 0, "kv.snapshots: a state between two page boundaries"
        n_pages = snapshot.n_tokens // self._page_size
        key = chain[n_pages - 1]
        self._clock += 1
        known = self._kept.get(key)
        if known is not None:
            known.used_at = self._clock
            self._free.append(snapshot.place_idx)
            return known
        parent = self._longest_kept(chain, n_pages - 1)
        snapshot.key, snapshot.chain, snapshot.parent, snapshot.used_at = key, chain, parent, self._clock
        later = [s for s in parent.children if s.n_tokens > snapshot.n_tokens and s.chain[n_pages - 1] == key]
        for child in later:
            del parent.children[child]
            snapshot.children[child] = None
            child.parent = snapshot
        parent.children[snapshot] = None
        self._kept[key] = snapshot
        self.n_saved += 1
        return snapshot

    def give_up(self, snapshot: Snapshot) -> None:
        """Free a reserved place: its step failed, or computed what nobody believes."""
        self._unreserve(snapshot)
        self._free.append(snapshot.place_idx)

    def pin(self, snapshot: Snapshot) -> None:
        """Note that a kept one is used, and keep its place as it is until `unpin`."""
        assert snapshot.key is not None, "kv.snapshots: only what is kept can be used"
        self._clock += 1
        snapshot.used_at = self._clock
        snapshot.n_uses += 1
        snapshot.n_pins += 1
        self.n_hits += 1

    def unpin(self, snapshot: Snapshot) -> None:
        """Note that the load which `pin` was for has been done."""
        assert snapshot.n_pins > 0, "kv.snapshots: unpinned more often than pinned"
        snapshot.n_pins -= 1
        if snapshot.n_pins == 0 and snapshot in self._forgotten:
            del self._forgotten[snapshot]
            self._free.append(snapshot.place_idx)

    def hold(self, snapshot: Snapshot) -> bool:
        """Keep one from giving way until `let_go`; False where half of the places are held already."""
        if 2 * sum(s.n_holds > 0 for s in self._kept.values()) >= self.n_places and not snapshot.n_holds:
            return False
        snapshot.n_holds += 1
        return True

    def let_go(self, snapshot: Snapshot) -> None:
        """Take back a `hold`. What was forgotten meanwhile is gone all the same."""
        assert snapshot.n_holds > 0, "kv.snapshots: let go of more often than held"
        snapshot.n_holds -= 1

    def drop(self, snapshot: Snapshot) -> None:
        """Stop keeping one that nobody has pinned."""
        assert snapshot.n_pins == 0, "kv.snapshots: somebody reads it"
        self._unlink(snapshot)
        self._free.append(snapshot.place_idx)

    def forget(self, key: PageKey) -> None:
        """Make the state of `key` unfindable; without effect when none is kept."""
        snapshot = self._kept.get(key)
        if snapshot is None:
            return
        if snapshot.n_pins:
            self._unlink(snapshot)
            self._forgotten[snapshot] = None
        else:
            self.drop(snapshot)

    def reset(self) -> None:
        """Forget all that is kept."""
        for key in list(self._kept):
            self.forget(key)

    def is_superseded(self, snapshot: Snapshot) -> bool:
        """Whether it is kept, was never found, nobody wants it, and it leads to one other kept state at most."""
        is_wanted = snapshot.n_uses or snapshot.n_pins or snapshot.n_holds
        return snapshot.key is not None and not is_wanted and len(snapshot.children) <= 1

    def check(self) -> None:
        """Raise AssertionError when an invariant of the module's docstring does not hold."""
        places = [*self._free, *(s.place_idx for s in self._snapshots())]
        assert sorted(places) == list(range(self.n_places)), f"kv.snapshots: places lost or shared: {sorted(places)}"
        assert all(s.key is None and not s.n_pins for s in self._reserved), "kv.snapshots: reserved, and kept or pinned"
        assert all(s.key is None and s.n_pins for s in self._forgotten), "kv.snapshots: forgotten and not pinned"
        n_children = len(self._root.children)
        for key, snapshot in self._kept.items():
            n_pages = snapshot.n_tokens // self._page_size
            assert snapshot.key == key == snapshot.chain[n_pages - 1], "kv.snapshots: a key of another content"
            assert snapshot.n_pins >= 0, "kv.snapshots: pinned less than never"
            parent = self._longest_kept(snapshot.chain, n_pages - 1)
            assert snapshot.parent is parent, f"kv.snapshots: {snapshot.n_tokens} tokens, and a wrong parent"
            assert snapshot in parent.children, "kv.snapshots: a parent does not know its child"
            n_children += len(snapshot.children)
        assert n_children == len(self._kept), f"kv.snapshots: {len(self._kept)} kept, {n_children} are children"

    def _snapshots(self) -> Iterator[Snapshot]:
        yield from self._kept.values()
        yield from self._reserved
        yield from self._forgotten

    def _longest_kept(self, chain: Sequence[PageKey], n_pages: int) -> Snapshot:
        for i in range(n_pages - 1, -1, -1):
            found = self._kept.get(chain[i])
            if found is not None:
                return found
        return self._root

    def _worth(self, snapshot: Snapshot) -> float:
        assert snapshot.parent is not None, "kv.snapshots: the root is not for sale"
        return worth(
            snapshot.n_tokens - snapshot.parent.n_tokens,
            self._state_bytes,
            n_uses=snapshot.n_uses,
            age=self._clock - snapshot.used_at,
            is_passed=len(snapshot.children) == 1,
        )

    def _victim(self, n_tokens_saved: int, n_uses: int) -> Snapshot | None:
        """Choose what gives way to a new snapshot: what is worth least, if that is not more than the new one."""
        least = min((s for s in self._kept.values() if not s.n_pins and not s.n_holds), key=self._worth, default=None)
        if least is None or self._worth(least) > worth(n_tokens_saved, self._state_bytes, n_uses=n_uses):
            return None
        return least

    def _unreserve(self, snapshot: Snapshot) -> None:
        del self._reserved[snapshot]
        snapshot.coming_key = None

    def _unlink(self, snapshot: Snapshot) -> None:
        key, parent = snapshot.key, snapshot.parent
        assert key is not None, "kv.snapshots: it is not kept"
        assert parent is not None, "kv.snapshots: it is not kept"
        del self._kept[key]
        del parent.children[snapshot]
        for child in snapshot.children:
            child.parent = parent
            parent.children[child] = None
        snapshot.key, snapshot.parent, snapshot.children = None, None, {}
