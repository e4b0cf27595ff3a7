"""Recurrent states in tiers: they go down and come up with their pages, and whatever a tier does costs no token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_bench import ROOMY, TierBench, disk, heard_stores, scripted

from tiercel.kv.tiers.identity import object_key
from tiercel.protocol.params import SamplingParams
from tiercel.testing.fake_runner import FakeRunner, expected_tokens, make_limits
from tiercel.testing.scripted_tier import Lie

GREEDY = SamplingParams(temperature=0.0)


def make_bench(*makers, n_snapshots=8, n_pages=40, runner=None, **config):
    limits = make_limits(
        n_pages=n_pages,
        max_len_tokens=120,
        state_bytes=100,
        n_snapshots=n_snapshots,
        snapshot_spacing_tokens=16,
    )
    return TierBench(*makers, runner=FakeRunner(limits, **(runner or {})), max_num_batched_tokens=32, **config)


def words(n, first=0):
    return [(first + 7 * i) % 90 for i in range(n)]


def ask(bench, name, prompt, n=2, **more):
    bench.add(name, prompt, max_tokens=n, temperature=0.0, **more)
    bench.run()
    assert bench.tokens[name] == expected_tokens(prompt, n, GREEDY)
    return bench.firsts[name].n_cached_tokens


def keys_of(bench, prompt):
    from engine_kit import PageKeys, root_key

    size = bench.runner.limits.page_size_tokens
    return PageKeys(root_key("w", "f16", size), size).extend(prompt)


def test_a_prompt_is_found_again_after_a_restart(tmp_path):
    first = make_bench(disk(tmp_path))
    assert ask(first, "a", words(50)) == 0
    first.close()
    second = make_bench(disk(tmp_path))
    assert ask(second, "a", words(50)) == 48
    assert ask(second, "b", words(30) + words(20, 5)) == 16  # the longest that was kept before the texts part
    assert second.core.snapshot.n_total_snapshots_hit == 2
    second.close()


def test_a_state_larger_than_a_disks_queue_is_found_again_after_a_restart(tmp_path):
    """As Kimi K3's 449 MB are."""
    first = make_bench(disk(tmp_path, limits={"queued_store_bytes": 800}))
    assert first.runner.state_group.object_bytes > 800
    assert ask(first, "a", words(50)) == 0
    first.close()
    second = make_bench(disk(tmp_path))
    assert ask(second, "a", words(50)) == 48
    second.close()


def test_the_state_of_a_pinned_prompt_is_pinned_too():
    bench = make_bench(scripted())
    stored = heard_stores(bench)
    ask(bench, "a", words(50))
    assert not any(item.is_pinned for item in stored)
    stored.clear()
    ask(bench, "b", words(50), cache_hint={"pin": True})
    assert [item.key for item in stored if item.group_idx == 1 and item.is_pinned] == [
        object_key(keys_of(bench, words(50))[11], "state")
    ]
    bench.scheduler.states.expire(float("inf"))
    bench.close_pinned()


def test_states_are_not_copied_for_a_tier_that_just_refused_one():
    bench = make_bench(scripted(capacity_bytes=60))
    copied = []
    read_states = bench.runner.read_states
    bench.runner.read_states = lambda idxs: copied.extend(idxs) or read_states(idxs)
    ask(bench, "a", words(50))
    assert bench.tally().n_stores_failed > 0
    n_before = len(copied)
    bench.tiers.states._paused_until_s = [float("inf")]  # as if no time had passed
    ask(bench, "b", words(50, 3))
    assert len(copied) == n_before > 0
    bench.close()


def test_a_state_of_another_model_is_not_found(tmp_path):
    first = make_bench(disk(tmp_path))
    ask(first, "a", words(50))
    first.close()
    second = make_bench(disk(tmp_path, weights="others"))
    assert ask(second, "a", words(50)) == 0
    second.close()


def test_what_gave_way_comes_back_from_a_tier():
    bench = make_bench(scripted(), n_snapshots=4, n_pages=30)
    for i in range(4):
        assert ask(bench, f"a{i}", words(50, i)) == 0
    assert [ask(bench, f"b{i}", words(50, i)) for i in range(4)] == [48] * 4
    bench.close()


