"""Tests of rooms that decode retracted: none counts as a failure, and the client sees a pause only."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count as count_up
from typing import Any

import pytest

from baton.api.backend import Hangup, RoomFailed
from baton.bootstrap.admission.placement_request import Retry
from baton.bootstrap.request_stream import RequestStream
from baton.fleet.need import Need
from baton.fleet.retry import MARGIN_TOKENS
from baton.ids import Incarnation, RoomId
from baton.pages.block_hashes import BLOCK_TOKENS, hash_blocks
from baton.rooms.errors import Cause, NoCapacity, NoSuchWorker, Reason
from baton.rooms.phases import Side
from baton.rooms.request import Request
from baton.rooms.worker_load import WorkerLoad
from baton.telemetry.room_spans import RoomSpans
from tests.bootstrap import test_choices
from tests.bootstrap.scripted import (
    CANARY,
    DecodeWorker,
    House,
    PrefillWorker,
    Step,
    accepted,
    asked,
    ended,
    house,
    read,
    tokens,
)
from tests.bootstrap.test_choices import DRAWN, WHOLE, in_turn, several
from tests.bootstrap.test_request_stream import ANSWER, PairHealth, decodes, prefills, two_pairs
from tests.trace.notes import PARENT, Notes
from tests.wire.servers import until

P, D = Side.PREFILL, Side.DECODE
LOST_THERE = Cause(Reason.PREFILL_LOST, "as it happens")
RETRACTED = Cause(Reason.RETRACTED, "3 pages are needed for older rooms")


def retracted(*before: Step) -> list[Step]:
    return [accepted(D), *before, ended(D, RETRACTED)]


def next_token(request: Request) -> Step:
    """Step with the token that follows the request's output, which is the first one that decode draws."""
    at = len(request.output)
    return tokens(at, ANSWER[at : at + 1])


def load(free: int, number: int) -> WorkerLoad:
    """Return the load of a decode worker with `free` free pages of one token each. `number`: of the
    report."""
    return WorkerLoad((free,), (0,), 0, running=2, running_max=64, entered=RoomId(0), number=number)


def count(at: House, name: str, **labels: str) -> float:
    value = at.metrics.get_sample_value(name, labels)
    assert value is not None, "it is there from the start"
    return value


def failures(at: House) -> float:
    families = {"baton_rooms_failed", "baton_request_retries", "baton_admission_refused_requests"}
    return sum(
        sample.value
        for family in at.metrics.collect()
        if family.name in families
        for sample in family.samples
        if sample.name.endswith("_total")
    )


@pytest.fixture
async def at() -> AsyncIterator[PairHealth]:
    """A house with a second pair, which only requests that avoid the first one get. A request may have one
    room."""
    async with two_pairs(rooms_max=1, places=9) as made:
        yield made


async def test_retracted_is_no_failure_however_often_it_happens(
    at: PairHealth, caplog: pytest.LogCaptureFixture
) -> None:
    """A retraction costs no attempt and makes no worker avoided. Each token reaches the client once."""
    notes = Notes()
    at.rooms.timelines.spans = RoomSpans(notes)
    at.prefill.scripts, at.prefill.script = [[accepted(P)]] * 5, prefills()
    at.decode.scripts = [retracted(), retracted(next_token), retracted(), retracted(), retracted(next_token)]
    at.decode.script = decodes()
    request = replace(asked(len(ANSWER)), trace=PARENT)
    assert await read(await at.backend.generate(request)) == (list(ANSWER), "length")
    assert at.decode.called == [2, 3, 4, 5, 6, 7]
    assert at.decode_1.called == at.prefill_1.called == []
    for room in range(2, 7):
        entry = at.entry(room)
        assert (entry.cause, entry.has_failed) == (RETRACTED, False)
        words = at.events(room)
        assert {"failed", "retried", "not retried"}.isdisjoint(words)
        told = {event.name: event.detail for event in entry.events}
        assert told["retracted"] == RETRACTED.text
        assert told["goes on"] == f"as room {room + 1} on prefill-0 and decode-0"
    assert at.events(7)[-1] in ("answered", "decode outcome", "prefill outcome")
    assert failures(at) == 0
    assert count(at, "baton_rooms_retracted_total") == 5
    assert [record for record in caplog.records if record.levelname not in ("DEBUG", "INFO")] == []
    assert [span.error for span in notes.spans] == [None] * 6
    await at.all_at_rest(*range(2, 8))
    assert list(at.registry.index.failures()) == []


