"""A sequence from its arrival to its end, as the engine's thread sees it, and what it tells about it. Knows no text.

A client's request becomes one `NewSequence` for each of its outputs; the engine makes a `Sequence` of each.

    state      made so by                        slot  pages  what may be trusted
    WAITING    `Scheduler.add`, `.preempt`       no    no     token_ids; after a preemption tokens may still arrive
    LOADING    `Scheduler.plan`                  no    no     as WAITING; a tier was asked for its pages, which are the
                                                              load's, and others go before it until they came or did not
    RUNNING    admission in `Scheduler.plan`     yes   yes    n_computed and n_total count what was planned, an upper
                                                              bound of what has been computed
    FINISHED   `Scheduler.finish`                no    no     everything; rows of steps still running are dropped

The slot of a sequence that left RUNNING stays held back until no submitted step names it.
"""

import enum
from typing import TYPE_CHECKING, Literal

import msgspec

from tiercel.base.errors import TiercelError
from tiercel.engine.repetition import RepetitionWatch
from tiercel.kv.page_keys import PageKeys
from tiercel.protocol.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from tiercel.engine.states import Stop
    from tiercel.kv.snapshots import Snapshot
    from tiercel.kv.tiers.promotion import Ask
    from tiercel.sampling.budget_constraint import BudgetConstraint
    from tiercel.sampling.constraint import Constraint


Pools = Literal["last", "all"]
"""Which rows a pooled sequence gives: its last, or every one."""


class State(enum.Enum):
    """Where a sequence stands."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    LOADING = 3


class TokenLogprobs(msgspec.Struct, frozen=True):
    """One position's log-probabilities: the token's own, then those of the likeliest, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class NewSequence(msgspec.Struct, frozen=True, eq=False):
    """What the engine needs to know to produce one stream of tokens; `engine.admission` has checked it."""

    sequence_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int  # prompt and output
    eos_ids: frozenset[int]
    page_keys: PageKeys
    arrival_s: float
    priority: int = 0
    constraint: "Constraint | BudgetConstraint | None" = None  # its own: form of its text, bound of its reasoning
    pools: Pools | None = None
    n_first: int | None = None  # tokens of a pair's first text
    is_private: bool = False  # nothing of it may help another sequence, nor be helped by one


class SequenceUpdate(msgspec.Struct, eq=False):
    """What one step, or an abort, changed for one sequence."""

    sequence_id: str
    token_ids: list[int]
    time_s: float
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the tokens from the second on; once, with the first token
    finish_reason: str | None = None  # "stop" | "length" | "repetition" | "abort"
    stop_reason: int | str | None = None  # the stop token that ended it, or a word; None for end-of-sequence
    is_complete: bool = False  # it ended because its form did: the last token is part of the text
    error: TiercelError | None = None  # instead of a finish_reason
    n_cached_tokens: int = 0
    cached_by_tier: dict[str, int] | None = None  # of n_cached_tokens, those that came from a tier for it
    first_scheduled_s: float | None = None
    n_preemptions: int = 0
    rows: "np.ndarray | None" = None  # float32 [T or 1, W] of a pooled sequence, with its finish_reason


