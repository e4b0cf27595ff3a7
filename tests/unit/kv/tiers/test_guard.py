"""A guarded tier keeps the contract, and the deadline, whatever the tier behind it does."""

import time
from threading import Event

import pytest

from tiercel.kv.tiers.guard import N_FAULTS_MAX, GuardedTier, sealed_identity
from tiercel.kv.tiers.interface import Answer, Outcome
from tiercel.testing.clock import VirtualClock
from tiercel.testing.scripted_tier import Lie, ScriptedTier
from tiercel.testing.tier_kit import IDENTITY, TierContract, TierDriver, body_of, key_of


class TestScriptedTier(TierContract):
    def make_tier(self, identity, wake, capacity_bytes):
        return ScriptedTier(identity, wake, capacity_bytes, time.monotonic)


class TestGuardedTier(TierContract):
    def make_tier(self, identity, wake, capacity_bytes):
        inner = ScriptedTier(identity, wake, capacity_bytes, time.monotonic)
        return GuardedTier("scripted", inner, identity, time.monotonic, seals=False)

    # The guard's owner is our own code, which never stores an object of another length.
    test_objects_of_the_wrong_length_or_group_are_not_served = None


class TestSealedTier(TierContract):
    def make_tier(self, identity, wake, capacity_bytes):
        inner = ScriptedTier(sealed_identity(identity), wake, capacity_bytes, time.monotonic)
        return GuardedTier("scripted", inner, identity, time.monotonic, seals=True)

    test_objects_of_the_wrong_length_or_group_are_not_served = None


def guarded(*, seals=True):
    """A driver over a guarded tier that does not lie yet, with objects 1 and 2 stored."""
    clock, woken = VirtualClock(), Event()
    inner = ScriptedTier(sealed_identity(IDENTITY) if seals else IDENTITY, woken.set, 1 << 20, clock)
    driver = TierDriver(GuardedTier("scripted", inner, IDENTITY, clock, seals=seals), woken)
    driver.store([1, 2])
    return driver, inner, clock


@pytest.mark.parametrize("lie", [Lie.WRONG_LENGTH, Lie.WRONG_BYTES, Lie.NO_DATA, Lie.RAISES], ids=str)
def test_a_lie_about_a_load_fails_it_and_the_key_is_a_miss_from_then_on(lie):
    tier, inner, _ = guarded()
    inner.lies[key_of(1)] = lie
    (result,) = tier.load([1])
    assert result.outcome is Outcome.FAILED
    assert tier.lookup(1) is Answer.MISS
    assert tier.tier.counters().n_lies > 0
    inner.lies.clear()
    assert tier.load([2])[0].data == body_of(2)
    tier.store([1])
    assert tier.lookup(1) is Answer.HIT


def test_a_result_told_twice_is_reported_once():
    tier, inner, _ = guarded()
    inner.lies[key_of(1)] = Lie.TWICE
    assert tier.load([1])[0].data == body_of(1)
    assert tier.tier.counters().n_lies == 1


@pytest.mark.parametrize("lie", [Lie.NEVER, Lie.WRONG_KEY], ids=str)
def test_a_key_that_is_never_answered_is_late_at_its_deadline(lie):
    tier, inner, clock = guarded()
    inner.lies[key_of(1)] = lie
    job_id = tier.submit_load([1, 2], deadline_s=5.0)
    clock.advance(4.9)
    assert tier.poll() == 1
    clock.advance(0.1)
    assert tier.poll() == 1
    assert tier.results[job_id, key_of(1)].outcome is Outcome.LATE
    assert tier.results[job_id, key_of(2)].outcome is Outcome.DONE
    inner.lies.clear()
    assert tier.lookup(1) is Answer.MISS
    tier.tier.check()


def test_an_answer_after_the_deadline_is_dropped_and_is_no_lie():
    tier, inner, clock = guarded()
    inner.poll = lambda: []
    job_id = tier.submit_load([1], deadline_s=5.0)
    clock.advance(5.0)
    tier.poll()
    del inner.poll
    assert tier.poll() == 0
    assert tier.results[job_id, key_of(1)].outcome is Outcome.LATE
    assert tier.tier.counters().n_lies == 0


