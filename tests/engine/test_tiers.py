"""The engine with tiers below its pool: what goes down, what comes up, and that no token depends on either."""

import pytest
from engine_kit import Bench
from tier_bench import TierBench, disk, heard_stores, scripted

from tiercel.kv.page_keys import extend, root_key
from tiercel.kv.tiers.interface import Answer
from tiercel.protocol.params import SamplingParams
from tiercel.testing.fake_runner import FakeRunner, expected_tokens, make_limits
from tiercel.testing.scripted_tier import Lie


def alone(prompt, n):
    return expected_tokens(prompt, n, SamplingParams(), seed=7)


def keys_of(prompt):
    return extend(root_key("w", "f16", 4), list(prompt), 4)


def test_a_restarted_engine_finds_its_pages_on_disk(tmp_path):
    first = TierBench(disk(tmp_path))
    first.add("a", range(23), max_tokens=3)
    first.run()
    assert first.tally().n_stores == 6  # five pages of the prompt, and one that its answer fills
    first.close()
    second = TierBench(disk(tmp_path))
    second.add("b", range(23), max_tokens=3)
    second.run()
    assert second.finals["b"].n_cached_tokens == 20
    assert second.finals["b"].cached_by_tier == {"1:disk": 20}
    assert second.tokens["b"] == first.tokens["a"] == alone(range(23), 3)
    second.close()


def test_what_the_pool_has_is_not_loaded(tmp_path):
    bench = TierBench(disk(tmp_path))
    for name in "ab":
        bench.add(name, range(23), max_tokens=3)
        bench.run()
    assert bench.finals["b"].n_cached_tokens == 20
    assert bench.finals["b"].cached_by_tier == {}
    assert bench.tally().n_loads == 0
    bench.close()


def test_pages_that_were_evicted_come_back_from_a_tier():
    bench = TierBench(scripted(), limits=make_limits(n_pages=8))
    bench.add("a", range(23), max_tokens=3)
    bench.run()
    bench.add("b", range(40, 63), max_tokens=3)
    bench.run()
    bench.add("c", range(23), max_tokens=3)
    bench.run()
    assert bench.finals["c"].n_cached_tokens == 20
    assert bench.finals["c"].cached_by_tier == {"1:scripted": 16}  # one was left in the pool
    assert bench.tokens["c"] == bench.tokens["a"] == alone(range(23), 3)
    bench.close()


def test_a_page_is_stored_when_its_key_is_seen_twice():
    bench = TierBench(scripted(store_sights=2))
    bench.add("a", range(23), max_tokens=3)
    bench.run()
    assert bench.tally().n_stores == 0
    bench.add("b", [*range(12), *range(50, 60)], max_tokens=3)
    bench.run()
    assert bench.tally().n_stores == 3  # the pages that both have
    bench.add("c", range(23), max_tokens=3)
    bench.run()
    assert bench.tally().n_stores == 5
    bench.close()


def test_a_prompt_that_is_dear_enough_is_stored_at_first_sight():
    bench = TierBench(scripted(store_sights=2, store_worth_s=0.01))
    bench.add("a", range(23), max_tokens=3)
    bench.run()
    assert bench.tally().n_stores == 5
    bench.close()


def test_a_page_seen_twice_is_stored_at_the_latest_when_it_is_evicted():
    held = []
    bench = TierBench(scripted(store_sights=2, keeps=held), limits=make_limits(n_pages=8))
    bench.tiers._demotions._paused_until_s[0] = 1e9  # it is behind
    for name in "ab":
        bench.add(name, range(23), max_tokens=2)
        Bench.run(bench)
    assert bench.tally().n_stores == 0
    bench.tiers._demotions._paused_until_s[0] = 0.0
    bench.add("c", range(40, 63), max_tokens=2)
    bench.run()
    assert len(held[0]._held) == 5
    bench.close()


def early(**options):
    """Give a bench whose pool has room for one prompt, and whose tier stores at second sight or early."""
    return TierBench(scripted(store_sights=2, **options), limits=make_limits(n_pages=8))