class Sequence(msgspec.Struct, eq=False):
    """One stream of tokens. Owner: the engine's thread; only `Scheduler` and `EngineCore` write to it."""

    sequence_id: str
    token_ids: list[int]  # prompt and known output
    params: SamplingParams
    seed: int
    n_prompt: int
    max_total_tokens: int
    rank: tuple[int, int]  # place in the queue, lower first: (priority or 0, order of arrival)
    page_keys: PageKeys
    stop_ids: tuple[int, ...]  # what min_tokens forbids
    ending_ids: frozenset[int]  # what ends it once min_tokens are out
    eos_ids: frozenset[int]
    arrival_s: float
    n_logprobs: int | None
    n_prompt_logprobs: int | None
    reads_cache: bool
    constraint: "Constraint | BudgetConstraint | None" = None
    repetition: RepetitionWatch | None = None
    pools: Pools | None = None
    n_first: int | None = None
    is_private: bool = False

    state: State = State.WAITING
    slot: int = -1  # -1: none
    page_ids: list[int] = msgspec.field(default_factory=list)
    n_computed: int = 0  # tokens planned to be computed: the next position to plan
    n_total: int = 0  # tokens known or being sampled by a submitted step
    n_open: int = 0  # submitted steps with drafts of it: until they are collected the two above are what may be at most
    foretold: list[int] = msgspec.field(default_factory=list)  # tokens that may come, from position foretold_from on
    foretold_from: int = 0
    n_drafts_wanted: int = 0  # of them, how many the next step is to compute beyond n_total
    n_room: int = 0  # token slots in page_ids
    key_next_at: int = 0  # tokens that must be known and planned before the next page gets its key
    last_step_id: int = -1  # the last step that names it
    ask: "Ask | None" = None  # of tiers, since it was queued
    cached_by_tier: dict[str, int] | None = None
    n_cached_tokens: int = -1  # hit at first admission; -1: not admitted yet
    n_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    rows: "list[np.ndarray]" = msgspec.field(default_factory=list)  # of a pooled sequence, in order
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    is_spoilt: bool = False  # what was computed of it must not be found by others
    # Of a model with recurrent state; `engine.states` writes them.
    stops: "list[Stop]" = msgspec.field(default_factory=list)  # where chunks end, the nearest last
    saved_at: int = 0  # tokens before its newest state that stays
    newest_states: "list[Snapshot]" = msgspec.field(default_factory=list)  # those that give way, the newest last

    @classmethod
    def from_new(cls, new: NewSequence, *, arrival_idx: int, by_priority: bool, vocab_size: int) -> "Sequence":
        """Make the engine's own record of a sequence."""
        params = new.params
        repeating = params.repetition_detection
        stop_ids = new.eos_ids.union(params.stop_token_ids or ())
        return cls(
            sequence_id=new.sequence_id,
            token_ids=list(new.prompt_token_ids),
            params=params,
            seed=new.seed,
            n_prompt=len(new.prompt_token_ids),
            max_total_tokens=new.max_total_tokens,
            rank=(new.priority if by_priority else 0, arrival_idx),
            page_keys=new.page_keys,
            stop_ids=tuple(sorted(stop_ids)),
            ending_ids=frozenset(params.stop_token_ids or ()) if params.ignore_eos else stop_ids,
            eos_ids=new.eos_ids,
            arrival_s=new.arrival_s,
            n_logprobs=vocab_size if params.logprobs == -1 else params.logprobs,
            n_prompt_logprobs=vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs,
            # What was cached has no rows.
            reads_cache=not params.skip_reading_prefix_cache and new.pools != "all",
            constraint=new.constraint,
            repetition=RepetitionWatch(repeating) if repeating is not None else None,
            pools=new.pools,
            n_first=new.n_first,
            is_private=new.is_private,
            n_total=len(new.prompt_token_ids),
        )

    @property
    def n_output(self) -> int:
        """Known output tokens."""
        return len(self.token_ids) - self.n_prompt

    @property
    def is_scoring(self) -> bool:
        """Whether prompt tokens still lack the log-probabilities that were asked for."""
        return self.n_prompt_logprobs is not None and len(self.prompt_logprobs) < self.n_prompt - 1

    def why_ended(self, token_id: int) -> tuple[str, int | str | None] | None:
        """Say why it ends with `token_id`, its newest: (finish reason, stop reason); None when it goes on.

        Requires: it is asked once for each token.
        """
        repeats = self.repetition is not None and self.repetition.push(self.token_ids, self.n_prompt)
        if token_id in self.ending_ids and self.n_output >= self.params.min_tokens:
            is_eos = token_id in self.eos_ids and not self.params.ignore_eos
            return "stop", None if is_eos else token_id
        if self.constraint is not None and self.constraint.is_complete:
            return "stop", None
        if len(self.token_ids) >= self.max_total_tokens:
            return "length", None
        if repeats and self.n_output >= self.params.min_tokens:
            return "repetition", "repetition_detected"
        return None
