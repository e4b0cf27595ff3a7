"""The scheduler's policy: what comes first, who is preempted, what is found in the cache."""

from engine_kit import Bench

from tiercel.protocol.params import SamplingParams
from tiercel.testing.fake_runner import expected_tokens, make_limits


def alone(prompt, n):
    return expected_tokens(prompt, n, SamplingParams(), seed=7)


def plans_of(bench):
    """Record every plan that reaches the runner: a dict of slot -> tokens each."""
    plans = []
    submit = bench.runner.submit

    def record(plan):
        plans.append(dict(zip(plan.seq_slot.tolist(), plan.seq_tokens.tolist(), strict=True)))
        submit(plan)

    bench.runner.submit = record
    return plans


def test_a_long_prompt_never_makes_a_running_stream_miss_a_step():
    bench = Bench(max_num_batched_tokens=8)
    bench.add("stream", range(4), max_tokens=30)
    bench.step()
    plans = plans_of(bench)
    for i in range(3):
        bench.add(f"long{i}", [i, *range(40)], max_tokens=2)
    bench.run()
    slot = 0
    streaming = plans[: max(i for i, plan in enumerate(plans) if slot in plan) + 1]
    assert all(slot in plan for plan in streaming[:28])
    assert any(sum(plan.values()) == 8 for plan in streaming)


def test_long_prompts_share_the_budget_when_a_chunk_is_capped():
    bench = Bench(max_num_batched_tokens=12, long_prefill_token_threshold=8)
    plans = plans_of(bench)
    bench.add("long", range(60), max_tokens=2)
    bench.add("short", [9, 8, 7], max_tokens=2)
    bench.step()
    assert plans[0] == {0: 8, 1: 3}


def test_a_cap_does_not_slow_a_prompt_that_is_alone():
    bench = Bench(max_num_batched_tokens=12, long_prefill_token_threshold=8)
    plans = plans_of(bench)
    bench.add("long", range(60), max_tokens=2)
    bench.step()
    assert plans[0] == {0: 12}


def test_a_hit_skips_whole_pages_and_always_computes_one_token():
    bench = Bench()
    bench.add("a", range(12), max_tokens=2)
    bench.run()
    plans = plans_of(bench)
    bench.add("b", range(12), max_tokens=2)
    bench.run()
    assert plans[0] == {0: 4}
    assert bench.finals["b"].n_cached_tokens == 8
    assert bench.tokens["b"] == bench.tokens["a"] == alone(range(12), 2)
    snapshot = bench.core.snapshot
    assert (snapshot.n_total_prefix_queries_tokens, snapshot.n_total_prefix_hits_tokens) == (24, 8)


def test_an_answer_is_found_by_the_next_turn():
    bench = Bench()
    bench.add("a", range(6), max_tokens=7)
    bench.run()
    bench.add("b", [*range(6), *bench.tokens["a"], 1, 2, 3], max_tokens=2)
    bench.run()
    assert bench.finals["b"].n_cached_tokens == 12  # 13 tokens, of which the last was never computed


def test_a_page_that_may_be_written_again_is_not_found():
    """Where a drafter takes in the three tokens behind a place: neither while it runs nor when it has ended."""
    for n_unsettled, n_found in ((0, 12), (2, 8), (5, 8), (6, 4)):
        bench = Bench(limits=make_limits(n_unsettled_tokens=n_unsettled))
        bench.add("a", range(6), max_tokens=7)
        bench.run()
        bench.add("b", [*range(6), *bench.tokens["a"], 1, 2, 3], max_tokens=2)
        bench.run()
        assert bench.finals["b"].n_cached_tokens == n_found
        assert bench.tokens["b"] == alone([*range(6), *bench.tokens["a"], 1, 2, 3], 2)


def test_a_salt_hides_pages():
    bench = Bench()
    bench.add("a", range(12), max_tokens=2, salt="one")
    bench.run()
    bench.add("b", range(12), max_tokens=2, salt="two")
    bench.add("c", range(12), max_tokens=2)
    bench.run()
    assert bench.finals["b"].n_cached_tokens == bench.finals["c"].n_cached_tokens == 0


def test_requests_of_one_prompt_that_come_together_compute_it_once():
    bench = Bench(max_num_batched_tokens=40)
    for name in "abcd":
        bench.add(name, range(20), max_tokens=2)
    bench.run()
    assert [bench.finals[name].n_cached_tokens for name in "abcd"] == [0, 16, 16, 16]
    assert all(bench.tokens[name] == alone(range(20), 2) for name in "abcd")


