"""The engine's loop over a fake runner: single cases of each promise."""

import queue
import threading

import pytest
from engine_kit import Bench

from tiercel.base.errors import ConfigError, EngineDead, QueueFull, RequestFailed
from tiercel.engine.config import EngineConfig
from tiercel.protocol.params import SamplingParams
from tiercel.runner.interface import N_STEPS_MAX
from tiercel.testing.fake_runner import FakeRunner, expected_tokens, make_limits


def alone(prompt, n, **params):
    return expected_tokens(prompt, n, SamplingParams(**params), seed=7)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_sequence_gets_its_tokens(async_scheduling):
    bench = Bench(async_scheduling=async_scheduling)
    bench.add("a", range(5), max_tokens=6)
    bench.run().assert_idle()
    assert bench.tokens["a"] == alone(range(5), 6)
    assert bench.finals["a"].finish_reason == "length"


def test_a_prompt_longer_than_a_step_is_computed_in_chunks():
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", range(40), max_tokens=3)
    bench.run().assert_idle()
    assert bench.tokens["a"] == alone(range(40), 3)


def test_eos_ends_a_sequence_without_a_stop_reason():
    expected = alone(range(5), 20)
    bench = Bench(eos_ids=[expected[3]])
    bench.add("a", range(5), max_tokens=20)
    bench.run().assert_idle()
    n = expected.index(expected[3]) + 1
    assert bench.tokens["a"] == expected[:n]
    assert (bench.finals["a"].finish_reason, bench.finals["a"].stop_reason) == ("stop", None)


def test_a_stop_token_ends_a_sequence_and_is_named():
    expected = alone(range(5), 20)
    bench = Bench()
    bench.add("a", range(5), max_tokens=20, stop_token_ids=[expected[3]])
    bench.run()
    assert (bench.finals["a"].finish_reason, bench.finals["a"].stop_reason) == ("stop", expected[3])


def test_ignore_eos_goes_on_but_a_stop_token_still_ends():
    expected = alone(range(5), 20)
    bench = Bench(eos_ids=[expected[2]])
    bench.add("a", range(5), max_tokens=8, ignore_eos=True)
    bench.add("b", range(5), max_tokens=8, ignore_eos=True, stop_token_ids=[expected[2]])
    bench.run()
    assert len(bench.tokens["a"]) == 8
    assert bench.finals["b"].stop_reason == expected[2]


def test_nothing_ends_before_min_tokens():
    expected = alone(range(5), 20)
    bench = Bench(eos_ids=[expected[0], expected[1]])
    bench.add("a", range(5), max_tokens=20, min_tokens=5)
    bench.run()
    assert len(bench.tokens["a"]) >= 5


def test_no_step_is_planned_past_the_last_token():
    bench = Bench(limits=make_limits(max_len_tokens=9))
    bench.add("a", range(5), max_tokens=4)
    bench.run()
    assert bench.core.snapshot.n_total_computed_tokens == 5 + 3
    assert bench.core.snapshot.n_total_stale_rows == 0


def test_a_sequence_that_ends_early_leaves_one_stale_row_and_its_slot_waits_for_it():
    expected = alone(range(5), 20)
    bench = Bench(eos_ids=[expected[0]])
    bench.add("a", range(5), max_tokens=20)
    bench.run().assert_idle()
    assert bench.core.snapshot.n_total_stale_rows == 1


def ahead(**options):
    """An engine whose steps are so short that it runs ahead as far as it may."""
    return Bench(runner=FakeRunner(make_limits(), compute_ns=1_000_000), **options)


def test_short_steps_that_decode_are_seen_to_together():
    """A round that costs once what it would cost several times; and the tokens are the same."""
    bench = ahead()
    bench.add("a", range(5), max_tokens=40)
    bench.run().assert_idle()
    assert bench.tokens["a"] == alone(range(5), 40)
    assert bench.core.snapshot.n_total_steps == 40
    assert bench.core.snapshot.n_total_stale_rows == 0
    assert bench.n_rounds <= 15


