"""Recurrent states go down to tiers and come up, as objects of a group of their own. Knows no request.

A state is stored when the tokens before it were seen often enough, or are dear enough, as a page is
(`kv.tiers.policy.should_store`). It is copied while it is kept, one a round; one that is gone by its turn is dropped.

A sequence asks once: for the longest prefix of which a tier has the state, and the last page is somewhere. Then a place
is reserved and the state loaded into it, and whoever could use it waits, as for one that a step will save. A place is
written to only while it is reserved, and found only afterwards. Whatever goes wrong gives the place back, and the
tokens are computed.

Invariants, verified by `check`: each load has a reserved place, and each reserved place with a load is its.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tiercel.kv.page_keys import PageKey
from tiercel.kv.snapshots import Snapshot, SnapshotStore
from tiercel.kv.tiers.identity import object_key
from tiercel.kv.tiers.interface import (
    Answer,
    Bytes,
    KeyResult,
    LoadItem,
    LoadJob,
    Outcome,
    StoreJob,
)
from tiercel.kv.tiers.placed import Rig
from tiercel.kv.tiers.policy import load_deadline_s, should_load, should_store
from tiercel.kv.tiers.promotion import Ask

STATES = 1  # the group of states in an identity
_GROUP_NAME = "state"  # of their keys
_ASK_S = 2.0
_N_ASKED = 1024  # boundaries, the longest first
_N_UNKNOWN = 16
_N_REMEMBERED = 4096
_N_QUEUED = 64
_PAUSE_S = 0.5  # after a tier did not store one: a copy of a state is too dear to be made for a refusal


class StateBytes(Protocol):
    """Who holds the places' memory: a runner, whose terms these are."""

    def read_states(self, snapshot_idxs: Sequence[int]) -> list[Bytes]:
        """Copy what was saved in places."""
        ...

    def write_states(self, snapshot_idxs: Sequence[int], n_tokens: Sequence[int], data: Sequence[Bytes]) -> None:
        """Fill places."""
        ...


@dataclass(slots=True, eq=False)
class _Load:
    """A state on its way."""

    snapshot: Snapshot
    chain: Sequence[PageKey]
    place: int
    job_id: int
    begun_s: float