def test_a_request_is_not_held_up_by_one_that_waits_for_its_prefix():
    bench = Bench(max_num_batched_tokens=24)
    plans = plans_of(bench)
    bench.add("a", range(20), max_tokens=2)
    bench.add("b", range(20), max_tokens=2)
    bench.add("c", [90, 91], max_tokens=2)
    bench.step()
    assert plans[0] == {0: 20, 1: 2}


def test_switched_off_nothing_is_found():
    bench = Bench(enable_prefix_caching=False)
    for name in "ab":
        bench.add(name, range(12), max_tokens=2)
        bench.run()
    assert bench.finals["b"].n_cached_tokens == 0
    assert bench.scheduler.pool.n_cached == 0


def preemption_bench(**config):
    return Bench(limits=make_limits(n_pages=8), max_num_batched_tokens=32, enable_prefix_caching=False, **config)


def test_the_victim_is_who_loses_least_and_still_gets_its_tokens():
    bench = preemption_bench()
    bench.add("long", range(11), max_tokens=16)
    bench.add("short", range(50, 54), max_tokens=16)
    bench.run().assert_idle()
    assert bench.finals["short"].n_preemptions >= 1
    assert bench.finals["long"].n_preemptions == 0
    assert bench.core.snapshot.n_total_tokens_lost > 0
    assert bench.tokens["long"] == alone(range(11), 16)
    assert bench.tokens["short"] == alone(range(50, 54), 16)


def test_the_worst_priority_is_preempted_although_it_loses_more():
    bench = preemption_bench(scheduling_policy="priority")
    bench.add("long", range(11), max_tokens=16, priority=5)
    bench.add("short", range(50, 54), max_tokens=16, priority=0)
    bench.run()
    assert bench.finals["long"].n_preemptions >= 1
    assert bench.finals["short"].n_preemptions == 0


def test_a_preempted_sequence_finds_its_pages_again_when_nobody_took_them():
    bench = Bench(limits=make_limits(n_pages=8), max_num_batched_tokens=32)
    bench.add("long", range(11), max_tokens=16)
    bench.add("short", range(50, 54), max_tokens=16)
    bench.run()
    assert bench.finals["short"].n_preemptions >= 1
    assert bench.core.snapshot.n_total_preemptions >= 1
    assert bench.tokens["short"] == alone(range(50, 54), 16)


def test_priority_goes_before_arrival_and_ties_by_arrival():
    bench = Bench(max_num_seqs=1, scheduling_policy="priority")
    order = []
    sink = bench.core._sink

    def keep(updates):
        order.extend(u.sequence_id for u in updates if u.finish_reason)
        sink(updates)

    bench.core.set_sink(keep)
    for name, priority in (("c", 1), ("d", 1), ("a", -3), ("b", 0)):
        bench.add(name, range(4), max_tokens=2, priority=priority)
    bench.run()
    assert order == ["a", "b", "c", "d"]


def test_first_come_is_first_served_and_no_later_request_passes_an_unfit_head():
    bench = Bench(limits=make_limits(n_pages=6), max_num_batched_tokens=64)
    plans = plans_of(bench)
    bench.add("a", range(12), max_tokens=2)
    bench.add("big", range(30, 46), max_tokens=2)
    bench.add("tiny", [70], max_tokens=2)
    bench.run()
    assert plans[0] == {0: 12}
    assert bench.firsts["big"].time_s <= bench.firsts["tiny"].time_s


def test_every_waiting_request_starts_after_a_bounded_number_of_steps():
    bench = Bench(limits=make_limits(n_pages=12), max_num_seqs=2, max_num_batched_tokens=8)
    for i in range(20):
        bench.add(f"s{i}", [i, *range(6)], max_tokens=5)
    n_rounds = 0
    while bench.step():
        n_rounds += 1
    # 20 sequences of 7 + 5 tokens, at most 2 at once: even one after the other they take 7 rounds each.
    assert n_rounds <= 20 * 7


def test_a_slot_is_not_given_away_while_a_step_names_it():
    expected = alone(range(5), 3)
    bench = Bench(limits=make_limits(n_slots=1), max_num_seqs=1, eos_ids=[expected[0]])
    bench.add("a", range(5), max_tokens=9)
    bench.add("b", range(30, 35), max_tokens=1)
    bench.run().assert_idle()  # the fake runner raises if it is
    assert bench.tokens["b"] == alone(range(30, 35), 1)
