"""OpenTelemetry traces: a span for every request, over OTLP; lengths and times, never text.

The names of attributes are those of the conventions for generative AI where they have one. A client's ``traceparent``
is the span's parent, and engines get the span's own, so that those of vLLM (``--otlp-traces-endpoint``) hang below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetpilot.dispatcher.http.server import Headers
from fleetpilot.dispatcher.requests import CHAT, ApiRequest

_CONTEXT = (b"traceparent", b"tracestate")
_USAGE = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "request_id": "gen_ai.response.id",
}


class Tracing:
    """Makes spans, and sends them from a thread of its own.

    Args:
        endpoint: of a collector, as ``http://127.0.0.1:4318/v1/traces``.

    Raises:
        ValueError: the packages of the extra ``otel`` are missing.
    """

    def __init__(self, endpoint: str):
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            raise ValueError(
                f"otlp_endpoint = {endpoint!r}: there is no {error.name}; pip install 'fleetpilot[otel]'"
            ) from None
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "fleetpilot"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("fleetpilot.dispatcher")

    def begin(self, request: ApiRequest, headers: Headers) -> RequestSpan:
        """A request has come, with these headers."""
        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _CONTEXT}
        operation = "chat" if request.route == CHAT else "text_completion"
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": str(request.fields.get("model")),
            "fleetpilot.streamed": request.streamed,
        }
        if request.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = request.max_tokens
        span = self._tracer.start_span(
            operation,
            context=self._propagator.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            attributes=attributes,
        )
        own: dict[str, str] = {}
        self._propagator.inject(own, context=self._trace.set_span_in_context(span))
        return RequestSpan(span, self._trace, [(name.encode(), value.encode()) for name, value in own.items()])

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


class RequestSpan:
    """Of one request.

    Attributes:
        headers: that tell an engine of it.
    """

    def __init__(self, span: Any, trace: Any, headers: Headers):
        self.headers = headers
        self._span = span
        self._trace = trace

    def note(self, what: str, instance: int) -> None:
        """Something happened at an instance."""
        self._span.add_event(what, {"fleetpilot.instance": instance})

    def end(self, outcome: str, fields: Mapping[str, Any]) -> None:
        """The request has ended, with the fields of its record in the decision log."""
        known = {name: value for name, value in fields.items() if value is not None and name != "request"}
        self._span.set_attributes({_USAGE.get(name, f"fleetpilot.{name}"): value for name, value in known.items()})
        self._span.set_attribute("fleetpilot.outcome", outcome)
        if outcome == "failed":
            self._span.set_status(self._trace.StatusCode.ERROR)
        self._span.end()

    def forwarded(self, headers: Headers) -> Headers:
        """A client's headers with its own in place of the client's."""
        return [*((name, value) for name, value in headers if name not in _CONTEXT), *self.headers]
