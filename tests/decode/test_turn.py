"""Tests of the turns of a decode worker: grants, admission, steps, cancels, deadlines and draining."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from baton.handover import pending_closes
from baton.handover.turn import Lap
from baton.ids import RoomId
from baton.pages.errors import LayoutMismatch
from baton.pages.pool import PageState
from baton.pages.record import SEAL_BYTES, SEAL_OFFSET, SLOT_BYTES
from baton.rooms.errors import Cause, NotConnected, PeerFault, Reason, Refusal
from baton.rooms.phases import Phase
from baton.rooms.request import FinishReason, Request
from baton.testing.memory_transfer import MemoryTransfer
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.conversions import cause_to_wire, finish_from_wire
from baton.wire.errors import NotQuiet, UnknownReceiver, WrongIncarnation
from baton.worker.polling import HEARTBEAT_S
from tests.decode.bench import SECRET, Caller, DecodeBench, decoding
from tests.decode.links import asking, needed
from tests.patience import PATIENCE_S
from tests.prefill import toy
from tests.prefill.bench import PREFILL
from tests.wire.servers import until

PROMPT = tuple(range(200, 206))
ASKED = toy.request("1", PROMPT, max_tokens=7)


@pytest.fixture
async def bench() -> AsyncIterator[DecodeBench]:
    async with decoding() as made:
        yield made


async def started(bench: DecodeBench, request: Request = ASKED) -> Caller:
    """Open a room whose sender has been told where to write."""
    caller = await bench.stream(request)
    await bench.granted(int(request.request_id))
    return caller


async def test_a_room_is_granted_admitted_decoded_and_forgotten(bench: DecodeBench) -> None:
    caller = await bench.stream(ASKED)
    grant = await bench.granted(1)
    assert (grant.room, grant.receiver, grant.prefix_tokens) == (1, 22, 0)
    assert len(grant.pages[0].pages) == 2, "the prompt's pages, and not those of the answer"
    assert bench.pages(PageState.EXPOSED) == 2
    assert bench.pages(PageState.RESERVED) == 1
    assert bench.gauge("baton_decode_transfer_queue_requests") == 1
    bench.land(ASKED)
    await bench.settle()
    assert await caller.outcome() == ""
    assert caller.tokens == toy.answer(ASKED)
    assert finish_from_wire(caller.replies[-2].tokens.finish) is FinishReason.LENGTH
    assert bench.gauge("baton_decode_tokens_total") == ASKED.max_tokens - 1
    assert bench.gauge("baton_step_seconds_count") == ASKED.max_tokens - 1
    assert len(bench.sender.connects) == 1
    assert bench.sender.closes == []
    bench.assert_empty()


async def test_a_stop_token_ends_the_sequence(bench: DecodeBench) -> None:
    third = toy.answer(ASKED)[2]
    asked = toy.request("1", PROMPT, max_tokens=7, stop_token_ids=(third,))
    caller = await started(bench, asked)
    bench.land(asked)
    await bench.settle()
    assert caller.tokens == toy.answer(ASKED)[:3]
    assert finish_from_wire(caller.replies[-2].tokens.finish) is FinishReason.STOP
    bench.assert_empty()


async def test_an_answer_of_one_token_needs_no_step(bench: DecodeBench) -> None:
    asked = toy.request("1", PROMPT, max_tokens=1)
    caller = await started(bench, asked)
    bench.land(asked)
    await bench.settle()
    assert caller.tokens == toy.answer(asked)
    assert bench.engine.steps == 0
    bench.assert_empty()


async def test_a_worker_that_waits_for_pages_drives_the_transfer_and_takes_no_turn_until_a_seal_is_there(
    bench: DecodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = await started(bench)
    progress, driven = MemoryTransfer.progress, []

    def noted(transfer: MemoryTransfer) -> None:
        driven.append(1)
        progress(transfer)

    monkeypatch.setattr(MemoryTransfer, "progress", noted)
    while await bench.turn() is not Lap.IDLE:
        pass
    driven.clear()
    resting = asyncio.ensure_future(bench.work.rest())
    await until(lambda: len(driven) > 3)
    assert not resting.done()
    bench.land(ASKED)
    await asyncio.wait_for(resting, HEARTBEAT_S / 2)
    await bench.settle()
    assert caller.tokens == toy.answer(ASKED)


async def test_a_room_is_granted_in_the_turn_behind_the_one_that_queues_it(bench: DecodeBench) -> None:
    """Whatever else waits to run is served after that, and nothing follows until the sender has answered."""
    bench.sender.may_connect.set()
    await bench.stream(ASKED)
    async with asyncio.timeout(PATIENCE_S):
        while await bench.turn() is not Lap.QUEUED:
            pass
    assert bench.pages(PageState.EXPOSED) == 0
    assert await bench.turn() is Lap.IDLE
    assert bench.pages(PageState.EXPOSED) == 2
    await until(lambda: 1 in bench.sender.grants)
    bench.land(ASKED)
    await bench.settle()


async def test_a_step_costs_one_turn(bench: DecodeBench) -> None:
    caller = await started(bench)
    bench.land(ASKED)
    await bench.turns_until(lambda: not bench.step_thread.free)
    for drawn in range(2, 5):
        await bench.step_end()
        assert await bench.turn() is Lap.IDLE, "nothing is left to do before the next step ends"
        assert not bench.step_thread.free
        await until(lambda drawn=drawn: len(caller.tokens) == drawn)  # type: ignore[misc]
    await bench.settle()


def held_back(bench: DecodeBench) -> Callable[[], None]:
    """Return a function that lands the first room's seal, which is held back from what has landed."""
    seal_at = bench.sender.grants[1].slot * SLOT_BYTES + SEAL_OFFSET
    where = bench.slots.view[seal_at : seal_at + SEAL_BYTES]
    seal, where[:] = bytes(where), bytes(SEAL_BYTES)

    def land() -> None:
        where[:] = seal

    return land


