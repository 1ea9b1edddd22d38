"""Tests of a request's timeline: all rooms, lanes on one clock, causes, and what the client received."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from baton.api.backend import Hangup, NoWorker
from baton.bootstrap.admission.placement_request import Retry
from baton.bootstrap.timeline import retry_chains
from baton.bootstrap.timeline.routes import FILES, PAGE, page_router, timeline_router
from baton.bootstrap.timeline.timeline_schema import Activity, State
from baton.fleet.need import Need
from baton.fleet.room_entry import RoomEntry
from baton.fleet.room_table import CANARY_ROOMS_FILED_MAX
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.timeline import Event, Moment
from baton.rooms.worker_load import WorkerLoad
from baton.topology import Topology
from baton.wire.baton.v1 import rooms_pb2
from baton.wire.event_messages import event_from_wire
from tests.bootstrap.scripted import House, asked, house
from tests.wire.servers import until

MANY = 600
"""Rooms kept: many more than a page shows."""


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house() as made:
        yield made


def client(at: House) -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(timeline_router(at.rooms, at.peers))
    app.include_router(page_router())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bootstrap")


async def story(at: House, name: str) -> Any:
    async with client(at) as http:
        reply = await http.get(f"/requests/{name}")
    assert reply.status_code == 200, reply.text
    return reply.json()


def say(at: House, source: str, name: str, detail: str = "", *, behind_ms: int = 0, room: int = 1) -> None:
    """Report one line of a worker, 10 ms after the last one. `behind_ms`: by how much the host's clocks are
    behind."""
    at.clock.advance(10)
    host_us = (at.clock.now_ms() + 10**6 * bool(behind_ms)) * 1000
    event = Event(at.clock.wall_ms() - behind_ms, source, name, detail, host_us)
    at.rooms.timelines.record(RoomId(room), event)


def hand_over(at: House, behind_ms: int = 0) -> None:
    """Report the lines of a room that is handed over, each 10 ms after the one before."""
    for source, name in (
        ("prefill-0", "accepted"),
        ("decode-0", "accepted"),
        ("decode-0", "connected"),
        ("decode-0", "granted"),
        ("prefill-0", "destination known"),
        ("prefill-0", "computing"),
        ("prefill-0", "first token"),
    ):
        say(at, source, name, behind_ms=behind_ms if source == "decode-0" else 0)
    at.clock.advance(10)
    at.rooms.timelines.report(RoomId(1), Moment.FIRST_TOKEN_PASSED_ON)
    at.registry.mark_streaming(RoomId(1))
    for source, name in (
        ("prefill-0", "written"),
        ("prefill-0", "sealed"),
        ("decode-0", "landed"),
        ("decode-0", "admitted"),
        ("decode-0", "finished"),
    ):
        say(at, source, name, behind_ms=behind_ms if source == "decode-0" else 0)


async def test_a_request_that_was_answered_has_lanes_bars_links_and_stages(at: House) -> None:
    await at.admission.admit("request-1", 3, 5)
    hand_over(at)
    at.clock.advance(10)
    at.rooms.answered(RoomId(1), "5 tokens passed on")
    for source in ("prefill-0", "decode-0"):
        say(at, source, "retired")
    at.retired()
    told = await story(at, "request-1")
    assert told["state"] == "answered"
    assert told["headline"] == ("Answered in 140 ms; the first token came after 80 ms; 5 tokens passed on.")
    assert [lane["id"] for lane in told["lanes"]] == ["client", "bootstrap", "prefill-0", "decode-0"]
    bars = {(bar["lane"], bar["doing"]): (bar["from_ms"], bar["to_ms"]) for bar in told["bars"]}
    assert bars["client", "wait"] == (0, 80)
    assert bars["client", "stream"] == (80, 140)
    assert bars["prefill-0", "compute"] == (60, 70)
    assert bars["decode-0", "transfer"] == (40, 110)
    assert bars["decode-0", "stream"] == (120, 130)
    stages = [(stage["text"], stage["ms"]) for stage in told["stages"] if stage["first_token"]]
    assert sum(ms for _, ms in stages) == told["first_token_ms"] == 80
    assert {link["text"] for link in told["links"]} >= {"destination", "pages and seal", "first token"}
    kinds = {line["name"]: line["kind"] for line in told["lines"]}
    assert (kinds["landed"], kinds["sealed"], kinds["first token"]) == ("evidence", "seal", "token")


async def test_what_was_read_before_its_sender_noted_it_goes_nowhere_backwards(at: House) -> None:
    await at.admission.admit("request-1", 3, 5)
    for source, name in (("prefill-0", "computing"), ("decode-0", "landed"), ("prefill-0", "sealed")):
        say(at, source, name)
    (link,) = [each for each in (await story(at, "request-1"))["links"] if each["text"] == "pages and seal"]
    assert link["from_ms"] == link["to_ms"]


async def test_lines_of_another_host_are_moved_behind_what_caused_them(at: House) -> None:
    await at.admission.admit("request-1", 3, 5)
    hand_over(at, behind_ms=5_000)
    told = await story(at, "request-1")
    lanes = {lane["id"]: lane["clock"] for lane in told["lanes"]}
    assert lanes == {"client": "host", "bootstrap": "host", "prefill-0": "host", "decode-0": "wall"}
    assert told["lines"][0]["name"] == "opened"
    assert all(line["at_ms"] >= 0 for line in told["lines"])
    decode = [line["at_ms"] for line in told["lines"] if line["lane"] == "decode-0"]
    assert [round(each - decode[0]) for each in decode] == [0, 10, 20, 90, 100, 110]


async def test_all_rooms_of_a_retried_request_are_one_story_under_any_of_its_ids(at: House) -> None:
    first = await at.admission.admit("request-1", 3, 5)
    hand_over(at)
    at.clock.advance(10)
    at.rooms.fail(first.id, Cause(Reason.DECODE_LOST, "decode worker decode-0: it has left"))
    at.clock.advance(50)
    retry = Retry(first.id, Reason.DECODE_LOST, frozenset(), 0.0)
    second = await at.admission.admit("request-1", 3, 5, retry)
    assert (await story(at, "request-1"))["state"] == "streaming"
    at.clock.advance(30)
    at.rooms.timelines.report(second.id, Moment.FIRST_TOKEN_PASSED_ON)
    at.clock.advance(5)
    at.rooms.answered(second.id)
    for asked_for in ("request-1", "chatcmpl-request-1", str(first.id), str(second.id)):
        told = await story(at, asked_for)
        assert [attempt["room"] for attempt in told["attempts"]] == [str(first.id), str(second.id)]
    assert told["attempts"][0]["cause"]["reason"] == "decode_lost"
    assert told["cause"] is None
    async with client(at) as http:
        listed = (await http.get("/requests")).json()["requests"]
        failed = (await http.get("/requests", params={"failed": "true"})).json()["requests"]
    assert [(each["room"], each["rooms"], each["state"]) for each in listed] == [("2", 2, "answered")]
    assert failed == [], "in the end it did not fail"
    assert "A room failed before this one" in told["headline"]
    client_saw = [
        (bar["doing"], bar["to_ms"] - bar["from_ms"]) for bar in told["bars"] if bar["lane"] == "client"
    ]
    assert client_saw == [("wait", 80), ("stream", 60), ("stall", 80), ("stream", 5)]


RETRACTED = Cause(Reason.RETRACTED, "3 pages are needed by rooms that are older")


async def retract(at: House, room: int = 1) -> None:
    """Retract the room 20 ms after its first token was passed on. The request then waits."""
    at.clock.advance(20)
    say(at, "decode-0", "retracted", room=room)
    at.rooms.follow(RoomId(room), lambda _: None)
    at.rooms.fail(RoomId(room), RETRACTED)


async def goes_on(at: House, room: int) -> RoomEntry:
    retry = Retry(RoomId(room), Reason.RETRACTED, frozenset(), 0.0)
    return await at.admission.admit("request-1", 3, 5, retry)


async def test_retracted_is_no_failure_its_story_says_for_how_long_it_was_paused_and_why() -> None:
    async with house(places=9) as at:
        await at.admission.admit("request-1", 3, 5)
        hand_over(at)
        await retract(at)
        at.clock.advance(200)
        told = await story(at, "request-1")
        assert (told["state"], told["cause"]["reason"]) == ("paused", "retracted")
        async with client(at) as http:
            [listed] = (await http.get("/requests")).json()["requests"]
            failed = (await http.get("/requests", params={"failed": "true"})).json()["requests"]
        assert (listed["state"], listed["cause"], failed) == ("paused", "", [])
        second = await goes_on(at, 1)
        at.rooms.follow(second.id, lambda _: None)
        at.rooms.fail(second.id, RETRACTED)
        third = await goes_on(at, 2)
        assert (await story(at, "request-1"))["state"] == "streaming"
        at.clock.advance(1_000)
        at.rooms.timelines.report(third.id, Moment.FIRST_TOKEN_PASSED_ON)
        at.clock.advance(5)
        at.rooms.answered(third.id, "5 tokens passed on")
        told = await story(at, "request-1")
        assert (told["state"], told["cause"]) == ("answered", None)
        assert told["headline"].endswith("5 tokens passed on. Paused 1,200 ms: the worker needed its pages.")
        steps = [(each["room"], each["ms"]) for each in told["stages"] if each["text"].startswith("paused")]
        assert steps == [("1", 1_200)], "of the second room it is the same pause"
        assert "failure" not in {line["kind"] for line in told["lines"]}
        saw = [
            (bar["doing"], bar["to_ms"] - bar["from_ms"]) for bar in told["bars"] if bar["lane"] == "client"
        ]
        assert saw == [("wait", 80), ("stream", 80), ("pause", 1_200), ("stream", 5)]
        of_decode = [bar for bar in told["bars"] if bar["lane"] == "decode-0"]
        assert of_decode[-1]["doing"] == "close"


@pytest.mark.parametrize(
    ("word", "state", "cause"),
    [
        (Moment.GIVEN_UP, "gone", "retracted"),
        (Moment.NOT_RETRIED, "failed", "not retried"),
        (Moment.ANSWERED, "answered", None),
    ],
)
async def test_a_request_that_ends_while_it_is_paused_ends_as_the_bootstrap_says(
    at: House, word: Moment, state: str, cause: str | None
) -> None:
    await at.admission.admit("request-1", 3, 5)
    hand_over(at)
    await retract(at)
    at.clock.advance(300)
    at.rooms.timelines.report(RoomId(1), word, "no pair of workers had space in time")
    at.clock.advance(9_000)
    told = await story(at, "request-1")
    assert (told["state"], told["cause"] and told["cause"]["reason"]) == (state, cause)
    assert told["headline"].endswith("Paused 300 ms: the worker needed its pages.")
    async with client(at) as http:
        [listed] = (await http.get("/requests")).json()["requests"]
    assert (listed["state"], listed["reason"]) == (state, cause or "")
    if state == "failed":
        assert told["headline"].startswith("Failed after 460 ms: no pair of workers had space in time.")
        assert "in its time no pair" in told["cause"]["meaning"]


async def test_a_pause_lasts_until_each_choice_has_its_next_token() -> None:
    async with house(places=9) as at:
        await at.admission.admit("request-1", 3, 5, choices=2)
        hand_over(at)
        await retract(at)
        for ms in (100, 250):
            at.clock.advance(ms)
            entry = await goes_on(at, 1)
            at.rooms.timelines.report(entry.id, Moment.FIRST_TOKEN_PASSED_ON)
        told = await story(at, "request-1")
        assert [each["ms"] for each in told["stages"] if each["text"].startswith("paused")] == [350]


async def test_a_word_of_another_versions_worker_is_kept_and_shown_as_a_note(at: House) -> None:
    entry = await at.admission.admit("request-1", 3, 5)
    line = rooms_pb2.RoomEvent(wall_ms=at.clock.wall_ms(), name="stowed away", detail="on a shelf")
    at.rooms.timelines.record(entry.id, event_from_wire(line.SerializeToString(), "decode-0"))
    lines = (await story(at, "request-1"))["lines"]
    assert [(each["name"], each["detail"], each["kind"]) for each in lines if each["lane"] == "decode-0"] == [
        ("stowed away", "on a shelf", "note")
    ]


async def test_a_request_took_in_the_list_what_it_took_in_its_story(at: House) -> None:
    """The request's room failed at once. Its client was told later, when no other worker was found."""
    entry = await at.admission.admit("request-1", 3, 5)
    at.clock.advance(40)
    at.rooms.fail(entry.id, Cause(Reason.DECODE_LOST, "decode worker decode-0: gone"))
    at.clock.advance(15_000)
    at.rooms.timelines.report(entry.id, Moment.NOT_RETRIED, "no decode worker is ready")
    at.clock.advance(70_000)
    told = await story(at, "request-1")
    async with client(at) as http:
        [listed] = (await http.get("/requests")).json()["requests"]
    assert (listed["state"], listed["total_ms"]) == ("failed", 15_040)
    assert (told["state"], told["total_ms"]) == ("failed", 15_040)


