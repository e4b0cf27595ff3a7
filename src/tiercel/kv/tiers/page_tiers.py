"""The tiers below the page pool, as the engine uses them: pages go down when they are worth it and come up when they
are asked for. Knows no request; `engine.scheduler` asks, `engine.core` gives it time.

It joins `kv.tiers.promotion` (loads), `kv.tiers.demotion` (stores) and the tiers, each behind its guard. All calls come
from the engine's thread, and none waits but `close`. The pool's pages are the only place that steps read: what a tier
gives is in a page with its key, verified, or it is not there at all.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from tiercel.kv.page_pool import PagePool
from tiercel.kv.snapshots import SnapshotStore
from tiercel.kv.tiers.demotion import Demotions
from tiercel.kv.tiers.interface import Clock, TierCounters, Usage
from tiercel.kv.tiers.placed import PageBytes, PlacedTier, Rig, TierTally
from tiercel.kv.tiers.policy import Rates
from tiercel.kv.tiers.promotion import Ask, Promotions
from tiercel.kv.tiers.states import StateBytes, StateTiers

_CLOSE_S = 5.0  # for stores that are under way when the engine ends


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One tier at one moment."""

    label: str
    usage: Usage
    counters: TierCounters
    tally: TierTally
    rates: Rates
    n_active_loads: int = 0
    n_active_stores: int = 0
    credit_s: float = 0.0  # what storing at first sight may cost

    def as_dict(self) -> dict[str, int | float]:
        """Return all numbers by name."""
        parts = asdict(self.usage), asdict(self.counters), asdict(self.tally), asdict(self.rates)
        own = {
            "n_active_loads": self.n_active_loads,
            "n_active_stores": self.n_active_stores,
            "credit_s": self.credit_s,
        }
        return {name: value for part in parts for name, value in part.items()} | own


