"""The queries of the boards and autoscalers people point at a vLLM server: each finds its series in our /metrics.

Written after what vLLM's official Grafana board, the Kubernetes inference gateway and common autoscalers ask for.
"""

import re

import promql_parser
import pytest
from kit import Rig, wait_until
from prometheus_client.parser import text_string_to_metric_families

MODEL = "tiny"
QUANTILES = (0.99, 0.95, 0.9, 0.5)


def _quantile(q, name):
    return f'histogram_quantile({q}, sum by(le) (rate(vllm:{name}_bucket{{model_name="{MODEL}"}}[5m])))'


def _mean(name):
    of = f'{{model_name="{MODEL}"}}[5m]'
    return f"rate(vllm:{name}_sum{of}) / rate(vllm:{name}_count{of})"


def _of(name, tail=""):
    return f'vllm:{name}{{model_name="{MODEL}"{tail}}}'


BOARD = (
    *(_quantile(q, "e2e_request_latency_seconds") for q in QUANTILES),
    *(_quantile(q, "time_to_first_token_seconds") for q in QUANTILES),
    *(_quantile(q, "inter_token_latency_seconds") for q in QUANTILES),
    *map(_mean, ("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds")),
    f"rate({_of('prompt_tokens_total')}[5m])",
    f"rate({_of('generation_tokens_total')}[5m])",
    f"sum(rate({_of('prompt_tokens_total')}[1m])) + sum(rate({_of('generation_tokens_total')}[1m]))",
    _of("num_requests_running"),
    _of("num_requests_waiting"),
    _of("kv_cache_usage_perc"),
    f"sum by(le) (increase({_of('request_prompt_tokens_bucket')}[5m]))",
    f"sum by(le) (increase({_of('request_generation_tokens_bucket')}[5m]))",
    f"sum by(finished_reason) (increase({_of('request_success_total')}[5m]))",
    *(f"rate({_of(f'request_{part}_time_seconds_sum')}[5m])" for part in ("queue", "prefill", "decode", "inference")),
    f"rate({_of('request_max_num_generation_tokens_sum')}[5m])",
    f"sum by(le) (increase({_of('request_params_max_tokens_bucket')}[5m]))",
    f"rate({_of('prefix_cache_hits_total')}[5m]) / rate({_of('prefix_cache_queries_total')}[5m])",
    f"rate({_of('external_prefix_cache_hits_total')}[5m]) / rate({_of('external_prefix_cache_queries_total')}[5m])",
    f"rate({_of('mm_cache_hits_total')}[5m])",
    f"increase({_of('num_preemptions_total')}[5m])",
    f"rate({_of('spec_decode_num_accepted_tokens_total')}[5m]) / rate({_of('spec_decode_num_draft_tokens_total')}[5m])",
    f"1 + rate({_of('spec_decode_num_accepted_tokens_total')}[5m]) / rate({_of('spec_decode_num_drafts_total')}[5m])",
    f"sum by(source) (rate({_of('prompt_tokens_by_source_total')}[5m]))",
    f"rate({_of('iteration_tokens_total_sum')}[5m])",
)
AUTOSCALERS = (
    _of("num_requests_waiting"),
    _of("num_requests_waiting_by_reason", ', reason="capacity"'),
    'max by(running_lora_adapters, waiting_lora_adapters, max_lora) (vllm:lora_requests_info{model_name=~".+"})',
    'vllm:cache_config_info{block_size!="", num_gpu_blocks!=""}',
    'vllm:engine_sleep_state{sleep_state="awake"} == 1',
    "histogram_quantile(0.9, sum by(le, model_name) (rate(vllm:request_time_per_output_token_seconds_bucket[2m])))",
    'sum(rate(http_requests_total{handler="/v1/completions", status="2xx"}[1m]))',
    'histogram_quantile(0.99, sum by(le) (rate(http_request_duration_seconds_bucket{method="POST"}[5m])))',
    "process_resident_memory_bytes",
)


def selectors(node):
    """Give every selector of a parsed query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        part = getattr(node, name, None)
        if part is not None:
            yield from selectors(part)
    for part in getattr(node, "args", None) or ():
        yield from selectors(part)


def matches(sample, selector):
    labels = sample.labels | {"__name__": sample.name}
    if selector.name and sample.name != selector.name:
        return False
    for one in selector.matchers.matchers:
        value = labels.get(one.name, "")
        is_met = {
            "MatchOp.Equal": value == one.value,
            "MatchOp.NotEqual": value != one.value,
            "MatchOp.Re": re.fullmatch(one.value, value) is not None,
        }[str(one.op)]
        if not is_met:
            return False
    return True


@pytest.fixture(scope="module")
def samples():
    rig = Rig()
    try:
        rig.complete(prompt="hello" * 4)
        wait_until(lambda: rig.core.snapshot.n_total_generation_tokens == 8 and rig.snapshot_is_idle)
        text = rig.ask("GET", "/metrics").text
    finally:
        rig.close()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


@pytest.mark.parametrize("query", [*BOARD, *AUTOSCALERS])
def test_a_dashboards_query_finds_its_series(samples, query):
    found = list(selectors(promql_parser.parse(query)))
    assert found, "the query selects nothing"
    for selector in found:
        assert any(matches(sample, selector) for sample in samples), f"{selector.name} is not in /metrics"


def test_a_query_for_a_series_that_is_not_there_finds_none(samples):
    (selector,) = selectors(promql_parser.parse('rate(vllm:made_up_total{model_name="tiny"}[5m])'))
    assert not any(matches(sample, selector) for sample in samples)


def test_a_bucket_query_finds_every_bucket(samples):
    (selector,) = selectors(promql_parser.parse(_quantile(0.5, "time_to_first_token_seconds")))
    bounds = {sample.labels["le"] for sample in samples if matches(sample, selector)}
    assert {"0.001", "0.1", "2560.0", "+Inf"} <= bounds
    assert len(bounds) == 23
