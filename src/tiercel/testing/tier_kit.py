"""What any KV tier must do, as tests: subclass `TierContract`, give `make_tier`, and pytest collects it.

A tier may work on its own threads; the kit waits for `wake`, never for a time. `PATIENCE_S` only bounds how long a
broken tier can hang a test.
"""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from threading import Event

from tiercel.kv.tiers.identity import ObjectGroup, TierIdentity
from tiercel.kv.tiers.interface import (
    Answer,
    Bytes,
    Clock,
    KeyResult,
    LoadItem,
    LoadJob,
    Outcome,
    StoreItem,
    StoreJob,
    Tier,
    Wake,
)

PATIENCE_S = 300.0
FOREVER_S = float("inf")
PAGES, STATES = 0, 1  # the groups of IDENTITY
_LARGE_BYTES = 72 << 20
IDENTITY = TierIdentity(
    model_digest="kit",
    weights_digest="kit weights",
    page_size_tokens=16,
    groups=(
        ObjectGroup("page", "float16", "none", ("layer", "kv", "token", "head", "dim"), (2, 2, 16, 1, 4), 512),
        ObjectGroup("state", "float32", "none", ("layer", "dim"), (2, 8), 64),
    ),
)


def key_of(i: int) -> bytes:
    """Give the i-th key."""
    return blake2b(str(i).encode(), digest_size=32).digest()


def body_of(i: int, group_idx: int = PAGES) -> bytes:
    """Give the bytes that belong to the i-th key."""
    return random.Random(i).randbytes(IDENTITY.groups[group_idx].object_bytes)


def bytes_of(result: KeyResult) -> bytes | None:
    """Give what was loaded."""
    return None if result.data is None else bytes(result.data)


class TierDriver:
    """Drives one tier: numbers the jobs, waits for results, and raises when a key is reported twice or unasked."""

    def __init__(self, tier: Tier, woken: Event, clock: Clock = time.monotonic) -> None:
        self.tier = tier
        self._woken = woken
        self._clock = clock
        self._n_jobs = 0
        self._open: set[tuple[int, bytes]] = set()
        self._is_load: dict[int, bool] = {}
        self.results: dict[tuple[int, bytes], KeyResult] = {}

    def submit_store(
        self,
        ids: Sequence[int],
        group_idx: int = PAGES,
        *,
        data: Bytes | None = None,
        deadline_s: float = FOREVER_S,
        is_pinned: bool = False,
        ttl_s: float | None = None,
    ) -> int:
        """Store the objects of a chain, or `data` for each, without waiting; return the job."""
        items = [
            StoreItem(key_of(i), group_idx, depth, body_of(i, group_idx) if data is None else data, is_pinned, ttl_s)
            for depth, i in enumerate(ids)
        ]
        self._note(ids, is_load=False)
        self.tier.submit_store(StoreJob(self._n_jobs, items, deadline_s))
        return self._n_jobs

    def submit_load(self, ids: Sequence[int], group_idx: int = PAGES, *, deadline_s: float = FOREVER_S) -> int:
        """Load, without waiting; return the job."""
        self._note(ids, is_load=True)
        self.tier.submit_load(LoadJob(self._n_jobs, [LoadItem(key_of(i), group_idx) for i in ids], deadline_s))
        return self._n_jobs

    def poll(self) -> int:
        """Take what is there; return how many results that was."""
        found = self.tier.poll()
        for result in found:
            assert (result.job_id, result.key) in self._open, "tier: a result is reported twice, or was never asked for"
            assert (result.data is not None) == (result.outcome is Outcome.DONE and self._is_load[result.job_id])
            self._open.remove((result.job_id, result.key))
            self.results[result.job_id, result.key] = result
        return len(found)

    def finish(self) -> None:
        """Wait until every key is reported."""
        while True:
            self._woken.clear()
            self.poll()
            if not self._open:
                self.tier.check()
                return
            assert self._woken.wait(PATIENCE_S), f"tier: {len(self._open)} keys are never reported"

    def lookup(self, i: int) -> Answer:
        """Ask until the answer is MISS or HIT."""
        while True:
            self._woken.clear()
            answer = self.tier.lookup(key_of(i))
            if answer in (Answer.MISS, Answer.HIT):
                return answer
            self.poll()
            assert self._woken.wait(PATIENCE_S), f"tier: a lookup stays {answer}"

    def store(self, ids: Sequence[int], group_idx: int = PAGES) -> list[Outcome]:
        """Store and wait."""
        job_id = self.submit_store(ids, group_idx)
        self.finish()
        return [self.results[job_id, key_of(i)].outcome for i in ids]

    def load(self, ids: Sequence[int], group_idx: int = PAGES) -> list[KeyResult]:
        """Load and wait."""
        job_id = self.submit_load(ids, group_idx)
        self.finish()
        return [self.results[job_id, key_of(i)] for i in ids]

    def _note(self, ids: Sequence[int], *, is_load: bool) -> None:
        self._n_jobs += 1
        self._is_load[self._n_jobs] = is_load
        self._open |= {(self._n_jobs, key_of(i)) for i in ids}


