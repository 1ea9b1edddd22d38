"""Tests that a reply over two rooms equals the reply over one room, byte for byte."""

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.rooms.phases import Side
from baton.rooms.request import Token
from baton.wire.baton.v1 import inference_pb2
from baton.wire.conversions import token_to_wire
from tests.api import tiny
from tests.bootstrap.scripted import STOP, House, Step, accepted, ended, house, tokens
from tests.support.manual_clock import ManualClock

P, D = Side.PREFILL, Side.DECODE
ANSWER = [*tiny.ids("The fox 😀 says STOP and"), tiny.END_ID]
DRAWN = re.compile(rb"^id: [^.]+|\.[\w+/]{16}$", re.MULTILINE)
"""Parts of an event's id that differ between requests: its identity and its signature."""
CUTS = range(1, len(ANSWER), 3)


def drawn(position: int) -> Token:
    return Token(ANSWER[position], -0.25 * position, ((ANSWER[position], -0.25 * position), (5, -3.0)))


def prefills(start: int) -> list[Step]:
    told = inference_pb2.FirstToken(token=token_to_wire(drawn(start)), cached_tokens=start)
    return [accepted(P), inference_pb2.RunRoomReply(first_token=told), ended(P)]


def decodes(start: int, stop: int = len(ANSWER)) -> list[Step]:
    """Script that sends one token per message, and ends without another word at `stop` unless that is the
    end."""
    steps = [accepted(D)]
    for position in range(start, stop):
        last = position == len(ANSWER) - 1
        step = tokens(position, [], STOP if last else None)
        step.tokens.tokens.append(token_to_wire(drawn(position)))
        steps.append(step)
    return [*steps, ended(D) if stop == len(ANSWER) else None]


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house(rooms_max=3, places=100) as made:
        yield made


async def reply(at: House, path: str, **more: Any) -> bytes:
    """Return one client's whole reply, byte for byte, but for what is drawn anew in the ids of events."""
    app = create_app(at.backend, tiny.model(), CollectorRegistry(), clock=ManualClock(wall_ms=1_000))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    body = {"model": tiny.MODEL, "return_token_ids": True, **more}
    body |= {"prompt": "The quick"} if path.endswith("/completions") and "chat" not in path else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post(path, json=body, headers={"X-Request-Id": "same"})
    assert answer.status_code == 200, answer.text
    await at.unfollowed()  # a script that breaks off takes the next room of its stream with it
    return DRAWN.sub(b"id: ", answer.content)


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("stop", [[], ["STOP"], ["😀 says"]], ids=["to the end", "stop string", "emoji"])
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", CHAT | USAGE),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"logprobs": 2, "max_tokens": 100, **USAGE}),
        ("/v1/completions", {"logprobs": 2, "max_tokens": 100}),
    ],
    ids=["chat, streamed", "chat", "completion, streamed", "completion"],
)
async def test_the_reply_over_two_rooms_is_that_of_one(
    at: House, path: str, more: dict[str, Any], stop: list[str]
) -> None:
    """Cut off at many places: roles, text, stop strings, log-probabilities, offsets, usage, finish."""
    cut = len(ANSWER)
    # By what is asked: a worker may hear of a reply's second room when the reply has ended at a stop string.
    at.prefill.choose = lambda asked: prefills(len(asked.output))
    at.decode.choose = lambda asked: decodes(len(asked.output)) if asked.output else decodes(0, cut)
    whole = await reply(at, path, stop=stop, **more)
    retries = 0
    for cut in CUTS:
        before = len(at.registry.find("same"))
        assert await reply(at, path, stop=stop, **more) == whole, f"cut off at token {cut}"
        retries += len(at.registry.find("same")) - before - 1
    assert retries == len(CUTS) if not stop else retries > 0


async def test_a_failure_after_the_last_room_is_one_last_event(at: House) -> None:
    at.prefill.script, at.decode.script = prefills(0), decodes(0, 2)
    at.prefill.scripts = [prefills(0), prefills(2), prefills(4)]
    at.decode.scripts = [decodes(0, 2), decodes(2, 4), decodes(4, 5)]
    body = (await reply(at, "/v1/chat/completions", **CHAT, **USAGE)).decode()
    events = [line for line in body.splitlines() if line.startswith("data: ")]
    assert body.count('"role": "assistant"') + body.count('"role":"assistant"') == 1
    assert "decode worker decode-0 ended without an outcome" in events[-1]
    assert "[DONE]" not in body
