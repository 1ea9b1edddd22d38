"""Tests that tracing is off without an endpoint, and that a silent collector delays nothing."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from baton.ids import RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.timeline import Moment
from baton.rooms.trace import read_trace
from baton.runtime.errors import StartupError
from baton.runtime.listening_ports import bind_port, port_of
from baton.telemetry.room_spans import RoomSpans
from baton.telemetry.trace_endpoint import make_tracer
from baton.telemetry.tracing import OFF, SpanKind
from tests.trace.collector import Collector, collecting

PARENT_SPAN = "00f067aa0ba902b7"
PARENT = read_trace(f"00-4bf92f3577b34da6a3ce929d0e0e4736-{PARENT_SPAN}-01", "vendor=1")
UNSAMPLED = read_trace("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00", "")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
LONG_S = 30.0
PLATFORM = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


def test_without_an_endpoint_nothing_of_the_sdk_is_imported() -> None:
    program = (
        "import sys, baton.bootstrap.room_controller, baton.api.app;"
        "import baton.worker.lifecycle.leader_host as host;"
        "from baton.telemetry.trace_endpoint import make_tracer;"
        "from baton.telemetry.tracing import OFF;"
        "assert make_tracer('', 1.0, 's', 'i', {}) is OFF;"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exp'))])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_an_endpoint_without_the_extra_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "baton.telemetry.otlp_tracer", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(StartupError, match=r"not installed: pip install opentelemetry-sdk "):
        make_tracer("http://127.0.0.1:1", 1.0, "s", "i", {})


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}, False),
        ({**PLATFORM, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
    ],
)
async def test_the_platforms_endpoint_counts_where_none_is_given(environ: dict[str, str], on: bool) -> None:
    tracer = make_tracer("", 1.0, "s", "i", environ)
    assert (tracer is not OFF) == on
    await tracer.stop(LONG_S)


@pytest.mark.parametrize("said", ["true", " True "])
def test_a_disabled_sdk_makes_no_spans_whoever_named_the_endpoint(said: str) -> None:
    assert make_tracer("http://127.0.0.1:1", 1.0, "s", "i", {"OTEL_SDK_DISABLED": said}) is OFF


@pytest.mark.parametrize("given", ["collector:4317", "http://user:secret@collector:4317"])
def test_an_address_that_is_none_is_an_error_that_shows_no_password(given: str) -> None:
    with pytest.raises(StartupError, match=r"--otlp-endpoint.*http://host:4317") as raised:
        make_tracer(given, 1.0, "s", "i", {})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:secret@c:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://[c"}, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        ({**PLATFORM, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "OTEL_EXPORTER_OTLP_PROTOCOL"),
        (
            {
                **PLATFORM,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json",
            },
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        ),
    ],
    ids=["address", "password", "nonsense", "protocol", "protocol of traces"],
)
def test_an_unusable_platform_endpoint_is_logged_once_by_name_and_stops_no_start(
    environ: dict[str, str], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        assert make_tracer("", 1.0, "s", "i", environ) is OFF
    (line,) = caplog.records
    assert named in str(vars(line))
    assert "secret" not in str(vars(line))


def test_the_platforms_endpoint_without_the_extra_stops_no_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "baton.telemetry.otlp_tracer", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with caplog.at_level("WARNING"):
        assert make_tracer("", 1.0, "s", "i", PLATFORM) is OFF
    (line,) = caplog.records
    assert "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc" in str(vars(line))


async def test_a_rooms_span_has_its_lines_and_the_cause_of_its_failure(collector: Collector) -> None:
    tracer = make_tracer(collector.endpoint, 0.0, "baton-decode", "decode-0", {})
    spans = RoomSpans(tracer, "decode", SpanKind.SERVER)
    spans.begin(RoomId(7), "r", PARENT, {"baton.prefill": "p"})
    spans.begin(RoomId(8), "canary", None)
    spans.event(RoomId(7), Moment.GRANTED, "2 pages")
    spans.event(RoomId(8), Moment.GRANTED)
    spans.fail(RoomId(7), Cause(Reason.PREFILL_LOST, "its lease ran out"))
    spans.end(RoomId(7))
    assert len(spans) == 0
    await tracer.stop(LONG_S)
    (span,) = collector.of(TRACE)
    assert (span.name, span.kind, span.parent, span.state) == ("decode", "server", PARENT_SPAN, "vendor=1")
    assert [(event.name, event.detail) for event in span.events] == [("granted", "2 pages")]
    assert span.error == "its lease ran out"
    assert span.attributes["error.type"] == "prefill_lost"
    assert span.attributes["baton.room"] == "7"


async def test_what_its_client_gave_up_is_no_failure(collector: Collector) -> None:
    tracer = make_tracer(collector.endpoint, 0.0, "s", "i", {})
    spans = RoomSpans(tracer)
    spans.begin(RoomId(7), "r", PARENT)
    spans.cut_off(Cause(Reason.CLIENT_GONE, "the client hung up"))
    await tracer.stop(LONG_S)
    (span,) = collector.of(TRACE)
    assert (span.error, span.attributes["baton.reason"]) == (None, "client_gone")


async def test_the_caller_decides_whether_a_trace_is_sampled_and_else_chance(collector: Collector) -> None:
    never = make_tracer(collector.endpoint, 0.0, "never", "i", {})
    always = make_tracer(collector.endpoint, 1.0, "always", "i", {})
    for tracer in (never, always):
        for parent in (None, UNSAMPLED, PARENT):
            span = tracer.begin("x", SpanKind.SERVER, parent, {})
            assert span is not None
            assert parent is None or span.trace.trace_id == parent.trace_id
            span.end()
        await tracer.stop(LONG_S)
    kept = sorted((span.service, span.parent != "") for span in collector.all())
    assert kept == [("always", False), ("always", True), ("never", True)]


async def test_a_collector_that_never_answers_delays_the_end_by_no_more_than_was_allowed() -> None:
    """The collector accepts connections and never answers, like a port behind a firewall or a stopped
    process.
    """
    with bind_port("127.0.0.1", 0, "test") as silent:
        tracer = make_tracer(f"http://127.0.0.1:{port_of(silent)}", 1.0, "s", "i", {})
        for _ in range(10_000):  # more than are kept: the oldest are dropped, and nobody waits
            span = tracer.begin("x", SpanKind.SERVER, PARENT, {})
            assert span is not None
            span.end()
        async with asyncio.timeout(LONG_S):
            await tracer.stop(0.2)
            await tracer.stop(0.2)