def run_alone(bench, name, prompt):
    bench.add(name, prompt, max_tokens=3)
    bench.run()
    assert bench.tokens[name] == alone(prompt, 3)
    return bench.finals[name].n_cached_tokens


def test_a_prompt_that_the_budget_pays_for_is_stored_when_it_is_evicted():
    bench = early()
    run_alone(bench, "a", range(23))
    assert bench.tally().n_stores_early == 5
    assert bench.tally().n_stores == 0  # the pool has it
    run_alone(bench, "b", range(40, 63))
    assert bench.tally().n_stores == 4  # one is still there
    credit_s = bench.tiers.snapshot()[0].credit_s
    assert run_alone(bench, "c", range(23)) == 20
    assert bench.finals["c"].cached_by_tier == {"1:scripted": 16}
    assert bench.tally().saved_s > 0
    assert bench.tiers.snapshot()[0].credit_s > credit_s  # what it saved may be spent on the next
    bench.close()


def test_a_prompt_is_stored_early_as_a_whole_or_not_at_all():
    bench = early()
    page_s = bench.runner.page_group.object_bytes / bench.tiers._rig.store_meters[0].rate(0.0)
    for n_pages, n_early in ((5, 0), (3, 3)):
        bench.tiers._rig.budgets[0].credit_s = 4.5 * page_s
        run_alone(bench, f"of {n_pages}", range(50 * n_pages, 50 * n_pages + 4 * n_pages + 2))
        assert bench.tally().n_stores_early == n_early
    bench.close()


def test_nothing_is_stored_early_without_credit_or_where_that_is_not_wanted():
    for bench in (early(), early(stores_early=False)):
        bench.tiers._rig.budgets[0].credit_s = 0.0 if bench.tiers._rig.tiers[0].stores_early else 1.0
        for i in range(4):
            run_alone(bench, f"r{i}", range(25 * i, 25 * i + 23))
        assert bench.tally().n_stores == 0
        bench.close()
        assert bench.tally().n_stores == 0


def test_what_is_to_be_stored_early_is_stored_when_the_engine_ends(tmp_path):
    first = TierBench(disk(tmp_path, store_sights=2))
    run_alone(first, "a", range(23))
    assert first.tally().n_stores == 0
    first.close()
    second = TierBench(disk(tmp_path, store_sights=2))
    assert run_alone(second, "b", range(23)) == 20
    second.close()


def test_a_reset_forgets_what_is_to_be_stored_early(tmp_path):
    bench = TierBench(disk(tmp_path, store_sights=2))
    run_alone(bench, "a", range(23))
    bench.core.reset_prefix_cache()
    bench.run()
    bench.close()
    assert bench.tally().n_stores == 0
    assert not list(tmp_path.rglob("*.kv"))


def test_what_a_tier_is_given_tells_how_often_it_was_used():
    held = []
    bench = TierBench(scripted(store_sights=3, keeps=held, stores_early=False))
    stored, submit = [], bench.tiers._rig.tiers[0].tier.submit_store
    bench.tiers._rig.tiers[0].tier.submit_store = lambda job: (stored.extend(job.items), submit(job))
    for name in "abc":
        run_alone(bench, name, range(23))
    assert [item.n_uses for item in stored] == [2] * 5
    bench.close()


def test_fifty_requests_that_share_a_prefix_on_disk_load_it_once(tmp_path):
    first = TierBench(disk(tmp_path))
    first.add("a", range(20), max_tokens=1)
    first.run()
    first.close()
    bench = TierBench(disk(tmp_path), limits=make_limits(n_slots=4, n_pages=64))
    for i in range(50):
        bench.add(f"r{i}", [*range(20), 30 + i], max_tokens=2)
    bench.run()
    assert bench.tally().n_loads == 1
    assert bench.tally().n_pages_landed == 5
    for i in range(50):
        assert bench.finals[f"r{i}"].n_cached_tokens == 20
        assert bench.tokens[f"r{i}"] == alone([*range(20), 30 + i], 2)
    bench.close()


