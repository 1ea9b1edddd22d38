"""Tests of event ids: what they hold, and that an id is taken only for the request that it was issued for."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.api.resuming.event_ids import EventIdSigner
from baton.api.resuming.stream_identity import ROUTES, StreamIdentity, decode_identity
from baton.api.resuming.stream_position import (
    ChoicePosition,
    PositionWriter,
    StreamPosition,
    parse_position,
)
from baton.rooms.request import Token
from baton.rooms.worker_facts import ServedEngine
from tests.api.resuming.cases import CASES, CHAT, COMPLETIONS, MESSAGES, RESPONSES, Case, chat
from tests.api.resuming.routers import LIMITS, Writer, model, router

HEADER = "Last-Event-ID"
OF_EACH = {"chat": CHAT, "completion": COMPLETIONS, "message": MESSAGES, "response": RESPONSES}


def error_of(reply: httpx.Response, path: str) -> tuple[str, str]:
    """Return the message and the code of an error, which is in the format of the API."""
    assert reply.status_code == 400, reply.text
    body = reply.json()
    if path == MESSAGES:
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        return body["error"]["message"], body["error"]["details"]["error_code"]
    assert body["error"]["param"] == HEADER
    return body["error"]["message"], body["error"]["code"]


async def id_of(case: Case, place: int = 3) -> str:
    async with router(case.writer) as one:
        return (await one.stream(case.path, case.body))[place].id


@pytest.mark.parametrize("name", OF_EACH)
async def test_an_id_that_was_changed_is_refused(name: str) -> None:
    case = CASES[name]
    own = await id_of(case)
    async with router(case.writer) as one:
        for place in range(0, len(own), 3):
            other = "A" if own[place] != "A" else "B"
            changed = own[:place] + other + own[place + 1 :]
            message, code = error_of(await one.post(case.path, case.body, changed), case.path)
            assert "this stack did not issue the id" in message
            assert HEADER in message
            assert code == "unknown_event_id"
        assert not one.backend.asked


@pytest.mark.parametrize("given_id", ["x", "a.b.c", "1", "é", "." * 300, "a" * 5000])
async def test_what_is_no_id_is_refused(given_id: str) -> None:
    case = CASES["chat"]
    async with router(case.writer) as one:
        headers: Any = {"last-event-id": given_id.encode()}
        reply = await one.http.post(case.path, json=case.body, headers=headers)
        assert error_of(reply, case.path)[1] == "unknown_event_id"


@pytest.mark.parametrize("name", OF_EACH)
async def test_an_id_of_another_stack_is_refused(name: str) -> None:
    case = CASES[name]
    own = await id_of(case)
    async with router(case.writer, key=b"the key of another stack") as other:
        message, code = error_of(await other.post(case.path, case.body, own), case.path)
        assert "this stack did not issue the id" in message
        assert code == "unknown_event_id"


@pytest.mark.parametrize("name", OF_EACH)
async def test_an_id_of_another_body_is_refused(name: str) -> None:
    case = CASES[name]
    own = await id_of(case)
    async with router(case.writer) as one:
        message, _ = error_of(await one.post(case.path, {**case.body, "temperature": 0.5}, own), case.path)
        assert "another body" in message
        assert HEADER in message
        spaced = json.dumps(case.body, indent=1).encode()
        headers = {"last-event-id": own, "content-type": "application/json"}
        error_of(await one.http.post(case.path, content=spaced, headers=headers), case.path)
        assert not one.backend.asked


async def test_an_id_of_another_api_is_refused() -> None:
    own = await id_of(CASES["chat"])
    async with router(Writer()) as one:
        for path in ("/invocations", COMPLETIONS, MESSAGES, RESPONSES):
            case = CASES[next((name for name, each in OF_EACH.items() if each == path), "chat")]
            message, _ = error_of(await one.post(path, case.body, own), path)
            assert f"a stream of {CHAT}" in message


async def test_a_request_without_a_stream_is_refused() -> None:
    case = CASES["chat"]
    async with router(case.writer) as one:
        reply = await one.post(CHAT, {**case.body, "stream": False}, await id_of(case))
        assert "only a stream is resumed" in error_of(reply, CHAT)[0]


async def test_an_empty_header_is_none() -> None:
    case = CASES["chat"]
    async with router(case.writer) as one:
        reply = await one.http.post(CHAT, json=case.body, headers={"last-event-id": ""})
        assert reply.status_code == 200


async def test_an_id_of_another_model_is_refused() -> None:
    case = CASES["chat"]
    async with router(case.writer, served=model("another fingerprint")) as one:
        message, code = error_of(await one.post(CHAT, case.body, await id_of(case)), CHAT)
        assert code == "model_changed"
        assert "another model" in message


async def test_an_id_of_workers_with_another_engine_is_refused() -> None:
    """Where no worker is known yet, as after a router's start, the engine is not compared."""
    case = CASES["chat"]
    exact, rounded = [ServedEngine("torch", dtype, True, False) for dtype in ("float32", "bfloat16")]
    async with router(case.writer, limits=replace(LIMITS, engine=exact)) as one:
        own = (await one.stream(CHAT, case.body))[3].id
        assert (await one.post(CHAT, case.body, own)).status_code == 200
    for engine, quantize, is_taken in ((rounded, None, False), (exact, "int8", False), (None, None, True)):
        limits = replace(LIMITS, engine=engine, quantize=quantize)
        async with router(case.writer, limits=limits) as other:
            reply = await other.post(CHAT, case.body, own)
            assert (reply.status_code == 200) == is_taken
            if not is_taken:
                message, code = error_of(reply, CHAT)
                assert (code, "another engine" in message) == ("model_changed", True)


