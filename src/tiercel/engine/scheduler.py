"""The scheduler: which tokens of which sequences the next step computes, and who gets the pages. Pure policy over plain
state: no threads, no clock, no runner. Owner: `engine.core`, which carries out what it plans.

There are no phases. A sequence has `n_total` tokens, known or being sampled, and `n_computed` of them are planned; each
step gives some of the rest. Prefill, its chunks, decoding and the return of a preempted sequence are this one case.

Order of a plan, within one budget of tokens:
1. Room: every decoding sequence at the end of its last page gets a page, if need be by preempting (`_victim`).
2. Decodes: one token each. They come first, so that no prompt, however long, makes a running stream miss a step.
3. Chunks of running prompts, in the order of admission.
4. Admissions, in the order of the queue, if nothing was preempted. All pages of the known tokens are taken at once, so
   that only decoding ever runs out of pages, and one spare page a running sequence is left, so that an admission
   does not preempt at once. The head of the queue waits for room and is not passed; but a sequence whose next page
   is being computed by this very plan is passed, for at most a few steps, as it will then find that page. So is one
   whose next page a tier has or may have (LOADING), until that is here or will not come: each wait has a deadline.
   A load needs the room that its sequence will need, and gives it up before anybody is preempted.
5. Keys: pages that are full of known tokens after this plan can be matched from the next plan on.

The next step is planned while this one runs, so tokens sampled by a running step count but are not known. Why pages can
be reused at once, although a running step may still write to them: steps run in the order of their plans, so every
write of an older step comes before any of a later one, and a page's new owner writes each position before it reads
it. Why no stale row can spoil a page that has a key: a key is set for known tokens only, in a plan that computes the
last of them or later; every row that such a page gets from its sequence computes just these tokens, and rows at later
positions belong to other pages. A runner whose drafter writes again at the last places of a sequence says how many
known tokens behind a page's end put an end to that (`n_unsettled_tokens`); the key waits for these.

Drafts. A decoding sequence may want tokens computed that are only foretold. They take rows that are set apart for them
(`max_draft_rows`) and pages that are free, by no preemption. Which of them a step computes, and which turn out right,
is known when it is collected: until then n_computed and n_total say what may be at most, and `settle` takes back the
rest. A draft's key and values stand behind the known tokens, so the reasons above hold for it too.

A step that fails may leave pages that were keyed too early (`fail`): the keys set since its plan are forgotten, and
sequences that found one of these pages are computed again.

Invariants, verified by `check`:
1. A running sequence has one slot of its own, and pages for all that is planned; n_computed < n_total, but for a
   pooled one whose last rows are on their way. Where nothing is kept by the token there are no pages, and a slot is
   all the room that a sequence needs.
2. A page's references are the running sequences whose table names it, and the loads (`kv.tiers`) and pins
   (`engine.pins`) that hold it.
3. Free, held and used slots are disjoint and all there are; at most max_num_seqs run.
4. The queue is sorted, and what waits has neither slot nor pages.
5. A running sequence's keyed pages carry its own keys, and their tokens are known and planned.
"""

from array import array
from bisect import bisect_left, insort
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, field

from tiercel.engine.config import EngineConfig
from tiercel.engine.pins import DEFAULT_TTL_S, Pins
from tiercel.engine.request import Sequence, State
from tiercel.engine.states import PlannedSave, StateKeeper
from tiercel.engine.tiers import ask_of
from tiercel.kv.page_pool import PagePool
from tiercel.kv.snapshots import Snapshot
from tiercel.protocol.step import OWN_DRAFTS, Bools, Drafts, RunnerLimits, StepPlan, StepResult

if TYPE_CHECKING:
    from tiercel.kv.tiers.page_tiers import PageTiers

# Sequences passed in one plan because another computes their next page; bounds the look-ups of a long queue.
N_PASSED_MAX = 32
_NEVER = 1 << 62


