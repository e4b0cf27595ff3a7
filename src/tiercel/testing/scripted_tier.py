"""A KV tier in a dictionary that keeps the contract, except where it is told to lie: for tests of who must cope."""

from collections.abc import Iterable, Mapping
from enum import Enum
from threading import Event

from tiercel.kv.tiers.identity import TierIdentity
from tiercel.kv.tiers.interface import (
    Answer,
    Clock,
    KeyResult,
    LoadJob,
    Outcome,
    StoreJob,
    TierCounters,
    Usage,
    Wake,
)


class Lie(Enum):
    """What a scripted tier does wrong with a key."""

    WRONG_LENGTH = "loads with a byte too few"
    WRONG_BYTES = "loads with a bit changed"
    WRONG_KEY = "its load reports another key"
    NO_DATA = "its load is done without data"
    TWICE = "is reported twice"
    RAISES = "whatever is done with it raises"
    NEVER = "is never answered: UNKNOWN, and no result"
    HIT_FOREVER = "is a hit that fails to load"


class ScriptedTier:
    """Meets `kv.tiers.interface.Tier` when `lies` is empty. Jobs end when they are submitted; `poll` tells."""

    def __init__(
        self,
        identity: TierIdentity,
        wake: Wake,
        capacity_bytes: int,
        clock: Clock,
        lies: Mapping[bytes, Lie] | None = None,
    ) -> None:
        self._identity = identity
        self._wake = wake
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self.lies = dict(lies or {})
        self._held: dict[bytes, bytes] = {}  # the longest unused first
        self._results: list[KeyResult] = []
        self._counters = TierCounters()
        self._closed = Event()

    def lookup(self, key: bytes) -> Answer:
        """Answer at once."""
        lie = self.lies.get(key)
        if lie is Lie.RAISES:
            raise OSError("scripted")
        if lie is Lie.NEVER:
            return Answer.UNKNOWN
        is_hit = lie is Lie.HIT_FOREVER or key in self._held
        self._counters.n_queries += 1
        self._counters.n_hits += is_hit
        return Answer.HIT if is_hit else Answer.MISS

    def submit_load(self, job: LoadJob) -> None:
        """Load at once."""
        for item in job.items:
            self._lie_or_report(job, item.key, self._load(job, item.key, item.group_idx))
        self._wake()

    def submit_store(self, job: StoreJob) -> None:
        """Store at once."""
        for item in job.items:
            data = bytes(item.data)
            if self._closed.is_set():
                outcome = Outcome.CANCELLED
            elif job.deadline_s <= self._clock():
                outcome = Outcome.LATE
            elif len(data) != self._identity.groups[item.group_idx].object_bytes:
                outcome = Outcome.FAILED
            elif len(data) > self._capacity_bytes:
                outcome = Outcome.REFUSED
            else:
                outcome = Outcome.DONE
                while item.key not in self._held and self._used_bytes() + len(data) > self._capacity_bytes:
                    del self._held[next(iter(self._held))]
                    self._counters.n_evicted += 1
                self._held[item.key] = data
                self._counters.n_stored += 1
                self._counters.written_bytes += len(data)
            self._lie_or_report(job, item.key, KeyResult(job.job_id, item.key, outcome))
        self._wake()

    def poll(self) -> list[KeyResult]:
        """Return what has ended."""
        results, self._results = self._results, []
        return results

    def touch(self, keys: Iterable[bytes]) -> None:
        """Move the chain's head to the safe end, last."""
        for key in reversed(list(keys)):
            if key in self._held:
                self._held[key] = self._held.pop(key)

    def drain(self, timeout_s: float) -> bool:
        """Nothing is ever on its way."""
        return True

    def reset(self) -> None:
        """Forget all."""
        self._held.clear()

    def usage(self) -> Usage:
        """Count."""
        return Usage(len(self._held), self._used_bytes(), self._capacity_bytes)

    def counters(self) -> TierCounters:
        """Copy."""
        return TierCounters(**{name: getattr(self._counters, name) for name in TierCounters.__slots__})

    def close(self) -> None:
        """Forget all, for good."""
        self._closed.set()
        self._held.clear()

    def check(self) -> None:
        """Raise AssertionError when more is held than fits."""
        assert self._used_bytes() <= self._capacity_bytes, "scripted tier: too full"

    def _load(self, job: LoadJob, key: bytes, group_idx: int) -> KeyResult:
        if self._closed.is_set():
            return KeyResult(job.job_id, key, Outcome.CANCELLED)
        if job.deadline_s <= self._clock():
            return KeyResult(job.job_id, key, Outcome.LATE)
        data = self._held.get(key)
        if data is None:
            failed = self.lies.get(key) is Lie.HIT_FOREVER
            return KeyResult(job.job_id, key, Outcome.FAILED if failed else Outcome.ABSENT)
        if len(data) != self._identity.groups[group_idx].object_bytes:
            return KeyResult(job.job_id, key, Outcome.FAILED, None, "another group's object")
        self._counters.n_loaded += 1
        self._counters.read_bytes += len(data)
        return KeyResult(job.job_id, key, Outcome.DONE, memoryview(data))

    def _lie_or_report(self, job: LoadJob | StoreJob, key: bytes, truth: KeyResult) -> None:
        lie = self.lies.get(key)
        if lie is Lie.RAISES:
            raise OSError("scripted")
        if lie is Lie.NEVER:
            return
        self._results += [truth] * (2 if lie is Lie.TWICE else 1)
        data = truth.data
        if data is None:
            return
        told: KeyResult = truth
        if lie is Lie.WRONG_LENGTH:
            told = KeyResult(job.job_id, key, Outcome.DONE, data[:-1])
        elif lie is Lie.WRONG_BYTES:
            told = KeyResult(job.job_id, key, Outcome.DONE, memoryview(bytes(data[:-1]) + bytes([data[-1] ^ 1])))
        elif lie is Lie.WRONG_KEY:
            told = KeyResult(job.job_id, bytes(32), Outcome.DONE, data)
        elif lie is Lie.NO_DATA:
            told = KeyResult(job.job_id, key, Outcome.DONE)
        self._results[-1] = told

    def _used_bytes(self) -> int:
        return sum(map(len, self._held.values()))
