"""A decode worker's turns, one at a time, beside a prefill worker that plays a script over real gRPC."""

import asyncio
import struct
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from baton.decode.decode_room import replies_max
from baton.decode.decode_work import DecodeWork
from baton.decode.draft_scheduler import DraftScheduler
from baton.decode.metrics import DecodeMetrics
from baton.decode.prefill_peers import FollowerPeers, LeaderPeers, Peers
from baton.grammars.grammar_cache import GrammarCache
from baton.handover.turn import Lap
from baton.ids import NO_OPENER, Generation, Incarnation, Opener, RoomId
from baton.pages.kv_checksum import KvChecksum, nonzero_sum
from baton.pages.pool import PageState
from baton.pages.record import SEAL_OFFSET, SLOT_BYTES, MetadataRecord, seal_bytes
from baton.parallel.rank_group import RankGroup
from baton.parallel.solo import SoloGroup
from baton.rooms.errors import Cause, NotConnected, Reason
from baton.rooms.phases import Phase
from baton.rooms.request import Request
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.memory_transfer import MemoryTransfer
from baton.transfer.exposure import Exposure
from baton.wire.baton.v1 import group_pb2, inference_pb2, inference_pb2_grpc, rooms_pb2
from baton.wire.channel import Channels
from baton.wire.conversions import cause_to_wire, request_to_wire, token_from_wire
from baton.wire.errors import NotQuiet, errors_as_status, refusal_to_wire
from baton.wire.layout_messages import layout_to_wire
from baton.worker.assembly import RankMemory, RankPorts
from baton.worker.mailbox import Mailbox
from baton.worker.step_thread import StepThread
from baton.worker.turn_loop import TurnProgress, take_turn
from tests.decode.links import asking, closing
from tests.patience import PATIENCE_S
from tests.prefill import toy
from tests.prefill.bench import (
    BOUNDS,
    DECODE,
    PAGES,
    PLACES,
    PREFILL,
    assert_gauges_at_rest,
    deadlines,
    silent_reporter,
)
from tests.support.manual_clock import ManualClock
from tests.wire.receivers import secret_of
from tests.wire.servers import serving, until

SLOT = struct.Struct("<QQ")
SECRET = secret_of(DECODE)


