"""The tier: queues, the threads that empty them in batches, and the breaker. Knows no command of the server.

The owner's calls only move entries between queues, under one lock; methods whose name begins with an underscore need it
held, or are a thread's. Loads go before lookups, lookups before stores. What is known of a key is a belief of a bounded
number of keys, each for `_BELIEF_S`: others share the server.

The breaker: closed -> open after `n_faults` round trips in a row that failed; open -> closed once `retry_s` has passed,
but then a single fault opens it again until one succeeds. While it is open, lookups miss and jobs are REFUSED at once.
"""

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from threading import Condition, Thread
from time import perf_counter
from typing import ClassVar

from valkey.exceptions import ValkeyError

from tiercel.kv.tiers.identity import TierIdentity
from tiercel.kv.tiers.interface import (
    Answer,
    Clock,
    KeyResult,
    LoadJob,
    Outcome,
    StoreItem,
    StoreJob,
    TierCounters,
    Usage,
    Wake,
)
from tiercel_tier_valkey.options import ValkeyOptions
from tiercel_tier_valkey.server import Held, ValkeyServer

_log = logging.getLogger(__name__)

_BELIEF_S = 10.0
_N_BELIEFS = 65_536
_N_TOUCHES = 4096
_N_LOADS = 8192
_CLOSE_S = 5.0
_VALUE_BYTES_MAX = 512 << 20  # the server's proto-max-bulk-len, unless somebody set another


@dataclass(slots=True, eq=False)
class _Load:
    key: bytes
    group_idx: int
    waiters: list[tuple[int, float]]  # job, deadline


@dataclass(slots=True, eq=False)
class _Store:
    item: StoreItem  # with a copy of its data
    waiters: list[tuple[int, float]]

    @property
    def key(self) -> bytes:
        return self.item.key

    @property
    def n_bytes(self) -> int:
        return len(self.item.data)