class PlannedStep(Struct, eq=False):
    """A step and what must be told to the runner before it. One entry a sequence in the first five lists."""

    step_id: int
    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    scores: list[bool] = field(default_factory=list)
    masked: list[int] = field(default_factory=list)  # the places of those whose sampled tokens masks restrict
    foretold: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # by place: from which position on, what
    admitted: list[Sequence] = field(default_factory=list)
    page_writes: list[tuple[int, int, list[int]]] = field(default_factory=list)  # slot, first index, page ids
    keys_set: list[bytes] = field(default_factory=list)
    hits: list[tuple[Sequence, list[bytes]]] = field(default_factory=list)  # admitted sequences and the keys they found
    discarded: set[Sequence] = field(default_factory=set)  # their rows are not to be believed
    loads: list[tuple[Sequence, Snapshot]] = field(default_factory=list)  # states that admitted sequences go on from
    saves: list[PlannedSave] = field(default_factory=list)  # what is saved behind it
    saves_inside: dict[int, PlannedSave] = field(default_factory=dict)  # and inside it, by place, if it comes by
    n_logprobs: int | None = None
    n_rows: int = 0
    n_draft_rows: int = 0
    n_draft: int = 0  # drafts that the runner makes by itself of each sampled sequence, at its end
    drafts_own: bool = False  # those of `foretold` are what the runner drafted
    has_scores: bool = False

    def add(self, sequence: Sequence, n_tokens: int, *, samples: bool, scores: bool) -> None:
        """Plan the sequence's next `n_tokens` tokens."""
        start = sequence.n_computed
        if samples and sequence.constraint is not None:
            self.masked.append(len(self.sequences))
        self.sequences.append(sequence)
        self.starts.append(start)
        self.counts.append(n_tokens)
        self.samples.append(samples)
        self.scores.append(scores)
        sequence.n_computed = start + n_tokens
        sequence.last_step_id = self.step_id
        if samples and sequence.pools is None:
            sequence.n_total += 1
            if sequence.n_logprobs is not None:
                self._want_logprobs(sequence.n_logprobs)
        if scores and sequence.pools is None:
            self.has_scores = True
            self._want_logprobs(sequence.n_prompt_logprobs or 0)
        self.n_rows += n_tokens if scores else samples

    def add_drafts(self, n_drafts: int) -> None:
        """Plan for the sequence just added that so many tokens more may be computed and sampled, if they are
        foretold.
        """
        sequence, place = self.sequences[-1], len(self.sequences) - 1
        self.foretold[place] = sequence.foretold_from, sequence.foretold
        self.counts[-1] += n_drafts
        sequence.n_computed += n_drafts
        sequence.n_total += n_drafts
        sequence.n_open += 1
        self.n_rows += n_drafts
        self.n_draft_rows += n_drafts

    @property
    def only_decodes(self) -> bool:
        """Whether each sequence computes one token, and none waits for a mask."""
        return not self.masked and not self.admitted and sum(self.counts) == len(self.counts)

    def _want_logprobs(self, n: int) -> None:
        self.n_logprobs = n if self.n_logprobs is None else max(n, self.n_logprobs)

    def to_plan(self) -> StepPlan:
        """Give the step in the runner's words."""
        return StepPlan(
            step_id=self.step_id,
            seq_slot=array("i", [s.slot for s in self.sequences]),
            seq_start=array("i", self.starts),
            seq_tokens=array("i", self.counts),
            seq_samples=memoryview(bytes(self.samples)).cast("?"),
            seq_scores=memoryview(bytes(self.scores)).cast("?"),
            n_logprobs=self.n_logprobs,
            seq_masked=self._seq_masked() if self.masked else None,
            drafts=self._drafts() if self.foretold else None,
            n_draft=self.n_draft,
        )

    def _seq_masked(self) -> Bools:
        is_masked = bytearray(len(self.sequences))
        for i in self.masked:
            is_masked[i] = True
        return memoryview(bytes(is_masked)).cast("?")

    def _drafts(self) -> Drafts:
        drafts = self._foretold_drafts()
        if not self.saves_inside:
            return drafts
        saves = [self.saves_inside.get(i) for i in range(len(self.sequences))]
        to = array("i", [-1 if save is None else save.snapshot.place_idx for save in saves])
        at = array("i", [0 if save is None else save.snapshot.n_tokens for save in saves])
        return msgspec.structs.replace(drafts, saves=(to, at))

    def _foretold_drafts(self) -> Drafts:
        if self.drafts_own:
            n = len(self.sequences)
            whose = array("i", [OWN_DRAFTS if i in self.foretold else -1 for i in range(n)])
            return Drafts(whose, array("i", bytes(4 * n)), array("i"))
        each = [self.foretold.get(i, (-1, [])) for i in range(len(self.sequences))]
        ids = array("i", [token for _, tokens in each for token in tokens])
        return Drafts(array("i", [first for first, _ in each]), array("i", [len(tokens) for _, tokens in each]), ids)


