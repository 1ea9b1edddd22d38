"""Tests of a decode worker's stream to a prefill worker: its messages, its authentication, and its end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import grpc
import pytest

from baton.handover import sending_session
from baton.ids import Incarnation, RoomId
from baton.prefill import handover_stream
from baton.prefill.prefill_service import HandoverService, PrefillService
from baton.prefill.receivers import NAMED_MAX, Receivers
from baton.rooms.errors import PeerFault
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.transfer_faults import FaultPlan
from baton.wire.baton.v1 import group_pb2, inference_pb2, inference_pb2_grpc, rooms_pb2
from baton.wire.channel import open_channel
from baton.wire.conversions import request_to_wire
from baton.wire.errors import NotAdmitted, RemoteError, UnknownReceiver, remote_error
from baton.wire.service_role import ServiceRole
from baton.worker.mailbox import TURN_COMMANDS_MAX
from tests.patience import PATIENCE_S
from tests.prefill import toy
from tests.prefill.bench import DECODE, PREFILL, PrefillBench, Receiver, connect_request
from tests.wire.receivers import decode_peer, secret_of
from tests.wire.servers import serving, until

PROMPT = tuple(range(100, 110))
GRANTED = (9, 2, 3)
OTHER = Incarnation(33)
HELD_STEPS = 5_000
"""Steps of the fabric before a write lands, unless a test steps it on."""


class Ended(Exception):
    """Raised with the way in which the stream ended."""


class Voice:
    """A decode worker's stream, or one of a caller that claims to be that worker."""

    def __init__(self, channel: grpc.aio.Channel, receiver: int = DECODE) -> None:
        self.receiver = receiver
        self.call = inference_pb2_grpc.HandoverServiceStub(channel).HandOver()
        self.heard: list[inference_pb2.HandOverReply] = []
        self.end: RemoteError | None = None
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for reply in self.call:
                self.heard.append(reply)
            self.end = RemoteError(grpc.StatusCode.OK, "", "")
        except grpc.aio.AioRpcError as error:
            self.end = remote_error(error)

    async def greet(self, secret: bytes | None = None, incarnation: int = PREFILL) -> "Voice":
        shown = secret_of(self.receiver) if secret is None else secret
        greeting = inference_pb2.Greeting(incarnation=incarnation, receiver=self.receiver, secret=shown)
        await self.call.write(inference_pb2.HandOverRequest(greeting=greeting))
        return self

    async def say(
        self,
        connect: inference_pb2.ConnectRequest | None = None,
        grants: tuple[inference_pb2.GrantRequest, ...] = (),
        closes: tuple[inference_pb2.CloseRequest, ...] = (),
    ) -> None:
        message = inference_pb2.HandOverRequest(connect=connect, grants=grants, closes=closes)
        await self.call.write(message)

    def granted(self) -> dict[int, str]:
        """Return the answers to grants, by room: the kind of refusal, or an empty text."""
        return {each.room: each.refused.kind for reply in self.heard for each in reply.grants}

    def quiet(self) -> list[int]:
        return [each.room for reply in self.heard for each in reply.closes if not each.HasField("refused")]

    def leave(self) -> None:
        self.call.cancel()


class Served:
    """A prefill worker's turns, taken one at a time, behind its real services."""

    def __init__(self) -> None:
        self.fabric = MemoryFabric(FaultPlan(hold_share=1.0, hold_steps=HELD_STEPS))
        self.receiver = Receiver(self.fabric)
        self.bench = PrefillBench(self.fabric)
        self.channel: grpc.aio.Channel
        self.handover = HandoverService(self.bench.work)

    def add(self, server: grpc.aio.Server) -> None:
        prefill = PrefillService(self.bench.work)
        inference_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, server)
        inference_pb2_grpc.add_HandoverServiceServicer_to_server(self.handover, server)

    def name(self, incarnation: int = DECODE) -> None:
        """Name a receiver, as a room of PrefillService does."""
        self.bench.work.receivers.name(decode_peer("decode", incarnation, "127.0.0.1:1"))

    async def voice(self, receiver: int = DECODE) -> Voice:
        return await Voice(self.channel, receiver).greet()

    def over(self) -> bool:
        """Let some writes land, and return whether no room is left."""
        for _ in range(HELD_STEPS // 20):
            self.fabric.step()
        return not len(self.bench.work.roster)

    async def turns_until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                if not self.bench.step_thread.free:
                    await self.bench.step_end()
                await self.bench.turn()
                await asyncio.sleep(0.001)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving(made.add))
        made.channel = open_channel(address, ServiceRole.PREFILL)
        stack.push_async_callback(made.channel.close)
        yield made
    made.bench.close()


