"""A prefill and a decode worker in processes of their own, whose inside tests can read.

Turns, rooms, memory and services are the product's own, over real gRPC and NIXL. The model is
`tests/process/wide.py`, and the test is the bootstrap.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import uvloop
from prometheus_client import CollectorRegistry

from baton.decode.decode_service import DecodeService
from baton.decode.decode_work import DecodeWork
from baton.decode.metrics import DecodeMetrics
from baton.decode.prefill_peers import LeaderPeers
from baton.ids import Incarnation, RoomId
from baton.pages.holdings import Holdings
from baton.pages.pool import PagePool
from baton.pages.record import SLOT_BYTES
from baton.pages.slots import SlotPool
from baton.parallel.solo import SoloGroup
from baton.prefill.metrics import PrefillMetrics
from baton.prefill.prefill_room import PrefillRoom
from baton.prefill.prefill_service import HandoverService, PrefillService
from baton.prefill.prefill_work import PrefillWork
from baton.rooms.deadlines import Deadlines
from baton.runtime.clock import SystemClock
from baton.runtime.host_memory import HostMemory
from baton.runtime.tls_files import TlsFiles
from baton.transfer.exposure import Exposure
from baton.transfer.transfer_protocol import PutId, Run, kv_region
from baton.wire.baton.v1 import group_pb2, inference_pb2_grpc
from baton.wire.channel import Channels
from baton.wire.tls_identity import Identity
from baton.worker.assembly import RankMemory, RankPorts
from baton.worker.mailbox import Mailbox
from baton.worker.pending_events import SystemPendingEvents
from baton.worker.step_thread import StepThread
from baton.worker.turn_loop import TurnProgress, run_turns
from bench.pages.device_memory import DeviceMemory, bytes_of, take
from tests.layouts import group_of
from tests.prefill.bench import assert_gauges_at_rest, silent_reporter
from tests.process.wide import BOUNDS, LAYOUT, WideEngine
from tests.suite.marks import starts
from tests.transfer.child import Child
from tests.wire.receivers import secret_of
from tests.wire.servers import serving

PAGES: Final = 24
PLACES: Final = 8
WINDOW_BYTES: Final = 32 << 20
PHASE_MS: Final = 60_000
NEVER_MS: Final = 3_600_000

Question = Callable[..., Any]


class Actor(Child):
    """A worker in a process of its own."""

    def __init__(
        self, side: str, environment: Mapping[str, str], output: Path, port: int = 0, **options: Any
    ) -> None:
        """`port`: of its gRPC server; 0: any."""
        starts("stack")
        super().__init__(_live, (side, port, options), dict(environment), output)
        self.address, self.incarnation = self.answer()


@dataclass
class Defence:
    """Defences of a decode worker against late writes. A control run leaves one out."""

    fenced: bool = True
    """Whether a failed room's memory is fenced. If not, it is free at once, as if an abort could be
    trusted."""
    moving: bool = True
    """Whether revoked memory moves. If not, it stays where it is, as if an endpoint's end could be
    trusted."""
    revoke_after_ms: int = NEVER_MS


class FencedIfTold(Holdings):
    def __init__(self, pages: PagePool, slots: SlotPool, defence: Defence) -> None:
        super().__init__([pages], slots)
        self._defence = defence

    def quarantine(self, room: RoomId) -> bool:
        exposed = super().quarantine(room)
        if exposed and not self._defence.fenced:
            self.give_back(room)
        return exposed and self._defence.fenced


class MovingIfTold(HostMemory):
    def __init__(self, length: int, defence: Defence) -> None:
        super().__init__(length)
        self._defence = defence

    def move(self) -> None:
        if self._defence.moving:
            super().move()


class Turns(SoloGroup):
    """The turns of one rank, which can be paused. A resting rank drives NIXL without a turn. To stop that as
    well, it is woken, and `paused` tells when a turn waits."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake
        self._running = asyncio.Event()
        self._running.set()
        self._waits = False

    async def broadcast(self, commands: bytes | None) -> bytes:
        self._waits = not self._running.is_set()
        await self._running.wait()
        self._waits = False
        return await super().broadcast(commands)

    def _pause(self) -> None:
        self._running.clear()
        self._wake()

    def questions(self) -> dict[str, Question]:
        return {"pause": self._pause, "paused": lambda: self._waits, "resume": self._running.set}


