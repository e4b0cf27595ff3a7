"""A runner without a model, for tests of everything above it: its tokens are a pure function of what it reads.

Each token slot of each page holds a value: a digest of the token and of all values before it, *as read through the
page table*. So the next token depends on the whole visible history, and any mistake in the bookkeeping of pages, slots
or order of steps changes the output. `expected_tokens` gives the same function without pages.

Steps are kept and run as late as the contract allows, so that a caller who touches a table that a submitted step still
reads is found out; with `runs_early` some run at once, as they may on a real runner. With `is_strict`, reading a token
slot that was last written for another position raises at once. With `RunnerLimits.state_bytes` the next token depends
on the slot's recurrent state too (`fake_states`). With `RunnerLimits.n_draft_max` a test gives it a drafter
(`fake_drafts`), and steps that draft spoil what they may write to.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from tiercel.base.errors import RequestFailed, ShapeError
from tiercel.kv.tiers.identity import ObjectGroup
from tiercel.kv.tiers.interface import Bytes
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import OWN_DRAFTS, RunnerLimits, StepPlan, StepResult
from tiercel.runner.interface import N_STEPS_MAX
from tiercel.runner.pages import check_pages
from tiercel.sampling.reference import NOTHING_ALLOWED
from tiercel.testing.fake_drafts import FakeDrafter, FakeDrafts, chosen
from tiercel.testing.fake_states import FakeState, FakeStates

_NAN = 0  # the value of a token whose numbers overflowed, and of all after it


@dataclass(slots=True)
class _Row:
    """One slot."""

    tokens: list[int | None]
    n_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    page_ids: list[int] = field(default_factory=list)
    n_known: int = 0  # tokens admitted or sampled


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What a submitted step found: pages of each of its sequences, and the policy."""

    page_ids: list[list[int]]
    policy: tuple[list[float], list[float]]


