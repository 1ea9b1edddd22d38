"""Tests of the bootstrap's admin routes: readiness, timelines, metrics and the weights of processes."""

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.bootstrap.admin_routes import admin_router, probe_router
from baton.ids import Incarnation, RoomId
from baton.rooms.phases import Side
from baton.rooms.timeline import Moment
from baton.rooms.worker_facts import OtherSide
from tests.api import tiny
from tests.api.scripted import ScriptedBackend
from tests.bootstrap.scripted import House, house


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house() as made:
        yield made


def client(at: House, problem: str | None = None) -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(probe_router(at.registry, lambda: problem))
    app.include_router(admin_router(at.registry, at.metrics, at.rooms.weigh))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bootstrap")


async def test_ready_names_the_side_that_is_missing_and_why(at: House) -> None:
    async with client(at, "prefill-1 and decode-0: no answer") as http:
        assert (await http.get("/health")).status_code == 200
        reply = await http.get("/ready")
        assert reply.status_code == 200, "a worker more than there are, that does not get ready"
        assert reply.json()["canary"] == "prefill-1 and decode-0: no answer"
        assert reply.json()["problems"] == []
        at.rooms.lose(at.prefill.incarnation, "gone", proof="left")
        reply = await http.get("/ready")
    assert reply.status_code == 503
    assert reply.json()["problems"] == ["no prefill worker is ready"]
    assert reply.json()["canary"] == "prefill-1 and decode-0: no answer"
    assert [worker["name"] for worker in reply.json()["workers"]] == ["decode-0"]


async def test_a_process_that_serves_both_sides_is_given_a_weight(at: House) -> None:
    first, second = Incarnation(31), Incarnation(32)
    for side, mine, other in ((Side.PREFILL, first, second), (Side.DECODE, second, first)):
        facts = at.registry.worker(at.prefill.incarnation).facts
        name = f"worker-0-{side.value}"
        twin = OtherSide(other, "worker-0")
        at.rooms.register(replace(facts, name=name, side=side, incarnation=mine, other_side=twin))
    async with client(at) as http:
        reply = await http.put("/workers/worker-0?prefill_weight=70")
        assert reply.json() == {"process": "worker-0", "prefill_weight": 70, "decode_weight": 30}
        listed = {each["name"]: each for each in (await http.get("/ready")).json()["workers"]}
        assert [listed[f"worker-0-{side.value}"]["weight"] for side in Side] == [70, 30]
        assert listed["prefill-0"]["process"] is None
        gone = await http.put("/workers/prefill-0?prefill_weight=70")
        assert gone.status_code == 404
        assert gone.json()["error"]["message"] == "no process called 'prefill-0' serves both sides here"
        for odd in ("a b", "%1b[31m", "x" * 5_000):
            reply = await http.put(f"/workers/{odd}?prefill_weight=70")
            assert reply.status_code == 404
            assert len(reply.text) < 400
        for wrong in ("prefill_weight=101", "prefill_weight=-1", "prefill_weight=most", ""):
            reply = await http.put(f"/workers/worker-0?{wrong}", json={"prefill_weight": 20})
            assert reply.status_code == 422, wrong
    assert [at.registry.worker(each).weight for each in (first, second)] == [70, 30]


async def test_a_probe_that_is_told_no_is_no_failed_request_whoever_asks(at: House) -> None:
    registry = CollectorRegistry()

    def counted() -> dict[tuple[str, str], float]:
        return {
            (sample.labels["route"], sample.labels["status"]): sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "baton_http_requests_total" and sample.value
        }

    router = probe_router(at.registry, lambda: None)
    app = create_app(ScriptedBackend(), tiny.model(), registry, routers=[router])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://bootstrap") as http:
        assert (await http.get("/ready")).status_code == (await http.get("/health")).status_code == 200
        ping = await http.get("/ping")
        assert (ping.status_code, ping.content) == (200, b"")
        at.rooms.lose(at.prefill.incarnation, "gone", proof="left")
        assert (await http.get("/ready")).status_code == (await http.get("/ping")).status_code == 503
        assert counted() == {}
        assert (await http.post("/ready")).status_code == 405
        assert list(counted().values()) == [1], "a mistake is counted"


async def test_a_rooms_page_is_its_timeline_with_its_id_as_text(at: House) -> None:
    entry = await at.admission.admit("request-1", 3, 5)
    at.rooms.timelines.report(entry.id, Moment.BROKEN_OFF, "closely")
    async with client(at) as http:
        page = (await http.get(f"/rooms/{entry.id}")).json()
        listed = (await http.get("/rooms", params={"request_id": "request-1"})).json()["rooms"]
        none = (await http.get("/rooms", params={"request_id": "request"})).json()["rooms"]
    assert page["id"] == str(entry.id)
    assert [event["name"] for event in page["events"]] == ["opened", "broken off"]
    assert [room["id"] for room in listed] == [str(entry.id)]
    assert none == []


@pytest.mark.parametrize("text", ["2", "-1", "x", "1_0", "+1", " 1", "9" * 5000, "١", "1.0", "0x1"])
async def test_what_is_no_rooms_id_is_not_found_in_few_words(at: House, text: str) -> None:
    await at.admission.admit("request-1", 3, 5)
    async with client(at) as http:
        reply = await http.get(f"/rooms/{text}")
    assert reply.status_code == 404
    assert "is not known" in reply.json()["error"]["message"]
    assert len(reply.text) < 200


async def test_gauges_follow_the_registry_back_to_zero(at: House) -> None:
    async def gauge(name: str) -> float:
        async with client(at) as http:
            lines = (await http.get("/metrics")).text.splitlines()
        return float(next(line for line in lines if line.startswith(name)).split()[-1])

    await at.admission.admit("request-1", 3, 5)
    assert await gauge('baton_rooms{phase="open"}') == 1
    assert await gauge('baton_workers{side="decode",state="ready"}') == 1
    at.rooms.answered(RoomId(1))
    assert await gauge('baton_rooms{phase="closing"}') == 1
    at.retired(1)
    assert await gauge('baton_rooms{phase="open"}') == await gauge('baton_rooms{phase="closing"}') == 0
    assert await gauge('baton_admission_queue_requests{class="default"}') == 0


async def test_a_scraper_may_name_the_series_that_it_wants(at: House) -> None:
    names = ["vllm:num_requests_waiting", "baton_rooms"]
    async with client(at) as http:
        text = (await http.get("/metrics", params={"name[]": names})).text
        many = await http.get("/metrics", params={"name[]": ["baton_rooms"] * 65})
    series = {line.partition("{")[0] for line in text.splitlines() if not line.startswith("#")}
    assert series == set(names)
    assert many.status_code == 422