def grant(room: int, receiver: int = 0, pages: tuple[int, ...] = GRANTED) -> inference_pb2.GrantRequest:
    return inference_pb2.GrantRequest(
        room=room,
        receiver=receiver,
        generation=5,
        pages=[inference_pb2.PageTable(pages=pages)],
        exposure=DECODE,
    )


def close(room: int, receiver: int = 0) -> inference_pb2.CloseRequest:
    return inference_pb2.CloseRequest(room=room, receiver=receiver, generation=5)


async def refused(voice: Voice) -> str:
    await until(lambda: voice.end is not None)
    assert voice.end is not None
    assert voice.heard == []
    return voice.end.kind


# ---- who is believed


async def test_authorised_writer_a_receiver_is_believed_by_the_secret_that_a_room_named(
    served: Served,
) -> None:
    served.name()
    for secret in (b"", secret_of(OTHER), secret_of(DECODE)[:-1], secret_of(DECODE) + b"\0"):
        assert await refused(await Voice(served.channel).greet(secret)) == "NotAdmitted"
    assert await refused(await Voice(served.channel, OTHER).greet()) == "UnknownReceiver"
    assert await refused(await Voice(served.channel).greet(incarnation=12)) == "WrongIncarnation"
    silent = Voice(served.channel)
    await silent.say(connect_request(served.receiver))
    assert await refused(silent) == "WrongIncarnation"
    assert served.bench.mailbox.empty, "nothing that they said has come to a turn"
    voice = await served.voice()
    await voice.say(connect_request(served.receiver))
    await served.turns_until(lambda: bool(voice.heard))
    assert voice.heard[0].connects[0].exposure == DECODE
    assert not voice.heard[0].connects[0].HasField("refused")


async def test_authorised_writer_who_speaks_is_who_greeted_whatever_a_message_says(served: Served) -> None:
    """A receiver with a valid secret of its own sends messages in the name of another one."""
    served.name()
    served.name(OTHER)
    served.bench.connect(served.receiver)
    caller = await served.bench.run(toy.request("1", PROMPT))
    voice = await served.voice(OTHER)
    forged = connect_request(served.receiver)
    forged.endpoints[0].incarnation = 2**64 - 1
    forged.receiver = DECODE
    await voice.say(forged, (grant(1, DECODE),), (close(1, DECODE),))
    await served.turns_until(
        lambda: len(voice.granted()) == 1 and sum(len(e.closes) for e in voice.heard) == 1
    )
    assert voice.granted() == {1: "PeerFault"}
    assert voice.quiet() == []
    true = await served.voice()
    await true.say(grants=(grant(1),))
    await served.turns_until(lambda: bool(true.granted()))
    assert true.granted() == {1: ""}
    await served.turns_until(served.over)
    assert await caller.outcome() == ""


async def test_a_receiver_that_is_gone_is_not_believed_any_more(served: Served) -> None:
    served.name()
    voice = await served.voice()
    await until(lambda: len(served.handover.streams) == 1)
    await served.bench.enter(group_pb2.Command(departed=DECODE))
    assert len(served.bench.work.receivers) == 0
    await voice.say(grants=(grant(1),))
    assert await refused(voice) == "UnknownReceiver"
    assert await refused(await served.voice()) == "UnknownReceiver"


async def test_a_stream_of_the_same_receiver_takes_the_place_of_its_last_one(served: Served) -> None:
    served.name()
    first = await served.voice()
    await until(lambda: len(served.handover.streams) == 1)
    second = await served.voice()
    assert await refused(first) == "PeerFault"
    await second.say(closes=(close(7),))
    await served.turns_until(lambda: second.quiet() == [7])
    assert len(served.handover.streams) == 1
    second.leave()
    await until(lambda: not served.handover.streams)