@pytest.mark.parametrize(
    "changes", [{"run_ahead_s": 0.0}, {"run_ahead_s": 0.002}, {"async_scheduling": False}], ids=str
)
def test_running_ahead_is_bounded_by_time_and_can_be_off(changes):
    bench = ahead(**changes)
    bench.add("a", range(5), max_tokens=40)
    bench.run()
    assert bench.n_rounds >= 40


def test_what_waits_ends_the_running_ahead():
    bench = ahead(max_num_seqs=2)
    bench.add("a", range(5), max_tokens=50)
    for _ in range(4):
        bench.step()
    assert len(bench.core._in_flight) > 1
    bench.add("b", range(20, 25), max_tokens=3)
    n_before = bench.core.snapshot.n_total_steps
    while "b" not in bench.firsts:
        bench.step()
    assert bench.core.snapshot.n_total_steps - n_before <= N_STEPS_MAX + 1
    bench.run().assert_idle()
    assert bench.tokens["b"] == alone(range(20, 25), 3)


def test_a_command_is_heard_after_one_step_however_many_are_awaited():
    bench = ahead()
    bench.add("a", range(5), max_tokens=50)
    for _ in range(6):
        bench.step()
    assert len(bench.core._in_flight) > 1
    wait, n_waited = bench.runner.wait, []

    def wait_and_be_told(n_steps):
        bench.core.finish(["a"])  # as another thread may, meanwhile
        n_waited.append((n_steps, wait(n_steps)))
        return n_waited[-1][1]

    bench.runner.wait = wait_and_be_told
    bench.step()
    n_known = len(bench.core._sequences["a"].token_ids)
    bench.runner.wait = wait
    bench.step()
    assert n_waited[0][0] > n_waited[0][1] == 1
    assert "a" not in bench.core._sequences
    bench.run().assert_idle()
    assert bench.finals["a"].finish_reason == "abort"
    assert bench.tokens["a"] == alone(range(5), 50)[: n_known - 5]


def test_the_listener_hears_of_every_step_that_was_run_ahead():
    heard = []

    class Listener:
        def on_step(self, stats):
            heard.append(stats)

    bench = ahead(listener=Listener())
    bench.add("a", range(5), max_tokens=40)
    bench.run()
    assert len(heard) == bench.core.snapshot.n_total_steps
    assert sum(len(s.inter_token_s) for s in heard) == 39
    assert {s.compute_s for s in heard} == {0.001}


@pytest.mark.parametrize("n_rounds", range(8))
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_abort_is_answered_in_any_state(n_rounds, async_scheduling):
    bench = Bench(max_num_seqs=1, async_scheduling=async_scheduling, max_num_batched_tokens=4)
    bench.add("a", range(10), max_tokens=3)
    bench.add("b", range(10, 20), max_tokens=3)
    for _ in range(n_rounds):
        bench.step()
    bench.core.finish(["a", "b", "unknown"])
    bench.run().assert_idle()
    assert set(bench.finals) == {"a", "b"}
    assert bench.finals["b"].finish_reason in ("abort", "length")


def test_abort_before_the_first_round_ends_it_too():
    bench = Bench()
    bench.add("a", range(4))
    bench.core.finish(["a"])
    bench.run().assert_idle()
    assert bench.finals["a"].finish_reason == "abort"


@pytest.mark.parametrize("failing", range(6))
def test_a_failed_step_fails_its_sequences_and_no_other(failing):
    runner = FakeRunner(make_limits(), fail_steps=[failing], is_strict=False)
    bench = Bench(runner=runner, max_num_seqs=2)
    for i in range(6):
        bench.add(f"s{i}", [50 + i, *range(8)], max_tokens=3)
    bench.run().assert_idle()
    failed = {name for name, final in bench.finals.items() if final.error is not None}
    assert 1 <= len(failed) <= 2
    assert all(isinstance(bench.finals[name].error, RequestFailed) for name in failed)
    for i in range(6):
        if f"s{i}" not in failed:
            assert bench.tokens[f"s{i}"] == alone([50 + i, *range(8)], 3)