def test_a_request_that_waits_for_a_tier_holds_up_nobody():
    bench = TierBench(scripted())
    key = keys_of(range(12))[0]
    bench.add("a", range(12), max_tokens=1)
    bench.run()
    bench.scheduler.pool.reset_cached()
    lies_of(bench)[key] = Lie.NEVER
    bench.add("slow", range(12), max_tokens=2)
    bench.add("quick", range(50, 60), max_tokens=2)
    for _ in range(6):
        bench.step()
    assert "quick" in bench.finals
    assert "slow" not in bench.finals
    bench.run()
    assert bench.tokens["slow"] == alone(range(12), 2)
    bench.close()


def lies_of(bench, place=0):
    return bench.tiers._rig.tiers[place].tier._tier.lies


@pytest.mark.parametrize("lie", list(Lie), ids=lambda lie: lie.name)
@pytest.mark.parametrize("at", [0, 2])
def test_a_tier_that_lies_about_a_page_changes_no_token(lie, at):
    """Text as if computed, within the deadline, and all pages back."""
    bench = TierBench(scripted())
    keys = keys_of(range(23))
    bench.add("a", range(23), max_tokens=3)
    bench.run()
    lies_of(bench)[keys[at]] = lie
    if lie is Lie.HIT_FOREVER:
        del bench.tiers._rig.tiers[0].tier._tier._held[keys[at]]
    bench.scheduler.pool.reset_cached()
    began_s = bench.clock()
    bench.add("b", range(23), max_tokens=3)
    bench.run()
    assert bench.tokens["b"] == alone(range(23), 3)
    assert bench.finals["b"].finish_reason == "length"
    assert bench.finals["b"].n_cached_tokens == (20 if lie is Lie.TWICE else 4 * at)
    assert bench.finals["b"].time_s - began_s < 6.0
    bench.close()


def test_a_failed_load_is_not_tried_again_until_it_is_stored_again():
    bench = TierBench(scripted())
    keys = keys_of(range(23))
    bench.add("a", range(23), max_tokens=3)
    bench.run()
    lies_of(bench)[keys[0]] = Lie.WRONG_BYTES
    for i in range(3):
        bench.scheduler.pool.reset_cached()
        bench.add(f"b{i}", range(23), max_tokens=3)
        bench.run()
        del_lie = lies_of(bench).pop(keys[0], None)
        assert (del_lie is not None) == (i == 0)
    assert bench.tally().n_pages_failed == 1
    assert bench.finals["b2"].n_cached_tokens == 20  # computing it stored it again
    bench.close()


def test_a_tier_that_gives_pages_slower_than_they_are_computed_is_not_waited_for():
    bench = TierBench(scripted())
    bench.add("a", range(23), max_tokens=3)
    bench.run()
    bench.scheduler.pool.reset_cached()
    rig = bench.tiers._rig
    rig.load_meters[0].add(1, 1000.0, bench.clock())
    bench.add("b", range(23), max_tokens=3)
    bench.run()
    assert bench.tally().n_recomputed == 1
    assert bench.finals["b"].n_cached_tokens == 0
    bench.close()


def test_loads_give_up_their_pages_before_anybody_is_preempted():
    bench = TierBench(scripted(), limits=make_limits(n_pages=12))
    key = keys_of(range(16))[2]
    bench.add("a", range(16), max_tokens=1)
    bench.run()
    bench.scheduler.pool.reset_cached()
    lies_of(bench)[key] = Lie.NEVER  # of a load that is never answered
    bench.tiers._rig.tiers[0].tier._tier.lookup = lambda key: Answer.HIT
    bench.add("long", range(40, 60), max_tokens=24)
    while not bench.tokens.get("long"):
        bench.step()
    bench.add("b", range(16), max_tokens=2)
    bench.step()
    assert bench.tiers.n_loads == 1
    bench.run()
    assert bench.scheduler.n_preemptions == 0
    assert bench.tokens["b"] == alone(range(16), 2)
    assert bench.tokens["long"] == alone(range(40, 60), 24)
    bench.close()


