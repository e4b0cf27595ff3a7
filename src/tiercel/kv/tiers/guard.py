"""The guard around a tier: whatever the tier does, its owner sees the contract kept. Knows nothing of how it stores.

It puts a deadline on every pending state, turns exceptions and lies into outcomes, remembers what failed, and leaves a
tier alone that keeps failing. With `seals`, objects go down as records (`kv.tiers.record`) and come up verified, so
that a tier that gives other bytes than it got is found out; a tier that verifies by itself, as `disk` does, needs none.

Invariants, verified by `check`:
1. Every key of every submitted job is in exactly one of: open, reported.
2. What failed to load is a MISS until it is stored again.

The breaker: closed -> open after `N_FAULTS_MAX` faults without a success between, or one call that did not return for
as long as a lookup may take; open -> closed once `rest_s` has
passed, but then a single fault opens it again until a success.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from tiercel.kv.tiers.identity import TierIdentity
from tiercel.kv.tiers.interface import (
    Answer,
    Clock,
    KeyResult,
    LoadJob,
    Outcome,
    StoreItem,
    StoreJob,
    Tier,
    TierCounters,
    Usage,
)
from tiercel.kv.tiers.record import InvalidRecord, RecordFormat, RecordHead

_log = logging.getLogger(__name__)

N_FAULTS_MAX = 8
_MAY_WAIT = ("drain", "close")
_N_REMEMBERED = 65_536  # keys whose failure, or whose wait, is remembered: 6 MiB at most


class GuardedTier:
    """Meets `kv.tiers.interface.Tier` over a tier that may not."""

    def __init__(
        self,
        name: str,
        tier: Tier,
        identity: TierIdentity,
        clock: Clock,
        *,
        lookup_deadline_s: float = 1.0,
        rest_s: float = 30.0,
        seals: bool,
    ) -> None:
        """Guard `tier`, which was made for `identity`, or with `seals` for `sealed_identity(identity)`."""
        self.name = name
        self._tier = tier
        self._identity = identity
        self._clock = clock
        self._lookup_deadline_s = lookup_deadline_s
        self._rest_s = rest_s
        self._format = RecordFormat(identity) if seals else None
        self._jobs: dict[
            int, tuple[float, bool, dict[bytes, int]]
        ] = {}  # deadline, is a load, key -> group of open keys
        self._overdue: dict[tuple[int, bytes], None] = {}  # reported LATE; what still comes for them is no lie
        self._results: list[KeyResult] = []
        self._waits: dict[bytes, float] = {}  # when the first UNKNOWN or PENDING was answered
        self._failed: dict[bytes, None] = {}
        self._n_faults = 0
        self._open_until_s: float | None = None
        self._is_closed = False
        self._counters = TierCounters()

    def lookup(self, key: bytes) -> Answer:
        """Ask the tier, within the bounds of what is known about it."""
        if self._is_closed or not self._is_trusted() or key in self._failed:
            return self._answered(Answer.MISS)
        answer = self._call("lookup", lambda: self._tier.lookup(key))
        if not isinstance(answer, Answer):
            answer = Answer.MISS
        if answer in (Answer.HIT, Answer.MISS):
            since_s = self._waits.pop(key, None)
            if since_s is not None:
                self._counters.n_lookups_waited += 1
                self._counters.lookup_wait_s += self._clock() - since_s
            return self._answered(answer)
        since_s = self._waits.setdefault(key, self._clock())
        _bound(self._waits)
        if self._clock() - since_s < self._lookup_deadline_s:
            return answer
        self._counters.n_late += 1
        return self._answered(Answer.MISS)

    def submit_load(self, job: LoadJob) -> None:
        """Pass the job on, and answer for it."""
        self._submit(job, {i.key: i.group_idx for i in job.items}, lambda: self._tier.submit_load(job), is_load=True)

    def submit_store(self, job: StoreJob) -> None:
        """Pass the job on, sealed if it must be, and answer for it."""
        wrong = [i for i in job.items if memoryview(i.data).nbytes != self._identity.groups[i.group_idx].object_bytes]
        assert not wrong, f"kv.tiers: job {job.job_id} stores objects whose length is not their group's"
        fmt = self._format
        inner = job if fmt is None else replace(job, items=[_sealed(fmt, item) for item in job.items])
        groups = {item.key: item.group_idx for item in job.items}
        self._submit(job, groups, lambda: self._tier.submit_store(inner), is_load=False)

    def poll(self) -> list[KeyResult]:
        """Return what has ended, verified, and what has not ended in time as LATE."""
        found = self._call("poll", self._tier.poll)
        for result in found if isinstance(found, list) else []:
            self._take(result)
        now_s = self._clock()
        for job_id in [j for j, (deadline_s, _, _) in self._jobs.items() if deadline_s <= now_s]:
            for key in list(self._jobs[job_id][2]):
                self._overdue[job_id, key] = None
                self._counters.n_late += 1
                self._fault()
                self._report(job_id, key, Outcome.LATE, reason="no answer by the deadline")
        _bound(self._overdue)
        results, self._results = self._results, []
        return results

    def touch(self, keys: Iterable[bytes]) -> None:
        """Pass on."""
        self._call("touch", lambda: self._tier.touch(keys))

    def drain(self, timeout_s: float) -> bool:
        """Pass on."""
        return self._call("drain", lambda: self._tier.drain(timeout_s)) is True

    def reset(self) -> None:
        """Pass on; a tier whose reset fails is never asked again, as it may hold what must not be found."""
        n_before = self._counters.n_lies
        self._call("reset", self._tier.reset)
        if self._counters.n_lies > n_before:
            self._open_until_s = float("inf")
        self._waits.clear()

    def usage(self) -> Usage:
        """Return what the tier says."""
        usage = self._call("usage", self._tier.usage)
        return usage if isinstance(usage, Usage) else Usage(0, 0, 0)

    def counters(self) -> TierCounters:
        """Return the tier's counters, with queries, hits and LATE counted here, and lies."""
        inner = self._call("counters", self._tier.counters)
        mine = self._counters
        return replace(
            inner if isinstance(inner, TierCounters) else TierCounters(),
            n_queries=mine.n_queries,
            n_hits=mine.n_hits,
            n_late=mine.n_late,
            n_refused=mine.n_refused + (inner.n_refused if isinstance(inner, TierCounters) else 0),
            n_lookups_waited=mine.n_lookups_waited,
            lookup_wait_s=mine.lookup_wait_s,
            n_invalid=mine.n_invalid + (inner.n_invalid if isinstance(inner, TierCounters) else 0),
            n_degraded=mine.n_degraded + (inner.n_degraded if isinstance(inner, TierCounters) else 0),
            n_lies=mine.n_lies,
        )

    def close(self) -> None:
        """Close the tier and cancel what it has not answered."""
        self._is_closed = True
        self._call("close", self._tier.close)
        found = self._call("poll", self._tier.poll)
        for result in found if isinstance(found, list) else []:
            self._take(result)
        for job_id in list(self._jobs):
            for key in list(self._jobs[job_id][2]):
                self._report(job_id, key, Outcome.CANCELLED, reason="closed")

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken, here or in the tier."""
        assert all(groups for _, _, groups in self._jobs.values()), "kv.tiers: a job without open keys is kept"
        reported = {(result.job_id, result.key) for result in self._results}
        assert len(reported) == len(self._results), "kv.tiers: a key is reported twice"
        still_open = {(job_id, key) for job_id, (_, _, groups) in self._jobs.items() for key in groups}
        assert not still_open & reported, "kv.tiers: a reported key is still open"
        self._tier.check()

    def _submit(
        self, job: LoadJob | StoreJob, groups: dict[bytes, int], pass_on: Callable[[], None], *, is_load: bool
    ) -> None:
        assert job.job_id not in self._jobs, f"kv.tiers: job {job.job_id} is submitted twice"
        if not groups:
            return
        self._jobs[job.job_id] = (job.deadline_s, is_load, groups)
        n_before = self._counters.n_lies
        if self._is_closed:
            outcome, reason = Outcome.CANCELLED, "closed"
        elif self._is_trusted():
            self._call("submit", pass_on)
            outcome, reason = Outcome.FAILED, "the tier raised"
            if self._counters.n_lies == n_before:
                return
        else:
            outcome, reason = Outcome.REFUSED, "the tier is left alone after faults"
            self._counters.n_refused += len(groups)
        for key in list(groups):
            if outcome is Outcome.FAILED:  # part of the job may have been taken
                self._overdue[job.job_id, key] = None
            self._report(job.job_id, key, outcome, reason=reason)

    def _take(self, result: KeyResult) -> None:
        """Check one result against what was asked, and report it."""
        if not isinstance(result, KeyResult):
            return self._lie("poll gave something that is no result")
        if (result.job_id, result.key) in self._overdue:
            del self._overdue[result.job_id, result.key]
            return None
        _, is_load, groups = self._jobs.get(result.job_id, (0.0, False, {}))
        group_idx = groups.get(result.key)
        if group_idx is None:
            return self._lie("a result for what was not asked, or was reported before")
        if not isinstance(result.outcome, Outcome):
            return self._fail(result, "an outcome that is none")
        if result.outcome is not Outcome.DONE or not is_load:
            if result.outcome is Outcome.DONE:
                self._n_faults = 0
                self._failed.pop(result.key, None)
            elif result.outcome in (Outcome.FAILED, Outcome.LATE):
                self._counters.n_late += result.outcome is Outcome.LATE
                self._fault()
            return self._report(result.job_id, result.key, result.outcome, reason=result.reason)
        try:
            data = self._verified(result, group_idx)
        except (InvalidRecord, TypeError, ValueError) as error:
            self._counters.n_invalid += 1
            return self._fail(result, f"wrong bytes: {error}")
        self._n_faults = 0
        return self._report(result.job_id, result.key, Outcome.DONE, data=data)

    def _verified(self, result: KeyResult, group_idx: int) -> memoryview:
        data = memoryview(result.data if result.data is not None else b"").cast("B")
        if self._format is not None:
            # A copy, as a tier that keeps the buffer could change it after it was verified.
            return self._format.open(memoryview(bytes(data)), result.key, group_idx)
        needed = self._identity.groups[group_idx].object_bytes
        if len(data) != needed:
            raise InvalidRecord(f"{len(data)} bytes; needs {needed}")
        return data

    def _report(
        self, job_id: int, key: bytes, outcome: Outcome, *, data: memoryview | None = None, reason: str = ""
    ) -> None:
        _, is_load, groups = self._jobs[job_id]
        del groups[key]
        if not groups:
            del self._jobs[job_id]
        if is_load and outcome in (Outcome.ABSENT, Outcome.FAILED, Outcome.LATE):
            self._failed[key] = None
            _bound(self._failed)
        self._results.append(KeyResult(job_id, key, outcome, data, reason))

    def _call(self, what: str, ask: Callable[[], object]) -> object:
        """Call into the tier. An exception is a lie and no answer; a call that waits is a lie as well."""
        begun_s = self._clock()
        try:
            answer = ask()
        except Exception as error:  # noqa: BLE001 - a plug-in's code: whatever it raises is an outcome here
            self._lie(f"{what} raised {type(error).__name__}: {error}")
            answer = None
        took_s = self._clock() - begun_s
        if took_s > self._lookup_deadline_s and what not in _MAY_WAIT:
            self._n_faults = max(self._n_faults, N_FAULTS_MAX - 1)
            self._lie(f"{what} took {took_s:.1f} s, and everybody waited")
        return answer

    def _fail(self, result: KeyResult, reason: str) -> None:
        self._lie(reason)
        self._report(result.job_id, result.key, Outcome.FAILED, reason=reason)

    def _lie(self, reason: str) -> None:
        if self._counters.n_lies == 0:
            _log.warning("KV tier %s broke its contract: %s; further breaches are counted", self.name, reason)
        self._counters.n_lies += 1
        self._fault()

    def _fault(self) -> None:
        self._n_faults += 1
        if self._n_faults >= N_FAULTS_MAX and self._open_until_s is None:
            self._open_until_s = self._clock() + self._rest_s
            self._counters.n_degraded += 1
            _log.warning(
                "KV tier %s failed %d times in a row; left alone for %.0f s", self.name, self._n_faults, self._rest_s
            )

    def _is_trusted(self) -> bool:
        if self._open_until_s is not None and self._clock() >= self._open_until_s:
            self._open_until_s = None
            self._n_faults = N_FAULTS_MAX - 1
        return self._open_until_s is None

    def _answered(self, answer: Answer) -> Answer:
        self._counters.n_queries += 1
        self._counters.n_hits += answer is Answer.HIT
        return answer


def sealed_identity(identity: TierIdentity) -> TierIdentity:
    """Return what a tier is made for whose objects a guard seals."""
    return identity.longer_by(RecordFormat(identity).header_bytes)


def _sealed(fmt: RecordFormat, item: StoreItem) -> StoreItem:
    head = RecordHead(item.key, item.group_idx, item.depth)  # how long it stays is the tier's affair
    return replace(item, data=fmt.header(head, item.data) + bytes(item.data))


def _bound(known: dict[bytes, None] | dict[bytes, float] | dict[tuple[int, bytes], None]) -> None:
    while len(known) > _N_REMEMBERED:
        del known[next(iter(known))]  # type: ignore[arg-type]
