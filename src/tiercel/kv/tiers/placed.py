"""A tier at its place below the page pool, and what all who use tiers share. Knows no sequence.

`PlacedTier` is a tier with what its owner decides: what goes in, how long is waited. `Rig` is what loads and stores
work with: the tiers in order, the pool, whoever copies pages, the clock and the meters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tiercel.kv.page_pool import PagePool
from tiercel.kv.tiers.identity import TierIdentity
from tiercel.kv.tiers.interface import Bytes, Clock, Tier, Wake
from tiercel.kv.tiers.pinned import PinnedKeys
from tiercel.kv.tiers.policy import RateMeter, Rates, StoreBudget, compute_s
from tiercel.kv.tiers.registry import TierSpec, make_tier

_MIB = 1 << 20
PAGES = 0  # the group of pages in an identity
# Before anything is measured: a plain disk, and a processor that computes slowly, so that loading is tried.
_PRIOR_LOAD_BYTES, _PRIOR_LOAD_S, _LOAD_HALF_LIFE_S = 4.0 * _MIB, 0.008, 60.0
_PRIOR_FOUND_S, _PRIOR_ASKED_S = 1.0, 0.1
_PRIOR_TOKENS, _PRIOR_TOKENS_S, _PREFILL_HALF_LIFE_S = 64.0, 0.128, 600.0
_PRIOR_STORE_BYTES, _PRIOR_STORE_S, _STORE_HALF_LIFE_S = 8.0 * _MIB, 0.008, 600.0
# A lookup, a wake-up of a thread, and one of the engine: what the smallest load took on two cores.
_LATENCY_S = 0.001


class PageBytes(Protocol):
    """Who holds the pages' memory: a runner (`runner.interface.Runner`, whose terms these are)."""

    def read_pages(self, page_ids: Sequence[int]) -> list[Bytes]:
        """Copy the bytes of pages; a copy never changes while anybody looks at it."""
        ...

    def write_pages(self, page_ids: Sequence[int], data: Sequence[Bytes]) -> None:
        """Fill pages."""
        ...


@dataclass(frozen=True, slots=True)
class PlacedTier:
    """One tier below the pool. `label` is its name in metrics, such as "1:disk".

    A page is stored when its key was seen `store_sights` times, or when to have its prompt would save more than
    `store_worth_s`, or at the latest when it is evicted if `stores_early` and the tier's budget allows it. Times are
    seconds.
    """

    label: str
    tier: Tier
    medium: str = "storage"
    locality: str = "local"
    store_sights: int = 2
    store_worth_s: float = 10.0
    stores_early: bool = True
    load_deadline_s: float = 5.0
    store_deadline_s: float = 60.0


@dataclass(slots=True)
class TierTally:
    """What was decided about one tier, beside what it counts itself. Times are seconds."""

    n_loads: int = 0  # begun
    n_loads_whole: int = 0  # every page came
    load_s: float = 0.0  # from asking to the last page
    saved_s: float = 0.0  # computing what came would have taken longer by so much
    loaded_bytes: int = 0
    n_pages_landed: int = 0
    n_pages_failed: int = 0  # asked for, and absent, damaged, refused or cancelled
    n_pages_late: int = 0
    n_pages_unused: int = 0  # loaded, and given up behind a page that did not come, or for want of room
    n_loads_without_room: int = 0  # not begun, or given up, as the pool or the snapshots had none
    n_recomputed: int = 0  # hits that were computed instead, as that was estimated to be faster
    n_stores: int = 0  # pages given to the tier
    n_stores_early: int = 0  # pages that were to be stored at first sight, as the budget allowed it
    stored_bytes: int = 0
    store_s: float = 0.0  # of the engine's thread, and of processors by the tier
    n_stores_skipped: int = 0  # pages worth storing, and not given, as the tier was behind
    n_stores_failed: int = 0


@dataclass(slots=True)
class Rig:
    """What loads and stores share. Owner: `kv.tiers.page_tiers.PageTiers`."""

    tiers: tuple[PlacedTier, ...]
    pool: PagePool
    pages: PageBytes
    clock: Clock
    page_bytes: int
    tallies: list[TierTally] = field(init=False)
    load_meters: list[RateMeter] = field(init=False)
    store_meters: list[RateMeter] = field(init=False)  # bytes a second of work, the engine's and the tier's
    budgets: list[StoreBudget] = field(init=False)
    prefill_meter: RateMeter = field(init=False)
    pinned: PinnedKeys = field(init=False)
    ask_meter: RateMeter = field(init=False)  # seconds of computing found, a second of waiting for answers
    _n_jobs: int = 0

    def __post_init__(self) -> None:
        self.tallies = [TierTally() for _ in self.tiers]
        self.load_meters = [RateMeter(_PRIOR_LOAD_BYTES, _PRIOR_LOAD_S, _LOAD_HALF_LIFE_S) for _ in self.tiers]
        self.pinned = PinnedKeys(self.clock)
        self.store_meters = [RateMeter(_PRIOR_STORE_BYTES, _PRIOR_STORE_S, _STORE_HALF_LIFE_S) for _ in self.tiers]
        self.budgets = [StoreBudget() for _ in self.tiers]
        self.ask_meter = RateMeter(_PRIOR_FOUND_S, _PRIOR_ASKED_S, _LOAD_HALF_LIFE_S)
        self.prefill_meter = RateMeter(_PRIOR_TOKENS, _PRIOR_TOKENS_S, _PREFILL_HALF_LIFE_S)

    def rates(self, place: int) -> Rates:
        """Return what is to be expected of a tier and of computing."""
        now_s = self.clock()
        return Rates(self.prefill_meter.rate(now_s), self.load_meters[place].rate(now_s), _LATENCY_S)

    def note_loaded(self, place: int, n_tokens: int, n_bytes: int, took_s: float) -> None:
        """Take note of a load that has ended, of which so much came."""
        now_s = self.clock()
        self.load_meters[place].add(n_bytes, took_s, now_s)
        saved_s = compute_s(n_tokens, self.rates(place)) - took_s
        self.budgets[place].saved(saved_s)
        tally = self.tallies[place]
        tally.load_s += took_s
        tally.loaded_bytes += n_bytes
        tally.saved_s += saved_s

    def note_stored(self, place: int, n_bytes: int, work_s: float) -> None:
        """Take note of what storing took, of the engine's thread or of the tier's."""
        self.store_meters[place].add(n_bytes, work_s, self.clock())
        self.tallies[place].store_s += work_s

    def next_job_id(self) -> int:
        """Return a number that no job has."""
        self._n_jobs += 1
        return self._n_jobs


def place_tiers(specs: Sequence[TierSpec], identity: TierIdentity, wake: Wake, clock: Clock) -> list[PlacedTier]:
    """Make the tiers that a person named, in order.

    Raises: ConfigError: one cannot be made; those before it are closed.
    """
    placed: list[PlacedTier] = []
    try:
        for spec in specs:
            rules = spec.admission
            placed.append(
                PlacedTier(
                    spec.label,
                    make_tier(spec, identity, wake, clock),
                    medium=spec.kind.medium,
                    locality=spec.kind.locality,
                    store_sights=rules.store_sights,
                    store_worth_s=rules.store_worth_s,
                    stores_early=rules.stores_early,
                    load_deadline_s=rules.load_deadline_s,
                    store_deadline_s=rules.store_deadline_s,
                )
            )
    except BaseException:
        for one in placed:
            one.tier.close()
        raise
    return placed


MakeTiers = Callable[[Callable[[], None], Clock], Sequence[PlacedTier]]
"""Makes tiers for an engine, told how to wake it, and its clock."""
