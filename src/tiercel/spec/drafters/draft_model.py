"""A whole model, smaller than the target, that drafts: with a runner and pages of its own, on the engine's thread,
between two steps of the target, with as many threads. So the two never compute at once.

It reads what came since it last drafted, all sequences in one pass, and then makes a token of each a pass. One pass is
always under way while the one before is looked at; no more are begun once what the next tokens can bring is worth less
than the pass takes, so at most one is too many. What it reads in one go is bounded (`RunnerLimits.max_step_tokens`): a
long prompt is read over several rounds, and the others draft meanwhile.

Going back is by length: what was computed of tokens that did not come is computed anew. Pages are bounded: the sequence
that drafted least lately gives its own up, and is read again when it is its turn.

Where both vocabularies are the same, a sampled sequence is drafted with its own parameters, seed and positions, so with
the noise that will choose its tokens (decision 0008). Where they are not, the drafter is greedy, tokens are mapped by
their bytes, and a draft that the target has no token for ends the guess.

What the model says of a token is not how often it comes: of what was drafted and then known, it learns that for each
eighth of the scale, for greedy and for sampled drafts apart.

Invariants (`check`): every page and slot is free or one sequence's; what is computed of a sequence has pages.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from tiercel.base.errors import RequestFailed, TiercelError
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import StepPlan
from tiercel.spec.drafters.interface import Proposal, Sampling

if TYPE_CHECKING:
    from tiercel.protocol.step import StepResult
    from tiercel.runner.interface import Runner
    from tiercel.spec.vocabulary_map import VocabularyMap

_GREEDY: Final = Sampling(SamplingParams(temperature=0.0), 0)
_N_MATCHED: Final = 16  # a model's guess rests on the whole text
_N_BINS: Final = 8
_PRIOR: Final = 8.0  # tokens that what is expected of a bin counts for
_FADES: Final = 0.99
_LEAST: Final = 1e-4
_NEWEST: Final = 0.1


class Confidence:
    """How often drafts come, by what the model says of them."""

    def __init__(self, *, is_sampled: bool) -> None:
        self._is_sampled = is_sampled
        self._right = [0.0] * _N_BINS
        self._tested = [0.0] * _N_BINS

    def chance(self, probability: float) -> float:
        """Estimate a draft's chance to come, if those before it do. Not 0, at most 1."""
        i = _bin_of(probability)
        # With the same noise two models that agree draw the same token, however unlikely it is.
        expected = probability**0.25 if self._is_sampled else probability
        estimate = (self._right[i] + _PRIOR * expected) / (self._tested[i] + _PRIOR)
        return min(max(estimate, _LEAST), 1.0)

    def observe(self, probability: float, *, is_right: bool) -> None:
        """Take note of what became of a draft behind right ones."""
        i = _bin_of(probability)
        self._right[i] = self._right[i] * _FADES + is_right
        self._tested[i] = self._tested[i] * _FADES + 1.0


def _bin_of(probability: float) -> int:
    return min(int(probability * _N_BINS), _N_BINS - 1)