class FakeRunner:
    """Meets `runner.interface.Runner`."""

    def __init__(
        self,
        limits: RunnerLimits,
        *,
        runs_early: Callable[[], bool] = lambda: False,
        is_strict: bool = True,
        fail_steps: Sequence[int] = (),
        nan_token_id: int | None = None,
        compute_ns: int = 0,
        drafter: FakeDrafter | None = None,
    ) -> None:
        self._limits = limits
        self._runs_early = runs_early
        self._is_strict = is_strict
        self.fail_steps = set(fail_steps)
        self._nan_token_id = nan_token_id
        self._compute_ns = compute_ns
        self._is_hurried = False
        self._rows: list[_Row | None] = [None] * limits.n_slots
        # Without pages, what a slot keeps of its sequence is as one page that is the slot's own.
        self._page_size = limits.page_size_tokens if limits.n_pages else limits.max_len_tokens
        shape = (limits.n_pages or limits.n_slots, self._page_size)
        # Memory that was never written holds anything at all.
        self.values = np.random.default_rng(1).integers(1, 2**63, shape, np.uint64)
        self._positions = np.full(shape, -1, np.int32)
        self._waiting: deque[StepPlan] = deque()
        self._done: deque[StepResult | None] = deque()
        self._masks: dict[int, np.ndarray] = {}  # of waiting steps
        self._states = FakeStates(limits, is_strict=is_strict)
        self._drafts = FakeDrafts(drafter, limits.n_draft_max, limits.vocab_size)
        self._reach = limits.draft_reach_tokens or limits.n_draft_max
        self._found: deque[_Waiting] = deque()  # of each waiting step
        self._n_submitted = 0
        self.n_steps_run = 0
        self.is_closed = False

    @property
    def limits(self) -> RunnerLimits:
        """What the runner can hold."""
        return self._limits

    def admit(
        self,
        slot: int,
        token_ids: Sequence[int],
        n_prompt_tokens: int,
        params: SamplingParams,
        seed: int,
        stop_ids: Sequence[int],
        n_first: int | None = None,
    ) -> None:
        """Put a sequence's known tokens into a free slot."""
        assert self._rows[slot] is None, f"fake: slot {slot} is admitted twice"
        assert n_first is None or self._limits.n_segments > 1, "fake: a pair for a model that knows none"
        assert 1 <= n_prompt_tokens <= len(token_ids) <= self._limits.max_len_tokens, "fake: wrong token counts"
        tokens: list[int | None] = [*token_ids]
        tokens += [None] * (self._limits.max_len_tokens - len(tokens))
        self._rows[slot] = _Row(tokens, n_prompt_tokens, params, seed, frozenset(stop_ids), n_known=len(token_ids))
        self._drafts.forget(slot)
        if not self._limits.n_pages:
            self._row(slot).page_ids = [slot]

    def set_pages(self, slot: int, first_idx: int, page_ids: Sequence[int]) -> None:
        """Write entries of the slot's page table row."""
        row = self._row(slot)
        if not self._limits.n_pages:
            assert not page_ids, f"fake: pages {page_ids} for slot {slot}, and there are none"
            return
        n_used = max(
            (len(self._pages_of(plan, found, slot)) for plan, found in zip(self._waiting, self._found, strict=True)),
            default=0,
        )
        assert first_idx >= n_used, f"fake: page {first_idx} of slot {slot} is in use by a submitted step"
        assert first_idx <= len(row.page_ids), f"fake: slot {slot} has no page before entry {first_idx}"
        row.page_ids[first_idx:] = page_ids

    def save_state(self, slot: int, snapshot_idx: int) -> None:
        """Have the slot's state copied to a place, once the steps submitted so far have run."""
        self._states.ask_copy(self._n_submitted, slot, snapshot_idx, is_save=True)

    def load_state(self, slot: int, snapshot_idx: int) -> None:
        """Have a place's state copied to the slot, likewise."""
        self._row(slot)
        self._states.ask_copy(self._n_submitted, slot, snapshot_idx, is_save=False)

    def saved_state(self, place: int) -> FakeState:
        """Give what is saved in a place, once all that was submitted has run."""
        assert not self._waiting, "fake: a step waits"
        return self._states.saved(place, self._n_submitted)

    def release(self, slot: int) -> None:
        """Make the slot free."""
        self._row(slot)
        assert not any(slot in plan.seq_slot for plan in self._waiting), f"fake: slot {slot} is named by a waiting step"
        self._rows[slot] = None

    def submit(self, plan: StepPlan) -> None:
        """Queue a step."""
        assert not self.is_closed, "fake: submit after close"
        assert len(self._waiting) + len(self._done) < N_STEPS_MAX, "fake: too many steps under way"
        self._check_fits(plan)
        for place in _saves_of(plan):
            self._states.will_save(place)
        self._waiting.append(plan)
        pages = [list(self._row(slot).page_ids) for slot in plan.seq_slot.tolist()]
        self._found.append(_Waiting(pages, self._drafts.policy))
        self._n_submitted += 1
        self._run_some()

    def set_draft_policy(self, step_seconds: Sequence[float], chances: Sequence[float]) -> None:
        """Have steps choose how many own drafts they compute."""
        self._drafts.set_policy(step_seconds, chances)

    def set_masks(self, step_id: int, masks: np.ndarray) -> None:
        """Bring a waiting step its masks."""
        plan = next((one for one in self._waiting if one.step_id == step_id), None)
        assert plan is not None, f"fake: step {step_id} waits for no masks"
        assert plan.seq_masked is not None, f"fake: step {step_id} has no masked sequence"
        assert step_id not in self._masks, f"fake: step {step_id} gets masks twice"
        shape = (self._masks_before(plan, len(plan.seq_slot)), -(-self._limits.vocab_size // 32))
        assert masks.shape == shape, f"fake: masks of shape {masks.shape}; {shape} is needed"
        assert masks.dtype == np.uint32, f"fake: masks of {masks.dtype}"
        self._masks[step_id] = masks.copy()
        self._run_some()

    def _run_some(self) -> None:
        while self._waiting and self._has_masks(self._waiting[0]) and self._runs_early():
            self._run_next()

    def _has_masks(self, plan: StepPlan) -> bool:
        return plan.seq_masked is None or plan.step_id in self._masks

    def hurry(self) -> None:
        """Let the next wait be for one step."""
        assert not self.is_closed, "fake: hurry after close"
        self._is_hurried = True

    def wait(self, n_steps: int) -> int:
        """Run the oldest steps, or one; return how many have been run."""
        assert 1 <= n_steps <= len(self._done) + len(self._waiting), f"fake: {n_steps} steps are not under way"
        n_wanted, n_steps = n_steps, 1 if self._is_hurried else n_steps
        self._is_hurried = False
        while len(self._done) < n_steps:
            assert self._has_masks(self._waiting[0]), f"fake: step {self._waiting[0].step_id} never gets its masks"
            self._run_next()
        return min(n_wanted, len(self._done))

    def collect(self) -> StepResult:
        """Return the oldest step's rows."""
        assert self._done or self._waiting, "fake: nothing was submitted"
        if not self._done:
            assert self._has_masks(self._waiting[0]), f"fake: step {self._waiting[0].step_id} never gets its masks"
            self._run_next()
        result = self._done.popleft()
        if result is None:
            raise RequestFailed("fake: this step was told to fail; other steps run; nothing can be done")
        return result

    @property
    def page_group(self) -> ObjectGroup:
        """Values, and the positions they were written for."""
        size = self._limits.page_size_tokens
        return ObjectGroup("page", "fake", "none", ("value and position", "token"), (2, size), 12 * size)

    def read_pages(self, page_ids: Sequence[int]) -> list[Bytes]:
        """Copy pages."""
        written = self._pages_named(lambda start, end: (start, end)) | self._pages_drafted()
        assert not written & set(page_ids), f"fake: pages {page_ids} are read; waiting steps write to {sorted(written)}"
        return [self.values[p].tobytes() + self._positions[p].tobytes() for p in page_ids]

    def write_pages(self, page_ids: Sequence[int], data: Sequence[Bytes]) -> None:
        """Fill pages."""
        used = self._pages_named(lambda _, end: (0, end)) | self._pages_drafted()
        assert not used & set(page_ids), f"fake: pages {page_ids} are written; waiting steps use {sorted(used)}"
        size = self._limits.page_size_tokens
        check_pages(page_ids, data, 12 * size)
        for page_id, one in zip(page_ids, data, strict=True):
            self.values[page_id] = np.frombuffer(one, np.uint64, size)
            self._positions[page_id] = np.frombuffer(one, np.int32, size, 8 * size)

    @property
    def state_group(self) -> ObjectGroup | None:
        """Values."""
        n_bytes = self._states.state_bytes
        return (
            ObjectGroup("state", "fake", "none", ("byte",), (n_bytes,), n_bytes) if self._limits.state_bytes else None
        )

    def read_states(self, snapshot_idxs: Sequence[int]) -> list[Bytes]:
        """Copy what was saved, which is made now if its step has run."""
        self._states.copy_before(self.n_steps_run)
        return [self._states.read(i) for i in snapshot_idxs]

    def write_states(self, snapshot_idxs: Sequence[int], n_tokens: Sequence[int], data: Sequence[Bytes]) -> None:
        """Fill places."""
        check_pages(snapshot_idxs, data, self._states.state_bytes, of="states")
        self._states.copy_before(self.n_steps_run)
        for i, n, one in zip(snapshot_idxs, n_tokens, data, strict=True):
            self._states.write(i, n, bytes(one))

    def _pages_named(self, positions: Callable[[int, int], tuple[int, int]]) -> set[int]:
        """Give the pages of each waiting sequence that hold a range of positions, told its start and end."""
        size, found = self._limits.page_size_tokens, set()
        for plan in self._waiting:
            for slot, start in zip(plan.seq_slot.tolist(), plan.seq_start.tolist(), strict=True):
                first, end = positions(start, self._end(plan, slot))
                found.update(self._row(slot).page_ids[first // size : -(-end // size)])
        return found

    def _pages_drafted(self) -> set[int]:
        """Give the pages that drafts of waiting steps may write to."""
        size, used = self._limits.page_size_tokens, set()
        for plan, found in zip(self._waiting, self._found, strict=True):
            for slot, start in zip(plan.seq_slot.tolist(), plan.seq_start.tolist(), strict=True):
                used.update(self._pages_of(plan, found, slot)[start // size :] if plan.n_draft else [])
        return used

    def _pages_of(self, plan: StepPlan, found: _Waiting, slot: int) -> list[int]:
        """Give the pages of a slot that a step may read, or write to."""
        at = np.flatnonzero(np.asarray(plan.seq_slot) == slot)
        if not len(at):
            return []
        n_more = self._reach + 1 if plan.n_draft and plan.seq_samples[at[0]] else 0
        used = self._end(plan, slot) + n_more
        return found.page_ids[at[0]][: -(-used // self._page_size)]

    def close(self) -> None:
        """Stop."""
        self.is_closed = True

    def _row(self, slot: int) -> _Row:
        row = self._rows[slot]
        assert row is not None, f"fake: slot {slot} is free"
        return row

    def _end(self, plan: StepPlan, slot: int) -> int:
        """First position after those that the plan computes for the slot."""
        found = np.flatnonzero(np.asarray(plan.seq_slot) == slot)
        return int(plan.seq_start[found[0]] + plan.seq_tokens[found[0]]) if len(found) else 0

    def _check_fits(self, plan: StepPlan) -> None:
        limits = self._limits
        n_tokens = np.asarray(plan.seq_tokens)
        is_drafting = _is_drafting(plan)
        n_rows = int(np.where(np.asarray(plan.seq_scores) | is_drafting, n_tokens, np.asarray(plan.seq_samples)).sum())
        assert plan.drafts is None or limits.takes_drafts, "fake: drafts for a model that takes none"
        assert not (is_drafting & ~np.asarray(plan.seq_samples)).any(), "fake: drafts of a sequence that is not sampled"
        if not 0 <= plan.n_draft <= limits.n_draft_max:
            raise ShapeError(f"fake: {plan.n_draft} drafts; at most {limits.n_draft_max} are made; ask for fewer")
        if plan.drafts is not None:
            is_own = np.asarray(plan.drafts.seq_from) == OWN_DRAFTS
            if is_own.any() and not limits.n_draft_max:
                raise ShapeError("fake: own drafts, and there is no drafter; send none")
            assert not np.asarray(plan.drafts.seq_count)[is_own].any(), "fake: own drafts are foretold"
        ends = np.asarray(plan.seq_start) + n_tokens
        if plan.n_tokens > limits.max_step_tokens or n_rows > limits.max_logits_rows:
            raise ShapeError(
                f"fake: {plan.n_tokens} tokens and {n_rows} rows; at most {limits.max_step_tokens} and "
                f"{limits.max_logits_rows} fit; plan less"
            )
        if len(ends) == 0 or (ends > limits.max_len_tokens).any() or (n_tokens < 1).any():
            raise ShapeError("fake: an empty step, an empty sequence or one that is too long; plan what fits")
        assert len(set(plan.seq_slot.tolist())) == len(plan.seq_slot), "fake: a slot twice in one step"
        for slot, end in zip(plan.seq_slot.tolist(), ends.tolist(), strict=True):
            n_room = len(self._row(slot).page_ids) * self._page_size
            assert end <= n_room, f"fake: slot {slot} computes up to {end} and has pages for {n_room}"

    def _run_next(self) -> None:
        plan = self._waiting.popleft()
        self._states.copy_before(self.n_steps_run)
        self.n_steps_run += 1
        self._done.append(None if plan.step_id in self.fail_steps else self._run(plan))
        self._found.popleft()
        self._masks.pop(plan.step_id, None)

    def _masks_before(self, plan: StepPlan, s: int) -> int:
        """Count the masks of a step's first `s` sequences."""
        assert plan.seq_masked is not None
        n_each = np.where(_is_drafting(plan), np.asarray(plan.seq_tokens), 1)
        return int((np.asarray(plan.seq_masked) * n_each)[:s].sum())

    def mask_of(self, plan: StepPlan, s: int, row: int = 0) -> np.ndarray | None:
        """Give what sequence `s` of a step may sample in its `row`, bool [V]; None: everything."""
        if plan.seq_masked is None or not plan.seq_masked[s]:
            return None
        words = self._masks[plan.step_id][self._masks_before(plan, s) + row]
        return np.unpackbits(words.view(np.uint8), bitorder="little")[: self._limits.vocab_size].astype(np.bool_)

    def _run(self, plan: StepPlan) -> StepResult:
        found = self._found[0]
        rows: list[tuple[int, int, int, int]] = []
        own = self._own_drafts(plan, found)
        drafted = np.zeros(len(plan.seq_slot), np.int32)
        is_drafting = _is_drafting(plan)
        for s in range(len(plan.seq_slot)):
            if is_drafting[s]:
                more, drafted[s] = self._run_drafts(plan, s, own.get(s))
                rows += more
            else:
                rows += self._run_sequence(plan, s, int(plan.seq_start[s]), int(plan.seq_tokens[s]))
        row_seq, row_pos, row_token = (np.array([row[i] for row in rows], np.int32) for i in range(3))
        if self._limits.row_width:
            values = np.array([fake_row(value, self._limits.row_width) for *_, value in rows], np.float32)
            values = values.reshape(len(rows), self._limits.row_width)
            none = np.zeros_like(row_token)
            return StepResult(plan.step_id, row_seq, row_pos, none, compute_ns=self._compute_ns, rows=values)
        seq_drafted = None if plan.drafts is None else drafted
        n_broken = self._drafts.n_broken
        seq_drafts, seq_confidence = self._make_drafts(plan, found, rows)
        n_broken = self._drafts.n_broken - n_broken
        if plan.n_logprobs is None:
            return StepResult(
                plan.step_id,
                row_seq,
                row_pos,
                row_token,
                compute_ns=self._compute_ns,
                seq_drafted=seq_drafted,
                seq_drafts=seq_drafts,
                seq_confidence=seq_confidence,
                n_drafts_broken=n_broken,
            )
        n = plan.n_logprobs
        tops = [self._top_of(plan, row, n) for row in rows]
        logprobs = [_logprob(token, value, self._limits.vocab_size) for _, _, token, value in rows]
        return StepResult(
            plan.step_id,
            row_seq,
            row_pos,
            row_token,
            row_logprob=np.array([lp for lp, _ in logprobs], np.float32),
            row_rank=np.array([rank for _, rank in logprobs], np.int32),
            top_ids=np.array([ids for ids, _ in tops], np.int32).reshape(len(rows), n),
            top_logprobs=np.array([lps for _, lps in tops], np.float32).reshape(len(rows), n),
            compute_ns=self._compute_ns,
            seq_drafted=seq_drafted,
            seq_drafts=seq_drafts,
            seq_confidence=seq_confidence,
            n_drafts_broken=n_broken,
        )

    def _own_drafts(self, plan: StepPlan, found: _Waiting) -> dict[int, list[int]]:
        """Choose which of their own drafts a step's sequences compute."""
        if plan.drafts is None:
            return {}
        who = np.flatnonzero(np.asarray(plan.drafts.seq_from) == OWN_DRAFTS).tolist()
        there = {}
        for s in who:
            slot = int(plan.seq_slot[s])
            ids, confidence = self._drafts.at(slot, self._row(slot).n_known)
            n = min(int(plan.seq_tokens[s]) - 1, len(ids))
            there[s] = ids[:n], confidence[:n]
        n_rows = int(sum(1 if s in there else n for s, n in enumerate(plan.seq_tokens.tolist())))
        numbers = chosen([confidence for _, confidence in there.values()], n_rows=n_rows, policy=found.policy)
        return {s: ids[:n] for (s, (ids, _)), n in zip(there.items(), numbers, strict=True)}

    def _make_drafts(
        self, plan: StepPlan, found: _Waiting, rows: list[tuple[int, int, int, int]]
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Draft what comes after each sampled sequence, and spoil what a drafter may write to."""
        if plan.n_draft == 0:
            return None, None
        drafts = np.full((len(plan.seq_slot), plan.n_draft), -1, np.int32)
        confidence = np.zeros(drafts.shape, np.float32)
        last = {s: token for s, _, token, _ in rows}
        for s in np.flatnonzero(np.asarray(plan.seq_samples)).tolist():
            slot, page_ids = int(plan.seq_slot[s]), found.page_ids[s]
            row = self._row(slot)
            n_room = min(len(page_ids) * self._page_size, self._limits.max_len_tokens)
            for position in range(row.n_known - 1, min(n_room, row.n_known + self._reach)):
                page, offset = page_ids[position // self._page_size], position % self._page_size
                self._positions[page, offset] = -1
            n = min(plan.n_draft, n_room - row.n_known, self._limits.max_len_tokens - 1 - row.n_known)
            if last[s] < 0 or n < 1:
                continue
            tokens = [token or 0 for token in row.tokens[: row.n_known]]
            ids, chances = self._drafts.make(slot, tokens, n)
            drafts[s, : len(ids)], confidence[s, : len(ids)] = ids, chances
        return drafts, confidence

    def _top_of(self, plan: StepPlan, row: tuple[int, int, int, int], n: int) -> tuple[list[int], list[float]]:
        """Give what is told of a row: of a sampled one, perhaps of tokens that its sequence names."""
        s, position, _, value = row
        size = self._limits.vocab_size
        is_last = position == plan.seq_start[s] + plan.seq_tokens[s] - 1
        is_sampled = plan.seq_samples[s] and (is_last or _is_drafting(plan)[s])
        named = self._row(int(plan.seq_slot[s])).params.logprob_token_ids if is_sampled else None
        if named is None:
            return _top(value, n, size)
        n_more = n - len(named)
        return [*named, *[-1] * n_more], [*(_logprob(i, value, size)[0] for i in named), *[math.nan] * n_more]

    def _run_drafts(self, plan: StepPlan, s: int, own: list[int] | None) -> tuple[list[tuple[int, int, int, int]], int]:
        """Compute a sequence's last token and what is foretold, or its own drafts; return the rows that count and the
        number of drafts.
        """
        assert plan.drafts is not None
        row = self._row(int(plan.seq_slot[s]))
        before = int(np.asarray(plan.drafts.seq_count)[:s].sum())
        foretold = plan.drafts.token_ids.tolist()[before : before + int(plan.drafts.seq_count[s])]
        start, first = row.n_known - 1, int(plan.drafts.seq_from[s])
        assert start <= plan.seq_start[s], f"fake: slot {plan.seq_slot[s]} has more tokens than the plan takes it to"
        n_past = row.n_known - first
        drafts = foretold[n_past:] if n_past >= 0 and row.tokens[first : row.n_known] == foretold[:n_past] else []
        drafts = drafts[: int(plan.seq_tokens[s]) - 1] if own is None else own
        row.tokens[row.n_known : row.n_known + len(drafts)] = drafts
        kept = []
        computed = self._run_sequence(plan, s, start, 1 + len(drafts))
        for draft, one in zip([*drafts, None], computed, strict=True):
            kept.append(one)
            row.tokens[one[1] + 1] = max(one[2], 0)
            row.n_known = one[1] + 2
            if one[2] != draft:
                break
        if self._limits.state_bytes:
            end = start + len(kept)
            self._states.go_back(int(plan.seq_slot[s]), end)
            if plan.drafts.saves is not None:
                place, at = (int(column[s]) for column in plan.drafts.saves)
                if place >= 0 and start < at <= end:
                    self._states.save(int(plan.seq_slot[s]), place, at)
        return kept, len(drafts)

    def _run_sequence(self, plan: StepPlan, s: int, start: int, n: int) -> list[tuple[int, int, int, int]]:
        """Compute one sequence's tokens; return rows of (sequence, position, token, value)."""
        row = self._row(int(plan.seq_slot[s]))
        samples_all = bool(_is_drafting(plan)[s])
        whole = not self._limits.needs_whole or (start == 0 and n == row.n_prompt)
        assert whole, f"fake: {n} of {row.n_prompt} tokens of a text that must be computed whole"
        size = self._page_size
        history = blake2b(digest_size=8)
        state = self._states.begin(int(plan.seq_slot[s]), start) if self._limits.state_bytes else None
        has_nan = state is not None and state.has_nan
        for position in range(start) if self._limits.has_kv else ():
            page, offset = row.page_ids[position // size], position % size
            stored = int(self._positions[page, offset])
            assert not self._is_strict or stored == position, f"fake: read position {position}, found {stored}"
            has_nan |= self.values[page, offset] == _NAN
            history.update(self.values[page, offset].tobytes())
        rows = []
        for position in range(start, start + n):
            token = row.tokens[position]
            assert token is not None or not self._is_strict, f"fake: token {position} is not there yet"
            has_nan |= token is not None and token == self._nan_token_id
            value = _NAN if has_nan else _value(history, token or 0)
            if state is not None and not has_nan:
                value = self._value_of(state, history, token or 0)
            page, offset = row.page_ids[position // size], position % size
            self.values[page, offset] = value
            self._positions[page, offset] = position
            history.update(np.uint64(value).tobytes())
            if state is not None:
                state.add(np.uint64(value).tobytes(), is_nan=has_nan)
            is_last = position == start + n - 1
            if self._limits.row_width:
                if plan.seq_scores[s] or (is_last and plan.seq_samples[s]):
                    rows.append((s, position, 0, value))
                continue
            if samples_all or (is_last and plan.seq_samples[s]):
                mask = self.mask_of(plan, s, position - start if samples_all else 0)
                n_output = position + 1 - row.n_prompt
                sampled = -1 if has_nan else _sample(value, row, n_output, self._limits.vocab_size, mask)
                if not samples_all:
                    row.tokens[position + 1] = max(sampled, 0)
                    row.n_known = position + 2
                rows.append((s, position, sampled, value))
            elif plan.seq_scores[s]:
                following = row.tokens[position + 1]
                assert following is not None or not self._is_strict, (
                    f"fake: token {position + 1} is scored and not known"
                )
                rows.append((s, position, -1 if has_nan else following or 0, value))
        return rows

    def _value_of(self, state: FakeState, history: "blake2b", token: int) -> int:
        """Give what a token leaves: what it leaves without a state, if that has seen the same as the pages hold."""
        value = _value(state.history, token)
        if self._limits.has_kv and state.history.digest() != history.digest():
            value ^= _value(history, token)
        return value or 1


def _is_drafting(plan: StepPlan) -> np.ndarray:
    """Give which sequences have drafts, bool [S]."""
    if plan.drafts is None:
        return np.zeros(len(plan.seq_slot), np.bool_)
    is_drafting: np.ndarray = np.asarray(plan.drafts.seq_from) != -1
    return is_drafting


def _saves_of(plan: StepPlan) -> list[int]:
    """Give the places that a step with drafts may save states in."""
    if plan.drafts is None or plan.drafts.saves is None:
        return []
    return [place for place in plan.drafts.saves[0].tolist() if place >= 0]


def fake_row(value: int, width: int) -> list[float]:
    """Give the row of a token whose slot holds `value`: a pooling model's, as far as this one goes."""
    if value == _NAN:
        return [float("nan")] * width
    return [(value * (2 * k + 3) % 1009) / 504.5 - 1.0 for k in range(width)]


def make_limits(**changes: int) -> RunnerLimits:
    """Give small limits for a test, with changes."""
    limits: dict[str, Any] = {
        "n_slots": 4,
        "max_len_tokens": 64,
        "max_step_tokens": 64,
        "max_logits_rows": 64,
        "page_size_tokens": 4,
        "n_pages": 64,
        "vocab_size": 97,
    }
    return RunnerLimits(**(limits | changes))


def early_at_random(seed: int) -> Callable[[], bool]:
    """Give a `runs_early` that lets a step run early now and then."""
    rng = random.Random(seed)
    return lambda: rng.random() < 0.4


def expected_tokens(
    prompt_ids: Sequence[int],
    n: int,
    params: SamplingParams,
    *,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    vocab_size: int = 97,
) -> list[int]:
    """Give the first `n` tokens that a lone sequence gets, whatever else runs and however it is computed."""
    history = blake2b(digest_size=8)
    row = _Row([], len(prompt_ids), params, seed, frozenset(stop_ids))
    tokens = list(prompt_ids)
    value = 0
    for position in range(len(prompt_ids) + n - 1):
        value = _value(history, tokens[position])
        history.update(np.uint64(value).tobytes())
        if position + 1 >= len(prompt_ids):
            tokens.append(_sample(value, row, position + 1 - len(prompt_ids), vocab_size))
    return tokens[len(prompt_ids) :]


def expected_values(token_ids: Sequence[int]) -> list[int]:
    """Give what the token slots of a sequence hold."""
    history = blake2b(digest_size=8)
    values = []
    for token in token_ids:
        values.append(_value(history, token))
        history.update(np.uint64(values[-1]).tobytes())
    return values


def _value(history: "blake2b", token: int) -> int:
    digest = history.copy()
    digest.update(b"token")
    digest.update(token.to_bytes(4, "little"))
    return int.from_bytes(digest.digest(), "little") or 1


def _sample(value: int, row: _Row, n_output: int, vocab_size: int, mask: np.ndarray | None = None) -> int:
    drawn = blake2b(value.to_bytes(8, "little"), digest_size=8)
    if not row.params.is_greedy:
        drawn.update(row.seed.to_bytes(16, "little", signed=True))
    number = int.from_bytes(drawn.digest(), "little")
    token = number % vocab_size
    while n_output < row.params.min_tokens and token in row.stop_ids:
        token = (token + 1) % vocab_size
    if mask is None:
        return token
    may = mask.copy()
    if n_output < row.params.min_tokens:
        may[[i for i in row.stop_ids if i < vocab_size]] = False
    may = may if may.any() else mask.copy()
    if row.params.allowed_token_ids is not None:
        may &= np.isin(np.arange(vocab_size), row.params.allowed_token_ids)
    allowed = np.flatnonzero(may)
    return int(allowed[number % len(allowed)]) if len(allowed) else NOTHING_ALLOWED


def _top(value: int, n: int, vocab_size: int) -> tuple[list[int], list[float]]:
    first = _greedy(value, vocab_size)
    return [(first + k) % vocab_size for k in range(n)], [-0.25 * (k + 1) for k in range(n)]


def _logprob(token: int, value: int, vocab_size: int) -> tuple[float, int]:
    n_before = (token - _greedy(value, vocab_size)) % vocab_size
    return -0.25 * (n_before + 1), n_before + 1


def _greedy(value: int, vocab_size: int) -> int:
    return int.from_bytes(blake2b(value.to_bytes(8, "little"), digest_size=8).digest(), "little") % vocab_size