async def test_while_another_room_is_looked_for_it_has_not_failed_yet(at: House) -> None:
    entry = await at.admission.admit("request-1", 3, 5)
    at.rooms.fail(entry.id, Cause(Reason.DECODE_LOST, "decode worker decode-0: gone"))
    assert (await story(at, "request-1"))["state"] == "failed"
    at.admission.retrying[entry.id] += 1
    told = await story(at, "request-1")
    assert told["state"] == "retrying"
    assert told["headline"].startswith("Its room failed, and it may go on in another: decode worker decode-0")


async def test_a_request_whose_choices_went_on_in_several_rooms_is_one_story() -> None:
    """The request is open while one of its rooms is. It fails with the cause of the room that failed by
    itself."""
    lost = Cause(Reason.DECODE_LOST, "decode worker decode-0: gone")
    async with house(places=9) as at:

        async def parted(name: str) -> tuple[RoomEntry, RoomEntry]:
            entry = await at.admission.admit(name, 3, 5, choices=3)
            at.rooms.fail(entry.id, lost)
            retry = Retry(entry.id, lost.reason, frozenset(), None)
            one = await at.admission.admit(name, 3, 5, retry, choices=2)
            return one, await at.admission.admit(name, 3, 5, retry)

        one, other = await parted("whole")
        at.registry.mark_streaming(one.id)
        at.rooms.answered(other.id, "2 tokens passed on")
        assert (await story(at, "whole"))["state"] == "streaming"
        at.clock.advance(10)
        at.rooms.answered(one.id, "4 tokens of 2 choices passed on")
        told = await story(at, "whole")
        assert (told["state"], told["total_ms"]) == ("answered", 10)
        assert "its choices ended in 2 rooms" in told["headline"]
        assert [each["room"] for each in told["attempts"]] == ["1", "3", "2"], "the last one ended last"
        assert told["others"] == []
        one, other = await parted("failed")
        at.rooms.fail(one.id, Cause(Reason.GRAMMAR_FAILED, "no token is allowed"))
        at.rooms.fail(other.id, Cause(Reason.CANCELLED, "another part of the request failed"))
        told = await story(at, "failed")
        assert (told["state"], told["cause"]["text"]) == ("failed", "no token is allowed")
        async with client(at) as http:
            listed = (await http.get("/requests")).json()["requests"]
        assert [each["request_id"] for each in listed] == ["failed", "whole"]
        for room in range(1, 7):
            at.retired(room)
        await at.at_rest()