class Scheduler:
    """Decides; see the module's docstring. `now_s` is whatever clock the caller keeps."""

    def __init__(self, limits: RunnerLimits, config: EngineConfig) -> None:
        self.pool = PagePool(limits.n_pages, limits.page_size_tokens)
        self.pins = Pins(self.pool)
        self.running: dict[Sequence, None] = {}  # in the order of admission
        self.waiting: list[Sequence] = []  # in the order of rank
        self.n_preemptions = 0
        self.n_tokens_lost = 0  # planned, then thrown away by preemption
        self.n_prefix_queries_tokens = 0
        self.n_prefix_hits_tokens = 0
        self._limits = limits
        self._page_size = limits.page_size_tokens
        self._has_pages = limits.n_pages > 0
        self._n_running_max = min(config.max_num_seqs, limits.n_slots)
        self._n_draft_rows_max = config.max_draft_rows
        self._drafts_own = limits.n_draft_max > 0
        self._n_unsettled = limits.n_unsettled_tokens
        self._n_reached = limits.draft_reach_tokens if config.max_draft_rows else 0
        self._n_rows_max = limits.max_logits_rows - config.max_draft_rows
        self._budget_tokens = min(config.max_num_batched_tokens, limits.max_step_tokens - config.max_draft_rows)
        self._chunk_tokens_max = config.long_prefill_token_threshold
        # Where a token sees later ones, nothing of a text can be had without all of it.
        # A state that is not kept is as good as none of the pages before it.
        can_cache = not limits.needs_whole and (limits.state_bytes == 0 or limits.n_snapshots > 0) and self._has_pages
        self._is_caching = config.enable_prefix_caching and can_cache
        self.states = StateKeeper(limits) if self._is_caching and limits.state_bytes else None
        self._free_slots = list(range(limits.n_slots - 1, -1, -1))
        self._held_slots: list[tuple[int, int]] = []  # (last step that names it, slot)
        self._released_slots: list[int] = []  # free, and the runner does not know yet
        self._planned_id = -1
        self._collected_id = -1
        self.tiers: PageTiers | None = None  # below the pool
        self.n_loading = 0  # sequences that the last plan passed, as they wait for a tier

    @property
    def collected_id(self) -> int:
        """The last step that has ended."""
        return self._collected_id

    @property
    def is_caching(self) -> bool:
        """Whether what is computed may be found again."""
        return self._is_caching

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the queue.

        Requires: it fits the model's context and the pool, alone (`engine.admission` refuses what never can).
        """
        insort(self.waiting, sequence, key=_rank)

    @property
    def n_begun_next(self) -> int:
        """Tokens of the sequence that the next plan may begin; 0 if none waits that has a slot and pages."""
        if not self.waiting or not self._free_slots or len(self.running) >= self._n_running_max:
            return 0
        sequence = self.waiting[0]
        n_tokens = len(sequence.token_ids)
        has_room = self.pool.n_free * self._page_size > n_tokens
        return n_tokens if has_room and sequence.state is not State.LOADING else 0

    def plan(self, now_s: float, *, n_draft: int = 0) -> PlannedStep | None:
        """Plan the next step, or None when nothing can be computed now. `n_draft`: what its runner drafts by itself."""
        step = PlannedStep(self._planned_id + 1, n_draft=n_draft, drafts_own=self._drafts_own)
        self.n_loading = 0
        self.pins.expire(now_s)
        if self.states is not None:
            self.states.expire(now_s)
        has_preempted = self._make_room(step)
        prefilling = self._plan_decodes(step)
        n_left = self._budget_tokens - len(step.sequences)
        if prefilling:
            n_left = self._plan_chunks(step, prefilling, n_left)
        if self.waiting and not has_preempted:
            self._admit(step, n_left, now_s)
        if not step.sequences:
            return None
        self._planned_id = step.step_id
        if self._is_caching:
            for sequence in step.sequences:
                n_settled = min(sequence.n_computed, len(sequence.token_ids) - self._n_unsettled)
                if n_settled >= sequence.key_next_at:
                    step.keys_set += self._set_keys(sequence, n_settled, step.step_id)
            if self.states is not None:
                self.states.plan_saves(step)
        return step

    def collected(self, step: PlannedStep, *, is_failed: bool = False) -> None:
        """Note that a step has ended, well or not: slots that only it and older ones named are free."""
        assert step.step_id == self._collected_id + 1, "engine.scheduler: steps are collected in order"
        self._collected_id = step.step_id
        if self.states is not None and (step.saves or step.loads or step.saves_inside):
            for sequence, snapshot in self.states.collected(step, is_failed=is_failed):
                self._offer_state(sequence, snapshot)
        if self._held_slots:
            self._released_slots += [slot for fence, slot in self._held_slots if fence <= step.step_id]
            self._free_slots += [slot for fence, slot in self._held_slots if fence <= step.step_id]
            self._held_slots = [held for held in self._held_slots if held[0] > step.step_id]

    def taken(self, step: PlannedStep, result: StepResult) -> None:
        """Note that the tokens of a step with drafts were taken: the states that it came by can be found."""
        if self.states is not None:
            for sequence, snapshot in self.states.taken(step, result):
                self._offer_state(sequence, snapshot)

    def settle(self, step: PlannedStep, n_sampled: dict[int, int]) -> None:
        """Take back what a step with drafts did not sample. `n_sampled`: tokens by place. Before they are taken."""
        for place in step.foretold:
            sequence = step.sequences[place]
            sequence.n_open -= 1
            if sequence in step.discarded or sequence.state is State.FINISHED:
                continue
            n_less = step.counts[place] - n_sampled.get(place, 0)
            sequence.n_total -= n_less
            if sequence.state is State.RUNNING:
                sequence.n_computed -= n_less

    def pop_released_slots(self) -> list[int]:
        """Give, once, the slots that the runner must release before anything else is admitted."""
        released = self._released_slots
        if released:
            self._released_slots = []
        return released

    def finish(self, sequence: Sequence, *, is_complete: bool = False, is_spoilt: bool = False) -> None:
        """End a sequence in whatever state it is; without effect when it has ended.

        `is_complete`: its last known token came from a step that was collected, so all tokens before it are computed.
        `is_spoilt`: what its pages hold must not be found by others.
        """
        if sequence.state is State.RUNNING:
            if is_complete and self._is_caching:
                n_settled = min(sequence.n_computed, len(sequence.token_ids) - max(self._n_unsettled, 1))
                self._set_keys(sequence, n_settled, self._collected_id)
            if not is_spoilt:
                self._keep_pinned(sequence)
            self._leave(sequence)
        elif sequence.state in (State.WAITING, State.LOADING):
            self._unqueue(sequence)
        if is_spoilt:
            sequence.is_spoilt = True
            for key in sequence.page_keys.extend(sequence.token_ids):
                self.pool.forget(key)
                if self.states is not None:
                    self.states.store.forget(key)
        sequence.state = State.FINISHED

    def fail(self, step: PlannedStep, later: list[PlannedStep]) -> None:
        """Undo what a failed step left behind. Its sequences must then be finished by the caller.

        Keys set since its plan may name pages that were never written. Sequences of `later` steps, still running, that
        found one of them read garbage: their rows are discarded and they are computed again. What later steps save of
        the failed one's sequences is discarded too.
        """
        for planned in later:
            planned.discarded.update(step.sequences)
        doubtful = {key for planned in (step, *later) for key in planned.keys_set}
        for key in doubtful:
            self.pool.forget(key)
        misled = {s for planned in later for s, keys in planned.hits if not doubtful.isdisjoint(keys)}
        for sequence in misled:
            for planned in later:
                planned.discarded.add(sequence)
            sequence.n_total = len(sequence.token_ids)
            if sequence.state is State.RUNNING:
                self._preempt(sequence)

    def _make_room(self, step: PlannedStep) -> bool:
        """Give a page to each decoding sequence that needs one; return whether something was preempted."""
        needy = [s for s in self.running if s.n_computed == s.n_room and s.n_total < s.max_total_tokens]
        has_preempted = False
        for sequence in needy:
            while sequence.state is State.RUNNING:
                page_ids = self.pool.acquire(1)
                if page_ids is not None:
                    sequence.page_ids += page_ids
                    sequence.n_room += self._page_size
                    break
                if self.pins.surrender() or (self.tiers is not None and self.tiers.surrender()):
                    continue
                self._preempt(self._victim())
                has_preempted = True
        step.page_writes = [(s.slot, len(s.page_ids) - 1, s.page_ids[-1:]) for s in needy if s.state is State.RUNNING]
        return has_preempted

    def _victim(self) -> Sequence:
        """Choose whom to preempt: worst priority first, then whoever loses the least work, then the newest.

        Work is what would be computed again: planned tokens but for the leading pages that others hold too. So the one
        that has computed most is never chosen while another runs, grows, and ends: preemption cannot go on for ever.
        Who would give no page back is not chosen.
        """
        n_refs, size = self.pool.n_refs, self._page_size

        def cost(sequence: Sequence) -> tuple[int, int, int]:
            n_shared = 0
            for page_id in sequence.page_ids:
                if n_refs(page_id) == 1:
                    break
                n_shared += size
            return -sequence.rank[0], sequence.n_computed - n_shared, -sequence.rank[1]

        for sequence in sorted(self.running, key=cost):
            if any(n_refs(page_id) == 1 for page_id in reversed(sequence.page_ids)):
                return sequence
        raise AssertionError("engine.scheduler: no page is free and no running sequence holds one of its own")

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's slot and pages; it starts again from the queue. Keyed pages stay findable until taken."""
        self.n_preemptions += 1
        self.n_tokens_lost += sequence.n_computed
        sequence.n_preemptions += 1
        if self.tiers is not None and sequence.ask is not None:
            self.tiers.preempted(sequence.ask, sequence.page_keys.keys[: sequence.n_computed // self._page_size])
            sequence.ask = None
        self._leave(sequence)
        sequence.state = State.WAITING
        self.add(sequence)

    def reset_cached(self) -> bool:
        """Forget what is cached. False, and no change, while a sequence runs."""
        is_reset = self.pool.reset_cached()
        if is_reset and self.states is not None:
            self.states.reset()
        return is_reset

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence]
        if self.states is not None:
            self.states.leave(sequence)
        self.pool.release(sequence.page_ids)
        sequence.page_ids = []
        sequence.n_room = sequence.n_computed = 0
        if sequence.last_step_id > self._collected_id:
            self._held_slots.append((sequence.last_step_id, sequence.slot))
        else:
            self._released_slots.append(sequence.slot)
            self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _plan_decodes(self, step: PlannedStep) -> list[Sequence]:
        """Plan one token of each sequence that lacks one; return those that lack more."""
        prefilling = []
        for sequence in self.running:
            n_missing = sequence.n_total - sequence.n_computed
            if n_missing != 1 or sequence.pools is not None:
                prefilling.append(sequence)
            elif sequence.n_total < sequence.max_total_tokens:
                n_drafts = self._n_drafts(step, sequence) if sequence.n_drafts_wanted else 0
                step.add(sequence, 1, samples=True, scores=False)
                if n_drafts or sequence.n_open:
                    step.add_drafts(n_drafts)
        return prefilling

    def _n_drafts(self, step: PlannedStep, sequence: Sequence) -> int:
        """Give how many of the drafts that a sequence wants there is room for; pages are taken if they are free."""
        n = min(
            sequence.n_drafts_wanted,
            sequence.max_total_tokens - sequence.n_total - 1,
            self._n_draft_rows_max - step.n_draft_rows,
        )
        # A runner that drafts by itself keeps what its drafter makes of the tokens behind these, too.
        n_wanted = max(n, 0)
        if self._n_reached:
            n_wanted = min(n_wanted + self._n_reached, sequence.max_total_tokens - sequence.n_total)
        while n_wanted > sequence.n_room - sequence.n_computed - 1:
            # One page for each that runs is left alone, as for an admission: no draft makes anyone be preempted soon.
            page_ids = self.pool.acquire(1) if self.pool.n_free > len(self.running) else None
            if page_ids is None:
                return max(min(n, sequence.n_room - sequence.n_computed - 1), 0)
            step.page_writes.append((sequence.slot, len(sequence.page_ids), page_ids))
            sequence.page_ids += page_ids
            sequence.n_room += self._page_size
        return max(n, 0)

    def _plan_chunks(self, step: PlannedStep, prefilling: list[Sequence], n_left: int) -> int:
        """Plan chunks of prompts that are under way; return what is left of the budget."""
        n_behind = len(prefilling)
        for sequence in prefilling:
            n_behind -= 1  # each of them may need a row of logits
            n_left -= self._plan_chunk(step, sequence, n_left, n_rows_kept=n_behind)
        return n_left

    def _plan_chunk(self, step: PlannedStep, sequence: Sequence, n_left: int, *, n_rows_kept: int) -> int:
        n_missing = sequence.n_total - sequence.n_computed
        n = min(n_missing, n_left)
        if self._limits.needs_whole:
            n = n if n == n_missing else 0
        elif self._chunk_tokens_max and len(self.running) + len(self.waiting) > 1:
            n = min(n, self._chunk_tokens_max)
        if self.states is not None and n > 0:
            n = self.states.cut(sequence, n)
        if sequence.pools is not None:
            # A pooling runner has a row for each token of a step.
            if n > 0:
                step.add(sequence, n, samples=n == n_missing, scores=sequence.pools == "all")
            return max(n, 0)
        scores = sequence.is_scoring and sequence.n_computed < sequence.n_prompt - 1 and n_missing > 1
        if scores:
            n = min(n, self._n_rows_max - (step.n_rows - step.n_draft_rows) - n_rows_kept)
        if n <= 0:
            return 0
        # One token that is sampled has no row to score, and the flag would only cost.
        step.add(sequence, n, samples=n == n_missing, scores=scores and not (n == 1 == n_missing))
        return n

    def _admit(self, step: PlannedStep, n_left: int, now_s: float) -> None:
        """Start what waits, in order, as far as tokens, slots, logits rows and pages go."""
        coming: set[bytes] | None = None  # keys that the end of this plan sets
        i = n_passed = 0
        while i < len(self.waiting) and n_passed < N_PASSED_MAX and n_left > 0:
            sequence = self.waiting[i]
            if sequence.state is State.LOADING and self._still_loads(sequence):
                i += 1
                continue
            if len(self.running) >= self._n_running_max or not self._free_slots:
                return
            if step.n_rows - step.n_draft_rows >= self._n_rows_max or sequence.last_step_id > self._collected_id:
                return  # in the second case tokens of it that were sampled before its preemption are still on their way
            if self._limits.needs_whole and len(sequence.token_ids) > n_left:
                return
            keys: list[bytes] = []
            if self._is_caching and sequence.reads_cache:
                keys = sequence.page_keys.extend(sequence.token_ids)[: (len(sequence.token_ids) - 1) // self._page_size]
            hit_ids = self.pool.lookup(keys)
            if len(hit_ids) < len(keys):
                if coming is None:
                    coming = set()
                    for planned in step.sequences:
                        coming.update(self._keys_coming(planned))
                if keys[len(hit_ids)] in coming:
                    i, n_passed = i + 1, n_passed + 1
                    continue
            if self._must_wait(sequence, keys, hit_ids):
                i, n_passed = i + 1, n_passed + 1
                continue
            found = None if self.states is None else self.states.longest(keys, len(hit_ids))
            n_hits = len(hit_ids)
            if self.states is not None:
                n_hits = 0 if found is None else found.n_tokens // self._page_size
            if not self._start(sequence, hit_ids[:n_hits], n_hits * self._page_size):
                return
            if self.states is not None:
                self.states.begin(sequence, len(hit_ids))
                if found is not None:
                    self.states.store.pin(found)
                    step.loads.append((sequence, found))
            del self.waiting[i]
            self._tell_tiers(sequence, hit_ids[:n_hits])
            if found is not None:
                self._offer_state(sequence, found)
            self._count_admission(sequence, n_hits * self._page_size, now_s)
            step.admitted.append(sequence)
            step.hits.append((sequence, keys[:n_hits]))
            n_left -= self._plan_chunk(step, sequence, n_left, n_rows_kept=0)
            if coming is not None:
                coming.update(self._keys_coming(sequence))

    def _must_wait(self, sequence: Sequence, keys: list[bytes], hit_ids: list[int]) -> bool:
        """Say whether more of it will be found later: a state that is on its way, or pages that a tier has."""
        n_useful = len(keys)
        if self.states is not None:
            if self.states.is_awaited(keys, self.states.longest(keys, len(hit_ids))):
                return True
            n_useful = self.states.reach(keys)
            if self._must_load_state(sequence, keys, n_useful):
                return True
            n_useful = self.states.reach(keys)
        if self.tiers is None or n_useful <= len(hit_ids):
            return False
        return self._must_load(sequence, keys[:n_useful], hit_ids)

    def _must_load_state(self, sequence: Sequence, keys: list[bytes], n_known: int) -> bool:
        if self.tiers is None or self.tiers.states is None or not keys:
            return False
        if sequence.ask is None:
            sequence.ask = ask_of(sequence, self.tiers, self._page_size)
        if not self.tiers.states.must_wait(sequence.ask, keys, n_known):
            return False
        sequence.state = State.LOADING
        self.n_loading += 1
        return True

    def _offer_state(self, sequence: Sequence, snapshot: Snapshot) -> None:
        if self.tiers is None or self.tiers.states is None:
            return
        if sequence.ask is None:
            sequence.ask = ask_of(sequence, self.tiers, self._page_size)
        n_max = sequence.ask.n_store_pages
        if n_max is None or snapshot.n_tokens <= n_max * self._page_size:
            self.tiers.states.offer(snapshot, is_worthy=sequence.ask.stores_now)

    def _still_loads(self, sequence: Sequence) -> bool:
        if self.tiers is not None and sequence.ask is not None and self.tiers.still_waits(sequence.ask):
            self.n_loading += 1
            return True
        sequence.state = State.WAITING
        return False

    def _must_load(self, sequence: Sequence, keys: list[bytes], hit_ids: list[int]) -> bool:
        """Ask the tiers for what the pool lacks, if there is room for it; whether the sequence should wait for them."""
        if self.tiers is None or not self._has_room(sequence, hit_ids):
            return False
        if sequence.ask is None:
            sequence.ask = ask_of(sequence, self.tiers, self._page_size)
        if not self.tiers.must_wait(sequence.ask, keys, hit_ids, self._planned_id):
            return False
        sequence.state = State.LOADING
        self.n_loading += 1
        return True

    def _tell_tiers(self, sequence: Sequence, hit_ids: list[int]) -> None:
        if self.tiers is None or not self._is_caching:
            return
        if sequence.ask is None:
            sequence.ask = ask_of(sequence, self.tiers, self._page_size)
        is_first = sequence.first_scheduled_s is None
        keys = sequence.page_keys.extend(sequence.token_ids)
        came = self.tiers.admitted(sequence.ask, keys, hit_ids, is_first=is_first)
        if is_first:
            sequence.cached_by_tier = {label: n * self._page_size for label, n in came.items()}

    def _keys_coming(self, sequence: Sequence) -> list[bytes]:
        n_full = min(sequence.n_computed, len(sequence.token_ids) - self._n_unsettled) // self._page_size
        first = sequence.key_next_at // self._page_size - 1
        return sequence.page_keys.extend(sequence.token_ids)[first:n_full] if n_full > first else []

    def _start(self, sequence: Sequence, hit_ids: list[int], n_computed: int) -> bool:
        """Give a slot and pages to a waiting sequence, or return False, and no change, when they do not suffice.

        `n_computed` tokens need not be computed: those of `hit_ids`, or more where a state is all that they leave.
        """
        if not self._has_room(sequence, hit_ids):
            return False
        pool, size = self.pool, self._page_size
        n_new = -(-len(sequence.token_ids) // size) - len(hit_ids) if self._has_pages else 0
        pool.pin(hit_ids)  # before anything is acquired: an acquisition could evict them
        new_ids = pool.acquire(n_new)
        assert new_ids is not None, "engine.scheduler: counted pages are not there"
        sequence.page_ids = hit_ids + new_ids
        sequence.n_room = self._room_of(sequence)
        sequence.n_computed = n_computed
        sequence.key_next_at = sequence.n_computed + size if self._is_caching else _NEVER
        sequence.slot = self._free_slots.pop()
        sequence.state = State.RUNNING
        self.running[sequence] = None
        return True

    def _has_room(self, sequence: Sequence, hit_ids: list[int]) -> bool:
        if not self._has_pages:
            return True
        n_new = -(-len(sequence.token_ids) // self._page_size) - len(hit_ids)
        while True:
            n_hits_free = sum(self.pool.n_refs(page_id) == 0 for page_id in hit_ids)
            if n_new + n_hits_free + len(self.running) <= self.pool.n_free:
                return True
            if not self.pins.surrender():
                return False

    def _keep_pinned(self, sequence: Sequence) -> None:
        hint = sequence.params.cache_hint
        if hint is None or not hint.pin or not self._is_caching or sequence.first_scheduled_s is None:
            return
        ttl_s = DEFAULT_TTL_S if hint.ttl_s is None else hint.ttl_s
        until_s = sequence.first_scheduled_s + ttl_s
        self.pins.hold(sequence.page_ids[: sequence.n_prompt // self._page_size], until_s)
        if self.states is not None:
            self.states.hold(sequence, until_s)

    def _room_of(self, sequence: Sequence) -> int:
        return len(sequence.page_ids) * self._page_size if self._has_pages else _NEVER

    def _count_admission(self, sequence: Sequence, n_hit: int, now_s: float) -> None:
        if sequence.first_scheduled_s is not None:
            return  # its return from a preemption says nothing about prefixes
        sequence.first_scheduled_s = now_s
        sequence.n_cached_tokens = n_hit
        if self._is_caching and sequence.reads_cache:
            self.n_prefix_queries_tokens += len(sequence.token_ids)
            self.n_prefix_hits_tokens += n_hit

    def _set_keys(self, sequence: Sequence, n_tokens: int, step_id: int) -> list[bytes]:
        """Give their keys to the pages that the first `n_tokens` tokens fill, `step_id` at the latest; return them."""
        size = self._page_size
        first, n_full = sequence.key_next_at // size - 1, n_tokens // size
        if n_full <= first:
            return []
        keys = sequence.page_keys.extend(sequence.token_ids)[first:n_full]
        for i, (page_id, key) in enumerate(zip(sequence.page_ids[first:n_full], keys, strict=True)):
            self.pool.set_key(page_id, key)
            if self.tiers is not None:
                self.tiers.filled(sequence.ask, page_id, key, first + i, step_id)
        sequence.key_next_at = (n_full + 1) * size
        return keys

    def _unqueue(self, sequence: Sequence) -> None:
        i = bisect_left(self.waiting, sequence.rank, key=_rank)
        assert self.waiting[i] is sequence, "engine.scheduler: a waiting sequence is not in the queue"
        del self.waiting[i]

    @property
    def _n_landing(self) -> int:
        return 0 if self.tiers is None else self.tiers.n_loads

    def check_idle(self) -> None:
        """Raise AssertionError when nothing runs and yet something is held. Cost: O(1)."""
        assert not self.running, "engine.scheduler: not idle"
        n_held = self._limits.n_slots - len(self._free_slots)
        assert self.pool.n_used == 0 or self._n_landing > 0 or len(self.pins) > 0, (
            f"engine.scheduler: {self.pool.n_used} pages are held by nobody"
        )
        assert n_held == 0 or self._collected_id < self._planned_id, f"engine.scheduler: {n_held} slots are lost"
        if self.states is not None and self._collected_id == self._planned_id:
            self.states.check_idle(0 if self.tiers is None or self.tiers.states is None else self.tiers.states.n_loads)

    def check(self) -> None:
        """Raise AssertionError when an invariant of the module's docstring does not hold."""
        self.pool.check()
        if self.states is not None:
            self.states.check(self.running)
        for sequence in self.running:
            self._check_running(sequence)
        owners = Counter(page_id for s in self.running for page_id in s.page_ids)
        self.pins.check()
        owners.update(self.pins.held_pages())
        if self.tiers is not None:
            self.tiers.check()
            owners.update(self.tiers.held_pages())
        for page_id in range(self.pool.n_pages):
            n_refs = self.pool.n_refs(page_id)
            assert n_refs == owners[page_id], f"page {page_id}: {n_refs} references, {owners[page_id]} owners"
        slots = [s.slot for s in self.running] + self._free_slots + [slot for _, slot in self._held_slots]
        assert sorted(slots) == list(range(self._limits.n_slots)), f"slots lost or shared: {sorted(slots)}"
        assert len(self.running) <= self._n_running_max, "too many run"
        assert all(fence > self._collected_id for fence, _ in self._held_slots), "a slot is held without reason"
        ranks = [s.rank for s in self.waiting]
        assert ranks == sorted(ranks), "the queue is not in order"
        for sequence in self.waiting:
            may_wait = sequence.state is State.WAITING or (sequence.state is State.LOADING and self.tiers is not None)
            assert may_wait, f"{sequence.sequence_id} waits as {sequence.state}"
            assert sequence.slot == -1, f"{sequence.sequence_id} waits with a slot"
            assert not sequence.page_ids, f"{sequence.sequence_id} waits with pages"

    def _check_running(self, sequence: Sequence) -> None:
        name = sequence.sequence_id
        n_known = len(sequence.token_ids)
        assert sequence.state is State.RUNNING, f"{name} runs as {sequence.state}"
        assert sequence.n_room == self._room_of(sequence), f"{name}: n_room is not its pages'"
        assert 0 <= sequence.n_computed <= sequence.n_room, f"{name}: {sequence.n_computed} of {sequence.n_room} slots"
        is_ahead = sequence.n_computed < sequence.n_total + (sequence.pools is not None)
        assert is_ahead, f"{name}: planned too far"
        assert sequence.n_total <= sequence.max_total_tokens, f"{name}: planned too far"
        assert n_known <= sequence.n_total, f"{name}: knows more tokens than were sampled"
        assert sequence.n_open >= 0, f"{name}: more steps with drafts ended than there were"
        assert len(set(sequence.page_ids)) == len(sequence.page_ids), f"{name}: a page twice"
        sequence.page_keys.check(sequence.token_ids)
        if not self._is_caching:
            return
        n_keyed = sequence.key_next_at // self._page_size - 1
        assert n_keyed * self._page_size <= min(n_known, sequence.n_computed), f"{name}: a key for unknown tokens"
        for i, page_id in enumerate(sequence.page_ids):
            key = self.pool.key_of(page_id)
            assert key is None or key == sequence.page_keys.keys[i], f"{name}: page {i} has a key of another content"
            assert key is None or i < n_keyed, f"{name}: page {i} is keyed too early"


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
