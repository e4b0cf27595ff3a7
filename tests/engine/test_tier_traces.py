"""Random histories of an engine with a tiny pool and tiers that lie: every request ends with the tokens it gets alone,
every page goes back, and every page that a key names holds what the key says. `check()` runs after each step.
"""

from types import SimpleNamespace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_random_traces import (
    assert_right,
    assert_what_is_cached_is_what_its_keys_say,
    events,
    play,
    setups,
)
from tier_bench import ROOMY, TierBench, disk, scripted

from tiercel.testing.fake_runner import FakeRunner, early_at_random, make_limits
from tiercel.testing.scripted_tier import Lie

rules = st.fixed_dictionaries(
    {
        "store_sights": st.sampled_from([1, 2]),
        "store_worth_s": st.sampled_from([0.0, 10.0]),
        "load_deadline_s": st.sampled_from([0.05, 5.0]),
    }
)
capacities = st.sampled_from([150, 500, 3000, ROOMY])
# Which of the objects that a tier holds it lies about, and how.
plots = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(list(Lie))), max_size=6)


def bench_of(setup, makers, **runner_options):
    limits = make_limits(
        n_slots=setup.n_slots,
        n_pages=setup.n_pages,
        page_size_tokens=setup.page_size,
        max_logits_rows=setup.rows,
        max_step_tokens=32,
        state_bytes=1000 if setup.n_snapshots else 0,  # hybrids: pages that a state reaches are loaded
        n_snapshots=setup.n_snapshots or 0,
        snapshot_spacing_tokens=setup.spacing_pages * setup.page_size,
    )
    if setup.early is not None:
        runner_options["runs_early"] = early_at_random(setup.early)
    return TierBench(
        *makers,
        runner=FakeRunner(limits, compute_ns=setup.compute_ns, **runner_options),
        eos_ids=range(0, 97, 9) if setup.has_eos else (),
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.budget,
        long_prefill_token_threshold=setup.chunk,
        async_scheduling=setup.is_async,
        scheduling_policy="priority" if setup.by_priority else "fcfs",
    )


def plot(bench, tiers, lies):
    """Make tiers lie about some of what they hold."""
    for tier in tiers:
        held = list(tier._held)
        for i, lie in lies:
            if held:
                tier.lies[held[i % len(held)]] = lie


@settings(max_examples=150, deadline=None, derandomize=True)
@given(setups, st.lists(st.lists(events, min_size=1, max_size=8), min_size=1, max_size=3), rules, capacities, plots)
def test_with_tiers_that_lie_every_request_ends_with_the_tokens_it_gets_alone(setup, traces, rule, capacity, lies):
    held = []
    bench = bench_of(setup, [scripted(keeps=held, capacity_bytes=capacity, **rule), scripted(keeps=held, **rule)])
    all_sent, all_tokens = {}, {}  # states of earlier traces are kept
    for i, trace in enumerate(traces):
        sent = play(bench, setup, trace)
        bench.assert_idle()
        assert_right(bench, setup, sent)
        all_sent |= {(i, name): one for name, one in sent.items()}
        all_tokens |= {(i, name): tokens for name, tokens in bench.tokens.items()}
        seen = SimpleNamespace(scheduler=bench.scheduler, runner=bench.runner, tokens=all_tokens)
        assert_what_is_cached_is_what_its_keys_say(seen, all_sent)
        bench.finals.clear()
        bench.tokens = {}
        bench.firsts.clear()
        plot(bench, held, lies)
        bench.scheduler.pool.reset_cached()  # what comes now comes from the tiers
    bench.close()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(setups, st.lists(events, min_size=1, max_size=8), st.sets(st.integers(0, 25), min_size=1, max_size=4), rules)
def test_failing_steps_reach_no_tier(setup, trace, fail_steps, rule):
    """A second engine, which reads what the first stored, gets what it would compute."""
    held = []
    bench = bench_of(setup, [scripted(keeps=held, **rule)], fail_steps=fail_steps, is_strict=False)
    sent = play(bench, setup, trace)
    bench.assert_idle()
    assert_right(bench, setup, sent)
    stored = dict(held[0]._held)
    bench.core.shutdown()
    again = bench_of(setup, [scripted(keeps=held)])
    held[-1]._held.update(stored)
    sent = play(again, setup, trace)
    assert_right(again, setup, sent)
    again.close()


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(setups, st.lists(st.lists(events, min_size=1, max_size=6), min_size=2, max_size=3), capacities)
def test_engines_that_follow_each_other_on_one_folder_give_the_tokens_of_none(
    tmp_path_factory, setup, traces, capacity
):
    path = tmp_path_factory.mktemp("kv")
    for trace in traces:
        bench = bench_of(setup, [disk(path, capacity_bytes=4 * capacity)])
        sent = play(bench, setup, trace)
        bench.assert_idle()
        assert_right(bench, setup, sent)
        assert_what_is_cached_is_what_its_keys_say(bench, sent)
        bench.close()