async def test_a_dead_workers_part_ends_with_its_room(at: House) -> None:
    entry = await at.admission.admit("request-1", 3, 5)
    hand_over(at)
    at.clock.advance(7)
    at.rooms.lose(at.decode.incarnation, "its process exited", proof="exited")
    say(at, "prefill-0", "retired")
    at.retired()
    told = await story(at, "request-1")
    assert told["state"] == "failed"
    assert told["cause"]["text"] == "decode worker decode-0: its process exited"
    assert "log" in told["cause"]["meaning"]
    last = [bar for bar in told["bars"] if bar["lane"] == "decode-0"][-1]
    failed = next(line["at_ms"] for line in told["lines"] if line["name"] == "failed")
    assert last["to_ms"] == failed
    assert told["attempts"][0]["room"] == str(entry.id)


async def test_no_stage_is_longer_than_a_room_that_failed(at: House) -> None:
    """A worker that was paused reports what it does with the room when it goes on."""
    entry = await at.admission.admit("request-1", 3, 5)
    say(at, "decode-0", "accepted")
    at.clock.advance(2_000)
    at.rooms.fail(entry.id, Cause(Reason.PREFILL_LOST, "prefill worker prefill-0: its lease ran out"))
    at.clock.advance(9_000)
    for source, name in (
        ("decode-0", "granted"),
        ("prefill-0", "accepted"),
        ("prefill-0", "destination known"),
        ("prefill-0", "computing"),
    ):
        say(at, source, name)
    stages = {stage["text"]: stage["ms"] for stage in (await story(at, "request-1"))["stages"]}
    assert stages == {"prefill accepts": 2_010, "decode accepts": 10, "decode reserves pages": 2_000}


