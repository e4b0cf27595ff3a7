"""What the engine counts, as values: a snapshot for gauges and counters, one record a step for histograms.

Knows no metrics library; `api` turns these into one. The engine's thread is the only writer; a snapshot is replaced
whole, so any thread may read the latest.
"""

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from tiercel.kv.tiers.page_tiers import TierSnapshot


class SpeculationCounts(msgspec.Struct):
    """What became of drafts. All but the last two only ever grows."""

    n_drafts: int = 0  # steps of a sequence that had drafts
    n_draft_tokens: int = 0
    n_accepted_tokens: int = 0
    n_accepted_by_position: list[int] = msgspec.field(default_factory=list)
    n_failures: int = 0  # drafters that threw, or proposed what is no token
    n_verify_steps: int = 0  # steps that had drafts
    drafter_s: float = 0.0  # spent on guessing, on the engine's thread
    verify_s: float = 0.0  # computing of steps that had drafts
    n_switched_off: int = 0  # times drafting stopped for a while, as it did not pay
    n_passed_over: int = 0  # steps of a sequence that had drafts, none of them worth its row
    n_chosen_rows: int = 0  # draft rows of the last step that had any
    is_drafting: bool = False  # whether the next step may have drafts

    def note_step(self, n_rows: int, compute_ns: int) -> None:
        """Take note of a step with so many draft rows."""
        if n_rows:
            self.n_verify_steps += 1
            self.verify_s += compute_ns * 1e-9
            self.n_chosen_rows = n_rows

    def changed_by(self, newer: "SpeculationCounts") -> bool:
        """Whether `newer`, of which this is a copy, has grown."""
        return (
            self.n_draft_tokens != newer.n_draft_tokens
            or self.n_failures != newer.n_failures
            or self.drafter_s != newer.drafter_s
            or self.n_switched_off != newer.n_switched_off
            or self.n_passed_over != newer.n_passed_over
            or self.is_drafting != newer.is_drafting
        )

    def copy(self) -> "SpeculationCounts":
        """Return a copy, of the list as well."""
        return msgspec.structs.replace(self, n_accepted_by_position=list(self.n_accepted_by_position))


class EngineSnapshot(msgspec.Struct, frozen=True):
    """The engine at one moment. What begins with n_total only ever grows."""

    n_running: int = 0
    n_waiting: int = 0
    n_slots: int = 0
    n_pages: int = 0
    n_pages_used: int = 0
    n_pages_cached: int = 0
    page_size_tokens: int = 0
    n_total_steps: int = 0
    n_total_steps_failed: int = 0
    n_total_prompt_tokens: int = 0
    n_total_generation_tokens: int = 0
    n_total_computed_tokens: int = 0
    n_total_prefix_queries_tokens: int = 0
    n_total_prefix_hits_tokens: int = 0
    n_total_preemptions: int = 0
    n_total_tokens_lost: int = 0  # computed, then thrown away by preemption
    n_total_stale_rows: int = 0  # computed for sequences that had ended meanwhile
    tiers: "tuple[TierSnapshot, ...]" = ()  # below the page pool, in order
    n_pages_pinned: int = 0
    speculation: SpeculationCounts | None = None  # a copy; None: nothing is speculated
    n_snapshots: int = 0  # places for recurrent states; 0: none are kept
    n_snapshots_kept: int = 0
    n_snapshots_reserved: int = 0  # a step under way saves into them
    n_total_snapshots_saved: int = 0
    n_total_snapshots_hit: int = 0
    n_total_snapshots_evicted: int = 0

    @property
    def kv_usage_frac(self) -> float:
        """Pages in use, as a part of all."""
        return self.n_pages_used / self.n_pages if self.n_pages else 0.0


class SequenceStats(msgspec.Struct, frozen=True):
    """One sequence that has ended. Times are None where it ended before they happened."""

    finish_reason: str  # "stop" | "length" | "abort" | "error"
    n_prompt_tokens: int
    n_output_tokens: int
    n_cached_tokens: int
    n_loaded_tokens: int  # of them, those that came from a tier
    n_preemptions: int
    max_tokens: int | None
    e2e_s: float
    queue_s: float | None
    prefill_s: float | None  # first scheduled to first token
    decode_s: float | None  # first token to last


class StepStats(msgspec.Struct):
    """What was learnt by collecting one step, or by an abort between steps."""

    time_s: float
    compute_s: float = 0.0
    n_tokens: int = 0  # computed by the step
    n_sequences: int = 0
    time_to_first_token_s: list[float] = msgspec.field(default_factory=list)
    inter_token_s: list[float] = msgspec.field(default_factory=list)
    finished: list[SequenceStats] = msgspec.field(default_factory=list)


class StatsListener(Protocol):
    """Hears of every step, on the engine's thread: it must not wait."""

    def on_step(self, stats: StepStats) -> None:
        """Take note of a step."""
        ...