async def test_once_its_record_is_there_a_seal_is_looked_for_without_a_pause_but_not_for_ever(
    bench: DecodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = await started(bench)
    while await bench.turn() is not Lap.IDLE:
        pass
    bench.land(ASKED)
    seal_later = held_back(bench)
    done: list[str] = []
    rest, progress = bench.mailbox.rest, MemoryTransfer.progress

    async def paused(bound_s: float) -> None:
        done.append("pause")
        await rest(bound_s)

    def looked(transfer: MemoryTransfer) -> None:
        done.append("look")
        progress(transfer)

    monkeypatch.setattr(bench.mailbox, "rest", paused)
    monkeypatch.setattr(MemoryTransfer, "progress", looked)
    monkeypatch.setattr(bench.receiving, "_near_s", 1_000.0)
    resting = asyncio.ensure_future(bench.work.rest())
    await until(lambda: len(done) > 300)
    assert "pause" not in done
    [room] = bench.work.roster
    room.near_until_s = 0.0
    await until(lambda: done[-4:] == ["pause", "look", "pause", "look"])
    seal_later()
    await asyncio.wait_for(resting, HEARTBEAT_S / 2)
    await bench.settle()
    assert caller.tokens == toy.answer(ASKED)


async def test_what_is_written_to_the_slot_after_its_seal_was_seen_is_not_looked_at(
    bench: DecodeBench,
) -> None:
    caller = await started(bench)
    bench.land(ASKED)
    assert bench.work.observe()
    bench.slots.view[:] = b"\xff" * len(bench.slots.view)
    await bench.settle()
    assert caller.tokens == toy.answer(ASKED)


async def test_who_keeps_a_rooms_memory_is_told_once(
    bench: DecodeBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pending_closes, "OVERDUE_S", 0.0)
    caller = await started(bench)
    bench.sender.refuse_closes = [PeerFault("not now")] * 2
    await bench.cancel(1)
    await bench.turns_until(lambda: len(bench.sender.closes) >= 3)
    told = [vars(each) for each in caplog.records if each.message == "close not answered"]
    assert [each["levelname"] for each in told] == ["WARNING"]
    assert told[0]["baton_fields"]["worker"] == "prefill-0"
    assert "has not answered" in told[0]["baton_fields"]["cause"]
    bench.sender.quiet.set()
    await bench.settle()
    assert await caller.outcome() == "cancelled"
    bench.assert_empty()


async def test_a_departed_prefill_is_a_proof_and_ends_its_rooms(bench: DecodeBench) -> None:
    waiting, quarantined = await started(bench), await started(bench, toy.request("2", PROMPT))
    running = toy.request("3", PROMPT, max_tokens=7)
    bench.engine.hold()
    decoded = await started(bench, running)
    bench.land(running)
    await bench.turns(3)
    assert bench.phase(3) is Phase.SUCCESS
    await bench.cancel(2)
    await bench.enter(group_pb2.Command(departed=PREFILL))
    assert await waiting.outcome() == "prefill_lost"
    assert await quarantined.outcome() == "cancelled"
    bench.engine.go()
    await bench.settle()
    assert decoded.tokens == toy.answer(running), "its pages are its own since it was admitted"
    bench.assert_empty()
    await until(lambda: not bench.channels.incarnations())


@pytest.mark.parametrize("phase", ["connecting", "transferring", "running"])
async def test_a_cancel_in_any_phase_gives_everything_back(bench: DecodeBench, phase: str) -> None:
    if phase == "connecting":
        bench.sender.may_connect.clear()
    caller = await bench.stream(ASKED)
    if phase in ("transferring", "running"):
        await bench.granted(1)
    if phase == "running":
        bench.engine.hold()
        bench.land(ASKED)
        await bench.turns(3)
    replies = bench.work.roster.get(RoomId(1)).replies
    await bench.cancel(1)
    assert await caller.outcome() == "cancelled"
    if phase == "running":
        await bench.turns(5)
        assert RoomId(1) in bench.work.roster, "a step still reads its pages"
        assert caller.tokens == toy.answer(ASKED)[:1]
    bench.engine.go()
    bench.sender.quiet.set()
    bench.sender.may_connect.set()
    await bench.settle()
    assert isinstance(replies, asyncio.Queue)
    assert replies.empty(), "nothing is said after the outcome"
    await until(lambda: not asking(bench.peers))
    bench.assert_empty()


async def test_a_caller_that_leaves_cancels_its_room(bench: DecodeBench) -> None:
    caller = await started(bench)
    caller.task.cancel()
    bench.sender.quiet.set()
    await bench.settle()
    bench.assert_empty()


async def test_rooms_beyond_max_running_wait_their_turn() -> None:
    async with decoding(max_running=2) as bench:
        asked = [toy.request(str(room), PROMPT[:3], max_tokens=4 + room) for room in (1, 2, 3)]
        callers = [await started(bench, each) for each in asked]
        bench.engine.hold()
        for each in asked:
            bench.land(each)
        await bench.turns(3)
        assert bench.gauge("baton_decode_running_requests") == 2
        assert bench.gauge("baton_decode_waiting_requests") == 1
        assert bench.gauge("baton_decode_batch_places", state="taken") == 2
        assert bench.gauge("baton_decode_batch_places", state="free") == 0
        bench.engine.go()
        await bench.settle()
        assert [caller.tokens for caller in callers] == [toy.answer(each) for each in asked]
        bench.assert_empty()


async def test_a_failed_step_fails_the_rooms_that_were_in_it(bench: DecodeBench) -> None:
    caller = await started(bench)
    bench.engine.fail_next = ValueError("out of memory")
    bench.land(ASKED)
    await bench.settle()
    assert await caller.outcome() == "engine_failed"
    again = await started(bench, toy.request("2", PROMPT, max_tokens=3))
    bench.land(toy.request("2", PROMPT, max_tokens=3))
    await bench.settle()
    assert await again.outcome() == ""
    bench.assert_empty()


async def test_a_sequence_without_a_token_fails_its_room_alone(bench: DecodeBench) -> None:
    """One room has a broken page in a batch of several rooms."""
    asked = [toy.request(str(room), PROMPT, max_tokens=6) for room in (1, 2)]
    callers = [await started(bench, each) for each in asked]
    for each in asked:
        bench.land(each)
    await bench.turns_until(lambda: all(len(caller.tokens) > 1 for caller in callers))
    bench.engine.broken.add(toy.mark(asked[0]))
    await bench.settle()
    assert [await caller.outcome() for caller in callers] == ["engine_failed", ""]
    assert callers[1].tokens == toy.answer(asked[1])
    bench.assert_empty()


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (toy.request("1", (1, toy.VOCABULARY)), "outside the vocabulary"),
        (toy.request("1", (1,), 4, output=(1, toy.VOCABULARY)), "output has an id outside the vocabulary"),
        (toy.request("1", (1,), toy.CONTEXT + 1), "context"),
        (toy.request("1", (1,), 100), "never holds it"),
        (toy.request("1", (1,), 3, output=(4, 5, 6)), "output answers the request already, with 3 tokens"),
    ],
)
async def test_what_can_never_be_decoded_is_refused_at_the_door(
    bench: DecodeBench, request_: Request, says: str
) -> None:
    with pytest.raises(Refusal, match=says):
        await bench.stream(request_)
    bench.assert_empty()
    assert bench.sender.connects == []


