"""/metrics: the names, labels and numbers that dashboards read; and how the server says it is."""

import pytest
from kit import wait_until
from prometheus_client.parser import text_string_to_metric_families

from tiercel import __version__
from tiercel.api.http.metrics import Distribution, _one_two_five

HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_params_max_tokens", "request_max_num_generation_tokens"),
    *("request_params_n", "iteration_tokens_total", "request_prefill_kv_computed_tokens"),
)
SINGLE = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
    *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("prompt_tokens_cached_total", "external_prefix_cache_queries_total", "external_prefix_cache_hits_total"),
    *("mm_cache_queries_total", "mm_cache_hits_total", "spec_decode_num_drafts_total"),
    *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
)


def scrape(rig):
    response = rig.ask("GET", "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            samples[(sample.name, *sorted(sample.labels.items()))] = sample.value
    return samples


def value(samples, name, **labels):
    labels = {"model_name": "tiny", "engine": "0"} | labels
    return samples[(f"vllm:{name}", *sorted(labels.items()))]


def test_every_series_is_there_at_zero_before_the_first_request(make_rig):
    samples = scrape(make_rig())
    for name in SINGLE:
        assert value(samples, name) == 0
    for name in HISTOGRAMS:
        assert value(samples, f"{name}_count") == 0
        assert value(samples, f"{name}_sum") == 0
        assert value(samples, f"{name}_bucket", le="+Inf") == 0
    for reason in ("stop", "length", "abort", "error", "repetition"):
        assert value(samples, "request_success_total", finished_reason=reason) == 0
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
        assert value(samples, "prompt_tokens_by_source_total", source=source) == 0
    for reason in ("capacity", "deferred"):
        assert value(samples, "num_requests_waiting_by_reason", reason=reason) == 0
    assert value(samples, "engine_sleep_state", sleep_state="awake") == 1
    assert value(samples, "engine_sleep_state", sleep_state="discard_all") == 0
    facts = {"block_size": "4", "num_gpu_blocks": "512", "cache_dtype": "float16"}
    assert value(samples, "cache_config_info", **facts) == 1
    assert any(key[0] == "process_cpu_seconds_total" for key in samples)


def test_requests_move_their_numbers(make_rig):
    rig = make_rig()
    rig.complete(prompt="hello" * 4, n=2)
    rig.complete(prompt="hello" * 4)
    # The engine counts a step after it has told its tokens.
    wait_until(lambda: value(scrape(rig), "request_success_total", finished_reason="length") == 3)
    samples = scrape(rig)
    assert value(samples, "prompt_tokens_total") == 60
    assert value(samples, "generation_tokens_total") == 24
    assert value(samples, "request_success_total", finished_reason="length") == 3
    assert value(samples, "request_prompt_tokens_count") == 3
    assert value(samples, "request_generation_tokens_sum") == 24
    assert value(samples, "time_to_first_token_seconds_count") == 3
    assert value(samples, "inter_token_latency_seconds_count") == 21
    assert value(samples, "e2e_request_latency_seconds_count") == 3
    assert value(samples, "request_params_n_sum") == 3
    assert value(samples, "request_max_num_generation_tokens_sum") == 16
    assert value(samples, "iteration_tokens_total_sum") == rig.core.snapshot.n_total_computed_tokens
    assert value(samples, "prefix_cache_hits_total") > 0
    assert samples[("http_requests_total", ("handler", "/v1/completions"), ("method", "POST"), ("status", "2xx"))] == 2
    rig.assert_idle()
    assert value(scrape(rig), "kv_cache_usage_perc") == 0


def test_a_client_cannot_make_up_series(make_rig):
    rig = make_rig()
    for i in range(3):
        rig.ask("GET", f"/made/up/{i}")
        rig.ask(f"MADE{i}", "/v1/models")
    samples = scrape(rig)
    handlers = {dict(key[1:])["handler"] for key in samples if key[0] == "http_requests_total"}
    methods = {dict(key[1:])["method"] for key in samples if key[0] == "http_requests_total"}
    assert handlers == {"none"}
    assert methods == {"GET", "other"}


def test_a_scraper_is_not_redirected(rig):
    assert rig.ask("GET", "/metrics/").status_code == 200


def test_the_server_says_how_it_is(rig):
    assert rig.ask("GET", "/health").content == b""
    assert [rig.ask(method, "/ping").status_code for method in ("GET", "POST")] == [200, 200]
    assert rig.ask("GET", "/ready").json() == {"status": "ready"}
    assert rig.ask("GET", "/version").json() == {"version": __version__}
    assert rig.ask("GET", "/load").json() == {"server_load": 0}


def test_a_draining_server_is_alive_and_not_ready(make_rig):
    rig = make_rig()
    rig.service.begin_drain()
    assert rig.ask("GET", "/health").status_code == 200
    assert rig.ask("GET", "/ready").status_code == 503
    response = rig.ask("POST", "/v1/completions", json={"prompt": "x"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(("most", "bounds"), [(1, [1]), (7, [1, 2, 5]), (256, [1, 2, 5, 10, 20, 50, 100, 200])])
def test_buckets_of_lengths_go_up_to_the_context(most, bounds):
    assert _one_two_five(most) == bounds


def test_a_value_on_a_bound_is_in_its_bucket():
    one = Distribution((1.0, 2.0))
    for number in (0.5, 1.0, 1.5, 2.0, 3.0):
        one.add(number)
    assert one.buckets() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert one.total == 8.0