@pytest.mark.parametrize("failing", range(5))
@pytest.mark.parametrize("delay", range(5))
@pytest.mark.parametrize("budget", [8, 32])
def test_who_found_a_page_that_a_failed_step_never_wrote_is_computed_again(failing, delay, budget):
    runner = FakeRunner(make_limits(), fail_steps=[failing], is_strict=False)
    bench = Bench(runner=runner, max_num_batched_tokens=budget)
    prompt = list(range(20))
    bench.add("a", prompt, max_tokens=6)
    for _ in range(delay):
        bench.step()
    bench.add("b", [*prompt, 1, 2], max_tokens=6)
    bench.run().assert_idle()
    for name, ids in (("a", prompt), ("b", [*prompt, 1, 2])):
        if bench.finals[name].error is None:
            assert bench.tokens[name] == alone(ids, 6)
        else:
            assert "the step that computed it failed" in str(bench.finals[name].error)
    assert bench.finals["a"].error is not None or bench.finals["b"].error is not None
    bench.add("c", [*prompt, 3], max_tokens=4)
    bench.run()
    assert bench.tokens["c"] == alone([*prompt, 3], 4)


def test_a_page_whose_last_row_was_in_a_failed_step_is_not_found():
    expected = alone(range(5), 3)
    runner = FakeRunner(make_limits(), fail_steps=[3], is_strict=False)
    bench = Bench(runner=runner, eos_ids=[expected[2]])
    bench.add("a", range(5), max_tokens=9)  # ends with 8 tokens, two pages; the last is only computed by a stale row
    bench.run()
    assert bench.finals["a"].finish_reason == "stop"
    prompt = [*range(5), *expected]
    bench.add("b", [*prompt, 1], max_tokens=2)
    bench.run()
    assert bench.finals["b"].n_cached_tokens == 4
    assert bench.tokens["b"] == alone([*prompt, 1], 2)


def test_a_nan_fails_only_its_sequence_and_its_pages_are_not_found_again():
    runner = FakeRunner(make_limits(), nan_token_id=96)
    bench = Bench(runner=runner)
    bench.add("bad", [1, 2, 96, 4, 5, 6, 7, 8, 9], max_tokens=4)
    bench.add("good", [1, 2, 3, 4, 5], max_tokens=4)
    bench.run().assert_idle()
    assert "NaN" in str(bench.finals["bad"].error)
    assert bench.tokens["good"] == alone([1, 2, 3, 4, 5], 4)
    assert bench.scheduler.pool.lookup(bench.add("x", [1, 2, 96, 4]).page_keys.extend([1, 2, 96, 4])) == []


def test_the_queue_is_bounded():
    bench = Bench(max_waiting=2)
    bench.add("a", range(4))
    bench.add("b", range(4))
    with pytest.raises(QueueFull, match="max_waiting is 2"):
        bench.add("c", range(4))
    bench.run()
    bench.add("c", range(4))
    bench.run().assert_idle()


def test_what_does_not_fit_an_idle_engine_is_answered():
    bench = Bench(limits=make_limits(n_pages=2), check_each_step=False)
    bench.add("a", range(20), max_tokens=4)
    bench.run()
    assert "idle pool" in str(bench.finals["a"].error)


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), SystemExit(3), KeyboardInterrupt()])
def test_death_answers_everything(error):
    bench = Bench()
    bench.add("a", range(4), max_tokens=9)
    bench.step()
    bench.add("b", range(4))

    def die():
        bench.core.call_soon(lambda: None)  # as a probe may at this moment
        raise error

    bench.runner.collect = die
    bench.core.run_loop()
    assert not bench.core.is_alive
    assert all(isinstance(bench.finals[name].error, EngineDead) for name in "ab")
    assert type(error).__name__ in str(bench.finals["a"].error)
    assert bench.runner.is_closed
    with pytest.raises(EngineDead):
        bench.add("c", range(4))
    with pytest.raises(EngineDead):
        bench.core.reset_prefix_cache()


class _SignallingQueue(queue.SimpleQueue):
    """Tells when a command has come."""

    def __init__(self):
        super().__init__()
        self.has_come = threading.Event()

    def put(self, item):
        super().put(item)
        self.has_come.set()