async def test_a_peer_that_cannot_be_connected_fails_the_rooms_that_waited_for_it(
    bench: DecodeBench,
) -> None:
    bench.sender.refuse_connect = WrongIncarnation("meant for incarnation 11, this is 12")
    bench.sender.may_connect.clear()
    first, second = await bench.stream(ASKED), await bench.stream(toy.request("2", PROMPT))
    bench.sender.may_connect.set()
    await bench.settle()
    assert [await first.outcome(), await second.outcome()] == ["connect_failed"] * 2
    await until(lambda: not bench.channels.incarnations())
    assert "this is 12" in first.replies[-1].outcome.cause.text
    assert len(bench.sender.connects) == 1, "asked once for both"
    bench.assert_empty()
    bench.sender.refuse_connect = None
    third = toy.request("3", PROMPT, max_tokens=2)
    caller = await started(bench, third)
    bench.land(third)
    await bench.settle()
    assert caller.tokens == toy.answer(third)


async def test_a_channel_that_is_closed_under_a_connect_shuts_nobody_out(bench: DecodeBench) -> None:
    """A channel is closed so when another TLS certificate replaces its own."""
    bench.sender.may_connect.clear()
    caller = await bench.stream(ASKED)
    await until(lambda: bool(bench.sender.connects))
    await bench.channels.drop(PREFILL)
    await until(lambda: len(bench.sender.connects) == 2)
    bench.sender.may_connect.set()
    await bench.granted(1)
    bench.land(ASKED)
    await bench.settle()
    assert caller.tokens == toy.answer(ASKED)
    bench.assert_empty()


