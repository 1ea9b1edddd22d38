"""Tests that a request outlives its failed rooms without a gap or a repeated token, within its bounds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from baton.api.backend import Hangup, RoomFailed
from baton.bootstrap.admission.placement_request import QueueFull, Retry
from baton.bootstrap.canary import Canary
from baton.bootstrap.room_messages import room_to_wire
from baton.fleet.need import Need
from baton.fleet.retry import RETRIED
from baton.fleet.worker_record import WorkerState
from baton.handover import opened_room
from baton.ids import Incarnation, RoomId
from baton.pages.block_hashes import BLOCK_TOKENS, hash_blocks
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.rooms.reasons import REASONS, Fault
from baton.rooms.request import Request, Sampling
from baton.wire.errors import Draining, MailboxFull, WrongIncarnation
from tests.bootstrap.scripted import (
    CANARY,
    LENGTH,
    DecodeWorker,
    House,
    PrefillWorker,
    Step,
    accepted,
    asked,
    ended,
    first,
    house,
    read,
    tokens,
)
from tests.patience import PATIENCE_S
from tests.wire.servers import serving, until

P, D = Side.PREFILL, Side.DECODE
OTHERS_TOKENS = 400
ANSWER = (7, 8, 9, 10, 11)
CAME_MS = 5_000
"""Arrival of the requests by the wall clock, ms."""


def prefills() -> list[Step]:
    """Script of an honest prefill worker: its first token is the next one of the answer, and has the finish
    if it is the last."""

    def next_one(request: Request) -> Step:
        start = len(request.output)
        return first(ANSWER[start], LENGTH if start + 1 == request.max_tokens else None)

    return [accepted(P), next_one, ended(P)]


def decodes() -> list[Step]:
    """Script of an honest decode worker, which goes on behind the request's output."""

    def rest(request: Request) -> Step:
        start = len(request.output)
        return tokens(start, ANSWER[start : request.max_tokens], LENGTH)

    return [accepted(D), rest, ended(D)]


def broken(side: Side, reason: Reason, *before: Step) -> list[Step]:
    return [accepted(side), *before, ended(side, Cause(reason, "as it happens"))]


