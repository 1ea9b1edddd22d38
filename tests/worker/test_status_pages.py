"""Tests of a worker's health endpoints: started, live and ready."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from prometheus_client import CollectorRegistry

from baton.decode.settings import DecodeSettings
from baton.prefill.settings import PrefillSettings
from baton.runtime.settings import load
from baton.worker.lifecycle.status_pages import STUCK_MS, StatusPages
from baton.worker.step_thread import STEP_MS
from baton.worker.turn_loop import TurnProgress
from tests.support.manual_clock import ManualClock


@dataclass
class Worker:
    pages: StatusPages
    http: httpx.AsyncClient
    clock: ManualClock
    progress: TurnProgress
    problem: str | None = "still starting"

    async def codes(self) -> dict[str, int]:
        return {
            page: (await self.http.get(f"/{page}")).status_code for page in ("started", "health", "ready")
        }


@asynccontextmanager
async def worker() -> AsyncIterator[Worker]:
    pages = StatusPages(load(PrefillSettings, {"name": "prefill-0"}, {}))
    clock = ManualClock()
    progress = TurnProgress(clock)
    told: list[Worker] = []
    await pages.start(CollectorRegistry(), lambda: told[0].problem, progress)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{pages.port}", trust_env=False) as http:
            told.append(Worker(pages, http, clock, progress))
            yield told[0]
    finally:
        await pages.stop()


async def test_a_long_start_is_no_hang_and_the_first_turn_ends_it() -> None:
    async with worker() as at:
        at.clock.advance(10 * STUCK_MS)
        assert await at.codes() == {"started": 503, "health": 200, "ready": 503}
        at.progress.ended(free=True)
        assert await at.codes() == {"started": 200, "health": 200, "ready": 503}


async def test_turns_that_stop_are_unhealthy_and_a_missing_lease_is_not() -> None:
    async with worker() as at:
        at.progress.ended(free=True)
        at.problem = "bootstrap unreachable"
        at.clock.advance(STUCK_MS)
        assert await at.codes() == {"started": 200, "health": 200, "ready": 503}
        at.clock.advance(1)
        assert (await at.http.get("/health")).json()["problems"] == [
            f"no turn has ended for {STUCK_MS + 1} ms"
        ]
        at.problem = None
        assert await at.codes() == {"started": 200, "health": 503, "ready": 200}
        at.progress.ended(free=True)
        assert await at.codes() == {"started": 200, "health": 200, "ready": 200}


async def test_honest_health_each_side_of_a_process_tells_what_is_wrong_with_either() -> None:
    async with worker() as at:
        other = StatusPages(load(DecodeSettings, {"name": "decode-0"}, {}))
        at.pages.share_problems(other)
        at.progress.ended(free=True)
        at.problem = None
        assert await at.codes() == {"started": 503, "health": 200, "ready": 503}
        assert (await at.http.get("/ready")).json()["problems"] == ["decode side: still starting"]
        progress = TurnProgress(at.clock)
        await other.start(CollectorRegistry(), lambda: None, progress)
        try:
            assert await at.codes() == {"started": 503, "health": 200, "ready": 200}
            progress.ended(free=True)
            assert await at.codes() == {"started": 200, "health": 200, "ready": 200}
            at.clock.advance(STUCK_MS + 1)
            at.progress.ended(free=True)
            told = (await at.http.get("/health")).json()["problems"]
            assert told == [f"decode side: no turn has ended for {STUCK_MS + 1} ms"]
        finally:
            await other.stop()


async def test_a_step_that_does_not_end_is_unhealthy_though_turns_go_on_beside_it() -> None:
    async with worker() as at:
        at.progress.ended(free=True)
        for _ in range(STEP_MS // STUCK_MS):
            at.clock.advance(STUCK_MS)
            at.progress.ended(free=False)
        assert (await at.http.get("/health")).status_code == 200
        at.clock.advance(1)
        at.progress.ended(free=False)
        problems = (await at.http.get("/health")).json()["problems"]
        assert problems == [f"a step has been running for {STEP_MS + 1} ms"]
        at.progress.ended(free=True)
        assert (await at.http.get("/health")).status_code == 200