async def test_each_rank_has_a_lane_and_says_only_what_it_saw_itself(at: House) -> None:
    at.registry.worker(at.decode.incarnation)
    entry = await at.admission.admit("request-1", 3, 5)
    object.__setattr__(entry.decode, "topology", Topology(2))
    hand_over(at)
    say(at, "decode-0/1", "voted", "to go on from transferring; another rank does not yet")
    told = await story(at, "request-1")
    ranks = [lane for lane in told["lanes"] if lane["worker"] == "decode-0"]
    assert [(lane["id"], lane["rank"]) for lane in ranks] == [("decode-0", 0), ("decode-0/1", 1)]
    bars = [
        [(bar["from_ms"], bar["to_ms"]) for bar in told["bars"] if bar["lane"] == rank["id"]]
        for rank in ranks
    ]
    assert bars[0] == bars[1]
    vote = next(line for line in told["lines"] if line["kind"] == "vote")
    assert vote["lane"] == "decode-0/1"


async def test_a_client_that_hung_up_is_no_failure(at: House) -> None:
    stream = await at.backend.generate(asked())
    await stream.hang_up(Hangup.CLIENT_GONE)
    told = await story(at, "request-1")
    assert told["state"] == "gone"
    assert told["headline"].startswith("The client hung up after ")
    async with client(at) as http:
        failed = (await http.get("/requests", params={"failed": "true"})).json()["requests"]
    assert failed == []


