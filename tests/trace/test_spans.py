"""Tests that a request is one tree of spans over the three processes that serve it, with matching log lines.
All use one stack that `baton serve` started, of one prefill worker and two decode workers."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.http import web
from tests.process.cancelling import cancel_room, opener_at
from tests.process.stack import READY_S
from tests.trace.collector import Collector, Seen, collecting
from tests.trace.serving import RUN_TOKEN, Served, events_of, in_order, serving

pytestmark = pytest.mark.stack

ANSWER_S: Final = 60.0
CALLER: Final = "00f067aa0ba902b7"
MARKER: Final = "zeppelin-quarry-0417"
STREAM: Final = {"stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def served(
    collector: Collector, demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    flags = ["--decode", "2", "--log-format", "json", "--log-level", "info", "--dtype", "float32"]
    flags += ["--otlp-endpoint", collector.endpoint]
    with serving(demo_model_dir, tmp_path_factory.mktemp("traced"), *flags) as running:
        yield running


def headers(request_id: str, trace: str) -> dict[str, str]:
    return {"X-Request-Id": request_id, "traceparent": f"00-{trace}-{CALLER}-01", "tracestate": "vendor=1"}


def named(spans: list[Seen], name: str) -> list[Seen]:
    return [span for span in spans if span.name == name]


def complete(spans: list[Seen]) -> bool:
    """The root is there, and each room's span with one of each side."""
    rooms = len(named(spans, "room"))
    return bool(named(spans, "POST /v1/completions")) and (
        len(named(spans, "prefill")) == len(named(spans, "decode")) == rooms > 0
    )


def test_one_request_is_one_tree_with_the_right_parents_across_processes(
    served: Served, collector: Collector
) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    reply = web().post(
        f"{served.url}/v1/completions",
        json=served.body(f"The {MARKER} is", 8, ignore_eos=True),
        headers=headers("traced-1", trace),
        timeout=ANSWER_S,
    )
    assert reply.status_code == 200, reply.text
    assert reply.headers["X-Request-Id"] == "traced-1"
    spans = collector.wait(trace, complete)
    (http,) = named(spans, "POST /v1/completions")
    (room,) = named(spans, "room")
    (prefill,) = named(spans, "prefill")
    (decode,) = named(spans, "decode")
    assert len(spans) == 4, [span.name for span in spans]
    assert [each.parent for each in (http, room, prefill, decode)] == [CALLER, http.id, room.id, room.id]
    assert [each.service for each in (http, room, prefill, decode)] == [
        *("baton-bootstrap", "baton-bootstrap"),
        *("baton-prefill", "baton-decode"),
    ]
    assert [each.kind for each in (http, room, prefill, decode)] == ["server", "internal", "server", "server"]
    assert {each.state for each in spans} == {"vendor=1"}
    assert {each.error for each in spans} == {None}

    usage = reply.json()["usage"]
    assert http.attributes["http.response.status_code"] == 200
    assert http.attributes["gen_ai.operation.name"] == "text_completion"
    assert http.attributes["gen_ai.request.model"] == served.model
    assert http.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert http.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 8
    assert http.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert http.attributes["server.port"] == int(served.url.rpartition(":")[2])
    (listed,) = served.rooms("traced-1")
    assert listed["trace_id"] == trace
    assert {each.attributes.get("baton.room", listed["id"]) for each in spans} == {listed["id"]}
    assert {each.attributes["baton.request_id"] for each in spans} == {"traced-1"}
    assert (room.attributes["baton.prefill"], room.attributes["baton.decode"]) == (
        prefill.instance,
        decode.instance,
    )

    assert http.start_ns < room.start_ns < min(prefill.start_ns, decode.start_ns)
    assert room.end_ns <= http.end_ns
    assert max(prefill.start_ns, decode.start_ns) < room.end_ns
    assert in_order(room.names(), ["opened", "first token passed on", "answered"])
    assert in_order(prefill.names(), ["accepted", "computing", "first token", "written", "sealed", "retired"])
    assert in_order(decode.names(), ["accepted", "granted", "admitted", "finished", "retired"])
    # Both are asked at once: which of them accepts first is nobody's promise. Nor is whether prefill sees the
    # end of its seal before decode sees the seal; that its pages are written it sees before it seals.
    handed_over = [
        (prefill, "computing"),
        (prefill, "written"),
        (decode, "admitted"),
        (room, "answered"),
    ]
    for opening in ([(prefill, "accepted")], [(decode, "accepted"), (decode, "granted")]):
        story = [(room, "opened"), *opening, *handed_over]
        times = [span.at_ns(event) for span, event in story]
        assert times == sorted(times)
    for span in spans:
        times = [event.at_ns for event in span.events]
        assert times == sorted(times)
        assert all(span.start_ns <= each <= span.end_ns for each in times)


def test_a_request_without_a_trace_gets_one_of_its_own(served: Served, collector: Collector) -> None:
    reply = web().post(
        f"{served.url}/v1/completions",
        json=served.body("Once upon a time", 2),
        headers={"X-Request-Id": "own", "traceparent": "nonsense"},
        timeout=ANSWER_S,
    )
    assert reply.status_code == 200, reply.text
    (listed,) = served.rooms("own")
    spans = collector.wait(listed["trace_id"], complete)
    (root,) = [span for span in spans if not span.parent]
    assert root.name == "POST /v1/completions"


