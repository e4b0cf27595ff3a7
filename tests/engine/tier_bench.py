"""An engine on a fake runner with tiers below its pool, stepped by hand; what its tests of tiers share."""

from threading import Event

from engine_kit import Bench

from tiercel.kv.tiers.disk import DiskTier
from tiercel.kv.tiers.disk_state import DiskLimits
from tiercel.kv.tiers.guard import GuardedTier, sealed_identity
from tiercel.kv.tiers.identity import TierIdentity
from tiercel.kv.tiers.placed import PlacedTier
from tiercel.testing.fake_runner import FakeRunner, make_limits
from tiercel.testing.scripted_tier import ScriptedTier
from tiercel.testing.tier_kit import PATIENCE_S

ROOMY = 1 << 20


def identity_of(runner, weights="w"):
    groups = [group for group in (runner.page_group, runner.state_group) if group is not None]
    return TierIdentity("fake", weights, runner.limits.page_size_tokens, tuple(groups))


def disk(path, *, capacity_bytes=ROOMY, ops=None, weights="w", rest_s=30.0, limits=None, **placed):
    """Give what makes a disk tier."""
    limits = DiskLimits(n_readers=1, retry_s=rest_s, **(limits or {}))

    def make(identity, wake, clock):
        tier = DiskTier(identity, path, capacity_bytes, wake, clock, limits=limits, ops=ops)
        return GuardedTier("disk", tier, identity, clock, rest_s=rest_s, seals=False), placed

    make.weights = weights
    return make


def scripted(*, lies=None, capacity_bytes=ROOMY, keeps=None, rest_s=30.0, **placed):
    """Give what makes a tier in memory; `keeps`, a list, gets it."""

    def make(identity, wake, clock):
        tier = ScriptedTier(sealed_identity(identity), wake, capacity_bytes, clock, lies)
        if keeps is not None:
            keeps.append(tier)
        return GuardedTier("scripted", tier, identity, clock, rest_s=rest_s, seals=True), placed

    make.weights = "w"
    return make


def heard_stores(bench):
    """Give a list that gets whatever the first tier is given from now on."""
    tier, heard = bench.tiers._rig.tiers[0].tier._tier, []
    submit_store = tier.submit_store

    def submit(job):
        heard.extend(job.items)
        submit_store(job)

    tier.submit_store = submit
    return heard


class TierSteps:
    """Of a bench: steps until all has ended, and waits for tiers that have threads by their wake-ups."""

    def make_tiers(self, makers, runner):
        """Give what makes the tiers of a core."""
        self.woken = Event()

        def make(wake, clock):
            def heard():
                wake()
                self.woken.set()

            found = []
            for i, maker in enumerate(makers, 1):
                tier, placed = maker(identity_of(runner, maker.weights), heard, clock)
                found.append(PlacedTier(f"{i}:{tier.name}", tier, **({"store_sights": 1} | placed)))
            return found

        return make

    @property
    def tiers(self):
        return self.scheduler.tiers

    def settle(self):
        """Let the tiers come to rest: what is to be stored is stored."""
        for _ in range(10_000):
            self.woken.clear()
            self.step()
            for placed in self.tiers._rig.tiers:
                placed.tier.drain(PATIENCE_S)
            if not self.core.has_work and not self.tiers.is_awaiting and self.core._commands.empty():
                return self
            if not self.core.has_work:
                self.clock.advance(0.1)
        raise AssertionError("the tiers do not come to rest")

    def run(self, n_max=20_000):
        """Step until every sequence has ended; while it waits for a tier with threads, wait for its wake-up."""
        for _ in range(n_max):
            self.woken.clear()
            goes_on = self.step()
            if not self.core.has_work:
                return self.settle()
            if not goes_on and self.core._commands.empty():
                # A tier that has nothing more to say is late, or never answers: time passes until its deadline.
                if all(placed.tier.drain(0.0) for placed in self.tiers._rig.tiers):
                    self.clock.advance(0.25)
                else:
                    assert self.woken.wait(PATIENCE_S)
        raise AssertionError("the engine does not come to an end")

    def tally(self, place=0):
        return self.tiers._rig.tallies[place]

    def assert_idle(self):
        super().assert_idle()
        assert self.tiers.n_loads == 0
        assert not self.tiers.held_pages()
        assert self.scheduler.pool.n_free == self.scheduler.pool.n_pages

    def close(self):
        self.assert_idle()
        self.core.shutdown()

    def close_pinned(self):
        """Close what still keeps prompts in its pool."""
        self.scheduler.pins.clear()
        self.close()


class TierBench(TierSteps, Bench):
    """On a fake runner."""

    def __init__(self, *makers, runner=None, limits=None, **config):
        runner = runner or FakeRunner(limits or make_limits())
        super().__init__(runner=runner, make_tiers=self.make_tiers(makers, runner), **config)
        self.settle()
