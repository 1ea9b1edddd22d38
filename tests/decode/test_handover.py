"""Tests of hand-overs between two workers over a faulty network, with callers that leave at any time.

Both workers' real turn loops and services, real gRPC between them, one-sided writes over a memory network
whose faults a seed decides: writes late, out of order and failed, callers that
leave at any time. Every position of every page says whose it is, and every step looks.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from baton.decode.decode_service import DecodeService
from baton.ids import Incarnation
from baton.pages.kv_checksum import KvChecksum
from baton.parallel.solo import SoloGroup
from baton.prefill.prefill_service import HandoverService, PrefillService
from baton.rooms.request import Request, Sampling
from baton.testing.memory_fabric import MemoryFabric, Write
from baton.testing.transfer_faults import NO_FAULTS, FaultPlan
from baton.transfer.transfer_protocol import Region, Run, kv_region
from baton.wire.baton.v1 import inference_pb2, inference_pb2_grpc, rooms_pb2
from baton.wire.channel import Channels
from baton.wire.conversions import request_to_wire
from baton.wire.errors import remote_error
from baton.wire.service_role import ServiceRole
from baton.worker.turn_loop import TurnProgress, run_turns
from tests.decode.bench import DecodeBench, Sender
from tests.decode.links import asking
from tests.parallel.arrivals import NoArrivals
from tests.prefill import toy
from tests.prefill.bench import DECODE, PREFILL, PrefillBench
from tests.wire.receivers import decode_peer
from tests.wire.servers import serving, until

ROOMS = 10
PATIENCE_S = 30


class FlippingFabric(MemoryFabric):
    """A network that flips one bit in the first run of every write of pages, while `flips` is set."""

    flips = True

    def post(
        self, sender: Incarnation, receiver: Incarnation, source: Region, target: Region, runs: Sequence[Run]
    ) -> Write:
        write = super().post(sender, receiver, source, target, runs)
        if self.flips and target.name == kv_region(0):
            first = write.parts[0]
            assert isinstance(first.source, int)
            sent = bytearray(toy.read(first.source, first.length))
            sent[3] ^= 0x10
            first.source = bytes(sent)
        return write


class Pair:
    def __init__(self, fabric: MemoryFabric, checksum: KvChecksum) -> None:
        self.fabric = fabric
        self.checksum = checksum
        self.channels = Channels()
        self.prefill = PrefillBench(self.fabric, checksum=checksum)
        self.prefill_address = self.decode_address = ""
        self.decode: DecodeBench

    def add_prefill(self, server: grpc.aio.Server) -> None:
        work = self.prefill.work
        inference_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillService(work), server)
        handover = HandoverService(work)
        inference_pb2_grpc.add_HandoverServiceServicer_to_server(handover, server)

    def add_decode(self, server: grpc.aio.Server) -> None:
        self.decode = DecodeBench(Sender(), self.prefill_address, fabric=self.fabric, checksum=self.checksum)
        service = DecodeService(self.decode.work)
        inference_pb2_grpc.add_DecodeServiceServicer_to_server(service, server)

    async def ask(self, request: Request) -> list[int]:
        """Return the answer as decode streams it. Raises Ended with the reason of a room that failed."""
        room, accepted = int(request.request_id), asyncio.Event()
        calls: list[grpc.aio.Call] = []
        wire = request_to_wire(request)

        async def prefill() -> list[int]:
            stub = inference_pb2_grpc.PrefillServiceStub(
                self.channels.to(self.prefill_address, ServiceRole.PREFILL)
            )
            peer = decode_peer("decode-0", DECODE, self.decode_address)
            run = inference_pb2.RunRoomRequest(room=room, incarnation=PREFILL, decode=peer, request=wire)
            drawn: list[int] = []
            call = stub.RunRoom(run, timeout=PATIENCE_S)
            calls.append(call)
            async for reply in call:
                accepted.set()
                if reply.HasField("first_token"):
                    drawn.append(reply.first_token.token.token)
                if reply.outcome.HasField("cause"):
                    raise Ended(reply.outcome.cause.reason)
            return drawn

        async def decode() -> list[int]:
            await accepted.wait()
            stub = inference_pb2_grpc.DecodeServiceStub(
                self.channels.to(self.decode_address, ServiceRole.DECODE)
            )
            peer = rooms_pb2.Peer(name="prefill-0", incarnation=PREFILL, address=self.prefill_address)
            run = inference_pb2.StreamRoomRequest(room=room, incarnation=DECODE, prefill=peer, request=wire)
            drawn: list[int] = []
            call = stub.StreamRoom(run, timeout=PATIENCE_S)
            calls.append(call)
            async for reply in call:
                if reply.HasField("tokens"):
                    assert reply.tokens.first == len(request.output) + len(drawn)
                drawn += [each.token for each in reply.tokens.tokens]
                if reply.outcome.HasField("cause"):
                    raise Ended(reply.outcome.cause.reason)
            return drawn

        sides = [asyncio.ensure_future(side()) for side in (prefill, decode)]
        try:
            first, whole = await asyncio.gather(*sides)
        finally:
            for task in sides:
                task.cancel()
            await asyncio.gather(*sides, return_exceptions=True)
            for each in calls:
                each.cancel()
        assert first == whole[:1]
        return whole

    async def ask_choices(self, request: Request, cut: int = -1) -> dict[int, list[int]]:
        """Return each choice's answer from decode's stream of many rooms. The reader ends choice `cut` at its
        first token."""
        room, wire = int(request.request_id), request_to_wire(request)
        asked: asyncio.Queue[inference_pb2.StreamRoomsRequest | None] = asyncio.Queue()
        peer = rooms_pb2.Peer(name="prefill-0", incarnation=PREFILL, address=self.prefill_address)
        opening = inference_pb2.StreamRoomRequest(room=room, incarnation=DECODE, prefill=peer, request=wire)
        asked.put_nowait(inference_pb2.StreamRoomsRequest(open=[opening]))

        async def prefill() -> None:
            stub = inference_pb2_grpc.PrefillServiceStub(
                self.channels.to(self.prefill_address, ServiceRole.PREFILL)
            )
            decode = decode_peer("decode-0", DECODE, self.decode_address)
            run = inference_pb2.RunRoomRequest(room=room, incarnation=PREFILL, decode=decode, request=wire)
            async for reply in stub.RunRoom(run, timeout=PATIENCE_S):
                assert not reply.outcome.HasField("cause")

        async def requests() -> AsyncIterator[inference_pb2.StreamRoomsRequest]:
            while (each := await asked.get()) is not None:
                yield each

        drawn: dict[int, list[int]] = {}
        sending = asyncio.ensure_future(prefill())
        stub = inference_pb2_grpc.DecodeServiceStub(self.channels.to(self.decode_address, ServiceRole.DECODE))
        async for message in stub.StreamRooms(requests(), timeout=PATIENCE_S):
            for line in message.lines:
                tokens = line.reply.tokens
                assert not line.HasField("refused")
                assert not line.reply.outcome.HasField("cause")
                if line.reply.HasField("outcome"):
                    asked.put_nowait(None)
                elif tokens.tokens:
                    choice = drawn.setdefault(tokens.choice, [])
                    choice += [each.token for each in tokens.tokens]
                    if len(choice) == 1 and tokens.choice == cut:
                        end = inference_pb2.EndChoiceRequest(room=room, incarnation=DECODE, choice=cut)
                        asked.put_nowait(inference_pb2.StreamRoomsRequest(end_choices=[end]))
        await sending
        return drawn

    async def at_rest(self) -> None:
        """Check that both workers hold nothing and that no write is left to land. A room may end before
        prefill has answered its requests."""
        await until(lambda: len(self.prefill.work.roster) == len(self.decode.work.roster) == 0)
        await until(lambda: not asking(self.decode.peers))
        while self.fabric.puts_under_way:
            self.fabric.step()
        self.prefill.assert_empty()
        self.decode.assert_empty()
        assert self.prefill.engine.foreign == []


class Ended(Exception):
    """Raised with the reason of a room that failed."""


@asynccontextmanager
async def pair(
    plan: FaultPlan = NO_FAULTS,
    checksum: KvChecksum = KvChecksum.RECORD,
    fabric: MemoryFabric | None = None,
) -> AsyncIterator[Pair]:
    at = Pair(fabric or MemoryFabric(plan), checksum)
    async with AsyncExitStack() as stack:
        at.prefill_address = await stack.enter_async_context(serving(at.add_prefill))
        at.decode_address = await stack.enter_async_context(serving(at.add_decode))
        loops = [
            asyncio.ensure_future(
                run_turns(bench.work, SoloGroup(), bench.clock, TurnProgress(bench.clock), NoArrivals())
            )
            for bench in (at.prefill, at.decode)
        ]
        try:
            yield at
            assert not any(loop.done() for loop in loops), "no turn loop ended by itself"
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await at.channels.close()
            await at.decode.close()
            at.prefill.close()


def some_request(room: int, dice: random.Random) -> Request:
    prompt = [dice.randrange(toy.VOCABULARY) for _ in range(dice.randint(1, 30))]
    return toy.request(str(room), prompt, max_tokens=dice.randint(1, 9))


async def test_rooms_share_both_workers_and_each_gets_its_own_answer() -> None:
    dice = random.Random(1)
    async with pair() as at:
        requests = [some_request(room, dice) for room in range(1, 5)]
        answers = await asyncio.gather(*map(at.ask, requests))
        assert answers == [toy.answer(each) for each in requests]
        sent = at.prefill.gauge("baton_kv_transfer_bytes_total")
        pages = sum(toy.GROUP.pages_for(len(each.prompt)) for each in requests)
        assert sent == pages * toy.GROUP.page_bytes
        await at.at_rest()


async def test_a_prompt_of_many_choices_is_sent_once() -> None:
    request = replace(
        toy.request("1", range(10), max_tokens=9, further_seeds=(2, 3)),
        sampling=Sampling(temperature=1.0, seed=1),
    )
    async with pair() as at:
        drawn = await at.ask_choices(request)
        assert drawn == {place: toy.answer(request.choice(place)) for place in range(3)}
        sent = at.prefill.gauge("baton_kv_transfer_bytes_total")
        assert sent == toy.GROUP.pages_for(10) * toy.GROUP.page_bytes
        await at.at_rest()


async def test_a_choice_that_its_reader_ends_is_drawn_no_further() -> None:
    request = toy.request("1", range(10), max_tokens=12, further_seeds=(2, 3))
    request = replace(request, sampling=Sampling(temperature=1.0, seed=1))
    async with pair() as at:
        whole = toy.answer(request.choice(1))
        drawn = await at.ask_choices(request, cut=1)
        assert drawn[1] == whole[: len(drawn[1])]
        assert {place: len(tokens) for place, tokens in drawn.items() if place != 1} == {0: 12, 2: 12}
        await at.at_rest()


@pytest.mark.parametrize("checksum", [KvChecksum.RECORD, KvChecksum.PAGES], ids=lambda each: each.value)
async def test_rooms_go_on_behind_the_output_of_earlier_ones(checksum: KvChecksum) -> None:
    """Wherever the earlier room was cut off: in a page, at its end, before the last token."""
    whole = toy.request("1", range(6), max_tokens=12)
    async with pair(checksum=checksum) as at:
        answer = await at.ask(whole)
        assert answer == toy.answer(whole)
        cuts = (1, 2, 3, 7, 11)
        parts = [
            replace(whole, request_id=str(room), output=tuple(answer[:cut]))
            for room, cut in enumerate(cuts, start=2)
        ]
        assert [await at.ask(part) for part in parts] == [answer[cut:] for cut in cuts]
        sent = at.prefill.gauge("baton_kv_transfer_bytes_total") // toy.GROUP.page_bytes
        assert sent == sum(toy.GROUP.pages_for(6 + cut) for cut in (0, *cuts))
        assert at.decode.engine.foreign == []
        await at.at_rest()


async def test_with_pages_summed_one_flipped_bit_fails_its_room_and_nothing_of_it_is_served() -> None:
    fabric = FlippingFabric()
    request = some_request(1, random.Random(1))
    async with pair(checksum=KvChecksum.PAGES, fabric=fabric) as at:
        with pytest.raises(Ended, match="pages_corrupt"):
            await at.ask(request)
        await at.at_rest()
        assert at.decode.gauge("baton_handover_seconds_count") == 0, "no room was admitted"
        assert at.decode.engine.ran == ["sum"]
        fabric.flips = False
        again = some_request(2, random.Random(1))
        assert await at.ask(again) == toy.answer(again), "the same pages serve on"
        await at.at_rest()


async def test_with_the_record_alone_checked_a_flipped_bit_is_served() -> None:
    """Without page checksums, only the toy model notices the flipped bit. This is why they exist."""
    async with pair(fabric=FlippingFabric()) as at:
        await at.ask(some_request(1, random.Random(1)))
        assert at.decode.engine.foreign != []
        at.decode.engine.foreign.clear()
        await at.at_rest()


@pytest.mark.parametrize(
    ("seed", "checksum"),
    [(seed, KvChecksum.RECORD) for seed in range(24)] + [(seed, KvChecksum.PAGES) for seed in range(24, 36)],
    ids=lambda each: f"seed{each:02}" if isinstance(each, int) else each.value,
)
async def test_no_fault_mixes_rooms_hangs_or_leaves_anything(seed: int, checksum: KvChecksum) -> None:
    """Each seed is one faulty network and one set of callers."""
    dice = random.Random(seed)
    plan = FaultPlan(
        seed,
        delay_steps_max=dice.choice([0, 3, 12]),
        hold_share=dice.choice([0.0, 0.3]),
        hold_steps=dice.choice([20, 80]),
        fail_share=dice.choice([0.0, 0.0, 0.1]),
    )

    async def visit(room: int) -> str:
        request, patience_s = some_request(room, dice), dice.choice([None, None, dice.random() / 20])
        try:
            async with asyncio.timeout(patience_s):
                answer = await at.ask(request)
        except TimeoutError:
            return "left"
        except Ended as error:
            return str(error)
        except grpc.aio.AioRpcError as error:
            return remote_error(error).kind
        assert answer == toy.answer(request), f"room {room}"
        return "answered"

    async with pair(plan, checksum) as at:
        ends: list[str] = []
        for wave in range(0, ROOMS, 5):
            ends += await asyncio.gather(*(visit(room) for room in range(wave + 1, wave + 6)))
        no_fault = {"answered", "left", "RosterFull", "retracted"}
        fails = {"transfer_failed", "receiver_closed", "connect_failed"} if plan.fail_share else set()
        assert set(ends) <= no_fault | fails
        await at.at_rest()
        last = some_request(ROOMS + 1, dice)
        if plan.fail_share == 0.0:
            assert await at.ask(last) == toy.answer(last), "both serve on"
            await at.at_rest()
