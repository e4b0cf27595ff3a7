"""What any runner must do, as tests: subclass `RunnerContract`, give `make_runner`, and pytest collects it.

Nothing here knows a model: each test compares the runner with itself. `make_runner` must give limits of at least 3
slots, 32 tokens a sequence, 12 pages, 24 tokens a step, 24 rows of logits, and a vocabulary of more than 32.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from tiercel.base.errors import ShapeError
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import OWN_DRAFTS, Drafts, StepPlan, StepResult
from tiercel.runner.interface import N_STEPS_MAX, Runner

PROMPT = [3, 17, 5, 29, 11, 2, 7, 23, 13, 19, 1]
OTHER = [8, 4, 21, 16, 9]
GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=1.0)
OWN: tuple[int, Sequence[int]] = (OWN_DRAFTS, ())


class Driver:
    """Drives one runner by hand: steps are numbered, pages are handed out in turn and never given back."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._n_steps = 0
        self._n_pages = 0
        self.page_ids: dict[int, list[int]] = {}

    def admit(
        self,
        slot: int,
        token_ids: Sequence[int],
        n_room: int,
        *,
        n_prompt: int | None = None,
        params: SamplingParams = GREEDY,
        seed: int = 5,
        stop_ids: Sequence[int] = (),
        shared: Sequence[int] = (),
    ) -> None:
        """Admit a sequence with pages for `n_room` tokens, the first of them `shared`."""
        n = -(-n_room // self.runner.limits.page_size_tokens) - len(shared)
        pages = [*shared, *range(self._n_pages, self._n_pages + n)]
        self._n_pages += n
        self.page_ids[slot] = pages
        self.runner.admit(slot, token_ids, n_prompt or len(token_ids), params, seed, stop_ids)
        self.runner.set_pages(slot, 0, pages)

    def submit(
        self,
        *rows: tuple[int, int, int],
        samples: Sequence[int] = (),
        scores: Sequence[int] = (),
        n_logprobs: int | None = None,
        masked: Sequence[int] = (),
        drafts: Mapping[int, tuple[int, Sequence[int]]] | None = None,
        n_draft: int = 0,
        saves: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        """Submit a step of (slot, start, tokens); `samples`, `scores` and `masked` name slots.

        `drafts` gives for a slot from which position on which tokens are foretold, or OWN; `n_draft` are made. `saves`
        gives to which place its state is saved at which position.
        """
        self.runner.submit(
            StepPlan(
                step_id=self._n_steps,
                seq_slot=np.array([slot for slot, _, _ in rows], np.int32),
                seq_start=np.array([start for _, start, _ in rows], np.int32),
                seq_tokens=np.array([n for _, _, n in rows], np.int32),
                seq_samples=np.array([slot in samples for slot, _, _ in rows], np.bool_),
                seq_scores=np.array([slot in scores for slot, _, _ in rows], np.bool_),
                n_logprobs=n_logprobs,
                seq_masked=np.array([slot in masked for slot, _, _ in rows], np.bool_) if masked else None,
                drafts=None if drafts is None else _drafts_of([slot for slot, _, _ in rows], drafts, saves),
                n_draft=n_draft,
            )
        )
        self._n_steps += 1

    def set_masks(self, n_steps_ago: int, *allowed: Sequence[int]) -> None:
        """Bring a submitted step its masks; 1 is the newest."""
        masks = np.zeros((len(allowed), -(-self.runner.limits.vocab_size // 32)), np.uint32)
        for row, ids in zip(masks, allowed, strict=True):
            for i in ids:
                row[i // 32] |= np.uint32(1 << i % 32)
        self.runner.set_masks(self._n_steps - n_steps_ago, masks)

    def step(
        self,
        *rows: tuple[int, int, int],
        samples: Sequence[int] = (),
        scores: Sequence[int] = (),
        n_logprobs: int | None = None,
        drafts: Mapping[int, tuple[int, Sequence[int]]] | None = None,
        n_draft: int = 0,
        saves: Mapping[int, tuple[int, int]] | None = None,
    ) -> StepResult:
        """Run one step to its end."""
        self.submit(
            *rows, samples=samples, scores=scores, n_logprobs=n_logprobs, drafts=drafts, n_draft=n_draft, saves=saves
        )
        return self.runner.collect()

    def generate(self, slot: int, n_known: int, n: int) -> list[int]:
        """Compute a freshly admitted sequence's known tokens in one step, then `n` tokens one by one."""
        tokens: list[int] = self.step((slot, 0, n_known), samples=[slot]).row_token.tolist()
        for position in range(n_known, n_known + n - 1):
            tokens += self.step((slot, position, 1), samples=[slot]).row_token.tolist()
        return tokens


def _drafts_of(
    slots: Sequence[int],
    drafts: Mapping[int, tuple[int, Sequence[int]]],
    saves: Mapping[int, tuple[int, int]] | None,
) -> Drafts:
    each = [drafts.get(slot, (-1, ())) for slot in slots]
    ids = [i for _, foretold in each for i in foretold]
    columns = ([first for first, _ in each], [len(foretold) for _, foretold in each], ids)
    seq_from, seq_count, token_ids = (np.array(column, np.int32) for column in columns)
    if saves is None:
        return Drafts(seq_from, seq_count, token_ids)
    to, at = (np.array([saves.get(slot, (-1, 0))[i] for slot in slots], np.int32) for i in range(2))
    return Drafts(seq_from, seq_count, token_ids, (to, at))


class RunnerContract:
    """The tests."""

    def make_runner(self) -> Runner:
        """Give a fresh runner; the same model each time."""
        raise NotImplementedError

    def _alone(self, token_ids: Sequence[int], n: int, *, params: SamplingParams = GREEDY, seed: int = 5) -> list[int]:
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, token_ids, len(token_ids) + n, params=params, seed=seed)
        tokens = driver.generate(0, len(token_ids), n)
        runner.close()
        return tokens

    def test_a_masked_row_samples_what_its_mask_allows_though_it_comes_late(self) -> None:
        """Masks of a step may come when the step before has been collected; unmasked rows are as without."""
        plain = self._alone(PROMPT[:3], 2)
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 16)
        driver.admit(1, PROMPT[:3], 16)
        driver.submit((0, 0, len(PROMPT)), (1, 0, 3), samples=[0, 1], masked=[0])
        driver.submit((0, len(PROMPT), 1), (1, 3, 1), samples=[0, 1], masked=[0])
        driver.set_masks(2, [7])
        first = runner.collect().row_token.tolist()
        driver.set_masks(1, [11, 12])
        second = runner.collect().row_token.tolist()
        assert first[0] == 7
        assert second[0] in (11, 12)
        assert [first[1], second[1]] == plain
        driver.submit((0, len(PROMPT) + 1, 1), samples=[0], masked=[0])
        driver.set_masks(1, [])
        assert runner.collect().row_token.tolist() == [-2]
        runner.close()

    def test_a_runner_that_waits_for_masks_can_be_closed(self) -> None:
        """Or an engine that died between two steps would hang."""
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 16)
        driver.submit((0, 0, len(PROMPT)), samples=[0], masked=[0])
        runner.close()

    def test_tokens_do_not_depend_on_chunks(self) -> None:
        """One step, or several."""
        want = self._alone(PROMPT, 3)
        for cuts in ([4], [1, 2, 3], [8], list(range(1, len(PROMPT)))):
            runner = self.make_runner()
            driver = Driver(runner)
            driver.admit(0, PROMPT, 16)
            edges = [0, *cuts, len(PROMPT)]
            for start, end in itertools.pairwise(edges):
                result = driver.step((0, start, end - start), samples=[0] if end == len(PROMPT) else [])
                assert len(result.row_token) == (end == len(PROMPT))
            got = result.row_token.tolist()
            for position in (len(PROMPT), len(PROMPT) + 1):
                got += driver.step((0, position, 1), samples=[0]).row_token.tolist()
            assert got == want
            runner.close()

    def test_tokens_do_not_depend_on_company(self) -> None:
        """Two sequences in each step, in either order, prefill beside decode."""
        for params in (GREEDY, RANDOM):
            want, want_other = self._alone(PROMPT, 3, params=params), self._alone(OTHER, 2, params=params)
            runner = self.make_runner()
            driver = Driver(runner)
            driver.admit(2, PROMPT, 16, params=params)
            driver.admit(0, OTHER, 8, params=params)
            first = driver.step((2, 0, len(PROMPT)), samples=[2]).row_token.tolist()
            second = driver.step((0, 0, len(OTHER)), (2, len(PROMPT), 1), samples=[0, 2])
            third = driver.step((2, len(PROMPT) + 1, 1), (0, len(OTHER), 1), samples=[0, 2])
            assert second.row_seq.tolist() == third.row_seq.tolist() == [0, 1]
            assert [*first, second.row_token[1], third.row_token[0]] == want
            assert [second.row_token[0], third.row_token[1]] == want_other
            runner.close()

    def test_a_step_may_read_what_the_one_before_it_samples(self) -> None:
        """Two steps under way: the token does not pass through the caller."""
        want = self._alone(PROMPT, 4)
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 16)
        driver.submit((0, 0, len(PROMPT)), samples=[0])
        got: list[int] = []
        for position in range(len(PROMPT), len(PROMPT) + 3):
            driver.submit((0, position, 1), samples=[0])
            result = runner.collect()
            assert result.row_pos.tolist() == [position - 1]
            got += result.row_token.tolist()
        assert got + runner.collect().row_token.tolist() == want
        runner.close()

    def test_many_steps_may_be_under_way_and_are_waited_for_together(self) -> None:
        """As many as N_STEPS_MAX; each feeds the next."""
        want = self._alone(PROMPT, N_STEPS_MAX)
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, len(PROMPT) + N_STEPS_MAX)
        driver.submit((0, 0, len(PROMPT)), samples=[0])
        for position in range(len(PROMPT), len(PROMPT) + N_STEPS_MAX - 1):
            driver.submit((0, position, 1), samples=[0])
        runner.wait(N_STEPS_MAX - 2)
        assert [runner.collect().row_token.tolist()[0] for _ in range(N_STEPS_MAX)] == want
        runner.close()

    def test_a_sequence_that_returns_with_its_tokens_goes_on_as_before(self) -> None:
        """Preemption by recomputing, for a sampled sequence: its noise belongs to the position."""
        want = self._alone(PROMPT, 4, params=RANDOM)
        runner = self.make_runner()
        driver = Driver(runner)
        known = PROMPT + want[:2]
        driver.admit(1, known, 16, n_prompt=len(PROMPT), params=RANDOM)
        assert driver.generate(1, len(known), 2) == want[2:]
        runner.close()

    def test_a_slot_used_again_remembers_nothing(self) -> None:
        """Release, and another sequence in the same slot."""
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 16)
        driver.generate(0, len(PROMPT), 3)
        runner.release(0)
        driver.admit(0, OTHER, 8)
        assert driver.generate(0, len(OTHER), 2) == self._alone(OTHER, 2)
        runner.close()

    def test_a_hit_gives_the_tokens_of_a_miss(self) -> None:
        """A second sequence starts behind the pages that a first one filled, even in the very next step."""
        size = self.make_runner().limits.page_size_tokens
        prompt = (PROMPT * size)[: size + 3]
        want = self._alone(prompt, 2)
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, prompt, len(prompt) + 2)
        driver.admit(1, prompt, len(prompt) + 2, shared=driver.page_ids[0][:1])
        driver.submit((0, 0, len(prompt)), samples=[0])
        driver.submit((1, size, len(prompt) - size), samples=[1])
        assert runner.collect().row_token.tolist() == want[:1]
        assert runner.collect().row_token.tolist() == want[:1]
        assert driver.step((1, len(prompt), 1), samples=[1]).row_token.tolist() == want[1:]
        runner.close()

    def test_pages_carried_to_another_runner_give_the_tokens_of_computing_them(self) -> None:
        """As a tier does: read, and written elsewhere under other ids, while other steps are under way."""
        first = self.make_runner()
        size = first.limits.page_size_tokens
        prompt = (PROMPT * size)[: size + 3]
        driver = Driver(first)
        driver.admit(0, prompt, len(prompt) + 2)
        want = driver.generate(0, len(prompt), 2)
        page_id = driver.page_ids[0][0]
        (data,) = first.read_pages([page_id])
        group = first.page_group
        assert group is not None
        assert memoryview(data).nbytes == group.object_bytes
        first.close()

        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(1, OTHER, 8)
        driver.admit(0, prompt, len(prompt) + 2)
        driver.submit((1, 0, len(OTHER)), samples=[1])
        runner.write_pages(driver.page_ids[0][:1], [data])
        driver.submit((0, size, len(prompt) - size), samples=[0])
        assert runner.collect().row_token.tolist() == self._alone(OTHER, 1)
        assert runner.collect().row_token.tolist() == want[:1]
        assert driver.step((0, len(prompt), 1), samples=[0]).row_token.tolist() == want[1:]
        assert runner.read_pages(driver.page_ids[0][:1]) == [data]
        runner.close()

    def test_a_page_of_the_same_tokens_has_the_same_bytes_however_it_was_computed(self) -> None:
        """Or two stored under one key would not be the same."""
        seen: set[bytes] = set()
        for cuts in ([], [3], list(range(1, 8))):
            runner = self.make_runner()
            size = runner.limits.page_size_tokens
            prompt = (PROMPT * size)[: size + 1]
            driver = Driver(runner)
            driver.admit(2, OTHER, 8)
            driver.admit(0, prompt, len(prompt))
            driver.step((2, 0, len(OTHER)))
            edges = [0, *[cut for cut in cuts if cut < len(prompt)], len(prompt)]
            for start, end in itertools.pairwise(edges):
                driver.step((0, start, end - start))
            seen.update(bytes(one) for one in runner.read_pages(driver.page_ids[0][:1]))
            runner.close()
        assert len(seen) == 1

    def test_data_that_does_not_fill_a_page_is_refused_and_nothing_is_written(self) -> None:
        """A byte too few, and one page too few."""
        runner = self.make_runner()
        if runner.page_group is None:  # a page of no bytes is full of anything
            runner.close()
            return
        before = runner.read_pages([0, 1])
        for data in ([before[0], before[1][:-1]], before[:1]):
            try:
                runner.write_pages([1, 0], data)
            except ShapeError:
                pass
            else:
                raise AssertionError("data that does not fill its pages was taken")
        assert runner.read_pages([0, 1]) == before
        runner.close()

    def test_scored_rows_are_the_tokens_that_follow(self) -> None:
        """Rows in order of position; log-probabilities do not depend on chunks."""
        whole = self._scores([len(PROMPT)])
        assert [row[1] for row in whole] == PROMPT[1:]
        assert all(logprob <= 0 and rank >= 1 for _, _, logprob, rank in whole)
        assert self._scores([1, 4, 6]) == whole

    def _scores(self, counts: list[int]) -> list[tuple[int, int, float, int]]:
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 16)
        rows, start = [], 0
        for n in counts:
            is_last = start + n == len(PROMPT)
            got = driver.step((0, start, n), samples=[0] if is_last else [], scores=[0], n_logprobs=2)
            assert got.row_logprob is not None
            assert got.row_rank is not None
            assert got.row_pos.tolist() == list(range(start, start + n))
            values = (got.row_pos, got.row_token, got.row_logprob, got.row_rank)
            rows += list(zip(*(column.tolist() for column in values), strict=True))
            start += n
        runner.close()
        return rows[:-1]

    def test_a_greedy_token_is_the_likeliest(self) -> None:
        """The shapes of what comes with log-probabilities."""
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 16)
        for n, start, count in ((3, 0, len(PROMPT)), (0, len(PROMPT), 1)):
            got = driver.step((0, start, count), samples=[0], n_logprobs=n)
            assert got.row_rank is not None
            assert got.top_ids is not None
            assert got.top_logprobs is not None
            assert got.row_rank.tolist() == [1]
            assert got.top_ids.shape == got.top_logprobs.shape == (1, n)
            assert n == 0 or got.top_ids[0, 0] == got.row_token[0]
            assert (np.diff(got.top_logprobs[0]) <= 0).all()
        runner.close()

    def test_min_tokens_forbids_the_stop_ids(self) -> None:
        """And only until they are out."""
        plain = self._alone(PROMPT, 1)
        runner = self.make_runner()
        driver = Driver(runner)
        held = SamplingParams(temperature=0.0, min_tokens=1)
        driver.admit(0, PROMPT, 16, params=held, stop_ids=plain)
        driver.admit(1, PROMPT, 16, params=GREEDY, stop_ids=plain)
        got = driver.step((0, 0, len(PROMPT)), (1, 0, len(PROMPT)), samples=[0, 1]).row_token.tolist()
        assert got[0] != plain[0]
        assert got[1] == plain[0]
        runner.close()

    def test_a_plan_over_the_limits_is_refused_and_nothing_is_queued(self) -> None:
        """The next step runs as if it had not been."""
        runner = self.make_runner()
        limits = runner.limits
        driver = Driver(runner)
        driver.admit(0, PROMPT, 16)
        for start, n in ((0, limits.max_step_tokens + 1), (limits.max_len_tokens, 1)):
            try:
                driver.submit((0, start, n), samples=[0])
            except ShapeError:
                pass
            else:
                raise AssertionError(f"a step of {n} tokens at {start} was accepted")
        assert driver.generate(0, len(PROMPT), 1) == self._alone(PROMPT, 1)
        runner.close()

    def test_close_may_be_called_twice(self) -> None:
        """And with steps under way."""
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 16)
        driver.submit((0, 0, len(PROMPT)), samples=[0])
        runner.close()
        runner.close()

    def test_drafts_change_no_token(self) -> None:
        """Right ones, wrong ones, and some that go wrong: each row is what plain decoding gives there."""
        n_more = 8
        for params in (GREEDY, RANDOM, SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4)):
            want = self._alone(PROMPT, 1 + n_more, params=params)
            wrong = [(token + 1) % 32 for token in want]
            for foretold in (want, wrong, want[:3] + wrong[3:], want[:4]):
                for n_rows in (2, 4, n_more):
                    assert self._with_drafts(params, want, foretold, n_rows) == want

    def _with_drafts(self, params: SamplingParams, want: list[int], foretold: list[int], n_rows: int) -> list[int]:
        runner = self.make_runner()
        if not runner.limits.takes_drafts:
            runner.close()
            return want
        driver = Driver(runner)
        driver.admit(0, PROMPT, len(PROMPT) + len(want), params=params)
        got = driver.step((0, 0, len(PROMPT)), samples=[0]).row_token.tolist()
        while len(got) < len(want):
            n_known = len(PROMPT) + len(got)
            n = min(n_rows, len(want) - len(got))
            first = len(PROMPT) + max(len(got) - 1, 0)  # what is foretold may begin with what is known
            drafts = {0: (first, foretold[first - len(PROMPT) :])}
            result = driver.step((0, n_known - 1, n), samples=[0], n_logprobs=1, drafts=drafts)
            tokens = result.row_token.tolist()
            assert result.seq_drafted is not None
            n_drafted = result.seq_drafted.tolist()[0]
            is_on = foretold[len(got) - 1 : len(got)] == got[-1:]
            assert n_drafted == (min(n - 1, len(foretold) - len(got)) if is_on else 0)
            n_right = 0
            while n_right < n_drafted and foretold[len(got) + n_right] == want[len(got) + n_right]:
                n_right += 1
            assert len(tokens) == n_right + 1
            assert result.row_pos.tolist() == list(range(n_known - 1, n_known + n_right))
            assert result.row_logprob is not None
            assert len(result.row_logprob) == len(tokens)
            got += tokens
        runner.close()
        return got

    def test_a_step_begins_where_the_drafts_before_it_turn_out_to_end(self) -> None:
        """It is submitted before that is known; another sequence is not disturbed."""
        want, want_other = self._alone(PROMPT, 8), self._alone(OTHER, 4)
        for n_right in range(4):
            runner = self.make_runner()
            if not runner.limits.takes_drafts:
                runner.close()
                return
            driver = Driver(runner)
            driver.admit(1, PROMPT, 20)
            driver.admit(2, OTHER, 10)
            n, m = len(PROMPT), len(OTHER)
            foretold = want[1 : 1 + n_right] + [(token + 1) % 32 for token in want[1 + n_right : 8]]
            driver.submit((1, 0, n), (2, 0, m), samples=[1, 2])
            driver.submit((1, n, 4), (2, m, 1), samples=[1, 2], drafts={1: (n + 1, foretold)})
            driver.submit((2, m + 1, 1), (1, n + 4, 3), samples=[1, 2], drafts={1: (n + 1, foretold)})
            rows: dict[int, list[int]] = {1: [], 2: []}
            for slots in ((1, 2), (1, 2), (2, 1)):
                result = runner.collect()
                for s, token in zip(result.row_seq.tolist(), result.row_token.tolist(), strict=True):
                    rows[slots[s]].append(token)
            assert rows[1] == want[: len(rows[1])]
            assert len(rows[1]) == 1 + (1 + min(n_right, 3)) + 1
            assert rows[2] == want_other[:3]
            # The steps left nothing behind: it goes on as a plain one.
            at = n + len(rows[1]) - 1
            assert driver.step((1, at, 1), samples=[1]).row_token.tolist() == want[len(rows[1]) :][:1]
            runner.close()

    def test_each_draft_has_a_mask(self) -> None:
        """And a mask that forbids a draft ends the rows that count there."""
        runner = self.make_runner()
        if not runner.limits.takes_drafts:
            runner.close()
            return
        driver = Driver(runner)
        driver.admit(0, PROMPT, 20)
        driver.admit(1, PROMPT[:3], 20)
        n = len(PROMPT)
        driver.step((0, 0, n), (1, 0, 3), samples=[0, 1])
        drafts = {0: (n + 1, [4, 6, 9])}
        driver.submit((1, 3, 1), (0, n, 4), samples=[0, 1], masked=[0, 1], drafts=drafts)
        driver.set_masks(1, [20], [4], [6], [8, 10], [11])
        result = runner.collect()
        tokens = result.row_token.tolist()
        assert result.row_seq.tolist() == [0, 1, 1, 1]
        assert tokens[:3] == [20, 4, 6]
        assert tokens[3] in (8, 10)
        runner.close()
