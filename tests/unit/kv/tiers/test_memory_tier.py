"""The memory tier keeps the contract of a tier, alone and behind its guard."""

import time
from threading import Event

from tiercel.kv.tiers.guard import GuardedTier
from tiercel.kv.tiers.interface import Answer, Outcome
from tiercel.kv.tiers.memory import MemoryTier
from tiercel.testing.clock import VirtualClock
from tiercel.testing.tier_kit import IDENTITY, TierContract, TierDriver, body_of, bytes_of, key_of


class TestMemoryTier(TierContract):
    def make_tier(self, identity, wake, capacity_bytes):
        return MemoryTier(identity, capacity_bytes, wake, time.monotonic)


class TestGuardedMemoryTier(TierContract):
    def make_tier(self, identity, wake, capacity_bytes):
        inner = MemoryTier(identity, capacity_bytes, wake, time.monotonic)
        return GuardedTier("memory", inner, identity, time.monotonic, lookup_deadline_s=1e9, seals=False)

    # The guard's owner is our own code, which never stores an object of another length.
    test_objects_of_the_wrong_length_or_group_are_not_served = None


def test_chain_heads_stay_when_room_is_needed():
    woken = Event()
    tier = TierDriver(MemoryTier(IDENTITY, 512 * 20, woken.set, time.monotonic), woken)
    tier.store(range(15))
    tier.store(range(100, 110))
    held = [i for i in range(15) if key_of(i) in tier.tier._held]
    assert held == list(range(len(held)))
    assert 0 < len(held) < 15
    assert tier.tier.counters().n_evicted == 15 - len(held) + sum(
        key_of(i) not in tier.tier._held for i in range(100, 110)
    )


def test_a_time_to_live_ends_and_a_pin_outlives():
    woken, wall = Event(), VirtualClock(1000.0)
    tier = TierDriver(MemoryTier(IDENTITY, 512 * 20, woken.set, time.monotonic, wall=wall), woken)
    tier.submit_store([1], ttl_s=5.0)
    tier.submit_store([2], is_pinned=True)
    tier.submit_store([3], is_pinned=True, ttl_s=5.0)
    tier.finish()
    wall.advance(5.0)
    assert [tier.lookup(i) for i in (1, 3)] == [Answer.MISS, Answer.HIT]
    assert tier.load([1])[0].outcome is Outcome.ABSENT
    for i in range(100, 140):
        tier.store([i])
    assert [tier.lookup(i) for i in (2, 3)] == [Answer.HIT, Answer.MISS], "a pin that has ended keeps nothing"
    assert tier.store([1]) == [Outcome.DONE]
    assert bytes_of(tier.load([1])[0]) == body_of(1)
    tier.tier.check()
