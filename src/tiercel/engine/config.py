"""What an engine is told once: its limits and policies. Knows no model; `boot` fills it from the user's settings."""

from typing import Literal

import msgspec

from tiercel.base.errors import ConfigError

SchedulingPolicy = Literal["fcfs", "priority"]
POLICIES = ("fcfs", "priority")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and policies of one engine, under vLLM's names where the meaning is the same. Checked as a whole.

    max_num_seqs: sequences in one step. 128: vLLM's default for serving on a CPU; more only lengthens each token's
        wait. max_num_batched_tokens: tokens in one step. 2048: vLLM's default for serving on a CPU; a chunk of
        prefill that large already saturates the cores, and it bounds how long running streams wait for a new prompt.
        Not below max_num_seqs, so that every decoding sequence gets its token in every step.
        long_prefill_token_threshold: most tokens of one sequence's prompt in a step, while others have work. 0,
        vLLM's default: no cap but the step's, as decoding sequences come first anyway. enable_prefix_caching: on, as
        hits are exact (a hit's tokens and logits are those of a miss). scheduling_policy: "fcfs", as vLLM; "priority"
        lets a request's `priority` go before its arrival, lower first. async_scheduling: on, so that planning and
        delivery overlap computing; off waits for each step before the next plan. run_ahead_s: while all that runs
        decodes, as many steps as take so long are under way, 8 at most, and most of them are seen to at once; it bounds
        how long a token waits to be seen, and a new request for the steps before it. 0.016: a frame of a screen, and
        six steps of a small model; 0: two steps are under way, however short. max_logprobs: most log-probabilities a
        request may ask for per token. 20, as OpenAI and vLLM; -1: the vocabulary. max_waiting: sequences that may wait
        for their first step; beyond it a request is refused, not queued into a time-out. 4096: a few MiB of prompts,
        and minutes of work for any machine. stream_interval: tokens that an output of a stream has at least, but the
        first and the last; more costs fewer wake-ups and frames. 1, as vLLM: each is shown at once. seed: what requests
        without a seed derive theirs from; None: from the system's entropy. 0, as vLLM, so that the same script gives
        the same text. max_draft_rows: rows of one step that may be drafts. They come beside its tokens and logits rows,
        so that no prompt's chunk is shorter for them, and the runner has room for them. 0: nothing is speculated.
        check_each_step: verify every invariant after every step. For tests: it costs O(pages).
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    async_scheduling: bool = True
    run_ahead_s: float = 0.016
    max_logprobs: int = 20
    max_waiting: int = 4096
    stream_interval: int = 1
    seed: int | None = 0
    max_draft_rows: int = 0
    check_each_step: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("long_prefill_token_threshold", 0),
            ("max_logprobs", -1),
            ("run_ahead_s", 0),
            ("max_waiting", 1),
            ("stream_interval", 1),
            ("max_draft_rows", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"engine.{name}: got {getattr(self, name)}; {least} or more is needed; raise it")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_num_batched_tokens: got {self.max_num_batched_tokens}; at least max_num_seqs="
                f"{self.max_num_seqs} is needed, one token a sequence; raise it or lower max_num_seqs"
            )
        if self.scheduling_policy not in POLICIES:
            raise ConfigError(
                f"engine.scheduling_policy: got {self.scheduling_policy!r}; one of {', '.join(POLICIES)} is needed"
            )