def test_a_reset_reaches_the_tiers(tmp_path):
    bench = TierBench(disk(tmp_path))
    bench.add("a", range(23), max_tokens=3)
    bench.run()
    done = bench.core.reset_prefix_cache()
    bench.run()
    assert done.result(0)
    bench.add("b", range(23), max_tokens=3)
    bench.run()
    assert bench.finals["b"].n_cached_tokens == 0
    bench.close()


def test_a_load_that_is_under_way_when_the_cache_is_reset_is_given_up():
    bench = TierBench(scripted())
    keys = keys_of(range(23))
    bench.add("a", range(23), max_tokens=3)
    bench.run()
    bench.scheduler.pool.reset_cached()
    lies_of(bench)[keys[4]] = Lie.NEVER
    bench.tiers._rig.tiers[0].tier._tier.lookup = lambda key: Answer.HIT
    bench.add("b", range(23), max_tokens=3)
    bench.step()
    assert bench.tiers.n_loads == 1
    bench.core.finish(["b"])
    done = bench.core.reset_prefix_cache()
    bench.step()
    assert done.result(0)
    bench.run()
    bench.close()


def test_another_models_pages_are_not_found(tmp_path):
    first = TierBench(disk(tmp_path))
    first.add("a", range(23), max_tokens=3)
    first.run()
    first.close()
    second = TierBench(disk(tmp_path, weights="other"))
    second.add("b", range(23), max_tokens=3)
    second.run()
    assert second.finals["b"].n_cached_tokens == 0
    second.close()


def test_a_salt_hides_pages_in_every_tier(tmp_path):
    first = TierBench(disk(tmp_path))
    first.add("a", range(23), max_tokens=3, salt="one")
    first.run()
    first.close()
    second = TierBench(disk(tmp_path))
    for name, salt in (("b", "two"), ("c", None), ("d", "one")):
        second.add(name, range(23), max_tokens=3, salt=salt)
    second.run()
    assert [second.finals[name].n_cached_tokens for name in "bcd"] == [0, 0, 20]
    second.close()


def test_a_failed_step_stores_nothing():
    held = []
    bench = TierBench(scripted(keeps=held), runner=FakeRunner(make_limits(), fail_steps=[1], is_strict=False))
    bench.add("a", range(23), max_tokens=3)
    bench.run()
    assert bench.finals["a"].error is not None
    assert len(held[0]._held) <= 4  # what the step before it filled
    bench.add("b", range(23), max_tokens=3)
    bench.run()
    assert bench.tokens["b"] == alone(range(23), 3)
    bench.close()


def test_a_request_may_say_which_tiers_it_loads_from():
    bench = TierBench(scripted())
    bench.add("a", range(23), max_tokens=3)
    bench.run()
    kinds = {"none": [], "remote": [{"locality": "REMOTE"}], "local": [{"medium": "STORAGE", "locality": "LOCAL"}]}
    for name, wanted in kinds.items():
        bench.scheduler.pool.reset_cached()
        bench.add(name, range(23), max_tokens=3, kv_transfer_params={"kv_load_tiers": wanted})
        bench.run()
    assert [bench.finals[name].n_cached_tokens for name in kinds] == [0, 0, 20]
    bench.close()


def test_of_a_request_no_more_is_stored_than_it_says():
    bench = TierBench(scripted())
    bench.add("a", range(23), max_tokens=6, kv_transfer_params={"max_offload_tokens": 11})
    bench.run()
    assert bench.tally().n_stores == 2
    bench.close()