class PairHealth(House):
    """A house with a second pair of workers, which is so busy that only requests that avoid the first one get
    it."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.prefill_1 = PrefillWorker("prefill-1", P, Incarnation(12), rooms_max=4)
        self.decode_1 = DecodeWorker("decode-1", D, Incarnation(23), rooms_max=4)
        self.other = RoomId(0)

    @property
    def workers(self) -> list[PrefillWorker | DecodeWorker]:
        return [self.prefill, self.decode, self.prefill_1, self.decode_1]

    def occupy(self) -> None:
        pair = (self.registry.worker(Incarnation(12)), self.registry.worker(Incarnation(23)))
        self.other = self.registry.open_room(
            "other", pair, Need(OTHERS_TOKENS, OTHERS_TOKENS), self.clock.now_ms()
        ).id

    async def all_at_rest(self, *rooms: int) -> None:
        """Report `rooms` retired by the workers that hold them, and check that nothing is left."""
        for worker in self.workers:
            worker.cancelled.set()
        self.rooms.answered(self.other)
        for room in (self.other, *rooms):
            self.retired(room)
        await self.at_rest()


@asynccontextmanager
async def two_pairs(**more: Any) -> AsyncIterator[PairHealth]:
    async with AsyncExitStack() as stack:
        made = PairHealth(**{"rooms_max": 3, "places": 4, **more})
        for worker in made.workers:
            worker.address = await stack.enter_async_context(serving(worker.add))
            made.join(worker)
        made.occupy()
        try:
            yield made
        finally:
            made.rooms.streams.close()
            await made.rooms.finish()
            await made.channels.close()


@pytest.fixture
async def at() -> AsyncIterator[PairHealth]:
    async with two_pairs() as made:
        yield made


@pytest.mark.parametrize("teller", list(Side), ids=lambda side: side.value)
@pytest.mark.parametrize(
    "reason",
    [each for each in Reason if each in RETRIED and REASONS[each].is_attempt],
    ids=lambda each: each.value,
)
async def test_a_failed_room_is_followed_by_one_that_avoids_the_guilty(
    at: PairHealth, reason: Reason, teller: Side
) -> None:
    guilty = {
        Fault.PREFILL: {P},
        Fault.DECODE: {D},
        Fault.EITHER: {P, D},
        Fault.TELLER: {teller},
    }[REASONS[reason].fault]
    at.prefill_1.script, at.decode_1.script = prefills(), decodes()
    if teller is P:
        at.prefill.scripts = [broken(P, reason), prefills()]
        at.decode.scripts = [[accepted(D)], decodes()]
    else:
        at.prefill.scripts = [[accepted(P)], prefills()]
        at.decode.scripts = [broken(D, reason), decodes()]
    assert await read(await at.backend.generate(asked())) == ([7, 8, 9], "length")
    old, new = at.entry(2), at.entry(3)
    assert (old.names[P], old.decode.name) == ("prefill-0", "decode-0")
    assert new.names[P] == ("prefill-1" if P in guilty else "prefill-0")
    assert new.decode.name == ("decode-1" if D in guilty else "decode-0")
    assert old.cause == Cause(reason, "as it happens")
    assert new.cause is None
    sample = at.metrics.get_sample_value("baton_request_retries_total", {"reason": reason.value})
    assert sample == 1
    await at.all_at_rest(2, 3)


@pytest.mark.parametrize(
    "reason", [Reason.CLIENT_GONE, Reason.CANCELLED, Reason.ANSWERED, Reason.BOOTSTRAP_LOST]
)
async def test_what_is_not_a_workers_failure_ends_the_request(at: PairHealth, reason: Reason) -> None:
    at.prefill.script = [accepted(P), first(7)]
    at.decode.script = broken(D, reason, tokens(0, [7]))
    drawn, how = await read(await at.backend.generate(asked()))
    assert (drawn, how) == ([7], reason.value)
    assert at.prefill_1.called == []
    assert "retried" not in at.events(2)
    await at.all_at_rest(2)


async def test_a_room_that_somebody_cancelled_is_not_retried(at: PairHealth) -> None:
    at.prefill.script = [accepted(P)]
    stream = await at.backend.generate(asked())
    at.rooms.fail(RoomId(2), Cause(Reason.CANCELLED, "by the operator"))
    assert await read(stream) == ([], "cancelled")
    await at.all_at_rest(2)


async def test_same_root_only_each_room_of_a_request_is_placed_and_asked_for_under_its_salt(
    at: PairHealth,
) -> None:
    request = replace(asked(), prompt=tuple(range(BLOCK_TOKENS)), salt=9)
    at.prefill.scripts = [[accepted(P)], prefills()]
    at.decode.script, at.decode_1.script = broken(D, Reason.ENGINE_FAILED), decodes()
    assert await read(await at.backend.generate(request)) == ([7, 8, 9], "length")
    for name in ("prefill-0", "decode-0", "decode-1"):
        sent = next(each for each in at.registry.workers() if each.facts.name == name)
        told = [sent.cached_tokens(hash_blocks(request.prompt, salt)) for salt in (0, 9)]
        assert told == [0, BLOCK_TOKENS], name
    await at.all_at_rest(2, 3)
    assert {each.salt for worker in at.workers for each in worker.asked} == {9}


async def test_the_next_room_goes_on_behind_the_tokens_that_were_passed_on(at: PairHealth) -> None:
    sampling = Sampling(seed=5, top_logprobs=2)
    request = Request("request-1", (1, 2, 3), 5, min_tokens=2, sampling=sampling)
    at.clock.advance(CAME_MS)
    at.prefill.script = prefills()
    at.decode.script = [accepted(D), tokens(0, [7]), tokens(1, [8]), tokens(2, [9]), None]
    at.decode_1.script = [accepted(D), tokens(3, [10]), tokens(4, [11], LENGTH), ended(D)]
    assert await read(await at.backend.generate(request)) == ([7, 8, 9, 10, 11], "length")
    assert at.entry(3).names[P] == "prefill-0", "it was not its fault"
    assert [at.entry(room).tokens for room in (2, 3)] == [5, 7], "each begins with what is known by then"
    await at.all_at_rest(2, 3)
    came = replace(request, arrived_ms=CAME_MS, carried_tokens_max=at.prefill.tokens_max)
    assert at.prefill.asked == [came, replace(came, output=(7, 8, 9))]
    assert at.decode_1.asked == [replace(came, output=(7, 8, 9))]


async def test_each_room_names_the_other(at: PairHealth) -> None:
    at.prefill.script = prefills()
    at.decode.script = [accepted(D), None]
    at.decode_1.script = decodes()
    await read(await at.backend.generate(asked()))
    old, new = at.entry(2), at.entry(3)
    assert at.registry.find("request-1") == [new, old]
    assert new.retry_of == old.id
    assert [room_to_wire(each, events=True).retry_of for each in (old, new)] == [0, old.id]
    assert (new.events[0].name, new.events[0].detail) == (
        "opened",
        "on prefill-0 and decode-1, for room 2: decode_lost",
    )
    (told,) = [event.detail for event in old.events if event.name == "retried"]
    assert told == "as room 3 on prefill-0 and decode-1"
    await at.all_at_rest(2, 3)


async def test_the_old_room_is_ended_on_both_sides_and_its_late_tokens_are_dropped(at: PairHealth) -> None:
    late = asyncio.Event()
    at.prefill.scripts = [[accepted(P), first(7), None]]
    at.prefill_1.script = prefills()
    at.decode.scripts = [[accepted(D), late, tokens(0, [7, 66]), tokens(2, [67], LENGTH), ended(D)]]
    at.decode.script = decodes()
    stream = await at.backend.generate(asked())
    assert [token.id for token in (await stream.next()).tokens] == [7]
    await until(lambda: at.decode.called[:1] == [2])
    went_on = await stream.next()
    assert [token.id for token in went_on.tokens] in ([8], [8, 9]), "of whichever side was heard first"
    late.set()
    await until(lambda: at.decode.cancels == {2: "prefill_lost"})
    await until(lambda: "decode outcome" in at.events(2))
    if went_on.finish is None:
        assert await read(stream) == ([9], "length")
    assert set(at.entry(2).waiting_for) == {P, D}, "it is retired by its workers, not by its successor"
    await at.all_at_rest(2, 3)


async def test_a_request_gets_so_many_rooms_and_then_the_last_cause(at: PairHealth) -> None:
    at.prefill.script = at.prefill_1.script = [accepted(P)]
    at.decode.script = broken(D, Reason.RECORD_CORRUPT)
    at.decode_1.script = broken(D, Reason.ENGINE_FAILED)
    with pytest.raises(RoomFailed, match="as it happens") as error:
        await (await at.backend.generate(asked())).next()
    last = at.entry(4).cause
    assert last is not None
    assert error.value.reason is last.reason
    assert [each.id for each in at.registry.find("request-1")] == [4, 3, 2]
    assert [at.entry(room).retry_of for room in (2, 3, 4)] == [None, 2, 3]
    await at.all_at_rest(2, 3, 4)


async def test_a_third_room_avoids_the_guilty_of_both_before(at: PairHealth) -> None:
    """After both pairs have failed the request, any worker is tried again."""
    at.prefill.script = [accepted(P)]
    at.prefill.scripts = [[accepted(P)], prefills()]
    at.prefill_1.script = broken(P, Reason.ENGINE_FAILED)
    at.decode.scripts = [broken(D, Reason.TRANSFER_FAILED)]
    at.decode.script = decodes()
    at.decode_1.script = [accepted(D)]
    at.decode_1.scripts = [[accepted(D)], decodes()]
    assert await read(await at.backend.generate(asked())) == ([7, 8, 9], "length")
    pairs = [(at.entry(room).names[P], at.entry(room).decode.name) for room in (2, 3, 4)]
    assert pairs[:2] == [("prefill-0", "decode-0"), ("prefill-1", "decode-1")]
    assert pairs[2] == ("prefill-0", "decode-1"), "both prefill workers are guilty, one decode worker is"
    await at.all_at_rest(2, 3, 4)


async def test_a_request_waits_for_an_innocent_worker_that_is_full_now(at: PairHealth) -> None:
    pair = (at.registry.worker(Incarnation(12)), at.registry.worker(Incarnation(23)))
    full = [at.registry.open_room("more", pair, Need(1, 1), at.clock.now_ms()).id for _ in range(3)]
    at.prefill.script = prefills()
    at.decode.script = broken(D, Reason.ENGINE_FAILED)
    at.decode_1.script = decodes()
    reading = asyncio.ensure_future(read(await at.backend.generate(asked())))
    await until(lambda: at.admission.queued() == 1)
    at.rooms.answered(full[0])
    at.retired(full[0])
    assert await reading == ([7, 8, 9], "length")
    assert at.decode.called == [5]
    assert at.decode_1.called == [6]
    for room in full[1:]:
        at.rooms.answered(room)
    await at.all_at_rest(*full[1:], 5, 6)


async def test_the_first_tokens_room_says_what_was_cached(at: PairHealth) -> None:
    told = first(7)
    told.first_token.cached_tokens = 2
    again = first(8)
    again.first_token.cached_tokens = 4
    at.prefill.scripts = [[accepted(P), told, ended(P)], [accepted(P), again, ended(P)]]
    heard = asyncio.Event()
    at.decode.script = [accepted(D), heard, tokens(0, [7]), None]
    at.decode_1.script = decodes()
    stream = await at.backend.generate(asked())
    async with asyncio.timeout(PATIENCE_S):
        assert [token.id for token in (await stream.next()).tokens] == [7]
        heard.set()
        assert await read(stream) == ([8, 9], "length")
    assert stream.cached_tokens == 2
    await at.all_at_rest(2, 3)


# ---- one pair


@pytest.mark.parametrize("last", [decodes(), [accepted(D)]], ids=["by both sides", "by prefill"])
async def test_rooms_that_bring_a_request_further_do_not_count_against_it(last: list[Step]) -> None:
    """However often its workers are killed, a stream that goes on in between ends with its answer, whichever
    side has its last token first."""

    def one_more(request: Request) -> Step:
        start = len(request.output)
        return tokens(start, ANSWER[start : start + 2])

    async with house(rooms_max=2, places=9) as at:
        at.prefill.script = prefills()
        at.decode.script = broken(D, Reason.TRANSFER_FAILED, one_more)
        stream = await at.backend.generate(replace(asked(), max_tokens=len(ANSWER)))
        drawn: list[int] = []
        while len(drawn) < len(ANSWER) - 1:
            drawn += [token.id for token in (await stream.next()).tokens]
        at.decode.script = last
        assert drawn + (await read(stream))[0] == list(ANSWER)
        assert len(at.registry.find("request-1")) == 3


async def test_a_request_that_ends_each_of_its_workers_at_once_has_an_end() -> None:
    """Prefill draws a first token in each room, which alone does not count as progress."""
    async with house(rooms_max=3, places=9) as at:
        at.prefill.script = prefills()
        at.decode.script = broken(D, Reason.TRANSFER_FAILED)
        stream = await at.backend.generate(replace(asked(), max_tokens=len(ANSWER)))
        assert (await read(stream))[1] == "transfer_failed"
        assert len(at.registry.find("request-1")) == 3


async def test_the_only_pair_may_be_tried_again() -> None:
    async with house(rooms_max=3) as at:
        at.prefill.script = prefills()
        at.decode.scripts = [broken(D, Reason.TRANSFER_FAILED), decodes()]
        assert await read(await at.backend.generate(asked())) == ([7, 8, 9], "length")
        assert at.decode.called == [1, 2]


async def test_the_stream_goes_on_when_a_lost_worker_is_back_in_time() -> None:
    async with house(rooms_max=2) as at:
        at.prefill.scripts = [prefills(), prefills()]
        at.decode.scripts = [[accepted(D), tokens(0, [7])], decodes()]
        stream = await at.backend.generate(asked())
        await stream.next()
        await until(lambda: at.decode.called == [1])
        at.exited("decode-0", 222)
        reading = asyncio.ensure_future(read(stream))
        await until(lambda: at.admission.queued() == 1)
        at.decode.incarnation = Incarnation(23)
        at.join(at.decode, proven=False)
        await asyncio.sleep(0.05)
        assert not reading.done(), "no canary has passed yet"
        at.rooms.proven(at.decode.incarnation)
        assert await reading == ([8, 9], "length")
        assert at.admission.queued() == 0
        at.prefill.cancelled.set()
        at.decode.cancelled.set()
        for room in (1, 2):
            at.retired(room)
        await at.at_rest()


async def test_one_that_had_a_room_waits_for_space_for_longer_than_one_that_had_none() -> None:
    """Its client has begun to read. The queue's timeout is for requests whose clients have not."""
    async with house(rooms_max=2, queue_timeout_ms=1, places=1) as at:
        at.prefill.scripts = [prefills(), prefills()]
        at.decode.scripts = [broken(D, Reason.TRANSFER_FAILED), decodes()]
        stream = await at.backend.generate(asked())
        reading = asyncio.ensure_future(read(stream))
        await until(lambda: at.admission.queued() == 1)
        await asyncio.sleep(0.05)
        assert not reading.done()
        at.retired(1)
        assert await reading == ([7, 8, 9], "length")