async def test_what_placement_knows_of_a_worker_is_shown_once_it_has_said_its_load(at: House) -> None:
    at.rooms.update_load(at.decode.incarnation, WorkerLoad((100,), (30,), 2, 9, 64, RoomId(0)))
    await at.admission.admit("a", 3, 5)
    async with client(at) as http:
        prefill, decode = (await http.get("/workers")).json()["workers"]
    assert prefill["load"] is None
    shown = {"left_tokens": 65, "running": 9, "running_max": 64, "waiting": 2, "placed_since": 1}
    assert (decode["load"], decode["tokens"]) == (shown, 935)


async def test_a_request_that_got_no_room_is_kept_with_the_reason(at: House) -> None:
    at.rooms.lose(at.decode.incarnation, "gone", proof="left")
    with pytest.raises(NoWorker):
        await at.backend.generate(asked())
    told = await story(at, "request-1")
    assert (told["state"], told["cause"]["text"]) == ("refused", "no decode worker is ready")
    assert told["headline"] == "Refused with 503: no decode worker is ready, at once."
    async with client(at) as http:
        live = (await http.get("/live")).json()
    assert [each["request_id"] for each in live["failed"]] == ["request-1"]
    assert [each["name"] for each in live["lost"]] == ["decode-0"]


async def test_a_prompt_of_several_that_waits_or_was_refused_is_found_by_its_requests_id(at: House) -> None:
    await at.admission.admit("early", 3, 5)
    await at.admission.admit("early", 3, 5)
    waiting = asyncio.ensure_future(at.backend.generate(replace(asked(), request_id="several-0")))
    await until(lambda: at.admission.queued() == 1)
    assert (await story(at, "several"))["state"] == "queued"
    at.rooms.lose(at.decode.incarnation, "gone", proof="left")
    with pytest.raises(NoWorker):
        await waiting
    told = await story(at, "several")
    assert (told["request_id"], told["state"]) == ("several-0", "refused")