async def test_a_peer_that_departs_while_it_is_being_connected_leaves_nothing_behind(
    bench: DecodeBench,
) -> None:
    bench.sender.may_connect.clear()
    caller = await bench.stream(ASKED)
    await until(lambda: bool(bench.sender.connects))
    await bench.enter(group_pb2.Command(departed=PREFILL))
    assert await caller.outcome() == "prefill_lost"
    bench.sender.may_connect.set()
    await bench.settle()
    await until(lambda: not asking(bench.peers))
    bench.assert_empty()
    await until(lambda: not bench.channels.incarnations())


@pytest.mark.parametrize(
    ("problem", "reason", "text"),
    [
        (NotQuiet("1 puts have not ended"), "connect_failed", "1 puts have not ended"),
        (LayoutMismatch("page_tokens", 16, 4), "connect_failed", "page_tokens"),
        (WrongIncarnation("meant for incarnation 11"), "prefill_lost", "meant for incarnation 11"),
        (None, "prefill_lost", "Socket closed"),
    ],
    ids=["not quiet", "another layout", "another process", "its stream breaks"],
)
async def test_first_cause_wins_why_the_way_is_not_made_anew_is_what_the_caller_hears(
    bench: DecodeBench, problem: Exception | None, reason: str, text: str
) -> None:
    """The grant finds that the sender has lost its connection to this worker, and connecting anew fails."""
    bench.sender.may_connect.set()
    caller = await bench.stream(ASKED)
    peers: Any = bench.peers
    await until(lambda: peers.links[PREFILL].session.is_connected)
    peers.connect_timeout_s = 0.2
    bench.sender.refuse_grants = [NotConnected("connect first")]
    bench.sender.refuse_connect = problem
    if problem is None:
        bench.sender.may_connect.clear()
        await bench.turns_until(lambda: len(bench.sender.connects) == 2)
        bench.sender.broken.set()
    bench.sender.quiet.set()
    await bench.turns_until(lambda: caller.task.done())
    assert await caller.outcome() == reason
    told = caller.replies[-1].outcome.cause.text
    assert told.startswith("decode cannot connect to prefill worker prefill-0: ")
    assert text in told
    bench.sender.may_connect.set()
    bench.sender.broken.clear()
    bench.sender.refuse_connect = None
    await bench.settle()
    bench.assert_empty()


@pytest.mark.parametrize(("reason", "connects"), [(Reason.TRANSFER_FAILED, 2), (Reason.CLIENT_GONE, 1)])
async def test_after_a_room_that_failed_on_the_way_the_next_one_connects_anew(
    bench: DecodeBench, reason: Reason, connects: int
) -> None:
    await started(bench)
    cause = cause_to_wire(Cause(reason, "seen by the other side"))
    await bench.enter(group_pb2.Command(cancel=inference_pb2.CancelRequest(room=1, cause=cause)))
    bench.sender.quiet.set()
    await bench.settle()
    again = toy.request("2", PROMPT, max_tokens=3)
    caller = await started(bench, again)
    assert len(bench.sender.connects) == connects
    bench.land(again)
    await bench.settle()
    assert await caller.outcome() == ""
    bench.assert_empty()


