"""`bench context`: what a long context costs a decoding stream, against what the keys and values it adds must cost.

Measures of a round: `short_tok_s` and `long_tok_s`, the rates after the first token of one stream with a short and a
long prompt; `read_gb_s`, the machine's rate of reading a working set of the weights and the long context's keys and
values; `predicted_tok_s`, the short one's rate with the added bytes read at that rate in each step; and
`of_predicted_frac`, the long one's rate over that.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tiercel.base.errors import ConfigError, RequestFailed
from tiercel.bench import limits, machine, ours
from tiercel.bench.contest import Request, Run, fault_of
from tiercel.bench.offline import Field, Told, make_row
from tiercel.bench.prompts import random_requests
from tiercel.bench.rows import OURS, Contestant, Row, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextWork:
    """The two prompts' tokens, and how many each is continued by."""

    input_len: int = 4096
    short_len: int = 16
    output_len: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.short_len < self.input_len or self.output_len < 2:
            raise ConfigError(
                f"bench context: got prompts of {self.short_len} and {self.input_len} tokens, {self.output_len} out; "
                "need a shorter, a longer, and 2 or more out"
            )


def bench(who: Field, told: Told, work: ContextWork, *, on_note: Callable[[str], None] = lambda _: None) -> Row:
    """Measure what of the predicted rate is reached.

    Raises: RequestFailed: ours fails, or its outputs change.
    """
    with contextlib.ExitStack() as open_:
        engine = ours.open_engine(who.model, who.options)
        open_.callback(engine.close)
        pair = [
            random_requests(
                1, input_len=length, output_len=work.output_len, vocab_size=engine.vocab_size, seed=who.seed
            )[0]
            for length in (work.short_len, work.input_len)
        ]
        state = machine.describe()
        found, outputs = [], set()
        for i in range(who.n_warmups + who.n_rounds):
            runs = [_run(engine, request) for request in pair]
            outputs.add(tuple(run.token_ids for run in runs))
            if i >= who.n_warmups:
                found.append(measure(engine, work, runs))
            on_note(f"round {i - who.n_warmups + 1} of {who.n_rounds}" if i >= who.n_warmups else "warming up")
        if len(outputs) != 1:
            raise RequestFailed("bench context: our outputs changed between rounds of the same requests; report this")
        config = {
            "work": {
                **asdict(work),
                "n_warmups": who.n_warmups,
                "n_rounds": who.n_rounds,
                "seed": who.seed,
                "kv_token_bytes": engine.kv_token_bytes,
                "weight_bytes": engine.weight_bytes,
            },
            "engine": dict(engine.config),
        }
    measures = {name: spread([one[name] for one in found]) for name in found[0]}
    digest = hashlib.sha256(json.dumps(outputs.pop()).encode()).hexdigest()[:16]
    contestant = Contestant(engine.versions, {}, measures, {"digest": digest})
    return make_row(told, config, {OURS: contestant}, {}, state)


def measure(engine: ours.LocalEngine, work: ContextWork, runs: list[Run]) -> dict[str, float]:
    """Return one round's measures; the machine's rate is measured now, as it changes from minute to minute."""
    short_tok_s, long_tok_s = (_rate_tok_s(run) for run in runs)
    added_bytes = (work.input_len - work.short_len) * engine.kv_token_bytes
    read_gb_s = limits.measure_reading(engine.n_threads, engine.level, engine.weight_bytes + added_bytes)
    predicted_tok_s = predict(short_tok_s, added_bytes, read_gb_s)
    return {
        "short_tok_s": short_tok_s,
        "long_tok_s": long_tok_s,
        "read_gb_s": read_gb_s,
        "predicted_tok_s": predicted_tok_s,
        "of_predicted_frac": long_tok_s / predicted_tok_s,
    }


def predict(short_tok_s: float, added_bytes: float, read_gb_s: float) -> float:
    """Return the rate of a stream whose every step reads `added_bytes` more than one at `short_tok_s` does."""
    return 1 / (1 / short_tok_s + added_bytes / (read_gb_s * 1e9))


def _run(engine: ours.LocalEngine, request: Request) -> Run:
    run = engine.generate([request])
    fault = fault_of(run, [request])
    if fault or run.first_token_s is None:
        raise RequestFailed(f"bench context: {fault or 'no time of the first token'}; report this")
    return run


def _rate_tok_s(run: Run) -> float:
    assert run.first_token_s is not None
    return (len(run.token_ids[0]) - 1) / (run.elapsed_s - run.first_token_s[0])
