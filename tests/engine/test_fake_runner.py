"""The fake runner passes the kit that real ones pass, and does find the mistakes it is there for."""

import pytest

from tiercel.protocol.params import SamplingParams
from tiercel.testing.draft_kit import DraftingRunnerContract
from tiercel.testing.fake_drafts import half_right
from tiercel.testing.fake_runner import FakeRunner, early_at_random, expected_tokens, make_limits
from tiercel.testing.runner_kit import GREEDY, PROMPT, Driver, RunnerContract
from tiercel.testing.state_kit import StatefulRunnerContract


class TestLateFake(RunnerContract):
    def make_runner(self):
        return FakeRunner(make_limits())


class TestEarlyFake(RunnerContract):
    def make_runner(self):
        return FakeRunner(make_limits(), runs_early=early_at_random(3))


def greedy_answer(tokens):
    return expected_tokens(tokens, 4, GREEDY)


DRAFTING = {"n_draft_max": 4, "draft_reach_tokens": 6}


class TestLateDraftingFake(DraftingRunnerContract):
    def make_runner(self):
        return FakeRunner(make_limits(**DRAFTING), drafter=half_right(greedy_answer))


class TestEarlyDraftingFake(DraftingRunnerContract):
    def make_runner(self):
        drafter = half_right(greedy_answer)
        return FakeRunner(make_limits(**DRAFTING), drafter=drafter, runs_early=early_at_random(3))


STATEFUL = {"state_bytes": 8, "n_snapshots": 2, "snapshot_spacing_tokens": 8}


class TestLateStatefulFake(StatefulRunnerContract):
    def make_runner(self):
        return FakeRunner(make_limits(**STATEFUL))


class TestEarlyStatefulFake(StatefulRunnerContract):
    def make_runner(self):
        return FakeRunner(make_limits(**STATEFUL), runs_early=early_at_random(3))


class TestAFakeThatKeepsNothingButAState(StatefulRunnerContract):
    def make_runner(self):
        return FakeRunner(make_limits(**STATEFUL, has_kv=False))


def test_a_state_of_another_history_changes_the_tokens():
    runner = FakeRunner(make_limits(**STATEFUL), is_strict=False)
    driver = Driver(runner)
    driver.admit(0, PROMPT, 16)
    driver.admit(1, [90, 91, *PROMPT[2:]], 16)
    driver.step((0, 0, 4), (1, 0, 4))
    runner.save_state(1, 0)
    runner.load_state(0, 0)
    assert driver.step((0, 4, len(PROMPT) - 4), samples=[0]).row_token.tolist() != expected_tokens(PROMPT, 1, GREEDY)


def test_the_pure_function_and_the_paged_one_agree():
    runner = FakeRunner(make_limits())
    driver = Driver(runner)
    driver.admit(0, PROMPT, 20)
    assert driver.generate(0, len(PROMPT), 5) == expected_tokens(PROMPT, 5, GREEDY)


def test_seeds_matter_only_when_tokens_are_drawn():
    drawn = [expected_tokens(PROMPT, 4, SamplingParams(), seed=seed) for seed in (1, 2)]
    greedy = [expected_tokens(PROMPT, 4, GREEDY, seed=seed) for seed in (1, 2)]
    assert drawn[0] != drawn[1]
    assert greedy[0] == greedy[1]


def make_two():
    runner = FakeRunner(make_limits(), is_strict=False)
    driver = Driver(runner)
    driver.admit(0, PROMPT, 16)
    driver.step((0, 0, len(PROMPT)), samples=[0])
    return runner, driver


def test_a_page_overwritten_by_another_changes_the_tokens():
    runner, driver = make_two()
    want = expected_tokens(PROMPT, 2, GREEDY)[1:]
    driver.admit(1, PROMPT[:3], 3, shared=driver.page_ids[0][:1])
    driver.step((1, 0, 3))
    assert driver.step((0, len(PROMPT), 1), samples=[0]).row_token.tolist() == want  # the same tokens: no harm
    runner.release(1)
    driver.admit(1, [90, 91, 92], 3, shared=driver.page_ids[0][:1])
    driver.step((1, 0, 3))
    assert driver.step((0, len(PROMPT), 1), samples=[0]).row_token.tolist() != want


def test_a_slot_of_a_waiting_step_cannot_be_released():
    runner, driver = make_two()
    driver.submit((0, len(PROMPT), 1), samples=[0])
    with pytest.raises(AssertionError, match="waiting step"):
        runner.release(0)


def test_a_page_entry_of_a_waiting_step_cannot_change():
    runner, driver = make_two()
    driver.submit((0, len(PROMPT), 1), samples=[0])
    with pytest.raises(AssertionError, match="in use"):
        runner.set_pages(0, 2, [9])
