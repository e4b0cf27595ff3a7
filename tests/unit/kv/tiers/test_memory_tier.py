"""The memory tier keeps the contract of a tier, alone and behind its guard."""

import time

from tiercel.kv.tiers.guard import GuardedTier
from tiercel.kv.tiers.memory import MemoryTier
from tiercel.testing.tier_kit import TierContract


class TestMemoryTier(TierContract):
    def make_tier(self, identity, wake, capacity_bytes):
        return MemoryTier(identity, capacity_bytes, wake, time.monotonic)


class TestGuardedMemoryTier(TierContract):
    def make_tier(self, identity, wake, capacity_bytes):
        inner = MemoryTier(identity, capacity_bytes, wake, time.monotonic)
        return GuardedTier("memory", inner, identity, time.monotonic, seals=False)

    # The guard's owner is our own code, which never stores an object of another length.
    test_objects_of_the_wrong_length_or_group_are_not_served = None


def test_chain_heads_stay_when_room_is_needed():
    from threading import Event

    from tiercel.testing.tier_kit import IDENTITY, TierDriver, key_of

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
