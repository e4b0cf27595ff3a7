"""One OpenTelemetry span for each request that generates: who asked, what it took, and where the time went.

Off unless an endpoint is named. A span is made when the answer has ended, out of the engine's own times; its exporter
works on a thread of its own, so a collector that is away costs requests nothing. Attribute names are those of the
GenAI conventions and of vLLM. Owner: the server's event loop.

Source: W3C Trace Context; OpenTelemetry semantic conventions for GenAI.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from tiercel import __version__
from tiercel.base.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from starlette.types import Scope

    from tiercel.api.http.running import Running
    from tiercel.engine.outputs import RequestSummary

_log = logging.getLogger(__name__)

_TRACE_HEADERS: Final = (b"traceparent", b"tracestate")
_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_SPAN: Final = "llm_request"

# The trace of the request that this task answers.
_current: ContextVar["Trace | None"] = ContextVar("tiercel_trace", default=None)


class Trace:
    """What one HTTP request started in the engine."""

    def __init__(self) -> None:
        self.start_ns = time.time_ns()
        self.running: list[Running] = []


class Tracer:
    """Makes the spans of one server."""

    def __init__(self, exporter: "SpanExporter", model: str) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME") or "tiercel"
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tiercel", __version__)
        self._model = model

    @contextlib.contextmanager
    def request(self, scope: "Scope", request_id: str) -> Iterator[None]:
        """Collect what the request in this block starts; tell it as a span when the block is left."""
        trace = Trace()
        token = _current.set(trace)
        try:
            yield
        finally:
            _current.reset(token)
            if trace.running:
                self._tell(trace, scope, request_id)

    def close(self) -> None:
        """Send what is still held, and end the exporter's thread."""
        self._provider.shutdown()

    def _tell(self, trace: Trace, scope: "Scope", request_id: str) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE_HEADERS}
        span = self._tracer.start_span(
            _SPAN,
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            start_time=trace.start_ns,
        )
        summaries = [one for running in trace.running for one in running.summaries()]
        span.set_attributes(attributes(self._model, request_id, summaries))
        span.end()


def note_running(running: "Running") -> None:
    """Add what was started to the trace of the request that is being answered, if there is one."""
    trace = _current.get()
    if trace is not None:
        trace.running.append(running)


def take_over(running: "Running") -> None:
    """Take what was started out of the current trace: it goes on after the request, and who runs it tells of it."""
    trace = _current.get()
    if trace is not None and running in trace.running:
        trace.running.remove(running)


def make_tracer(endpoint: str, model: str) -> Tracer:
    """Make the tracer that sends to `endpoint`, an OTLP collector's URL.

    Raises:
        ConfigError: the exporter's packages are missing, or the protocol asked for is not one of ours.
    """
    protocol = os.environ.get(_PROTOCOL) or "http/protobuf"
    if protocol not in ("http/protobuf", "grpc"):
        raise ConfigError(f"environment {_PROTOCOL}: got {protocol!r}; needs http/protobuf or grpc; unset it or fix it")
    package = "http" if protocol == "http/protobuf" else "grpc"
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"server.otlp_traces_endpoint: got {endpoint}; the package opentelemetry-exporter-otlp-proto-{package} is "
            "needed; install tiercel[otel]"
        ) from error
    return Tracer(OTLPSpanExporter(endpoint=endpoint), model)


def attributes(model: str, request_id: str, summaries: "list[RequestSummary]") -> dict[str, Any]:
    """Give a span's attributes: counts over all prompts of the request, times of the one that took longest."""
    of: dict[str, Any] = {
        "gen_ai.response.model": model,
        "gen_ai.request.id": request_id,
        "gen_ai.usage.prompt_tokens": sum(one.n_prompt_tokens for one in summaries),
        "gen_ai.usage.completion_tokens": sum(one.n_output_tokens for one in summaries),
    }
    params = summaries[0].params
    asked = {
        "n": params.n,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_tokens": params.max_tokens,
    }
    of |= {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}
    last = max(summaries, key=lambda one: one.metrics.last_token_s or 0.0).metrics
    scheduled_s, first_s, last_s = last.first_scheduled_s, last.first_token_s, last.last_token_s
    if scheduled_s is not None:
        of["gen_ai.latency.time_in_queue"] = scheduled_s - last.arrival_s
    if scheduled_s is not None and first_s is not None and last_s is not None:
        of["gen_ai.latency.time_to_first_token"] = first_s - last.arrival_s
        of["gen_ai.latency.e2e"] = last_s - last.arrival_s
        of["gen_ai.latency.time_in_model_prefill"] = first_s - scheduled_s
        of["gen_ai.latency.time_in_model_decode"] = last_s - first_s
        of["gen_ai.latency.time_in_model_inference"] = last_s - scheduled_s
    return of


class HeaderWarner:
    """Says, once, that requests carry traces and nobody collects them."""

    def __init__(self) -> None:
        self._has_warned = False

    def look(self, scope: "Scope") -> None:
        """Look at a request's headers."""
        if not self._has_warned and any(name in _TRACE_HEADERS for name, _ in scope["headers"]):
            self._has_warned = True
            _log.warning("requests carry traceparent, and tracing is off; --otlp-traces-endpoint URL switches it on")
