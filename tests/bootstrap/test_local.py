"""Tests of rooms whose prompt the decode worker computes itself: they go on without prefill, and no failure
is counted."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from baton.api.backend import Hangup, NoWorker
from baton.bootstrap.admin_routes import probe_router
from baton.bootstrap.canary import ALONE_MS, Canary
from baton.fleet.need import Need
from baton.fleet.pair_health import BROKEN_AFTER
from baton.fleet.room_entry import RoomPhase
from baton.fleet.worker_record import WorkerState
from baton.ids import Incarnation, RoomId
from baton.pages.block_hashes import BLOCK_TOKENS, hash_blocks
from baton.rooms.errors import Cause, NoneReady, Reason
from baton.rooms.request import Request, Sampling
from baton.wire.baton.v1 import rooms_pb2
from baton.wire.load_messages import load_from_wire
from tests.bootstrap.scripted import (
    CANARY,
    LENGTH,
    D,
    House,
    P,
    PrefillWorker,
    accepted,
    asked,
    ended,
    first,
    house,
    read,
    tokens,
)
from tests.wire.servers import until

LOCAL = Cause(Reason.LOCAL, "decode-0 computes it itself")
HANDS_OVER = [accepted(P), first(7), ended(P)]
HANDED = [accepted(D), tokens(0, [7]), tokens(1, [8]), tokens(2, [9], LENGTH), ended(D)]
DRAWS = [accepted(D), tokens(0, [7], cached=2), tokens(1, [8]), tokens(2, [9], LENGTH), ended(D)]
MANY_TOPS = replace(asked(), sampling=Sampling(temperature=0.0, top_logprobs=20))
SCORED = replace(asked(), prompt_logprobs=1)


@asynccontextmanager
async def computing(*, prefill: bool = True, **more: Any) -> AsyncIterator[House]:
    """A house whose decode worker computes prompts."""
    async with house(**more) as at:
        at.rooms.lose(at.decode.incarnation, "again", proof="left")
        at.decode.incarnation, at.decode.computes = Incarnation(23), True
        at.join(at.decode)
        if not prefill:
            at.rooms.lose(at.prefill.incarnation, "its process exited", proof="exited")
        yield at


def counted(at: House) -> dict[str, float]:
    """Return the metrics of computed prompts that are not zero, by their labels' values."""
    return {
        " ".join(sample.labels.values()) or sample.name: sample.value
        for family in at.metrics.collect()
        for sample in family.samples
        if sample.name in ("baton_prompts_computed_total", "baton_prompt_tokens_computed_total")
        and sample.value
    }


def failures(at: House) -> float:
    return sum(
        sample.value
        for family in at.metrics.collect()
        for sample in family.samples
        if sample.name in ("baton_rooms_failed_total", "baton_request_retries_total")
    )


async def answer_locally(at: House, request: Request) -> None:
    """Decode draws once prefill has said so."""
    before = len(at.decode.openings)
    heard = asyncio.Event()
    at.prefill.script, at.decode.script = [accepted(P), ended(P, LOCAL)], [DRAWS[0], heard, *DRAWS[1:]]
    stream = await at.backend.generate(request)
    await until(lambda: any(at.entry(each.room).is_local for each in at.decode.openings[before:]))
    heard.set()
    assert await read(stream) == ([7, 8, 9], "length")


# ---- decode says "mine"


@pytest.mark.parametrize("request_", [asked(), MANY_TOPS], ids=["plain", "more tops than a record holds"])
async def test_what_decode_says_is_enough_where_prefill_never_says_that_the_room_is_not_its_own(
    request_: Request,
) -> None:
    said = asyncio.Event()
    async with computing() as at:
        own = tokens(0, [7], cached=2)
        own.tokens.local = True
        at.prefill.script, at.decode.script = [accepted(P), said], [DRAWS[0], own, *DRAWS[2:]]
        stream = await at.backend.generate(request_)
        assert await read(stream) == ([7, 8, 9], "length")
        assert at.entry(at.decode.openings[0].room).is_local
        assert counted(at) == {"sooner": 1, "decode": 1}
        said.set()


