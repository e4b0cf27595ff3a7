"""Prefix caching of models with recurrent state, on the fake runner: where states are saved and what is found again."""

import pytest
from engine_kit import Bench

from tiercel.protocol.params import SamplingParams
from tiercel.testing.fake_runner import FakeRunner, expected_tokens, make_limits

SIZE = 4


def make_bench(*, spacing=1000, n_snapshots=12, runner=None, limits=None, **config):
    sizes = {
        "state_bytes": 100,
        "n_snapshots": n_snapshots,
        "snapshot_spacing_tokens": spacing,
        "n_pages": 80,
    }
    sizes |= {"max_len_tokens": 160, "n_slots": 4} | (limits or {})
    return Bench(runner=FakeRunner(make_limits(**sizes), **(runner or {})), max_num_batched_tokens=32, **config)


def ask(bench, name, prompt, n=1, **more):
    """Run one request to its end; return how many of its tokens were found, and its own."""
    bench.add(name, prompt, max_tokens=n, temperature=0.0, **more)
    bench.run()
    assert bench.tokens[name] == expected_tokens(prompt, n, SamplingParams(temperature=0.0))
    bench.assert_idle()
    return bench.firsts[name].n_cached_tokens, bench.tokens[name]


def kept(bench):
    return sorted(s.n_tokens for s in bench.scheduler.states.store._kept.values())


def words(n, first=0):
    return [(first + 7 * i) % 90 for i in range(n)]


# Where.


def test_the_end_of_a_prompt_is_kept_at_its_last_page_boundary():
    bench = make_bench()
    assert ask(bench, "first", words(22)) == (0, expected_tokens(words(22), 1, SamplingParams(temperature=0.0)))
    assert kept(bench) == [20]
    assert ask(bench, "again", words(22))[0] == 20
    assert ask(bench, "longer", words(30))[0] == 20
    assert ask(bench, "shorter", words(19))[0] == 0


def test_the_end_of_an_output_is_kept_too_and_a_chat_goes_on_from_there():
    bench = make_bench()
    _, tokens = ask(bench, "turn1", words(10), 15)
    assert kept(bench) == [8, 20, 24]  # the prompt's, and the two newest of the output
    assert ask(bench, "turn2", words(10) + tokens + words(9, 3))[0] == 24


def test_a_long_prompt_is_kept_at_every_spacing():
    bench = make_bench(spacing=16)
    ask(bench, "first", words(71))
    assert kept(bench) == [16, 32, 48, 64, 68]


@pytest.mark.parametrize("n_shared", range(17, 71, 3))
def test_a_restart_after_a_long_prompt_computes_at_most_a_spacing_again(n_shared):
    """Wherever the second text leaves the first."""
    bench = make_bench(spacing=16)
    ask(bench, "first", words(71))
    n_cached, _ = ask(bench, "second", words(n_shared) + words(12, 50))
    assert n_shared - 16 <= n_cached <= n_shared


def test_spacings_hold_in_an_output_too():
    bench = make_bench(spacing=16, n_snapshots=30)
    ask(bench, "long", words(6), 60)
    assert kept(bench) == [4, 16, 32, 48, 60, 64]


def test_a_fork_is_kept_when_a_second_text_finds_it_and_serves_the_third():
    bench = make_bench()
    ask(bench, "a", words(30) + words(9, 50))
    assert ask(bench, "b", words(30) + words(9, 60))[0] == 0
    assert 28 in kept(bench)
    assert ask(bench, "c", words(30) + words(9, 70))[0] == 28


def test_chunks_end_where_a_state_is_to_be_saved_and_nowhere_else():
    bench = make_bench(spacing=16)
    starts = []
    submit = bench.runner.submit
    bench.runner.submit = lambda plan: (starts.append((plan.seq_start[0], plan.seq_tokens[0])), submit(plan))
    ask(bench, "first", words(71))
    assert starts == [(0, 16), (16, 16), (32, 16), (48, 16), (64, 4), (68, 3)]
    starts.clear()
    ask(bench, "again", words(71))
    assert starts == [(68, 3)]


def test_without_prefix_caching_no_chunk_is_cut_and_nothing_kept():
    bench = make_bench(spacing=16, enable_prefix_caching=False)
    starts = []
    submit = bench.runner.submit
    bench.runner.submit = lambda plan: (starts.append(plan.seq_tokens[0]), submit(plan))
    assert [ask(bench, name, words(71))[0] for name in "ab"] == [0, 0]
    assert starts == [32, 32, 7] * 2
    assert bench.core.snapshot.n_snapshots == 0


# What is found.


def test_a_state_without_its_pages_is_not_used():
    """All groups must agree: the pages of one sequence are taken by another's, its states are kept."""
    bench = make_bench(limits={"n_pages": 12})
    ask(bench, "first", words(40))
    ask(bench, "other", words(40, 1))
    assert ask(bench, "again", words(40))[0] == 0


def test_pages_without_a_state_are_computed_again():
    bench = make_bench(n_snapshots=1)
    ask(bench, "first", words(40))
    ask(bench, "other", words(60, 1))
    assert kept(bench) == [56]
    assert ask(bench, "again", words(40))[0] == 0


def test_a_model_that_keeps_only_a_state_finds_it_without_any_page():
    bench = make_bench(limits={"has_kv": False, "n_pages": 12})
    ask(bench, "first", words(40))
    ask(bench, "other", words(40, 1))
    assert ask(bench, "again", words(40))[0] == 36


