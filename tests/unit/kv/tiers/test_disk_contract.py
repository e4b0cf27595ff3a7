"""The disk tier keeps the contract of a tier, alone and behind its guard."""

import time

import pytest

from tiercel.kv.tiers.disk import DiskTier
from tiercel.kv.tiers.guard import GuardedTier
from tiercel.testing.tier_kit import TierContract


class TestDiskTier(TierContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folders = (tmp_path / str(i) for i in range(100))

    def make_tier(self, identity, wake, capacity_bytes):
        return DiskTier(identity, next(self.folders), capacity_bytes, wake, time.monotonic)


class TestGuardedDiskTier(TestDiskTier):
    def make_tier(self, identity, wake, capacity_bytes):
        inner = super().make_tier(identity, wake, capacity_bytes)
        return GuardedTier("disk", inner, identity, time.monotonic, lookup_deadline_s=1e9, seals=False)

    test_objects_of_the_wrong_length_or_group_are_not_served = None