def test_several_sequences_wait_for_one_load(tmp_path):
    first = make_bench(disk(tmp_path))
    ask(first, "a", words(50))
    first.close()
    second = make_bench(disk(tmp_path))
    for i in range(3):
        second.add(f"s{i}", words(50), max_tokens=2, temperature=0.0)
    second.run()
    assert [second.firsts[f"s{i}"].n_cached_tokens for i in range(3)] == [48] * 3
    second.close()


def test_a_state_whose_page_is_nowhere_is_not_loaded():
    tiers = []
    bench = make_bench(scripted(keeps=tiers), n_snapshots=2, n_pages=30)
    ask(bench, "a", words(50))
    for key in keys_of(bench, words(50)):
        tiers[0]._held.pop(key, None)
    for i in range(4):
        ask(bench, f"other{i}", words(50, i + 1))
    n_loads = bench.tally().n_loads
    assert ask(bench, "again", words(50)) == 0
    assert bench.tally().n_loads == n_loads
    bench.close()


@pytest.mark.parametrize("lie", list(Lie))
def test_whatever_a_tier_does_with_a_state_the_tokens_are_right_and_the_place_comes_back(lie):
    tiers = []
    bench = make_bench(scripted(keeps=tiers), n_snapshots=2, n_pages=30)
    ask(bench, "a", words(50))
    for key in keys_of(bench, words(50)):
        tiers[0].lies[object_key(key, "state")] = lie
    for i in range(4):
        ask(bench, f"other{i}", words(50, i + 1))
    ask(bench, "again", words(50))
    bench.assert_idle()
    store = bench.scheduler.states.store
    assert store.n_free + store.n_kept == 2
    bench.core.shutdown()


def test_a_sequence_that_is_aborted_while_its_state_comes_leaves_nothing_behind(tmp_path):
    first = make_bench(disk(tmp_path))
    ask(first, "a", words(50))
    first.close()
    second = make_bench(disk(tmp_path))
    second.add("gone", words(50), max_tokens=2)
    second.core.step_once()
    second.core.finish(["gone"])
    second.run()
    assert ask(second, "again", words(50)) == 48
    second.close()


def test_a_reset_forgets_states_in_tiers_too():
    bench = make_bench(scripted())
    ask(bench, "a", words(50))
    done = bench.core.reset_prefix_cache()
    bench.run()
    assert done.result()
    assert ask(bench, "again", words(50)) == 0
    bench.close()


events = st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 9), st.integers(0, 5), st.booleans())


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    trace=st.lists(events, min_size=2, max_size=10),
    n_snapshots=st.sampled_from([1, 2, 4]),
    n_pages=st.sampled_from([24, 30, 60]),
    capacity=st.sampled_from([2000, 6000, ROOMY]),
    is_async=st.booleans(),
    fail_steps=st.sets(st.integers(0, 30), max_size=1),
)
def test_random_chats_over_a_tier_get_the_tokens_they_get_alone(
    trace, n_snapshots, n_pages, capacity, is_async, fail_steps
):
    bench = make_bench(
        scripted(capacity_bytes=capacity),
        n_snapshots=n_snapshots,
        n_pages=n_pages,
        runner={"fail_steps": fail_steps, "is_strict": not fail_steps},
        async_scheduling=is_async,
    )
    said, sent = [words(9)] * 3, {}
    for i, (chat, n_new, n, n_rounds, is_aborted) in enumerate(trace):
        prompt = said[chat] + words(n_new, i)
        prompt = prompt if len(prompt) + n <= 90 else words(9) + words(n_new, i)
        sent[f"s{i}"] = prompt, n
        bench.add(f"s{i}", prompt, max_tokens=n, temperature=0.0)
        for _ in range(n_rounds):
            bench.step()
        if is_aborted:
            bench.core.finish([f"s{i}"])
        said[chat] = prompt + expected_tokens(prompt, n, GREEDY)
    bench.run()
    bench.assert_idle()
    for name, (prompt, n) in sent.items():
        got, want = bench.tokens.get(name, []), expected_tokens(prompt, n, GREEDY)
        is_cut = bench.finals[name].error is not None or bench.finals[name].finish_reason == "abort"
        assert got == (want[: len(got)] if is_cut else want)
    bench.core.shutdown()
