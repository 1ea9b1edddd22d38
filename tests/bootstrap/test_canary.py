"""Tests that a worker gets rooms only after a canary hand-over through it has succeeded."""

import asyncio
from dataclasses import replace

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from baton.bootstrap.admin_routes import probe_router
from baton.bootstrap.canary import LOOK_S, OUTPUT_TOKENS, RETRY_S, Canary, canary_prompt
from baton.bootstrap.canary_request import canary_request
from baton.fleet.need import Need
from baton.fleet.pair_health import BROKEN_AFTER
from baton.fleet.worker_record import WorkerState
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.rooms.request import EOS_TOKEN_IDS_MAX, Sampling
from baton.rooms.worker_facts import CANARY_ROOMS
from baton.runtime.errors import StartupError
from tests.bootstrap.scripted import (
    CANARY,
    LENGTH,
    DecodeWorker,
    House,
    PrefillWorker,
    ScriptedDefaults,
    accepted,
    ended,
    first,
    house,
    tokens,
)
from tests.wire.servers import serving, until

P, D = Side.PREFILL, Side.DECODE
GOOD_PREFILL = [accepted(P), first(7), ended(P)]
GOOD_DECODE = [accepted(D), tokens(0, [7]), tokens(1, [8], LENGTH), ended(D)]


def state(at: House, incarnation: int) -> WorkerState:
    return at.registry.worker(Incarnation(incarnation)).state


async def test_a_hand_over_of_a_few_tokens_makes_both_ready() -> None:
    assert OUTPUT_TOKENS == 2
    async with house() as at:
        for name, old in (("prefill", at.prefill), ("decode", at.decode)):
            at.rooms.lose(old.incarnation, "again", proof="left")
            old.name, old.incarnation = f"{name}-1", Incarnation(old.incarnation + 100)
            at.join(old, proven=False)
        at.prefill.script, at.decode.script = GOOD_PREFILL, GOOD_DECODE
        canary = Canary(at.rooms, at.backend, CANARY)
        task = asyncio.ensure_future(canary.run())
        await until(lambda: state(at, 111) is state(at, 122) is WorkerState.READY)
        assert canary.problem is None
        assert at.entry(1).canary
        at.retired(1)
        await at.at_rest()
        assert at.prefill.asked == [replace(CANARY, prompt=canary_prompt(RoomId(1)))]
        task.cancel()


def test_honest_health_no_canary_asks_what_was_asked_before() -> None:
    """A worker with the prompt cached would answer without the hand-over that the canary has to prove."""
    prompts = {canary_prompt(RoomId(room))[:4] for room in range(2**61, 2**61 + 4096)}
    assert len(prompts) == 4096
    assert {token for prompt in prompts for token in prompt} == set(range(1, 9))


def test_canary_is_a_request_with_the_models_own_defaults() -> None:
    """The canary carries the same defaults as a client's request, so it tests them on the worker first."""
    ends = tuple(range(70))
    canary = canary_request(ScriptedDefaults(eos_token_ids=ends), 500)
    assert canary.eos_token_ids == ends
    assert canary.sampling == Sampling(), "as of a client that says nothing"


@pytest.mark.parametrize(
    ("defaults", "context_tokens", "why"),
    [
        (
            ScriptedDefaults(eos_token_ids=tuple(range(EOS_TOKEN_IDS_MAX + 1))),
            500,
            "eos_token_ids has more than",
        ),
        (ScriptedDefaults(eos_token_ids=(2**40,)), 500, "is refused: "),
        (ScriptedDefaults(vocabulary=5), 500, "not in the vocabulary of 5 tokens"),
        (ScriptedDefaults(), 25, "there is space for 1"),
    ],
    ids=["many ends", "an end beyond the wire", "few tokens", "a short context"],
)
def test_a_model_whose_defaults_no_worker_takes_is_refused_before_one_joins(
    defaults: ScriptedDefaults, context_tokens: int, why: str
) -> None:
    with pytest.raises(StartupError, match=f"^the model mine cannot be served: .*{why}"):
        canary_request(defaults, context_tokens)


async def test_a_worker_that_fails_its_canary_says_why_and_keeps_nobody_else_out() -> None:
    async with house() as at:
        at.decode.scripts, at.decode.script = [[accepted(D)]], GOOD_DECODE
        bad = PrefillWorker("prefill-bad", P, Incarnation(31), script=[accepted(P), None])
        good = PrefillWorker("prefill-good", P, Incarnation(32), script=GOOD_PREFILL)
        async with serving(bad.add) as bad_address, serving(good.add) as good_address:
            bad.address, good.address = bad_address, good_address
            at.join(bad, proven=False)
            at.join(good, proven=False)
            canary = Canary(at.rooms, at.backend, CANARY)
            task = asyncio.ensure_future(canary.run())
            await until(lambda: canary.problem is not None)
            at.retired(1)
            await until(lambda: state(at, 32) is WorkerState.READY)
            assert state(at, 31) is not WorkerState.READY
            assert bad.called, "it was tried"
            task.cancel()


