"""Tests that a sender which does not answer costs its receiver only the rooms that were under way."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.ids import Incarnation, RoomId
from baton.pages.pool import PageState
from baton.rooms.errors import NotConnected
from baton.rooms.phases import Phase
from baton.rooms.quarantine import HURRY
from baton.rooms.request import Request
from baton.runtime.errors import MemoryNotMoved
from baton.runtime.host_memory import CannotMove, HostMemory
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.memory_transfer import MemoryTransfer
from baton.testing.transfer_faults import FaultPlan
from baton.transfer.transfer_protocol import Region, kv_region
from baton.wire.baton.v1 import group_pb2
from baton.wire.errors import WrongIncarnation
from baton.worker.polling import HEARTBEAT_S
from tests.decode.bench import Caller, DecodeBench, decoding
from tests.decode.links import asking, needed
from tests.prefill import toy
from tests.prefill.bench import DEADLINE_MS, PREFILL
from tests.wire.servers import until

PROMPT = tuple(range(200, 206))
LATE = b"\xee" * toy.GROUP.page_bytes


def asked(room: int, max_tokens: int = 7) -> Request:
    return toy.request(str(room), PROMPT, max_tokens=max_tokens)


@pytest.fixture
async def bench() -> AsyncIterator[DecodeBench]:
    fabric = MemoryFabric(FaultPlan(hold_share=1.0, hold_steps=5_000))
    async with decoding(fabric=fabric) as made:
        yield made


async def abandoned(bench: DecodeBench, room: int) -> None:
    """Bring a room into quarantine, with a sender that does not answer the close."""
    caller = await bench.stream(asked(room))
    await bench.granted(room)
    await bench.cancel(room)
    assert await caller.outcome() == "cancelled"
    assert bench.phase(room) is Phase.FAILED


def outlive(bench: DecodeBench, room: int) -> None:
    """Extend the room's deadline, so that another event decides its end."""
    bench.work.roster.get(RoomId(room)).progressed(bench.clock.now_ms() + 10 * DEADLINE_MS)


async def test_pages_that_a_silent_sender_keeps_are_taken_back(bench: DecodeBench) -> None:
    await abandoned(bench, 1)
    bench.clock.advance(DEADLINE_MS - 1)
    await bench.turns(3)
    assert bench.pages(PageState.QUARANTINED) == 2, "time alone frees nothing, and it is not time yet"
    bench.clock.advance(1)
    await bench.settle()
    assert bench.gauge("baton_kv_revocations_total") == 1
    bench.assert_empty()
    await bench.turns(5)
    assert bench.gauge("baton_kv_revocations_total") == 1, "once"