async def test_one_that_waits_for_its_next_room_is_listed_once(at: House) -> None:
    entry = await at.admission.admit("request-1", 3, 5)
    await at.admission.admit("request-2", 3, 5)
    retry = Retry(entry.id, Reason.ENGINE_FAILED, frozenset(), wait_s=600.0)
    waiting = asyncio.ensure_future(at.admission.admit("request-1", 3, 5, retry))
    await until(lambda: at.admission.queued() == 1)
    async with client(at) as http:
        listed = (await http.get("/live")).json()["requests"]
    assert sorted(each["request_id"] for each in listed) == ["request-1", "request-2"]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize(
    ("why", "state", "headline"),
    [
        (Hangup.CLIENT_GONE, "gone", "The client hung up while it waited"),
        (Hangup.REQUEST_FAILED, "refused", "Given up: another part of the request failed"),
    ],
)
async def test_one_that_is_cancelled_while_it_waits_is_told_with_the_true_reason(
    at: House, why: Hangup, state: str, headline: str
) -> None:
    for place in range(2):
        await at.admission.admit(f"early-{place}", 3, 5)
    waiting = asyncio.ensure_future(at.backend.generate(asked(), lambda: why))
    await until(lambda: at.admission.queued() == 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    told = await story(at, "request-1")
    assert told["state"] == state
    assert told["headline"].startswith(headline)
    async with client(at) as http:
        (listed,) = (await http.get("/requests", params={"search": "request-1"})).json()["requests"]
    assert (listed["state"], listed["reason"]) == (state, "499" if state == "gone" else "")


async def test_a_room_that_ends_with_another_prompt_of_its_request_is_no_hang_up(at: House) -> None:
    stream = await at.backend.generate(asked())
    await stream.hang_up(Hangup.REQUEST_FAILED)
    told = await story(at, "request-1")
    assert told["state"] == "failed"
    assert told["cause"]["text"] == "another part of the request failed"


async def test_an_id_means_its_newest_request_and_the_prompts_of_one(at: House) -> None:
    for name in ("again", "again", "several-0", "several-1", "several-x"):
        entry = await at.admission.admit(name, 3, 5)
        at.rooms.answered(entry.id)
        at.retired(entry.id)
    again = await story(at, "again")
    assert (again["attempts"][0]["room"], again["others"]) == ("2", ["1"])
    several = await story(at, "several")
    assert (several["request_id"], several["others"]) == ("several-1", ["3"])
    async with client(at) as http:
        assert (await http.get("/requests/sever")).status_code == 404
        for odd in ("9" * 30, "%00", "<script>", "a/b", "chatcmpl-", "١"):
            assert (await http.get(f"/requests/{odd}")).status_code == 404
        assert (await http.get("/requests", params={"search": "x" * 1000})).status_code == 422


async def test_the_live_picture_is_what_workers_told_last_and_is_bounded(at: House) -> None:
    for _ in range(80):
        entry = await at.admission.admit("request-1", 3, 5)
        at.rooms.answered(entry.id)
        at.retired(entry.id)
    at.rooms.renew(at.decode.incarnation, {"queues": {"running": 2}, "pages": {"free": 7}, "tokens": 100})
    at.clock.advance(2_000)
    at.rooms.renew(at.decode.incarnation, {"queues": {"running": 3}, "pages": {"free": 6}, "tokens": 150})
    async with client(at) as http:
        live = (await http.get("/live")).json()
        workers = (await http.get("/workers")).json()
    decode = live["workers"][1]
    assert (decode["name"], decode["state"], decode["queues"]) == ("decode-0", "ready", {"running": 3})
    assert (decode["pages"], decode["tokens_s"]) == ({"free": 6}, 25.0)
    assert live["workers"][0]["told_ms_ago"] is None
    assert len(live["requests"]) == 50
    assert len(json.dumps(live)) < 50_000
    assert workers["workers"] == live["workers"]


@pytest.mark.parametrize("every_one", ["answered", "failed", "failed and went on", "of one id", "a canary"])
async def test_a_look_at_the_pages_visits_no_more_rooms_however_many_are_kept(
    monkeypatch: pytest.MonkeyPatch, every_one: str
) -> None:
    looked_at: set[RoomId] = set()

    class Seen(RoomEntry):
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            looked_at.add(object.__getattribute__(self, "id"))
            return object.__getattribute__(self, name)

    monkeypatch.setattr("baton.fleet.registry.RoomEntry", Seen)
    async with house() as at:
        at.registry.done_max = at.registry.failed_max = MANY
        pair = (at.registry.worker(at.prefill.incarnation), at.registry.worker(at.decode.incarnation))
        last: RoomId | None = None
        for number in range(MANY):
            name = "same" if every_one == "of one id" else f"request-{number}x"
            failed = every_one.startswith("failed")
            before = last if every_one == "failed and went on" and number % 2 else None
            canary = every_one == "a canary"
            last = at.registry.open_room(name, pair, Need(5, 5), 0, canary=canary, retry_of=before).id
            at.registry.end(last, Cause(Reason.DECODE_LOST, "gone") if failed else None, 0)
            at.retired(last)
        assert at.registry.known_count() == (CANARY_ROOMS_FILED_MAX if every_one == "a canary" else MANY)
        visited = {}
        async with client(at) as http:
            for path in (
                "/live",
                "/requests",
                "/requests?failed=true",
                f"/requests/request-{MANY - 1}x",
                "/requests/same",
                "/requests/1",
                "/requests/none",
            ):
                looked_at.clear()
                reply = await http.get(path)
                assert reply.status_code in (200, 404)
                visited[path] = len(looked_at)
    assert max(visited.values()) <= 130, visited
    if every_one != "a canary":
        assert visited["/requests"] >= 50, "those that are listed are visited"


async def test_a_part_of_an_id_is_looked_for_in_the_newest_and_a_whole_one_everywhere(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_chains, "SEARCHED_MAX", 2)
    for name in ("old", "new-a", "new-b"):
        entry = await at.admission.admit(name, 3, 5)
        at.rooms.answered(entry.id)
        at.retired(entry.id)
    async with client(at) as http:
        found = [
            [each["request_id"] for each in (await http.get(f"/requests?search={part}")).json()["requests"]]
            for part in ("new", "ol")
        ]
    assert [sorted(each) for each in found] == [["new-a", "new-b"], []]
    assert (await story(at, "old"))["state"] == "answered"


async def test_a_request_whose_rooms_are_forgotten_is_not_found_and_leaves_nothing(at: House) -> None:
    for number in range(60):
        failed = await at.admission.admit(f"both-{number}", 3, 5)
        at.rooms.fail(failed.id, Cause(Reason.DECODE_LOST, "gone"))
        at.retired(failed.id)
        retry = Retry(failed.id, Reason.DECODE_LOST, frozenset(), 0.0)
        entry = await at.admission.admit(f"both-{number}", 3, 5, retry)
        at.rooms.answered(entry.id)
        at.retired(entry.id)
    async with client(at) as http:
        assert (await http.get("/requests/both-0")).status_code == 404
        assert (await http.get("/requests/both")).json()["request_id"] == "both-59"
        assert (await http.get("/requests?failed=true")).json()["requests"] == []
    index = at.registry.index
    kept = at.registry.known_count()
    assert kept == len(list(index.clients())) == len(list(index.of_request("both"))) == 100
    assert len(index.by_request) == len(index.continuations) == 50
    await at.unfollowed()


def test_the_page_makes_elements_and_text_and_never_markup() -> None:
    code = "".join(path.read_text() for path in PAGE.glob("*.js"))
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert word not in code
    page = (PAGE / "index.html").read_text()
    assert "http" not in page, "nothing is loaded from elsewhere"
    assert {path.name for path in PAGE.iterdir()} == {"index.html", *FILES}


def test_the_page_has_a_name_for_every_state_and_a_colour_for_whatever_is_done() -> None:
    code = "".join(path.read_text() for path in sorted(PAGE.iterdir()) if path.suffix in (".js", ".css"))
    for state in State:
        assert f"  {state.value}: [" in code, state
    for doing in Activity:
        assert f'["{doing.value}", "' in code, "in the legend"
        assert f".bar.{doing.value} {{" in code
        assert f".bar-sign.{doing.value} {{" in code


async def test_the_pages_files_are_served_and_may_load_nothing_from_elsewhere(at: House) -> None:
    async with client(at) as http:
        page = await http.get("/ui")
        style = await http.get("/ui/style.css")
        other = await http.get("/ui/..%2fhttp.py")
        unknown = await http.get("/ui/none.js")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert style.status_code == 200
    assert (other.status_code, unknown.status_code) == (404, 404)


async def test_a_browser_that_comes_in_at_the_top_is_sent_to_the_page(at: House) -> None:
    async with client(at) as http:
        reply = await http.get("/", headers={"Accept": "text/html,application/xhtml+xml"})
        assert (reply.status_code, reply.headers["location"]) == (307, "/ui")
        told = await http.get("/", headers={"Accept": "*/*"})
    assert told.status_code == 200, "agents and load balancers ask whether a server is there"


async def test_whoever_asks_for_a_refused_requests_id_is_told_that_it_may_have_been_refused(
    at: House,
) -> None:
    async with client(at) as http:
        told = await http.get("/requests/never-was")
    assert "refused as it came in never had a room" in told.json()["error"]["message"]


@pytest.mark.parametrize("alone", [False, True])
async def test_a_local_room_says_what_was_missing_and_where_its_time_went(at: House, alone: bool) -> None:
    why = "37 of 1,540 tokens are missing here: 95 ms, where prefill would take 820 ms"
    if alone:
        at.rooms.lose(at.decode.incarnation, "again", proof="left")
        at.rooms.lose(at.prefill.incarnation, "it has left", proof="left")
        at.decode.incarnation, at.decode.computes = Incarnation(23), True
        at.join(at.decode)
    entry = await at.admission.admit("request-1", 3, 5, may_be_local=True)
    at.registry.mark_local(entry.id)
    say(at, "decode-0", "accepted")
    say(at, "decode-0", "local", why)
    say(at, "decode-0", "computing")
    say(at, "decode-0", "admitted")
    at.clock.advance(10)
    at.rooms.timelines.report(RoomId(1), Moment.FIRST_TOKEN_PASSED_ON)
    at.registry.mark_streaming(RoomId(1))
    at.rooms.answered(RoomId(1), "5 tokens passed on")
    at.retired()
    told = await story(at, "request-1")
    assert told["headline"] == (
        "Answered in 50.0 ms; the first token came after 50.0 ms; 5 tokens passed on."
        f" Decode computed its prompt: {why}."
    ).replace("50.0", "50")
    stages = [(stage["text"], stage["ms"]) for stage in told["stages"] if stage["first_token"]]
    assert stages == [
        ("decode accepts", 10),
        ("decode takes it as its own", 10),
        ("waits for pages", 10),
        ("decode computes the prompt", 10),
        ("first token to the bootstrap", 10),
    ]
    bars = {(bar["lane"], bar["doing"]): (bar["from_ms"], bar["to_ms"]) for bar in told["bars"]}
    assert bars["decode-0", "compute"] == (30, 40)
    [attempt] = told["attempts"]
    assert (attempt["prefill"], attempt["decode"]) == ("" if alone else "prefill-0", "decode-0")


async def test_a_prefill_worker_shows_when_it_will_have_computed_what_is_there(at: House) -> None:
    load = WorkerLoad((), (), 0, 0, 0, RoomId(0), 1, tokens_waiting=500, tokens_per_s=1_000)
    at.rooms.update_load(at.prefill.incarnation, load)
    await at.admission.admit("request-1", 3, 5)
    async with client(at) as http:
        workers = (await http.get("/workers")).json()["workers"]
    [shown] = [each["load"] for each in workers if each["side"] == "prefill"]
    assert shown == {"tokens_waiting": 500, "tokens_per_s": 1_000, "left_ms": 503, "placed_since": 1}
