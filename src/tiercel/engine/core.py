"""The engine's loop: takes commands, has steps planned, runs them, and says what came of them. Knows no text, no client
and no policy: `engine.scheduler` decides, `engine.client` understands.

Threads: everything but `add`, `finish`, `call_soon`, `reset_prefix_cache`, `shutdown`, `is_alive` and `snapshot` runs
on one thread, the one in `run_loop` (or, in a test, the caller of `step_once`). Other threads reach it through one
queue of commands.

One round of the loop: take commands; plan and submit steps until as many are under way as may be; deliver the updates
of the steps collected last; then wait for the oldest step. So planning and delivering happen while a step computes, and
with two steps under way the runner has its next one before it ends the current one.

While everything that runs decodes in short steps, more are under way, as many as take `run_ahead_s`, and a round waits
for several: after a step's weights have gone through the caches a round costs ten times what the next one does at once,
and the kernels wait for it, as their threads fill the processors. What a sequence's end leaves under way is
computed all the same: its pages may be known by their keys already, and must hold what the keys say.

What can be relied upon: every sequence that `add` accepted gets exactly one final update, with a finish_reason or an
error, whatever happens: an abort in any state, a step that fails (its sequences fail, others go on), logits that hold
a NaN (that sequence fails), the death of the loop itself (all fail with EngineDead).
"""

import logging
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from tiercel.base.errors import ConfigError, EngineDead, NoTokenAllowed, QueueFull, RequestFailed, TiercelError
from tiercel.engine.config import EngineConfig
from tiercel.engine.masks import fill_masks, fill_with_all
from tiercel.engine.request import NewSequence, Sequence, SequenceUpdate, State, TokenLogprobs
from tiercel.engine.scheduler import PlannedStep, Scheduler
from tiercel.engine.stats import EngineSnapshot, SequenceStats, StatsListener, StepStats
from tiercel.protocol.step import StepResult
from tiercel.runner.interface import N_STEPS_MAX, Runner

if TYPE_CHECKING:
    from tiercel.engine.own_drafts import OwnDrafts
    from tiercel.engine.speculation import Speculation
    from tiercel.kv.tiers.page_tiers import PageTiers, TierSnapshot
    from tiercel.kv.tiers.placed import MakeTiers
    from tiercel.sampling.constraint import MaskRows

_log = logging.getLogger(__name__)

Sink = Callable[[list[SequenceUpdate]], None]

_NOTHING_ALLOWED = -2  # as StepResult.row_token says it
# How often an engine that waits for tiers looks for what is late: a deadline may be missed by so much.
_TIER_POLL_S = 0.05
_N_PREFILL = 32  # tokens of a step that says how fast prompts are computed
_TIER_TELL_S = 0.5  # how old the tiers' numbers in a snapshot may be while the engine is busy