async def test_it_is_done_sooner_when_most_of_the_pool_is_kept(bench: DecodeBench) -> None:
    for room in range(1, 5):
        caller = await bench.stream(toy.request(str(room), range(12), max_tokens=1))
        await bench.granted(room)
        await bench.cancel(room)
        assert await caller.outcome() == "cancelled"
    assert bench.pages(PageState.QUARANTINED) == 12
    bench.clock.advance(DEADLINE_MS // HURRY)
    await bench.settle()
    bench.assert_empty()


async def test_what_the_sender_wrote_lands_nowhere_afterwards(bench: DecodeBench) -> None:
    """The sender posted its writes before the revocation. They land after the same pages went to another
    room."""
    source, writer = HostMemory(len(LATE)), MemoryTransfer(bench.fabric, Incarnation(99))
    source.view[:] = LATE
    writer.register(Region(kv_region(0), source.address, source.length))
    writer.connect(bench.exposure.endpoint())
    old = bench.exposure.id
    await abandoned(bench, 1)
    for page in bench.sender.grants[1].pages[0].pages:
        writer.put(old, kv_region(0), [(0, page * toy.GROUP.page_bytes, len(LATE))])
    bench.clock.advance(DEADLINE_MS)
    await bench.settle()

    caller = await bench.stream(asked(2))
    grant = await bench.granted(2)
    assert set(grant.pages[0].pages) == set(bench.sender.grants[1].pages[0].pages), "the same pages"
    assert grant.exposure == bench.exposure.id != old
    bench.land(asked(2))
    while bench.fabric.puts_under_way:
        bench.fabric.step()
    assert LATE not in bytes(bench.engine.memory.view)
    await bench.settle()
    assert await caller.outcome() == ""
    assert caller.tokens == toy.answer(asked(2))
    bench.assert_empty()


async def test_rooms_that_were_admitted_live_on(bench: DecodeBench) -> None:
    running = await bench.stream(asked(1, max_tokens=12))
    await bench.granted(1)
    await abandoned(bench, 2)
    bench.engine.hold()
    bench.land(asked(1, max_tokens=12))
    await bench.turns_until(lambda: not bench.step_thread.free)
    outlive(bench, 1)
    bench.clock.advance(DEADLINE_MS)
    await bench.turns(5)
    assert bench.phase(2) is Phase.FAILED, "a step is running: the memory cannot move"
    bench.engine.go(2)
    await bench.turns_until(lambda: bench.gauge("baton_kv_revocations_total") == 1)
    bench.engine.go()
    await bench.settle()
    assert await running.outcome() == ""
    assert running.tokens == toy.answer(asked(1, max_tokens=12))
    bench.assert_empty()


async def test_rooms_under_way_from_other_senders_end_and_say_why(bench: DecodeBench) -> None:
    other = await bench.stream(asked(1))
    await bench.granted(1)
    bench.clock.advance(DEADLINE_MS - 1)
    await abandoned(bench, 2)
    outlive(bench, 1)
    bench.clock.advance(DEADLINE_MS)
    await bench.settle()
    assert await other.outcome() == "memory_revoked"
    bench.assert_empty()


async def test_nothing_is_granted_while_it_waits_and_the_next_room_connects_anew(bench: DecodeBench) -> None:
    running = await bench.stream(asked(1))
    await bench.granted(1)
    await abandoned(bench, 2)
    bench.engine.hold()
    bench.land(asked(1))
    await bench.turns_until(lambda: not bench.step_thread.free)
    outlive(bench, 1)
    bench.clock.advance(DEADLINE_MS)
    await bench.turns(2)
    waiting = await bench.stream(asked(3))
    await bench.turns(5)
    assert 3 not in bench.sender.grants
    assert bench.phase(3) is Phase.WAITING_FOR_INPUT
    bench.engine.go()
    await bench.granted(3)
    assert bench.sender.grants[3].exposure == bench.exposure.id
    bench.land(asked(3))
    await bench.settle()
    assert waiting.tokens == toy.answer(asked(3))
    assert running.tokens == toy.answer(asked(1))
    last = await bench.stream(asked(4))
    await bench.granted(4)
    assert bench.sender.connects[-1].endpoints[0].incarnation == bench.exposure.id
    bench.land(asked(4))
    await bench.settle()
    assert await last.outcome() == ""
    bench.assert_empty()


async def test_a_receiver_makes_progress_for_a_sender_that_is_to_become_quiet(
    bench: DecodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over some transports a write ends only while its target drives the library, so a resting receiver
    drives it, too."""
    await abandoned(bench, 1)
    driven: list[float] = []
    progress = MemoryTransfer.progress

    def noted(transfer: MemoryTransfer) -> None:
        driven.append(asyncio.get_running_loop().time())
        progress(transfer)

    monkeypatch.setattr(MemoryTransfer, "progress", noted)
    started = asyncio.get_running_loop().time()
    await bench.work.rest()
    assert len(driven) > 2
    assert driven[0] - started < HEARTBEAT_S / 2
    bench.sender.quiet.set()
    await bench.settle()
    bench.assert_empty()


async def test_memory_that_cannot_be_moved_ends_the_worker_in_so_many_words(
    bench: DecodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stay() -> None:
        raise CannotMove("cuda:0 memory stays where it is")

    await abandoned(bench, 1)
    monkeypatch.setattr(bench.engine.memory, "move", stay)
    bench.clock.advance(DEADLINE_MS)
    with pytest.raises(MemoryNotMoved, match=r"cannot be taken back .* cuda:0 memory stays where it is"):
        await bench.turns(3)


def told(bench: DecodeBench) -> list[int]:
    """Return the exposure that each connect request named, in order."""
    return [each.endpoints[0].incarnation for each in bench.sender.connects]


async def test_room_ends_a_sender_hears_that_memory_was_taken_back_though_no_room_is_for_it(
    bench: DecodeBench,
) -> None:
    """The revocation is the sender's only proof if it failed to see the end of its writes."""
    old = bench.exposure.id
    await abandoned(bench, 1)
    bench.clock.advance(DEADLINE_MS)
    await bench.settle()
    assert not bench.sender.quiet.is_set()
    assert told(bench) == [old, bench.exposure.id]
    bench.assert_empty()
    caller = await bench.stream(asked(2))
    await bench.granted(2)
    assert len(bench.sender.connects) == 2, "it is connected"
    bench.land(asked(2))
    await bench.settle()
    assert await caller.outcome() == ""


async def test_a_sender_that_refuses_to_hear_of_it_is_asked_anew_by_the_next_room(bench: DecodeBench) -> None:
    await abandoned(bench, 1)
    bench.sender.refuse_connect = WrongIncarnation("another process")
    bench.clock.advance(DEADLINE_MS)
    await bench.settle()
    assert len(bench.sender.connects) == 2
    assert bench.gauge("baton_kv_revocations_total") == 1
    bench.assert_empty()
    bench.sender.refuse_connect = None
    caller = await bench.stream(asked(2))
    await bench.granted(2)
    bench.land(asked(2))
    await bench.settle()
    assert await caller.outcome() == ""


async def test_a_sender_that_is_gone_is_not_told(bench: DecodeBench) -> None:
    await abandoned(bench, 1)
    await bench.enter(group_pb2.Command(departed=PREFILL))
    bench.mailbox.put(group_pb2.Command(revoke=True))
    await bench.turns_until(lambda: bench.gauge("baton_kv_revocations_total") == 1)
    await until(lambda: not asking(bench.peers))
    assert len(bench.sender.connects) == 1
    bench.assert_empty()


def shut_out(bench: DecodeBench) -> None:
    """Break the sender's connection to the present exposure, with a seal that landed and whose end it never
    sees."""
    bench.sender.shut = bench.exposure.id
    bench.sender.quiet.set()
    peers: Any = bench.peers
    peers.connect_timeout_s = 0.2


async def served(bench: DecodeBench, room: int) -> Caller:
    caller = await bench.stream(asked(room))
    await bench.granted(room)
    bench.land(asked(room))
    await bench.settle()
    return caller


@pytest.mark.parametrize("known", [True, False])
async def test_reconnect_memory_is_taken_back_from_a_sender_that_sees_no_end_of_what_it_wrote(
    bench: DecodeBench, known: bool
) -> None:
    """Nothing is in quarantine, since all its writes were seen here. Without the revocation no room would be
    served again. `known`: the next room takes the connection for intact, and is refused at its grant."""
    assert await (await served(bench, 1)).outcome() == ""
    old = bench.exposure.id
    shut_out(bench)
    if known:
        bench.sender.refuse_grants = [NotConnected("connect first"), NotConnected("connect first")]
    else:
        bench.peers.doubt(PREFILL)
    callers = [await bench.stream(asked(room)) for room in (2, 3)]
    await bench.turns_until(lambda: bench.exposure.id != old)
    await bench.settle()
    ended = {await each.outcome() for each in callers}
    assert "connect_failed" in ended
    assert ended <= ({"connect_failed", "memory_revoked"} if known else {"connect_failed"})
    assert await (await served(bench, 4)).outcome() == ""
    assert bench.sender.grants[4].exposure == bench.exposure.id
    assert bench.gauge("baton_kv_revocations_total") == 1, "once, not once a room"
    bench.assert_empty()


async def test_live_is_not_lost_what_a_sender_does_not_answer_shuts_nobody_out(bench: DecodeBench) -> None:
    """Only answered connects can lead to a revocation. A busy sender may become quiet in the meantime."""
    assert await (await served(bench, 1)).outcome() == ""
    old = bench.exposure.id
    shut_out(bench)
    bench.peers.doubt(PREFILL)
    caller = await bench.stream(asked(2))
    await until(lambda: len(bench.sender.connects) > 2)
    bench.sender.may_connect.clear()
    await until(lambda: bench.sender.connects_unanswered == 1)
    asked_by_then = len(bench.sender.connects)
    peers: Any = bench.peers
    peers.connect_timeout_s = 0.0
    for _ in range(20):
        await bench.turn()
        await asyncio.sleep(0.01)
    assert bench.exposure.id == old
    assert len(bench.sender.connects) == asked_by_then, "it is not asked again before it has answered"
    bench.sender.shut = 0
    bench.sender.may_connect.set()
    await bench.granted(2)
    bench.land(asked(2))
    await bench.settle()
    assert await caller.outcome() == ""
    assert bench.gauge("baton_kv_revocations_total") == 0


async def test_no_memory_is_taken_back_for_a_sender_that_becomes_quiet_in_time(bench: DecodeBench) -> None:
    assert await (await served(bench, 1)).outcome() == ""
    bench.sender.shut = bench.exposure.id
    bench.peers.doubt(PREFILL)
    caller = await bench.stream(asked(2))
    await until(lambda: len(bench.sender.connects) > 2)
    bench.sender.shut = 0
    await bench.granted(2)
    bench.land(asked(2))
    await bench.settle()
    assert await caller.outcome() == ""
    assert bench.gauge("baton_kv_revocations_total") == 0


async def test_incarnation_whoever_knew_of_memory_is_told_until_another_process_has_its_address(
    bench: DecodeBench,
) -> None:
    """The sender is cut off when the memory is revoked, and is gone later. It is not asked for ever."""
    assert await (await served(bench, 1)).outcome() == ""
    bench.sender.broken.set()
    await until(lambda: bench.sender.ended > 0)
    bench.mailbox.put(group_pb2.Command(revoke=True))
    await bench.turns_until(lambda: bench.gauge("baton_kv_revocations_total") == 1)
    await until(lambda: bench.sender.ended > 2)
    assert asking(bench.peers) == 1, "it may be back, and is to hear of it though no room is for it"
    bench.sender.refuse_streams = [WrongIncarnation("meant for incarnation 11, this is 12")]
    bench.sender.broken.clear()
    await until(lambda: not asking(bench.peers))
    assert needed(bench.peers) == set()
    await until(lambda: not bench.channels.incarnations())