async def test_where_nobody_comes_back_the_client_hears_the_cause_and_who_is_missing() -> None:
    async with house(rooms_max=3, wait_s=0.05) as at:  # --retry-wait-ms
        at.prefill.script = prefills()
        at.decode.script = [accepted(D), tokens(0, [7])]
        stream = await at.backend.generate(asked())
        await stream.next()
        at.exited("decode-0", 222)
        with pytest.raises(RoomFailed) as error:
            await stream.next()
        wanted = "decode worker decode-0: its process exited; not retried: no decode worker is ready"
        assert str(error.value) == wanted
        assert error.value.reason is Reason.DECODE_LOST
        assert "not retried" in at.events(1)
        assert at.admission.queued() == 0


async def test_a_worker_that_broke_a_stream_is_tried_again_once_it_has_renewed() -> None:
    async with house(rooms_max=2) as at:
        at.prefill.scripts = [[accepted(P), RuntimeError("a bug")], prefills()]
        at.decode.scripts = [[accepted(D)], decodes()]
        reading = asyncio.ensure_future(read(await at.backend.generate(asked())))
        await until(lambda: at.admission.queued() == 1)
        assert at.registry.worker(at.prefill.incarnation).state is WorkerState.SUSPECT
        at.rooms.renew(at.prefill.incarnation)
        assert await reading == ([7, 8, 9], "length")