class TierContract:
    """Subclass it as `Test...` and give `make_tier`."""

    def make_tier(self, identity: TierIdentity, wake: Wake, capacity_bytes: int) -> Tier:
        """Make an empty tier."""
        raise NotImplementedError

    @contextmanager
    def opened(self, capacity_bytes: int = 1 << 20) -> Iterator[TierDriver]:
        """Give a driver of a new tier; close it and look for what it left unreported."""
        woken = Event()
        driver = TierDriver(self.make_tier(IDENTITY, woken.set, capacity_bytes), woken)
        yield driver
        driver.finish()
        driver.tier.close()
        assert driver.tier.poll() == []

    def test_what_is_stored_is_a_hit_and_loads_with_the_same_bytes(self) -> None:
        """For pages and for snapshots."""
        with self.opened() as tier:
            for group_idx, ids in ((PAGES, [1, 2, 3]), (STATES, [4])):
                assert tier.store(ids, group_idx) == [Outcome.DONE] * len(ids)
                assert [tier.lookup(i) for i in ids] == [Answer.HIT] * len(ids)
                for i, result in zip(ids, tier.load(ids, group_idx), strict=True):
                    assert result.outcome is Outcome.DONE
                    assert bytes_of(result) == body_of(i, group_idx)

    def test_what_was_never_stored_is_a_miss_and_does_not_load(self) -> None:
        """A load of it is an outcome."""
        with self.opened() as tier:
            assert tier.lookup(1) is Answer.MISS
            assert tier.load([1])[0].outcome is Outcome.ABSENT
            assert tier.lookup(1) is Answer.MISS

    def test_a_load_of_several_keys_succeeds_for_those_that_are_there(self) -> None:
        """Partial results are normal."""
        with self.opened() as tier:
            tier.store([1, 3])
            outcomes = [result.outcome for result in tier.load([1, 2, 3])]
            assert outcomes == [Outcome.DONE, Outcome.ABSENT, Outcome.DONE]

    def test_a_job_without_keys_reports_nothing(self) -> None:
        """Zero is a number of keys."""
        with self.opened() as tier:
            tier.submit_load([])
            tier.submit_store([])
            assert tier.tier.drain(PATIENCE_S)
            assert tier.poll() == 0

    def test_data_of_a_store_may_change_as_soon_as_it_is_submitted(self) -> None:
        """So no page is held for a tier."""
        with self.opened() as tier:
            data = bytearray(body_of(1))
            tier.submit_store([1], data=memoryview(data))
            data[:] = bytes(len(data))
            tier.finish()
            assert bytes_of(tier.load([1])[0]) == body_of(1)

    def test_loaded_bytes_stay_the_same_whatever_the_tier_does_later(self) -> None:
        """They belong to who polled them."""
        with self.opened() as tier:
            tier.store([1])
            (result,) = tier.load([1])
            tier.tier.reset()
            tier.store([2, 3, 4])
            tier.load([2, 3, 4])
            assert bytes_of(result) == body_of(1)

    def test_objects_of_the_wrong_length_or_group_are_not_served(self) -> None:
        """A snapshot is no page."""
        with self.opened() as tier:
            job_id = tier.submit_store([1], PAGES, data=body_of(1)[:-1])
            tier.finish()
            assert tier.results[job_id, key_of(1)].outcome is Outcome.FAILED
            tier.store([2], STATES)
            assert tier.load([2], PAGES)[0].outcome in (Outcome.FAILED, Outcome.ABSENT)

    def test_storing_what_is_held_is_done(self) -> None:
        """Equal keys mean equal bytes."""
        with self.opened() as tier:
            assert tier.store([1]) + tier.store([1]) == [Outcome.DONE] * 2
            assert tier.tier.usage().n_objects == 1
            assert bytes_of(tier.load([1])[0]) == body_of(1)

    def test_two_loads_of_one_key_are_both_answered(self) -> None:
        """One may join the other."""
        with self.opened() as tier:
            tier.store([1])
            jobs = [tier.submit_load([1]) for _ in range(5)]
            tier.finish()
            assert [bytes_of(tier.results[job_id, key_of(1)]) for job_id in jobs] == [body_of(1)] * 5

    def test_every_key_of_a_flood_is_reported_once(self) -> None:
        """A full queue refuses; it neither blocks nor forgets."""
        with self.opened() as tier:
            for i in range(0, 1000, 4):
                tier.submit_store(range(i, i + 4))
                tier.submit_load(range(i, i + 4))
            tier.finish()
            assert len(tier.results) == 2000

    def test_use_never_exceeds_capacity(self) -> None:
        """Storing goes on when full: something else is given up."""
        with self.opened(8192) as tier:
            for i in range(100):
                assert tier.store([i]) == [Outcome.DONE]
                assert tier.tier.usage().used_bytes <= tier.tier.usage().capacity_bytes <= 8192
            assert tier.lookup(99) is Answer.HIT

    def test_what_can_never_fit_is_refused(self) -> None:
        """With an outcome, and without harm."""
        with self.opened(128) as tier:
            assert tier.store([1]) == [Outcome.REFUSED]
            assert tier.lookup(1) is Answer.MISS
            assert tier.tier.usage().used_bytes == 0

    def test_an_object_larger_than_most_queues_is_stored_and_loaded(self) -> None:
        """A recurrent state may be larger than all pages that wait: what bounds a queue must let it pass, alone."""
        pages, states = IDENTITY.groups
        identity = replace(IDENTITY, groups=(pages, replace(states, object_bytes=_LARGE_BYTES)))
        woken = Event()
        tier = TierDriver(self.make_tier(identity, woken.set, 4 * _LARGE_BYTES), woken)
        data = bytearray(random.Random(1).randbytes(4096) * (_LARGE_BYTES // 4096))
        assert tier.store([1]) == [Outcome.DONE]
        job_id = tier.submit_store([2], STATES, data=data)
        tier.finish()
        assert tier.results[job_id, key_of(2)].outcome is Outcome.DONE
        (result,) = tier.load([2], STATES)
        assert result.data is not None
        assert result.data == data
        assert bytes_of(tier.load([1])[0]) == body_of(1)
        tier.tier.close()

    def test_touching_unknown_keys_does_nothing(self) -> None:
        """Owners touch what they use, wherever it was found."""
        with self.opened() as tier:
            tier.store([1])
            tier.tier.touch([key_of(1), key_of(2)])
            assert tier.lookup(2) is Answer.MISS

    def test_after_a_reset_nothing_stored_before_is_found(self) -> None:
        """Also what was on its way."""
        with self.opened() as tier:
            tier.store([1])
            tier.submit_store([2, 3])
            tier.submit_load([1])
            tier.tier.reset()
            assert [tier.lookup(i) for i in (1, 2, 3)] == [Answer.MISS] * 3
            tier.finish()
            assert [tier.lookup(i) for i in (1, 2, 3)] == [Answer.MISS] * 3
            assert tier.tier.usage().n_objects == 0

    def test_after_a_drain_everything_can_be_polled_at_once(self) -> None:
        """Nothing is aborted."""
        with self.opened() as tier:
            job_id = tier.submit_store([1, 2])
            assert tier.tier.drain(PATIENCE_S)
            assert tier.poll() == 2
            assert tier.results[job_id, key_of(2)].outcome is Outcome.DONE

    def test_a_closed_tier_still_answers(self) -> None:
        """Every key is reported, and nothing is found."""
        with self.opened() as tier:
            tier.store([1])
            tier.submit_load([1])
            tier.submit_store([2])
            tier.tier.close()
            assert tier.lookup(1) is Answer.MISS
            late = tier.submit_load([1])
            tier.finish()
            assert tier.results[late, key_of(1)].outcome is Outcome.CANCELLED

    def test_a_job_past_its_deadline_is_late_and_not_done(self) -> None:
        """Its owner has given up on it."""
        with self.opened() as tier:
            tier.store([1])
            job_id = tier.submit_load([1], deadline_s=-FOREVER_S)
            tier.finish()
            assert tier.results[job_id, key_of(1)].outcome is Outcome.LATE
            assert bytes_of(tier.load([1])[0]) == body_of(1)

    def test_counters_tell_what_was_done(self) -> None:
        """Bytes are those of the objects at least."""
        with self.opened() as tier:
            tier.store([1, 2])
            assert [tier.lookup(i) for i in (1, 2, 3)] == [Answer.HIT, Answer.HIT, Answer.MISS]
            tier.load([1])
            counters = tier.tier.counters()
            assert (counters.n_queries, counters.n_hits) == (3, 2)
            assert (counters.n_stored, counters.n_loaded) == (2, 1)
            assert counters.written_bytes >= 1024
            assert counters.read_bytes >= 512

    def test_in_any_history_a_load_gives_the_right_bytes_or_none(self) -> None:
        """Random jobs, resets and polls in a tier that is always full."""
        for seed in range(5):
            rng = random.Random(seed)
            with self.opened(16_384) as tier:
                for _ in range(200):
                    ids = rng.sample(range(60), rng.randint(1, 5))
                    what = rng.choice(
                        ["store", "load", "load", "poll", "touch", "finish"] + ["reset"] * (rng.random() < 0.1)
                    )
                    if what in ("store", "load"):
                        (tier.submit_store if what == "store" else tier.submit_load)(ids)
                    elif what == "touch":
                        tier.tier.touch([key_of(i) for i in ids])
                    elif what == "reset":
                        tier.tier.reset()
                    elif what == "poll":
                        tier.poll()
                    else:
                        tier.finish()
                tier.finish()
                bodies = {key_of(i): body_of(i) for i in range(60)}
                loaded = [result for result in tier.results.values() if result.data is not None]
                assert loaded, "the history loads something"
                assert all(bytes_of(result) == bodies[result.key] for result in loaded)
