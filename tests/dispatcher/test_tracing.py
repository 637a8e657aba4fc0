"""OpenTelemetry traces, as a collector gets them."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from scripted import a_fleet, ask, run

from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.dispatcher.http.server import Exchange, serve
from fleetpilot.dispatcher.service import Dispatcher

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "tell nobody"


def attributes_of(of: Any) -> dict[str, Any]:
    kinds = ("string_value", "int_value", "double_value", "bool_value")
    return {
        each.key: next(getattr(each.value, kind) for kind in kinds if each.value.HasField(kind))
        for each in of.attributes
    }


def test_every_request_is_a_span_that_says_lengths_and_places_and_no_text() -> None:
    got: list[bytes] = []

    def collect(exchange: Exchange) -> None:
        zipped = exchange.header(b"content-encoding") == b"gzip"
        got.append(gzip.decompress(exchange.body) if zipped else exchange.body)
        exchange.respond(200, b"", b"application/x-protobuf")

    async def test() -> None:
        collector = await serve(collect)
        endpoint = f"http://127.0.0.1:{collector.port}/v1/traces"
        async with a_fleet(2, otlp_endpoint=endpoint) as (dispatcher, client, scripted):
            scripted[0].cut_after = 3
            headers = [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()), (b"content-type", b"application/json")]
            assert (await ask(client, headers, prompt=SECRET, user=SECRET)).status == 200
            assert (await ask(client, model="other")).status == 404
            seen = [headers for engine in scripted for _, headers in engine.seen]
            await dispatcher.stop()
        spans = [
            span
            for data in got
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        await collector.close()
        assert len(spans) == 2
        first = next(span for span in spans if span.trace_id.hex() == TRACE)
        assert first.parent_span_id.hex() == PARENT
        assert first.name == "text_completion"
        known = attributes_of(first)
        assert known["gen_ai.request.model"] == "tiny"
        assert known["gen_ai.usage.input_tokens"] == len(SECRET)
        assert known["gen_ai.usage.output_tokens"] == 40
        assert known["fleetpilot.failovers"] == 1
        assert known["fleetpilot.outcome"] == "finished"
        assert [event.name for event in first.events] == ["sent", "first token", "sent"]
        own = f"00-{TRACE}-{first.span_id.hex()}-01".encode()
        assert [headers[b"traceparent"] for headers in seen if b"traceparent" in headers].count(own) == 2
        assert not any(SECRET.encode() in data for data in got)

    run(test)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"otlp_endpoint = 'http://x': .*pip install 'fleetpilot\[otel\]'"):
        Dispatcher(ServeConfig(engines=("http://127.0.0.1:1",), otlp_endpoint="http://x"))
