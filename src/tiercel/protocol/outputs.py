"""What a request produces, under vLLM's names, so that a script that reads them moves by changing its import."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class Logprob:
    """One token's log-probability at one position.

    `rank` is 1 for the likeliest; ties share the better rank.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One position: the chosen token's entry first, then the likeliest others.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` sequences.

    `finish_reason` is None while running, then "stop" | "length" | "abort". `stop_reason` is the stop string or stop
    token id that ended it, None for end-of-sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether no more tokens follow."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of one monotonic clock."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    n_preemptions: int = 0

    def copy(self) -> "RequestMetrics":
        """Return another with the same times; one is made for each token, so it is not `dataclasses.replace`."""
        return RequestMetrics(
            self.arrival_s, self.first_scheduled_s, self.first_token_s, self.last_token_s, self.n_preemptions
        )


@dataclass(slots=True)
class RequestOutput:
    """A request's state as its client sees it.

    With `SamplingParams.output_kind` DELTA, `text`, `token_ids` and `logprobs` of each output hold only what is new.
    `prompt_logprobs[0]` is None; the others hold the prompt token's entry first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    cached_by_tier: dict[str, int] | None = None  # of these, those that each tier gave; None: there are no tiers
    metrics: RequestMetrics | None = None
    lora_request: None = field(default=None)
    rows: "np.ndarray | None" = None  # float32 [T or 1, W] of a pooled text, before its pooler
