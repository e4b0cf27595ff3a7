"""Loads: pages come up from tiers into the page pool, where sequences find them as any other hit. Knows no request.

    state of a sequence's ask     made so by `must_wait`                          the sequence
    new                           -                                               -
    asking                        a tier does not know yet, or still writes       waits, as long as for a load
    waiting                       its next page is being loaded, by whomever      waits, the load's deadline at most
    done                          all else: nothing to load, or no longer         is admitted, computes what is missing

    state of a page's landing     made so by
    asked                         `_begin`: its load has a page for it
    here                          `take`: the bytes came, whole; steps that may still write to the page are waited for
    landed                        `settle`: written, and its key set; its load holds it until the whole load has ended
    (gone)                        `take` of any other outcome, and with it all behind it; `surrender`

A load takes pages from the pool before it begins and pins the hits before it, so a landing is never homeless, and never
evicts what it continues. A tier does not write to pages, so a load can be given up at any time. Each sequence begins
one load at most; any number wait for it.

Invariants, verified by `check`: pages of landings carry no key before they landed and have one reference, the load's;
a load has landings, or is gone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiercel.kv.tiers.interface import Answer, Bytes, KeyResult, LoadItem, LoadJob, Outcome
from tiercel.kv.tiers.placed import PAGES, Rig
from tiercel.kv.tiers.policy import load_deadline_s, should_load

# Keys asked for behind the first that a tier does not know: enough that finding a long prompt takes few rounds.
_N_ASKED_AHEAD = 16
# Written in one round: about 2 ms of copying for a small model, so that running streams do not wait for more.
_N_WRITTEN = 32


@dataclass(slots=True, eq=False)
class Ask:
    """What one sequence wants of the tiers. Owner: the sequence; only this module, and `kv.tiers.states` its own lines,
    change what stands below the empty line.

    `load_from`: the places of the tiers it may load from; None: all. `n_store_pages`: pages of its beginning that may
    be stored; None: all. `stores_now`: at first sight. `pin_s`: for how long `n_pinned_pages` of it are to be kept.
    """

    load_from: frozenset[int] | None = None
    n_store_pages: int | None = None
    stores_now: bool = False
    pin_s: float | None = None
    n_pinned_pages: int = 0

    begun_s: float | None = None
    asked_at: int = -1  # the news when it last asked
    awaited: bytes | None = None
    has_decided: bool = False
    is_done: bool = False
    # Of `kv.tiers.states`.
    state_since_s: float | None = None
    state_key: bytes | None = None
    has_sought_state: bool = False


@dataclass(slots=True, eq=False)
class _Load:
    """Pages that were asked for together, by one sequence."""

    n_left: int  # landings that are neither landed nor gone
    fence: int  # the last step that may write to its pages
    hit_ids: list[int]  # of the pages before them, held
    landings: "list[_Landing]" = field(default_factory=list)  # of the chain that still counts


@dataclass(slots=True, eq=False)
class _Landing:
    """One page on its way."""

    key: bytes
    page_id: int
    place: int
    load: _Load
    job_id: int = -1
    data: Bytes | None = None
    has_landed: bool = False


@dataclass(slots=True, eq=False)
class _Job:
    """What one tier was asked for."""

    place: int
    begun_s: float
    n_open: int
    n_bytes: int = 0
    n_done: int = 0
    n_keys: int = 0


class Promotions:
    """Loads that are under way. Owner: `kv.tiers.page_tiers.PageTiers`."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._landings: dict[bytes, _Landing] = {}  # not landed yet
        self._loads: dict[_Load, None] = {}  # the newest last
        self._jobs: dict[int, _Job] = {}
        self._ask_s = max(placed.load_deadline_s for placed in rig.tiers)
        self._n_here = 0
        self._has_more = False
        self.n_news = 0  # how often something came of tiers
        self.origins: dict[int, tuple[bytes, int, float]] = {}  # page -> key, place, when it landed
        self.missed: list[tuple[int, bytes]] = []  # what a tier does not have, for whoever believes it does

    @property
    def n_loads(self) -> int:
        """Loads under way."""
        return len(self._loads)

    def n_active(self, place: int) -> int:
        """Count the jobs that a tier has not answered for."""
        return sum(job.place == place for job in self._jobs.values())

    @property
    def has_more(self) -> bool:
        """Whether `settle` left pages that it could have written."""
        return self._has_more

    def still_waits(self, ask: Ask) -> bool:
        """Say, in O(1), that nothing has changed for an ask since `must_wait` said it must wait."""
        if ask.is_done:
            return False
        if ask.awaited is not None:
            return ask.awaited in self._landings
        if ask.begun_s is None or ask.asked_at != self.n_news:
            return False
        return self._rig.clock() - ask.begun_s < self._ask_s

    def must_wait(self, ask: Ask, keys: Sequence[bytes], hit_ids: Sequence[int], fence: int) -> bool:
        """Say whether a sequence should wait for tiers, having asked them, or begun a load.

        `keys` are those of its pages that it can use, `hit_ids` the pages that the pool has of them, fewer. `fence` is
        the last step that was planned.

        Requires: the pool has room for all of the keys' pages.
        """
        if ask.is_done:
            return False
        now_s = self._rig.clock()
        if ask.begun_s is None:
            ask.begun_s = now_s
        missing = keys[len(hit_ids) :]
        ask.awaited = None
        if not ask.has_decided:
            run, is_open = self._run(ask, missing)
            if is_open and now_s - ask.begun_s < self._ask_s and (ask.asked_at >= 0 or self._is_asking_worth_it()):
                ask.asked_at = self.n_news
                return True
            ask.has_decided = True
            self._note_asked(ask, len(run))
            if run and self._is_worth_it(run):
                self._begin(run, hit_ids, fence)
        if missing[0] in self._landings:
            ask.awaited = missing[0]
            return True
        ask.is_done = True
        return False

    def take(self, place: int, result: KeyResult) -> None:
        """Take what a tier says of a key that it was asked to load."""
        job = self._jobs.get(result.job_id)
        if job is None:
            return
        tally = self._rig.tallies[place]
        self.n_news += 1
        job.n_open -= 1
        if result.outcome is Outcome.DONE and result.data is not None:
            job.n_bytes += memoryview(result.data).nbytes
            job.n_done += 1
        elif result.outcome is Outcome.LATE:
            tally.n_pages_late += 1
        else:
            tally.n_pages_failed += 1
        if job.n_open == 0:
            self._end_job(result.job_id, job)
        landing = self._landings.get(result.key)
        if landing is None or landing.job_id != result.job_id:
            tally.n_pages_unused += result.data is not None
        elif result.outcome is Outcome.DONE and result.data is not None:
            landing.data = result.data
            self._n_here += 1
        else:
            self._cut(landing)

    def settle(self, collected_id: int) -> None:
        """Write pages that are here, some of them, if no step can write to them any more."""
        ready: list[_Landing] = []
        for load in self._loads:
            if load.fence > collected_id:
                continue
            for landing in load.landings:
                if landing.data is None and not landing.has_landed:
                    break  # in the order of the chain, so that what has landed can be used
                if not landing.has_landed and len(ready) < _N_WRITTEN:
                    ready.append(landing)
        self._has_more = len(ready) == _N_WRITTEN
        if not ready:
            return
        data = [landing.data for landing in ready if landing.data is not None]
        self._rig.pages.write_pages([landing.page_id for landing in ready], data)
        now_s = self._rig.clock()
        for landing in ready:
            self._rig.pool.set_key(landing.page_id, landing.key)
            self.origins[landing.page_id] = landing.key, landing.place, now_s
            landing.data, landing.has_landed = None, True
            self._rig.tallies[landing.place].n_pages_landed += 1
            del self._landings[landing.key]
            self._n_here -= 1
            landing.load.n_left -= 1
            if landing.load.n_left == 0:
                self._end(landing.load)
        self.n_news += 1

    def surrender(self) -> bool:
        """Give up the newest load, so that its pages are free; False: there is none."""
        if not self._loads:
            return False
        load = next(reversed(self._loads))
        left = next((landing for landing in load.landings if not landing.has_landed), None)
        assert left is not None, "kv.tiers: a load that has landed is kept"
        self._rig.tallies[left.place].n_loads_without_room += 1
        self._cut(left)
        return True

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        pool = self._rig.pool
        n_here = 0
        for key, landing in self._landings.items():
            assert landing.load in self._loads, "kv.tiers: a page lands for nobody"
            assert pool.key_of(landing.page_id) is None, "kv.tiers: a page has a key before it has landed"
            assert pool.n_refs(landing.page_id) == 1, "kv.tiers: a page that lands is used"
            assert key == landing.key, "kv.tiers: a landing of another key"
            n_here += landing.data is not None
        assert n_here == self._n_here, "kv.tiers: arrivals are miscounted"
        for load in self._loads:
            n_left = sum(not landing.has_landed for landing in load.landings)
            assert n_left == load.n_left > 0, "kv.tiers: a load without landings is kept"

    def held_pages(self) -> list[int]:
        """Return the pages that loads hold, one entry a reference."""
        return [p for load in self._loads for p in (*load.hit_ids, *(one.page_id for one in load.landings))]

    def _run(self, ask: Ask, missing: Sequence[bytes]) -> tuple[list[tuple[bytes, int]], bool]:
        """Return the keys that can be loaded next, with their places, and whether some answers are still out."""
        run: list[tuple[bytes, int]] = []
        n_open = 0
        for key in missing:
            if key in self._landings:
                continue
            place, answer = self._find(ask, key)
            if answer is Answer.HIT:
                if n_open == 0:
                    run.append((key, place))
            elif answer is Answer.UNKNOWN and n_open < _N_ASKED_AHEAD:
                n_open += 1
            else:
                break
        return run, n_open > 0

    def _find(self, ask: Ask, key: bytes) -> tuple[int, Answer]:
        found = Answer.MISS
        for place, placed in enumerate(self._rig.tiers):
            if ask.load_from is not None and place not in ask.load_from:
                continue
            answer = placed.tier.lookup(key)
            if answer is Answer.HIT:
                return place, answer
            if answer is Answer.MISS:
                self.missed.append((place, key))
            else:
                found = Answer.UNKNOWN
        return -1, found

    def _is_asking_worth_it(self) -> bool:
        """Say whether waiting for answers finds more computing than it takes time.

        A tier that others write to does not know at once what it has; of traffic that it has nothing of, it should
        not cost each request a step.
        """
        return self._rig.ask_meter.rate(self._rig.clock()) > 1.0

    def _note_asked(self, ask: Ask, n_found: int) -> None:
        if ask.asked_at >= 0 and ask.begun_s is not None:
            now_s = self._rig.clock()
            found_s = n_found * self._rig.pool.page_size_tokens / self._rig.prefill_meter.rate(now_s)
            self._rig.ask_meter.add(found_s, now_s - ask.begun_s, now_s)

    def _is_worth_it(self, run: Sequence[tuple[bytes, int]]) -> bool:
        """Decide for all of it; the slowest tier decides for what comes from several."""
        rig, size = self._rig, self._rig.pool.page_size_tokens
        places = {place for _, place in run}
        is_worth_it = all(should_load(len(run) * size, len(run) * rig.page_bytes, rig.rates(place)) for place in places)
        if not is_worth_it:
            for place in places:
                rig.tallies[place].n_recomputed += 1
        return is_worth_it

    def _begin(self, run: Sequence[tuple[bytes, int]], hit_ids: Sequence[int], fence: int) -> None:
        rig = self._rig
        rig.pool.pin(hit_ids)  # before anything is acquired: an acquisition could evict them
        page_ids = rig.pool.acquire(len(run))
        if page_ids is None:
            rig.pool.release(hit_ids)
            for place in {place for _, place in run}:
                rig.tallies[place].n_loads_without_room += 1
            return
        load = _Load(len(run), fence, list(hit_ids))
        self._loads[load] = None
        by_place: dict[int, list[_Landing]] = {}
        for (key, place), page_id in zip(run, page_ids, strict=True):
            landing = _Landing(key, page_id, place, load)
            self._landings[key] = landing
            load.landings.append(landing)
            by_place.setdefault(place, []).append(landing)
        now_s, n_tokens = rig.clock(), len(run) * rig.pool.page_size_tokens
        for place, landings in by_place.items():
            placed, job_id = rig.tiers[place], rig.next_job_id()
            for landing in landings:
                landing.job_id = job_id
            self._jobs[job_id] = _Job(place, now_s, len(landings), n_keys=len(landings))
            rig.tallies[place].n_loads += 1
            deadline_s = now_s + load_deadline_s(n_tokens, rig.rates(place), placed.load_deadline_s)
            placed.tier.submit_load(LoadJob(job_id, [LoadItem(one.key, PAGES) for one in landings], deadline_s))

    def _end_job(self, job_id: int, job: _Job) -> None:
        del self._jobs[job_id]
        n_tokens = job.n_done * self._rig.pool.page_size_tokens
        self._rig.note_loaded(job.place, n_tokens, job.n_bytes, self._rig.clock() - job.begun_s)
        self._rig.tallies[job.place].n_loads_whole += job.n_done == job.n_keys

    def _cut(self, landing: _Landing) -> None:
        """Give up a page and all of its load behind it: nobody can use them without it."""
        load = landing.load
        i = load.landings.index(landing)
        gone, load.landings = load.landings[i:], load.landings[:i]
        for one in gone:
            assert not one.has_landed, "kv.tiers: a page landed before the one before it"
            del self._landings[one.key]
            if one.data is not None:
                self._n_here -= 1
                self._rig.tallies[one.place].n_pages_unused += 1
        self._rig.pool.release([one.page_id for one in gone])
        load.n_left -= len(gone)
        self.n_news += 1
        if load.n_left == 0:
            self._end(load)

    def _end(self, load: _Load) -> None:
        """Let the pages of a load be as any others: cached, its tail the first to go."""
        del self._loads[load]
        self._rig.pool.release([*load.hit_ids, *(landing.page_id for landing in load.landings)])
