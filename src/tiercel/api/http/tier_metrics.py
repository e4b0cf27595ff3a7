"""The metrics of the KV tiers, under vLLM's names where it has them; those it lacks begin with `tiercel:`.

A family is there only when the engine has tiers; each series has the tier's label, such as "1:disk".
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric

if TYPE_CHECKING:
    from tiercel.kv.tiers.page_tiers import TierSnapshot

_VLLM: Final = "vllm:kv_offload_tiering_"
_OURS: Final = "tiercel:kv_tier_"

# name, help, whether it only grows, value
_ROWS: "Final[tuple[tuple[str, str, bool, Callable[[TierSnapshot], float]], ...]]" = (
    (f"{_VLLM}chunk_queries", "Pages asked for", True, lambda t: t.counters.n_queries),
    (f"{_VLLM}chunk_hits", "Pages asked for that the tier has", True, lambda t: t.counters.n_hits),
    (f"{_VLLM}read_bytes", "Bytes read", True, lambda t: t.counters.read_bytes),
    (f"{_VLLM}read_time", "Seconds that threads read", True, lambda t: t.counters.read_s),
    (f"{_VLLM}write_bytes", "Bytes written", True, lambda t: t.counters.written_bytes),
    (f"{_VLLM}write_time", "Seconds that threads wrote", True, lambda t: t.counters.write_s),
    (
        f"{_VLLM}promotion_job_failures",
        "Loads of which not every page came",
        True,
        lambda t: t.tally.n_loads - t.tally.n_loads_whole,
    ),
    (f"{_VLLM}cascade_job_failures", "Pages that were not stored", True, lambda t: t.tally.n_stores_failed),
    ("vllm:kv_offload_load_bytes", "Bytes of pages that came", True, lambda t: t.tally.loaded_bytes),
    ("vllm:kv_offload_load_time", "Seconds from asking to the last page", True, lambda t: t.tally.load_s),
    ("vllm:kv_offload_store_bytes", "Bytes of pages stored", True, lambda t: t.tally.stored_bytes),
    ("vllm:kv_offload_store_time", "Seconds that threads wrote", True, lambda t: t.counters.write_s),
    (
        "vllm:kv_offload_stores_skipped",
        "Pages worth storing that a tier was too far behind for",
        True,
        lambda t: t.tally.n_stores_skipped,
    ),
    (
        f"{_VLLM}promotion_allocation_failures",
        "Loads not begun or given up, as the pool had no room",
        True,
        lambda t: t.tally.n_loads_without_room,
    ),
    (f"{_VLLM}active_promotion_jobs", "Loads under way", False, lambda t: t.n_active_loads),
    (f"{_VLLM}active_cascade_jobs", "Stores under way", False, lambda t: t.n_active_stores),
    (f"{_OURS}used_bytes", "Bytes held", False, lambda t: t.usage.used_bytes),
    (f"{_OURS}capacity_bytes", "Bytes that may be held", False, lambda t: t.usage.capacity_bytes),
    (f"{_OURS}objects", "Pages held", False, lambda t: t.usage.n_objects),
    (f"{_OURS}loads", "Loads begun", True, lambda t: t.tally.n_loads),
    (f"{_OURS}recomputed", "Hits that were computed, as that is faster", True, lambda t: t.tally.n_recomputed),
    (f"{_OURS}pages_landed", "Pages loaded into the pool", True, lambda t: t.tally.n_pages_landed),
    (f"{_OURS}pages_failed", "Pages that a load did not bring", True, lambda t: t.tally.n_pages_failed),
    (f"{_OURS}pages_unused", "Pages loaded and given up", True, lambda t: t.tally.n_pages_unused),
    (f"{_OURS}saved_seconds", "Seconds that loads took less than computing", True, lambda t: t.tally.saved_s),
    (f"{_OURS}store_seconds", "Seconds of work that stores took", True, lambda t: t.tally.store_s),
    (f"{_OURS}stored_early", "Pages to be stored at first sight", True, lambda t: t.tally.n_stores_early),
    (f"{_OURS}credit_seconds", "What storing at first sight may cost now", False, lambda t: t.credit_s),
    (f"{_OURS}deadlines", "Lookups and pages that came too late", True, lambda t: t.counters.n_late),
    (f"{_OURS}invalid", "Pages found damaged or foreign", True, lambda t: t.counters.n_invalid),
    (f"{_OURS}evicted", "Pages evicted", True, lambda t: t.counters.n_evicted),
    (f"{_OURS}refused", "Pages refused: the tier or its queue was full", True, lambda t: t.counters.n_refused),
    (f"{_OURS}degraded", "Times the tier stopped working for a while", True, lambda t: t.counters.n_degraded),
    (f"{_OURS}breaches", "Breaches of the contract by a plug-in", True, lambda t: t.counters.n_lies),
    (f"{_OURS}load_bytes_per_second", "Bytes a second that are expected", False, lambda t: t.rates.load_bytes_s),
    (f"{_OURS}prefill_tokens_per_second", "What loads compete with", False, lambda t: t.rates.prefill_tok_s),
)

# What vLLM tells by a histogram, of which this is the count and the sum: name, help, how often, how much
_SUMS: "Final[tuple[tuple[str, str, Callable[[TierSnapshot], int], Callable[[TierSnapshot], float]], ...]]" = (
    ("vllm:kv_offload_load_size", "Bytes of a load", lambda t: t.tally.n_loads, lambda t: t.tally.loaded_bytes),
    (
        "vllm:kv_offload_store_size",
        "Bytes of a store",
        lambda t: t.counters.n_stored,
        lambda t: t.counters.written_bytes,
    ),
    (
        f"{_VLLM}lookup_async_delay_seconds",
        "Seconds until a lookup was answered that could not be at once",
        lambda t: t.counters.n_lookups_waited,
        lambda t: t.counters.lookup_wait_s,
    ),
)


def tier_families(tiers: "Sequence[TierSnapshot]", labels: Sequence[str]) -> Iterator[Metric]:
    """Give every family. `labels` are the values of model_name and engine."""
    if not tiers:
        return
    for name, text, grows, value in _ROWS:
        kind = CounterMetricFamily if grows else GaugeMetricFamily
        family = kind(name, text, labels=["model_name", "engine", "tier"])
        for one in tiers:
            family.add_metric([*labels, one.label], value(one))
        yield family
    for name, text, count, total in _SUMS:
        summary = SummaryMetricFamily(name, text, labels=["model_name", "engine", "tier"])
        for one in tiers:
            summary.add_metric([*labels, one.label], count(one), total(one))
        yield summary