def test_a_lookup_without_an_answer_is_a_miss_at_its_deadline():
    tier, inner, clock = guarded()
    inner.lies[key_of(3)] = Lie.NEVER
    assert tier.tier.lookup(key_of(3)) is Answer.UNKNOWN
    clock.advance(0.9)
    assert tier.tier.lookup(key_of(3)) is Answer.UNKNOWN
    clock.advance(0.2)
    assert tier.tier.lookup(key_of(3)) is Answer.MISS


def test_a_key_that_fails_to_load_is_not_a_hit_again():
    tier, inner, _ = guarded()
    inner.lies[key_of(9)] = Lie.HIT_FOREVER
    assert tier.lookup(9) is Answer.HIT
    assert tier.load([9])[0].outcome is Outcome.FAILED
    assert tier.lookup(9) is Answer.MISS


def test_a_tier_that_keeps_failing_is_left_alone_and_tried_again_later():
    tier, inner, clock = guarded()
    inner.lies[key_of(1)] = Lie.RAISES
    for _ in range(N_FAULTS_MAX):
        tier.load([1])
    assert tier.lookup(2) is Answer.MISS
    assert tier.load([2])[0].outcome is Outcome.REFUSED
    assert tier.tier.counters().n_degraded == 1
    clock.advance(30.0)
    assert tier.lookup(2) is Answer.HIT
    tier.load([1])
    assert tier.lookup(2) is Answer.MISS, "one fault is enough the second time"


@pytest.mark.parametrize("call", ["lookup", "submit_load", "submit_store", "poll", "touch", "usage"])
def test_a_tier_whose_call_waits_is_left_alone_at_once(call):
    """A thread that waits in a call cannot be taken back: but it happens once."""
    tier, inner, clock = guarded()
    asked, ask = [], getattr(inner, call)

    def wait(*words):
        asked.append(call)
        clock.advance(10.0)
        return ask(*words)

    setattr(inner, call, wait)
    tier.store([3])
    tier.tier.lookup(key_of(1))
    tier.tier.touch([key_of(1)])
    tier.tier.usage()
    tier.load([1])
    n_asked = len(asked)
    assert n_asked in (1, 2), "poll and usage are asked of a tier that is left alone too"
    assert tier.tier.lookup(key_of(1)) is Answer.MISS
    assert tier.load([1])[0].outcome is Outcome.REFUSED
    assert tier.tier.counters().n_degraded == 1
    setattr(inner, call, ask)
    clock.advance(30.0)
    assert tier.load([2])[0].data == body_of(2)


def test_what_a_tier_itself_found_late_and_what_it_was_spared_is_counted():
    tier, inner, _ = guarded()
    tier.load([1, 2])
    late = tier.submit_load([1], deadline_s=0.0)
    tier.poll()
    assert tier.results[late, key_of(1)].outcome is Outcome.LATE
    inner.lies[key_of(2)] = Lie.RAISES
    for _ in range(N_FAULTS_MAX):
        tier.load([2])
    n_refused = tier.tier.counters().n_refused
    tier.load([2])
    counters = tier.tier.counters()
    assert (counters.n_late, counters.n_refused - n_refused) == (1, 1)


def test_how_long_lookups_were_waited_for_is_counted():
    tier, inner, clock = guarded()
    inner.lies[key_of(3)] = Lie.NEVER
    tier.tier.lookup(key_of(3))
    clock.advance(0.5)
    inner.lies.clear()
    assert tier.tier.lookup(key_of(3)) is Answer.MISS
    assert tier.tier.lookup(key_of(1)) is Answer.HIT
    counters = tier.tier.counters()
    assert (counters.n_lookups_waited, counters.lookup_wait_s) == (1, 0.5)


def test_a_tier_whose_reset_raises_is_never_asked_again():
    tier, inner, clock = guarded()
    inner.reset = lambda: 1 / 0
    tier.tier.reset()
    clock.advance(1e9)
    assert tier.lookup(1) is Answer.MISS
    assert tier.store([3]) == [Outcome.REFUSED]


def test_unsealed_bytes_are_checked_by_length_only():
    tier, inner, _ = guarded(seals=False)
    inner.lies[key_of(1)] = Lie.WRONG_LENGTH
    assert tier.load([1])[0].outcome is Outcome.FAILED
