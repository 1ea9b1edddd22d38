"""Tests that a stored response is streamed again by the events of its first stream."""

from typing import Any

import httpx
import pytest

from tests.api.resuming.cases import CASES, RESPONSES, Case
from tests.api.resuming.routers import Event, Router, Writer, events_of, router

STORED = [name for name in CASES if name.startswith("response") and CASES[name].body.get("store", True)]


async def again(one: Router, id_: str, **query: Any) -> list[Event]:
    reply = await one.http.get(f"{RESPONSES}/{id_}", params={"stream": "true", **query})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events_of(reply.text)


def data(events: list[Event]) -> list[Any]:
    return [event.data for event in events]


@pytest.mark.parametrize("name", STORED)
async def test_a_stored_response_has_the_events_of_its_stream(name: str) -> None:
    case = CASES[name]
    async with router(case.writer) as one:
        whole = await one.stream(case.path, case.body)
        id_ = whole[0].data["response"]["id"]
        assert data(await again(one, id_)) == data(whole)
        for number in range(len(whole)):
            assert data(await again(one, id_, starting_after=number)) == data(whole)[number + 1 :]
        assert [each.raw.splitlines()[1:] for each in whole] == [
            each.raw.splitlines() for each in await again(one, id_)
        ]


@pytest.mark.parametrize("name", STORED)
async def test_a_response_whose_stream_was_resumed_has_the_same_events(name: str) -> None:
    case = CASES[name]
    async with router(case.writer) as one, router(case.writer, pace=9) as other:
        whole = await one.stream(case.path, case.body)
        await other.stream(case.path, case.body, whole[len(whole) // 2].id)
        id_, last = whole[0].data["response"]["id"], data(whole)[-1]
        stored = data(await again(other, id_))
        assert stored[:-1] == data(whole)[:-1]
        assert stored[-1]["response"]["output"] == last["response"]["output"]


async def test_a_response_that_was_not_streamed_has_events_too() -> None:
    case: Case = CASES["response, reasoning"]
    async with router(case.writer) as one:
        reply = await one.post(case.path, {**case.body, "stream": False})
        events = await again(one, reply.json()["id"])
        assert events[-1].data["response"] == reply.json()
        pieces = [each for each in data(events) if each["type"] == "response.output_text.delta"]
        (text,) = [each["text"] for each in data(events) if each["type"] == "response.output_text.done"]
        assert "".join(each["delta"] for each in pieces) == text != ""


async def test_what_is_not_stored_and_what_is_not_streamed_is_refused() -> None:
    case = CASES["response"]
    async with router(Writer("Hello")) as one:
        refused = await one.http.get(f"{RESPONSES}/resp_0", params={"stream": "true"})
        assert refused.status_code == 404
        id_ = (await one.stream(case.path, case.body))[0].data["response"]["id"]
        reply: httpx.Response = await one.http.get(f"{RESPONSES}/{id_}", params={"starting_after": 1})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "starting_after")
        reply = await one.http.get(f"{RESPONSES}/{id_}", params={"stream": "true", "starting_after": -1})
        assert reply.status_code == 400
