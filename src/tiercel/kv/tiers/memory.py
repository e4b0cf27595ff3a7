"""The memory tier: objects in this process's memory, for a pool that lies elsewhere. Knows no request.

Everything happens in the owner's calls: a store copies, a load hands out what is held, and `poll` tells. It ends with
the process. Where the page pool is host memory already, more pages do the same without a copy.
"""

import time
from collections.abc import Iterable
from dataclasses import replace

from tiercel.kv.tiers.disk_index import DiskIndex, Found
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


class MemoryTier:
    """Meets `kv.tiers.interface.Tier`."""

    def __init__(
        self, identity: TierIdentity, capacity_bytes: int, wake: Wake, clock: Clock, *, wall: Clock = time.time
    ) -> None:
        """Hold nothing yet. `capacity_bytes` bounds the objects' own bytes; `wall` is Unix time, for times to live."""
        self._identity = identity
        self._wake = wake
        self._clock = clock
        self._index = DiskIndex(capacity_bytes, wall)
        self._held: dict[bytes, bytes] = {}
        self._results: list[KeyResult] = []
        self._counters = TierCounters()
        self._is_closed = False

    def lookup(self, key: bytes) -> Answer:
        """Answer at once."""
        is_hit = key in self._index
        self._counters.n_queries += 1
        self._counters.n_hits += is_hit
        return Answer.HIT if is_hit else Answer.MISS

    def submit_load(self, job: LoadJob) -> None:
        """Hand out what is held, without a copy: it never changes."""
        start_s = self._clock()
        for item in job.items:
            data = self._held[item.key] if item.key in self._index else None
            outcome, reason = self._why_not(job.deadline_s)
            if outcome is None and data is None:
                outcome = Outcome.ABSENT
            elif outcome is None and data is not None and len(data) != self._n_bytes(item.group_idx):
                outcome, reason = Outcome.FAILED, "another group's object"
            if outcome is not None or data is None:
                self._report(job.job_id, item.key, outcome or Outcome.ABSENT, reason)
                continue
            self._counters.n_loaded += 1
            self._counters.read_bytes += len(data)
            self._results.append(KeyResult(job.job_id, item.key, Outcome.DONE, memoryview(data)))
        self._counters.read_s += self._clock() - start_s
        self._index.use(item.key for item in job.items)
        self._wake()

    def submit_store(self, job: StoreJob) -> None:
        """Copy."""
        start_s = self._clock()
        tick = self._index.advance()
        for item in job.items:
            outcome, reason = self._why_not(job.deadline_s)
            if outcome is None:
                outcome, reason = self._store(item, tick)
            self._report(job.job_id, item.key, outcome, reason)
        self._counters.write_s += self._clock() - start_s
        self._wake()

    def poll(self) -> list[KeyResult]:
        """Return what has ended."""
        results, self._results = self._results, []
        return results

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note the uses."""
        self._index.use(keys)

    def drain(self, timeout_s: float) -> bool:
        """Nothing is ever on its way."""
        return True

    def reset(self) -> None:
        """Forget all."""
        self._index.clear()
        self._held.clear()

    def usage(self) -> Usage:
        """Return what is held."""
        return Usage(len(self._index), self._index.used_bytes, self._index.capacity_bytes)

    def counters(self) -> TierCounters:
        """Return a copy."""
        return replace(self._counters)

    def close(self) -> None:
        """Forget all, for good."""
        self._is_closed = True
        self.reset()

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self._index.check()
        assert self._index.used_bytes == sum(map(len, self._held.values())), "kv.tiers: memory is miscounted"
        assert self._index.used_bytes <= self._index.capacity_bytes, "kv.tiers: memory holds more than it may"

    def _n_bytes(self, group_idx: int) -> int:
        return self._identity.groups[group_idx].object_bytes

    def _why_not(self, deadline_s: float) -> tuple[Outcome | None, str]:
        if self._is_closed:
            return Outcome.CANCELLED, "closed"
        return (Outcome.LATE, "") if deadline_s <= self._clock() else (None, "")

    def _store(self, item: StoreItem, tick: int) -> tuple[Outcome, str]:
        data = memoryview(item.data).cast("B")
        needed = self._n_bytes(item.group_idx)
        if len(data) != needed:
            return Outcome.FAILED, f"{len(data)} bytes; needs {needed}"
        expires_s = self._index.expiry(item.ttl_s)
        if item.key in self._index:
            self._index.use([item.key])
            self._index.renew(item.key, is_pinned=item.is_pinned, expires_s=expires_s)
            return Outcome.DONE, ""
        self._index.forget(item.key)  # it has expired, if it is known
        self._held.pop(item.key, None)
        victims = self._index.make_room(needed)
        if victims is None:
            return Outcome.REFUSED, "larger than the tier"
        for key in victims:
            del self._held[key]
        self._counters.n_evicted += len(victims)
        self._held[item.key] = bytes(data)
        self._index.add(item.key, Found(needed, item.depth, item.is_pinned, expires_s), tick=tick)
        self._counters.n_stored += 1
        self._counters.written_bytes += needed
        return Outcome.DONE, ""

    def _report(self, job_id: int, key: bytes, outcome: Outcome, reason: str) -> None:
        self._counters.n_refused += outcome is Outcome.REFUSED
        self._counters.n_late += outcome is Outcome.LATE
        self._results.append(KeyResult(job_id, key, outcome, None, reason))
