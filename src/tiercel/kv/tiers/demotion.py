"""Stores: pages of the pool that are worth it are copied down to the tiers. Knows no request.

A page is worth storing to a tier when its key was seen often enough there, or its prompt is dear enough, and when to
load its chain is faster than to compute it (`kv.tiers.policy.should_store`). It is copied while it is in the pool, a
few pages a round, or at the latest when it is evicted. No page is held for that: one that is gone by its turn is
dropped, and a tier that is behind gets nothing until it has caught up.

A prompt that is seen for the first time is stored early if the tier's budget pays for all of it
(`kv.tiers.policy.next_credit_s`): when its pages are evicted, or the engine ends. Until then the pool has it, and a
second sight would store it anyway; so the tier has room for what the pool has not.

Only whole pages are copied: of a page that a step fills, not before that step was collected.

Invariants, verified by `check`: what tiers have not answered for is what is counted, and below the bound.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from tiercel.kv.tiers.interface import Bytes, KeyResult, Outcome, StoreItem, StoreJob
from tiercel.kv.tiers.placed import PAGES, Rig
from tiercel.kv.tiers.policy import should_load, should_store

_N_REMEMBERED = 65_536  # keys: a million tokens in pages of 16, 8 MiB
_WORTHY = 1 << 20  # sights of a key that is stored whatever else
_N_COPIED = 8  # pages a round: half a millisecond for a small model
_OPEN_BYTES_MAX = 32 << 20  # given to a tier and not answered for; half of what a disk tier queues
_N_QUEUED_MAX = 16_384
_PAUSE_S = 0.5  # after a tier refused


class Demotions:
    """Stores that are to be done, and under way. Owner: `kv.tiers.page_tiers.PageTiers`."""

    def __init__(self, rig: Rig) -> None:
        n_tiers, n_pages = len(rig.tiers), rig.pool.n_pages
        self._rig = rig
        self._sights: dict[bytes, int] = {}  # the longest unseen first
        self._stored: list[dict[bytes, None]] = [{} for _ in range(n_tiers)]
        self._early: list[dict[bytes, None]] = [{} for _ in range(n_tiers)]  # to be stored when they are evicted
        self.stores_early = True  # where the tier does
        self._filling: deque[tuple[int, bytes]] = deque()  # step that fills a page of this key, in order
        self._queue: dict[bytes, None] = {}  # keys whose pages are to be copied
        self._depths = [0] * n_pages  # of the pages' content
        self._filled_by = [-1] * n_pages  # the last step that wrote to it
        self._collected_id = -1
        self.n_answered = 0  # pages that tiers have answered for
        self._evicted: list[StoreItem] = []  # copied, and not given to anybody yet
        self._jobs: dict[int, tuple[int, dict[bytes, int]]] = {}  # place, key -> bytes, not answered for
        self._open_bytes = [0] * n_tiers
        self._copy_s = 0.0  # spent on what was evicted
        self._tier_cpu_s = [0.0] * n_tiers  # and how many answers there were when that was asked for:
        self._n_measured = 0
        self._paused_until_s = [0.0] * n_tiers

    @property
    def has_work(self) -> bool:
        """Whether `work` could do something now."""
        return bool(self._evicted or self._queue) and bool(self._ready_places())

    @property
    def is_behind(self) -> bool:
        """Whether a tier has not answered yet, or pages wait for one that is behind."""
        return bool(self._jobs or self._queue or self._evicted)

    def see(self, keys: Sequence[bytes], *, is_worthy: bool = False) -> None:
        """Count a sight of a chain, from its first key on; the whole of it is as dear as computing it."""
        if not keys:
            return
        is_worthy = is_worthy or self._is_dear(len(keys))
        new: list[bytes] = []
        for key in reversed(keys):  # so that a chain's head is forgotten last
            n = self._sights.pop(key, 0) + 1
            self._sights[key] = _WORTHY if is_worthy else n
            if n == 1:
                new.append(key)
        _bound(self._sights)
        if self.stores_early and not is_worthy and new:
            new.reverse()
            for place in range(len(self._rig.tiers)):
                self._plan_early(place, len(keys), new)

    def offer(self, keys: Sequence[bytes], page_ids: Sequence[int]) -> None:
        """Take note of the pages that hold a chain now, from its first key on."""
        for depth, (key, page_id) in enumerate(zip(keys, page_ids, strict=True)):
            self._depths[page_id] = depth
            if self._wanting(key):
                self._enqueue(key)

    def fill(self, page_id: int, key: bytes, depth: int, step_id: int) -> None:
        """Note that a page has a key, and that a step makes it true. For a key that no prompt had, that is a sight."""
        self.keep(page_id, depth, step_id)
        self._sights.setdefault(key, 1)
        if self._wanting(key):
            self._filling.append((step_id, key))

    def keep(self, page_id: int, depth: int, step_id: int) -> None:
        """Note what a step makes of a page, and that its sequence gives no reason to store it."""
        self._depths[page_id] = depth
        self._filled_by[page_id] = step_id

    def collected(self, step_id: int) -> None:
        """Note that a step has ended. What a failed one was to fill has no key any more."""
        self._collected_id = step_id
        while self._filling and self._filling[0][0] <= step_id:
            self._enqueue(self._filling.popleft()[1])

    def evict(self, page_id: int, key: bytes) -> None:
        """Copy a page that is about to be used for something else, if it is to be stored."""
        if self._filled_by[page_id] > self._collected_id or not self._wanting(key, is_evicted=True):
            return
        self._queue.pop(key, None)
        if len(self._evicted) * self._rig.page_bytes < _OPEN_BYTES_MAX and self._ready_places():
            begun_s = self._rig.clock()
            self._evicted.append(self._item(page_id, key))
            self._copy_s += self._rig.clock() - begun_s
        else:
            self._skip(key)
            for early in self._early:
                early.pop(key, None)

    def finish(self) -> None:
        """Queue what is to be stored when it is evicted, as the engine ends."""
        for early in self._early:
            for key in early:
                if self._rig.pool.lookup([key]):
                    self._enqueue(key)

    def work(self) -> None:
        """Copy a few pages and give them to the tiers."""
        begun_s, copy_s, self._copy_s = self._rig.clock(), self._copy_s, 0.0
        items, self._evicted = self._evicted, []
        if self._queue and self._ready_places():
            items += self._copy_some()
        copy_s += self._rig.clock() - begun_s
        for place in range(len(self._rig.tiers)) if items else ():
            begun_s = self._rig.clock()
            n_bytes = self._store(place, items)
            if n_bytes:
                self._rig.note_stored(place, n_bytes, copy_s + self._rig.clock() - begun_s)
        self._measure()

    def take(self, place: int, result: KeyResult) -> None:
        """Take what a tier says of a key that it was given."""
        job = self._jobs.get(result.job_id)
        if job is None or result.key not in job[1]:
            return
        self.n_answered += 1
        n_bytes = job[1].pop(result.key)
        self._open_bytes[place] -= n_bytes
        if not job[1]:
            del self._jobs[result.job_id]
        self._early[place].pop(result.key, None)
        tally = self._rig.tallies[place]
        if result.outcome is Outcome.DONE:
            tally.stored_bytes += n_bytes
            self._stored[place][result.key] = None
            _bound(self._stored[place])
        else:
            tally.n_stores_failed += 1
            self._stored[place].pop(result.key, None)  # it may have been loaded while it was being written
            self._paused_until_s[place] = self._rig.clock() + _PAUSE_S

    def note_stored(self, place: int, key: bytes) -> None:
        """Note that a tier has a key: it was loaded from there."""
        self._stored[place][key] = None

    def note_missed(self, place: int, key: bytes) -> None:
        """Note that a tier has not, or no longer, a key."""
        self._stored[place].pop(key, None)

    def n_active(self, place: int) -> int:
        """Count the jobs that a tier has not answered for."""
        return sum(at == place for at, _ in self._jobs.values())

    def reset(self) -> None:
        """Forget all that was seen and stored, and what is to be stored."""
        self._sights.clear()
        for known in (*self._stored, *self._early):
            known.clear()
        self._filling.clear()
        self._queue.clear()
        self._evicted.clear()

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        counted = [0] * len(self._rig.tiers)
        for place, keys in self._jobs.values():
            assert keys, "kv.tiers: a job without keys is kept"
            counted[place] += sum(keys.values())
        assert counted == self._open_bytes, f"kv.tiers: {counted} bytes are being stored, {self._open_bytes} counted"
        bound = 2 * _OPEN_BYTES_MAX + _N_COPIED * self._rig.page_bytes
        assert all(n <= bound for n in counted), "kv.tiers: a tier was given more than it may have"

    def _is_dear(self, n_pages: int) -> bool:
        """Say whether any tier takes a prompt of so many pages at first sight."""
        rig, size = self._rig, self._rig.pool.page_size_tokens
        return any(
            should_store(1, (n_pages - 1) * size, size, rig.page_bytes, rig.rates(place), worth_s=placed.store_worth_s)
            for place, placed in enumerate(rig.tiers)
        )

    def _plan_early(self, place: int, n_pages: int, new: Sequence[bytes]) -> None:
        """Have pages of a prompt stored to a tier when they are evicted, if its budget pays for all of them."""
        rig, placed = self._rig, self._rig.tiers[place]
        keys = [key for key in new if key not in self._stored[place]]
        if not keys or not placed.stores_early or placed.store_sights < 2:
            return
        if not should_load(n_pages * rig.pool.page_size_tokens, n_pages * rig.page_bytes, rig.rates(place)):
            return
        if rig.budgets[place].spend(len(keys) * rig.page_bytes / rig.store_meters[place].rate(rig.clock())):
            self._early[place].update(dict.fromkeys(keys))
            _bound(self._early[place])
            rig.tallies[place].n_stores_early += len(keys)

    def _measure(self) -> None:
        """Take note of what tiers spent since they last answered."""
        if self._n_measured == self.n_answered:
            return
        self._n_measured = self.n_answered
        for place, placed in enumerate(self._rig.tiers):
            cpu_s = placed.tier.counters().write_cpu_s
            if cpu_s > self._tier_cpu_s[place]:
                self._rig.note_stored(place, 0, cpu_s - self._tier_cpu_s[place])
                self._tier_cpu_s[place] = cpu_s

    def _wanting(self, key: bytes, *, is_evicted: bool = False) -> list[int]:
        """Return the places of the tiers that lack the key and are to have it, now or if its page `is_evicted`."""
        n_seen = self._sights.get(key, 0)
        return [
            place
            for place, placed in enumerate(self._rig.tiers)
            if (n_seen >= placed.store_sights or (is_evicted and key in self._early[place]))
            and key not in self._stored[place]
            and self._loads_faster(place)
        ]

    def _loads_faster(self, place: int) -> bool:
        """Say whether a long chain is loaded faster than it is computed: else nothing is worth storing."""
        rates, size = self._rig.rates(place), self._rig.pool.page_size_tokens
        return self._rig.page_bytes * rates.prefill_tok_s < rates.load_bytes_s * size

    def _enqueue(self, key: bytes) -> None:
        self._queue[key] = None
        if len(self._queue) > _N_QUEUED_MAX:
            oldest = next(iter(self._queue))
            del self._queue[oldest]
            self._skip(oldest)

    def _skip(self, key: bytes) -> None:
        for place in self._wanting(key, is_evicted=True):
            self._rig.tallies[place].n_stores_skipped += 1

    def _ready_places(self) -> list[int]:
        now_s = self._rig.clock()
        return [
            place
            for place in range(len(self._rig.tiers))
            if self._open_bytes[place] < _OPEN_BYTES_MAX and self._paused_until_s[place] <= now_s
        ]

    def _copy_some(self) -> list[StoreItem]:
        found: list[tuple[int, bytes]] = []
        n_most = max(
            min(_N_COPIED, _OPEN_BYTES_MAX // self._rig.page_bytes), 1
        )  # large pages are not copied to be refused
        while self._queue and len(found) < n_most:
            key = next(iter(self._queue))
            del self._queue[key]
            page_ids = self._rig.pool.lookup([key])  # it may be another page by now, or none
            if page_ids and self._filled_by[page_ids[0]] <= self._collected_id:
                found.append((page_ids[0], key))
        data = self._rig.pages.read_pages([page_id for page_id, _ in found])
        return [self._item_of(page_id, key, one) for (page_id, key), one in zip(found, data, strict=True)]

    def _item(self, page_id: int, key: bytes) -> StoreItem:
        (data,) = self._rig.pages.read_pages([page_id])
        return self._item_of(page_id, key, data)

    def _item_of(self, page_id: int, key: bytes, data: Bytes) -> StoreItem:
        n_seen = self._sights.get(key, 0)
        n_uses = n_seen - 1 if 0 < n_seen < _WORTHY else 0
        return self._rig.pinned.item(key, key, PAGES, self._depths[page_id], data, n_uses=n_uses)

    def _store(self, place: int, items: Iterable[StoreItem]) -> int:
        """Give a tier what it is to have of them; return how many bytes."""
        rig, placed = self._rig, self._rig.tiers[place]
        # What is to be stored when it is evicted is as good now, as its copy is made.
        wanted = {item.key: item for item in items if place in self._wanting(item.key, is_evicted=True)}
        if not wanted:
            return 0
        if place not in self._ready_places():
            rig.tallies[place].n_stores_skipped += len(wanted)
            return 0
        job_id = rig.next_job_id()
        sizes = {key: memoryview(item.data).nbytes for key, item in wanted.items()}
        self._jobs[job_id] = place, sizes
        self._open_bytes[place] += sum(sizes.values())
        rig.tallies[place].n_stores += len(wanted)
        placed.tier.submit_store(StoreJob(job_id, list(wanted.values()), rig.clock() + placed.store_deadline_s))
        return sum(sizes.values())


def _bound(known: dict[bytes, int] | dict[bytes, None]) -> None:
    while len(known) > _N_REMEMBERED:
        del known[next(iter(known))]
