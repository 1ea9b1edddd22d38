"""One worker of each side in this process, with rooms in the phases to be measured.

Turns, rooms, pages, seals and pushes are the product's own. There are no peers and no model. A step ends on
command, and writes never end. Times are CPU times of the loop's thread.
"""

import asyncio
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final

import uvloop
from prometheus_client import CollectorRegistry

from baton.decode.decode_work import DecodeWork
from baton.decode.metrics import DecodeMetrics
from baton.decode.prefill_peers import FollowerPeers, endpoint_to_wire
from baton.engine_interface import PageSumRequest, Row, RowResult
from baton.engine_interface import Sequence as TokenSequence
from baton.handover.page_growth import AHEAD
from baton.ids import NO_OPENER, Incarnation, RoomId
from baton.pages.layout import KvLayout, full_group
from baton.pages.record import SCHEMA_HASH, SEAL_OFFSET, SLOT_BYTES, MetadataRecord, seal_bytes
from baton.parallel.solo import SoloGroup
from baton.prefill.metrics import PrefillMetrics
from baton.prefill.prefill_work import PrefillWork
from baton.rooms.deadlines import Deadlines
from baton.rooms.phases import Phase
from baton.rooms.request import Request, Token
from baton.runtime.clock import SystemClock
from baton.runtime.host_memory import HostMemory
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.memory_transfer import MemoryTransfer
from baton.transfer.exposure import Exposure
from baton.transfer.transfer_protocol import PutId, PutState, Region, Transfer, kv_region
from baton.wire.baton.v1 import group_pb2, inference_pb2, rooms_pb2
from baton.wire.channel import Channels, open_channel
from baton.wire.conversions import request_to_wire
from baton.wire.layout_messages import layout_to_wire
from baton.wire.model_bounds import ModelBounds
from baton.wire.service_role import ServiceRole
from baton.worker.assembly import RankMemory, RankPorts
from baton.worker.mailbox import Mailbox
from baton.worker.reporter import Reporter
from baton.worker.step_thread import StepThread
from baton.worker.turn_loop import TurnProgress, Work, take_turn
from bench.workers.rooms_worker import CONTEXT, VOCABULARY

PREFILL: Final = Incarnation(11)
DECODE: Final = Incarnation(22)
GROUP: Final = full_group("bfloat16", 16, (0,), (0,), 2)
LAYOUT: Final = KvLayout("toy", (GROUP,))
PROMPT: Final = 32
GROWS: Final = 2_000
"""Most tokens of a room, so many that no room ends during a measurement."""
HOUR_MS: Final = 3_600_000
DEADLINES: Final = Deadlines(HOUR_MS, HOUR_MS, HOUR_MS, HOUR_MS, HOUR_MS)
NOWHERE: Final = "127.0.0.1:1"
PASSES: Final = 20
WAITING: Final = 0.8
"""Share of rooms that wait. Half of the others are in transfer."""


@dataclass(frozen=True, slots=True)
class TurnMeasurement:
    side: str
    mix: str
    rooms: dict[str, int]
    beside_s: float
    ended_s: float
    pass_s: float

    def figures(self) -> dict[str, object]:
        return {
            "side": self.side,
            "mix": self.mix,
            "rooms": self.rooms,
            "median_ms": {
                "beside": _ms(self.beside_s),
                "ended": _ms(self.ended_s),
                "pass": _ms(self.pass_s),
            },
            "ratio": round(self.beside_s / self.pass_s, 2),
        }


@dataclass(frozen=True, slots=True)
class Burst:
    side: str
    commands: int
    prompt_tokens: int
    turns_s: Sequence[float]

    def figures(self) -> dict[str, object]:
        return {
            "side": self.side,
            "commands": self.commands,
            "prompt_tokens": self.prompt_tokens,
            "turns": len(self.turns_s),
            "longest_ms": _ms(max(self.turns_s)),
            "all_ms": _ms(sum(self.turns_s)),
        }


def measure(
    runs: int, rooms: int, burst: int, prompt_tokens: int
) -> tuple[list[TurnMeasurement], list[Burst]]:
    """Measure both sides with a mix of rooms, with all rooms running, and with a burst."""
    found: tuple[list[TurnMeasurement], list[Burst]] = uvloop.run(_measure(runs, rooms, burst, prompt_tokens))
    return found


