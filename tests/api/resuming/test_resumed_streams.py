"""`stream-is-prefix`: what a client gets over all connections is one sequence, each position once."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from openai import _streaming as openai_streaming

from baton.api.http.event_stream import PLAIN
from baton.api.resuming.stream_position import parse_position
from baton.rooms.request import Request
from tests.api.resuming.cases import CASES, CHAT, Case, chat
from tests.api.resuming.routers import LIMITS, Event, Writer, router
from tests.api.scripted import STOP, Step, batch
from tests.support.joined_texts import join_texts

FOX = "The quick brown fox jumps over the lazy dog."
TIMED = {"completed_at"}
"""Fields of events that have the time of an event and are not part of the sequence."""


def shown(events: Sequence[Event]) -> dict[Any, list[Any]]:
    """Return the events of each choice, and those of no choice, in order. Text that came in several events is
    joined."""
    own: dict[Any, list[Any]] = {}
    for event in events:
        choices = event.data.get("choices") if isinstance(event.data, dict) else None
        own.setdefault(choices[0]["index"] if choices else None, []).append(timeless(event.data))
    return {choice: join_texts(of_choice) for choice, of_choice in own.items()}


def timeless(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    return {key: timeless(value) for key, value in data.items() if key not in TIMED}


def joined(*parts: Sequence[Event]) -> list[Event]:
    return [event for part in parts for event in part]


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_goes_on_behind_each_of_its_events(name: str) -> None:
    case = CASES[name]
    async with router(case.writer) as first, router(case.writer, pace=99, later_s=86_399) as second:
        whole = await first.stream(case.path, case.body)
        assert all(event.id for event in whole)
        assert len({event.id for event in whole}) == len(whole), "each event has its own id"
        for place, event in enumerate(whole):
            rest = await second.stream(case.path, case.body, event.id)
            assert shown(joined(whole[: place + 1], rest)) == shown(whole), f"behind event {place}"
            assert {each.id for each in rest}.isdisjoint(each.id for each in whole[: place + 1])
            assert not rest or rest[-1].id == whole[-1].id


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_goes_on_as_often_as_it_breaks(name: str) -> None:
    case = CASES[name]
    rng = random.Random(name)
    async with router(case.writer) as first, router(case.writer, pace=99, later_s=5) as second:
        whole = await first.stream(case.path, case.body)
        got, after = list[Event](), ""
        for connection in range(6):
            routers = second, first
            events = whole if not after else await routers[connection % 2].stream(case.path, case.body, after)
            if not events:
                break
            cut = rng.randint(1, max(1, len(events) // 2))
            got += events[:cut]
            after = events[cut - 1].id
        got += await second.stream(case.path, case.body, after)
        assert shown(got) == shown(whole)
        assert len({event.id for event in got}) == len(got)


def together(request: Request, writer: Writer, count: int) -> list[Step]:
    """Return an answer whose tokens come `count` at a time."""
    ids = writer.draw(request, 0)
    last = len(ids) - count
    return [
        batch(ids[at : at + count], STOP if at >= last else None, request.sampling.top_logprobs)
        for at in range(0, len(ids), count)
    ]


def tokens_sent(event: Event) -> int:
    """Return the number of tokens that the position in an event's id counts."""
    position = parse_position(event.id.split(".")[1])
    assert position is not None
    return position.choices[0].tokens


@pytest.mark.parametrize(
    ("text", "fields", "positions"),
    [
        (FOX, {}, [0, 1, 8, 11, 12, 12]),
        (FOX, {"stop": ["never"]}, [0, 1, 8, 11, 12, 12]),
        (f"<think>{FOX}", {}, [1, 8, 16, 18, 19, 19]),
        (FOX, {"logprobs": True, "top_logprobs": 1}, [*range(13), 12]),
        (FOX, {"return_token_ids": True}, [*range(13), 12]),
    ],
    ids=["text", "stop string", "reasoning", "log-probabilities", "token ids"],
)
async def test_text_that_comes_together_shares_an_event(
    text: str, fields: dict[str, Any], positions: Sequence[int]
) -> None:
    """So a worker's report of eight tokens costs a router one id, not eight."""
    writer = Writer(text)
    case = chat(writer, **fields)
    async with router(writer) as one, router(writer) as other:
        one.backend.script = lambda request: together(request, writer, 8)
        other.backend.script = lambda request: together(request, writer, 3)
        whole = await one.stream(case.path, case.body)
        assert [*map(tokens_sent, whole)] == positions
        for place, event in enumerate(whole):
            rest = await other.stream(case.path, case.body, event.id)
            assert shown(joined(whole[: place + 1], rest)) == shown(whole), f"behind event {place}"


async def test_a_new_request_draws_anew() -> None:
    """The sweep would hold for a server without seeds, too."""
    case = CASES["chat"]
    async with router(case.writer) as one:
        first, second = [await one.stream(case.path, case.body) for _ in range(2)]
        assert [each.data for each in first[1:]] != [each.data for each in second[1:]]


async def test_the_ids_of_tool_calls_stay() -> None:
    case = CASES["chat, tools, n=2"]
    async with router(case.writer) as one, router(case.writer, pace=5) as other:
        whole = await one.stream(case.path, case.body)
        rest = await other.stream(case.path, case.body, whole[0].id)
        ids = [call_ids(events) for events in (whole, rest)]
        assert ids[0] == ids[1]
        assert len(ids[0]) == 4, "two calls of two choices"


def call_ids(events: Sequence[Event]) -> set[str]:
    return {
        call["id"]
        for event in events
        if isinstance(event.data, dict)
        for choice in event.data["choices"]
        for call in choice["delta"].get("tool_calls", ())
        if "id" in call
    }