async def test_a_refused_destination_fails_the_room_and_is_closed_all_the_same(bench: DecodeBench) -> None:
    bench.sender.refuse_grants = [PeerFault("room 1: the registry named another receiver")]
    caller = await bench.stream(ASKED)
    await bench.turns_until(lambda: bool(bench.sender.closes))
    assert await caller.outcome() == "connect_failed", "whose fault it is, decode does not know"
    assert "the registry named another receiver" in caller.replies[-1].outcome.cause.text
    assert bench.pages(PageState.QUARANTINED) == 2
    bench.sender.quiet.set()
    await bench.settle()
    bench.assert_empty()


async def test_what_was_said_to_a_sender_that_no_room_has_named_us_to_is_said_again(
    bench: DecodeBench,
) -> None:
    """Both workers are called at once, so this one may reach the sender before its room does."""
    bench.sender.refuse_streams = [UnknownReceiver("no room has named receiver 0x16")] * 4
    caller = await started(bench)
    bench.land(ASKED)
    await bench.settle()
    assert await caller.outcome() == ""
    assert bench.sender.greetings[-1] == inference_pb2.Greeting(
        incarnation=PREFILL, receiver=22, secret=SECRET
    )
    assert bench.sender.refuse_streams == []
    bench.assert_empty()


async def test_zero_at_idle_a_sender_that_no_room_names_us_to_is_left_alone_once_no_room_is_for_it(
    bench: DecodeBench,
) -> None:
    """The room has ended here, and never reaches the sender."""
    streams = 100_000
    bench.sender.refuse_streams = [UnknownReceiver("no room has named receiver 0x16")] * streams
    caller = await bench.stream(ASKED)
    await until(lambda: len(bench.sender.refuse_streams) < streams - 5)
    assert asking(bench.peers) == 1
    await bench.cancel(1)
    assert await caller.outcome() == "cancelled"
    await bench.settle()
    await until(lambda: not needed(bench.peers))
    bench.assert_empty()
    await until(lambda: len(bench.channels) == 0)


async def test_live_is_not_lost_a_sender_that_answers_nothing_while_its_stream_lives_fails_no_room(
    bench: DecodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender is busy. Hours pass on the loop's clock, and no request is repeated."""
    bench.sender.may_connect.clear()
    bench.sender.may_answer_grants.clear()
    caller = await bench.stream(ASKED)
    await until(lambda: bool(bench.sender.connects))
    await hours_pass(monkeypatch)
    bench.sender.may_connect.set()
    await bench.granted(1)
    await hours_pass(monkeypatch)
    await bench.turns(3)
    assert bench.phase(1) is Phase.TRANSFERRING
    assert asking(bench.peers) == 1
    bench.sender.may_answer_grants.set()
    bench.land(ASKED)
    await bench.settle()
    assert await caller.outcome() == ""
    assert (len(bench.sender.connects), bench.sender.granted_at_once) == (1, [1])
    bench.assert_empty()


async def hours_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let hours pass on the loop's clock, so that all its timers run out."""
    loop = asyncio.get_running_loop()
    clock, ahead_s = loop.time, 10_000.0
    with monkeypatch.context() as patch:
        patch.setattr(loop, "time", lambda: clock() + ahead_s)
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_stream_that_breaks_costs_no_room_whose_grant_was_answered(bench: DecodeBench) -> None:
    caller = await started(bench)
    await until(lambda: not asking(bench.peers))
    bench.sender.broken.set()
    await until(lambda: bench.sender.ended > 0)
    await bench.turns(5)
    bench.sender.broken.clear()
    bench.land(ASKED)
    await bench.settle()
    assert await caller.outcome() == ""
    bench.assert_empty()


async def test_what_many_rooms_are_granted_in_one_turn_leaves_in_one_message() -> None:
    async with decoding() as bench:
        bench.sender.may_connect.clear()
        asked = [toy.request(str(room), PROMPT[:3], max_tokens=2) for room in range(1, 5)]
        callers = [await bench.stream(each) for each in asked]
        await until(lambda: bool(bench.sender.connects))
        bench.sender.may_connect.set()
        await bench.granted(4)
        assert bench.sender.granted_at_once == [4]
        for each in asked:
            bench.land(each)
        await bench.settle()
        assert [await each.outcome() for each in callers] == [""] * 4
        assert len(bench.sender.greetings) == 1


async def test_a_draining_worker_leaves_when_it_holds_nothing(bench: DecodeBench) -> None:
    caller = await started(bench)
    bench.mailbox.put(group_pb2.Command(drain=True))
    assert await bench.turn() is not Lap.LAST
    bench.land(ASKED)
    await bench.settle()
    assert caller.tokens == toy.answer(ASKED)
    while await bench.turn() is not Lap.LAST:
        pass