class EngineCore:
    """Runs sequences on one runner, which it owns and closes."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        sink: Sink | None = None,
        clock: Callable[[], float] = time.monotonic,
        listener: StatsListener | None = None,
        make_tiers: "MakeTiers | None" = None,
        speculation: "Speculation | OwnDrafts | None" = None,
    ) -> None:
        limits = runner.limits
        n_rows, n_tokens = (n - config.max_draft_rows for n in (limits.max_logits_rows, limits.max_step_tokens))
        if n_rows < limits.n_slots or n_tokens < min(config.max_num_seqs, limits.n_slots):
            raise ConfigError(
                f"engine: a runner of {limits.n_slots} slots, {limits.max_logits_rows} logits rows and "
                f"{limits.max_step_tokens} tokens a step, {config.max_draft_rows} of them for drafts; at least one row "
                "and one token a slot are needed"
            )
        assert not limits.row_width or limits.max_logits_rows >= limits.max_step_tokens, "engine: a row for each token"
        self.limits = limits
        self.config = config
        self.clock = clock
        self._runner = runner
        self._sink = sink
        self._listener = listener
        self._scheduler = Scheduler(limits, config)
        can_draft = config.max_draft_rows and limits.takes_drafts
        self._speculation = speculation if can_draft else None
        self._depth = 2 if config.async_scheduling else 1  # steps under way, but for those that run ahead
        self._decode_s = 0.0  # what the step collected last took, if all it did was decode, and it is known
        self._in_flight: deque[PlannedStep] = deque()
        self._not_submitted: dict[PlannedStep, TiercelError] = {}
        self._sequences: dict[str, Sequence] = {}
        self._updates: list[SequenceUpdate] = []
        self._stats = StepStats(time_s=0.0)
        self._untold_stats: list[StepStats] = []  # of steps collected in this round, before the last
        self._masks: MaskRows | None = None  # those of one step; a runner keeps its own copy
        self._n_arrived = 0
        self._totals = {"steps": 0, "failed": 0, "prompt": 0, "generation": 0, "computed": 0, "stale": 0}

        # Shared with other threads.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Guards the next two and the order of commands against the end. Reentrant, as the collector may finalise a
        # generator, and so call `finish`, wherever memory is allocated.
        self._lock = threading.RLock()
        self._n_waiting = 0  # sequences accepted that have not been admitted to a slot once
        self._refusal: str | None = None  # why nothing is accepted any more
        self._is_stopping = False
        self._is_dead = False
        self._has_news = False  # a tier has something to say, and a command for that is on its way
        self._thread: threading.Thread | None = None
        self._process_id = os.getpid()
        self.snapshot = EngineSnapshot()
        self._tiers = None if make_tiers is None else self._place_tiers(make_tiers)
        self._tiers_told_s = float("-inf")
        if self._speculation is not None:
            self._speculation.set_wake(lambda: self.call_soon(lambda: None))  # for a round, which publishes
        self._publish()

    # What other threads may call.

    def set_sink(self, sink: Sink) -> None:
        """Name who is told the updates, once a round, on the engine's thread. To be called before `start`."""
        self._sink = sink

    def set_listener(self, listener: StatsListener) -> None:
        """Name who is told the statistics, on the engine's thread, from the next step on."""
        self._listener = listener

    def start(self) -> None:
        """Run the loop on a thread of its own."""
        assert self._thread is None, "engine.core: started twice"
        self._thread = threading.Thread(target=self.run_loop, name="tiercel-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether sequences that were accepted will be computed."""
        thread = self._thread
        return not (self._is_dead or self._is_a_copy or (thread is not None and not thread.is_alive()))

    @property
    def _is_a_copy(self) -> bool:
        """Whether this process was forked from the engine's: its threads are not here, and its locks may be held."""
        return os.getpid() != self._process_id

    def _check_not_a_copy(self) -> None:
        if self._is_a_copy:
            raise EngineDead(
                "engine: this process was forked from the one that runs it; an engine of its own is needed; build it "
                "after the fork, or start processes with spawn"
            )

    def add(self, new: list[NewSequence], *, is_bounded: bool = True) -> None:
        """Queue sequences, all or none.

        Raises:
            QueueFull: with `is_bounded`, when max_waiting would be exceeded.
            EngineDead: the engine has ended or is ending, or this is a forked process.
        """
        self._check_not_a_copy()
        with self._lock:
            if self._refusal is not None:
                raise EngineDead(self._refusal)
            if is_bounded and self._n_waiting + len(new) > self.config.max_waiting:
                raise QueueFull(
                    f"engine: {self._n_waiting} sequences wait and {len(new)} more came; max_waiting is "
                    f"{self.config.max_waiting}; try again later"
                )
            self._n_waiting += len(new)
            self._commands.put(partial(self._do_add, new))
            self._runner.hurry()

    def finish(self, sequence_ids: Iterable[str], reason: str = "abort") -> None:
        """End sequences, wherever they are. Ids that are unknown or have ended are no error."""
        self._commands.put(partial(self._do_finish, list(sequence_ids), reason))
        if self._is_a_copy:
            return
        with self._lock:
            if not self._is_dead:
                self._runner.hurry()  # not after its end, which takes the lock

    def call_soon(self, work: Callable[[], None]) -> None:
        """Run `work`, which must be short and not fail, on the engine's thread, between two steps."""
        self._commands.put(work)

    def reset_prefix_cache(self) -> "Future[bool]":
        """Forget what is cached; the result is False, and nothing is forgotten, while anything runs."""
        self._check_not_a_copy()
        done: Future[bool] = Future()
        with self._lock:
            if self._refusal is not None:
                raise EngineDead(self._refusal)
            self._commands.put(partial(self._do_reset, done))
        return done

    def _wake_for_tiers(self) -> None:
        """Have the tiers polled, once for any number of calls. From any thread."""
        if not self._has_news:
            self._has_news = True
            self._commands.put(partial(self._do_hear_tiers))

    def shutdown(self, *, drain_s: float | None = 0.0) -> None:
        """Accept nothing more, let what is there run for at most `drain_s` (None: to its end), abort the rest, end.

        Waits for the thread and closes the runner. Idempotent; without effect in a forked process.
        """
        if self._is_a_copy:
            return
        with self._lock:
            if self._refusal is None:
                self._refusal = "engine: it is shutting down; no request is accepted; send it elsewhere"
        self._commands.put(partial(self._do_stop, is_abort=drain_s == 0.0))
        thread = self._thread
        if thread is None:
            self._end(None)
            return
        if thread is threading.current_thread():
            return
        thread.join(drain_s or None)
        if thread.is_alive():
            self._commands.put(partial(self._do_stop, is_abort=True))
            thread.join()

    # The engine's thread.

    def run_loop(self) -> None:
        """Serve until shut down. The boundary at which a bug becomes EngineDead instead of silence."""
        try:
            while not (self._is_stopping and not self.has_work):
                if not self.step_once() and (not self._is_stopping or self._waits_for_tiers):
                    self._wait()
        except BaseException as error:  # noqa: BLE001  a thread's boundary, SystemExit too: answered to every request
            _log.critical("engine: the loop died", exc_info=True)
            self._end(error)
        else:
            self._end(None)

    @property
    def has_work(self) -> bool:
        """Whether anything is unfinished, undelivered or under way."""
        return bool(self._sequences or self._in_flight or self._updates)

    def _place_tiers(self, make_tiers: "MakeTiers") -> "PageTiers":
        from tiercel.kv.tiers.page_tiers import PageTiers

        group = self._runner.page_group
        if group is None or not self._scheduler.is_caching:
            raise ConfigError(
                "kv_tiers: this model's pages are not used for other requests, as it keeps nothing in them or prefix "
                "caching is off; leave kv_tiers out"
            )
        placed = make_tiers(self._wake_for_tiers, self.clock)
        tiers = PageTiers(placed, self._scheduler.pool, self._runner, group.object_bytes, self.clock)
        self._scheduler.tiers = tiers
        states, state_group = self._scheduler.states, self._runner.state_group
        if states is not None and state_group is not None:
            tiers.add_states(states.store, self._runner, state_group.object_bytes)
        return tiers

    def step_once(self) -> bool:
        """Do one round; return whether there is more to do without a new command."""
        self._take_commands()
        n_ahead = self._n_ahead()
        is_submitted = len(self._in_flight) < n_ahead and self._submit_next()
        while is_submitted and self._depth < n_ahead and len(self._in_flight) < n_ahead:
            is_submitted = self._submit_next()
        self._deliver()
        waits = self._waits_for_tiers  # as the plan found it: what comes now is seen by the next one
        has_news = self._tiers is not None and self._tiers.work(self._scheduler.collected_id)  # while a step computes
        if self._in_flight and (len(self._in_flight) >= n_ahead or not is_submitted):
            # What is left under way computes while this round's results are seen to.
            self._collect_some(1 if n_ahead <= self._depth else max(len(self._in_flight) - max(n_ahead // 4, 1), 1))
        elif not self._in_flight and not is_submitted and self._scheduler.waiting and not waits:
            self._give_up_on_head()
        self._publish()
        if self.config.check_each_step:
            self.check()
        if self._tiers is None:
            return self.has_work
        is_parked = waits and not (has_news or self._in_flight or is_submitted or self._updates)
        return (self.has_work and not is_parked) or self._tiers.has_work

    @property
    def _waits_for_tiers(self) -> bool:
        """Whether what waits may be able to run once a tier has answered, or is late."""
        return self._tiers is not None and (self._scheduler.n_loading > 0 or self._tiers.n_loads > 0)

    def check(self) -> None:
        """Raise AssertionError when an invariant of the engine or the scheduler does not hold."""
        self._scheduler.check()
        live = set(self._scheduler.running) | set(self._scheduler.waiting)
        assert live == set(self._sequences.values()), "engine: a sequence is neither running nor waiting, or lost"
        assert len(self._in_flight) <= N_STEPS_MAX, "engine: too many steps are under way"
        assert self._n_waiting >= 0, "engine: fewer than none wait"
        if self._speculation is not None:
            self._speculation.check()
        if not self.has_work:
            self._scheduler.check_idle()

    def _wait(self) -> None:
        try:
            if not self._scheduler.running and not self._scheduler.waiting:
                self._scheduler.check_idle()
        except AssertionError:
            # Requests still get right answers, from fewer pages; ending the process would take them away as well.
            _log.critical("engine: idle, and something is still held", exc_info=True)
        if self._tiers is None or not (self._waits_for_tiers or self._tiers.is_awaiting):
            command = self._commands.get()  # sleeps; nothing polls
        else:
            try:
                command = self._commands.get(timeout=_TIER_POLL_S)
            except queue.Empty:
                return
        command()

    def _take_commands(self) -> None:
        commands = self._commands
        while not commands.empty():
            commands.get_nowait()()

    def _do_add(self, new: list[NewSequence]) -> None:
        by_priority = self.config.scheduling_policy == "priority"
        for one in new:
            sequence = Sequence.from_new(
                one, arrival_idx=self._n_arrived, by_priority=by_priority, vocab_size=self.limits.vocab_size
            )
            self._n_arrived += 1
            self._sequences[sequence.sequence_id] = sequence
            self._scheduler.add(sequence)

    def _do_finish(self, sequence_ids: list[str], reason: str) -> None:
        for sequence_id in sequence_ids:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                self._end_sequence(sequence, self._update(sequence, []), reason=reason)

    def _do_reset(self, done: "Future[bool]") -> None:
        if not self._scheduler.running and not self._scheduler.waiting:
            self._scheduler.pins.clear()
            if self._tiers is not None:
                self._tiers.reset()
        done.set_result(self._scheduler.reset_cached())

    def _do_hear_tiers(self) -> None:
        """Begin a round, in which tiers are polled and sequences ask them again."""
        self._has_news = False
        if self._tiers is not None:
            self._tiers.news()

    def _do_stop(self, *, is_abort: bool) -> None:
        self._is_stopping = True
        if is_abort:
            self._do_finish(list(self._sequences), "abort")

    def _submit_next(self) -> bool:
        scheduler, runner = self._scheduler, self._runner
        if self._speculation is not None:
            self._speculation.prepare(scheduler.running, scheduler.n_begun_next)
        n_draft = self._speculation.n_draft if self._speculation is not None else 0
        step = scheduler.plan(self.clock(), n_draft=n_draft)
        for slot in scheduler.pop_released_slots():
            runner.release(slot)
        if step is None:
            return False
        if step.admitted:
            self._note_admissions(step.admitted)
        self._in_flight.append(step)
        try:
            for s in step.admitted:
                runner.admit(s.slot, s.token_ids, s.n_prompt, s.params, s.seed, s.stop_ids, s.n_first)
                runner.set_pages(s.slot, 0, s.page_ids)
            for slot, first_idx, page_ids in step.page_writes:
                runner.set_pages(slot, first_idx, page_ids)
            for s, snapshot in step.loads:
                runner.load_state(s.slot, snapshot.place_idx)
            runner.submit(step.to_plan())
            for save in step.saves:
                runner.save_state(save.slot, save.snapshot.place_idx)
        except TiercelError as error:
            self._not_submitted[step] = error  # it fails in its turn, so that fences open in order
        if len(self._in_flight) == 1:
            self._send_masks(step)
        return True

    def _send_masks(self, step: PlannedStep) -> None:
        """Say which tokens a step may sample, which is known once all steps before it are collected.

        It runs meanwhile. A row that nobody will believe is told anything, so that the step ends.
        """
        if not step.masked or step in self._not_submitted:
            return
        if self._masks is None:
            from tiercel.sampling.constraint import MaskRows  # a start without forms does without it

            self._masks = MaskRows(self.limits.n_slots + self.config.max_draft_rows, self.limits.vocab_size)
        rows, n = self._masks.rows, 0
        for i in step.masked:
            sequence = step.sequences[i]
            n_own = step.counts[i] if i in step.foretold else 1
            own = rows[n : n + n_own]
            n += n_own
            try:
                if sequence.state is State.FINISHED or sequence in step.discarded:
                    fill_with_all(own)
                else:
                    foretold = step.foretold.get(i)
                    if foretold is not None and step.drafts_own:  # by now the runner has said which they are
                        foretold = sequence.foretold_from, sequence.foretold
                    fill_masks(own, sequence, foretold)
            except Exception as error:  # noqa: BLE001  a request's boundary: answered to it, others go on
                fill_with_all(own)
                self._end_sequence(sequence, self._update(sequence, []), error=_form_failed(sequence, error))
        self._runner.set_masks(step.step_id, self._masks.words[:n])

    def _note_admissions(self, admitted: list[Sequence]) -> None:
        n_first = sum(s.n_preemptions == 0 for s in admitted)
        self._totals["prompt"] += sum(s.n_prompt for s in admitted if s.n_preemptions == 0)
        with self._lock:
            self._n_waiting -= n_first

    def _n_ahead(self) -> int:
        """Give how many steps may be under way: more than `depth` while all of them are short and decode.

        One while speculating pays: a draft made of the newest tokens is worth more than planning meanwhile.
        """
        if self._speculation is not None and self._speculation.waits:
            return 1
        if self._decode_s == 0.0 or self._depth == 1 or self._scheduler.waiting:
            return self._depth
        if self._in_flight and not self._in_flight[-1].only_decodes:
            return self._depth
        return min(max(int(self.config.run_ahead_s / self._decode_s), self._depth), N_STEPS_MAX)

    def _collect_some(self, n_wanted: int) -> None:
        """Wait for the `n_wanted` oldest steps together and take their rows.

        Fewer when a command comes, or where a step cannot end before the rows of those before it are taken.
        """
        n = 0
        for step in self._in_flight:
            if n == n_wanted or (n > 0 and (step.masked or step in self._not_submitted)):
                break
            n += 1
        n = self._runner.wait(n) if n > 1 and self._in_flight[0] not in self._not_submitted else 1
        self._collect()
        for _ in range(n - 1):
            self._untold_stats.append(self._stats)
            self._stats = StepStats(time_s=self._stats.time_s)
            self._collect()

    def _collect(self) -> None:
        step = self._in_flight.popleft()
        error = self._not_submitted.pop(step, None)
        result: StepResult | None = None
        if error is None:
            try:
                result = self._runner.collect()
            except TiercelError as failure:
                error = failure
        self._scheduler.collected(step, is_failed=result is None)
        if self._tiers is not None:
            self._tiers.collected(step.step_id)
        now_s = self.clock()
        stats = self._stats
        stats.time_s = now_s
        stats.n_tokens = sum(step.counts)
        stats.n_sequences = len(step.sequences)
        self._totals["steps"] += 1
        self._totals["computed"] += stats.n_tokens
        self._decode_s = 0.0
        if result is None:
            assert error is not None
            self._fail_step(step, error)
            if self._in_flight:
                self._send_masks(self._in_flight[0])
            return
        assert result.step_id == step.step_id, f"engine: step {result.step_id} came, {step.step_id} was expected"
        stats.compute_s = result.compute_ns * 1e-9
        if self._tiers is not None:
            self._tiers.stepped(stats.compute_s)
            if stats.n_tokens >= _N_PREFILL:
                self._tiers.computed(stats.n_tokens, stats.compute_s)
        if step.only_decodes:
            self._decode_s = stats.compute_s
        if self._speculation is not None:
            self._speculation.collected(step, result)
        if step.foretold:
            self._scheduler.settle(step, Counter(result.row_seq.tolist()))
        if result.rows is not None:
            self._take_pooled(step, result)
        elif step.n_logprobs is None:
            self._take_tokens(step, result)
        else:
            self._take_rows(step, result)
        if step.saves_inside:
            self._scheduler.taken(step, result)
        if self._in_flight:
            self._send_masks(self._in_flight[0])

    def _fail_step(self, step: PlannedStep, error: TiercelError) -> None:
        self._totals["failed"] += 1
        self._scheduler.settle(step, {})
        self._scheduler.fail(step, list(self._in_flight))
        _log.error("engine: step %d failed, and %d sequences with it: %s", step.step_id, len(step.sequences), error)
        for sequence in step.sequences:
            if sequence.state is not State.FINISHED:
                failure = RequestFailed(f"engine: the step that computed it failed: {error}; send it again")
                failure.__cause__ = error
                self._end_sequence(sequence, self._update(sequence, []), error=failure)

    def _take_tokens(self, step: PlannedStep, result: StepResult) -> None:
        """Take the rows of a step without log-probabilities: one for each sequence that samples."""
        sequences, discarded = step.sequences, step.discarded
        for i, token_id in zip(result.row_seq.tolist(), result.row_token.tolist(), strict=True):
            sequence = sequences[i]
            if sequence.state is State.FINISHED or sequence in discarded:
                self._totals["stale"] += 1
            elif not 0 <= token_id < self.limits.vocab_size:
                self._fail_row(sequence, token_id)
            else:
                self._take_token(sequence, token_id, None)

    def _take_pooled(self, step: PlannedStep, result: StepResult) -> None:
        """Take a pooling model's rows; a sequence ends with its last."""
        import numpy as np  # the rows are its arrays

        assert result.rows is not None
        seqs, positions = np.asarray(result.row_seq), np.asarray(result.row_pos)
        for i, sequence in enumerate(step.sequences):
            at = np.flatnonzero(seqs == i)
            if len(at) == 0:
                continue
            if sequence.state is State.FINISHED or sequence in step.discarded:
                self._totals["stale"] += len(at)
                continue
            rows = result.rows[at[0] : at[-1] + 1]
            if not np.isfinite(rows).all():
                self._fail_row(sequence, -1)
                continue
            n_known = sum(map(len, sequence.rows))
            n_again = n_known - int(positions[at[0]]) if sequence.pools == "all" else 0  # before a preemption
            sequence.rows.append(rows[max(n_again, 0) :])
            if positions[at[-1]] == sequence.n_prompt - 1:
                update = self._update(sequence, [])
                update.rows = np.concatenate(sequence.rows)
                self._end_sequence(sequence, update, reason="stop", is_complete=True)

    def _take_rows(self, step: PlannedStep, result: StepResult) -> None:
        """Take the rows of a step with log-probabilities: scored prompt positions too."""
        assert result.row_logprob is not None
        assert result.row_rank is not None
        top_ids, top_logprobs = result.top_ids, result.top_logprobs
        assert step.n_logprobs == 0 or (top_ids is not None and top_logprobs is not None)
        logprobs, ranks = result.row_logprob.tolist(), result.row_rank.tolist()
        rows = zip(result.row_seq.tolist(), result.row_pos.tolist(), result.row_token.tolist(), strict=True)
        for row, (i, position, token_id) in enumerate(rows):
            sequence = step.sequences[i]
            if sequence.state is State.FINISHED or sequence in step.discarded:
                self._totals["stale"] += 1
                continue
            if not 0 <= token_id < self.limits.vocab_size:
                self._fail_row(sequence, token_id)
                continue
            is_last = position == step.starts[i] + step.counts[i] - 1
            is_sampled = i in step.foretold or (step.samples[i] and is_last)
            n = sequence.n_logprobs if is_sampled else sequence.n_prompt_logprobs
            entry = None
            if n is not None:
                ids = top_ids[row, :n].tolist() if top_ids is not None else []
                top = top_logprobs[row, :n].tolist() if top_logprobs is not None else []
                entry = TokenLogprobs(token_id, logprobs[row], ranks[row], ids, top)
            if is_sampled:
                self._take_token(sequence, token_id, entry)
            elif entry is not None and position == len(sequence.prompt_logprobs) < sequence.n_prompt - 1:
                sequence.prompt_logprobs.append(entry)  # else it is known from before a preemption

    def _take_token(self, sequence: Sequence, token_id: int, entry: TokenLogprobs | None) -> None:
        sequence.token_ids.append(token_id)
        now_s = self._stats.time_s
        update = SequenceUpdate(sequence.sequence_id, [token_id], now_s)
        if entry is not None:
            update.logprobs = [entry]
        if sequence.last_token_s is None:
            sequence.first_token_s = now_s
            self._stats.time_to_first_token_s.append(now_s - sequence.arrival_s)
            update.first_scheduled_s = sequence.first_scheduled_s
            update.n_cached_tokens = sequence.n_cached_tokens
            update.cached_by_tier = sequence.cached_by_tier
            if sequence.n_prompt_logprobs is not None:
                assert not sequence.is_scoring, f"{sequence.sequence_id}: a prompt token was not scored"
                update.prompt_logprobs = sequence.prompt_logprobs
        else:
            self._stats.inter_token_s.append(now_s - sequence.last_token_s)
        sequence.last_token_s = now_s
        self._totals["generation"] += 1
        if sequence.constraint is not None:
            try:
                sequence.constraint.accept(token_id)
            except Exception as error:  # noqa: BLE001  as in _send_masks
                self._end_sequence(sequence, update, error=_form_failed(sequence, error))
                return
            update.is_complete = sequence.constraint.ends_with_text
        ended = sequence.why_ended(token_id)
        if ended is None:
            self._updates.append(update)
        else:
            update.stop_reason = ended[1]
            self._end_sequence(sequence, update, reason=ended[0], is_complete=True)

    def _fail_row(self, sequence: Sequence, code: int) -> None:
        """Fail a sequence whose newest row gave no token; `code` is what `StepResult.row_token` says instead."""
        if code == _NOTHING_ALLOWED and sequence.constraint is not None and sequence.constraint.may_end:
            # Its form may end here and cannot go on: a model without end-of-sequence, or one that is not allowed it.
            self._end_sequence(sequence, self._update(sequence, []), reason="stop")
            return
        where = f"engine: after token {len(sequence.token_ids)} of {sequence.sequence_id}"
        is_spoilt = code != _NOTHING_ALLOWED
        error: RequestFailed
        if code >= 0:
            error = RequestFailed(
                f"{where}: the runner gave token {code}; ids from 0 to {self.limits.vocab_size - 1} are needed; "
                "report this"
            )
        elif is_spoilt:
            error = RequestFailed(
                f"{where}: the logits hold a NaN; finite numbers are needed; the model overflows on this input, "
                "or its weights are damaged: try another input or dtype, or fetch the model again"
            )
        else:
            error = NoTokenAllowed(
                f"{where}: the request's constraints leave no token; at least one is needed; loosen allowed_token_ids, "
                "bad_words, stop_token_ids or the form of the output"
            )
        self._end_sequence(sequence, self._update(sequence, []), error=error, is_spoilt=is_spoilt)

    def _update(self, sequence: Sequence, token_ids: list[int]) -> SequenceUpdate:
        return SequenceUpdate(sequence.sequence_id, token_ids, self.clock())

    def _end_sequence(
        self,
        sequence: Sequence,
        update: SequenceUpdate,
        *,
        reason: str | None = None,
        error: TiercelError | None = None,
        is_complete: bool = False,
        is_spoilt: bool = False,
    ) -> None:
        """Give back what the sequence holds and make its final update: the one way out."""
        self._scheduler.finish(sequence, is_complete=is_complete, is_spoilt=is_spoilt)
        if self._speculation is not None:
            self._speculation.end(sequence)
        del self._sequences[sequence.sequence_id]
        if sequence.first_scheduled_s is None:
            with self._lock:
                self._n_waiting -= 1
        update.finish_reason = reason
        update.error = error
        update.first_scheduled_s = sequence.first_scheduled_s
        update.n_cached_tokens = max(sequence.n_cached_tokens, 0)
        update.cached_by_tier = sequence.cached_by_tier
        update.n_preemptions = sequence.n_preemptions
        self._updates.append(update)
        self._stats.time_s = update.time_s
        self._stats.finished.append(_stats_of(sequence, reason or "error", update.time_s))

    def _give_up_on_head(self) -> None:
        """Fail the head of the queue when nothing runs and still it does not fit: it would wait for ever."""
        head = self._scheduler.waiting[0]
        _log.critical("engine: %s does not fit an idle engine; admission should have refused it", head.sequence_id)
        error = RequestFailed(
            f"engine: {len(head.token_ids)} tokens do not fit the idle pool of {self.limits.n_pages} pages of "
            f"{self.limits.page_size_tokens}; shorten it or raise kv_cache_memory_bytes"
        )
        self._end_sequence(head, self._update(head, []), error=error)

    def _deliver(self) -> None:
        updates, stats = self._updates, self._stats
        if updates:
            self._updates = []
            if self._sink is not None:
                self._sink(updates)
        if stats.n_sequences or stats.finished:
            self._stats = StepStats(time_s=stats.time_s)
            self._untold_stats.append(stats)
        if self._untold_stats:
            if self._listener is not None:
                for one in self._untold_stats:
                    self._listener.on_step(one)
            self._untold_stats.clear()

    def _publish(self) -> None:
        scheduler, totals = self._scheduler, self._totals
        pool = scheduler.pool
        self.snapshot = EngineSnapshot(
            len(scheduler.running),
            len(scheduler.waiting),
            self.limits.n_slots,
            pool.n_pages,
            pool.n_used,
            pool.n_cached,
            pool.page_size_tokens,
            totals["steps"],
            totals["failed"],
            totals["prompt"],
            totals["generation"],
            totals["computed"],
            scheduler.n_prefix_queries_tokens,
            scheduler.n_prefix_hits_tokens,
            scheduler.n_preemptions,
            scheduler.n_tokens_lost,
            totals["stale"],
            self._tell_tiers(),
            scheduler.pins.n_pages,
            None if self._speculation is None else self._speculation.told(),
            *(scheduler.states.counts() if scheduler.states is not None else ()),
        )

    def _tell_tiers(self) -> "tuple[TierSnapshot, ...]":
        """Give the tiers' numbers: a new look at them now and then, and whenever the engine comes to rest."""
        if self._tiers is None:
            return ()
        now_s = self.clock()
        if self.has_work and now_s - self._tiers_told_s < _TIER_TELL_S:
            return self.snapshot.tiers
        self._tiers_told_s = now_s
        return self._tiers.snapshot()

    def _end(self, error: BaseException | None) -> None:
        """Answer everything that is left and close the runner. Nothing is accepted from here on."""
        with self._lock:
            if self._is_dead:
                return
            self._is_dead = True
            why = "it was shut down" if error is None else f"its loop died of {type(error).__name__}: {error}"
            self._refusal = f"engine: {why}; no request can be served; start it again"
        self._answer_all(error)
        if self._tiers is not None:
            self._tiers.close()
        if self._speculation is not None:
            self._speculation.close()
        self._runner.close()

    def _answer_all(self, error: BaseException | None) -> None:
        assert self._refusal is not None
        dead = EngineDead(self._refusal)
        dead.__cause__ = error
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if not isinstance(command, partial):  # of `call_soon`
                continue
            if command.func == self._do_add:
                self._updates += [_lost(new.sequence_id, self.clock(), dead) for new in command.args[0]]
            elif command.func == self._do_reset:
                command.args[0].set_exception(dead)
        self._updates += [_lost(sequence_id, self.clock(), dead) for sequence_id in self._sequences]
        self._sequences.clear()
        self._n_waiting = 0
        updates, self._updates = self._updates, []
        if updates and self._sink is not None:
            self._sink(updates)


def _lost(sequence_id: str, time_s: float, error: TiercelError) -> SequenceUpdate:
    return SequenceUpdate(sequence_id, [], time_s, error=error)


def _form_failed(sequence: Sequence, error: Exception) -> RequestFailed:
    if isinstance(error, RequestFailed):
        return error
    _log.error("engine: following the form of %s failed", sequence.sequence_id, exc_info=error)
    failure = RequestFailed(
        f"engine: the form of {sequence.sequence_id} could not be followed: {error!r}; send it again"
    )
    failure.__cause__ = error
    return failure


def _stats_of(sequence: Sequence, reason: str, now_s: float) -> SequenceStats:
    scheduled_s, first_s, last_s = sequence.first_scheduled_s, sequence.first_token_s, sequence.last_token_s
    has_token = scheduled_s is not None and first_s is not None and last_s is not None
    return SequenceStats(
        finish_reason=reason,
        n_prompt_tokens=sequence.n_prompt,
        n_output_tokens=sequence.n_output,
        n_cached_tokens=max(sequence.n_cached_tokens, 0),
        n_loaded_tokens=sum((sequence.cached_by_tier or {}).values()),
        n_preemptions=sequence.n_preemptions,
        max_tokens=sequence.params.max_tokens,
        e2e_s=now_s - sequence.arrival_s,
        queue_s=None if scheduled_s is None else scheduled_s - sequence.arrival_s,
        prefill_s=first_s - scheduled_s if has_token else None,  # type: ignore[operator]
        decode_s=last_s - first_s if has_token else None,  # type: ignore[operator]
    )