async def test_a_pair_that_brings_too_few_tokens_is_not_ready() -> None:
    async with house() as at:
        at.prefill.script = [accepted(P), first(7, LENGTH), ended(P)]
        at.decode.script = [accepted(D)]
        late = DecodeWorker("decode-1", D, Incarnation(41), address=at.decode.address)
        at.join(late, proven=False)
        canary = Canary(at.rooms, at.backend, CANARY)
        task = asyncio.ensure_future(canary.run())
        await until(lambda: canary.problem is not None)
        assert canary.problem == "prefill-0 and decode-1: 1 token came, 2 were asked for"
        assert state(at, 41) is WorkerState.JOINING
        task.cancel()


async def test_a_partner_that_leaves_while_the_canary_ends_ends_nothing_else() -> None:
    """The partner has reported its room retired, so the canary goes on without it."""
    async with house() as at:
        at.prefill.script = GOOD_PREFILL
        drawn = asyncio.Event()
        at.decode.script = [accepted(D), tokens(0, [7]), drawn, tokens(1, [8], LENGTH), ended(D)]
        joining = DecodeWorker("decode-1", D, Incarnation(41), address=at.decode.address)
        at.rooms.lose(at.decode.incarnation, "replaced", proof="left")
        at.decode.incarnation = joining.incarnation
        at.join(joining, proven=False)
        canary = Canary(at.rooms, at.backend, CANARY)
        task = asyncio.ensure_future(canary.run())
        await until(lambda: at.decode.called == at.prefill.called == [1])
        await until(lambda: not len(at.rooms.streams.to(at.prefill.facts)))  # all of it was heard
        at.rooms.side_retired(RoomId(1), P)
        at.rooms.lose(at.prefill.incarnation, "it drained", proof="left")
        drawn.set()
        await until(lambda: task.done() or state(at, 41) is WorkerState.READY)
        assert not task.done(), task.exception()
        task.cancel()


async def test_a_full_partner_has_one_canary_at_a_time() -> None:
    async with house(places=1) as at:
        pair = at.registry.worker(at.prefill.incarnation), at.registry.worker(at.decode.incarnation)
        at.registry.open_room("of a client", pair, Need(10, 10), at.clock.now_ms())
        at.decode.script = [accepted(D)]
        bad = PrefillWorker("prefill-bad", P, Incarnation(31), script=[accepted(P), None])
        async with serving(bad.add) as bad.address:
            at.join(bad, proven=False)
            canary = Canary(at.rooms, at.backend, CANARY)
            task = asyncio.ensure_future(canary.run())
            await until(lambda: canary.problem is not None)
            assert len(pair[1].rooms) == at.decode.rooms_max + CANARY_ROOMS
            await asyncio.sleep(RETRY_S + 3 * LOOK_S)
            assert bad.called == [2], "the room of the first try is not retired yet"
            at.retired(2)
            await until(lambda: len(bad.called) == 2)
            task.cancel()


async def test_a_pair_that_does_not_connect_is_tried_by_canaries_until_one_passes() -> None:
    """Both workers were proven before, perhaps with others, and no worker is joining."""
    async with house(rooms_max=1) as at:
        failed = Cause(Reason.CONNECT_FAILED, "no way there")
        for _ in range(BROKEN_AFTER):
            at.rooms.fail((await at.admission.admit("a", 3, 5)).id, failed)
            at.retired(at.registry.open_rooms()[0].id)
        pair = (at.prefill.incarnation, at.decode.incarnation)
        assert at.registry.pairs.is_broken(pair)
        app = FastAPI()
        app.include_router(probe_router(at.registry, lambda: None))
        async with AsyncClient(transport=ASGITransport(app), base_url="http://bootstrap") as http:
            told = await http.get("/ready")
            assert told.status_code == 503
            problem = "prefill-0 and decode-0 do not connect, and no other pair is ready"
            assert told.json()["problems"] == [problem]
            at.prefill.script, at.decode.script = GOOD_PREFILL, GOOD_DECODE
            task = asyncio.ensure_future(Canary(at.rooms, at.backend, CANARY).run())
            await until(lambda: not at.registry.pairs.is_broken(pair))
            assert (await http.get("/ready")).status_code == 200
        assert at.entry(BROKEN_AFTER + 1).canary
        task.cancel()
        at.retired(BROKEN_AFTER + 1)
        await at.at_rest()