def test_outputs_of_one_request_wait_for_the_state_that_the_first_saves():
    bench = make_bench()
    for i in range(4):
        bench.add(f"s{i}", words(50), max_tokens=3, seed=i)
    bench.run()
    assert [bench.firsts[f"s{i}"].n_cached_tokens for i in range(4)] == [0, 48, 48, 48]
    assert bench.scheduler.states.store.n_hits == 3
    bench.assert_idle()


def test_requests_whose_pages_are_there_and_whose_state_is_not_compute_it_once():
    bench = make_bench(n_snapshots=4)
    ask(bench, "first", words(50) + words(30, 9))
    bench.scheduler.states.reset()
    for i in range(4):
        bench.add(f"s{i}", [*words(50), i, 1, 2], max_tokens=3)
    bench.run()
    assert [bench.firsts[f"s{i}"].n_cached_tokens for i in range(4)] == [0, 48, 48, 48]
    bench.assert_idle()


def test_who_waits_for_a_state_goes_on_when_the_one_that_computes_it_is_aborted():
    bench = make_bench()
    for i in range(2):
        bench.add(f"s{i}", words(100), max_tokens=3, temperature=0.0)
    bench.step()
    assert [s.sequence_id for s in bench.scheduler.waiting] == ["s1"]
    bench.core.finish(["s0"])
    bench.run()
    assert bench.tokens["s1"] == expected_tokens(words(100), 3, SamplingParams(temperature=0.0))
    bench.assert_idle()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_preempted_sequence_goes_on_from_a_state(is_async):
    bench = make_bench(limits={"n_pages": 16}, async_scheduling=is_async)
    for i in range(3):
        bench.add(f"s{i}", words(12, i), max_tokens=24, temperature=0.0)
    bench.run()
    n_computed = bench.core.snapshot.n_total_computed_tokens
    for i in range(3):
        assert bench.tokens[f"s{i}"] == expected_tokens(words(12, i), 24, SamplingParams(temperature=0.0))
    assert bench.core.snapshot.n_total_preemptions > 0
    assert bench.core.snapshot.n_total_snapshots_hit > 0
    assert n_computed - 3 * 35 < bench.core.snapshot.n_total_tokens_lost
    bench.assert_idle()


def test_a_salt_keeps_states_apart():
    bench = make_bench()
    ask(bench, "a", words(30), salt="x")
    assert ask(bench, "b", words(30), salt="y")[0] == 0
    assert ask(bench, "c", words(30), salt="x")[0] == 28


def test_a_pinned_prompts_state_outlives_others_until_its_time_is_over():
    bench = make_bench(n_snapshots=2)
    ask(bench, "pinned", words(10), cache_hint={"pin": True, "ttl_s": 1000})
    for i in range(3):
        ask(bench, f"other{i}", words(60, i + 1))
    assert kept(bench) == [8, 56]
    bench.clock.advance(1001)
    for i in range(3):
        ask(bench, f"more{i}", words(60, i + 4))
    assert kept(bench) == [56, 56]


# What may go wrong.


@pytest.mark.parametrize("failing", range(6))
def test_a_failed_step_leaves_no_state_that_can_be_found(failing):
    bench = make_bench(spacing=8, runner={"fail_steps": [failing], "is_strict": False})
    bench.add("first", words(50), max_tokens=8, temperature=0.0)
    bench.run()
    assert bench.finals["first"].error is not None
    bench.assert_idle()
    ask(bench, "again", words(50), 8)


def test_a_nan_leaves_no_state_that_can_be_found():
    bench = make_bench(spacing=8, runner={"nan_token_id": 91})
    bench.add("first", [*words(20), 91, *words(20)], max_tokens=8)
    bench.run()
    assert bench.finals["first"].error is not None
    assert kept(bench) == []
    bench.assert_idle()


def test_a_reset_forgets_states_and_those_that_are_coming():
    bench = make_bench()
    ask(bench, "first", words(30))
    bench.add("second", words(50, 2), max_tokens=3)
    bench.step()
    bench.core.finish(["second"])
    done = bench.core.reset_prefix_cache()
    bench.run()
    assert done.result()
    assert kept(bench) == []
    assert ask(bench, "again", words(30))[0] == 0


def test_an_abort_gives_every_place_back():
    for n_steps in range(12):
        bench = make_bench(spacing=8, n_snapshots=3)
        for i in range(3):
            bench.add(f"s{i}", words(40, i), max_tokens=20)
        for _ in range(n_steps):
            bench.step()
        bench.core.finish(["s0", "s2"])
        bench.run()
        bench.assert_idle()
        store = bench.scheduler.states.store
        assert store.n_free + store.n_kept == 3


def test_the_snapshot_counts_what_is_kept_saved_found_and_given_up():
    bench = make_bench(n_snapshots=2)
    ask(bench, "a", words(30))
    ask(bench, "b", words(30))
    ask(bench, "c", words(50, 1))
    ask(bench, "d", words(60, 2))
    now = bench.core.snapshot
    counts = (now.n_snapshots, now.n_snapshots_kept, now.n_snapshots_reserved)
    assert counts == (2, 2, 0)
    assert (now.n_total_snapshots_saved, now.n_total_snapshots_hit, now.n_total_snapshots_evicted) == (3, 1, 1)
