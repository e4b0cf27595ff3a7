"""The contract of a tier: a place that keeps objects by key and may lose them. Knows no pool and no scheduler.

Every call but `drain` and `close` returns at once: a tier only notes what is asked, and works on threads of its own (or
somewhere else). All calls come from one thread, the owner's. What a tier has to say waits for `poll`; it calls `wake`,
which it got when it was made and which any thread may call, whenever there is something new to poll or to look up.

States of one key, as `lookup` tells them:

    state     lookup    moves, and what makes them
    absent    MISS      -> storing: a store is taken
    unasked   UNKNOWN   -> held or absent: the tier found out, and woke its owner
    storing   PENDING,  -> held: the store is DONE.  -> absent: any other outcome
              or HIT    where it can be loaded meanwhile, from the memory that it is stored from
    held      HIT       -> loading: a load is taken.  -> absent: evicted, reset, found damaged, or gone
    loading   HIT       -> held: the load is DONE, REFUSED, LATE or CANCELLED.  -> absent: the load is ABSENT or FAILED

A failed load makes the key absent, so that it is computed again instead of asked for again (a guard takes a late one
so too). UNKNOWN and PENDING, and every job, have a deadline: a tier should keep it, and `kv.tiers.guard.GuardedTier`
makes sure of it for any tier.

States of one key of one job (a job is a list of keys with one deadline):

    queued    the tier has taken the job     -> running; or CANCELLED (reset, close); LATE (deadline); REFUSED (no room)
    running   bytes move                     -> DONE, ABSENT, FAILED
    reported  `poll` has returned its result; no other result comes for it, ever

Each key of each job is reported exactly once, in any order, also when the tier is closed; that some keys of a job are
DONE and others not is normal. An error is an outcome, never an exception.

Who owns bytes: a store's data is read during `submit_store` only, and may change once that returns, unless its item
says that it lasts: then a tier may keep it and needs no copy. A load's data belongs to who polled it, and never
changes. So no page is held for a tier, and no late tier can write to a page.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tiercel.base.errors import ConfigError
from tiercel.kv.tiers.identity import KEY_BYTES

Bytes = bytes | bytearray | memoryview
Wake = Callable[[], None]
Clock = Callable[[], float]  # seconds, monotonic


class Answer(Enum):
    """What `lookup` says of a key."""

    MISS = "miss"
    HIT = "hit"
    PENDING = "pending"  # known, and not readable yet
    UNKNOWN = "unknown"  # being found out; ask again after the tier woke its owner


class Outcome(Enum):
    """How one key of a job ended."""

    DONE = "done"
    ABSENT = "absent"  # a load of what is not there
    FAILED = "failed"  # damaged bytes, or an error of the medium; a load's key is absent from now on
    LATE = "late"  # the deadline passed before the tier began
    REFUSED = "refused"  # no room: the queue or the tier is full, or the tier does not store now
    CANCELLED = "cancelled"  # reset or closed


@dataclass(frozen=True, slots=True)
class StoreItem:
    """One object to store. `depth` is the number of pages before it in its chain: heads (0) are worth the most.

    A request's `cache_hint` comes here: what is pinned is given up only when all else is gone, for `ttl_s` (None: for
    ever), and then is an object as others. Of what is not pinned, nobody gets what is older than its `ttl_s` (None: no
    limit). Storing what is held already renews it: a pin counts, or else the later end; and of two pins the later end.

    `is_lasting`: the data never changes while anybody has a view of it. `n_uses`: how often it was used before.
    """

    key: bytes
    group_idx: int
    depth: int
    data: Bytes
    is_pinned: bool = False
    ttl_s: float | None = None
    is_lasting: bool = False
    n_uses: int = 0


@dataclass(frozen=True, slots=True)
class LoadItem:
    """One object to load."""

    key: bytes
    group_idx: int


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Objects to store, until `deadline_s` on the tier's clock. `job_id` is unique among a tier's jobs."""

    job_id: int
    items: Sequence[StoreItem]
    deadline_s: float

    def __post_init__(self) -> None:
        _check_keys(self.job_id, [item.key for item in self.items])


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Objects to load, until `deadline_s` on the tier's clock. `job_id` is unique among a tier's jobs."""

    job_id: int
    items: Sequence[LoadItem]
    deadline_s: float

    def __post_init__(self) -> None:
        _check_keys(self.job_id, [item.key for item in self.items])


@dataclass(frozen=True, slots=True)
class KeyResult:
    """How one key of one job ended. `data` is a loaded object's bytes, exactly when a load is DONE."""

    job_id: int
    key: bytes
    outcome: Outcome
    data: memoryview | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds and may hold. `used_bytes` counts all it takes of its medium, headers included."""

    n_objects: int
    used_bytes: int
    capacity_bytes: int


@dataclass(slots=True)
class TierCounters:
    """What a tier has done since it was made. Times are seconds that its workers spent moving bytes."""

    n_queries: int = 0  # lookups that got an answer, MISS or HIT
    n_hits: int = 0
    n_loaded: int = 0
    n_stored: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    write_cpu_s: float = 0.0  # of that, time of a processor
    n_load_failures: int = 0
    n_store_failures: int = 0
    n_refused: int = 0
    n_late: int = 0
    n_evicted: int = 0
    n_invalid: int = 0  # objects found damaged or foreign
    n_degraded: int = 0  # times the tier stopped storing, or stopped altogether
    n_lies: int = 0  # breaches of this contract that a guard caught
    n_lookups_waited: int = 0  # lookups that were UNKNOWN or PENDING first; a guard counts them
    lookup_wait_s: float = 0.0  # until they were answered


class Tier(Protocol):
    """One tier. See the module's docstring for states, threads and who owns bytes."""

    def lookup(self, key: bytes) -> Answer:
        """Say whether an object of that key could be loaded. HIT is a belief; only a load proves it."""

    def submit_load(self, job: LoadJob) -> None:
        """Take a job. An object whose group or length is not what the item's group says is FAILED."""

    def submit_store(self, job: StoreJob) -> None:
        """Take a job, copying its data. A key that is held already is DONE."""

    def poll(self) -> list[KeyResult]:
        """Return what has ended since the last call."""

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that the keys, of one chain from its first on, were used, wherever they were found."""

    def drain(self, timeout_s: float) -> bool:
        """Block until every job taken can be polled; False when that took too long. Nothing is aborted."""

    def reset(self) -> None:
        """Forget every object: from now on no lookup hits what was stored before, and what is queued is CANCELLED."""

    def usage(self) -> Usage:
        """Return what is held."""

    def counters(self) -> TierCounters:
        """Return a copy of the counters."""

    def close(self) -> None:
        """End the workers. Jobs not begun are CANCELLED, as is whatever is submitted later; `poll` still answers."""

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""


def _check_keys(job_id: int, keys: list[bytes]) -> None:
    if len(set(keys)) != len(keys) or any(len(key) != KEY_BYTES for key in keys):
        raise ConfigError(f"kv.tiers: job {job_id} needs different keys of {KEY_BYTES} bytes")