@dataclass
class Sender(inference_pb2_grpc.HandoverServiceServicer):
    """A prefill worker that records what it is told, and answers as the test says."""

    refuse_streams: list[Exception] = field(default_factory=list)
    """Errors that refuse the next streams, one each."""
    refuse_connect: Exception | None = None
    shut: int = 0
    """Exposure to which the sender's connection is broken, so that it never sees the end of its writes
    there."""
    refuse_grants: list[Exception] = field(default_factory=list)
    """Errors that refuse the next grants, one each."""
    refuse_closes: list[Exception] = field(default_factory=list)
    """Errors that refuse the next closes, one each."""
    greetings: list[inference_pb2.Greeting] = field(default_factory=list)
    connects: list[inference_pb2.ConnectRequest] = field(default_factory=list)
    connects_unanswered: int = 0
    grants: dict[int, inference_pb2.GrantRequest] = field(default_factory=dict)
    granted_at_once: list[int] = field(default_factory=list)
    """Number of grants in each message that held any."""
    closes: list[inference_pb2.CloseRequest] = field(default_factory=list)
    may_connect: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer_grants: asyncio.Event = field(default_factory=asyncio.Event)
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    """Event after which closes are answered."""
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    """Event after which streams end with an error."""
    ended: int = 0
    """Number of streams that have ended so far."""

    def __post_init__(self) -> None:
        self.may_answer_grants.set()

    async def HandOver(self, requests: Any, context: Any) -> AsyncIterator[inference_pb2.HandOverReply]:  # noqa: N802
        said: asyncio.Queue[inference_pb2.HandOverReply | None] = asyncio.Queue()
        answering: list[asyncio.Task[None]] = []

        async def read() -> None:
            async for request in requests:
                if request.HasField("greeting"):
                    self.greetings.append(request.greeting)
                answering.extend(asyncio.create_task(each) for each in self._answers(request, said))

        async def break_off() -> None:
            await self.broken.wait()
            said.put_nowait(None)

        answering += [asyncio.create_task(read()), asyncio.create_task(break_off())]
        try:
            async with errors_as_status(context):
                if self.refuse_streams:
                    raise self.refuse_streams.pop(0)
                while (reply := await said.get()) is not None:
                    yield reply
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        finally:
            self.ended += 1
            for each in answering:
                each.cancel()

    def _answers(
        self, request: inference_pb2.HandOverRequest, said: "asyncio.Queue[Any]"
    ) -> Iterator[Coroutine[Any, Any, None]]:
        if request.HasField("connect"):
            self.connects.append(request.connect)
            yield self._connect(request.connect, said)
        if request.grants:
            self.granted_at_once.append(len(request.grants))
        for grant in request.grants:
            yield self._grant(grant, said)
        for close in request.closes:
            self.closes.append(close)
            yield self._close(close, said)

    async def _connect(self, connect: inference_pb2.ConnectRequest, said: "asyncio.Queue[Any]") -> None:
        self.connects_unanswered += 1
        await self.may_connect.wait()
        self.connects_unanswered -= 1
        exposure = connect.endpoints[0].incarnation
        refused = self.refuse_connect
        if refused is None and exposure == self.shut:
            refused = NotQuiet("the connection broke, and 1 puts have not ended yet")
        reply = inference_pb2.ConnectReply(exposure=exposure)
        if refused is None:
            reply.layouts.append(layout_to_wire(toy.LAYOUT))
        else:
            reply.refused.CopyFrom(refusal_to_wire(refused))
        said.put_nowait(inference_pb2.HandOverReply(connects=[reply]))

    async def _grant(self, grant: inference_pb2.GrantRequest, said: "asyncio.Queue[Any]") -> None:
        reply = inference_pb2.GrantReply(room=grant.room)
        if self.refuse_grants:
            reply.refused.CopyFrom(refusal_to_wire(self.refuse_grants.pop(0)))
        else:
            self.grants[grant.room] = grant
        await self.may_answer_grants.wait()
        said.put_nowait(inference_pb2.HandOverReply(grants=[reply]))

    async def _close(self, close: inference_pb2.CloseRequest, said: "asyncio.Queue[Any]") -> None:
        reply = inference_pb2.CloseReply(room=close.room, generation=close.generation)
        if self.refuse_closes:
            reply.refused.CopyFrom(refusal_to_wire(self.refuse_closes.pop(0)))
        else:
            await self.quiet.wait()
        said.put_nowait(inference_pb2.HandOverReply(closes=[reply]))


