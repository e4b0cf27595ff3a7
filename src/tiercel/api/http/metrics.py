"""Metrics in Prometheus' text form, under vLLM's names and buckets, so that dashboards and autoscalers go on working.

Knows what the engine counts (`engine.stats`) and nothing of how. Gauges and totals are read from the engine's snapshot
when somebody asks; distributions are counted as steps end (`on_step`, on the engine's thread) and as requests end.
Every series is there from the start, at zero, so that rates are right. `_lock` guards all that is counted here.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tiercel.api.http.tier_metrics import tier_families
from tiercel.engine.stats import SpeculationCounts

if TYPE_CHECKING:
    from tiercel.api.http.facade import EngineFacade
    from tiercel.engine.stats import SequenceStats, StepStats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX: Final = "vllm:"
FINISH_REASONS: Final = ("stop", "length", "abort", "error", "repetition")
_SOURCES: Final = ("local_compute", "local_cache_hit", "external_kv_transfer")
_SLEEP_STATES: Final = ("awake", "weights_offloaded", "discard_all")
# Dashboards and autoscalers read these from every server. What they count does not happen in this one.
_ALWAYS_ZERO: Final = (
    ("external_prefix_cache_queries", "Prompt tokens looked up in a cache outside the engine"),
    ("external_prefix_cache_hits", "Prompt tokens found in a cache outside the engine"),
    ("mm_cache_queries", "Media items looked up among the processed"),
    ("mm_cache_hits", "Media items found among the processed"),
)

_FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_N_OUTPUTS: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
_STEP_TOKENS: Final = (1.0, *(float(8 << i) for i in range(12)))
_HTTP_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Distribution:
    """Counts of values by bucket. Its owner's lock guards it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value in the first bucket whose bound it does not exceed."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Give (bound, values up to it), the last without a bound."""
        n, done = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            n += count
            done.append((bound, float(n)))
        return done


