"""`bench latency`: how long one group of requests takes from beginning to end, with nothing else running.

Measures of a round: `latency_s`, all of it; `first_token_s`, mean of the requests' first tokens; `decode_tok_s`, each
request's tokens after its first, over the time after the first token came to all; `prefill_tok_s`, prompt tokens over
the time until then. With `step_overhead`, `step_overhead_frac`: the part of `latency_s` in which no kernel runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from tiercel.base.errors import ConfigError
from tiercel.bench.contest import Request, Run
from tiercel.bench.offline import Field, Told, overhead, run
from tiercel.bench.prompts import random_requests
from tiercel.bench.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyWork:
    """The requests of one round; vLLM's names and meanings."""

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    step_overhead: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"bench latency: batch-size: got {self.batch_size}; need 1 or more")


def bench(who: Field, told: Told, work: LatencyWork, *, on_note: Callable[[str], None] = lambda _: None) -> Row:
    """Measure the latency of `work`."""

    def make_groups(vocab_size: int) -> list[list[Request]]:
        return [
            random_requests(
                work.batch_size,
                input_len=work.input_len,
                output_len=work.output_len,
                vocab_size=vocab_size,
                seed=who.seed,
            )
        ]

    return run(who, told, asdict(work), make_groups, measure, on_note=on_note)


def measure(groups: Sequence[Sequence[Request]], runs: Sequence[Run]) -> Mapping[str, float]:
    """Return one round's measures."""
    requests, done = groups[0], runs[0]
    found = {"latency_s": done.elapsed_s, **overhead(done)}
    if done.first_token_s is None:
        return found
    first_s = max(done.first_token_s)
    found["first_token_s"] = sum(done.first_token_s) / len(done.first_token_s)
    if first_s > 0:
        found["prefill_tok_s"] = sum(len(one.token_ids) for one in requests) / first_s
    n_after = sum(one.max_tokens - 1 for one in requests)
    if n_after and done.elapsed_s > first_s:
        found["decode_tok_s"] = n_after / (done.elapsed_s - first_s)
    return found