def _live(pipe: Connection, side: str, port: int, options: dict[str, Any]) -> None:
    live = {"prefill": _prefill, "decode": _decode}[side]
    uvloop.run(live(pipe, port, **options))


async def _serve(
    pipe: Connection,
    port: int,
    incarnation: Incarnation,
    add: Any,
    turns: Awaitable[None],
    questions: dict[str, Question],
    identity: Identity | None,
) -> None:
    """Turn, and answer questions between two turns, until told to leave."""
    left = asyncio.Event()

    def answer() -> None:
        what, arguments = pipe.recv()
        if what == "leave":
            left.set()
            return
        try:
            pipe.send(questions[what](*arguments))
        except Exception as error:
            pipe.send(error)

    async with serving(add, port, identity) as address:
        turning = asyncio.ensure_future(turns)
        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
        pipe.send((address, incarnation))
        await asyncio.wait([turning, asyncio.ensure_future(left.wait())], return_when=asyncio.FIRST_COMPLETED)
        if turning.done():
            turning.result()
        turning.cancel()


def _deadlines(fence_ms: int = NEVER_MS) -> Deadlines:
    return Deadlines(PHASE_MS, PHASE_MS, PHASE_MS, PHASE_MS, fence_ms)


def _ports(
    engine: WideEngine,
    memory: RankMemory,
    exposure: Exposure,
    mailbox: Mailbox,
    clock: SystemClock,
    incarnation: Incarnation,
) -> RankPorts:
    return RankPorts(
        incarnation=incarnation,
        layouts=[LAYOUT],
        bounds=BOUNDS,
        step_thread=StepThread(engine, mailbox.wake),
        memory=memory,
        exposure=exposure,
        mailbox=mailbox,
        reporter=silent_reporter("actor", incarnation),
        clock=clock,
    )


async def _prefill(pipe: Connection, port: int, tls: TlsFiles | None = None, device: str = "cpu") -> None:
    from baton.transfer.nixl import NixlTransfer

    clock, mailbox, registry = SystemClock(), Mailbox(), CollectorRegistry()
    incarnation = Incarnation(secrets.randbits(63) | 1)
    engine = WideEngine(take(PAGES * group_of(LAYOUT).page_bytes, device))
    memory = RankMemory.of([engine.memory], [PAGES], LAYOUT, PLACES)
    exposure = Exposure(NixlTransfer, lambda: incarnation, memory.regions)
    ports = _ports(engine, memory, exposure, mailbox, clock, incarnation)
    transfer = ports.exposure.transfer
    put = transfer.put

    def stop_before_put() -> None:
        """Stop the process after it has decided on its next write of pages. The write is posted when the
        process goes on."""

        def stop_and_put(peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
            if region == kv_region(0):
                transfer.put = put  # type: ignore[method-assign]
                os.kill(os.getpid(), signal.SIGSTOP)
            return put(peer, region, runs)

        transfer.put = stop_and_put  # type: ignore[method-assign]

    def believe() -> None:
        """Accept every caller as the receiver that it claims to be, as a control."""
        work.receivers.check = lambda *_: None  # type: ignore[method-assign]

    work = PrefillWork(
        ports,
        _deadlines(),
        metrics=PrefillMetrics(registry),
        chunk_tokens=4096,
        window_bytes=WINDOW_BYTES,
    )
    group, rooms = Turns(mailbox.wake), work.roster

    def add(server: Any) -> None:
        inference_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillService(work), server)
        inference_pb2_grpc.add_HandoverServiceServicer_to_server(HandoverService(work), server)

    questions: dict[str, Question] = {
        **group.questions(),
        "hold": engine.hold,
        "go": engine.go,
        "believe": believe,
        "stop_before_put": stop_before_put,
        "granted": lambda room: room in rooms and rooms.get(RoomId(room)).grant is not None,
        "under_way": lambda room: _in_flight(rooms.get(RoomId(room))) if room in rooms else 0,
        "rooms": lambda: len(rooms),
        "at_rest": lambda: _at_rest(registry),
        "depart": lambda peer: mailbox.put(group_pb2.Command(departed=peer)),
    }
    try:
        arrivals = SystemPendingEvents(asyncio.get_running_loop(), clock)
        turns = run_turns(work, group, clock, TurnProgress(clock), arrivals)
        await _serve(pipe, port, incarnation, add, turns, questions, Identity.of(tls))
    finally:
        engine.go()
        ports.step_thread.close()
        transfer.close()


