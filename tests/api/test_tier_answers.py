"""What answers and metrics tell of the tiers below the page pool."""

from types import SimpleNamespace

from kit import Rig
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from tiercel.api.http.answer import Tally
from tiercel.api.http.tier_metrics import tier_families
from tiercel.kv.tiers.interface import TierCounters, Usage
from tiercel.kv.tiers.page_tiers import TierSnapshot
from tiercel.kv.tiers.placed import TierTally
from tiercel.kv.tiers.policy import Rates


def output(n_cached, by_tier):
    return SimpleNamespace(num_cached_tokens=n_cached, cached_by_tier=by_tier, outputs=[])


def test_usage_splits_cached_tokens_by_where_they_were():
    tally = Tally(100)
    tally.add(0, output(48, {"1:disk": 32}), 1)
    tally.add(1, output(32, {"1:disk": 16, "2:Far": 16}), 1)
    details = tally.usage()["prompt_tokens_details"]
    assert details == {"cached_tokens": 80, "cached_tokens_by_tier": {"0:pool": 16, "1:disk": 48, "2:Far": 16}}


def test_usage_is_as_ever_without_tiers():
    tally = Tally(100)
    tally.add(0, output(48, None), 1)
    assert tally.usage()["prompt_tokens_details"] == {"cached_tokens": 48}


def test_each_tier_has_its_series_under_vllms_names():
    counters = TierCounters(n_queries=9, n_hits=7, read_bytes=70, n_late=2, n_invalid=1, write_s=1.5, n_stored=8)
    counters.n_lookups_waited, counters.lookup_wait_s, counters.written_bytes = 11, 0.25, 80
    tally = TierTally(n_loads=3, n_loads_whole=2, n_recomputed=4, n_pages_landed=6, loaded_bytes=60, saved_s=1.5)
    tally.n_loads_without_room = 12
    one = TierSnapshot("1:disk", Usage(5, 50, 500), counters, tally, Rates(1000.0, 1e9, 0.001), 13, 14, 0.25)
    registry = CollectorRegistry()

    class Found(Collector):
        def collect(self):
            return tier_families([one], ["model", "0"])

    registry.register(Found())
    text = generate_latest(registry).decode()
    labels = '{engine="0",model_name="model",tier="1:disk"}'
    for line in (
        f"vllm:kv_offload_tiering_chunk_queries_total{labels} 9.0",
        f"vllm:kv_offload_tiering_chunk_hits_total{labels} 7.0",
        f"vllm:kv_offload_tiering_read_bytes_total{labels} 70.0",
        f"vllm:kv_offload_tiering_promotion_job_failures_total{labels} 1.0",
        f"vllm:kv_offload_tiering_promotion_allocation_failures_total{labels} 12.0",
        f"vllm:kv_offload_tiering_active_promotion_jobs{labels} 13.0",
        f"vllm:kv_offload_tiering_active_cascade_jobs{labels} 14.0",
        f"vllm:kv_offload_tiering_lookup_async_delay_seconds_count{labels} 11.0",
        f"vllm:kv_offload_tiering_lookup_async_delay_seconds_sum{labels} 0.25",
        f"vllm:kv_offload_load_size_count{labels} 3.0",
        f"vllm:kv_offload_load_size_sum{labels} 60.0",
        f"vllm:kv_offload_store_size_count{labels} 8.0",
        f"vllm:kv_offload_store_size_sum{labels} 80.0",
        f"vllm:kv_offload_store_time_total{labels} 1.5",
        f"tiercel:kv_tier_used_bytes{labels} 50.0",
        f"tiercel:kv_tier_capacity_bytes{labels} 500.0",
        f"tiercel:kv_tier_deadlines_total{labels} 2.0",
        f"tiercel:kv_tier_invalid_total{labels} 1.0",
        f"tiercel:kv_tier_recomputed_total{labels} 4.0",
        f"tiercel:kv_tier_saved_seconds_total{labels} 1.5",
        f"tiercel:kv_tier_credit_seconds{labels} 0.25",
    ):
        assert line in text


def test_without_tiers_there_are_no_series():
    assert list(tier_families([], ["model", "0"])) == []


def test_a_response_may_say_what_tiers_do_for_it():
    """As a chat may: what is wrong is refused by the field's name."""
    rig = Rig()
    base = {"input": "hi", "max_output_tokens": 4}
    rig.post("/v1/responses", base | {"cache_hint": {"pin": True}, "kv_transfer_params": {"kv_load_tiers": []}})
    for field in ("cache_hint", "kv_transfer_params"):
        error = rig.post("/v1/responses", base | {field: {"colour": "red"}}, 400)["error"]
        assert error["param"] == field
        assert "colour" in error["message"]
    rig.close()
