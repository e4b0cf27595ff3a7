"""`bench serve`: load on any OpenAI-compatible server, ours or another's, and what its clients felt.

Every request ends as done or as failed by kind (`http_client.FAILURES`). Names and meanings of the result are vLLM's:
TTFT, first piece of content after sending; ITL, gaps between pieces; TPOT, (E2EL - TTFT) / (output tokens - 1), for
more than one; E2EL, all of it. Output tokens are the server's own count if it gives one, else its pieces.

What the server's metrics say of its prefix cache and its tiers meanwhile is told beside them (`server_cache`): two
runs, with tiers and without, say whether they pay here (`bench compare`).
"""

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tiercel.base.errors import ConfigError, RequestFailed
from tiercel.bench.http_client import ExchangeFailed, Server, events, exchange
from tiercel.bench.rows import percentile
from tiercel.bench.server_cache import read_counts, told_between
from tiercel.bench.traffic import Query, Traffic, queries, send_times

BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
METRICS = ("ttft", "tpot", "itl", "e2el")
_METRICS_S = 5.0  # how long a server may take to show its metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests are written. `goodput`: metric -> the most milliseconds a good request may take."""

    backend: str = "openai"
    endpoint: str | None = None
    model: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout_s: float = 60.0
    n_warmups: int = 0
    goodput: Mapping[str, float] = field(default_factory=dict)
    percentiles: Sequence[float] = (99.0,)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"bench serve: backend: got {self.backend!r}; need one of {', '.join(BACKENDS)}")
        if any(name not in METRICS for name in self.goodput):
            raise ConfigError(f"bench serve: goodput: got {', '.join(self.goodput)}; known are {', '.join(METRICS)}")
        if any(not 0 <= percent <= 100 for percent in self.percentiles):
            raise ConfigError("bench serve: metric-percentiles: need numbers from 0 to 100")
        if self.timeout_s <= 0:
            raise ConfigError(f"bench serve: timeout: got {self.timeout_s:g} s; need more than 0")


@dataclass(slots=True)
class Answer:
    """What became of one request. Times are in seconds; `failure` is a kind, `error` what happened."""

    sent_s: float
    ttft_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    e2el_s: float = 0.0
    text: str = ""
    n_input: int = 0
    n_output: int = 0
    failure: str | None = None
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each output token after the first."""
        if self.ttft_s is None or self.n_output < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.n_output - 1)


def bench(
    server: Server, load: Load, traffic: Traffic, *, on_note: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Send the traffic and return the result; the requests' own numbers are in it too.

    Raises: RequestFailed: the server does not say which models it has, and none was named.
    """
    return asyncio.run(_bench(server, load, traffic, on_note))


async def _bench(server: Server, load: Load, traffic: Traffic, on_note: Callable[[str], None]) -> dict[str, Any]:
    model = load.model or await _first_model(server, load.timeout_s)
    asked = queries(traffic)
    for i in range(load.n_warmups):
        on_note(f"warm-up {i + 1} of {load.n_warmups}")
        await send(server, load, model, asked[i % len(asked)])
    gate = asyncio.Semaphore(traffic.max_concurrency or len(asked))
    counts = await read_counts(server, min(load.timeout_s, _METRICS_S))
    start_s = time.perf_counter()

    async def one(query: Query, at_s: float) -> Answer:
        await asyncio.sleep(max(0.0, start_s + at_s - time.perf_counter()))
        async with gate:
            return await send(server, load, model, query)

    on_note(f"{len(asked)} requests to {model}")
    answers = await asyncio.gather(*map(one, asked, send_times(traffic, len(asked))))
    duration_s = time.perf_counter() - start_s
    told = summarise(answers, duration_s, load) | told_between(
        counts, await read_counts(server, min(load.timeout_s, _METRICS_S))
    )
    prompts = hashlib.sha256(json.dumps([(q.prompt, q.output_len) for q in asked]).encode()).hexdigest()[:16]
    told["config"] = {
        "model": model,
        "prompts_digest": prompts,
        "traffic": {**asdict(traffic), "dataset_path": traffic.dataset_path and traffic.dataset_path.name},
        "load": asdict(load),
    }
    return told | _details(answers, start_s)