async def test_a_room_that_names_another_secret_for_its_receiver_is_refused(served: Served) -> None:
    """A room that names no secret is refused, too, since no receiver could prove its identity."""
    stub = inference_pb2_grpc.PrefillServiceStub(served.channel)
    true = decode_peer("decode-0", DECODE, "127.0.0.1:1")
    false = rooms_pb2.Peer(name="x", incarnation=DECODE, address="127.0.0.1:1", secret_digest=bytes(32))
    nameless = rooms_pb2.Peer(name="x", incarnation=DECODE, address="127.0.0.1:1")
    served.bench.work.receivers.name(true)
    for peer in (false, nameless):
        wire = inference_pb2.RunRoomRequest(
            room=1, incarnation=PREFILL, decode=peer, request=request_to_wire(toy.request("1", PROMPT))
        )
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.RunRoom(wire).read()
        assert remote_error(refusal.value).kind == "PeerFault"
    assert served.bench.mailbox.empty
    served.bench.work.receivers.check(DECODE, secret_of(DECODE))


def test_receivers_are_forgotten_past_a_bound_and_the_latest_are_kept() -> None:
    receivers = Receivers()
    for incarnation in range(1, NAMED_MAX + 2):
        receivers.name(decode_peer("d", incarnation, "a:1"))
        receivers.name(decode_peer("d", 1, "a:1"))
    assert len(receivers) == NAMED_MAX
    receivers.check(Incarnation(1), secret_of(1))
    with pytest.raises(UnknownReceiver):
        receivers.check(Incarnation(2), secret_of(2))
    with pytest.raises(NotAdmitted):
        receivers.check(Incarnation(1), secret_of(2))
    with pytest.raises(PeerFault, match="another secret"):
        receivers.name(rooms_pb2.Peer(name="d", incarnation=1, address="a:1", secret_digest=bytes(32)))


def test_secrets_unlogged_what_is_told_of_a_stranger_holds_no_secret() -> None:
    receivers = Receivers()
    receivers.name(decode_peer("d", DECODE, "a:1"))
    with pytest.raises(NotAdmitted) as told:
        receivers.check(DECODE, secret_of(OTHER))
    assert secret_of(OTHER).hex() not in str(told.value)
    assert secret_of(DECODE).hex() not in str(told.value)


async def test_authorised_writer_a_close_that_comes_before_its_room_ends_it_for_its_own_receiver_alone(
    served: Served,
) -> None:
    """Room ids are counted up, so any receiver can guess the next one."""
    served.name()
    served.name(OTHER)
    served.bench.connect(served.receiver)
    other = await served.voice(OTHER)
    await other.say(closes=(close(1), close(2)))
    voice = await served.voice()
    await served.turns_until(lambda: len(other.quiet()) == 2)
    await voice.say(closes=(close(2),))
    await served.turns_until(lambda: voice.quiet() == [2])
    first = await served.bench.run(toy.request("1", PROMPT))
    second = await served.bench.run(toy.request("2", PROMPT))
    await voice.say(grants=(grant(1),))
    await served.turns_until(served.over)
    assert await first.outcome() == ""
    assert await second.outcome() == "receiver_closed"


# ---- many rooms at a time


async def test_what_comes_in_one_message_enters_one_turn(served: Served) -> None:
    served.name()
    voice = await served.voice()
    rooms = range(1, TURN_COMMANDS_MAX)
    await voice.say(connect_request(served.receiver), closes=tuple(close(room) for room in rooms))
    await until(lambda: not served.bench.mailbox.empty)
    await served.bench.turn()
    assert served.bench.mailbox.empty
    await until(lambda: len(voice.quiet()) == len(rooms))
    assert len(voice.heard) <= 2, "and is answered together"


