"""What any runner that drafts must do, as tests beside those of `runner_kit`: subclass `DraftingRunnerContract`.

`make_runner` must give `RunnerLimits.n_draft_max` of 3 at least, and pages of at most 16 tokens; some of what it drafts
should come, and some not.
"""

from collections.abc import Sequence

import numpy as np

from tiercel.base.errors import ShapeError
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import StepResult
from tiercel.testing.runner_kit import GREEDY, OTHER, OWN, PROMPT, RANDOM, Driver, RunnerContract

PENALISED = SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4)
_N_MORE = 12


class DraftingRunnerContract(RunnerContract):
    """The tests."""

    some_come = True
    """Whether some drafts must come: not so of drafters whose weights are random."""

    def _drafted_after(
        self, token_ids: Sequence[int], n: int, *, n_prompt: int | None = None, **options: object
    ) -> object:
        """Give what a fresh runner drafts after these tokens, the last of them sampled; and how sure it is."""
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, token_ids[:-1], 32, n_prompt=n_prompt or len(token_ids) - 1, **options)  # type: ignore[arg-type]
        result = driver.step((0, 0, len(token_ids) - 1), samples=[0], n_draft=n)
        runner.close()
        assert result.row_token.tolist() == list(token_ids[-1:])
        return drafted(result)

    def test_own_drafts_change_no_token(self) -> None:
        """Each row is what plain decoding gives there; what was drafted and came is counted right."""
        n_came = n_tested = 0
        for params in (GREEDY, RANDOM, PENALISED):
            want = self._alone(PROMPT, 1 + _N_MORE, params=params)
            for n_draft, n_rows in ((3, 4), (2, 4), (3, 2), (1, 2)):
                got, right, tested = self._with_own_drafts(params, want, n_draft, n_rows)
                assert got == want
                n_came += right
                n_tested += tested
        assert n_came < n_tested
        assert n_came or not self.some_come

    def _with_own_drafts(
        self, params: SamplingParams, want: list[int], n_draft: int, n_rows: int
    ) -> tuple[list[int], int, int]:
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, len(PROMPT) + len(want), params=params)
        result = driver.step((0, 0, len(PROMPT)), samples=[0], n_draft=n_draft)
        got: list[int] = result.row_token.tolist()
        n_came = n_tested = 0
        while len(got) < len(want):
            n_known = len(PROMPT) + len(got)
            n = min(n_rows, len(want) - len(got))
            ((own, _),) = drafted(result)
            result = driver.step((0, n_known - 1, n), samples=[0], n_logprobs=1, drafts={0: OWN}, n_draft=n_draft)
            tokens = result.row_token.tolist()
            assert result.seq_drafted is not None
            (n_drafted,) = result.seq_drafted.tolist()
            assert n_drafted == min(n - 1, len(own))
            n_right = 0
            while n_right < n_drafted and own[n_right] == want[len(got) + n_right]:
                n_right += 1
            assert len(tokens) == n_right + 1
            assert result.row_pos.tolist() == list(range(n_known - 1, n_known + n_right))
            got += tokens
            n_came, n_tested = n_came + n_right, n_tested + n_drafted
        runner.close()
        return got, n_came, n_tested

    def test_steps_submitted_ahead_draw_on_the_drafts_of_the_steps_before_them(self) -> None:
        """None of them knows where it begins. Another sequence is not disturbed, and drafts as it does alone."""
        want, want_other = self._alone(PROMPT, 20), self._alone(OTHER, 6)
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(1, PROMPT, 32)
        driver.admit(2, OTHER, 24)
        n, m = len(PROMPT), len(OTHER)
        driver.submit((1, 0, n), (2, 0, m), samples=[1, 2], n_draft=3)
        for k in range(1, 4):
            plan = ((1, n + 4 * k - 4, 4), (2, m + k - 1, 1))
            driver.submit(*plan, samples=[1, 2], drafts={1: OWN}, n_draft=3)
        rows: dict[int, list[int]] = {0: [], 1: []}
        for _ in range(4):
            result = runner.collect()
            for s, token in zip(result.row_seq.tolist(), result.row_token.tolist(), strict=True):
                rows[s].append(token)
            for own, known, prompt in zip(drafted(result), rows.values(), (PROMPT, OTHER), strict=True):
                assert [own] == self._drafted_after([*prompt, *known], 3, n_prompt=len(prompt))
        assert rows[0] == want[: len(rows[0])]
        assert rows[1] == want_other[:4]
        runner.close()

    def test_drafts_follow_from_the_tokens_alone(self) -> None:
        """However those were computed: in chunks, after rejected drafts, beside others, and in another slot's pages."""
        for params in (GREEDY, RANDOM):
            want = self._alone(PROMPT, 8, params=params)
            runner = self.make_runner()
            driver = Driver(runner)
            driver.admit(2, OTHER, 24)
            driver.admit(1, PROMPT, 28, params=params)
            driver.step((1, 0, 4), n_draft=3)
            driver.step((2, 0, len(OTHER)), (1, 4, 1), samples=[2], n_draft=3)
            got = driver.step((1, 5, len(PROMPT) - 5), samples=[1], n_draft=3).row_token.tolist()
            while len(got) < len(want):
                at = len(PROMPT) + len(got) - 1
                n = min(3, len(want) - len(got))
                result = driver.step((1, at, n), samples=[1], drafts={1: OWN}, n_draft=3)
                got += result.row_token.tolist()
                known = [*PROMPT, *got]
                assert drafted(result) == self._drafted_after(known, 3, n_prompt=len(PROMPT), params=params)
            assert got == want
            runner.close()

    def test_a_step_drafts_as_many_as_it_is_asked_for(self) -> None:
        """Or none, and then the next step has none to compute, though it is planned for some."""
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 32)
        tokens = driver.step((0, 0, len(PROMPT)), samples=[0], n_draft=2).row_token.tolist()
        drafts_before = 2
        for n_draft in (0, 3, 1, 0, 0, 2):
            at = len(PROMPT) + len(tokens) - 1
            result = driver.step((0, at, 3), samples=[0], drafts={0: OWN}, n_draft=n_draft)
            assert result.seq_drafted is not None
            assert result.seq_drafted.tolist() == [min(drafts_before, 2)]
            tokens += result.row_token.tolist()
            if n_draft == 0:
                assert result.seq_drafts is None
                assert result.seq_confidence is None
            else:
                assert len(drafted(result)[0][0]) == n_draft
                assert drafted(result) == self._drafted_after([*PROMPT, *tokens], n_draft, n_prompt=len(PROMPT))
            drafts_before = n_draft
        assert tokens == self._alone(PROMPT, len(tokens))
        runner.close()

    def test_a_sequence_that_comes_back_does_not_take_the_drafts_it_left(self) -> None:
        """Nor those of whoever had the slot before; and it drafts as it would have."""
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 20)
        first = driver.step((0, 0, len(PROMPT)), samples=[0], n_draft=3)
        known = [*PROMPT, *first.row_token.tolist()]
        runner.release(0)
        driver.admit(0, known, 24, n_prompt=len(PROMPT))
        driver.step((0, 0, len(known) - 1))
        result = driver.step((0, len(known) - 1, 4), samples=[0], drafts={0: OWN}, n_draft=3)
        assert result.seq_drafted is not None
        assert result.seq_drafted.tolist() == [0]
        known += result.row_token.tolist()
        assert drafted(result) == self._drafted_after(known, 3, n_prompt=len(PROMPT))
        runner.close()

    def test_drafting_writes_to_no_page_that_is_not_the_slots(self) -> None:
        """It drafts as far as its pages reach, and no further; those of other slots keep their bytes."""
        runner = self.make_runner()
        size = runner.limits.page_size_tokens
        for n_known in (size - 1, size, size + 1, size + 2):
            prompt = (PROMPT * size)[:n_known]
            driver = Driver(runner)
            driver.admit(0, prompt, n_known)
            others = [i for i in range(runner.limits.n_pages) if i not in driver.page_ids[0]]
            pattern = [bytes(k % 251 for k in range(memoryview(one).nbytes)) for one in runner.read_pages(others)]
            runner.write_pages(others, pattern)
            result = driver.step((0, 0, n_known), samples=[0], n_draft=3)
            n_room = len(driver.page_ids[0]) * size
            assert len(drafted(result)[0][0]) == min(3, max(n_room - n_known - 1, 0))
            assert runner.read_pages(others) == pattern
            runner.release(0)
        runner.close()

    def test_a_sequence_at_the_end_of_its_slot_is_drafted_no_further(self) -> None:
        """And is computed to the slot's last token."""
        runner = self.make_runner()
        n_max = min(runner.limits.max_len_tokens, runner.limits.max_step_tokens)
        prompt = (PROMPT * n_max)[: runner.limits.max_len_tokens - 4]
        driver = Driver(runner)
        driver.admit(0, prompt, runner.limits.max_len_tokens)
        for start in range(0, len(prompt), n_max):
            n = min(n_max, len(prompt) - start)
            result = driver.step((0, start, n), samples=[0] if start + n == len(prompt) else [], n_draft=3)
        got = result.row_token.tolist()
        while len(got) < 4:
            n_left = 4 - len(got)
            assert len(drafted(result)[0][0]) == min(3, n_left - 1)
            at = len(prompt) + len(got) - 1
            result = driver.step((0, at, n_left), samples=[0], drafts={0: OWN}, n_draft=3)
            got += result.row_token.tolist()
        assert drafted(result) == [([], [])]
        runner.close()

    def test_own_drafts_have_a_mask_each(self) -> None:
        """Planned rows have one, though fewer may be computed; masks come after the step before has told its drafts."""
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 24)
        driver.admit(1, PROMPT[:3], 24)
        n = len(PROMPT)
        first = driver.step((0, 0, n), (1, 0, 3), samples=[0, 1], n_draft=2)
        own, _ = drafted(first)[0]
        driver.submit((1, 3, 1), (0, n, 4), samples=[0, 1], masked=[0, 1], drafts={0: OWN})
        driver.set_masks(1, [20], own[:1], [8, 10], [8, 10], [11])
        result = runner.collect()
        assert result.seq_drafted is not None
        assert result.seq_drafted.tolist() == [0, 2]
        tokens = result.row_token.tolist()
        assert tokens[:2] == [20, own[0]]
        assert tokens[2] in (8, 10)
        assert len(tokens) == (4 if tokens[2] == own[1] else 3)
        runner.close()

    def test_own_and_foretold_drafts_and_a_prompt_go_side_by_side(self) -> None:
        """Each sequence of a step is what it is alone, and drafts likewise."""
        want, want_other = self._alone(PROMPT, 6), self._alone(OTHER, 8)
        runner = self.make_runner()
        driver = Driver(runner)
        for slot, prompt in ((0, PROMPT), (1, OTHER), (2, PROMPT)):
            driver.admit(slot, prompt, 32)
        n, m = len(PROMPT), len(OTHER)
        ((own, _), _) = drafted(driver.step((0, 0, n), (1, 0, m), samples=[0, 1], n_draft=3))
        right = {1: (m + 1, want_other[1:4]), 0: OWN}
        result = driver.step((1, m, 4), (2, 0, n), (0, n, 4), samples=[0, 1, 2], drafts=right, n_draft=2)
        assert result.seq_drafted is not None
        assert result.seq_drafted.tolist() == [3, 0, 3]
        rows: list[list[int]] = [[], [], []]
        for s, token in zip(result.row_seq.tolist(), result.row_token.tolist(), strict=True):
            rows[s].append(token)
        assert rows[0] == want_other[1:5]
        assert rows[1] == want[:1]
        assert rows[2] == want[1 : 1 + len(rows[2])]
        assert len(rows[2]) == 4 or own[len(rows[2]) - 1] != rows[2][-1]
        known = ([*OTHER, *want_other[:5]], [*PROMPT, *want[:1]], [*PROMPT, *want[: 1 + len(rows[2])]])
        for one, tokens, n_prompt in zip(drafted(result), known, (m, n, n), strict=True):
            assert [one] == self._drafted_after(tokens, 2, n_prompt=n_prompt)
        runner.close()

    def test_a_policy_computes_what_pays(self) -> None:
        """All where rows are free, none where they are dear, and then again all once the policy is gone."""
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 32)
        tokens = driver.step((0, 0, len(PROMPT)), samples=[0], n_draft=2).row_token.tolist()
        for step_seconds, chances, n in (
            ([1.0], [1.0], 2),
            ([1.0, 3.0], [1.0], 0),
            ([1.0], [0.0], 0),
            ([1.0, 1.0, 9.0], [1.0], 1),
            ([], [], 2),
        ):
            runner.set_draft_policy(step_seconds, chances)
            at = len(PROMPT) + len(tokens) - 1
            driver.submit((0, at, 4), samples=[0], drafts={0: OWN}, n_draft=2)
            runner.set_draft_policy([1.0, 100.0], [0.0])  # too late for it
            result = runner.collect()
            assert result.seq_drafted is not None
            assert result.seq_drafted.tolist() == [n]
            tokens += result.row_token.tolist()
        assert tokens == self._alone(PROMPT, len(tokens))
        runner.close()

    def test_a_policy_that_is_no_policy_is_refused(self) -> None:
        """Times are positive, and all numbers finite."""
        runner = self.make_runner()
        for step_seconds, chances in (([0.0], [1.0]), ([1.0, float("nan")], [1.0]), ([1.0], [float("inf")])):
            try:
                runner.set_draft_policy(step_seconds, chances)
            except ShapeError:
                pass
            else:
                raise AssertionError(f"a policy of {step_seconds} and {chances} was taken")
        runner.close()

    def test_more_drafts_than_are_made_are_refused(self) -> None:
        """Or fewer than none; nothing is queued."""
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 16)
        for n_draft in (-1, runner.limits.n_draft_max + 1):
            try:
                driver.submit((0, 0, len(PROMPT)), samples=[0], n_draft=n_draft)
            except ShapeError:
                pass
            else:
                raise AssertionError(f"a step of {n_draft} drafts was accepted")
        assert driver.generate(0, len(PROMPT), 1) == self._alone(PROMPT, 1)
        runner.close()


def drafted(result: StepResult) -> list[tuple[list[int], list[float]]]:
    """Give what a step drafted of each of its sequences, and how sure it was; nothing stands behind what is none."""
    assert result.seq_drafts is not None
    assert result.seq_confidence is not None
    found = []
    for ids, confidence in zip(result.seq_drafts.tolist(), result.seq_confidence.tolist(), strict=True):
        n = ids.index(-1) if -1 in ids else len(ids)
        assert set(ids[n:]) <= {-1}
        assert not np.any(confidence[n:])
        assert all(0.0 <= c <= 1.0 for c in confidence[:n])
        found.append((ids[:n], confidence[:n]))
    return found