async def test_a_worker_that_says_it_ends_gets_no_rooms_while_it_does() -> None:
    """A worker that ends first fails its rooms and then refuses others. A request must not spend its attempts
    on it."""
    async with house(rooms_max=3, places=4) as at:
        at.prefill.scripts, at.prefill.script = [prefills(), [accepted(P)]], prefills()
        lost = [accepted(D), tokens(0, [7]), ended(D, Cause(Reason.DECODE_LOST, "decode-0 ends: a bug"))]
        at.decode.scripts, at.decode.script = [lost, [Draining("decode-0 ends: a bug")]], decodes()
        reading = asyncio.ensure_future(read(await at.backend.generate(asked())))
        await until(lambda: at.admission.queued() == 1)
        assert at.decode.called == [1, 2]
        at.rooms.renew(at.decode.incarnation)
        assert await reading == ([7, 8, 9], "length")


async def test_another_process_at_a_workers_address_gets_no_rooms_of_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other process refuses each room at once. A request must not spend its attempts on it."""
    monkeypatch.setattr(opened_room, "LINGER_S", 0.2)
    async with house(rooms_max=3) as at:
        at.prefill.scripts = [[WrongIncarnation("meant for incarnation 11, this is 12")], prefills()]
        at.decode.scripts, at.decode.script = [[accepted(D)]], decodes()
        reading = asyncio.ensure_future(read(await at.backend.generate(asked())))
        await until(lambda: at.admission.queued() == 1)
        assert at.prefill.called == [1]
        at.rooms.lose(Incarnation(11), "its lease ran out", proof=None)
        at.prefill.incarnation = Incarnation(12)
        at.join(at.prefill)
        assert await reading == ([7, 8, 9], "length")
        cause = at.entry(1).cause
        assert cause is not None
        assert cause.reason is Reason.PREFILL_LOST


async def test_a_refusal_is_retried_like_any_other_failure() -> None:
    async with house(rooms_max=2) as at:
        at.prefill.scripts = [[MailboxFull("too many commands wait")], prefills()]
        at.decode.scripts, at.decode.script = [[accepted(D)]], decodes()
        assert await read(await at.backend.generate(asked())) == ([7, 8, 9], "length")


# ---- bounds


async def test_the_requests_own_time_bounds_all_its_rooms() -> None:
    async with house(rooms_max=100, timeout_s=2.0) as at:
        at.prefill.script = [accepted(P)]
        at.decode.scripts = [broken(D, Reason.TRANSFER_FAILED)]
        at.decode.script = [accepted(D)]
        begun = asyncio.get_running_loop().time()
        assert await read(await at.backend.generate(asked())) == ([], "deadline")
        took = asyncio.get_running_loop().time() - begun
        assert took < 5
        assert len(at.registry.find("request-1")) == 2, "no time was left for a third"


async def test_both_workers_of_each_room_are_told_how_long_the_request_may_still_take() -> None:
    async with house(rooms_max=2, timeout_s=20.0) as at:
        at.prefill.script = prefills()
        at.decode.scripts = [broken(D, Reason.TRANSFER_FAILED), decodes()]
        stream = await at.backend.generate(asked())
        await until(lambda: at.decode.called == [1])
        await asyncio.sleep(0.05)
        assert await read(stream) == ([7, 8, 9], "length")
        for worker in (at.prefill, at.decode):
            assert worker.left_ms[0] == 20_000
            assert 10_000 < worker.left_ms[1] <= 19_950


async def test_hopes_end_with_the_requests_time() -> None:
    async with house(rooms_max=3, timeout_s=0.7, wait_s=None) as at:
        at.prefill.script = [accepted(P)]
        stream = await at.backend.generate(asked())
        at.exited("decode-0", 222)
        assert await read(stream) == ([], "decode_lost")
        assert at.admission.queued() == 0


async def test_a_client_that_hangs_up_in_the_pause_leaves_nothing() -> None:
    async with house(rooms_max=3) as at:
        at.prefill.script = prefills()
        at.decode.script = [accepted(D), tokens(0, [7])]
        stream = await at.backend.generate(asked())
        await stream.next()
        at.exited("decode-0", 222)
        reading = asyncio.ensure_future(read(stream))
        await until(lambda: at.admission.queued() == 1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await stream.hang_up(Hangup.CLIENT_GONE)
        assert at.admission.queued() == 0
        told = at.entry().events[-1]
        assert (told.name, told.detail) == ("given up", "the client hung up while it waited for another room")
        at.decode.incarnation = Incarnation(23)
        at.join(at.decode)
        await asyncio.sleep(0.02)
        assert len(at.registry.find("request-1")) == 1
        at.prefill.cancelled.set()
        at.decode.cancelled.set()
        at.retired(1)
        await at.at_rest()


async def test_who_hung_up_gets_no_further_room(at: PairHealth) -> None:
    """The room that was opened at that very moment is closed again, and no worker hears of it."""
    at.prefill.script = prefills()
    at.decode.script = [accepted(D), tokens(0, [7])]
    stream = await at.backend.generate(asked())
    await stream.next()
    at.rooms.lose(at.decode.incarnation, "gone", proof="left")
    at.rooms.lose(at.decode_1.incarnation, "gone", proof="left")
    reading = asyncio.ensure_future(read(stream))
    await until(lambda: at.admission.queued() == 1)
    await stream.hang_up(Hangup.CLIENT_GONE)
    at.decode_1.incarnation = Incarnation(24)
    at.join(at.decode_1)
    assert await reading == ([], "decode_lost")
    assert at.decode_1.called == []
    await at.all_at_rest(2, 3)


async def test_a_stop_string_ends_the_second_room_too(at: PairHealth) -> None:
    at.prefill.scripts = [prefills(), prefills()]
    at.decode.script = [accepted(D), tokens(0, [7]), None]
    at.decode_1.script = [accepted(D), tokens(1, [8])]
    stream = await at.backend.generate(asked())
    assert [(await stream.next()).tokens[0].id for _ in range(2)] == [7, 8]
    await stream.hang_up(Hangup.STOP_STRING)
    assert at.entry(3).cause is None
    await until(lambda: at.decode_1.cancels == {3: "answered"})
    await at.all_at_rest(2, 3)


async def test_those_who_had_a_room_come_before_those_who_had_none() -> None:
    async with house(rooms_max=2) as at:
        at.decode.rooms_max = 9
        at.prefill.scripts = [[accepted(P)], [accepted(P)], prefills(), prefills()]
        at.decode.scripts = [[accepted(D)], [accepted(D)], decodes(), decodes()]
        streams = [await at.backend.generate(replace(asked(), request_id=name)) for name in ("a", "b")]
        fresh = asyncio.ensure_future(at.admission.admit("fresh", 3, 5))
        await until(lambda: at.admission.queued() == 1 and sorted(at.decode.called) == [1, 2])
        readings = []
        for place, stream in enumerate(streams):
            at.rooms.fail(RoomId(place + 1), Cause(Reason.TRANSFER_FAILED, "at once"))
            readings.append(asyncio.ensure_future(read(stream)))
            await until(lambda: at.admission.queued() == place + 2)  # noqa: B023
        for place, name in enumerate(("a", "b")):
            at.retired(place + 1)
            await until(lambda: len(at.registry.find(name)) == 2)  # noqa: B023
            assert not fresh.done()
        assert [await reading for reading in readings] == [([7, 8, 9], "length")] * 2
        for room in (3, 4):
            at.retired(room)
        assert (await fresh).request_id == "fresh"


async def test_a_queue_full_of_those_who_had_no_room_takes_one_who_had() -> None:
    """A client that has read the beginning of an answer is not refused the rest because newcomers fill the
    queue."""
    async with house(rooms_max=2, max_queue=1) as at:
        at.decode.rooms_max = 9
        at.prefill.scripts = [[accepted(P), first(7)], [accepted(P)], prefills()]
        at.decode.scripts = [[accepted(D)], [accepted(D)], decodes()]
        streams = [await at.backend.generate(asked()) for _ in range(2)]
        fresh = asyncio.ensure_future(at.admission.admit("fresh", 3, 5))
        await until(lambda: at.admission.queued() == 1 and sorted(at.decode.called) == [1, 2])
        reading = asyncio.ensure_future(read(streams[0]))
        at.rooms.fail(RoomId(1), Cause(Reason.TRANSFER_FAILED, "at once"))
        await until(lambda: at.admission.queued() == 2)
        with pytest.raises(QueueFull, match="the queue for workers is full: 1 request"):
            await at.admission.admit("another", 3, 5)
        at.retired(1)
        assert await reading == ([7, 8, 9], "length")
        assert not fresh.done()
        fresh.cancel()
        await asyncio.gather(fresh, return_exceptions=True)


async def test_no_more_of_those_who_had_a_room_wait_than_may() -> None:
    async with house(rooms_max=2, max_queue=1) as at:
        at.prefill.script = [accepted(P)]
        streams = [await at.backend.generate(asked()) for _ in range(2)]
        at.rooms.fail(RoomId(1), Cause(Reason.TRANSFER_FAILED, "at once"))
        waiting = asyncio.ensure_future(read(streams[0]))
        await until(lambda: at.admission.queued() == 1)
        at.rooms.fail(RoomId(2), Cause(Reason.TRANSFER_FAILED, "at once"))
        with pytest.raises(
            RoomFailed, match="at once; not retried: the queue for workers is full: 1 request"
        ):
            await streams[1].next()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert at.admission.queued() == 0


async def test_a_queue_full_of_those_who_had_no_room_keeps_nobody_from_hoping_for_a_worker() -> None:
    """The decode workers left are silent for a moment or too small. The queue waits for one of them to
    return."""
    async with house(rooms_max=2, max_queue=1) as at:
        small = DecodeWorker("small", D, Incarnation(23), tokens_max=100, address=at.decode.address)
        at.join(small)
        at.registry.suspect(small.incarnation)
        for place in range(2):
            await at.admission.admit(f"early-{place}", 3, 5)
        fresh = asyncio.ensure_future(at.admission.admit("fresh", 3, 5))
        await until(lambda: at.admission.queued() == 1)
        at.exited("decode-0", 222)
        assert not fresh.done()
        retry = Retry(RoomId(1), Reason.DECODE_LOST, frozenset(), wait_s=600.0)
        hoping = asyncio.ensure_future(at.admission.admit("early-0", 3, 500, retry))
        await until(lambda: at.admission.queued() == 2 or hoping.done())
        assert not hoping.done()
        for each in (fresh, hoping):
            each.cancel()
        await asyncio.gather(fresh, hoping, return_exceptions=True)


async def test_a_canary_has_one_room_whatever_becomes_of_it() -> None:
    async with house(rooms_max=3) as at:
        at.prefill.script = [accepted(P)]
        at.decode.script = broken(D, Reason.TRANSFER_FAILED)
        pair = (at.registry.worker(Incarnation(11)), at.registry.worker(Incarnation(22)))
        assert (
            await Canary(at.rooms, at.backend, CANARY).try_pair(pair)
            == "prefill-0 and decode-0: as it happens"
        )
        assert len(at.registry.find("canary")) == 1
