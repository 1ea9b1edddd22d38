"""Export of trace spans by OTLP. No request and no turn of a worker ever waits for it.

OpenTelemetry's SDK batches spans in a thread of its own behind a bounded queue. If the collector is slow or
gone, the oldest spans are lost, and one log line says so. Only processes with an endpoint import this module.
"""

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.rooms.trace import TraceContext
from baton.runtime.logging import Log
from baton.runtime.reachability import is_reachable_from_elsewhere
from baton.telemetry.process_metrics import release
from baton.telemetry.tracing import Attribute, SpanKind, Tracer

SPANS_MAX: Final = 4096
BATCH_MAX: Final = 256
"""Most spans exported in one batch. Encoding a batch holds the GIL for a few milliseconds."""
PAUSE_MS: Final = 1_000
EXPORT_S: Final = 5.0
"""Longest time to export one batch of spans, seconds."""
LAST_S: Final = 0.2
"""Time for the exporting thread to end after it was told to give up, seconds."""

KINDS: Final = {SpanKind.SERVER: otel.SpanKind.SERVER, SpanKind.INTERNAL: otel.SpanKind.INTERNAL}

log = Log(__name__)


class OtlpSpan:
    """Trace span that OpenTelemetry records and exports (`tracing.Span`)."""

    __slots__ = ("_span", "trace")

    def __init__(self, span: otel.Span, trace: TraceContext) -> None:
        self._span = span
        self.trace = trace

    def event(self, name: str, detail: str = "") -> None:
        self._span.add_event(name, {"detail": detail} if detail else None)

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        self._span.set_attributes(attributes)

    def fail(self, reason: str, text: str) -> None:
        self._span.set_attribute("error.type", reason)
        self._span.set_status(otel.Status(otel.StatusCode.ERROR, text))

    def end(self) -> None:
        self._span.end()


class OtlpTracer(Tracer):
    """Tracer that exports spans to an OTLP collector.

    It follows a caller's sampling decision. It samples requests that bring none.
    """

    def __init__(self, endpoint: str, sample: float, service: str, instance: str) -> None:
        # The exporter would log each attempt. `_LoggingExporter` logs once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter = OTLPSpanExporter(
            endpoint=endpoint, timeout=EXPORT_S, channel_options=channel_options(endpoint)
        )
        self._exporter = _LoggingExporter(exporter, endpoint)
        resource = Resource.create(
            {
                "service.name": service,
                "service.namespace": "baton",
                "service.instance.id": instance,
                "service.version": release(),
            }
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample)), resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=SPANS_MAX,
                max_export_batch_size=BATCH_MAX,
                schedule_delay_millis=PAUSE_MS,
            )
        )
        self._tracer = self._provider.get_tracer("baton")
        self._contexts = TraceContextTextMapPropagator()
        self._stopped = False

    def begin(
        self, name: str, kind: SpanKind, parent: TraceContext | None, attributes: Mapping[str, Attribute]
    ) -> OtlpSpan:
        carrier = {} if parent is None else {"traceparent": parent.parent, "tracestate": parent.state}
        context = self._contexts.extract(carrier)
        span = self._tracer.start_span(name, context, KINDS[kind], attributes)
        injected: dict[str, str] = {}
        self._contexts.inject(injected, otel.set_span_in_context(span, context))
        return OtlpSpan(span, TraceContext(injected["traceparent"], injected.get("tracestate", "")))

    async def stop(self, timeout_s: float) -> None:
        """Send the remaining spans within `timeout_s` seconds. Idempotent.

        If that takes longer, the exporting thread is abandoned.
        """
        if self._stopped:
            return
        self._stopped = True
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send_the_rest() -> None:
            self._provider.shutdown()
            try:
                loop.call_soon_threadsafe(sent.set)
            except RuntimeError:
                return  # the loop has ended

        threading.Thread(target=send_the_rest, name="last spans", daemon=True).start()
        for wait_s in (timeout_s, LAST_S):
            try:
                async with asyncio.timeout(wait_s):
                    await sent.wait()
            except TimeoutError:
                self._exporter.give_up()


def channel_options(endpoint: str) -> Any:
    """Return gRPC options that turn off an HTTP proxy if the collector at `endpoint` is on this machine."""
    return (
        ()
        if is_reachable_from_elsewhere(urlsplit(endpoint).hostname or "")
        else (("grpc.enable_http_proxy", 0),)
    )


class _LoggingExporter(SpanExporter):
    """Exporter that logs once when spans begin to be lost, and once when the collector accepts them again."""

    def __init__(self, exporter: OTLPSpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._lost = 0
        self._given_up = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                log.info("traces arrive again", endpoint=self._endpoint, lost=self._lost)
            self._lost = 0
        else:
            if not self._lost:
                log.warning("traces do not arrive, and spans are lost", endpoint=self._endpoint)
            self._lost += len(spans)
        return result

    def give_up(self) -> None:
        """Stop trying to send the current batch of spans."""
        if not self._given_up:
            self._given_up = True
            self._exporter.shutdown()

    def shutdown(self) -> None:
        self.give_up()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