class _Turn(msgspec.Struct):
    """One sequence's part in one call."""

    place: int
    sequence: "DraftModelSequence"
    n: int  # drafts asked for
    start: int
    count: int  # rows of the first pass
    ids: list[int] = msgspec.field(default_factory=list)  # drafted, in the model's own ids
    given: list[tuple[int, float]] = msgspec.field(default_factory=list)  # in the target's, with their chance
    chance: float = 1.0
    is_over: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all its tokens are read after the first pass, so that it drafts."""
        return self.start + self.count == len(self.sequence.tokens)


class DraftModelDrafter:
    """See the module. Owns the runner. `vocabulary` None: ids mean the same to both models."""

    def __init__(
        self,
        runner: "Runner",
        *,
        target_vocab_size: int,
        vocabulary: "VocabularyMap | None" = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        limits = runner.limits
        assert limits.takes_drafts, "draft_model: a runner that can go back is needed"
        assert not limits.state_bytes, "draft_model: a runner that can go back is needed"
        self.runner = runner
        self.vocabulary = vocabulary
        self._on_close = on_close
        self.pass_s = 0.0  # what a pass takes, lately; 0: not measured
        self._limits = limits
        self._n_ids = min(limits.vocab_size, target_vocab_size)
        self._free_pages = list(range(limits.n_pages - 1, -1, -1))
        self._free_slots = list(range(limits.n_slots - 1, -1, -1))
        self._holding: dict[DraftModelSequence, None] = {}  # those with a slot, the least lately asked first
        self._step_id = 0
        self._n_under_way = 0
        self._confidence = (Confidence(is_sampled=False), Confidence(is_sampled=True))

    def begin(self, prompt_ids: Sequence[int], *, shares: bool) -> "DraftModelSequence":
        """Begin a sequence whose tokens are the likeliest."""
        return self.begin_sampled(prompt_ids, _GREEDY, shares=shares)

    def begin_sampled(self, prompt_ids: Sequence[int], sampling: Sampling, *, shares: bool) -> "DraftModelSequence":
        """Begin a sequence. Nothing is shared in any case."""
        if self.vocabulary is not None:
            sampling = _GREEDY
        params = msgspec.structs.replace(sampling.params, logprobs=None, prompt_logprobs=None, logprob_token_ids=None)
        confidence = self._confidence[not params.is_greedy]
        return DraftModelSequence(self, prompt_ids, msgspec.structs.replace(sampling, params=params), confidence)

    def own_ids(self, target_ids: Sequence[int]) -> list[int]:
        """Give a text in the model's own tokens. Ids that it has no row for are left out."""
        if self.vocabulary is not None:
            return self.vocabulary.to_draft(target_ids)
        n = self._limits.vocab_size
        return [i for i in target_ids if i < n]

    def _target_id(self, own_id: int) -> int:
        if self.vocabulary is not None:
            return self.vocabulary.to_target(own_id)
        return own_id if own_id < self._n_ids else -1

    def propose_all(
        self, asked: "Sequence[tuple[DraftModelSequence, int]]", *, token_s: float = 0.0, row_s: float = 0.0
    ) -> list[Proposal | Exception | None]:
        """See `BatchDrafter.propose_all`."""
        found: list[Proposal | Exception | None] = [None] * len(asked)
        while self._n_under_way:  # of a call that ended with a bug
            self._drop()
        turns = self._plan(asked)
        under_way: list[list[_Turn]] = []
        n_passes = 0
        try:
            if turns:
                self._submit_first(turns)
                under_way.append(turns)
                n_passes = 1
            while under_way:
                going = [t for t in turns if t.is_whole and not t.is_over and t.n > n_passes]
                if going and self._is_worth_a_pass(going, token_s, row_s):
                    self._submit_next(going, n_passes)
                    under_way.append(going)
                    n_passes += 1
                self._take(self._collect(), under_way[0], is_first=under_way[0] is turns)
                del under_way[0]
        except TiercelError as error:
            for turn in (turn for part in under_way for turn in part):
                found[turn.place] = error
                turn.sequence.forget()
            while self._n_under_way:
                self._drop()
        for turn in turns:
            if found[turn.place] is None:
                found[turn.place] = self._answer(turn)
        return found

    def _plan(self, asked: "Sequence[tuple[DraftModelSequence, int]]") -> list[_Turn]:
        """Find out what each has to read, those first that lack least, and make room for it."""
        turns = []
        for place, (sequence, n_max) in enumerate(asked):
            sequence.settle()
            n = min(n_max, self._limits.max_len_tokens - len(sequence.tokens))
            if n > 0 and len(sequence.tokens):
                start = min(sequence.n_computed, len(sequence.tokens) - 1)
                turns.append(_Turn(place, sequence, n, start, len(sequence.tokens) - start))
                if sequence in self._holding:
                    self._holding[sequence] = self._holding.pop(sequence)  # to the end of the line
        turns.sort(key=lambda turn: turn.count)
        n_left, kept = self._limits.max_step_tokens, []
        protected = {turn.sequence for turn in turns}
        for turn in turns:
            turn.count = min(turn.count, n_left)
            end = turn.start + turn.count + (turn.n - 1 if turn.is_whole else 0)
            if turn.count and self._make_room(turn.sequence, end, protected):
                n_left -= turn.count
                kept.append(turn)
        return kept

    def _make_room(self, sequence: "DraftModelSequence", n_tokens: int, protected: "set[DraftModelSequence]") -> bool:
        """Give the sequence a slot, and pages for so many tokens. Others than `protected` give theirs up for it."""
        n_more = -(-n_tokens // self._limits.page_size_tokens) - len(sequence.page_ids)
        while len(self._free_pages) < n_more or (sequence.slot < 0 and not self._free_slots):
            victim = next((one for one in self._holding if one not in protected), None)
            if victim is None:
                return False
            self._evict(victim)
        if sequence.slot < 0:
            sequence.slot = self._free_slots.pop()
            self._holding[sequence] = None
        sequence.page_ids += [self._free_pages.pop() for _ in range(n_more)]
        return True

    def _evict(self, sequence: "DraftModelSequence") -> None:
        if sequence in self._holding:
            del self._holding[sequence]
            self._free_pages += sequence.page_ids
            self._free_slots.append(sequence.slot)
            if sequence.is_admitted:
                self.runner.release(sequence.slot)
        sequence.page_ids, sequence.slot, sequence.is_admitted = [], -1, False
        sequence.forget()

    def _submit_first(self, turns: list[_Turn]) -> None:
        for turn in turns:
            one = turn.sequence
            if one.is_admitted:
                self.runner.release(one.slot)
            sampling = one.sampling
            one.is_admitted = True
            self.runner.admit(
                one.slot, one.tokens, one.n_prompt, sampling.params, sampling.seed, list(sampling.stop_ids)
            )
            self.runner.set_pages(one.slot, 0, one.page_ids)
        self._submit(
            turns, [turn.start for turn in turns], [turn.count for turn in turns], [turn.is_whole for turn in turns]
        )

    def _submit_next(self, turns: list[_Turn], n_before: int) -> None:
        """Have the draft before computed, which may be one that is on its way, and the next one made."""
        starts = [len(turn.sequence.tokens) + n_before - 1 for turn in turns]
        self._submit(turns, starts, [1] * len(turns), [True] * len(turns))

    def _submit(self, turns: list[_Turn], starts: list[int], counts: list[int], samples: list[bool]) -> None:
        plan = StepPlan(
            step_id=self._step_id,
            seq_slot=array("i", [turn.sequence.slot for turn in turns]),
            seq_start=array("i", starts),
            seq_tokens=array("i", counts),
            seq_samples=memoryview(bytes(samples)).cast("?"),
            seq_scores=memoryview(bytes(len(turns))).cast("?"),
            n_logprobs=0,
        )
        self.runner.submit(plan)
        self._step_id += 1
        self._n_under_way += 1

    def _collect(self) -> "StepResult":
        self._n_under_way -= 1
        return self.runner.collect()

    def _drop(self) -> None:
        try:
            self._collect()
        except TiercelError:
            return  # it is told already that one of them failed

    def _is_worth_a_pass(self, going: list[_Turn], token_s: float, row_s: float) -> bool:
        """Say whether what may come takes longer without drafts than a pass and the rows that see whether it does."""
        if not token_s or not self.pass_s:
            return True
        return sum(max(turn.chance * token_s - row_s, 0.0) for turn in going) >= self.pass_s

    def _take(self, result: "StepResult", turns: list[_Turn], *, is_first: bool) -> None:
        """Take note of what a pass computed and drafted."""
        assert result.row_logprob is not None
        if not is_first and result.compute_ns > 0:
            took_s = result.compute_ns * 1e-9
            self.pass_s = took_s if self.pass_s == 0.0 else self.pass_s + _NEWEST * (took_s - self.pass_s)
        rows = zip(result.row_seq.tolist(), result.row_token.tolist(), result.row_logprob.tolist(), strict=True)
        by_place = {place: (token, logprob) for place, token, logprob in rows}
        for i, turn in enumerate(turns):
            sequence = turn.sequence
            if is_first:
                sequence.computed[turn.start :] = sequence.tokens[turn.start : turn.start + turn.count]
            else:
                sequence.computed.append(turn.ids[len(sequence.computed) - len(sequence.tokens)])
            if i in by_place:
                self._take_draft(turn, *by_place[i])

    def _take_draft(self, turn: _Turn, token: int, logprob: float) -> None:
        turn.ids.append(max(token, 0))
        if turn.is_over:
            return
        probability = math.exp(min(logprob, 0.0)) if not math.isnan(logprob) else math.nan
        target_id = self._target_id(token) if token >= 0 else -1
        if token == -1 or math.isnan(probability):
            turn.is_over, turn.chance = True, math.nan
        elif target_id < 0:
            turn.is_over = True
        else:
            turn.chance *= turn.sequence.confidence.chance(probability)
            turn.given.append((target_id, max(turn.chance, _LEAST)))
            turn.sequence.drafted.append((token, probability))

    def _answer(self, turn: _Turn) -> Proposal | Exception | None:
        if math.isnan(turn.chance):
            turn.sequence.forget()
            return RequestFailed(
                "draft_model: its logits hold a NaN; finite numbers are needed; choose another draft model"
            )
        if not turn.given:
            return None
        return Proposal([i for i, _ in turn.given], [chance for _, chance in turn.given], _N_MATCHED)

    def give_back(self, sequence: "DraftModelSequence") -> None:
        """Take the sequence's slot and pages."""
        self._evict(sequence)

    def check(self) -> None:
        """Raise AssertionError when an invariant of the module's docstring does not hold."""
        pages, slots = list(self._free_pages), list(self._free_slots)
        for one in self._holding:
            pages += one.page_ids
            slots.append(one.slot)
            one.check(self._limits.page_size_tokens)
        assert sorted(pages) == list(range(self._limits.n_pages)), "draft_model: pages are lost or shared"
        assert sorted(slots) == list(range(self._limits.n_slots)), "draft_model: slots are lost or shared"
        assert self._n_under_way == 0, "draft_model: a pass is under way between two steps"

    @property
    def n_pages_free(self) -> int:
        """Pages that no sequence has."""
        return len(self._free_pages)

    def close(self) -> None:
        """Stop the runner."""
        self.runner.close()
        self._on_close()


class DraftModelSequence:
    """One sequence, in the draft model's tokens."""

    def __init__(
        self, drafter: DraftModelDrafter, prompt_ids: Sequence[int], sampling: Sampling, confidence: Confidence
    ) -> None:
        self.sampling = sampling
        self.confidence = confidence
        self.tokens = array("i")
        self.n_prompt = 1
        self.computed = array("i")  # whose keys and values are in the pages
        self.drafted: list[tuple[int, float]] = []  # since it was told tokens, with what the model said of them
        self.page_ids: list[int] = []
        self.slot = -1
        self.is_admitted = False
        self._drafter = drafter
        self._untold = list(prompt_ids)
        self._is_begun = False
        self._n_same = 0  # of `computed`, those that are known to be the tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens; they are read when a guess is asked for."""
        self._settle_prompt()
        self._untold += token_ids

    def propose(self, n_max: int) -> Proposal | None:
        """Guess for this sequence alone."""
        answer = self._drafter.propose_all([(self, n_max)])[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """Forget the sequence."""
        self._drafter.give_back(self)
        self.tokens, self._untold = array("i"), []

    def forget(self) -> None:
        """Let all be computed anew."""
        self.computed = array("i")
        self._n_same = 0
        self.drafted = []

    def settle(self) -> None:
        """Write down what came, and see how much of what is computed holds."""
        self._settle_prompt()
        new = self._drafter.own_ids(self._untold)
        self._untold = []
        for (draft, probability), token in zip(self.drafted, new, strict=False):
            self.confidence.observe(probability, is_right=draft == token)
            if draft != token:
                break
        if new:
            self.drafted = []
        self.tokens.extend(new)
        n, n_max = self._n_same, min(len(self.computed), len(self.tokens))
        while n < n_max and self.computed[n] == self.tokens[n]:
            n += 1
        self._n_same = n
        del self.computed[n:]

    def _settle_prompt(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            self.tokens.extend(self._drafter.own_ids(self._untold))
            self._untold = []
            self.n_prompt = max(len(self.tokens), 1)

    @property
    def n_computed(self) -> int:
        """Tokens whose keys and values are there."""
        return self._n_same

    def check(self, page_size_tokens: int) -> None:
        """Raise AssertionError when it has fewer pages than what is computed needs."""
        n_room = len(self.page_ids) * page_size_tokens
        assert len(self.computed) <= n_room, f"draft_model: {len(self.computed)} tokens in pages for {n_room}"