async def test_choices_of_a_retracted_room_that_have_different_outputs_go_on_in_rooms_of_their_own(
    at: PairHealth,
) -> None:
    """One of the choices is retracted once more before it has another token."""
    for worker in (at.prefill, at.prefill_1):
        worker.choose = test_choices.prefills
    begun = [tokens(0, DRAWN[seed][:2], None, place) for place, seed in enumerate(DRAWN)]
    at.decode.choose = in_turn(retracted(*begun), retracted())
    assert await test_choices.read(await at.backend.generate(several()), 4) == WHOLE
    outputs = [each.output for each in at.decode.asked]
    assert {each[:2] for each in outputs} == {(), (7, 8), (7, 30), (40, 41)}
    assert len(outputs) in (5, 6), "two that had the same may have parted, by the first token of one"
    assert failures(at) == 0
    await at.all_at_rest(*(entry.id for entry in at.registry.find("request-1")))


async def test_what_a_request_had_already_cost_is_not_forgiven_and_who_was_guilty_is_avoided_still() -> None:
    async with two_pairs(rooms_max=3, places=9) as at:
        at.prefill.script = at.prefill_1.script = [accepted(P)]
        broken = [accepted(D), ended(D, Cause(Reason.ENGINE_FAILED, "as it happens"))]
        at.decode.script = broken
        at.decode_1.scripts, at.decode_1.script = [retracted(), retracted()], broken
        assert await read(await at.backend.generate(asked())) == ([], "engine_failed")
        assert at.decode_1.called[:3] == [3, 4, 5], "of which two were retracted"
        assert sorted(at.decode.called + at.decode_1.called) == [2, 3, 4, 5, 6], "three of them failed"
        await at.all_at_rest(2, 3, 4, 5, 6)


async def test_it_came_when_it_came_in_each_of_its_rooms_and_a_canary_before_all_others(
    at: PairHealth,
) -> None:
    """A room keeps its request's arrival time, by which `oldest-goes-on` decides."""
    at.clock.advance(4_000)
    at.prefill.script = prefills()
    at.decode.scripts, at.decode.script = [retracted(next_token)], decodes()
    stream = await at.backend.generate(asked())
    await until(lambda: at.decode.called == [2])
    at.clock.advance(3_000)
    assert await read(stream) == ([7, 8, 9], "length")
    assert [each.arrived_ms for each in at.decode.asked] == [4_000, 4_000]
    assert CANARY.arrived_ms == 0, "what makes a worker ready is not put out"
    await at.all_at_rest(2, 3)


async def test_it_asks_for_what_it_had_and_a_margin(at: PairHealth, monkeypatch: pytest.MonkeyPatch) -> None:
    needs: list[Need] = []
    place = at.registry.place

    def noted(need: Need, *more: Any, **named: Any) -> Any:
        needs.append(need)
        return place(need, *more, **named)

    monkeypatch.setattr(at.registry, "place", noted)
    at.prefill.script = prefills()
    at.decode.scripts, at.decode.script = [retracted(next_token)], [accepted(D)]
    stream = await at.backend.generate(asked(400))
    for _ in range(2):
        await stream.next()
    assert [each.margin for each in needs] == [0, MARGIN_TOKENS]
    assert [each.prompt_tokens for each in needs] == [3, 4]
    await stream.hang_up(Hangup.CLIENT_GONE)
    await at.all_at_rest(2, 3)


async def test_time_lost_to_it_and_tokens_computed_once_more_are_counted(at: PairHealth) -> None:
    at.prefill.scripts = [prefills(), [accepted(P)], prefills()]
    at.decode.scripts, at.decode.script = [retracted(next_token), retracted()], decodes()
    stream = await at.backend.generate(asked())
    await stream.next()
    await until(lambda: at.entry(2).cause is not None)
    at.clock.advance(1_200)
    assert (await read(stream))[1] == "length"
    assert count(at, "baton_retraction_pause_seconds_count") == 1, "of both rooms it is one pause"
    assert count(at, "baton_retraction_pause_seconds_sum") == pytest.approx(1.2)
    assert count(at, "baton_retraction_recomputed_tokens_total") == 4
    await at.all_at_rest(2, 3, 4)


