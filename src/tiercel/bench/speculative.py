"""`bench latency --compare-speculative`: the same engine with speculation and without, taking turns.

A round asks something new, and both answer it, each first in every other round; the answers must be the same, token by
token, before their times count. Recent answers help the next one, as they do in use, and none is asked for twice by the
same. What a small model answers is no matter: it repeats the text that it is given, or does not.

Without speculation is the same engine, told to draft nothing; where a runner drafts in its own steps, it is another
engine of the same model, as a program without a drafter is the faster one.

Measures of a round, of each: `latency_s`, `first_token_s` (mean), `decode_tok_s` (tokens after the first, over the time
after the first token came to all), `stream_tok_s`: the sum of the streams' own rates, each from its first token to its
last, and `slowest_tok_s`, the least of them. With drafts some streams end before others, and those that are left
are few: under load others would have come. Of ours also `speedup`: its `stream_tok_s` over the other's of the round;
`tokens_per_step` of a sequence; `draft_s`, what guessing took. With `n_behind` streams: `first_token_s` of a prompt
of `input_len` tokens that comes while so many streams decode, and `first_token_ratio`, ours over the other's. The row's
outputs say how many drafts were accepted, by position.
"""

import contextlib
import hashlib
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from tiercel.base.errors import ConfigError, RequestFailed
from tiercel.bench import machine, ours, texts
from tiercel.bench.contest import Request, Run, fault_of
from tiercel.bench.offline import Field, Told, make_row
from tiercel.bench.prompts import random_requests
from tiercel.bench.rows import OURS, Contestant, Row, spread