async def test_a_receiver_that_takes_no_answers_is_not_read_any_further(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover_stream, "ANSWERS_MAX", 4)
    stream = handover_stream.HandOverStream(served.bench.work)
    served.name()
    read: list[int] = []

    async def requests() -> AsyncIterator[inference_pb2.HandOverRequest]:
        greeting = inference_pb2.Greeting(incarnation=PREFILL, receiver=DECODE, secret=secret_of(DECODE))
        yield inference_pb2.HandOverRequest(greeting=greeting)
        for room in range(1, 100):
            read.append(room)
            yield inference_pb2.HandOverRequest(closes=[close(room)])
            await served.bench.turn()
            await asyncio.sleep(0)

    async with stream.reading(requests(), lambda _: None):
        for _ in range(1_000):
            await asyncio.sleep(0)
        assert len(read) < 12
        messages = [message async for message in stream.messages()]
        answered = [each.room for message in messages for each in message.closes]
        assert answered == list(range(1, 100)), "once they are taken"


async def test_ack_is_proof_a_close_is_answered_when_the_room_is_quiet_however_late(served: Served) -> None:
    served.name()
    served.bench.connect(served.receiver)
    await served.bench.run(toy.request("1", PROMPT))
    voice = await served.voice()
    await voice.say(grants=(grant(1),))
    await served.turns_until(lambda: served.fabric.puts_under_way > 0)
    await voice.say(closes=(close(1),))
    for _ in range(50):
        await served.bench.turn()
        await asyncio.sleep(0.001)
    assert voice.quiet() == []
    voice.leave()
    await until(lambda: not served.handover.streams)
    await until(lambda: not served.bench.work.closers[RoomId(1)])
    again = await served.voice()
    await again.say(closes=(close(1),))
    while not again.quiet():
        served.fabric.step()
        await served.bench.turn()
        await asyncio.sleep(0)
    served.bench.assert_empty()


# ---- grants that come before their rooms


async def test_room_issued_a_grant_that_comes_before_its_room_waits_for_it_and_creates_nothing(
    served: Served,
) -> None:
    served.name()
    served.bench.connect(served.receiver)
    voice = await served.voice()
    await voice.say(grants=(grant(1), grant(2)))
    await served.turns_until(lambda: len(served.bench.work.early) == 2)
    assert len(served.bench.work.roster) == 0
    assert voice.granted() == {}
    await served.bench.run(toy.request("1", PROMPT))
    await served.turns_until(lambda: voice.granted() == {1: ""})
    assert len(served.bench.work.early) == 1
    await voice.say(closes=(close(2),))
    await served.turns_until(lambda: voice.quiet() == [2])
    assert len(served.bench.work.early) == 0
    await served.bench.cancel(1)


async def test_a_close_that_is_said_again_and_again_is_one(served: Served) -> None:
    """Repeats of a close that is not answered yet make nothing grow."""
    served.name()
    served.bench.connect(served.receiver)
    await served.bench.run(toy.request("1", PROMPT))
    voice = await served.voice()
    await voice.say(grants=(grant(1),))
    await served.turns_until(lambda: served.fabric.puts_under_way > 0)
    for _ in range(5):
        await voice.say(closes=(close(1),) * 20)
    await voice.say(closes=(close(7),))
    await served.turns_until(lambda: voice.quiet() == [7])
    assert len(served.bench.work.closers[RoomId(1)]) == 1
    await served.turns_until(served.over)
    await until(lambda: voice.quiet() == [7, 1])


@pytest.mark.parametrize("end", ["close with it", "stream", "time"])
async def test_a_grant_whose_room_does_not_come_is_kept_for_a_while_and_within_a_bound(
    served: Served, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(sending_session, "EARLY_GRANT_S", 0.05 if end == "time" else 60.0)
    early = served.bench.work.early
    served.name()
    voice = await served.voice()
    await voice.say(grants=(grant(1),), closes=(close(1),) if end == "close with it" else ())
    if end == "close with it":
        await served.turns_until(lambda: voice.quiet() == [1])
    elif end == "stream":
        await served.turns_until(lambda: len(early) == 1)
        voice.leave()
        await until(lambda: not served.handover.streams)
    else:
        await served.turns_until(lambda: voice.granted() == {1: "UnknownRoom"})
    assert len(early) == 0