async def _measure(
    runs: int, rooms: int, burst: int, prompt_tokens: int
) -> tuple[list[TurnMeasurement], list[Burst]]:
    measured, bursts = [], []
    for make in (_Decode, _Prefill):
        for mix in ("mixed", "running"):
            running = rooms if mix == "running" else rooms - int(rooms * WAITING)
            worker: _TurnWorker = make(rooms, running)
            try:
                await worker.fill(running if mix == "running" else running - running // 2)
                measured.append(await worker.measured(mix, runs))
            finally:
                await worker.close()
        worker = make(burst, 0)
        try:
            bursts.append(await worker.burst(burst, prompt_tokens))
        finally:
            await worker.close()
    return measured, bursts


class _Engine:
    """`baton.engine_interface.Steps`: a step ends when it is told to."""

    def __init__(self) -> None:
        self._may_end = threading.Semaphore(0)

    def end(self) -> None:
        self._may_end.release()

    def bind_thread(self) -> None: ...

    def step(self, rows: Sequence[Row]) -> list[RowResult]:
        self._may_end.acquire()
        return [(Token(7),) if row.sample else () for row in rows]

    def release(self, sequence: TokenSequence) -> None:
        """Do nothing: nothing is stored by sequence."""

    def sum_pages(self, parts: Sequence[PageSumRequest]) -> None:  # noqa: ARG002
        raise AssertionError("no sums are asked for")


class _Endless(MemoryTransfer):
    """Transfer whose writes never end. A poll costs one call, as in a library."""

    def poll(self, put: PutId) -> PutState:  # noqa: ARG002
        return PutState.PENDING


class _TurnWorker(ABC):
    """Worker with rooms. `places`: most rooms. `fitting`: rooms whose pages fit."""

    side: str

    def __init__(self, places: int, fitting: int) -> None:
        self._clock = SystemClock()
        self._progress = TurnProgress(self._clock)
        self._group = SoloGroup()
        self._mailbox = Mailbox()
        self._engine = _Engine()
        self._step_thread = StepThread(self._engine, self._mailbox.wake)
        self._channels = Channels(open_channel)
        self._reporter = Reporter(
            lambda address: self._channels.to(address, ServiceRole.BOOTSTRAP), PREFILL, "bench", self._clock
        )
        self._reporter.use({NO_OPENER: NOWHERE})
        self._places = places
        self._fitting = fitting
        self._fabric = MemoryFabric()
        self.work: Work

    def _ports(
        self, worker: Incarnation, pages: int, transfer: Callable[[Incarnation], Transfer]
    ) -> RankPorts:
        """Make the ports of a rank with this number of pages."""
        ids = count(worker)
        cache = HostMemory(pages * GROUP.page_bytes)
        memory = RankMemory.of([cache], [pages], LAYOUT, self._places, keeps_prefixes=True)
        return RankPorts(
            incarnation=worker,
            layouts=[LAYOUT],
            bounds=ModelBounds(VOCABULARY, CONTEXT),
            step_thread=self._step_thread,
            memory=memory,
            exposure=Exposure(transfer, lambda: Incarnation(next(ids)), memory.regions),
            mailbox=self._mailbox,
            reporter=self._reporter,
            clock=self._clock,
        )

    @abstractmethod
    async def fill(self, running: int) -> None:
        """Fill every slot, with some of the rooms in the batch."""

    @abstractmethod
    def _open(self, room: int, prompt: Sequence[int]) -> group_pb2.Command: ...

    async def burst(self, commands: int, prompt_tokens: int) -> Burst:
        """Open rooms at once, and measure all work of their first turns."""
        for room in range(1, commands + 1):
            self._mailbox.put(self._open(room, range(prompt_tokens)))
        turns_s = [await self._turn()]
        while not self._mailbox.empty:
            turns_s.append(await self._turn())
        return Burst(self.side, commands, prompt_tokens, turns_s)

    async def measured(self, mix: str, runs: int) -> TurnMeasurement:
        beside, ended, passed = [], [], []
        if self._step_thread.free:
            raise AssertionError("nothing is computed")
        for _ in range(runs):
            beside.append(await self._turn())
            passed.append(min(self._pass_s() for _ in range(PASSES)))
        for _ in range(runs):
            await self._step_end()
            ended.append(await self._turn())
            await self._turn()
        census = {phase.value: held for phase, held in self.work.roster.census().items() if held}
        medians = map(statistics.median, (beside, ended, passed))
        return TurnMeasurement(self.side, mix, census, *medians)

    async def close(self) -> None:
        self._engine.end()
        self._step_thread.close()
        await self._channels.close()

    async def _turn(self) -> float:
        self._reporter.pending.clear()
        started = time.thread_time()
        await take_turn(self.work, self._group, self._clock, self._progress)
        return time.thread_time() - started

    async def _turns(self, count: int) -> None:
        """Take turns until all commands are handled, and then `more` turns."""
        while not self._mailbox.empty:
            await self._turn()
        for _ in range(count):
            await self._turn()

    async def _step_end(self) -> None:
        running = self._step_thread.running
        self._engine.end()
        if running is not None:
            await asyncio.wait([running])

    def _pass_s(self) -> float:
        started = time.thread_time()
        for room in self.work.roster:
            if room.phase is Phase.RETIRED:
                raise AssertionError(room.id)
        return time.thread_time() - started

    def _request(self, prompt: Sequence[int]) -> inference_pb2.InferenceRequest:
        return request_to_wire(Request("bench", tuple(prompt), GROWS))


class _Decode(_TurnWorker):
    side = "decode"

    def __init__(self, places: int, fitting: int) -> None:
        super().__init__(places, fitting)
        pages = max(fitting * GROUP.pages_for(PROMPT + GROWS), GROUP.pages_for(CONTEXT))
        running_max = max(places if fitting == places else fitting // AHEAD, 1)
        ports = self._ports(DECODE, pages, partial(MemoryTransfer, self._fabric))
        self._held = ports.memory.holdings
        self.work = DecodeWork(
            ports,
            DEADLINES,
            peers=FollowerPeers(),
            metrics=DecodeMetrics(CollectorRegistry(), running_max),
            max_running=running_max,
        )
        self.work.on_gathered([self.work.gather_payload() or b""])

    async def fill(self, running: int) -> None:
        for room in range(1, self._places + 1):
            self._mailbox.put(self._open(room, range(room, room + PROMPT)))
        await self._turns(4)
        for room in list(self.work.roster)[:running]:
            self._land(room.id)
        await self._turns(3)

    def _open(self, room: int, prompt: Sequence[int]) -> group_pb2.Command:
        prefill = rooms_pb2.Peer(name="prefill", incarnation=PREFILL, address=NOWHERE)
        wire = inference_pb2.StreamRoomRequest(
            room=room, incarnation=DECODE, prefill=prefill, request=self._request(prompt)
        )
        return group_pb2.Command(stream=wire)

    def _land(self, room: RoomId) -> None:
        """Write a room's record and seal, as its sender would."""
        slot = self._held.get(room).slot
        record = MetadataRecord(room, slot.generation, PROMPT, 0, LAYOUT.pages_for(PROMPT), first_token=7)
        view = self._held.slots.view(slot)
        view[:SEAL_OFFSET] = record.pack()
        seal = seal_bytes(room, slot.generation)
        view[SEAL_OFFSET : SEAL_OFFSET + len(seal)] = seal


class _Prefill(_TurnWorker):
    side = "prefill"

    def __init__(self, places: int, fitting: int) -> None:
        super().__init__(places, fitting)
        pages = max(fitting * GROUP.pages_for(PROMPT), GROUP.pages_for(CONTEXT))
        if fitting:
            pages = fitting * GROUP.pages_for(PROMPT)
        self.work = PrefillWork(
            self._ports(PREFILL, pages, partial(_Endless, self._fabric)),
            DEADLINES,
            metrics=PrefillMetrics(CollectorRegistry()),
            chunk_tokens=max(places, 1) * PROMPT,
            window_bytes=2**20,
        )

    async def fill(self, running: int) -> None:
        """Fill the worker. At most a quarter of the rooms lack a destination, and running rooms are
        computed."""
        receiver = MemoryTransfer(self._fabric, DECODE)
        theirs = HostMemory(self._places * GROUP.pages_for(PROMPT) * GROUP.page_bytes)
        receiver.register(Region(kv_region(0), theirs.address, theirs.length))
        slots = HostMemory(self._places * SLOT_BYTES)
        receiver.register(Region("slots", slots.address, slots.length))
        self._kept = (receiver, theirs, slots)
        connect = inference_pb2.ConnectRequest(
            receiver=DECODE,
            endpoints=[endpoint_to_wire(receiver.endpoint())],
            layouts=[layout_to_wire(LAYOUT)],
            schema=SCHEMA_HASH,
        )
        self._mailbox.put(group_pb2.Command(connect=connect))
        written = self._fitting - running
        await self._granted(range(1, written + 1))
        await self._step_end()  # computed: what is written now never ends
        await self._turns(2)
        unasked = (self._places - self._fitting) // 2
        await self._granted(range(written + 1, self._places + 1 - unasked))
        for room in range(self._places + 1 - unasked, self._places + 1):
            self._mailbox.put(self._open(room, range(room, room + PROMPT)))
        await self._turns(4)

    async def _granted(self, rooms: Sequence[int]) -> None:
        pages = GROUP.pages_for(PROMPT)
        for room in rooms:
            self._mailbox.put(self._open(room, range(room, room + PROMPT)))
            grant = inference_pb2.GrantRequest(
                room=room,
                receiver=DECODE,
                generation=room,
                pages=[inference_pb2.PageTable(pages=range((room - 1) * pages, room * pages))],
                slot=room - 1,
                exposure=DECODE,
            )
            self._mailbox.put(group_pb2.Command(grant=grant))
        await self._turns(4)

    def _open(self, room: int, prompt: Sequence[int]) -> group_pb2.Command:
        decode = rooms_pb2.Peer(name="decode", incarnation=DECODE, address=NOWHERE)
        wire = inference_pb2.RunRoomRequest(
            room=room, incarnation=PREFILL, decode=decode, request=self._request(prompt)
        )
        return group_pb2.Command(run=wire)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
