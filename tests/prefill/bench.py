"""A prefill worker's turns, one at a time, beside a receiver's memory in the same process."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from baton.decode.prefill_peers import endpoint_to_wire
from baton.grammars.grammar_cache import GrammarCache
from baton.handover.turn import Lap
from baton.ids import NO_OPENER, Generation, Incarnation, RoomId
from baton.pages.kv_checksum import KvChecksum
from baton.pages.layout import KvLayout
from baton.pages.pool import PageState
from baton.pages.record import SCHEMA_HASH, SLOT_BYTES, MetadataRecord, read_slot
from baton.parallel.rank_group import RankGroup
from baton.parallel.solo import SoloGroup
from baton.prefill.metrics import PrefillMetrics
from baton.prefill.prefill_room import REPLIES_MAX
from baton.prefill.prefill_work import PrefillWork
from baton.rooms.deadlines import Deadlines
from baton.rooms.errors import Cause, Reason
from baton.rooms.request import Request
from baton.runtime.host_memory import HostMemory
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.memory_transfer import MemoryTransfer
from baton.transfer.exposure import Exposure
from baton.transfer.transfer_protocol import Region, kv_region
from baton.wire.baton.v1 import group_pb2, inference_pb2, rooms_pb2
from baton.wire.conversions import cause_to_wire, request_to_wire
from baton.wire.layout_messages import layout_to_wire
from baton.wire.model_bounds import ModelBounds
from baton.worker.assembly import RankMemory, RankPorts
from baton.worker.mailbox import Mailbox
from baton.worker.reporter import Reporter
from baton.worker.step_thread import StepThread
from baton.worker.turn_loop import TurnProgress, take_turn
from tests.patience import PATIENCE_S
from tests.prefill import toy
from tests.support.manual_clock import ManualClock
from tests.wire.servers import until

PREFILL, DECODE = Incarnation(11), Incarnation(22)
PAGES = 16
PLACES = 4
DEADLINE_MS = 1_000
BOUNDS = ModelBounds(toy.VOCABULARY, toy.CONTEXT)


def deadlines(ms: int = DEADLINE_MS) -> Deadlines:
    return Deadlines(ms, ms, ms, ms, ms, orphan_ms=ms)


def silent_reporter(name: str, incarnation: Incarnation) -> Reporter:
    """Return a reporter that never calls its bootstrap, since its task does not run."""
    reporter = Reporter(grpc.aio.insecure_channel, incarnation, name, ManualClock())
    reporter.use({NO_OPENER: "127.0.0.1:1"})
    return reporter


class Receiver:
    """The memory and endpoint of one rank of a decode worker."""

    def __init__(self, fabric: MemoryFabric, incarnation: Incarnation = DECODE) -> None:
        self.kv = HostMemory(PAGES * toy.GROUP.page_bytes)
        self.slots = HostMemory(PLACES * SLOT_BYTES)
        self.transfer = MemoryTransfer(fabric, incarnation)
        self.transfer.register(Region(kv_region(0), self.kv.address, self.kv.length))
        self.transfer.register(Region("slots", self.slots.address, self.slots.length))
        self.endpoint = self.transfer.endpoint()

    def page(self, page: int) -> bytes:
        return toy.read(self.kv.address + page * toy.GROUP.page_bytes, toy.GROUP.page_bytes)

    def record(self, slot: int, room: int, generation: int) -> MetadataRecord | None:
        return read_slot(
            self.slots.view[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES], RoomId(room), Generation(generation)
        )


class PrefillBench:
    def __init__(
        self,
        fabric: MemoryFabric,
        *,
        pages: int = PAGES,
        chunk_tokens: int = 8,
        window_bytes: int = toy.GROUP.page_bytes,
        checksum: KvChecksum = KvChecksum.RECORD,
        group: RankGroup | None = None,
        layouts: Sequence[KvLayout] = (toy.LAYOUT,),
        reuse: bool = False,
        grammars: GrammarCache | None = None,
        scored_tokens: int = 8,
    ) -> None:
        """`group`, `layouts`: of a worker of several ranks. `reuse`: keep prefixes, of rooms of one mark.
        `grammars`: of a rank that draws; the toy holds no answer to them."""
        self._group: RankGroup = group or SoloGroup()
        rank = self._group.rank
        self.clock = ManualClock(now_ms=1_000)
        self.engine = toy.ToyEngine(pages)
        self.mailbox = Mailbox()
        self.step_thread = StepThread(self.engine, self.mailbox.wake)
        self.registry = CollectorRegistry()
        self.reporter = silent_reporter("prefill-0", PREFILL)
        memory = RankMemory.of([self.engine.memory], [pages], layouts[rank], PLACES, keeps_prefixes=reuse)
        self.holdings = memory.holdings
        ports = RankPorts(
            incarnation=PREFILL,
            layouts=layouts,
            rank=rank,
            bounds=BOUNDS,
            checksum=checksum,
            step_thread=self.step_thread,
            grammars=grammars,
            memory=memory,
            exposure=Exposure(
                partial(MemoryTransfer, fabric), lambda: Incarnation(PREFILL + 1_000 * rank), memory.regions
            ),
            mailbox=self.mailbox,
            reporter=self.reporter,
            clock=self.clock,
        )
        assert isinstance(ports.exposure.transfer, MemoryTransfer)
        self.transfer = ports.exposure.transfer
        self.work = PrefillWork(
            ports,
            deadlines(),
            metrics=PrefillMetrics(self.registry),
            chunk_tokens=chunk_tokens,
            window_bytes=window_bytes,
            scored_tokens=scored_tokens,
        )
        self._progress = TurnProgress(self.clock)

    # ---- what comes from outside

    def connect(self, receiver: "Receiver") -> None:
        """Connect to the receiver as one rank obeys the leader's command."""
        wire = connect_request(receiver)
        self.work.apply(group_pb2.Commands(commands=[group_pb2.Command(connect=wire)]).SerializeToString())
        self.work.on_agreement(self.work.connects())
        assert self.transfer.connected(receiver.endpoint.incarnation)

    async def enter(self, command: group_pb2.Command) -> None:
        """Enter a command and take its turn. Raises the error of applying it."""
        asked = asyncio.ensure_future(self.mailbox.submit(command))
        await asyncio.sleep(0)
        await self.turn()
        await asked

    async def run(self, request: Request, room: int | None = None) -> "Caller":
        """Start RunRoom as its handler does, up to the first turn."""
        name = RoomId(room if room is not None else int(request.request_id))
        caller = Caller(self, name, request)
        caller.task = asyncio.ensure_future(caller.listen())
        await asyncio.sleep(0)
        await self.turn()
        await until(lambda: bool(caller.replies) or caller.task.done())
        if caller.task.done():
            await caller.task
        return caller

    async def grant(
        self,
        room: int,
        pages: tuple[int, ...],
        *,
        slot: int = 0,
        generation: int = 5,
        prefix: int = 0,
        exposure: int = DECODE,
    ) -> None:
        wire = inference_pb2.GrantRequest(
            room=room,
            receiver=DECODE,
            generation=generation,
            pages=[inference_pb2.PageTable(pages=pages)],
            slot=slot,
            prefix_tokens=prefix,
            exposure=exposure,
        )
        await self.enter(group_pb2.Command(grant=wire))

    async def cancel(self, room: int, reason: Reason = Reason.CANCELLED) -> None:
        cause = cause_to_wire(Cause(reason, "no longer wanted"))
        await self.enter(group_pb2.Command(cancel=inference_pb2.CancelRequest(room=room, cause=cause)))

    def closing(self, room: int, *, generation: int = 5, receiver: int = DECODE) -> "asyncio.Future[None]":
        """Close, as its handler does it: done when the room is proven quiet."""

        async def close() -> None:
            wire = inference_pb2.CloseRequest(room=room, receiver=receiver, generation=generation)
            await self.mailbox.submit(group_pb2.Command(close=wire))
            async with asyncio.timeout(PATIENCE_S):
                await self.work.quiet(RoomId(room))

        return asyncio.ensure_future(close())

    # ---- time

    async def turn(self) -> Lap:
        lap = await take_turn(self.work, self._group, self.clock, self._progress)
        await asyncio.sleep(0)
        return lap

    async def turns(self, count: int) -> None:
        for _ in range(count):
            await self.turn()

    async def step_end(self) -> None:
        running = self.step_thread.running
        assert running is not None, "no step is running"
        await asyncio.wait([running], timeout=PATIENCE_S)
        assert running.done()

    # ---- what is left

    def gauge(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(name, labels)
        assert value is not None, name
        return value

    def assert_empty(self) -> None:
        work: Any = self.work
        assert len(work.roster) == len(work.closers) == 0
        assert len(work.scheduler) == 0
        assert len(work.callers) == 0
        assert len(work.early) == 0
        assert len(self.holdings) == 0
        assert self.holdings.available == self.holdings.sizes
        assert self.holdings.slots.free == len(self.holdings.slots)
        assert self.engine.live == set()
        assert_gauges_at_rest(self.registry)

    def told(self, room: int) -> list[str]:
        """Return the names of the room's timeline lines, in order."""
        waiting: Any = self.reporter
        told = [each.event for each in waiting.pending if each.room == room]
        return [rooms_pb2.RoomEvent.FromString(each).name for each in told]

    def close(self) -> None:
        self.engine.go()
        self.step_thread.close()
        self.transfer.close()


def connect_request(receiver: Receiver, *more: Receiver) -> inference_pb2.ConnectRequest:
    """Return the connect request of a decode worker with these ranks."""
    return inference_pb2.ConnectRequest(
        receiver=DECODE,
        endpoints=[endpoint_to_wire(each.endpoint) for each in (receiver, *more)],
        layouts=[layout_to_wire(toy.LAYOUT) for _ in (receiver, *more)],
        schema=SCHEMA_HASH,
    )


class Caller:
    """A caller of RunRoom."""

    def __init__(self, bench: PrefillBench, room: RoomId, request: Request) -> None:
        self._bench, self._room, self._request = bench, room, request
        self.replies: list[inference_pb2.RunRoomReply] = []
        self.task: asyncio.Future[None]

    async def listen(self) -> None:
        wire = inference_pb2.RunRoomRequest(
            room=self._room,
            incarnation=PREFILL,
            decode=rooms_pb2.Peer(name="decode-0", incarnation=DECODE, address="127.0.0.1:1"),
            request=request_to_wire(self._request),
        )
        command = group_pb2.Command(run=wire)
        async with self._bench.work.callers.calling(self._room, NO_OPENER, command, REPLIES_MAX) as replies:
            while not (self.replies and self.replies[-1].HasField("outcome")):
                self.replies.append(await replies.get())

    @property
    def heard(self) -> list[str | None]:
        return [reply.WhichOneof("what") for reply in self.replies]

    async def outcome(self) -> str:
        """Return why the room ended: a `Reason`, or "" when it was handed over."""
        await until(lambda: self.task.done())
        await self.task
        outcome = self.replies[-1].outcome
        return outcome.cause.reason if outcome.HasField("cause") else ""


def assert_gauges_at_rest(registry: CollectorRegistry) -> None:
    """Check that every gauge is 0, except those of free and cached pages, and of slots."""
    for family in registry.collect():
        if family.type == "gauge":
            for sample in family.samples:
                if sample.labels.get("state") not in (PageState.FREE.value, PageState.CACHED.value):
                    assert sample.value == 0, sample