async def test_time_lost_is_told_once_however_many_rooms_its_choices_go_on_in(at: PairHealth) -> None:
    for worker in (at.prefill, at.prefill_1):
        worker.choose = test_choices.prefills
    begun = [tokens(0, DRAWN[seed][:2], None, place) for place, seed in enumerate(DRAWN)]
    at.decode.choose = in_turn(retracted(*begun))
    assert await test_choices.read(await at.backend.generate(several()), 4) == WHOLE
    assert len(at.decode.asked) > 2
    assert count(at, "baton_retraction_pause_seconds_count") == 1
    await at.all_at_rest(*(entry.id for entry in at.registry.find("request-1")))


# ---- while it waits


@pytest.fixture
async def paused() -> AsyncIterator[House]:
    """A house of full workers: two requests fill them, and the first one that is followed is retracted."""
    async with house(rooms_max=1, max_queue=1) as made:
        made.prefill.script = prefills()
        made.decode.scripts, made.decode.script = [retracted(next_token)], decodes()
        yield made


async def wait_for_pages(at: House) -> tuple[RequestStream, "asyncio.Future[Any]"]:
    """Return the stream of a retracted request, and its reading, which waits for pages."""
    stream = await at.backend.generate(asked())
    await until(lambda: at.entry(1).cause is not None)
    await at.admission.admit("another", 3, 5)
    reading = asyncio.ensure_future(read(stream))
    await until(lambda: at.admission.queued() == 1)
    return stream, reading


async def test_one_that_was_retracted_is_not_turned_away_by_a_full_queue(paused: House) -> None:
    """A queue full of retracted requests does not refuse it either: it comes before all that had no room."""
    at = paused
    await at.admission.admit("another", 3, 5)
    stream = await at.backend.generate(asked())
    await until(lambda: at.entry(2).cause is not None)
    waiting = asyncio.ensure_future(at.admission.admit("fresh", 3, 5))
    await until(lambda: at.admission.queued() == 1)
    reading = asyncio.ensure_future(read(stream))
    await until(lambda: at.admission.queued() == 2)
    at.retired(2)
    assert await reading == ([7, 8, 9], "length")
    assert not waiting.done()
    again = Retry(RoomId(2), Reason.RETRACTED, frozenset(), None)
    more = [asyncio.ensure_future(at.admission.admit(f"{each}", 3, 5, again)) for each in range(5)]
    await until(lambda: at.admission.queued() == 6)
    for each in (waiting, *more):
        each.cancel()
    await asyncio.gather(waiting, *more, return_exceptions=True)


async def test_one_that_was_retracted_takes_a_newcomer_no_place(paused: House) -> None:
    at = paused
    _, reading = await wait_for_pages(at)
    fresh = asyncio.ensure_future(at.admission.admit("fresh", 3, 5))
    await until(lambda: at.admission.queued() == 2)
    for each in (reading, fresh):
        each.cancel()
    await asyncio.gather(reading, fresh, return_exceptions=True)


async def test_nor_is_it_turned_away_while_decode_has_no_worker(paused: House) -> None:
    at = paused
    at.rooms.lose(at.decode.incarnation, "gone", proof="left")
    again = Retry(RoomId(2), Reason.RETRACTED, frozenset(), None)
    hoping = [asyncio.ensure_future(at.admission.admit(f"{each}", 3, 5, again)) for each in range(3)]
    await until(lambda: at.admission.queued() == 3)
    assert (at.admission.queued_by_class(), at.admission.queued_by_side()) == ({0: 3}, {D: 3})
    for each in hoping:
        each.cancel()
    await asyncio.gather(*hoping, return_exceptions=True)
    assert at.admission.queued() == 0


