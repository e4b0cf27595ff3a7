"""What a server's own metrics say of its caches over a run of `bench serve`: vLLM's names, ours where it has none.

A server that shows no metrics, or others, is none the worse: nothing is told of it.
"""

from collections.abc import Mapping

from tiercel.bench.http_client import ExchangeFailed, Server, exchange

_PREFIX = "vllm:prefix_cache_"
_TIER, _LOAD, _OWN = "vllm:kv_offload_tiering_", "vllm:kv_offload_load_", "tiercel:kv_tier_"

# Name of a sample, and its tier ("" for the page pool), to its sum over the other labels.
Counts = Mapping[tuple[str, str], float]


async def read_counts(server: Server, timeout_s: float) -> Counts:
    """Return the counters of the server's caches now; none where it tells none."""
    from prometheus_client.parser import text_string_to_metric_families

    counts: dict[tuple[str, str], float] = {}
    try:
        page = b"".join([piece async for _, piece in exchange(server, "GET", "/metrics", timeout_s=timeout_s)])
        for family in text_string_to_metric_families(page.decode()):
            if family.type != "counter" or not family.name.startswith((_PREFIX, _TIER, _LOAD, _OWN)):
                continue
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    key = sample.name.removesuffix("_total"), sample.labels.get("tier", "")
                    counts[key] = counts.get(key, 0.0) + sample.value
    except (ExchangeFailed, ValueError, KeyError):  # ValueError: not of the format, or not UTF-8
        return {}
    return counts


def told_between(before: Counts, after: Counts) -> dict[str, float]:
    """Return what the caches did meanwhile: rates from 0 to 1, times in milliseconds, counts.

    Of each tier: the part of the pages asked for that it had; loads, the mean time from asking to the last page, bytes
    a second meanwhile; hits that were computed, as that was faster; pages that a load did not bring, or brought late.
    """

    def grown(name: str, tier: str = "") -> float:
        return after.get((name, tier), 0.0) - before.get((name, tier), 0.0)

    told: dict[str, float] = {}
    if queries := grown(f"{_PREFIX}queries"):
        told["prefix_cache_hit_rate"] = grown(f"{_PREFIX}hits") / queries
    for tier in sorted({tier for _, tier in after if tier}):
        prefix = f"kv_tier_{tier}_"
        if queries := grown(f"{_TIER}chunk_queries", tier):
            told[f"{prefix}hit_rate"] = grown(f"{_TIER}chunk_hits", tier) / queries
        loads, load_s = grown(f"{_OWN}loads", tier), grown(f"{_LOAD}time", tier)
        told[f"{prefix}loads"] = loads
        if loads:
            told[f"{prefix}mean_load_ms"] = 1e3 * load_s / loads
        if load_s > 0:
            told[f"{prefix}load_bytes_per_s"] = grown(f"{_LOAD}bytes", tier) / load_s
        for name in ("recomputed", "pages_failed", "deadlines"):
            told[f"{prefix}{name}"] = grown(f"{_OWN}{name}", tier)
    return told