async def _decode(pipe: Connection, port: int, tls: TlsFiles | None = None, device: str = "cpu") -> None:
    from baton.transfer.nixl import NixlTransfer

    clock, mailbox, registry = SystemClock(), Mailbox(), CollectorRegistry()
    channels = Channels.showing(Identity.of(tls))
    incarnation = Incarnation(secrets.randbits(63) | 1)
    defence = Defence()
    length = PAGES * group_of(LAYOUT).page_bytes
    engine = WideEngine(MovingIfTold(length, defence) if device == "cpu" else DeviceMemory(length, device))
    slots = MovingIfTold(PLACES * SLOT_BYTES, defence)
    holdings = FencedIfTold(PagePool(PAGES), SlotPool(slots.view), defence)
    memory = RankMemory([engine.memory], slots, holdings)
    exposure = Exposure(NixlTransfer, lambda: Incarnation(secrets.randbits(63) | 1), memory.regions)
    ports = _ports(engine, memory, exposure, mailbox, clock, incarnation)
    peers = LeaderPeers(ports, channels, secret_of(incarnation), 20.0)
    work = DecodeWork(
        ports,
        _deadlines(),
        peers=peers,
        metrics=DecodeMetrics(registry, PLACES),
        max_running=PLACES,
    )
    group = Turns(mailbox.wake)

    def add(server: Any) -> None:
        inference_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeService(work), server)

    def defend(fenced: bool, moving: bool, revoke_after_ms: int) -> None:
        defence.fenced, defence.moving = fenced, moving
        work.receiving._deadlines = _deadlines(revoke_after_ms)

    def foreign() -> list[str]:
        told = list(engine.foreign)
        engine.foreign.clear()
        return told

    questions: dict[str, Question] = {
        **group.questions(),
        "hold": engine.hold,
        "go": engine.go,
        "defend": defend,
        "wake": mailbox.wake,
        "foreign": foreign,
        "endpoints": lambda: [each.SerializeToString() for each in work.endpoints],
        "written": lambda: bool(bytes_of(engine.memory).any()),
        "pages": lambda: {state.value: count for state, count in holdings.census().items()},
        "phase": lambda room: (
            work.roster.get(RoomId(room)).phase.value if RoomId(room) in work.roster else ""
        ),
        "standing": lambda room: holdings.get(room).standing.value if room in holdings else "",
        "rooms": lambda: len(work.roster),
        "revocations": lambda: registry.get_sample_value("baton_kv_revocations_total"),
        "at_rest": lambda: _at_rest(registry),
        "depart": lambda peer: mailbox.put(group_pb2.Command(departed=peer)),
    }
    try:
        arrivals = SystemPendingEvents(asyncio.get_running_loop(), clock)
        turns = run_turns(work, group, clock, TurnProgress(clock), arrivals)
        await _serve(pipe, port, incarnation, add, turns, questions, Identity.of(tls))
    finally:
        engine.go()
        await peers.stop()
        await channels.close()
        ports.step_thread.close()
        ports.exposure.close()


def _in_flight(room: PrefillRoom) -> int:
    """Return the number of windows of pages under way."""
    return sum(map(bool, room.push.in_flight.values())) if room.begun else 0


def _at_rest(registry: CollectorRegistry) -> str:
    """Return an empty text if all gauges are at rest, else the name of one that is not."""
    try:
        assert_gauges_at_rest(registry)
    except AssertionError as error:
        return str(error)
    return ""