async def test_nobody_takes_the_space_that_one_that_was_retracted_waits_for() -> None:
    """The retracted request needs more space than newcomers, plus its margin. Each newcomer would fit
    earlier."""
    async with house(places=9) as at:
        at.rooms.update_load(at.decode.incarnation, load(free=0, number=1))
        retry = Retry(RoomId(1), Reason.RETRACTED, frozenset(), None, margin=200)
        old = asyncio.ensure_future(at.admission.admit("old", 400, 900, retry))
        await until(lambda: at.admission.queued() == 1)
        small = asyncio.ensure_future(at.admission.admit("small", 3, 5))
        await until(lambda: at.admission.queued() == 2)
        for number, free in ((2, 100), (3, 600)):
            at.rooms.update_load(at.decode.incarnation, load(free, number))
            at.admission.wake()
        assert not old.done()
        assert not small.done()
        at.rooms.update_load(at.decode.incarnation, load(free=700, number=4))
        assert (await old).retry_of == 1
        assert (await small).request_id == "small"


@dataclass
class Fleet:
    """A house with two decode workers, of which the first has more free pages."""

    at: House
    numbers: "count_up[int]" = field(default_factory=lambda: count_up(1))

    def says(self, worker: int, free: int) -> None:
        self.at.rooms.update_load(FLEET[worker], load(free, next(self.numbers)))
        self.at.admission.wake()

    async def goes_on(
        self,
        name: str,
        arrived_ms: int = 0,
        avoid: int | None = None,
        back: int | None = None,
        tokens: Sequence[int] = (),
    ) -> "asyncio.Future[Any]":
        """Return the future of a retracted request that has no space yet."""
        avoided = frozenset() if avoid is None else frozenset({FLEET[avoid]})
        by = None if back is None else FLEET[back]
        retry = Retry(RoomId(1), Reason.RETRACTED, avoided, None, margin=200, returns_to=by)
        waiting = self.at.admission.queued()
        asking = self.at.admission.admit(name, 400, 900, retry, tokens, arrived_ms=arrived_ms)
        opened = asyncio.ensure_future(asking)
        await until(lambda: self.at.admission.queued() == waiting + 1)
        return opened

    async def small(self) -> str:
        """Place a small request, and return the name of its decode worker."""
        return (await self.at.admission.admit("small", 3, 5)).decode.name

    async def blocked(self) -> "asyncio.Future[str]":
        """Return the future of a small request that has to wait, since no worker takes it now."""
        waiting = self.at.admission.queued()
        small = asyncio.ensure_future(self.small())
        await until(lambda: self.at.admission.queued() == waiting + 1)
        return small


FLEET = (Incarnation(22), Incarnation(23))


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with house(places=99) as at:
        at.join(DecodeWorker("decode-1", D, FLEET[1], rooms_max=99, address=at.decode.address))
        made = Fleet(at)
        made.says(0, 300)
        made.says(1, 100)
        yield made


async def test_one_worker_is_left_to_one_that_was_retracted_and_the_others_go_on(fleet: Fleet) -> None:
    """The same worker is reserved until it has the space, even if the other one gets more meanwhile."""
    old = await fleet.goes_on("old")
    assert [await fleet.small() for _ in range(3)] == ["decode-1"] * 3
    fleet.says(1, 500)
    assert [await fleet.small() for _ in range(3)] == ["decode-1"] * 3
    fleet.says(0, 600)
    assert not old.done()
    fleet.says(0, 700)
    assert (await old).decode.name == "decode-0"
    fleet.says(1, 0)
    assert await fleet.small() == "decode-0", "it is left to nobody any more"


async def test_it_begins_on_whichever_worker_has_the_space_first(fleet: Fleet) -> None:
    old = await fleet.goes_on("old")
    fleet.says(1, 700)
    assert (await old).decode.name == "decode-1"
    assert await fleet.small() == "decode-0"


@pytest.mark.parametrize("how", ["suspect", "drain", "lose"])
async def test_a_worker_that_gets_no_rooms_is_left_to_nobody(fleet: Fleet, how: str) -> None:
    registry = fleet.at.registry
    old = await fleet.goes_on("old")
    assert await fleet.small() == "decode-1"
    match how:
        case "suspect":
            registry.suspect(FLEET[0])
        case "drain":
            registry.drain(FLEET[0])
        case _:
            fleet.at.rooms.lose(FLEET[0], "gone", proof="left")
    small = await fleet.blocked()
    if how == "suspect":
        fleet.at.rooms.renew(FLEET[0])
        assert await small == "decode-0", "the other is left to it since"
    fleet.says(1, 700)
    assert (await old).decode.name == "decode-1"
    assert await small == ("decode-0" if how == "suspect" else "decode-1")