def test_a_failed_request_has_the_cause_in_each_of_its_spans(served: Served, collector: Collector) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    error: dict[str, Any] = {}
    with web().stream(
        "POST",
        f"{served.url}/v1/completions",
        json=served.body("Count: 1 2 3", 1500, **STREAM),
        headers=headers("failed-1", trace),
        timeout=ANSWER_S,
    ) as reply:
        for count, event in enumerate(events_of(reply)):
            if count == 3:
                (listed,) = served.rooms("failed-1")
                cancel(served, int(listed["id"]), "an operator ended it")
            error = event.get("error", {})
    assert error["code"] == "cancelled", error
    assert "an operator ended it" in error["message"]
    spans = collector.wait(trace, complete)
    (http,) = named(spans, "POST /v1/completions")
    assert http.error == error["message"]
    assert http.attributes["error.type"] == "cancelled"
    assert http.attributes["http.response.status_code"] == 200
    assert http.attributes["gen_ai.usage.output_tokens"] > 3
    (room,) = named(spans, "room")
    (decode,) = named(spans, "decode")
    for span in (room, decode):
        assert span.error is not None
        assert "an operator ended it" in span.error
        assert span.attributes["baton.reason"] == "cancelled"
        assert "failed" in span.names()
    here, there = served.wait_lines("room failed", ["bootstrap", decode.instance])
    for line in (here, there):
        assert (line["room"], line["request_id"], line["trace_id"]) == (listed["id"], "failed-1", trace)
    assert (here["level"], here["reason"]) == ("warning", "cancelled")


def cancel(served: Served, room: int, why: str) -> None:
    address = grpc_address(served)
    cancel_room(address, room, why, RUN_TOKEN, opener_at(address, RUN_TOKEN))


def grpc_address(served: Served) -> str:
    own = (line for line in served.lines() if line["part"] == "bootstrap")
    return f"127.0.0.1:{next(line['grpc_port'] for line in own if 'grpc_port' in line)}"


def test_a_retried_request_shows_both_rooms(served: Served, collector: Collector) -> None:
    trace = "1bf7651916cd43dd8448eb211c80319c"
    finished = ""
    with web().stream(
        "POST",
        f"{served.url}/v1/completions",
        json=served.body("Count: 1 2 3", 30, **STREAM),
        headers=headers("retried-1", trace),
        timeout=ANSWER_S,
    ) as reply:
        for count, event in enumerate(events_of(reply)):
            assert "error" not in event, event
            if count == 3:
                (listed,) = served.rooms("retried-1")
                os.kill(served.pid_of(listed["decode"]), signal.SIGKILL)
            finished = event["choices"][0]["finish_reason"] or finished
    assert finished == "length"

    def there(spans: list[Seen]) -> bool:
        """The killed worker's span died with it."""
        counts = [len(named(spans, name)) for name in ("room", "prefill", "decode", "POST /v1/completions")]
        return counts == [2, 2, 1, 1]

    spans = collector.wait(trace, there)
    (http,) = named(spans, "POST /v1/completions")
    first, second = named(spans, "room")
    assert first.parent == second.parent == http.id
    assert first.attributes["error.type"] == "decode_lost"
    assert first.error is not None
    assert first.attributes["baton.decode"] in first.error
    assert second.attributes["baton.retry_of"] == first.attributes["baton.room"] == listed["id"]
    assert (second.error, http.error) == (None, None)
    assert {span.parent for span in named(spans, "prefill")} == {first.id, second.id}
    assert [span.parent for span in named(spans, "decode")] == [second.id]


def test_secrets_unlogged_what_users_write_is_in_no_log_metric_timeline_or_span(
    served: Served, collector: Collector
) -> None:
    reply = web().post(
        f"{served.url}/v1/chat/completions",
        json={
            "model": served.model,
            "messages": [{"role": "user", "content": f"Tell me all about the {MARKER}, please."}],
            "max_tokens": 20,
            "temperature": 0,
        },
        headers={"X-Request-Id": "secret-1"},
        timeout=ANSWER_S,
    )
    assert reply.status_code == 200, reply.text
    answer = reply.json()["choices"][0]["message"]["content"].strip()
    assert len(answer) > 30
    (listed,) = served.rooms("secret-1")
    timeline = web().get(f"{served.url}/rooms/{listed['id']}").text
    metrics = web().get(f"{served.url}/metrics").text
    collector.wait(listed["trace_id"], lambda spans: len(spans) == 4)
    said = "\n".join([served.log.read_text(), timeline, metrics, repr(collector.all())])
    assert "secret-1" in said, "it was looked for where the request is"
    for secret in (MARKER, "zeppelin", answer[:30], answer[-30:]):
        assert secret not in said


def test_each_request_has_one_line_in_the_log_with_its_ids_and_its_tokens(served: Served) -> None:
    lines = [line for line in served.lines() if line.get("request_id") == "traced-1"]
    (line,) = [line for line in lines if line["message"] == "request answered"]
    assert (line["part"], line["level"], line["method"], line["route"]) == (
        *("bootstrap", "info"),
        *("POST", "/v1/completions"),
    )
    assert line["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert (line["status"], line["output_tokens"]) == (200, 8)
    assert line["prompt_tokens"] > 0
    assert line["duration_ms"] > 0


def test_without_its_collector_a_stack_serves_and_ends_as_ever(served: Served, collector: Collector) -> None:
    """This test is the last one, since it ends the stack. A request under way is still answered."""
    collector.server.stop(0).wait()
    replies: list[httpx.Response] = []

    def ask() -> None:
        body = served.body("Once upon a time", 16, ignore_eos=True)
        replies.append(web().post(f"{served.url}/v1/completions", json=body, timeout=ANSWER_S))

    asker = threading.Thread(target=ask)
    asker.start()
    rooms = f"{served.url}/metrics"
    while 'baton_rooms{phase="streaming"} 1' not in web().get(rooms).text:
        assert asker.is_alive(), replies
    assert served.stop() == 0, served.log.read_text()
    asker.join(READY_S)
    assert [reply.status_code for reply in replies] == [200]