async def test_an_answer_keeps_the_length_that_it_was_begun_with() -> None:
    """Without `max_tokens`, an answer is as long as fits the workers of the time."""
    writer = Writer(tokens=400)
    case = chat(writer)
    small = replace(LIMITS, sequence_tokens=60, sequence_tokens_now=60)
    async with router(writer, limits=small) as first, router(writer, pace=5) as second:
        whole = await first.stream(case.path, case.body)
        rest = await second.stream(case.path, case.body, whole[3].id)
        assert shown(joined(whole[:4], rest)) == shown(whole)
        assert second.backend.asked[-1].max_tokens == first.backend.asked[-1].max_tokens < 60


async def test_a_resumed_request_has_the_id_of_the_first() -> None:
    case = CASES["chat"]
    async with router(case.writer) as first, router(case.writer) as second:
        whole = await first.stream(case.path, case.body)
        reply = await second.post(case.path, case.body, whole[2].id, **{"x-request-id": "another"})
        own = first.backend.asked[-1].request_id
        assert reply.headers["x-request-id"] == second.backend.asked[-1].request_id == own
        assert first.backend.asked[-1].sampling.seed == second.backend.asked[-1].sampling.seed


async def test_a_first_request_that_is_still_open_goes_on_beside_the_resumed_one() -> None:
    case = CASES["chat"]
    async with router(case.writer) as one:
        whole_script, goes_on = one.backend.script, asyncio.Event()

        def stuck(request: Request) -> list[Step]:
            first, *rest = steps_of(whole_script(request))
            return [first, goes_on, *rest]

        whole = await one.stream(case.path, case.body)
        one.backend.script = stuck
        first = asyncio.create_task(one.stream(case.path, case.body, whole[0].id))
        while len(one.backend.streams) < 2:
            await asyncio.sleep(0)
        one.backend.script = whole_script
        rest = await one.stream(case.path, case.body, whole[4].id)
        assert shown(joined(whole[:5], rest)) == shown(whole)
        assert not first.done()
        goes_on.set()
        assert shown(joined(whole[:1], await first)) == shown(whole)
        assert not one.backend.left_open
        assert [each.hangups for each in one.backend.streams] == [[], [], []]


async def test_a_client_that_has_the_whole_stream_gets_an_empty_one() -> None:
    case = CASES["chat"]
    async with router(case.writer) as one:
        whole = await one.stream(case.path, case.body)
        asked = len(one.backend.asked)
        assert await one.stream(case.path, case.body, whole[-1].id) == []
        assert len(one.backend.asked) == asked, "nothing is computed"


async def test_ids_are_left_out_for_clients_that_cannot_read_them() -> None:
    case = CASES["chat"]
    async with router(case.writer) as one:
        events = await one.stream(case.path, {**case.body, "event_ids": False})
        assert len(events) > 5
        assert all(event.raw.startswith("data: ") for event in events)


async def test_load_generators_that_take_an_event_for_a_line_get_no_ids() -> None:
    aiohttp = {"user-agent": "Python/3.12 aiohttp/3.13.2"}
    async with router(CASES["chat"].writer) as one:
        for name in ("chat", "completion"):
            case = CASES[name]
            plain = await one.stream(case.path, case.body, **aiohttp)
            assert all(event.raw.startswith("data: ") for event in plain)
            asked = await one.stream(case.path, {**case.body, "event_ids": True}, **aiohttp)
            assert all(event.id for event in asked)
            assert await one.stream(case.path, {**case.body, "event_ids": True}, asked[3].id, **aiohttp)
        case = CASES["message"]
        assert all(event.id for event in await one.stream(case.path, case.body, **aiohttp))


async def test_an_answer_that_differs_is_not_continued() -> None:
    """Workers whose arithmetic is another one may draw another token. The client is told so."""
    first_writer, other_writer = Writer("The quick brown fox jumps"), Writer("The quick red fox jumps")
    case = chat(first_writer)
    async with router(first_writer) as first, router(other_writer) as second:
        whole = await first.stream(case.path, case.body)
        outcomes = [await second.post(case.path, case.body, event.id) for event in whole[:-1]]
        codes = [reply.status_code for reply in outcomes]
        assert codes[0] == 200, "nothing was shown yet"
        assert codes[-1] == 400
        assert codes == sorted(codes)
        assert outcomes[-1].json()["error"]["code"] == "answer_differs"


async def test_a_stream_that_fails_can_be_continued() -> None:
    """The event with the error has no id, so the last id is that of the last event of the answer."""
    case: Case = chat(Writer("The quick brown fox jumps over the dog"))
    async with router(case.writer) as one:
        whole_script = one.backend.script
        one.backend.script = lambda request: [*steps_of(whole_script(request))[:2], RuntimeError("lost")]
        cut = await one.stream(CHAT, case.body)
        assert [bool(event.id) for event in cut] == [True] * (len(cut) - 1) + [False]
        assert "error" in cut[-1].data
        one.backend.script = whole_script
        rest = await one.stream(CHAT, case.body, cut[-2].id)
        text = "".join(
            event.data["choices"][0]["delta"].get("content", "") for event in joined(cut[:-1], rest[:-1])
        )
        assert text == "The quick brown fox jumps over the dog"


def steps_of(script: Any) -> list[Step]:
    return list(script)


def test_a_keep_alive_is_no_event_behind_an_id() -> None:
    """OpenAI's client takes an empty line behind an id for an event without data."""
    decoder = openai_streaming.SSEDecoder()
    stream = [b'id: 1\ndata: {"a":1}\n\n', PLAIN.keep_alive, b'id: 2\ndata: {"a":2}\n\n']
    assert [event.data for event in decoder.iter_bytes(iter(stream))] == ['{"a":1}', '{"a":2}']