async def test_a_stream_that_no_longer_fits_is_refused_as_a_new_request() -> None:
    case = chat(Writer(), max_tokens=300)
    own = await id_of(case)
    async with router(case.writer, limits=replace(LIMITS, context_tokens=100)) as one:
        reply = await one.post(CHAT, case.body, own)
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"


IDENTITIES = st.builds(
    StreamIdentity,
    route=st.sampled_from(ROUTES),
    request_id=st.just("ab" * 16) | st.text("abz09._:/+=@-", min_size=1, max_size=128),
    has_drawn_id=st.just(False),
    nonce=st.binary(min_size=8, max_size=8),
    created_s=st.integers(0, 2**32 - 1),
    body=st.binary(min_size=8, max_size=8),
    model=st.binary(min_size=4, max_size=4),
    engine=st.binary(min_size=4, max_size=4),
    max_tokens=st.lists(st.integers(1, 2**32 - 1), max_size=64).map(tuple),
)


@given(IDENTITIES)
def test_an_identity_is_read_as_it_was_written(identity: StreamIdentity) -> None:
    assert decode_identity(identity.encode()) == identity


def test_an_id_that_the_router_drew_is_short() -> None:
    own = StreamIdentity(
        CHAT, "0f" * 16, True, b"n" * 8, 1_800_000_000, b"b" * 8, b"m" * 4, b"e" * 4, (2048,)
    )
    assert decode_identity(own.encode()) == own
    ids = EventIdSigner(b"key").issue(own, 1)
    ids.position.add(0, [Token(17)])
    assert len(ids.line(ids.position.text())) < 115
    read = EventIdSigner(b"key").read(
        ids.line(ids.position.text()).decode().removeprefix("id: ").rstrip("\n")
    )
    assert read == (own, StreamPosition((ChoicePosition(1, ids.position.check(0)),)))


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 9), st.integers(1, 3)), max_size=30))
def test_each_position_of_a_stream_is_read_as_it_was_written(steps: list[tuple[int, int, int]]) -> None:
    for choices in (1, 3, 12):
        writer, counts, seen = PositionWriter(choices), [0] * choices, set()
        for step, token, events in steps:
            choice = step % choices
            assert writer.add(choice, [Token(token)]) == counts[choice] + 1
            for shown in range(1, events):
                text = writer.within(choice, shown).decode()
                found = parse_position(text)
                assert found is not None
                assert [each.tokens for each in found.choices] == counts
                assert found.choices[choice].events == shown
                seen.add(text)
            counts[choice] += 1
            found = parse_position(writer.text().decode())
            assert found == StreamPosition(
                tuple(ChoicePosition(count, writer.check(place)) for place, count in enumerate(counts))
            )
            seen.add(writer.text().decode())
        assert len(seen) == sum(events for *_, events in steps)
        for number in range(1, 4):
            assert parse_position(writer.closing(number, last=False).decode()) == StreamPosition(
                tuple(ChoicePosition(count, writer.check(place)) for place, count in enumerate(counts)),
                number,
            )
        end = parse_position(writer.closing(4, last=True).decode())
        assert end is not None
        assert end.is_end


@pytest.mark.parametrize("text", ["", "x", "1-", "1~x", "-1", "1+", "1__2", "1-ffff+", "1~1234"])
def test_other_texts_are_no_positions(text: str) -> None:
    assert parse_position(text) is None