class Metrics(Collector):
    """All metrics of one server."""

    def __init__(self, engine: "EngineFacade", model_name: str) -> None:
        self._engine = engine
        self._labels = [model_name, "0"]
        self._started_s = time.time()
        self._lock = threading.Lock()
        lengths = _one_two_five(engine.max_model_len)
        bounds = {
            "time_to_first_token_seconds": _FIRST_TOKEN_S,
            "inter_token_latency_seconds": _TOKEN_S,
            "request_time_per_output_token_seconds": _TOKEN_S,
            "e2e_request_latency_seconds": _REQUEST_S,
            "request_queue_time_seconds": _REQUEST_S,
            "request_inference_time_seconds": _REQUEST_S,
            "request_prefill_time_seconds": _REQUEST_S,
            "request_decode_time_seconds": _REQUEST_S,
            "request_prompt_tokens": lengths,
            "request_prefill_kv_computed_tokens": lengths,
            "request_generation_tokens": lengths,
            "request_params_max_tokens": lengths,
            "request_max_num_generation_tokens": lengths,
            "request_params_n": _N_OUTPUTS,
            "iteration_tokens_total": _STEP_TOKENS,
        }
        self._distributions = {name: Distribution(limits) for name, limits in bounds.items()}
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._n_cached_tokens = 0
        self._n_computed_tokens = 0
        self._n_loaded_tokens = 0
        self._http: dict[tuple[str, str, str], int] = {}
        self._http_s: dict[tuple[str, str], Distribution] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def text(self) -> bytes:
        """Give everything, as a scraper reads it."""
        return generate_latest(self._registry)

    def on_step(self, stats: "StepStats") -> None:
        """Take note of a step; on the engine's thread, which it does not hold up."""
        with self._lock:
            of = self._distributions
            if stats.n_tokens:
                of["iteration_tokens_total"].add(stats.n_tokens)
            for seconds in stats.time_to_first_token_s:
                of["time_to_first_token_seconds"].add(seconds)
            for seconds in stats.inter_token_s:
                of["inter_token_latency_seconds"].add(seconds)
            for one in stats.finished:
                self._note_sequence(one)

    def note_request(self, n_outputs: int, n_tokens_most: int) -> None:
        """Take note of a request that has ended: its outputs, and the tokens of the longest."""
        with self._lock:
            self._distributions["request_params_n"].add(n_outputs)
            self._distributions["request_max_num_generation_tokens"].add(n_tokens_most)

    def note_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Take note of an answer. `handler` is the route as it is declared, so that there are few."""
        with self._lock:
            key = (handler, method, f"{status // 100}xx")
            self._http[key] = self._http.get(key, 0) + 1
            self._http_s.setdefault((handler, method), Distribution(_HTTP_S)).add(seconds)

    def collect(self) -> Iterator[Metric]:
        """Give every family."""
        with self._lock:
            families = [*self._gauges(), *self._counters(), *self._histograms(), *self._http_families()]
            families += tier_families(self._engine.client.snapshot.tiers, self._labels)
        yield from families

    def _note_sequence(self, one: "SequenceStats") -> None:
        of = self._distributions
        self._finished[one.finish_reason] += 1
        self._n_cached_tokens += one.n_cached_tokens
        self._n_loaded_tokens += one.n_loaded_tokens
        if one.prefill_s is not None:
            n_computed = max(0, one.n_prompt_tokens - one.n_cached_tokens)
            self._n_computed_tokens += n_computed
            of["request_prefill_kv_computed_tokens"].add(n_computed)
        of["e2e_request_latency_seconds"].add(one.e2e_s)
        of["request_prompt_tokens"].add(one.n_prompt_tokens)
        of["request_generation_tokens"].add(one.n_output_tokens)
        if one.max_tokens is not None:
            of["request_params_max_tokens"].add(one.max_tokens)
        if one.queue_s is not None:
            of["request_queue_time_seconds"].add(one.queue_s)
        if one.prefill_s is None or one.decode_s is None:
            return
        of["request_prefill_time_seconds"].add(one.prefill_s)
        of["request_decode_time_seconds"].add(one.decode_s)
        of["request_inference_time_seconds"].add(one.prefill_s + one.decode_s)
        if one.n_output_tokens > 1:
            of["request_time_per_output_token_seconds"].add(one.decode_s / (one.n_output_tokens - 1))

    def _gauges(self) -> Iterator[Metric]:
        now = self._engine.client.snapshot
        yield self._gauge("num_requests_running", "Sequences in the batch", now.n_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait to be computed", now.n_waiting)
        by_reason = (("capacity", now.n_waiting), ("deferred", 0))
        yield self._by("reason", GaugeMetricFamily, "num_requests_waiting_by_reason", "Why they wait", by_reason)
        yield self._gauge("kv_cache_usage_perc", "Pages in use, 1 is all", now.kv_usage_frac)
        is_awake = ((state, float(state == "awake")) for state in _SLEEP_STATES)
        yield self._by("sleep_state", GaugeMetricFamily, "engine_sleep_state", "1 at the state it is in", is_awake)
        # Its value is the time of the last change, as vLLM's; there are no adapters, so nothing ever changed.
        adapters = {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}
        yield self._info("lora_requests_info", "Adapters in use", adapters, value=self._started_s)
        pages = (
            ("all", now.n_pages),
            ("used", now.n_pages_used),
            ("cached", now.n_pages_cached),
            ("pinned", now.n_pages_pinned),
        )
        yield self._own_by(GaugeMetricFamily, "kv_pages", "Pages by state", pages)
        yield self._own_by(
            GaugeMetricFamily,
            "state_snapshots",
            "Places for recurrent states by state",
            (("all", now.n_snapshots), ("kept", now.n_snapshots_kept), ("reserved", now.n_snapshots_reserved)),
        )
        drafts = now.speculation or SpeculationCounts()
        text = "Draft rows that were chosen for the last step that had any"
        yield self._own_by(GaugeMetricFamily, "spec_decode_budget", text, (("last", drafts.n_chosen_rows),))
        text = "Whether the next step may have drafts"
        yield self._own_by(GaugeMetricFamily, "spec_decode_active", text, (("now", drafts.is_drafting),))
        facts = {
            "block_size": str(now.page_size_tokens),
            "num_gpu_blocks": str(now.n_pages),
            **self._engine.cache_facts,
        }
        yield self._info("cache_config_info", "The page pool", facts, value=1)

    def _counters(self) -> Iterator[Metric]:
        now = self._engine.client.snapshot
        drafts = now.speculation or SpeculationCounts()
        for name, text, value in (
            ("spec_decode_num_drafts", "Times tokens of a sequence were drafted", drafts.n_drafts),
            ("spec_decode_num_draft_tokens", "Tokens drafted", drafts.n_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted", drafts.n_accepted_tokens),
            ("num_preemptions", "Sequences put back to wait", now.n_total_preemptions),
            ("prompt_tokens", "Prompt tokens taken in", now.n_total_prompt_tokens),
            ("generation_tokens", "Tokens generated", now.n_total_generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up among the cached", now.n_total_prefix_queries_tokens),
            ("prefix_cache_hits", "Prompt tokens found among the cached", now.n_total_prefix_hits_tokens),
            ("prompt_tokens_cached", "Prompt tokens of ended sequences that were cached", self._n_cached_tokens),
        ):
            family = CounterMetricFamily(f"{_PREFIX}{name}", text, labels=["model_name", "engine"])
            family.add_metric(self._labels, value)
            yield family
        positions = ((str(i), n) for i, n in enumerate(drafts.n_accepted_by_position))
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by their place in a draft"
        yield self._by("position", CounterMetricFamily, name, text, positions)
        text = "Seconds spent on guessing tokens, and on computing steps that had drafts"
        seconds = (("draft", drafts.drafter_s), ("verify", drafts.verify_s))
        yield self._own_by(CounterMetricFamily, "spec_decode_seconds", text, seconds, label="part")
        text = "Steps that had drafts"
        steps = (("any", drafts.n_verify_steps),)
        yield self._own_by(CounterMetricFamily, "spec_decode_steps", text, steps, label="kind")
        text = "Times drafting stopped for a while, as it brought less than it took"
        offs = (("load", drafts.n_switched_off),)
        yield self._own_by(CounterMetricFamily, "spec_decode_switched_off", text, offs, label="kind")
        text = "Times a request had drafts for a step, none of which was worth computing"
        passed = (("request", drafts.n_passed_over),)
        yield self._own_by(CounterMetricFamily, "spec_decode_passed_over", text, passed, label="kind")
        text = "Drafters that failed, or proposed what is no token; the requests went on without"
        yield self._own_by(CounterMetricFamily, "drafter_failures", text, (("any", drafts.n_failures),), label="kind")
        for name, text in _ALWAYS_ZERO:
            family = CounterMetricFamily(f"{_PREFIX}{name}", text, labels=["model_name", "engine"])
            family.add_metric(self._labels, 0)
            yield family
        events = (
            ("saved", now.n_total_snapshots_saved),
            ("hit", now.n_total_snapshots_hit),
            ("evicted", now.n_total_snapshots_evicted),
        )
        text = "Recurrent states that were saved, found and used, or gave way to others"
        yield self._own_by(CounterMetricFamily, "state_snapshot_events", text, events, label="event")
        n_loaded = self._n_loaded_tokens
        sources = zip(_SOURCES, (self._n_computed_tokens, self._n_cached_tokens - n_loaded, n_loaded), strict=True)
        text = "Prompt tokens of ended sequences, by where their keys and values came from"
        yield self._by("source", CounterMetricFamily, "prompt_tokens_by_source", text, sources)
        yield self._by(
            "finished_reason", CounterMetricFamily, "request_success", "Sequences ended", self._finished.items()
        )

    def _histograms(self) -> Iterator[Metric]:
        for name, one in self._distributions.items():
            family = HistogramMetricFamily(f"{_PREFIX}{name}", name.replace("_", " "), labels=["model_name", "engine"])
            family.add_metric(self._labels, one.buckets(), one.total)
            yield family

    def _http_families(self) -> Iterator[Metric]:
        counts = CounterMetricFamily("http_requests", "Answers", labels=["handler", "method", "status"])
        for key, n in self._http.items():
            counts.add_metric(key, n)
        yield counts
        times = HistogramMetricFamily(
            "http_request_duration_seconds", "Time to the end of an answer", labels=["handler", "method"]
        )
        for (handler, method), one in self._http_s.items():
            times.add_metric([handler, method], one.buckets(), one.total)
        yield times

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=["model_name", "engine"])
        family.add_metric(self._labels, value)
        return family

    def _info(self, name: str, text: str, facts: Mapping[str, str], *, value: float) -> Metric:
        family = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=["model_name", "engine", *facts])
        family.add_metric([*self._labels, *facts.values()], value)
        return family

    def _own_by(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        values: Iterable[tuple[str, float]],
        *,
        label: str = "state",
    ) -> Metric:
        family = kind(f"tiercel:{name}", text, labels=["model_name", "engine", label])
        for value, n in values:
            family.add_metric([*self._labels, value], n)
        return family

    def _by(
        self,
        label: str,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        values: Iterable[tuple[str, float]],
    ) -> Metric:
        family = kind(f"{_PREFIX}{name}", text, labels=["model_name", "engine", label])
        for key, value in values:
            family.add_metric([*self._labels, key], value)
        return family


def _one_two_five(most: int) -> list[float]:
    """Give 1, 2, 5, 10, 20, 50, ... up to `most`."""
    bounds, power = [], 1
    while power <= most:
        bounds += [float(digit * power) for digit in (1, 2, 5) if digit * power <= most]
        power *= 10
    return bounds