class StateTiers:
    """States below the snapshot store. Owner: `kv.tiers.page_tiers.PageTiers`."""

    def __init__(self, rig: Rig, store: SnapshotStore, states: StateBytes, object_bytes: int) -> None:
        self._rig = rig
        self._store = store
        self._states = states
        self._object_bytes = object_bytes
        self._loads: dict[PageKey, _Load] = {}
        self._sights: dict[PageKey, int] = {}
        self._stored: list[dict[PageKey, None]] = [{} for _ in rig.tiers]
        self._queue: dict[PageKey, Snapshot] = {}
        self._paused_until_s = [0.0] * len(rig.tiers)
        self._jobs: dict[int, tuple[int, PageKey]] = {}  # stores: place, page key
        self.n_news = 0  # answers that came

    @property
    def n_loads(self) -> int:
        """Loads under way, each of which holds a reserved place."""
        return len(self._loads)

    def n_active(self, place: int) -> tuple[int, int]:
        """Count the loads and the stores that a tier has not answered for."""
        n_loads = sum(load.place == place for load in self._loads.values())
        return n_loads, sum(at == place for at, _ in self._jobs.values())

    @property
    def has_work(self) -> bool:
        """Whether `work` could do something now."""
        return bool(self._queue) and not self._jobs

    @property
    def is_behind(self) -> bool:
        """Whether a tier has not answered yet, or states wait for one that has not."""
        return bool(self._jobs or self._queue)

    def must_wait(self, ask: Ask, keys: Sequence[PageKey], n_known: int) -> bool:
        """Say whether a sequence should wait for a state of more than its first `n_known` pages, having asked for it.

        `keys` are those of its pages that it can use; what is there of them is not of interest here.
        """
        if ask.state_key is not None:
            return ask.state_key in self._loads
        if ask.has_sought_state:
            return False
        now_s = self._rig.clock()
        if ask.state_since_s is None:
            ask.state_since_s = now_s
        n_pages, place, is_open = self._find(ask, keys, n_known)
        has_time = now_s - ask.state_since_s < _ASK_S
        if is_open and has_time and self._rig.ask_meter.rate(now_s) > 1.0:  # as for pages: what asking finds, it costs
            return True
        ask.has_sought_state = True
        if n_pages == 0:
            return False
        key = keys[n_pages - 1]
        if key in self._loads or self._begin(keys, n_pages, n_known, place):
            ask.state_key = key
            return True
        return False

    def offer(self, snapshot: Snapshot, *, is_worthy: bool = False) -> None:
        """Take note of a kept state that was saved or found: that is a sight of it."""
        key = snapshot.key
        if key is None:
            return
        n_seen = self._sights.pop(key, 0) + 1
        self._sights[key] = n_seen if not is_worthy else 1 << 20
        while len(self._sights) > _N_REMEMBERED:
            del self._sights[next(iter(self._sights))]
        if self._wanting(key, snapshot.n_tokens):
            self._queue[key] = snapshot
            if len(self._queue) > _N_QUEUED:
                del self._queue[next(iter(self._queue))]

    def note_unstored(self, place: int, key: PageKey) -> None:
        """Note that a tier is to be given a state once more."""
        self._stored[place].pop(key, None)

    def take(self, place: int, result: KeyResult) -> None:
        """Take what a tier says of a state that it was asked to load, or given."""
        stored = self._jobs.pop(result.job_id, None)
        if stored is not None:
            self.n_news += 1
            self._take_stored(place, stored[1], result)
            return
        load = next((one for one in self._loads.values() if one.job_id == result.job_id), None)
        if load is None:
            return
        tally, data = self._rig.tallies[place], result.data
        key = load.chain[load.snapshot.n_tokens // self._rig.pool.page_size_tokens - 1]
        del self._loads[key]
        self.n_news += 1
        now_s = self._rig.clock()
        if result.outcome is not Outcome.DONE or data is None:
            self._store.give_up(load.snapshot)
            self._stored[place].pop(key, None)
            return
        n_bytes = memoryview(data).nbytes
        self._states.write_states([load.snapshot.place_idx], [load.snapshot.n_tokens], [data])
        self._store.keep(load.snapshot, load.chain)
        self._stored[place][key] = None
        self._rig.load_meters[place].add(n_bytes, now_s - load.begun_s, now_s)
        tally.n_loads_whole += 1
        tally.load_s += now_s - load.begun_s
        tally.loaded_bytes += n_bytes

    def work(self) -> None:
        """Give tiers one state to store, if they have answered for the last."""
        now_s = self._rig.clock()
        while self._queue and not self._jobs:
            key, snapshot = self._queue.popitem()  # the newest: it is most likely still kept, and worth most
            places = self._wanting(key, snapshot.n_tokens) if snapshot.key == key else []
            places = [place for place in places if self._paused_until_s[place] <= now_s]
            if not places:
                continue
            (data,) = self._states.read_states([snapshot.place_idx])
            rig = self._rig
            depth = snapshot.n_tokens // rig.pool.page_size_tokens
            item = rig.pinned.item(key, object_key(key, _GROUP_NAME), STATES, depth, data)
            for place in places:
                job_id = rig.next_job_id()
                self._jobs[job_id] = place, key
                rig.tallies[place].n_stores += 1
                deadline_s = rig.clock() + rig.tiers[place].store_deadline_s
                rig.tiers[place].tier.submit_store(StoreJob(job_id, [item], deadline_s))

    def give_up(self) -> None:
        """Give up all loads."""
        for load in self._loads.values():
            self._store.give_up(load.snapshot)
        self._loads.clear()
        self.n_news += 1

    def reset(self) -> None:
        """Forget all that was seen and stored, and what is to be stored."""
        self.give_up()
        self._queue.clear()
        self._sights.clear()
        for stored in self._stored:
            stored.clear()

    def check(self) -> None:
        """Raise AssertionError when the invariant is broken."""
        reserved = set(self._store.reserved())
        for key, load in self._loads.items():
            assert load.snapshot in reserved, "kv.tiers: a state lands in no place"
            assert load.snapshot.coming_key == key, "kv.tiers: a state lands under another key"

    def _take_stored(self, place: int, key: PageKey, result: KeyResult) -> None:
        tally = self._rig.tallies[place]
        if result.outcome is Outcome.DONE:
            self._stored[place][key] = None
            tally.stored_bytes += self._object_bytes
            while len(self._stored[place]) > _N_REMEMBERED:
                del self._stored[place][next(iter(self._stored[place]))]
        else:
            tally.n_stores_failed += 1
            self._paused_until_s[place] = self._rig.clock() + _PAUSE_S

    def _find(self, ask: Ask, keys: Sequence[PageKey], n_known: int) -> tuple[int, int, bool]:
        """Return the pages of the longest prefix whose state a tier has, that tier, and whether one may be longer."""
        n_unknown = 0
        for i in range(len(keys), max(n_known, len(keys) - _N_ASKED), -1):
            key = object_key(keys[i - 1], _GROUP_NAME)
            for place, placed in enumerate(self._rig.tiers):
                if ask.load_from is not None and place not in ask.load_from:
                    continue
                answer = placed.tier.lookup(key)
                if answer is Answer.HIT and self._has_page(ask, keys[i - 1]):
                    return i, place, n_unknown > 0
                n_unknown += answer is Answer.UNKNOWN
            if n_unknown >= _N_UNKNOWN:
                break
        return 0, -1, n_unknown > 0

    def _has_page(self, ask: Ask, key: PageKey) -> bool:
        if self._rig.pool.lookup([key]):
            return True
        places = range(len(self._rig.tiers)) if ask.load_from is None else ask.load_from
        return any(self._rig.tiers[place].tier.lookup(key) is not Answer.MISS for place in places)

    def _begin(self, keys: Sequence[PageKey], n_pages: int, n_known: int, place: int) -> bool:
        rig, size = self._rig, self._rig.pool.page_size_tokens
        n_saved = (n_pages - n_known) * size
        if not should_load(n_saved, self._object_bytes, rig.rates(place)):
            rig.tallies[place].n_recomputed += 1
            return False
        key = keys[n_pages - 1]
        snapshot = self._store.reserve(n_pages * size, n_saved, key=key, is_awaited=True)
        if snapshot is None:
            rig.tallies[place].n_loads_without_room += 1
            return False
        now_s, job_id, placed = rig.clock(), rig.next_job_id(), rig.tiers[place]
        self._loads[key] = _Load(snapshot, list(keys[:n_pages]), place, job_id, now_s)
        rig.tallies[place].n_loads += 1
        deadline_s = now_s + load_deadline_s(n_saved, rig.rates(place), placed.load_deadline_s)
        placed.tier.submit_load(LoadJob(job_id, [LoadItem(object_key(key, _GROUP_NAME), STATES)], deadline_s))
        return True

    def _wanting(self, key: PageKey, n_tokens: int) -> list[int]:
        """Return the places of the tiers that lack a state and are to have it."""
        n_seen, rig = self._sights.get(key, 0), self._rig
        return [
            place
            for place, placed in enumerate(rig.tiers)
            if key not in self._stored[place] and self._is_worth_storing(place, placed.store_sights, n_seen, n_tokens)
        ]

    def _is_worth_storing(self, place: int, n_sights: int, n_seen: int, n_tokens: int) -> bool:
        rates, worth_s = self._rig.rates(place), self._rig.tiers[place].store_worth_s
        if n_seen >= n_sights:
            return should_load(n_tokens, self._object_bytes, rates)
        return should_store(1, 0, n_tokens, self._object_bytes, rates, worth_s=worth_s)