async def send(server: Server, load: Load, model: str, query: Query) -> Answer:
    """Send one request and read its answer to the end."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": query.output_len,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.backend == "openai-chat":
        body["messages"] = [{"role": "user", "content": query.prompt}]
    else:
        body["prompt"] = query.prompt
    path = load.endpoint or BACKENDS[load.backend]
    answer = Answer(time.perf_counter())
    try:
        pieces = exchange(server, "POST", path, json.dumps(body).encode(), timeout_s=load.timeout_s)
        async with contextlib.aclosing(pieces):
            await _read_answer(answer, pieces)
    except ExchangeFailed as failure:
        answer.failure, answer.error = failure.kind, str(failure)
    answer.e2el_s = answer.e2el_s or time.perf_counter() - answer.sent_s
    return answer


async def _read_answer(answer: Answer, pieces: Any) -> None:
    """Note an answer's pieces as they come.

    Raises: ExchangeFailed: they are no answer, or it has no token or no end.
    """
    last_s, n_pieces, is_ended = answer.sent_s, 0, False
    n_counted = None
    async with contextlib.aclosing(events(pieces)) as found:
        async for came_s, data in found:
            if data == "[DONE]":
                is_ended = True
                break
            text, has_end, usage = _read_event(data)
            is_ended = is_ended or has_end
            if usage is not None:
                answer.n_input, n_counted = usage
            if not text:
                continue
            if answer.ttft_s is None:
                answer.ttft_s = came_s - answer.sent_s
            else:
                answer.itl_s.append(came_s - last_s)
            last_s, n_pieces = came_s, n_pieces + 1
            answer.text += text
    if not is_ended:
        raise ExchangeFailed("died" if n_pieces else "garbage", "the stream ended without its end")
    answer.n_output = n_pieces if n_counted is None else n_counted
    answer.e2el_s = last_s - answer.sent_s
    if not n_pieces:
        answer.e2el_s = 0.0
        raise ExchangeFailed("short", "an answer without text")


def _read_event(data: str) -> tuple[str, bool, tuple[int, int] | None]:
    """Return an event's text, whether it ends its choice, and its usage (prompt tokens, output tokens)."""
    try:
        told = json.loads(data)
        if told.get("error"):
            raise ExchangeFailed("died", f"an error in the stream: {str(told['error'])[:200]}")
        usage = told.get("usage")
        counts = None if not usage else (int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
        if not told["choices"]:
            return "", False, counts
        choice = told["choices"][0]
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        if not isinstance(text, str):
            raise TypeError
        return text, choice.get("finish_reason") is not None, counts
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ExchangeFailed("garbage", f"an event that is no completion: {data[:80]!r}") from None


async def _first_model(server: Server, timeout_s: float) -> str:
    try:
        body = b"".join([piece async for _, piece in exchange(server, "GET", "/v1/models", timeout_s=timeout_s)])
        return str(json.loads(body)["data"][0]["id"])
    except ExchangeFailed as failure:
        raise RequestFailed(f"bench serve: /v1/models: {failure}; need a running server, or --model") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise RequestFailed("bench serve: /v1/models: garbage: no list of models; name one with --model") from None


def summarise(answers: Sequence[Answer], duration_s: float, load: Load) -> dict[str, Any]:
    """Return the numbers of the whole, under vLLM's names."""
    done = [one for one in answers if one.failure is None]
    n_in, n_out = sum(one.n_input for one in done), sum(one.n_output for one in done)
    failures: dict[str, int] = {}
    for one in answers:
        if one.failure is not None:
            failures[one.failure] = failures.get(one.failure, 0) + 1
    told: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "failures": failures,
        "total_input_tokens": n_in,
        "total_output_tokens": n_out,
        "request_throughput": len(done) / duration_s,
        "output_throughput": n_out / duration_s,
        "total_token_throughput": (n_in + n_out) / duration_s,
        "max_concurrent_requests": most_at_once([(one.sent_s, one.sent_s + one.e2el_s) for one in answers]),
    }
    if load.goodput:
        told["request_goodput"] = sum(is_good(one, load.goodput) for one in done) / duration_s
    for name in METRICS:
        values = values_ms(done, name)
        if not values:
            continue
        mean = sum(values) / len(values)
        told[f"mean_{name}_ms"] = mean
        told[f"median_{name}_ms"] = percentile(values, 50)
        told[f"std_{name}_ms"] = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
        for percent in load.percentiles:
            told[f"p{percent:g}_{name}_ms"] = percentile(values, percent)
    return told


def values_ms(done: Sequence[Answer], metric: str) -> list[float]:
    """Return a metric's value of each request, in milliseconds; of `itl`, of each gap."""
    if metric == "itl":
        return [1e3 * gap for one in done for gap in one.itl_s]
    take: dict[str, Callable[[Answer], float | None]] = {
        "ttft": lambda one: one.ttft_s,
        "tpot": lambda one: one.tpot_s,
        "e2el": lambda one: one.e2el_s,
    }
    return [1e3 * value for one in done if (value := take[metric](one)) is not None]


def is_good(one: Answer, goodput: Mapping[str, float]) -> bool:
    """Whether a request meets every bound; its inter-token latency is the mean of its gaps."""
    mean_itl = sum(one.itl_s) / len(one.itl_s) if one.itl_s else 0.0
    found = {"ttft": one.ttft_s, "tpot": one.tpot_s, "e2el": one.e2el_s, "itl": mean_itl}
    return all(1e3 * (found[name] or 0.0) <= bound for name, bound in goodput.items())


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """Return how many half-open spans overlap at most."""
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    now = most = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def _details(answers: Sequence[Answer], start_s: float) -> dict[str, Any]:
    return {
        "starts": [one.sent_s - start_s for one in answers],
        "input_lens": [one.n_input for one in answers],
        "output_lens": [one.n_output for one in answers],
        "ttfts": [one.ttft_s for one in answers],
        "tpots": [one.tpot_s for one in answers],
        "itls": [one.itl_s for one in answers],
        "e2els": [one.e2el_s for one in answers],
        "generated_texts": [one.text for one in answers],
        "errors": [one.error for one in answers],
    }


def describe(told: Mapping[str, Any]) -> str:
    """Return a result's numbers as lines."""
    lines = [f"{'completed':<28} {told['completed']}", f"{'failed':<28} {told['failed']}"]
    lines += [f"  {kind:<26} {n}" for kind, n in told["failures"].items()]
    for name, value in told.items():
        if type(value) in (int, float) and name not in ("completed", "failed"):
            lines.append(f"{name:<28} {value:,.4g}")
    first = next((error for error in told["errors"] if error), None)
    return "\n".join(lines if first is None else [*lines, f"first failure: {first}"])