@pytest.mark.parametrize("request_", [asked(), MANY_TOPS], ids=["plain", "more tops than a record holds"])
@pytest.mark.parametrize("late", [False, True], ids=["prefill says so first", "decode is ahead of it"])
async def test_a_room_that_prefill_ends_as_local_goes_on_with_decodes_tokens(
    request_: Request, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    said = asyncio.Event()
    async with computing() as at:
        at.prefill.script = [accepted(P), *([said] if late else []), ended(P, LOCAL)]
        at.decode.script = DRAWS
        with caplog.at_level(logging.INFO):
            stream = await at.backend.generate(request_)
            if late:
                await until(lambda: "decode outcome" in at.events())
                said.set()
            assert await read(stream) == ([7, 8, 9], "length")
        assert stream.cached_tokens == 2
        await at.unfollowed()
        entry = at.entry()
        assert (entry.cause, entry.has_failed, entry.is_local) == (None, False, True)
        assert "failed" not in at.events()
        assert (at.prefill.cancels, at.decode.cancels) == ({}, {})
        assert not caplog.records
        assert failures(at) == 0
        assert counted(at) == {"sooner": 1, "decode": 1}
        at.retired()
        await at.at_rest()


async def test_what_prefill_computed_is_counted_as_its_own() -> None:
    async with computing() as at:
        at.prefill.script, at.decode.script = HANDS_OVER, HANDED
        assert await read(await at.backend.generate(asked())) == ([7, 8, 9], "length")
        await until(lambda: counted(at) == {"handed_over": 1, "prefill": 3})


async def test_a_local_room_says_nothing_of_its_pairs_way_to_each_other() -> None:
    """A local room neither proves the connection of its pair of workers good nor counts against it."""
    async with computing() as at:
        pair = at.prefill.incarnation, at.decode.incarnation
        for _ in range(BROKEN_AFTER - 1):
            at.registry.pairs.ended(pair, Cause(Reason.CONNECT_FAILED, "refused"), canary=False)
        await answer_locally(at, asked())
        at.registry.pairs.ended(pair, Cause(Reason.CONNECT_FAILED, "refused"), canary=False)
        assert at.registry.pairs.is_broken(pair)


async def test_a_local_room_goes_on_when_its_prefill_worker_dies() -> None:
    go = asyncio.Event()
    async with computing() as at:
        at.prefill.script = [accepted(P), ended(P, LOCAL)]
        at.decode.script = [*DRAWS[:2], go, *DRAWS[2:]]
        stream = await at.backend.generate(asked())
        await until(lambda: at.entry().is_local and at.entry().phase is RoomPhase.STREAMING)
        at.rooms.lose(at.prefill.incarnation, "its process exited", proof="exited")
        assert at.entry().cause is None
        go.set()
        assert await read(stream) == ([7, 8, 9], "length")
        at.rooms.side_retired(RoomId(1), D)
        await at.at_rest()


async def test_a_canary_that_decode_computed_itself_proves_no_hand_over() -> None:
    async with computing() as at:
        at.prefill.script = [accepted(P), ended(P, LOCAL)]
        heard = asyncio.Event()
        at.decode.script = [accepted(D), heard, tokens(0, [7]), tokens(1, [8], LENGTH), ended(D)]
        joining = PrefillWorker("prefill-1", P, Incarnation(31), address=at.prefill.address)
        at.prefill.incarnation = joining.incarnation
        at.join(joining, proven=False)
        canary = Canary(at.rooms, at.backend, CANARY)
        task = asyncio.ensure_future(canary.run())
        await until(lambda: bool(at.decode.called) and at.entry().is_local)
        heard.set()
        await until(lambda: canary.problem is not None)
        assert canary.problem == (
            "prefill-1 and decode-0: nothing was handed over, decode computed the prompt itself"
        )
        assert at.registry.worker(joining.incarnation).state is WorkerState.JOINING
        task.cancel()


# ---- when prefill will have it


def busy(number: int, waiting: int, per_s: int, entered: int = 0) -> rooms_pb2.WorkerLoad:
    return rooms_pb2.WorkerLoad(number=number, tokens_waiting=waiting, tokens_per_s=per_s, entered=entered)


async def test_decode_is_told_when_prefill_will_have_computed_the_prompt() -> None:
    async with computing() as at:
        at.prefill.script, at.decode.script = HANDS_OVER, HANDED
        at.prefill.says = busy(1, waiting=500, per_s=1_000, entered=1)
        assert await read(await at.backend.generate(asked())) == ([7, 8, 9], "length")
        assert not at.decode.openings[0].HasField("prefill_ms"), "nobody knows how fast it is"
        await at.unfollowed()
        at.retired()
        at.prefill.says = None
        assert await read(await at.backend.generate(asked())) == ([7, 8, 9], "length")
        assert at.decode.openings[1].prefill_ms == 503, "500 tokens that wait there, and its own 3"
        at.clock.advance(400)
        at.retired(2)
        assert await read(await at.backend.generate(asked())) == ([7, 8, 9], "length")
        assert at.decode.openings[2].prefill_ms == 103, "400 were computed meanwhile"


async def test_what_prefill_was_sent_before_is_not_waited_for_but_where_decode_computed_it() -> None:
    prompt = tuple(range(2 * BLOCK_TOKENS))
    request = replace(asked(), prompt=prompt)
    async with computing() as at:
        at.registry.update_load(at.prefill.incarnation, load_from_wire(busy(1, 0, 1_000)), at.clock.now_ms())
        for room in (1, 2):
            await answer_locally(at, request)
            at.retired(room)
            at.clock.advance(10_000)
        assert [each.prefill_ms for each in at.decode.openings] == [128, 128]
        at.prefill.script, at.decode.script = HANDS_OVER, HANDED
        for _ in range(2):
            assert await read(await at.backend.generate(request)) == ([7, 8, 9], "length")
            at.retired(len(at.decode.openings))
            at.clock.advance(10_000)
        assert [each.prefill_ms for each in at.decode.openings[2:]] == [128, 1]
        held = next(each for each in at.registry.workers() if each.facts.side is P)
        assert held.cached_tokens(hash_blocks(prompt)) == len(prompt)


# ---- without a prefill worker


async def test_where_no_prefill_worker_is_ready_decode_is_asked_alone_and_prefill_again_when_it_is() -> None:
    async with computing(prefill=False) as at:
        at.decode.script = DRAWS
        stream = await at.backend.generate(MANY_TOPS)
        assert await read(stream) == ([7, 8, 9], "length")
        assert stream.cached_tokens == 2
        [opening] = at.decode.openings
        assert not any(map(opening.HasField, ("prefill", "prefill_ms")))
        entry = at.entry()
        assert (entry.prefill, entry.is_local, entry.cause) == (None, True, None)
        assert entry.events[0].detail == "on decode-0 alone"
        assert counted(at) == {"no_prefill": 1, "decode": 1}
        at.retired()
        await at.at_rest()
        at.prefill.incarnation, at.prefill.script, at.decode.script = Incarnation(12), HANDS_OVER, HANDED
        at.join(at.prefill)
        assert await read(await at.backend.generate(asked())) == ([7, 8, 9], "length")
        assert at.entry(2).names == {P: "prefill-0", D: "decode-0"}


async def test_the_death_of_prefill_is_no_error_the_request_goes_on_with_decode_alone() -> None:
    async with computing(rooms_max=2) as at:
        at.prefill.script = [accepted(P)]
        at.decode.scripts, at.decode.script = [[accepted(D)]], DRAWS
        stream = await at.backend.generate(asked())
        await until(lambda: at.prefill.called == at.decode.called == [1])
        at.rooms.lose(at.prefill.incarnation, "its process exited", proof="exited")
        assert await read(stream) == ([7, 8, 9], "length")
        assert at.entry(2).retry_of == 1
        assert at.entry(2).prefill is None


@pytest.mark.parametrize("computes", [True, False])
async def test_a_prompt_that_is_scored_and_any_where_decode_computes_none_wait_for_prefill(
    computes: bool,
) -> None:
    async with computing(prefill=False) if computes else house() as at:
        if not computes:
            at.rooms.lose(at.prefill.incarnation, "it has left", proof="left")
        request = SCORED if computes else asked()
        local = request.prompt_logprobs is None
        with pytest.raises(NoneReady, match="no prefill worker is ready"):
            at.registry.place(Need(3, 5, may_be_local=local))
        assert not at.decode.called


async def test_a_worker_that_says_it_is_full_is_waited_for_also_alone() -> None:
    async with computing(prefill=False, places=1) as at:
        at.decode.script = DRAWS
        await at.backend.generate(asked())
        waiting = asyncio.ensure_future(at.backend.generate(asked()))
        await until(lambda: at.admission.queued() == 1)
        await until(lambda: at.entry().phase is RoomPhase.CLOSING)
        at.retired()
        assert await read(await waiting) == ([7, 8, 9], "length")


async def test_a_decode_worker_serves_alone_where_its_only_pair_does_not_connect() -> None:
    async with computing() as at:
        at.decode.script = DRAWS
        pair = at.prefill.incarnation, at.decode.incarnation
        for _ in range(BROKEN_AFTER):
            at.registry.pairs.ended(pair, Cause(Reason.CONNECT_FAILED, "refused"), canary=False)
        assert await read(await at.backend.generate(asked())) == ([7, 8, 9], "length")
        assert at.entry().prefill is None
        assert at.registry.unreachable() == []


async def test_a_decode_worker_that_no_prefill_worker_comes_for_proves_that_it_serves_alone() -> None:
    async with computing(prefill=False) as at:
        at.decode.script = [accepted(D), tokens(0, [7]), tokens(1, [8], LENGTH), ended(D)]
        at.rooms.lose(at.decode.incarnation, "again", proof="left")
        at.decode.incarnation = Incarnation(24)
        at.join(at.decode, proven=False)
        canary = Canary(at.rooms, at.backend, CANARY)
        assert canary.next_pair() is None, "a prefill worker may be on its way"
        at.clock.advance(ALONE_MS)
        task = asyncio.ensure_future(canary.run())
        await until(lambda: at.registry.worker(at.decode.incarnation).state is WorkerState.READY)
        assert at.entry(1).canary
        assert at.entry(1).prefill is None
        assert counted(at) == {}, "no client's"
        task.cancel()


async def test_one_that_proves_itself_alone_is_tried_with_its_partner_in_turn() -> None:
    async with computing() as at:
        for worker, incarnation in ((at.prefill, 31), (at.decode, 32)):
            at.rooms.lose(worker.incarnation, "again", proof="left")
            worker.incarnation = Incarnation(incarnation)
            at.join(worker, proven=False)
        canary = Canary(at.rooms, at.backend, CANARY)
        at.clock.advance(ALONE_MS)
        tried = [canary.next_pair() for _ in range(4)]
        alone = [pair is not None and pair[0] is None for pair in tried]
        assert alone == [False, True, False, True]


async def test_zero_at_idle_a_worker_that_was_tried_alone_and_is_gone_is_forgotten() -> None:
    async with computing(prefill=False) as at:
        for incarnation in (31, 32):
            at.decode.incarnation, at.decode.name = Incarnation(incarnation), f"decode-{incarnation}"
            at.join(at.decode, proven=False)
        canary = Canary(at.rooms, at.backend, CANARY)
        at.clock.advance(ALONE_MS)
        tried = [canary.next_pair() for _ in range(2)]
        assert [pair[1].facts.incarnation for pair in tried if pair] == [31, 32]
        at.rooms.lose(Incarnation(31), "it has left", proof="left")
        canary.next_pair()
        assert Incarnation(31) not in canary.alone_tries
        assert canary.alone_tries[Incarnation(32)] == 2


async def test_a_prompt_that_no_prefill_worker_holds_is_served_by_decode_alone() -> None:
    async with computing() as at:
        at.rooms.lose(at.prefill.incarnation, "again", proof="left")
        at.prefill.incarnation, at.prefill.tokens_max = Incarnation(12), 100
        at.join(at.prefill)
        at.decode.script = DRAWS
        limits = at.backend.limits()
        assert (limits.prompt_tokens, limits.alone_tokens) == (100, 1_000)
        request = replace(asked(), prompt=tuple(range(101)))
        assert await read(await at.backend.generate(request)) == ([7, 8, 9], "length")
        assert at.entry().prefill is None
        assert at.decode.asked[0].carried_tokens_max == 1_000
        with pytest.raises(NoWorker, match="no prefill worker can hold 101 tokens"):
            await at.backend.generate(replace(request, prompt_logprobs=1))


async def test_while_a_stream_to_prefill_is_broken_decode_serves_alone() -> None:
    async with computing() as at:
        at.registry.suspect(at.prefill.incarnation)
        at.decode.script = DRAWS
        assert await read(await at.backend.generate(asked())) == ([7, 8, 9], "length")
        scored = asyncio.ensure_future(at.backend.generate(SCORED))
        await until(lambda: at.admission.queued() == 1)
        at.rooms.renew(at.prefill.incarnation)
        await (await scored).hang_up(Hangup.CLIENT_GONE)
        assert at.entry(2).prefill is not None


async def test_ready_says_what_is_slower_and_503_only_where_nobody_is_served() -> None:
    async with computing() as at:
        app = FastAPI()
        app.include_router(probe_router(at.registry, lambda: None))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://bootstrap") as http:
            both = (await http.get("/ready")).json()
            at.rooms.lose(at.prefill.incarnation, "its process exited", proof="exited")
            alone = await http.get("/ready")
            at.rooms.lose(at.decode.incarnation, "its process exited", proof="exited")
            nobody = await http.get("/ready")
    assert (both["problems"], both["slower"]) == ([], [])
    assert alone.status_code == 200
    assert alone.json()["slower"] == [
        "no prefill worker is ready: decode workers compute the prompts themselves"
    ]
    assert nobody.status_code == 503
    assert nobody.json()["problems"] == ["no prefill worker is ready", "no decode worker is ready"]
