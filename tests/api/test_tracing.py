"""Spans: one a request, under the caller's trace, with vLLM's attributes; and what happens without a collector."""

import logging
import sys
import threading

import pytest
from kit import GatedRunner, Rig, wait_until
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tiercel.api.http.tracing import Tracer, make_tracer
from tiercel.base.errors import ConfigError

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LATENCIES = ("time_in_queue", "time_to_first_token", "e2e")
LATENCIES += tuple(f"time_in_model_{part}" for part in ("prefill", "decode", "inference"))


@pytest.fixture
def spans():
    return InMemorySpanExporter()


@pytest.fixture
def traced(make_rig, spans):
    rig = make_rig()
    rig.service.tracer = Tracer(spans, "tiny")
    return rig


def finished(rig, spans):
    rig.service.tracer._provider.force_flush()
    return spans.get_finished_spans()


def test_a_request_is_one_server_span_with_its_numbers(traced, spans):
    traced.complete(prompt="hello", max_tokens=8, n=2, temperature=0.5, top_p=0.9, request_id="mine")
    (span,) = finished(traced, spans)
    assert (span.name, span.kind.name) == ("llm_request", "SERVER")
    of = dict(span.attributes)
    assert of["gen_ai.response.model"] == "tiny"
    assert of["gen_ai.usage.prompt_tokens"] == 5
    assert of["gen_ai.usage.completion_tokens"] == 16
    assert of["gen_ai.request.n"] == 2
    assert of["gen_ai.request.temperature"] == 0.5
    assert of["gen_ai.request.top_p"] == 0.9
    assert of["gen_ai.request.max_tokens"] == 8
    times = [of[f"gen_ai.latency.{name}"] for name in LATENCIES]
    assert all(one >= 0 for one in times)
    assert of["gen_ai.latency.e2e"] == pytest.approx(
        of["gen_ai.latency.time_in_queue"] + of["gen_ai.latency.time_in_model_inference"]
    )
    assert span.start_time <= span.end_time


def test_a_span_is_a_child_of_the_callers(traced, spans):
    body = {"prompt": "hello", "max_tokens": 2, "ignore_eos": True}
    traced.post("/v1/completions", body, headers={"traceparent": PARENT})
    (span,) = finished(traced, spans)
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]


@pytest.mark.parametrize("header", ["", "00-zz-yy-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 4000])
def test_a_broken_parent_starts_a_trace_of_its_own(traced, spans, header):
    body = {"prompt": "hello", "max_tokens": 2, "ignore_eos": True}
    traced.post("/v1/completions", body, headers={"traceparent": header})
    (span,) = finished(traced, spans)
    assert span.parent is None


def test_a_stream_is_traced_to_its_end(traced, spans):
    traced.stream("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=6)
    (span,) = finished(traced, spans)
    assert span.attributes["gen_ai.usage.completion_tokens"] == 6


def test_a_refused_request_is_no_span(traced, spans):
    traced.refused("/v1/completions", {"prompt": "hello", "n": 0})
    assert finished(traced, spans) == ()


def test_a_collector_that_is_away_costs_a_request_nothing(make_rig):
    rig = make_rig()
    rig.service.tracer = make_tracer("http://127.0.0.1:9/v1/traces", "tiny")
    try:
        assert rig.complete()["usage"]["completion_tokens"] == 8
    finally:
        # It gives up at once: else it would go on trying, with a thread and a socket, beside later tests.
        (processor,) = rig.service.tracer._provider._active_span_processor._span_processors
        processor.span_exporter.shutdown()


def test_without_the_exporter_the_endpoint_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"tiercel\[otel\]"):
        make_tracer("http://127.0.0.1:9/v1/traces", "tiny")


def test_an_unknown_protocol_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(ConfigError, match="http/protobuf or grpc"):
        make_tracer("http://127.0.0.1:9/v1/traces", "tiny")


def test_traces_that_nobody_collects_are_told_once(make_rig, caplog):
    rig = make_rig()
    body = {"prompt": "hello", "max_tokens": 1, "ignore_eos": True}
    with caplog.at_level(logging.WARNING, "tiercel.api.http.tracing"):
        for _ in range(3):
            rig.post("/v1/completions", body, headers={"traceparent": PARENT})
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_aborted_request_tells_what_there_was(make_rig, spans):
    rig: Rig = make_rig(runner=GatedRunner)
    rig.service.tracer = Tracer(spans, "tiny")
    rig.runner.let(1)

    def end():
        wait_until(lambda: rig.core.snapshot.n_total_generation_tokens == 1)
        rig.service.abort_all()
        rig.runner.open()

    ender = threading.Thread(target=end)
    ender.start()
    answer = rig.complete(max_tokens=50)
    ender.join()
    assert answer["choices"][0]["finish_reason"] == "abort"
    (span,) = finished(rig, spans)
    assert 1 <= span.attributes["gen_ai.usage.completion_tokens"] < 50