def test_a_pinned_prompt_is_stored_at_first_sight_and_outlives_others_in_the_pool():
    bench = TierBench(scripted(store_sights=2), limits=make_limits(n_pages=16))
    bench.add("a", range(15), max_tokens=2, cache_hint={"pin": True, "ttl_s": 100})
    bench.run()
    assert bench.tally().n_stores == 3
    for i in range(4):
        bench.add(f"o{i}", range(20 * i + 16, 20 * i + 36), max_tokens=2)
        bench.run()
    assert bench.core.snapshot.n_pages_pinned == 3
    bench.add("b", range(15), max_tokens=2)
    bench.run()
    assert bench.finals["b"].n_cached_tokens == 12
    assert bench.finals["b"].cached_by_tier == {}
    bench.clock.advance(200)
    bench.add("c", [1, 2], max_tokens=2)
    bench.run()
    assert bench.core.snapshot.n_pages_pinned == 0
    bench.close()


def test_a_pinned_prompt_outlives_others_on_disk_as_long_as_its_pin_and_a_restart(tmp_path):
    limits = make_limits(n_pages=16)
    bench = TierBench(disk(tmp_path, capacity_bytes=6000), limits=limits)
    bench.add("a", range(15), max_tokens=2, cache_hint={"pin": True, "ttl_s": 1000})
    bench.run()
    bench.close_pinned()
    for round_ in range(2):
        bench = TierBench(disk(tmp_path, capacity_bytes=6000), limits=limits)
        for i in range(8):
            bench.add(f"o{i}", range(20 * (i % 4), 20 * (i % 4) + 20), max_tokens=2 + round_, salt=str((i, round_)))
            bench.run()
        bench.close()
    assert bench.core.snapshot.tiers[0].counters.n_evicted > 0
    bench = TierBench(disk(tmp_path, capacity_bytes=6000), limits=limits)
    bench.add("b", range(15), max_tokens=2)
    bench.run()
    assert bench.finals["b"].cached_by_tier == {"1:disk": 12}
    bench.close()


def test_a_pin_of_what_a_tier_has_already_is_told_once_and_again_when_half_of_it_is_over():
    bench = TierBench(scripted())
    stored = heard_stores(bench)
    pin = {"cache_hint": {"pin": True, "ttl_s": 100}}
    for name, more, n_told in (("a", {}, 0), ("b", pin, 3), ("c", pin, 0), ("d", {}, 0)):
        stored.clear()
        bench.add(name, range(15), max_tokens=2, **more)
        bench.run()
        assert sum(item.is_pinned for item in stored) == n_told, name
    bench.clock.advance(60)
    stored.clear()
    bench.add("e", range(15), max_tokens=2, **pin)
    bench.run()
    assert [95 < item.ttl_s <= 100 for item in stored] == [True] * 3
    bench.close_pinned()


def test_a_pin_gives_way_to_whoever_needs_the_room():
    bench = TierBench(scripted(), limits=make_limits(n_pages=8))
    bench.add("a", range(20), max_tokens=2, cache_hint={"pin": True})
    bench.run()
    assert bench.core.snapshot.n_pages_pinned == 5
    bench.add("b", range(30, 50), max_tokens=8)
    bench.run()
    assert bench.tokens["b"] == alone(range(30, 50), 8)
    assert bench.core.snapshot.n_pages_pinned == 0
    assert bench.scheduler.n_preemptions == 0
    bench.close()


def test_a_reset_forgets_pins():
    bench = TierBench(scripted())
    bench.add("a", range(20), max_tokens=2, cache_hint={"pin": True})
    bench.run()
    done = bench.core.reset_prefix_cache()
    bench.step()
    assert done.result(0)
    assert bench.core.snapshot.n_pages_pinned == 0
    bench.close()