async def test_of_two_that_were_retracted_the_older_one_chooses_first(fleet: Fleet) -> None:
    young = await fleet.goes_on("young", arrived_ms=9)
    assert await fleet.small() == "decode-1"
    old = await fleet.goes_on("old", arrived_ms=5)
    small = await fleet.blocked()
    fleet.says(0, 700)
    assert (await old).decode.name == "decode-0"
    assert await small == "decode-0"
    fleet.says(1, 700)
    assert (await young).decode.name == "decode-1"


async def test_a_worker_that_it_avoids_is_not_left_to_it(fleet: Fleet) -> None:
    old = await fleet.goes_on("old", avoid=0)
    assert [await fleet.small() for _ in range(3)] == ["decode-0"] * 3
    fleet.says(1, 700)
    assert (await old).decode.name == "decode-1"


@pytest.mark.parametrize("back", [0, 1])
async def test_of_workers_with_the_space_it_goes_to_the_one_that_computed_it(fleet: Fleet, back: int) -> None:
    old = await fleet.goes_on("old", back=back, tokens=range(400))
    fleet.says(back, 400)
    fleet.says(1 - back, 500)
    for worker in (back, 1 - back):
        assert not old.done()
        fleet.at.rooms.update_load(FLEET[worker], load(650 + 20 * (worker != back), next(fleet.numbers)))
    fleet.at.admission.wake()
    assert (await old).decode.name == f"decode-{back}"