@pytest.mark.parametrize(("drain_s", "reason"), [(None, "length"), (0.0, "abort")])
def test_a_drain_finishes_what_runs_and_a_shutdown_aborts_it(drain_s, reason):
    bench = Bench()
    bench.core._commands = commands = _SignallingQueue()
    bench.add("a", range(4), max_tokens=9)
    commands.has_come.clear()
    collect = bench.runner.collect
    bench.runner.collect = lambda: commands.has_come.wait() and collect()  # the first step lasts until the shutdown
    bench.core.start()
    bench.core.shutdown(drain_s=drain_s)
    bench.core.shutdown()
    assert bench.finals["a"].finish_reason == reason
    assert bench.runner.is_closed
    assert not bench.core.is_alive


def test_reset_is_refused_while_something_runs_and_then_forgets():
    bench = Bench()
    bench.add("a", range(12), max_tokens=9)
    bench.step()
    refused = bench.core.reset_prefix_cache()
    bench.run()
    assert refused.result() is False
    done = bench.core.reset_prefix_cache()
    bench.step()
    assert done.result() is True
    bench.add("b", range(12), max_tokens=2)
    bench.run()
    assert bench.finals["b"].n_cached_tokens == 0


def test_prompt_logprobs_cover_the_prompt_however_it_is_cut():
    whole = None
    for budget, rows in ((32, 64), (5, 64), (32, 4), (6, 5)):
        bench = Bench(limits=make_limits(max_logits_rows=rows), max_num_batched_tokens=budget)
        bench.add("other", range(9), max_tokens=12)
        bench.step()
        bench.add("a", range(20), max_tokens=3, prompt_logprobs=2, logprobs=1)
        bench.run().assert_idle()
        scored = bench.firsts["a"].prompt_logprobs
        assert [entry.token_id for entry in scored] == list(range(1, 20))
        assert all(len(entry.top_ids) == 2 for entry in scored)
        assert len(bench.firsts["a"].logprobs[0].top_ids) == 1
        assert bench.tokens["a"] == alone(range(20), 3)
        assert bench.tokens["other"] == alone(range(9), 12)
        whole = whole or scored
        assert scored == whole


def test_prompt_logprobs_of_a_sequence_preempted_within_its_prompt_come_once():
    bench = Bench(limits=make_limits(n_pages=12), long_prefill_token_threshold=2)
    bench.add("stream", range(7), max_tokens=20)
    for _ in range(6):
        bench.step()
    bench.add("a", range(30, 58), max_tokens=2, prompt_logprobs=1)
    bench.run().assert_idle()
    assert bench.finals["a"].n_preemptions >= 1
    assert [entry.token_id for entry in bench.firsts["a"].prompt_logprobs] == list(range(31, 58))
    assert bench.tokens["a"] == alone(range(30, 58), 2)


def test_prompt_logprobs_do_not_read_the_cache():
    bench = Bench()
    bench.add("a", range(20), max_tokens=2)
    bench.run()
    bench.add("b", range(20), max_tokens=2, prompt_logprobs=0)
    bench.run()
    assert bench.finals["b"].n_cached_tokens == 0
    assert len(bench.firsts["b"].prompt_logprobs) == 19


def test_the_listener_hears_of_every_token_and_end():
    heard = []

    class Listener:
        def on_step(self, stats):
            heard.append(stats)

    bench = Bench(listener=Listener())
    bench.add("a", range(4), max_tokens=5)
    bench.run()
    assert sum(len(s.time_to_first_token_s) for s in heard) == 1
    assert sum(len(s.inter_token_s) for s in heard) == 4
    (ended,) = [one for s in heard for one in s.finished]
    assert (ended.finish_reason, ended.n_prompt_tokens, ended.n_output_tokens) == ("length", 4, 5)
    assert ended.queue_s >= 0
    assert ended.prefill_s > 0
    assert ended.decode_s > 0
    assert ended.e2e_s == pytest.approx(ended.queue_s + ended.prefill_s + ended.decode_s)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 3, "max_num_seqs": 4},
        {"scheduling_policy": "lottery"},
        {"max_waiting": 0},
        {"max_logprobs": -2},
        {"run_ahead_s": -0.001},
    ],
    ids=str,
)
def test_a_config_that_cannot_work_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"^engine\."):
        EngineConfig(**wrong)


def test_a_runner_with_too_few_rows_is_refused():
    with pytest.raises(ConfigError, match="rows"):
        Bench(limits=make_limits(max_logits_rows=3))
