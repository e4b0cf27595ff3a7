"""What a disk tier knows and decides at once: its index, its queues, its results. Knows no thread and no file.

`kv.tiers.disk.DiskTier` derives from it and adds the threads, which take from the queues and note how things ended. All
state is guarded by one lock, that of `_changed`; methods whose name begins with an underscore need it held.

Invariants, verified by `check`: a key is never both held and being stored; the queues keep their bounds; the index's.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from threading import Condition, RLock

from tiercel.kv.tiers.buffers import BufferPool
from tiercel.kv.tiers.disk_index import DiskIndex
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
from tiercel.kv.tiers.record import RecordFormat, RecordHead

_N_ABSENT_MAX = 65_536  # keys known to be absent: 8 MiB at most
N_READERS = 4  # see docs/log.md; a reader waits for the disk most of the time
_N_LOADS_MAX = 8  # that a reader takes at a time


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """How much a disk tier does at once. Times are seconds."""

    n_readers: int = N_READERS
    n_queued_loads: int = 8192  # 128k tokens in pages of 16
    # Of each group, so that states do not keep pages out. What is below it takes one more: a state may be 449 MB.
    queued_store_bytes: int = 64 << 20
    buffer_bytes: int = 64 << 20  # memory that is kept to read into, beside what loads and stores are using
    retry_s: float = 30.0  # after a failure to store
    recheck_s: float = 10.0  # how long an absent key is taken to stay absent: others may write it
    close_s: float = 5.0  # how long `close` waits for a disk that does not answer


@dataclass(slots=True, eq=False)
class QueuedLoad:
    """One object to read, and who waits for it."""

    key: bytes
    group_idx: int
    waiters: list[tuple[int, float]]  # job, deadline


@dataclass(slots=True, eq=False)
class QueuedStore:
    """One object to write, and who waits for it."""

    head: RecordHead
    data: memoryview
    tick: int
    n_uses: int
    waiters: list[tuple[int, float]]


class DiskState:
    """All of `kv.tiers.interface.Tier` but `close`."""

    def __init__(
        self, identity: TierIdentity, capacity_bytes: int, wake: Wake, clock: Clock, wall: Clock, limits: DiskLimits
    ) -> None:
        self._limits = limits
        self._format = RecordFormat(identity)
        self._identity = identity
        self._wake = wake
        self._clock = clock
        self._buffers = BufferPool(limits.buffer_bytes)
        lock = RLock()  # guards all below
        self._changed = Condition(lock)  # told when a thread has nothing to do
        self._to_read, self._to_write = Condition(lock), Condition(lock)  # told when there is work of the kind
        self._capacity_bytes = capacity_bytes
        self._index = DiskIndex(capacity_bytes, wall)  # its own capacity is what the other models leave
        self._absent: dict[bytes, float] = {}  # until when
        self._probes: deque[bytes] = deque()
        self._probing: set[bytes] = set()
        self._loads: deque[QueuedLoad] = deque()
        self._loading: dict[tuple[bytes, int], QueuedLoad] = {}
        self._stores: deque[QueuedStore] = deque()
        self._storing: dict[bytes, QueuedStore] = {}
        self._queued_store_bytes = [0] * len(identity.groups)
        self._results: list[KeyResult] = []
        self._counters = TierCounters()
        self._generation = 0  # of what was reset
        self._n_busy = 0  # threads in the middle of something
        self._is_open = self._is_gone = self._is_closed = False
        self._must_clear = False
        self._must_scan = True
        self._unscanned_bytes = 0
        self._stores_again_s: float | None = None

    def lookup(self, key: bytes) -> Answer:
        """Answer from memory; what is not known there is looked for by a reader."""
        with self._changed:
            answer = self._known_answer(key)
            if answer in (Answer.HIT, Answer.MISS):
                self._counters.n_queries += 1
                self._counters.n_hits += answer is Answer.HIT
            return answer

    def submit_load(self, job: LoadJob) -> None:
        """Queue, or join a load of the same object."""
        with self._changed:
            for item in job.items:
                waiter = (job.job_id, job.deadline_s)
                same = self._loading.get((item.key, item.group_idx))
                coming = self._queued_store(item.key)
                if self._is_closed:
                    self._report(job.job_id, item.key, Outcome.CANCELLED)
                elif job.deadline_s <= self._clock():
                    self._report(job.job_id, item.key, Outcome.LATE)
                elif coming is not None:
                    self._load_queued(job.job_id, coming, item.group_idx)
                elif same is not None:
                    same.waiters.append(waiter)
                elif self._must_clear or self._is_gone or self._index.has_expired(item.key, None):
                    self._report(job.job_id, item.key, Outcome.ABSENT)
                elif len(self._loads) >= self._limits.n_queued_loads:
                    self._report(job.job_id, item.key, Outcome.REFUSED, "too many loads are queued")
                else:
                    load = QueuedLoad(item.key, item.group_idx, [waiter])
                    self._loading[item.key, item.group_idx] = load
                    self._loads.append(load)
            self._index.use(item.key for item in job.items)
            self._to_read.notify(len(self._loads))
        self._wake()

    def submit_store(self, job: StoreJob) -> None:
        """Queue what is not held yet."""
        with self._changed:
            tick = self._index.advance()
            for item in job.items:
                data = memoryview(item.data).cast("B")
                same = self._storing.get(item.key)
                if same is not None:
                    same.waiters.append((job.job_id, job.deadline_s))
                    continue
                outcome, reason = self._why_not_stored(item, len(data), job.deadline_s)
                if outcome is not None:
                    self._report(job.job_id, item.key, outcome, reason)
                    continue
                waiters = [(job.job_id, job.deadline_s)]
                expires_s = self._index.expiry(item.ttl_s)
                head = RecordHead(item.key, item.group_idx, item.depth, item.is_pinned, expires_s)
                if not item.is_lasting:
                    data = self._copy(data)
                store = QueuedStore(head, data, tick, item.n_uses, waiters)
                self._storing[item.key] = store
                self._stores.append(store)
                self._queued_store_bytes[item.group_idx] += len(data)
            self._to_write.notify()
        self._wake()

    def poll(self) -> list[KeyResult]:
        """Return what has ended."""
        with self._changed:
            results, self._results = self._results, []
        self._buffers.trim()
        return results

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note the uses."""
        with self._changed:
            self._index.use(keys)

    def drain(self, timeout_s: float) -> bool:
        """Wait for the threads to have nothing to do."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def reset(self) -> None:
        """Forget; the writer removes the files before it stores anything else."""
        with self._changed:
            self._generation += 1
            self._must_clear = not self._is_closed
            self._index.clear()
            self._absent.clear()
            self._cancel_all("reset")
            self._tell_all()
        self._wake()

    def usage(self) -> Usage:
        """Return what this process believes to be in its identity's folder, and what all folders may hold."""
        with self._changed:
            return Usage(len(self._index), self._index.used_bytes, self._capacity_bytes)

    def counters(self) -> TierCounters:
        """Return a copy."""
        with self._changed:
            return replace(self._counters)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        with self._changed:
            self._index.check()
            self._buffers.check()
            held = [key for key in self._storing if key in self._index]
            assert not held, "kv.tiers: an object is both held and being stored"
            for group_idx, n_bytes in enumerate(self._queued_store_bytes):
                queued = [len(store.data) for store in self._stores if store.head.group_idx == group_idx]
                assert sum(queued) == n_bytes, "kv.tiers: the queue of stores is miscounted"
                is_bounded = sum(queued[:-1]) < max(1, self._limits.queued_store_bytes)
                assert is_bounded, "kv.tiers: the queue of stores is too long"
            assert len(self._loads) <= self._limits.n_queued_loads, "kv.tiers: the queue of loads is too long"
            assert set(self._probes) <= self._probing, "kv.tiers: a probe is lost"

    def _copy(self, data: memoryview) -> memoryview:
        copy = self._buffers.take(len(data))[: len(data)]
        copy[:] = data
        return copy

    def _queued_store(self, key: bytes) -> QueuedStore | None:
        """Return what is not written yet, or not whole, of a key, unless it has expired meanwhile."""
        store = self._storing.get(key)
        return None if store is None or self._index.has_expired(key, store.head.expires_s) else store

    def _load_queued(self, job_id: int, store: QueuedStore, group_idx: int) -> None:
        """Answer for a load of what is not written yet, from memory."""
        if store.head.group_idx != group_idx:
            self._report(job_id, store.head.key, Outcome.FAILED, f"it is of group {store.head.group_idx}")
        else:
            self._counters.n_loaded += 1
            self._report(job_id, store.head.key, Outcome.DONE, data=store.data.toreadonly())

    def _known_answer(self, key: bytes) -> Answer:
        if self._is_closed or self._is_gone:
            if self._is_gone and self._stores_again_s is not None and self._clock() >= self._stores_again_s:
                self._must_scan = True  # it may be back; who reads only would never know
                self._to_write.notify()
            return Answer.MISS
        if key in self._index or self._queued_store(key) is not None:
            return Answer.HIT
        if self._must_clear or self._absent.get(key, 0.0) > self._clock():
            return Answer.MISS
        if key not in self._probing:
            self._probing.add(key)
            self._probes.append(key)
            self._to_read.notify()
        return Answer.UNKNOWN

    def _why_not_stored(self, item: StoreItem, n_bytes: int, deadline_s: float) -> tuple[Outcome | None, str]:
        needed = self._identity.groups[item.group_idx].object_bytes
        if self._is_closed:
            return Outcome.CANCELLED, "closed"
        if n_bytes != needed:
            return Outcome.FAILED, f"{n_bytes} bytes; needs {needed}"
        if deadline_s <= self._clock():
            return Outcome.LATE, ""
        if item.key in self._index:
            self._index.use([item.key])
            self._index.renew(item.key, is_pinned=item.is_pinned, expires_s=self._index.expiry(item.ttl_s))
            return Outcome.DONE, ""
        if self._stores_again_s is not None and self._clock() < self._stores_again_s:
            return Outcome.REFUSED, "the disk failed before"
        if self._format.record_bytes(item.group_idx) > self._capacity_bytes:
            return Outcome.REFUSED, "larger than the tier"
        if self._queued_store_bytes[item.group_idx] >= self._limits.queued_store_bytes:
            return Outcome.REFUSED, "too many stores are queued"
        return None, ""

    def _report(
        self, job_id: int, key: bytes, outcome: Outcome, reason: str = "", data: memoryview | None = None
    ) -> None:
        self._counters.n_refused += outcome is Outcome.REFUSED
        self._counters.n_late += outcome is Outcome.LATE
        self._results.append(KeyResult(job_id, key, outcome, data, reason))

    def _finish_load(
        self, load: QueuedLoad, outcome: Outcome, reason: str = "", data: memoryview | None = None
    ) -> None:
        for job_id, _ in load.waiters:
            self._report(job_id, load.key, outcome, reason, data)
        load.waiters.clear()
        if self._loading.get((load.key, load.group_idx)) is load:
            del self._loading[load.key, load.group_idx]

    def _finish_store(self, store: QueuedStore, outcome: Outcome, reason: str = "") -> None:
        for job_id, _ in store.waiters:
            self._report(job_id, store.head.key, outcome, reason)
        store.waiters.clear()
        if self._storing.get(store.head.key) is store:
            del self._storing[store.head.key]

    def _cancel_all(self, reason: str) -> None:
        for load in list(self._loading.values()):
            self._finish_load(load, Outcome.CANCELLED, reason)
        for store in list(self._storing.values()):
            self._finish_store(store, Outcome.CANCELLED, reason)
        self._loads.clear()
        self._stores.clear()
        self._probes.clear()
        self._probing.clear()
        self._queued_store_bytes = [0] * len(self._queued_store_bytes)

    def _is_idle(self) -> bool:
        waiting = self._loads or self._stores or self._probes or self._must_clear or self._must_scan
        return not self._n_busy and (self._is_closed or not waiting)

    def _note_absent(self, key: bytes) -> None:
        self._absent[key] = self._clock() + self._limits.recheck_s
        while len(self._absent) > _N_ABSENT_MAX:
            del self._absent[next(iter(self._absent))]

    def _tell_all(self) -> None:
        for condition in (self._changed, self._to_read, self._to_write):
            condition.notify_all()

    def _next_loads(self) -> list[QueuedLoad]:
        """Take the next loads that somebody still waits for: few when few are left, so that no reader ends late."""
        n = max(1, min(_N_LOADS_MAX, len(self._loads) // (2 * self._limits.n_readers)))
        loads: list[QueuedLoad] = []
        now_s = self._clock()
        while self._loads and len(loads) < n:
            load = self._loads.popleft()
            for waiter in [w for w in load.waiters if w[1] <= now_s]:
                load.waiters.remove(waiter)
                self._report(waiter[0], load.key, Outcome.LATE)
            if load.waiters:
                loads.append(load)
            else:
                self._finish_load(load, Outcome.LATE)
        return loads