async def test_what_was_drawn_of_it_is_looked_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix lookup includes the drawn tokens. The prompt ends in the middle of a block."""
    async with two_pairs() as at:
        needs: list[Need] = []
        place = at.registry.place

        def noted(need: Need, *more: Any) -> Any:
            needs.append(need)
            return place(need, *more)

        monkeypatch.setattr(at.registry, "place", noted)
        at.prefill.script = prefills()
        at.decode.scripts, at.decode.script = [retracted(next_token)], [accepted(D)]
        prompt = tuple(range(2 * BLOCK_TOKENS - 1))
        stream = await at.backend.generate(replace(asked(400), prompt=prompt))
        for _ in range(2):
            await stream.next()
        output = at.decode.asked[1].output
        assert [each.blocks for each in needs] == [hash_blocks(prompt), hash_blocks((*prompt, *output))]
        assert len(needs[1].blocks) == 2
        await stream.hang_up(Hangup.CLIENT_GONE)


async def test_no_worker_is_left_to_one_that_waits_for_prefill(fleet: Fleet) -> None:
    """The retracted request avoids the only prefill worker with a free place, so decode space is not reserved
    for it."""
    at = fleet.at
    at.join(PrefillWorker("prefill-1", P, Incarnation(12), rooms_max=1, address=at.prefill.address))
    at.registry.drain(at.prefill.incarnation)
    await at.admission.admit("early", 3, 5)
    at.rooms.lose(at.prefill.incarnation, "again", proof="left")
    at.prefill.incarnation = Incarnation(13)
    at.join(at.prefill)
    retry = Retry(RoomId(1), Reason.RETRACTED, frozenset({Incarnation(13)}), None, margin=9)
    old = [asyncio.ensure_future(at.admission.admit("old", 3, 5, retry)) for _ in range(2)]
    await until(lambda: at.admission.queued() == 2)
    assert await fleet.small() in ("decode-0", "decode-1")
    assert not any(each.done() for each in old)
    for each in old:
        each.cancel()
    await asyncio.gather(*old, return_exceptions=True)


async def test_a_worker_is_left_to_nobody_who_has_given_up(fleet: Fleet) -> None:
    old = await fleet.goes_on("old")
    old.cancel()
    await asyncio.gather(old, return_exceptions=True)
    assert await fleet.small() == "decode-0"


# ---- while its worker drains


async def test_drain_keeps_promises_what_a_worker_retracts_while_it_drains_it_serves_to_the_end(
    paused: House,
) -> None:
    """The draining worker is the only one of its side. Newcomers get no room there."""
    at = paused
    _, reading = await wait_for_pages(at)
    assert at.admission.drain(at.decode.incarnation) == 3, "two rooms, and the request that waits"
    with pytest.raises(NoSuchWorker):
        await at.admission.admit("fresh", 3, 5)
    assert not reading.done()
    at.retired(1)
    assert await reading == ([7, 8, 9], "length")
    assert at.entry(3).decode.name == at.decode.name
    assert at.admission.drain(at.decode.incarnation) == 2
    for room in (2, 3):
        at.retired(room)
    assert at.admission.drain(at.decode.incarnation) == 0


async def test_drain_keeps_promises_it_is_waited_for_as_long_as_it_has_none_other(fleet: Fleet) -> None:
    registry = fleet.at.registry
    old = await fleet.goes_on("old", back=0)
    assert fleet.at.admission.drain(FLEET[0]) == 1
    fleet.says(0, 700)
    assert (await old).decode.name == "decode-0", "the other has no space for it"
    assert [await fleet.small() for _ in range(2)] == ["decode-1"] * 2
    with pytest.raises(NoCapacity):
        registry.place(Need(400, 900, margin=200))


async def test_what_a_draining_worker_retracted_goes_on_elsewhere_where_there_is_space(fleet: Fleet) -> None:
    old = await fleet.goes_on("old", back=0)
    fleet.at.admission.drain(FLEET[0])
    fleet.says(1, 700)
    assert (await old).decode.name == "decode-1"
    assert fleet.at.admission.drain(FLEET[0]) == 0


@pytest.mark.parametrize("others", [1, 80])
async def test_drain_keeps_promises_older_ones_that_wait_for_other_workers_hold_up_none_that_goes_back(
    fleet: Fleet, others: int
) -> None:
    fleet.says(0, 0)
    fleet.says(1, 0)
    young = await fleet.goes_on("young", arrived_ms=9, back=0)
    old = [await fleet.goes_on("old", arrived_ms=5) for _ in range(others)]
    assert fleet.at.admission.drain(FLEET[0]) == 1
    fleet.at.admission.wake()
    fleet.says(0, 700)
    assert (await young).decode.name == "decode-0"
    assert not any(each.done() for each in old)
    for each in old:
        each.cancel()
    await asyncio.gather(*old, return_exceptions=True)
    assert not fleet.at.admission.promises.queued


async def test_drain_keeps_promises_who_reads_slowly_is_waited_for(paused: House) -> None:
    """The next room of a slow reader opens when it has read all of its last room."""
    at = paused
    stream = await at.backend.generate(asked())
    await until(lambda: at.entry(1).cause is not None)
    assert at.admission.drain(at.decode.incarnation) == 2, "its room, and itself"
    at.retired(1)
    assert at.admission.drain(at.decode.incarnation) == 1
    assert await read(stream) == ([7, 8, 9], "length")
    assert at.entry(2).decode.name == at.decode.name
    at.retired(2)
    assert at.admission.drain(at.decode.incarnation) == 0


@pytest.mark.parametrize("how", ["hangs up", "too late"])
async def test_who_gives_up_before_it_reads_that_it_was_retracted_is_waited_for_no_more(how: str) -> None:
    async with house(timeout_s=1.0 if how == "too late" else 20.0) as at:
        at.prefill.script, at.decode.script = prefills(), retracted(next_token)
        stream = await at.backend.generate(asked())
        await until(lambda: at.entry(1).cause is not None)
        at.retired(1)
        assert at.admission.drain(at.decode.incarnation) == 1
        if how == "too late":
            await until(lambda: stream.left_s() < 0)
            assert (await read(stream))[1] == "deadline"
        else:
            await stream.hang_up(Hangup.CLIENT_GONE)
        assert at.admission.drain(at.decode.incarnation) == 0


async def test_drain_keeps_promises_an_attempt_that_fails_on_the_way_back_goes_back_again() -> None:
    async with house(rooms_max=3) as at:
        at.prefill.scripts = [prefills(), [accepted(P), ended(P, LOST_THERE)]]
        at.prefill.script = prefills()
        at.decode.scripts, at.decode.script = [retracted(next_token), [accepted(D)]], decodes()
        stream = await at.backend.generate(asked())
        await until(lambda: at.entry(1).cause is not None)
        assert at.admission.drain(at.decode.incarnation) == 2
        at.retired(1)
        assert await read(stream) == ([7, 8, 9], "length")
        assert at.entry(2).cause == LOST_THERE
        assert [at.entry(room).decode.name for room in (2, 3)] == [at.decode.name] * 2
        assert not at.admission.promises.rooms
        for room in (2, 3):
            at.retired(room)
        assert at.admission.drain(at.decode.incarnation) == 0


@pytest.mark.parametrize("retracted_it", [True, False])
async def test_a_draining_worker_that_was_told_that_nothing_comes_gets_nothing(
    fleet: Fleet, *, retracted_it: bool
) -> None:
    """A draining worker that did not retract the room does not get it either."""
    if retracted_it:
        assert fleet.at.admission.drain(FLEET[0]) == 0
    old = await fleet.goes_on("old", back=0 if retracted_it else None)
    if not retracted_it:
        fleet.at.admission.drain(FLEET[0])
    fleet.says(0, 900)
    assert not old.done()
    fleet.says(1, 700)
    assert (await old).decode.name == "decode-1"


async def test_a_client_that_hangs_up_in_the_pause_is_gone_and_nothing_has_failed(paused: House) -> None:
    at = paused
    stream, reading = await wait_for_pages(at)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    at.clock.advance(500)
    await stream.hang_up(Hangup.CLIENT_GONE)
    assert at.admission.queued() == 0
    assert at.events(1)[-1] == "given up"
    assert failures(at) == 0
    assert list(at.registry.index.failures()) == []
    assert count(at, "baton_retraction_pause_seconds_sum") == 0.5, "it was lost all the same"


async def test_the_requests_own_time_ends_the_pause_and_that_is_what_its_client_reads() -> None:
    async with house(rooms_max=1, timeout_s=0.5) as at:
        at.prefill.script = prefills()
        at.decode.script = retracted(next_token)
        at.decode.scripts = [retracted(next_token)]
        stream = await at.backend.generate(asked())
        await until(lambda: at.entry(1).cause is not None)
        await at.admission.admit("another", 3, 5)
        assert (await stream.next()).tokens
        with pytest.raises(RoomFailed) as failed:
            await stream.next()
        assert failed.value.reason is Reason.DEADLINE
        assert str(failed.value).startswith("it waited to go on, since its worker needed its pages: ")
        assert at.events(1)[-1] == "not retried"
        assert [each.id for each in at.registry.index.failures()] == [1], "the request failed, and is listed"


async def test_a_worker_that_is_lost_while_its_request_is_paused_is_the_cause() -> None:
    async with house(rooms_max=1, wait_s=0.0) as at:
        at.prefill.script = prefills()
        at.decode.script = retracted(next_token)
        stream = await at.backend.generate(asked())
        await until(lambda: at.entry(1).cause is not None)
        at.rooms.lose(at.decode.incarnation, "gone", proof="left")
        assert (await read(stream))[1] == "decode_lost"


async def test_a_room_that_its_caller_drives_is_retracted_and_what_follows_is_the_callers() -> None:
    async with house() as at:
        entry = await at.admission.admit("request-1", 3, 5)
        at.rooms.fail(entry.id, RETRACTED)
        assert at.events(1)[-2:] == ["retracted", "given up"]
        assert not entry.has_failed


async def test_prefill_that_hears_of_it_late_has_not_failed_either() -> None:
    """Prefill had sealed the room already, or reports that decode gave it up."""
    async with house(rooms_max=1, places=4) as at:
        given_up = [
            accepted(P),
            ended(P, Cause(Reason.RECEIVER_CLOSED, "the decode worker gave the room up")),
        ]
        late = asyncio.Event()
        at.prefill.scripts, at.prefill.script = [given_up], prefills()
        at.decode.scripts, at.decode.script = [[accepted(D), late, ended(D, RETRACTED)]], decodes()
        reading = asyncio.ensure_future(read(await at.backend.generate(asked())))
        await until(lambda: "prefill outcome" in at.events(1))
        late.set()
        assert await reading == ([7, 8, 9], "length")
        assert at.entry(1).cause == RETRACTED
        assert failures(at) == 0
