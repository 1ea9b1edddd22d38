"""Tests of the client's replies when the pipeline, or the HTTP layer itself, fails."""

import json
import logging

import httpx
import pytest

from baton.api.backend import NoWorker, Overloaded, RoomFailed
from baton.rooms.errors import Reason
from baton.rooms.request import Request
from tests.api import tiny
from tests.api.requests.test_bad_input import CHAT, COMPLETIONS, chat, check, completion
from tests.api.scripted import LENGTH, ScriptedBackend, Step, batch, saying

SECRET = "swordfish"


@pytest.mark.parametrize("stream", [False, True])
async def test_overloaded(http: httpx.AsyncClient, backend: ScriptedBackend, stream: bool) -> None:
    backend.script = lambda _: Overloaded("the queue is full", 5)
    reply = await http.post(CHAT, json=chat(stream=stream))
    assert check(reply, 429, None, "overloaded") == "the queue is full"
    assert reply.headers["retry-after"] == "5"


@pytest.mark.parametrize("stream", [False, True])
async def test_no_worker(http: httpx.AsyncClient, backend: ScriptedBackend, stream: bool) -> None:
    backend.script = lambda _: NoWorker("no decode worker is ready")
    reply = await http.post(CHAT, json=chat(stream=stream))
    assert check(reply, 503, None, "no_worker") == "no decode worker is ready"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_room_that_fails_before_the_first_token(
    http: httpx.AsyncClient, backend: ScriptedBackend, stream: bool
) -> None:
    backend.script = lambda _: [RoomFailed("prefill-0 is gone", Reason.PREFILL_LOST)]
    assert check(await http.post(CHAT, json=chat(stream=stream)), 503, None, "prefill_lost")


async def test_a_room_that_fails_after_the_first_token(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: [batch(tiny.ids("The")), RoomFailed("decode-0 is gone", Reason.DECODE_LOST)]
    reply = await http.post(CHAT, json=chat(stream=True))
    assert reply.status_code == 200
    *chunks, last, rest = reply.text.split("\n\n")
    assert len(chunks) == 2
    assert rest == ""
    assert json.loads(last.removeprefix("data: "))["error"] == {
        "message": "decode-0 is gone",
        "type": "service_unavailable_error",
        "param": None,
        "code": "decode_lost",
    }
    whole = await http.post(CHAT, json=chat())
    check(whole, 503, None, "decode_lost")


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failed_prompt_fails_all_and_ends_the_others(
    http: httpx.AsyncClient, backend: ScriptedBackend, stream: bool
) -> None:
    import asyncio

    def script(request: Request) -> list[Step] | BaseException:
        if request.prompt == (7,):
            return Overloaded("the queue is full", 1)
        return [asyncio.Event()]

    backend.script = script
    reply = await http.post(COMPLETIONS, json=completion(prompt=[[5], [6], [7]], stream=stream))
    check(reply, 429, None, "overloaded")
    assert len(backend.streams) == 2
    assert backend.left_open == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_before_the_first_byte(
    http: httpx.AsyncClient, backend: ScriptedBackend, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backend.script = lambda _: ZeroDivisionError("oops")
    body = chat(stream=stream, messages=[{"role": "user", "content": SECRET}])
    with caplog.at_level(logging.ERROR):
        reply = await http.post(CHAT, json=body, headers={"X-Request-Id": "bug-1"})
    message = check(reply, 500, None, "internal_error")
    assert "oops" not in message
    assert reply.headers["x-request-id"] == "bug-1"
    (record,) = [each for each in caplog.records if each.name.startswith("baton.api")]
    assert record.__dict__["baton_fields"]["request_id"] == "bug-1"
    assert record.exc_info is not None
    assert SECRET not in caplog.text


async def test_a_bug_after_the_first_byte(
    http: httpx.AsyncClient, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.script = lambda _: [batch(tiny.ids("The")), ZeroDivisionError("oops")]
    reply = await http.post(CHAT, json=chat(stream=True))
    *_, last, rest = reply.text.split("\n\n")
    assert rest == ""
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "oops" not in reply.text
    assert "a reply broke off" in caplog.text


async def test_a_stream_that_ends_without_a_finish_is_a_bug(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying("The fox", finish=LENGTH)[:-1]
    check(await http.post(CHAT, json=chat()), 500, None, "internal_error")
    assert backend.left_open == []