class PageTiers:
    """All tiers of one engine. Owner: its scheduler."""

    def __init__(
        self, tiers: Sequence[PlacedTier], pool: PagePool, pages: PageBytes, page_bytes: int, clock: Clock
    ) -> None:
        self._rig = Rig(tuple(tiers), pool, pages, clock, page_bytes)
        self._promotions = Promotions(self._rig)
        self._demotions = Demotions(self._rig)
        self.states: StateTiers | None = None  # of a model that has a recurrent state
        self._is_closed = False
        pool.on_evict = self._demotions.evict

    def add_states(self, store: SnapshotStore, states: StateBytes, object_bytes: int) -> None:
        """Move recurrent states too. Requires: the tiers' identity has a second group, of states."""
        self._demotions.stores_early = False  # pages alone are of no use, and states are stored at second sight
        self.states = StateTiers(self._rig, store, states, object_bytes)

    @property
    def labels(self) -> tuple[str, ...]:
        """The tiers' names, in order."""
        return tuple(placed.label for placed in self._rig.tiers)

    @property
    def n_loads(self) -> int:
        """Loads under way, of pages and of states."""
        return self._promotions.n_loads + (0 if self.states is None else self.states.n_loads)

    @property
    def has_work(self) -> bool:
        """Whether a round could do something without waiting for a tier."""
        has_work = self._promotions.has_more or self._demotions.has_work
        return has_work or (self.states is not None and self.states.has_work)

    @property
    def is_awaiting(self) -> bool:
        """Whether a tier owes an answer, which may be late."""
        return self.n_loads > 0 or self._is_behind

    @property
    def _is_behind(self) -> bool:
        return self._demotions.is_behind or (self.states is not None and self.states.is_behind)

    @property
    def _n_answered(self) -> int:
        n_states = 0 if self.states is None else self.states.n_news
        return self._promotions.n_news + self._demotions.n_answered + n_states

    def places(self, kinds: Sequence[tuple[str | None, str | None]]) -> frozenset[int]:
        """Return the places of the tiers of any of these media and localities; None is any."""
        return frozenset(
            place
            for place, placed in enumerate(self._rig.tiers)
            for medium, locality in kinds
            if medium in (None, placed.medium) and locality in (None, placed.locality)
        )

    # What the scheduler asks.

    def still_waits(self, ask: Ask) -> bool:
        """See `Promotions.still_waits`."""
        return self._promotions.still_waits(ask)

    def must_wait(self, ask: Ask, keys: Sequence[bytes], hit_ids: Sequence[int], fence: int) -> bool:
        """See `Promotions.must_wait`."""
        must_wait = self._promotions.must_wait(ask, keys, hit_ids, fence)
        self._note_missed()
        return must_wait

    def surrender(self) -> bool:
        """Give up a load, so that the pool has more pages free; False: there is none."""
        return self._promotions.surrender()

    def admitted(self, ask: Ask, keys: Sequence[bytes], hit_ids: Sequence[int], *, is_first: bool) -> dict[str, int]:
        """Take note of a sequence that begins: all keys of its known tokens, and the pages that were found of them.

        `is_first`: it was not preempted. Returns: how many of the pages came from which tier while it waited.
        """
        n_max = len(keys) if ask.n_store_pages is None else min(len(keys), ask.n_store_pages)
        if is_first:
            self._pin(ask, keys)
            self._demotions.see(keys[:n_max], is_worthy=ask.stores_now)
        n = min(n_max, len(hit_ids))
        self._demotions.offer(keys[:n], hit_ids[:n])
        for placed in self._rig.tiers if hit_ids else ():
            placed.tier.touch(keys[: len(hit_ids)])
        came: dict[str, int] = {}
        if ask.begun_s is not None:
            for key, page_id in zip(keys, hit_ids, strict=False):
                found, place, landed_s = self._promotions.origins.get(page_id, (b"", 0, 0.0))
                if found == key and landed_s >= ask.begun_s:
                    label = self._rig.tiers[place].label
                    came[label] = came.get(label, 0) + 1
        return came

    def preempted(self, ask: Ask, keys: Sequence[bytes]) -> None:
        """Take note that a chain will be needed again: that is a sight of it."""
        self._demotions.see(keys if ask.n_store_pages is None else keys[: ask.n_store_pages])

    def filled(self, ask: Ask | None, page_id: int, key: bytes, depth: int, step_id: int) -> None:
        """Take note of a page of a sequence that got a key, and of the step that makes it true."""
        if ask is None or ask.n_store_pages is None or depth < ask.n_store_pages:
            self._demotions.fill(page_id, key, depth, step_id)
        else:
            self._demotions.keep(page_id, depth, step_id)

    def collected(self, step_id: int) -> None:
        """Take note that a step, and all before it, have ended."""
        self._demotions.collected(step_id)

    # What the engine's loop calls.

    def stepped(self, took_s: float) -> None:
        """Take note of how long a step took: a small part of that may go into storing at first sight."""
        for budget in self._rig.budgets:
            budget.stepped(took_s)

    def computed(self, n_tokens: int, took_s: float) -> None:
        """Take note of what a step computed: it tells what loading saves."""
        self._rig.prefill_meter.add(n_tokens, took_s, self._rig.clock())

    def work(self, collected_id: int) -> bool:
        """Take what tiers have to say, write pages that have come, and give tiers a few pages to store.

        Returns: whether something came up, so that who waits may go on.
        """
        states = self.states
        n_before = self._promotions.n_news + (0 if states is None else states.n_news)
        for place, placed in enumerate(self._rig.tiers):
            for result in placed.tier.poll():
                if result.data is not None:
                    self._demotions.note_stored(place, result.key)
                self._promotions.take(place, result)
                self._demotions.take(place, result)
                if states is not None:
                    states.take(place, result)
        self._promotions.settle(collected_id)
        self._demotions.work()
        if states is not None:
            states.work()
        return self._promotions.n_news + (0 if states is None else states.n_news) > n_before

    def news(self) -> None:
        """Take note that a tier has found something out, so that who asked asks again."""
        self._promotions.n_news += 1

    def reset(self) -> None:
        """Forget what tiers hold. Requires: no sequence runs."""
        self.give_up()
        for placed in self._rig.tiers:
            placed.tier.reset()
        self._demotions.reset()
        self._rig.pinned.clear()
        if self.states is not None:
            self.states.reset()

    def give_up(self) -> None:
        """Give up all loads: the pool gets their pages back."""
        while self._promotions.surrender():
            pass
        if self.states is not None:
            self.states.give_up()

    def close(self) -> None:
        """Give up loads, store for a while what is to be stored, and end the tiers. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.give_up()
        self._demotions.finish()
        self._finish_stores(self._rig.clock() + _CLOSE_S)
        for placed in self._rig.tiers:
            placed.tier.close()

    def _finish_stores(self, until_s: float) -> None:
        """Copy and store what waits for that, as fast as the tiers take it, until a time."""
        while self._is_behind and (left_s := until_s - self._rig.clock()) > 0:
            self.work(-1)
            if self.has_work:
                continue
            n_before = self._n_answered
            for placed in self._rig.tiers:
                placed.tier.drain(left_s)
            self.work(-1)
            if n_before == self._n_answered and not self.has_work:
                return  # a tier that is done and has not answered never will

    def snapshot(self) -> tuple[TierSnapshot, ...]:
        """Return what each tier holds and has done."""
        return tuple(self._snapshot(place, placed) for place, placed in enumerate(self._rig.tiers))

    def _snapshot(self, place: int, placed: PlacedTier) -> TierSnapshot:
        n_loads, n_stores = (0, 0) if self.states is None else self.states.n_active(place)
        return TierSnapshot(
            placed.label,
            placed.tier.usage(),
            placed.tier.counters(),
            replace(self._rig.tallies[place]),
            self._rig.rates(place),
            n_loads + self._promotions.n_active(place),
            n_stores + self._demotions.n_active(place),
            self._rig.budgets[place].credit_s,
        )

    def held_pages(self) -> list[int]:
        """Return the pages that loads hold, one entry a reference."""
        return self._promotions.held_pages()

    def check(self) -> None:
        """Raise AssertionError when an invariant of loads, stores or a tier is broken."""
        self._promotions.check()
        self._demotions.check()
        if self.states is not None:
            self.states.check()
        for placed in self._rig.tiers:
            placed.tier.check()

    def _pin(self, ask: Ask, keys: Sequence[bytes]) -> None:
        """See to it that the tiers hear of a pin, also those that have the objects."""
        if ask.pin_s is None:
            return
        for key in self._rig.pinned.pin(keys[: ask.n_pinned_pages], ask.pin_s):
            for place in range(len(self._rig.tiers)):
                self._demotions.note_missed(place, key)
                if self.states is not None:
                    self.states.note_unstored(place, key)

    def _note_missed(self) -> None:
        for place, key in self._promotions.missed:
            self._demotions.note_missed(place, key)
        self._promotions.missed.clear()
