"""Tests of a request's log line: ids and numbers, and text only with `--log-prompts`."""

import logging
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.backend import Overloaded, RoomFailed
from baton.api.settings import ApiSettings
from baton.rooms.errors import Reason
from baton.runtime.logging import VALUE_CHARS_MAX
from tests.api import tiny
from tests.api.requests.test_bad_input import CHAT, chat
from tests.api.scripted import ScriptedBackend, batch, saying

SECRET = "swordfish"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"X-Request-Id": "r1", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}


@pytest.fixture(autouse=True)
def _everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def lines(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    records = [record for record in caplog.records if record.getMessage() == message]
    return [{"level": record.levelname, **record.__dict__["baton_fields"]} for record in records]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answered_request_has_one_line_with_its_ids_and_its_tokens(
    http: httpx.AsyncClient, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    reply = await http.post(CHAT, json=chat(stream=stream), headers=HEADERS)
    assert reply.status_code == 200
    (line,) = lines(caplog, "request answered")
    assert line.pop("duration_ms") >= 0
    assert line == {
        "level": "INFO",
        "request_id": "r1",
        "trace_id": TRACE,
        "method": "POST",
        "route": CHAT,
        "status": 200,
        "prompt_tokens": len(backend.asked[0].prompt),
        "output_tokens": len(saying("Hello world")),
        "cached_tokens": 3,
        "choices": None,
        "error": None,
        "cause": None,
    }
    trace = backend.asked[0].trace
    assert trace is not None
    assert trace.parent == HEADERS["traceparent"], "what is not traced here is passed on as it came"


async def test_a_reply_that_breaks_off_has_its_cause_in_its_line(
    http: httpx.AsyncClient, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.script = lambda _: [batch(tiny.ids("The")), RoomFailed("decode-0 is gone", Reason.DECODE_LOST)]
    await http.post(CHAT, json=chat(stream=True))
    (line,) = lines(caplog, "request answered")
    assert (line["status"], line["error"], line["cause"]) == (200, "decode_lost", "decode-0 is gone")
    assert line["output_tokens"] == len(tiny.ids("The"))


async def test_a_refused_request_has_the_code_of_its_refusal(
    http: httpx.AsyncClient, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.script = lambda _: Overloaded("the queue is full", 5)
    await http.post(CHAT, json=chat())
    await http.post(CHAT, json=chat(max_tokens="many"))
    full, wrong = lines(caplog, "request answered")
    assert (full["status"], full["error"], full["cause"]) == (429, "overloaded", None)
    assert (wrong["status"], wrong["cause"], wrong["output_tokens"]) == (400, None, None)


async def test_those_who_only_look_are_for_debugging(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    await http.get("/v1/models")
    (line,) = lines(caplog, "request answered")
    assert (line["level"], line["route"]) == ("DEBUG", "/v1/models")


@pytest.mark.parametrize("stream", [False, True])
async def test_secrets_unlogged_at_the_lowest_level_no_line_has_a_word_of_prompt_or_answer(
    http: httpx.AsyncClient, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    backend.script = lambda _: saying(f"The {SECRET} says")
    body = chat(stream=stream, messages=[{"role": "user", "content": f"What is {SECRET}?"}])
    reply = await http.post(CHAT, json=body, headers=HEADERS)
    assert reply.status_code == 200
    assert lines(caplog, "request answered")
    assert lines(caplog, "prompt") == lines(caplog, "answer") == []
    said = repr([record.__dict__ for record in caplog.records])
    assert SECRET not in said


@pytest.mark.parametrize("stream", [False, True])
async def test_where_it_is_asked_for_the_beginnings_of_prompt_and_answer_are_logged(
    backend: ScriptedBackend, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    backend.script = lambda _: saying(f"The {SECRET} " + "says " * 60)
    app = create_app(backend, tiny.model(), CollectorRegistry(), ApiSettings(log_prompts=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        body = chat(stream=stream, messages=[{"role": "user", "content": f"What is {SECRET}?"}])
        reply = await http.post(CHAT, json=body, headers=HEADERS)
    assert reply.status_code == 200
    (prompt,), (answer,) = lines(caplog, "prompt"), lines(caplog, "answer")
    assert f"What is {SECRET}?" in prompt["prompt"]
    assert answer["answer"].startswith(f"The {SECRET} ")
    assert len(answer["answer"]) <= VALUE_CHARS_MAX + 10
    assert (prompt["request_id"], answer["request_id"]) == ("r1", "r1")