class DecodeBench:
    def __init__(
        self,
        sender: Sender,
        address: str,
        *,
        max_running: int = 8,
        pages: int = PAGES,
        fabric: MemoryFabric | None = None,
        checksum: KvChecksum = KvChecksum.RECORD,
        group: RankGroup | None = None,
        reuse: bool = False,
        grammars: GrammarCache | None = None,
        drafts_by: int = 0,
        drafting: DraftScheduler | None = None,
        local_gap_ms: int = 0,
    ) -> None:
        """`group`: of a worker of several ranks, which all hold the same. `reuse`: keep prefixes, of rooms
        with one mark. `grammars`: of a rank that draws; the toy holds no answer to them. `drafts_by`: tokens
        by which drafts are looked up, where no `drafting` is given."""
        self.group: RankGroup = group or SoloGroup()
        self.sender = sender
        self.address = address
        self.clock = ManualClock(now_ms=1_000)
        self.engine = toy.ToyEngine(pages)
        self.fabric = fabric or MemoryFabric()
        self.mailbox = Mailbox()
        self.channels = Channels()
        self.step_thread = StepThread(self.engine, self.mailbox.wake)
        self.registry = CollectorRegistry()
        memory = RankMemory.of([self.engine.memory], [pages], toy.LAYOUT, PLACES, keeps_prefixes=reuse)
        self.slots, self.holdings = memory.slots, memory.holdings
        ids = count(DECODE + 1_000 * self.group.rank)
        ports = RankPorts(
            incarnation=DECODE,
            layouts=[toy.LAYOUT] * self.group.size,
            rank=self.group.rank,
            bounds=BOUNDS,
            checksum=checksum,
            step_thread=self.step_thread,
            grammars=grammars,
            memory=memory,
            exposure=Exposure(
                partial(MemoryTransfer, self.fabric), lambda: Incarnation(next(ids)), memory.regions
            ),
            mailbox=self.mailbox,
            reporter=silent_reporter("decode-0", DECODE),
            clock=self.clock,
        )
        self.exposure = ports.exposure
        self.peers: Peers = FollowerPeers()
        if self.group.rank == 0:
            self.peers = LeaderPeers(ports, self.channels, SECRET, 5.0)
        self.work = DecodeWork(
            ports,
            deadlines(),
            peers=self.peers,
            metrics=DecodeMetrics(self.registry, max_running),
            max_running=max_running,
            drafting=drafting or DraftScheduler(drafts_by),
            local_gap_ms=local_gap_ms,
        )
        self.receiving = self.work.receiving
        self.progress = TurnProgress(self.clock)
        if self.group.size == 1:
            tell([self])

    # ---- what comes from outside

    async def stream(
        self,
        request: Request,
        *,
        prefill: int = PREFILL,
        prefill_ms: int | None = None,
        opener: Opener = NO_OPENER,
    ) -> "Caller":
        """Start StreamRoom as its handler does, up to the first turn. `prefill`: 0 for none. `prefill_ms`:
        when prefill would have computed the prompt by itself."""
        caller = Caller(self, request, prefill, prefill_ms, opener)
        caller.task = asyncio.ensure_future(caller.listen())
        await asyncio.sleep(0)
        await self.turn()
        await until(lambda: bool(caller.replies) or caller.task.done())
        if caller.task.done():
            await caller.task
        return caller

    async def enter(self, command: group_pb2.Command) -> None:
        asked = asyncio.ensure_future(self.mailbox.submit(command))
        await asyncio.sleep(0)
        await self.turn()
        await asked

    async def cancel(self, room: int, opener: Opener = NO_OPENER) -> None:
        cause = cause_to_wire(Cause(Reason.CANCELLED, "no longer wanted"))
        cancel = inference_pb2.CancelRequest(room=room, cause=cause, opener=opener)
        await self.enter(group_pb2.Command(cancel=cancel))

    async def granted(self, room: int) -> inference_pb2.GrantRequest:
        """Take turns until the sender has the room's destination, and return the grant."""
        await self.turns_until(lambda: room in self.sender.grants)
        return self.sender.grants[room]

    def land(
        self,
        request: Request,
        *,
        seal_as: tuple[RoomId, Generation] | None = None,
        first: int | None = None,
        pages: int = 0,
    ) -> None:
        """Write the sender's pages, record and seal into this worker's memory."""
        room = RoomId(int(request.request_id))
        grant = self.sender.grants[room]
        generation = Generation(grant.generation)
        sent = request.tokens[grant.prefix_tokens :]
        for position, token in enumerate(sent):
            page = grant.pages[0].pages[position // toy.PAGE_TOKENS]
            at = page * toy.GROUP.page_bytes + position % toy.PAGE_TOKENS * toy.GROUP.token_bytes
            SLOT.pack_into(self.engine.memory.view, at, toy.mark(request), token)
        token = toy.answer(request)[0] if first is None else first
        record = MetadataRecord(
            room,
            generation,
            request.prefill_tokens,
            0,
            (pages or len(grant.pages[0].pages),),
            first_token=token,
            pages_checksum=nonzero_sum(self._sum(grant, request.prefill_tokens)),
        )
        at = grant.slot * SLOT_BYTES
        self.slots.view[at : at + SEAL_OFFSET] = record.pack()
        seal = seal_bytes(*(seal_as or (room, generation)))
        self.slots.view[at + SEAL_OFFSET : at + SEAL_OFFSET + len(seal)] = seal

    def _sum(self, grant: inference_pb2.GrantRequest, stop: int) -> int:
        held = (0,) * (grant.prefix_tokens // toy.PAGE_TOKENS)
        return toy.summed(self.engine.memory, (*held, *grant.pages[0].pages), grant.prefix_tokens, stop)

    # ---- time

    async def turn(self) -> Lap:
        lap = await take_turn(self.work, self.group, self.clock, self.progress)
        await asyncio.sleep(0)
        return lap

    async def turns(self, count: int) -> None:
        for _ in range(count):
            await self.turn()

    async def turns_until(self, holds: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                if not self.step_thread.free:
                    await self.step_end()
                await self.turn()
                await asyncio.sleep(0.001)

    async def step_end(self) -> None:
        running = self.step_thread.running
        assert running is not None, "no step is running"
        await asyncio.wait([running], timeout=0.5)

    async def settle(self) -> None:
        """Take turns and await steps until every room has retired and each sender has been told of revoked
        memory."""
        await self.turns_until(lambda: not len(self.work.roster) and not asking(self.peers))

    # ---- what is left

    def phase(self, room: int) -> Phase:
        return self.work.roster.get(RoomId(room)).phase

    def pages(self, state: PageState) -> int:
        return self.holdings.census()[state]

    def gauge(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(name, labels)
        assert value is not None, name
        return value

    def assert_empty(self) -> None:
        work: Any = self.work
        assert len(work.roster) == 0
        assert len(work.scheduler) == 0
        assert len(work.callers) == 0
        if self.group.rank == 0:
            assert closing(self.peers) == 0
            assert asking(self.peers) == 0
        assert len(self.holdings) == 0
        assert self.holdings.available == self.holdings.sizes
        assert self.holdings.slots.free == len(self.holdings.slots)
        assert bytes(self.slots.view) == bytes(len(self.slots.view)), "slots are blank"
        assert self.engine.foreign == []
        assert self.engine.live == set()
        assert_gauges_at_rest(self.registry)

    async def close(self) -> None:
        self.engine.go()
        await self.peers.stop()
        await self.channels.close()
        self.step_thread.close()
        self.exposure.close()


def tell(ranks: Sequence[DecodeBench]) -> None:
    """Gather once what the ranks of one worker send each other before their first turn."""
    told = [each.work.gather_payload() or b"" for each in ranks]
    assert all(told)
    for each in ranks:
        each.work.on_gathered(told)


class Caller:
    """A caller of StreamRoom."""

    def __init__(
        self,
        bench: DecodeBench,
        request: Request,
        prefill: int,
        prefill_ms: int | None = None,
        opener: Opener = NO_OPENER,
    ) -> None:
        self._opener = opener
        self._bench, self._request, self._prefill, self._prefill_ms = bench, request, prefill, prefill_ms
        self.replies: list[inference_pb2.StreamRoomReply] = []
        self.task: asyncio.Future[None]

    async def listen(self) -> None:
        room = int(self._request.request_id)
        peer = rooms_pb2.Peer(name="prefill-0", incarnation=self._prefill, address=self._bench.address)
        wire = inference_pb2.StreamRoomRequest(
            room=room,
            incarnation=DECODE,
            prefill=peer if self._prefill else None,
            request=request_to_wire(self._request),
            prefill_ms=self._prefill_ms,
            prefill_own_ms=self._prefill_ms or 0,
            opener=self._opener,
        )
        async with self._bench.work.callers.calling(
            RoomId(room), self._opener, group_pb2.Command(stream=wire), replies_max(wire.request)
        ) as replies:
            while not (self.replies and self.replies[-1].HasField("outcome")):
                self.replies.append(await replies.get())

    @property
    def tokens(self) -> list[int]:
        """Return the tokens that were streamed for the only choice, in order. Their positions are checked."""
        [drawn] = self.choices.values() or [[]]
        return drawn

    @property
    def choices(self) -> dict[int, list[int]]:
        """Return the tokens that were streamed, by choice. Choices without a token are absent."""
        drawn: dict[int, list[int]] = {}
        for reply in self.replies:
            if reply.HasField("tokens"):
                choice = drawn.setdefault(reply.tokens.choice, [])
                assert reply.tokens.first == len(self._request.output) + len(choice)
                choice += [token_from_wire(each).id for each in reply.tokens.tokens]
        return drawn

    async def outcome(self) -> str:
        """Return why the room ended: a `Reason`, or "" when it was answered."""
        await until(lambda: self.task.done())
        await self.task
        outcome = self.replies[-1].outcome
        return outcome.cause.reason if outcome.HasField("cause") else ""


@asynccontextmanager
async def decoding(
    *,
    max_running: int = 8,
    pages: int = PAGES,
    fabric: MemoryFabric | None = None,
    checksum: KvChecksum = KvChecksum.RECORD,
    reuse: bool = False,
    grammars: GrammarCache | None = None,
    drafts_by: int = 0,
    drafting: DraftScheduler | None = None,
    local_gap_ms: int = 0,
) -> AsyncIterator[DecodeBench]:
    sender = Sender()
    sender.may_connect.set()

    def add(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_HandoverServiceServicer_to_server(sender, server)

    async with serving(add) as address:
        bench = DecodeBench(
            sender,
            address,
            max_running=max_running,
            pages=pages,
            fabric=fabric,
            checksum=checksum,
            reuse=reuse,
            grammars=grammars,
            drafts_by=drafts_by,
            drafting=drafting,
            local_gap_ms=local_gap_ms,
        )
        try:
            yield bench
        finally:
            await bench.close()


__all__ = ["DecodeBench", "NotConnected", "Sender", "decoding", "tell"]