PLAIN: Final = "without"
_COUNTS: Final = ("n_drafts", "n_draft_tokens", "n_accepted_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeWork:
    """What is asked in one round. `text`: see `texts.question`; `questions`: a file of other ones, one a line.
    `ignore_eos`: answers go on to `output_len` tokens, though the model ended them. `n_behind`: streams that decode
    when a prompt of `input_len` tokens comes; 0: what is asked is timed itself.
    """

    compare_speculative: bool = True
    text: str = "chat"
    questions: str = ""
    ignore_eos: bool = True
    output_len: int = 128
    batch_size: int = 1
    n_behind: int = 0
    input_len: int = 1024

    def __post_init__(self) -> None:
        if self.text not in texts.KINDS:
            raise ConfigError(f"bench latency: text: got {self.text!r}; need one of {', '.join(texts.KINDS)}")
        if self.output_len < 2 or self.batch_size < 1 or self.n_behind < 0 or self.input_len < 1:
            raise ConfigError(
                f"bench latency: got {self.batch_size} requests of {self.output_len} tokens out, {self.n_behind} "
                f"behind, {self.input_len} tokens in; need 1 or more, 2 or more, 0 or more, 1 or more"
            )


class Pair(Protocol):
    """Ours, with speculation and without."""

    versions: Mapping[str, str]
    config: Mapping[str, Any]
    vocab_size: int

    def ask(self, text: str) -> list[int]:
        """Return a question's token ids, as the model expects to be asked."""
        ...

    def generate(self, requests: Sequence[Request], *, speculates: bool) -> Run:
        """Complete all of `requests`."""
        ...

    def first_token_s(self, behind: Sequence[Request], late: Request, *, speculates: bool) -> tuple[float, Run]:
        """Send `late` while all of `behind` decode; return when its first token came, and what those gave."""
        ...

    def counts(self) -> Mapping[str, Any]:
        """Give the engine's statistics."""
        ...

    def close(self) -> None:
        """End the engines."""
        ...


class LocalPair:
    """Ours in this process."""

    def __init__(self, model: str | None, options: Mapping[str, Any]) -> None:
        from tiercel.llm.llm import LLM

        options = {"enable_prefix_caching": False, **options}
        self._llm = LLM(model, **options)
        self._with = ours.OurEngine(self._llm)
        self._without = self._with
        self._other: Any = None
        self._is_paused = False
        stats = self._llm.stats()
        if "n_drafts" not in stats:
            self._llm.close()
            raise ConfigError("bench latency: compare-speculative: nothing is speculated with these options; name how")
        from tiercel.engine.speculation import Speculation

        found = self._llm.engine.speculation
        # A drafter in the steps of its target has layers in its pages: without it is another engine.
        self._speculation = found if isinstance(found, Speculation) else None
        if self._speculation is None:
            self._other = LLM(model, **{**options, "speculative": "off", "speculative_config": {}})
            self._without = ours.OurEngine(self._other)
        self.versions, self.config, self.vocab_size = self._with.versions, self._with.config, self._with.vocab_size

    def ask(self, text: str) -> list[int]:
        """See `Pair.ask`."""
        return self._with.ask(text)

    def _engine(self, *, speculates: bool) -> ours.OurEngine:
        if self._speculation is not None and self._is_paused == speculates:
            self._is_paused = not speculates
            done = threading.Event()
            self._llm.client.core.call_soon(partial(_pause, self._speculation.pause, done, is_paused=self._is_paused))
            done.wait()
        return self._with if speculates else self._without

    def generate(self, requests: Sequence[Request], *, speculates: bool) -> Run:
        """See `Pair.generate`."""
        return self._engine(speculates=speculates).generate(requests)

    def first_token_s(self, behind: Sequence[Request], late: Request, *, speculates: bool) -> tuple[float, Run]:
        """See `Pair.first_token_s`."""
        engine = self._engine(speculates=speculates)
        llm = self._llm if speculates or self._other is None else self._other
        before = llm.client.snapshot.n_total_generation_tokens
        found: list[Run] = []
        thread = threading.Thread(target=lambda: found.append(engine.generate(behind)))
        thread.start()
        # All of them decode, and for long enough that it was seen whether drafting pays.
        n_before = before + sum(one.max_tokens for one in behind) // 3
        while llm.client.snapshot.n_total_generation_tokens < n_before and thread.is_alive():
            time.sleep(1e-3)
        run = engine.generate([late])
        is_in_time = thread.is_alive()
        thread.join()
        if not found or not is_in_time or run.first_token_s is None:
            raise RequestFailed("bench latency: the streams behind failed or ended too early; give them more tokens")
        return run.first_token_s[0], found[0]

    def counts(self) -> Mapping[str, Any]:
        """See `Pair.counts`."""
        return self._llm.stats()

    def close(self) -> None:
        """See `Pair.close`."""
        self._llm.close()
        if self._other is not None:
            self._other.close()


def _pause(pause: Callable[..., None], done: threading.Event, *, is_paused: bool) -> None:
    pause(is_paused=is_paused)
    done.set()


def open_pair(model: str | None, options: Mapping[str, Any]) -> Pair:
    """Load `model` with these options, and what answers without speculation."""
    return LocalPair(model, options)


def bench(who: Field, told: Told, work: SpeculativeWork, *, on_note: Callable[[str], None] = lambda _: None) -> Row:
    """Measure what speculation brings.

    Raises: RequestFailed: the answers differ, or one of them failed.
    """
    questions = _questions(work, (who.n_warmups + who.n_rounds) * (work.n_behind or work.batch_size))
    with contextlib.ExitStack() as open_:
        pair = open_pair(who.model, who.options)
        open_.callback(pair.close)
        state = machine.describe()
        found: dict[str, list[dict[str, float]]] = {OURS: [], PLAIN: []}
        digest = hashlib.sha256()
        before: Mapping[str, Any] = {}
        for i in range(who.n_warmups + who.n_rounds):
            if i == who.n_warmups:
                before = dict(pair.counts())
            measures, ids = _round(pair, work, i, who.seed, questions)
            if i >= who.n_warmups:
                digest.update(json.dumps(ids).encode())
                for name, one in measures.items():
                    found[name].append(one)
            on_note(f"round {i - who.n_warmups + 1} of {who.n_rounds}" if i >= who.n_warmups else "warming up")
        after = pair.counts()
        config = {
            "work": {**asdict(work), "n_warmups": who.n_warmups, "n_rounds": who.n_rounds, "seed": who.seed},
            "engine": dict(pair.config),
        }
    outputs = {"digest": digest.hexdigest()[:16], "n_requests": who.n_rounds * max(work.batch_size, 1)}
    contestants = {
        name: Contestant(
            pair.versions,
            {},
            {measure: spread([one[measure] for one in rounds]) for measure in rounds[0]},
            {**outputs, **(_accepted(before, after) if name == OURS else {"same_as": OURS})},
        )
        for name, rounds in found.items()
    }
    return make_row(told, config, contestants, {}, state)


def _accepted(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return what became of drafts between two looks."""
    found: dict[str, Any] = {name: after[name] - before.get(name, 0) for name in _COUNTS}
    first = before.get("n_accepted_by_position", [0] * len(after["n_accepted_by_position"]))
    by_position = [b - a for a, b in zip(first, after["n_accepted_by_position"], strict=True)]
    while by_position and by_position[-1] == 0:
        by_position.pop()
    found["accepted_by_position_frac"] = [round(n / max(found["n_drafts"], 1), 4) for n in by_position]
    return found


def _questions(work: SpeculativeWork, n_needed: int) -> tuple[str, ...]:
    """Read the file of questions, if there is one: enough for all rounds, as none is asked twice."""
    if not work.questions:
        return ()
    found = texts.read_questions(Path(work.questions))
    if len(found) < n_needed:
        raise ConfigError(
            f"bench latency: questions: {work.questions} has {len(found)}; all rounds together ask {n_needed}; "
            "lower --num-iters, or give more"
        )
    return found


def _requests(pair: Pair, work: SpeculativeWork, numbers: Sequence[int], questions: Sequence[str]) -> list[Request]:
    asked = [questions[i % len(questions)] if questions else texts.question(work.text, i) for i in numbers]
    return [Request(tuple(pair.ask(one)), work.output_len, may_end=not work.ignore_eos) for one in asked]


def _round(
    pair: Pair, work: SpeculativeWork, i: int, seed: int, questions: Sequence[str]
) -> tuple[dict[str, dict[str, float]], list[tuple[int, ...]]]:
    """Let both answer; return their measures, and the tokens."""
    n = work.n_behind or work.batch_size
    requests = _requests(pair, work, range(seed + i * n, seed + (i + 1) * n), questions)
    late = random_requests(1, input_len=work.input_len, output_len=1, vocab_size=pair.vocab_size, seed=seed + i)[0]
    measures: dict[str, dict[str, float]] = {}
    runs: dict[str, Run] = {}
    for name in (OURS, PLAIN) if i % 2 else (PLAIN, OURS):
        speculates = name == OURS
        counted = pair.counts()
        if work.n_behind:
            first_s, runs[name] = pair.first_token_s(requests, late, speculates=speculates)
            measures[name] = {"first_token_s": first_s}
        else:
            runs[name] = pair.generate(requests, speculates=speculates)
            measures[name] = decode_measures(runs[name])
        fault = fault_of(runs[name], requests)
        if fault:
            raise RequestFailed(f"bench latency: {name}: {fault}; report this")
        if speculates:
            now = pair.counts()
            n_drafts, n_accepted = (now[c] - counted[c] for c in ("n_drafts", "n_accepted_tokens"))
            n_tokens = sum(map(len, runs[name].token_ids))
            # Each draft that came is a step less.
            measures[name]["tokens_per_step"] = n_tokens / max(n_tokens - n_accepted, 1)
            measures[name]["drafts"] = float(n_drafts)
            measures[name]["draft_s"] = now["drafter_s"] - counted["drafter_s"]
    if runs[OURS].token_ids != runs[PLAIN].token_ids:
        raise RequestFailed(f"bench latency: round {i}: speculation changed an answer; report this")
    if work.n_behind:
        measures[OURS]["first_token_ratio"] = measures[OURS]["first_token_s"] / measures[PLAIN]["first_token_s"]
    else:
        measures[OURS]["speedup"] = measures[OURS]["stream_tok_s"] / measures[PLAIN]["stream_tok_s"]
    return measures, list(runs[OURS].token_ids)


def decode_measures(run: Run) -> dict[str, float]:
    """Return the measures of a run; see the module's docstring.

    Raises: RequestFailed: it has no times.
    """
    if run.first_token_s is None or run.decode_s is None:
        raise RequestFailed("bench latency: no time of the first token, or of the last; report this")
    rates = [(len(ids) - 1) / took_s for ids, took_s in zip(run.token_ids, run.decode_s, strict=True)]
    n_after = sum(len(ids) - 1 for ids in run.token_ids)
    return {
        "latency_s": run.elapsed_s,
        "first_token_s": statistics.fmean(run.first_token_s),
        "decode_tok_s": n_after / (run.elapsed_s - max(run.first_token_s)),
        "stream_tok_s": sum(rates),
        "slowest_tok_s": min(rates),
    }
