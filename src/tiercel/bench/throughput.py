"""`bench throughput`: how fast many requests are done that all come at once.

Measures of a round: `elapsed_s`, `requests_per_s`, `total_tok_s` (prompt and output), `output_tok_s`. With
`against_single`, the first request also runs alone in each round: `single_output_tok_s`, and `gain_over_single`, how
many times that the whole group's output rate is. With `step_overhead`, `step_overhead_frac`: the part of `elapsed_s`
in which no kernel runs. With `against_form`, the group also runs bound to a JSON schema: `form_time_ratio`, how many
times as long that takes.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from tiercel.base.errors import ConfigError
from tiercel.bench.contest import Request, Run
from tiercel.bench.offline import Field, Told, overhead, run
from tiercel.bench.prompts import random_requests
from tiercel.bench.rows import Row

# Objects in a list, strings in the objects, numbers: what schemas mostly are. It has no end within a benchmark.
_SCHEMA: Final = json.dumps(
    {
        "type": "array",
        "minItems": 500,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 3},
                "age": {"type": "integer"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["name", "age", "tags"],
            "additionalProperties": False,
        },
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputWork:
    """The requests of one round; vLLM's names and meanings."""

    num_prompts: int = 32
    input_len: int = 128
    output_len: int = 128
    random_range_ratio: float = 0.0
    against_single: bool = False
    step_overhead: bool = False
    against_form: bool = False

    def __post_init__(self) -> None:
        if self.against_form and self.against_single:
            raise ConfigError("bench throughput: against_form and against_single: one of the two is needed; drop one")


def bench(who: Field, told: Told, work: ThroughputWork, *, on_note: Callable[[str], None] = lambda _: None) -> Row:
    """Measure the throughput of `work`.

    Raises: ConfigError: with `against_form`, peers are named: none is told the form.
    """
    if work.against_form and who.peers:
        raise ConfigError(f"bench throughput: against_form: got peers {', '.join(who.peers)}; ours alone is measured")

    def make_groups(vocab_size: int) -> list[list[Request]]:
        requests = random_requests(
            work.num_prompts,
            input_len=work.input_len,
            output_len=work.output_len,
            vocab_size=vocab_size,
            seed=who.seed,
            range_ratio=work.random_range_ratio,
        )
        if work.against_form:
            return [requests, [dataclasses.replace(one, schema=_SCHEMA) for one in requests]]
        return [requests, requests[:1]] if work.against_single else [requests]

    return run(who, told, asdict(work), make_groups, measure, on_note=on_note)


def measure(groups: Sequence[Sequence[Request]], runs: Sequence[Run]) -> Mapping[str, float]:
    """Return one round's measures."""
    requests, done = groups[0], runs[0]
    n_in = sum(len(one.token_ids) for one in requests)
    n_out = sum(len(ids) for ids in done.token_ids)
    found = {
        "elapsed_s": done.elapsed_s,
        "requests_per_s": len(requests) / done.elapsed_s,
        "total_tok_s": (n_in + n_out) / done.elapsed_s,
        "output_tok_s": n_out / done.elapsed_s,
        **overhead(done),
    }
    if len(runs) > 1 and groups[1][0].schema is not None:
        found["form_time_ratio"] = runs[1].elapsed_s / done.elapsed_s
    elif len(runs) > 1:
        single_tok_s = len(runs[1].token_ids[0]) / runs[1].elapsed_s
        found |= {"single_output_tok_s": single_tok_s, "gain_over_single": found["output_tok_s"] / single_tok_s}
    return found