class ValkeyTier:
    """Meets `tiercel.kv.tiers.interface.Tier`."""

    Options = ValkeyOptions
    medium: ClassVar[str] = "storage"
    locality: ClassVar[str] = "remote"

    def __init__(
        self, identity: TierIdentity, options: ValkeyOptions, capacity_bytes: int, wake: Wake, clock: Clock
    ) -> None:
        """Start the threads. A server that does not answer is a tier that misses, and is asked again later."""
        self._identity = identity
        self._options = options
        self._capacity_bytes = capacity_bytes
        self._wake = wake
        self._clock = clock
        self._server = ValkeyServer(options, identity.name(), [group.object_bytes for group in identity.groups])
        self._changed = Condition()  # guards all below
        self._beliefs: dict[bytes, tuple[int | None, float]] = {}  # key -> its group, or None: absent; until when
        self._probes: dict[bytes, None] = {}
        self._probing: set[bytes] = set()
        self._loads: deque[_Load] = deque()
        self._loading: dict[tuple[bytes, int], _Load] = {}
        self._stores: deque[_Store] = deque()
        self._storing: dict[bytes, _Store] = {}
        self._queued_bytes = 0
        self._touches: dict[bytes, tuple[int, int]] = {}  # key -> depth, group
        self._results: list[KeyResult] = []
        self._counters = TierCounters()
        self._held = Held()
        self._generation = 0  # of what was reset
        self._n_busy = 0
        self._is_closed = self._must_clear = False
        self._n_faults = 0
        self._open_until_s: float | None = None
        self._threads = [
            Thread(target=self._work, name=f"tiercel-valkey-{i}", daemon=True) for i in range(options.n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def lookup(self, key: bytes) -> Answer:
        """Answer from memory; what is not known there is asked of the server."""
        with self._changed:
            if self._is_left_alone() or self._is_closed or self._must_clear:
                return self._answered(Answer.MISS)
            if key in self._storing:
                return Answer.PENDING
            group_idx, until_s = self._beliefs.get(key, (None, 0.0))
            if until_s > self._clock():
                return self._answered(Answer.MISS if group_idx is None else Answer.HIT)
            if key not in self._probing and key not in self._probes:
                self._probes[key] = None
                self._changed.notify()
            return Answer.UNKNOWN

    def submit_load(self, job: LoadJob) -> None:
        """Queue, or join a load of the same object."""
        with self._changed:
            for item in job.items:
                waiter = (job.job_id, job.deadline_s)
                same = self._loading.get((item.key, item.group_idx))
                if self._is_closed:
                    self._report(job.job_id, item.key, Outcome.CANCELLED)
                elif job.deadline_s <= self._clock():
                    self._report(job.job_id, item.key, Outcome.LATE)
                elif same is not None:
                    same.waiters.append(waiter)
                elif self._must_clear:
                    self._report(job.job_id, item.key, Outcome.ABSENT)
                elif self._is_left_alone() or len(self._loads) >= _N_LOADS:
                    self._report(job.job_id, item.key, Outcome.REFUSED, "the server is left alone, or too busy")
                else:
                    load = _Load(item.key, item.group_idx, [waiter])
                    self._loading[item.key, item.group_idx] = load
                    self._loads.append(load)
            self._changed.notify_all()
        self._wake()

    def submit_store(self, job: StoreJob) -> None:
        """Queue what is not believed to be held."""
        with self._changed:
            for item in job.items:
                same = self._storing.get(item.key)
                n_bytes = memoryview(item.data).nbytes
                if same is not None:
                    same.waiters.append((job.job_id, job.deadline_s))
                    continue
                why = self._why_not_stored(item, n_bytes, job.deadline_s)
                if why is not None:
                    self._report(job.job_id, item.key, *why)
                    continue
                waiters = [(job.job_id, job.deadline_s)]
                store = _Store(replace(item, data=bytes(item.data)), waiters)
                self._storing[item.key] = store
                self._stores.append(store)
                self._queued_bytes += n_bytes
            self._changed.notify_all()
        self._wake()

    def poll(self) -> list[KeyResult]:
        """Return what has ended."""
        with self._changed:
            results, self._results = self._results, []
            return results

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note the uses of what is believed to be held; the server hears of them with the next batch."""
        with self._changed:
            for depth, key in enumerate(keys):
                group_idx, _ = self._beliefs.get(key, (None, 0.0))
                if group_idx is not None and (key in self._touches or len(self._touches) < _N_TOUCHES):
                    self._touches[key] = (depth, group_idx)
            self._changed.notify()

    def drain(self, timeout_s: float) -> bool:
        """Wait for the threads to have nothing to do."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def reset(self) -> None:
        """Forget; a thread removes this identity's objects before anything else is stored."""
        with self._changed:
            self._generation += 1
            self._must_clear = not self._is_closed
            self._beliefs.clear()
            self._held = Held()
            self._cancel_all("reset")
            self._changed.notify_all()
        self._wake()

    def usage(self) -> Usage:
        """Return what the namespace held when the server last told."""
        with self._changed:
            return Usage(self._held.n_objects, self._held.used_bytes, self._capacity_bytes)

    def counters(self) -> TierCounters:
        """Return a copy."""
        with self._changed:
            return replace(self._counters)

    def close(self) -> None:
        """End the threads, but leave behind one that the server does not let go."""
        with self._changed:
            self._is_closed = True
            self._generation += 1
            self._cancel_all("closed")
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._server.close()
        self._wake()

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        with self._changed:
            assert sum(store.n_bytes for store in self._stores) == self._queued_bytes, "valkey: stores are miscounted"
            before_last = self._queued_bytes - (self._stores[-1].n_bytes if self._stores else 0)
            assert before_last < self._options.queue_size, "valkey: the queue of stores is too long"
            assert len(self._loads) <= _N_LOADS, "valkey: the queue of loads is too long"
            assert all(load.waiters for load in self._loads), "valkey: a load that nobody waits for is queued"
            assert set(map(id, self._stores)) <= set(map(id, self._storing.values())), "valkey: a store is lost"

    # The threads. Each takes a batch under the lock, makes one round trip without it, and notes how that ended.

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._is_closed:
                    return
                self._n_busy += 1
                generation = self._generation
                must_clear = self._must_clear
                loads = [] if must_clear else self._next_loads()
                probes = [] if must_clear or loads else self._next_probes()
                stores = [] if must_clear or loads or probes else self._next_stores()
                touches, self._touches = self._touches, {}
            try:
                if must_clear:
                    self._clear()
                if loads:
                    self._load(loads, generation)
                if probes:
                    self._probe(probes, generation)
                if stores:
                    self._store(stores, generation)
                loads, probes, stores = [], [], []
                if touches and not must_clear:
                    self._server.touch([(depth, key, group) for key, (depth, group) in touches.items()])
            except (ValkeyError, OSError) as error:
                self._note_fault(error, loads, probes, stores, generation)
            with self._changed:
                self._n_busy -= 1
                self._changed.notify_all()
            self._wake()

    def _has_work(self) -> bool:
        if self._is_closed:
            return True
        if self._must_clear:
            return self._n_busy == 0 and not self._is_left_alone()
        return bool(self._loads or self._probes or self._stores or self._touches)

    def _clear(self) -> None:
        held = self._server.clear()
        with self._changed:
            self._must_clear = False
            self._note_success(held)

    def _probe(self, keys: list[bytes], generation: int) -> None:
        groups = self._server.find(keys)
        with self._changed:
            self._note_success()
            if generation == self._generation:
                for key, group_idx in zip(keys, groups, strict=True):
                    self._probing.discard(key)
                    self._believe(key, group_idx)

    def _load(self, loads: list[_Load], generation: int) -> None:
        start_s = perf_counter()
        found = self._server.load([(load.key, load.group_idx) for load in loads])
        with self._changed:
            self._note_success()
            if generation != self._generation:
                return
            self._counters.read_s += perf_counter() - start_s
            for load, data in zip(loads, found, strict=True):
                if data is None:
                    self._believe(load.key, None)
                    self._finish_load(load, Outcome.ABSENT)
                elif len(data) != self._identity.groups[load.group_idx].object_bytes:
                    self._believe(load.key, None)
                    self._counters.n_invalid += 1
                    self._counters.n_load_failures += 1
                    self._finish_load(load, Outcome.FAILED, f"{len(data)} bytes in the server")
                else:
                    self._believe(load.key, load.group_idx)
                    self._counters.n_loaded += 1
                    self._counters.read_bytes += len(data)
                    self._finish_load(load, Outcome.DONE, "", memoryview(data))

    def _store(self, stores: list[_Store], generation: int) -> None:
        start_s = perf_counter()
        held = self._server.store([store.item for store in stores], self._capacity_bytes)
        with self._changed:
            self._note_success(held if generation == self._generation else None)
            if generation != self._generation:
                return  # what was reset meanwhile is removed by the clearing that waits for this thread
            self._counters.write_s += perf_counter() - start_s
            for store in stores:
                self._counters.n_stored += 1
                self._counters.written_bytes += store.n_bytes
                self._believe(store.key, store.item.group_idx)
                self._finish_store(store, Outcome.DONE)

    def _next_loads(self) -> list[_Load]:
        loads: list[_Load] = []
        n_bytes, now_s = 0, self._clock()
        while self._loads and len(loads) < self._options.batch_objects and n_bytes < self._options.batch_size:
            load = self._loads.popleft()
            self._drop_late(load, now_s)
            if load.waiters:
                loads.append(load)
                n_bytes += self._identity.groups[load.group_idx].object_bytes
            else:
                self._finish_load(load, Outcome.LATE)
        return loads

    def _next_probes(self) -> list[bytes]:
        keys = list(self._probes)[: 4 * self._options.batch_objects]
        for key in keys:
            del self._probes[key]
            self._probing.add(key)
        return keys

    def _next_stores(self) -> list[_Store]:
        stores: list[_Store] = []
        n_bytes, now_s = 0, self._clock()
        while self._stores and len(stores) < self._options.batch_objects and n_bytes < self._options.batch_size:
            store = self._stores.popleft()
            self._queued_bytes -= store.n_bytes
            self._drop_late(store, now_s)
            if store.waiters:
                stores.append(store)
                n_bytes += store.n_bytes
            else:
                self._finish_store(store, Outcome.LATE)
        return stores

    # Small steps. The lock is held.

    def _why_not_stored(self, item: StoreItem, n_bytes: int, deadline_s: float) -> tuple[Outcome, str] | None:
        needed = self._identity.groups[item.group_idx].object_bytes
        if self._is_closed:
            return Outcome.CANCELLED, "closed"
        if n_bytes != needed:
            return Outcome.FAILED, f"{n_bytes} bytes; needs {needed}"
        if deadline_s <= self._clock():
            return Outcome.LATE, ""
        known_idx, until_s = self._beliefs.get(item.key, (None, 0.0))
        has_hint = item.is_pinned or item.ttl_s is not None  # which the server is to hear
        if known_idx is not None and until_s > self._clock() and not has_hint:
            return Outcome.DONE, ""
        if self._is_left_alone():
            return Outcome.REFUSED, "the server is left alone"
        if self._server.charge(item.group_idx) > self._capacity_bytes:
            return Outcome.REFUSED, "larger than the tier"
        if n_bytes > _VALUE_BYTES_MAX:
            return Outcome.REFUSED, "larger than a value of the server may be"
        if self._queued_bytes >= self._options.queue_size:
            return Outcome.REFUSED, "too many stores are queued"
        return None

    def _drop_late(self, entry: _Load | _Store, now_s: float) -> None:
        for waiter in [w for w in entry.waiters if w[1] <= now_s]:
            entry.waiters.remove(waiter)
            self._report(waiter[0], entry.key, Outcome.LATE)

    def _believe(self, key: bytes, group_idx: int | None) -> None:
        self._beliefs.pop(key, None)
        self._beliefs[key] = (group_idx, self._clock() + _BELIEF_S)
        while len(self._beliefs) > _N_BELIEFS:
            del self._beliefs[next(iter(self._beliefs))]

    def _answered(self, answer: Answer) -> Answer:
        self._counters.n_queries += 1
        self._counters.n_hits += answer is Answer.HIT
        return answer

    def _report(
        self, job_id: int, key: bytes, outcome: Outcome, reason: str = "", data: memoryview | None = None
    ) -> None:
        self._counters.n_refused += outcome is Outcome.REFUSED
        self._counters.n_late += outcome is Outcome.LATE
        self._results.append(KeyResult(job_id, key, outcome, data, reason))

    def _finish_load(self, load: _Load, outcome: Outcome, reason: str = "", data: memoryview | None = None) -> None:
        for job_id, _ in load.waiters:
            self._report(job_id, load.key, outcome, reason, data)
        load.waiters.clear()
        if self._loading.get((load.key, load.group_idx)) is load:
            del self._loading[load.key, load.group_idx]

    def _finish_store(self, store: _Store, outcome: Outcome, reason: str = "") -> None:
        for job_id, _ in store.waiters:
            self._report(job_id, store.key, outcome, reason)
        store.waiters.clear()
        if self._storing.get(store.key) is store:
            del self._storing[store.key]

    def _cancel_all(self, reason: str) -> None:
        for load in list(self._loading.values()):
            self._finish_load(load, Outcome.CANCELLED, reason)
        for store in list(self._storing.values()):
            self._finish_store(store, Outcome.CANCELLED, reason)
        for queue in (self._loads, self._stores, self._probes, self._probing, self._touches):
            queue.clear()
        self._queued_bytes = 0

    def _is_idle(self) -> bool:
        waiting = self._loads or self._stores or self._probes or self._touches or self._must_clear
        return not self._n_busy and (self._is_closed or not waiting)

    # The breaker.

    def _is_left_alone(self) -> bool:
        if self._open_until_s is not None and self._clock() >= self._open_until_s:
            self._open_until_s = None
            self._n_faults = self._options.n_faults - 1
            self._changed.notify_all()
        return self._open_until_s is not None

    def _note_success(self, held: Held | None = None) -> None:
        self._n_faults = 0
        self._open_until_s = None
        if held is not None:
            self._held = held
            self._counters.n_evicted += held.n_evicted

    def _note_fault(
        self, error: Exception, loads: list[_Load], probes: list[bytes], stores: list[_Store], generation: int
    ) -> None:
        reason = f"{type(error).__name__}: {error}"
        with self._changed:
            if generation == self._generation:
                self._probing.difference_update(probes)
                for key in probes:
                    self._believe(key, None)
                for load in loads:
                    self._believe(load.key, None)
                    self._counters.n_load_failures += 1
                    self._finish_load(load, Outcome.FAILED, reason)
                for store in stores:
                    self._counters.n_store_failures += 1
                    self._finish_store(store, Outcome.FAILED, reason)
            self._n_faults += 1
            if self._n_faults < self._options.n_faults or self._open_until_s is not None:
                return
            self._open_until_s = self._clock() + self._options.retry_s
            self._counters.n_degraded += 1
            self._refuse_queued()
        _log.warning("KV tier in Valkey: %s; left alone for %.0f s", reason, self._options.retry_s)

    def _refuse_queued(self) -> None:
        for load in list(self._loads):
            self._finish_load(load, Outcome.REFUSED, "the server is left alone")
        for store in list(self._stores):
            self._finish_store(store, Outcome.REFUSED, "the server is left alone")
        self._loads.clear()
        self._stores.clear()
        self._probes.clear()
        self._queued_bytes = 0
