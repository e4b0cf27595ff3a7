"""What a runner of a model with recurrent state must do beside `runner_kit`: subclass `StatefulRunnerContract`.

`make_runner` must give at least 2 places for snapshots, beside what `RunnerContract` asks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tiercel.base.errors import ShapeError
from tiercel.testing.runner_kit import OTHER, PROMPT, Driver, RunnerContract

if TYPE_CHECKING:
    from tiercel.kv.tiers.interface import Bytes


class StatefulRunnerContract(RunnerContract):
    """The tests."""

    def _prompt(self) -> tuple[list[int], int]:
        """Give a prompt of a page and three tokens, and the page's size."""
        size = self.make_runner().limits.page_size_tokens
        return (PROMPT * size)[: size + 3], size

    def test_a_hit_gives_the_tokens_of_a_miss(self) -> None:
        """A second sequence goes on from the first one's state and page, though no step has been waited for."""
        prompt, size = self._prompt()
        want = self._alone(prompt, 2)
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, prompt, len(prompt) + 2)
        driver.submit((0, 0, size))
        runner.save_state(0, 1)
        driver.admit(1, prompt, len(prompt) + 2, shared=driver.page_ids[0][:1])
        runner.load_state(1, 1)
        driver.submit((0, size, 3), (1, size, 3), samples=[0, 1])
        runner.collect()
        assert runner.collect().row_token.tolist() == want[:1] * 2
        again = driver.step((1, len(prompt), 1), (0, len(prompt), 1), samples=[0, 1])
        assert again.row_token.tolist() == want[1:] * 2
        runner.close()

    def test_pages_carried_to_another_runner_give_the_tokens_of_computing_them(self) -> None:
        """With the state behind them: as a tier does, while other steps are under way."""
        prompt, size = self._prompt()
        want, want_other = self._alone(prompt, 2), self._alone(OTHER, 1)
        first = self.make_runner()
        driver = Driver(first)
        driver.admit(0, prompt, len(prompt) + 2)
        driver.step((0, 0, size))
        first.save_state(0, 1)
        states = first.read_states([1])
        group = first.state_group
        assert group is not None
        assert memoryview(states[0]).nbytes == group.object_bytes
        pages = first.read_pages(driver.page_ids[0][:1]) if first.page_group else []
        first.close()

        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(1, OTHER, 8)
        driver.admit(0, prompt, len(prompt) + 2)
        driver.submit((1, 0, len(OTHER)), samples=[1])
        if pages:
            runner.write_pages(driver.page_ids[0][:1], pages)
        runner.write_states([0], [size], states)
        runner.load_state(0, 0)
        driver.submit((0, size, 3), samples=[0])
        assert runner.collect().row_token.tolist() == want_other
        assert runner.collect().row_token.tolist() == want[:1]
        assert driver.step((0, len(prompt), 1), samples=[0]).row_token.tolist() == want[1:]
        assert runner.read_states([0]) == states
        runner.close()

    def test_the_state_of_the_same_tokens_has_the_same_bytes_however_they_were_computed(self) -> None:
        """In one step, in several, beside another sequence, in another slot."""
        prompt, size = self._prompt()
        found = []
        for slot, cuts in ((0, [size]), (2, [1, size - 1]), (1, [1] * size)):
            runner = self.make_runner()
            driver = Driver(runner)
            driver.admit(slot, prompt, len(prompt))
            start = 0
            for n in cuts:
                driver.step((slot, start, n))
                start += n
            runner.save_state(slot, 0)
            found += runner.read_states([0])
            runner.close()
        assert found[0] == found[1] == found[2]

    def _states_along(self, tokens: list[int], n_first: int) -> "list[Bytes]":
        """Give the states that the first `n_first` of some tokens leave, and one more, and so on."""
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, tokens, len(tokens))
        states = []
        for start, end in zip([0, *range(n_first, len(tokens))], range(n_first, len(tokens) + 1), strict=True):
            driver.step((0, start, end - start))
            runner.save_state(0, 0)
            states += runner.read_states([0])
        runner.close()
        return states

    def test_drafts_leave_the_state_of_those_that_are_right(self) -> None:
        """However many are, of however many, beside a sequence that has none and one whose drafts all are wrong."""
        n, n_other = len(PROMPT), len(OTHER)
        want, want_other = self._alone(PROMPT, 24), self._alone(OTHER, 3)
        along = self._states_along([*PROMPT, *want], n)
        (other,) = self._states_along([*OTHER, want_other[0]], n_other + 1)
        for n_right, n_drafts in ((0, 1), (1, 1), (2, 5), (5, 5), (17, 20), (20, 20)):
            runner = self.make_runner()
            if not runner.limits.takes_drafts:
                runner.close()
                return
            driver = Driver(runner)
            for slot, tokens in enumerate((PROMPT, OTHER, OTHER)):
                driver.admit(slot, tokens, len(tokens) + 30)
            driver.step((0, 0, n), (1, 0, n_other), (2, 0, n_other), samples=[0, 1, 2])
            foretold = want[1 : 1 + n_right] + [(token + 1) % 30 for token in want[1 + n_right : 1 + n_drafts]]
            drafts = {0: (n + 1, foretold), 2: (n_other + 1, [(want_other[1] + 1) % 30])}
            steps = ((1, n_other, 1), (0, n, 1 + n_drafts), (2, n_other, 2))
            result = driver.step(*steps, samples=[0, 1, 2], drafts=drafts)
            assert len(result.row_token) == 1 + (1 + n_right) + 1
            for slot in range(2):
                runner.save_state(slot, slot)
            states = runner.read_states([0, 1])
            assert states == [along[1 + n_right], other]
            runner.save_state(2, 1)
            assert runner.read_states([1]) == [other]
            # Each goes on from there.
            rows = ((0, n + 1 + n_right, 1), (1, n_other + 1, 1), (2, n_other + 1, 1))
            more = driver.step(*rows, samples=[0, 1, 2]).row_token.tolist()
            assert more == [want[2 + n_right], want_other[2], want_other[2]]
            runner.close()

    def test_a_step_with_drafts_saves_a_state_on_its_way_if_it_comes_by(self) -> None:
        """And goes on beyond it; what it does not come by leaves the place as it was."""
        n, want = len(PROMPT), self._alone(PROMPT, 10)
        along = self._states_along([*PROMPT, *want], n)
        for n_right in (0, 2, 6):
            for at in (n, n + 1, n + 2, n + 3, n + 4, n + 7, n + 8):
                runner = self.make_runner()
                if not runner.limits.takes_drafts:
                    runner.close()
                    return
                driver = Driver(runner)
                driver.admit(0, PROMPT, n + 12)
                driver.step((0, 0, n), samples=[0])
                runner.save_state(0, 1)
                foretold = want[1 : 1 + n_right] + [(token + 1) % 30 for token in want[1 + n_right : 7]]
                step = (0, n, 7)
                result = driver.step(step, samples=[0], drafts={0: (n + 1, foretold)}, saves={0: (1, at)})
                assert len(result.row_token) == 1 + n_right
                is_passed = n < at <= n + 1 + n_right
                runner.save_state(0, 0)
                last, found = runner.read_states([0, 1])
                assert found == along[at - n if is_passed else 0]
                assert last == along[1 + n_right]
                runner.close()

    def test_a_step_whose_drafts_do_not_come_true_any_more_saves_a_state_too(self) -> None:
        """It computes one row then."""
        n, want = len(PROMPT), self._alone(PROMPT, 3)
        runner = self.make_runner()
        if runner.limits.takes_drafts:
            driver = Driver(runner)
            driver.admit(0, PROMPT, n + 12)
            driver.step((0, 0, n), samples=[0])
            wrong = [(token + 1) % 30 for token in want]
            result = driver.step((0, n, 3), samples=[0], drafts={0: (n, wrong)}, saves={0: (1, n + 1)})
            assert result.row_token.tolist() == want[1:2]
            assert runner.read_states([1]) == self._states_along([*PROMPT, want[0]], n + 1)
        runner.close()

    def test_a_state_of_another_length_is_refused(self) -> None:
        """And nothing is written."""
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 16)
        driver.step((0, 0, 4))
        runner.save_state(0, 0)
        (state,) = runner.read_states([0])
        for wrong in ([], [state[:-1]], [state, state]):
            self._assert_refused(lambda wrong=wrong: runner.write_states([0], [4], wrong))  # type: ignore[misc]
        assert runner.read_states([0]) == [state]
        runner.close()

    def test_a_saved_state_outlives_its_slot(self) -> None:
        """The slot goes on, ends, and is another sequence's."""
        prompt, size = self._prompt()
        want, want_other = self._alone(prompt, 2), self._alone(OTHER, 2)
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, prompt, len(prompt) + 2)
        driver.step((0, 0, size))
        page = driver.page_ids[0][:1]
        runner.save_state(0, 0)
        driver.step((0, size, 3), samples=[0])
        runner.release(0)
        driver.admit(0, OTHER, 8)
        assert driver.generate(0, len(OTHER), 2) == want_other
        runner.release(0)
        driver.admit(0, prompt, len(prompt) + 2, shared=page)
        runner.load_state(0, 0)
        got = driver.step((0, size, 3), samples=[0]).row_token.tolist()
        assert got + driver.step((0, len(prompt), 1), samples=[0]).row_token.tolist() == want
        runner.close()

    def test_a_place_may_be_saved_into_again_while_a_load_of_it_is_under_way(self) -> None:
        """Each load gives what was saved last before it."""
        prompt, size = self._prompt()
        other = [(token + 1) % 30 for token in prompt]
        want, want_other = self._alone(prompt, 1), self._alone(other, 1)
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, prompt, len(prompt) + 1)
        driver.admit(1, other, len(prompt) + 1)
        for slot in (0, 1):
            driver.submit((slot, 0, size))
        runner.save_state(0, 0)
        driver.admit(2, prompt, len(prompt) + 1, shared=driver.page_ids[0][:1])
        runner.load_state(2, 0)
        runner.save_state(1, 0)
        driver.submit((2, size, 3), samples=[2])
        for _ in range(2):
            runner.collect()
        assert runner.collect().row_token.tolist() == want
        runner.release(2)
        driver.admit(2, other, len(prompt) + 1, shared=driver.page_ids[1][:1])
        runner.load_state(2, 0)
        assert driver.step((2, size, 3), samples=[2]).row_token.tolist() == want_other
        runner.close()

    def test_a_place_that_is_none_or_holds_nothing_is_refused(self) -> None:
        """And the runner goes on."""
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 16)
        for work in (runner.save_state, runner.load_state):
            for place in (-1, runner.limits.n_snapshots):
                self._assert_refused(lambda work=work, place=place: work(0, place))  # type: ignore[misc]
        self._assert_refused(lambda: runner.load_state(0, 0))
        assert driver.generate(0, len(PROMPT), 1) == self._alone(PROMPT, 1)
        runner.close()

    def _assert_refused(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ShapeError:
            return
        raise AssertionError("it was accepted")