def test_who_finds_nothing_below_is_soon_no_longer_made_to_wait_for_the_answer():
    """A tier that never knows at once, and has nothing: each wait costs a step, and the waits end."""
    bench = TierBench(scripted())
    tier = bench.tiers._rig.tiers[0].tier._tier
    answers = {}

    def lookup(key):  # knows the second time
        answers[key] = answers.get(key, 0) + 1
        return Answer.UNKNOWN if answers[key] == 1 else Answer.MISS

    tier.lookup = lookup
    n_waits = []
    for i in range(40):
        bench.add(f"r{i}", [i, *range(50, 60)], max_tokens=1)
        bench.step()
        n_waits.append(f"r{i}" not in bench.scheduler.running and bench.scheduler.n_loading == 1)
        bench.clock.advance(0.1)
        bench.tiers.news()
        bench.run()
    assert n_waits[0]
    assert not n_waits[-1]
    bench.clock.advance(3600)
    bench.add("later", [77, *range(50, 60)], max_tokens=1)
    bench.step()
    assert bench.scheduler.n_loading == 1  # it is tried again
    bench.run()
    bench.close()


def test_what_is_to_be_stored_when_the_engine_ends_is_stored(tmp_path):
    """Though only a few pages a round go down, and no round comes any more."""
    limits = make_limits(max_len_tokens=400, max_step_tokens=400, n_pages=128)
    first = TierBench(disk(tmp_path), limits=limits, max_num_batched_tokens=400)
    first.add("a", [i % 97 for i in range(300)], max_tokens=1)
    while "a" not in first.finals:
        first.step()
    assert first.tiers.is_awaiting
    first.core.shutdown()
    second = TierBench(disk(tmp_path), limits=limits, max_num_batched_tokens=400)
    second.add("b", [i % 97 for i in range(300)], max_tokens=1)
    second.run()
    assert second.finals["b"].n_cached_tokens == 296
    second.close()


def test_an_engine_that_ends_does_not_wait_for_a_tier_that_never_answers():
    bench = TierBench(scripted())
    bench.add("a", range(23), max_tokens=3)
    for key in keys_of(range(23)):
        lies_of(bench)[key] = Lie.NEVER
    while "a" not in bench.finals:
        bench.step()
    bench.core.shutdown()
    assert not bench.core.is_alive


def test_what_a_preemption_throws_away_comes_back_from_a_tier():
    """A preempted sequence will need its pages again: that is a second sight of them."""
    bench = TierBench(scripted(store_sights=2), limits=make_limits(n_pages=10), max_num_batched_tokens=32)
    bench.add("a", range(16), max_tokens=20)
    bench.add("b", range(30, 46), max_tokens=20)
    bench.run()
    assert bench.scheduler.n_preemptions > 0
    assert bench.tally().n_pages_landed > 0
    assert bench.tokens["a"] == alone(range(16), 20)
    assert bench.tokens["b"] == alone(range(30, 46), 20)
    bench.close()


def test_a_sequence_that_is_aborted_while_it_waits_for_a_tier_leaves_nothing_behind():
    bench = TierBench(scripted())
    bench.add("a", range(23), max_tokens=3)
    bench.run()
    bench.scheduler.pool.reset_cached()
    lies_of(bench)[keys_of(range(23))[4]] = Lie.NEVER
    bench.tiers._rig.tiers[0].tier._tier.lookup = lambda key: Answer.HIT
    bench.add("b", range(23), max_tokens=3)
    bench.step()
    assert bench.scheduler.n_loading == 1
    bench.core.finish(["b"])
    bench.run()
    assert bench.finals["b"].finish_reason == "abort"
    bench.clock.advance(10)
    bench.run()
    bench.close()


def test_an_engine_that_ends_while_a_sequence_waits_for_a_tier_answers_it():
    bench = TierBench(scripted())
    bench.add("a", range(23), max_tokens=3)
    bench.run()
    bench.scheduler.pool.reset_cached()
    lies_of(bench)[keys_of(range(23))[0]] = Lie.NEVER
    bench.tiers._rig.tiers[0].tier._tier.lookup = lambda key: Answer.HIT
    bench.add("b", range(23), max_tokens=3)
    bench.step()
    bench.core.shutdown()
    assert bench.finals["b"].error is not None
    assert bench.scheduler.pool.n_free == bench.scheduler.pool.n_pages
