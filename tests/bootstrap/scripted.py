"""A bootstrap without HTTP, beside workers that play scripts over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
from prometheus_client import CollectorRegistry

from baton.api.backend import RoomFailed
from baton.api.requests.schemas import RecommendedSampling
from baton.bootstrap.canary_request import canary_request
from baton.bootstrap.metrics import BootstrapMetrics, RegistryCollector
from baton.bootstrap.peer_bootstraps import PeerBootstraps
from baton.bootstrap.request_stream import RequestStream
from baton.bootstrap.room_backend import RoomBackend
from baton.bootstrap.room_controller import RoomController
from baton.bootstrap.room_stream import RoomStream
from baton.bootstrap.stack_metrics import StackCollector
from baton.fleet.registry import Registry
from baton.fleet.retry import RetryBounds
from baton.fleet.room_entry import RoomEntry, RoomPhase
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, NotOrphaned, Reason
from baton.rooms.phases import Side
from baton.rooms.request import FinishReason, Request, Sampling, Score, Token
from baton.rooms.worker_facts import WorkerFacts
from baton.wire.baton.v1 import inference_pb2, inference_pb2_grpc, rooms_pb2, workers_pb2, workers_pb2_grpc
from baton.wire.bootstrap_addresses import BootstrapAddresses
from baton.wire.channel import Channels
from baton.wire.conversions import (
    finish_to_wire,
    outcome_to_wire,
    request_from_wire,
    scores_to_wire,
    token_to_wire,
)
from baton.wire.errors import refusal_to_wire
from baton.wire.layout_messages import layout_to_wire
from baton.wire.receiver_secret import digest_of
from baton.wire.registration import worker_from_wire
from baton.worker.shared_stream import ends_some, rooms_reply
from tests.layouts import one_group
from tests.patience import PATIENCE_S
from tests.support.manual_clock import ManualClock
from tests.wire.servers import serving, until

LEASE_MS = 3_000
P, D = Side.PREFILL, Side.DECODE
OWN = "127.0.0.1:8100"
"""gRPC address of the bootstrap on its own host, where none listens."""
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH

LAYOUT = layout_to_wire(one_group("model", "float32", 16, (0,), (0,), 8))
STACK = worker_from_wire(
    workers_pb2.RegisterRequest(
        worker=rooms_pb2.Peer(name="any", incarnation=1, address="127.0.0.1:1"),
        side=rooms_pb2.SIDE_PREFILL,
        layout=LAYOUT,
        tokens_max=1,
        rooms_max=1,
    )
).stack
"""Stack settings that the tests' workers register with."""

Step = Any
"""A reply to send, or a function that makes one from the request. An exception is raised, an event is waited
for, and None ends the stream without another word."""


def accepted(side: Side) -> Step:
    reply = inference_pb2.RunRoomReply if side is Side.PREFILL else inference_pb2.StreamRoomReply
    return reply(accepted=inference_pb2.Accepted())


def first(token: int, finish: FinishReason | None = None) -> Step:
    told = inference_pb2.FirstToken(token=token_to_wire(Token(token)), finish=finish_to_wire(finish))
    return inference_pb2.RunRoomReply(first_token=told)


def scores(*told: Score, start: int = 1) -> Step:
    (wire,) = scores_to_wire(told)
    wire.first = start
    return inference_pb2.RunRoomReply(scores=wire)


def tokens(
    start: int, ids: Sequence[int], finish: FinishReason | None = None, choice: int = 0, cached: int = 0
) -> Step:
    told = inference_pb2.Tokens(
        first=start,
        tokens=[token_to_wire(Token(each)) for each in ids],
        finish=finish_to_wire(finish),
        cached_tokens=cached,
        choice=choice,
    )
    return inference_pb2.StreamRoomReply(tokens=told)


def ended(side: Side, cause: Cause | None = None) -> Step:
    reply = inference_pb2.RunRoomReply if side is Side.PREFILL else inference_pb2.StreamRoomReply
    return reply(outcome=outcome_to_wire(cause))


@dataclass
class ScriptedWorker:
    """Plays a script for every room, until the room is cancelled."""

    name: str
    side: Side
    incarnation: Incarnation
    script: Sequence[Step] = ()
    scripts: list[Sequence[Step]] = field(default_factory=list)
    """Scripts of the next rooms, in their order. Rooms after them follow `script`."""
    gives: Sequence[Step] | None = None
    """Script of a room that another router opened and this one adopts. None: the worker refuses that."""
    choose: Callable[[Request], Sequence[Step]] | None = None
    """Function that returns the script for a request, in place of `script`."""
    address: str = ""
    tokens_max: int = 1_000
    rooms_max: int = 2
    pid: int = 0
    computes: bool = False
    """Whether this decode worker computes prompts where there is no prefill worker."""
    late_s: float = 0.0
    """Delay from a call until this worker reads the first rooms from it, seconds."""
    called: list[int] = field(default_factory=list)
    adopting: list[int] = field(default_factory=list)
    """Rooms that the router wanted to adopt."""
    asked: list[Request] = field(default_factory=list)
    openings: list[Any] = field(default_factory=list)
    """Messages that opened rooms, as they came."""
    left_ms: list[int] = field(default_factory=list)
    """Time left for each room, as the worker was told, ms."""
    cancels: dict[int, str] = field(default_factory=dict)
    """Reasons of cancelled rooms, by room."""
    openers: set[int] = field(default_factory=set)
    """Openers that all messages about rooms named."""
    enough: list[tuple[int, int]] = field(default_factory=list)
    """Choices that the worker was told are complete, as (room, choice)."""
    absent: set[int] = field(default_factory=set)
    """Rooms that the worker reports as absent when they are cancelled."""
    cut: list[int] = field(default_factory=list)
    """Rooms whose streams the caller ended."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    found: int | None = None
    """Incarnation that answers at this worker's address, if another one does."""
    says: rooms_pb2.WorkerLoad | None = None
    """The load that the worker reports with the end of a room."""
    mute: asyncio.Event | None = None
    """While this is not set, the worker does not answer the question whether it is alive."""

    async def WhoIsThere(self, _: Any, __: Any) -> workers_pb2.WhoIsThereReply:  # noqa: N802
        if self.mute is not None:
            await self.mute.wait()
        return workers_pb2.WhoIsThereReply(incarnation=self.found or self.incarnation)

    @property
    def credential(self) -> bytes:
        return f"of {self.name}, a secret".encode()

    @property
    def exit_secret(self) -> bytes:
        """The secret with which the starter of the worker's process may report its exit."""
        return f"of the starter of {self.name}".encode()

    @property
    def facts(self) -> WorkerFacts:
        return WorkerFacts(
            self.name,
            self.side,
            self.incarnation,
            self.address,
            "model",
            STACK,
            tokens_max=self.tokens_max,
            rooms_max=self.rooms_max,
            pid=self.pid,
            computes=self.computes,
            exit_digest=digest_of(self.exit_secret),
        )

    async def unasked(self, request: Any, context: Any) -> AsyncIterator[Any]:
        raise NotImplementedError
        yield

    async def play_all(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        """Play the scripts of all rooms on one caller's stream. A script that ends without a last message
        ends the stream."""
        said: asyncio.Queue[tuple[int, Any] | None] = asyncio.Queue()  # None: the stream ends
        playing: dict[int, asyncio.Task[None]] = {}

        async def play(room: int, asked: Request | None, script: Sequence[Step]) -> None:
            reply = None
            try:
                async for reply in self.play(room, asked, script):
                    said.put_nowait((room, reply))
            except Exception as error:
                said.put_nowait((room, refusal_to_wire(error)))
            else:
                if reply is None or not reply.HasField("outcome"):
                    said.put_nowait(None)

        async def read() -> None:
            async for request in request_iterator:
                for room, asked, script in self.begin(request):
                    playing[room] = asyncio.create_task(play(room, asked, script))
                for room in self.end(request):
                    said.put_nowait((room, None))

        await asyncio.sleep(self.late_s)
        reading = asyncio.create_task(read())
        try:
            while (line := await said.get()) is not None:
                yield self.message([line])
        finally:
            for task in (reading, *playing.values()):
                task.cancel()
            await asyncio.gather(reading, *playing.values(), return_exceptions=True)

    def message(self, lines: Any) -> Any:
        raise NotImplementedError

    def begin(self, request: Any) -> Iterator[tuple[int, Request | None, Sequence[Step]]]:
        """Yield each room that a message opens or adopts, with its request if the message has it, and with
        its script."""
        for each in request.open:
            yield each.room, *self.take(each)
        for each in request.adopt:
            self.adopting.append(each.room)
            refuses = [NotOrphaned(f"room {each.room} has a bootstrap that reads it, or is ending")]
            yield each.room, None, refuses if self.gives is None else self.gives

    def end(self, request: Any) -> list[int]:
        """End these rooms, and choices of others. Returns the rooms that the worker reports as absent."""
        self.cancels |= {each.room: each.cause.reason for each in request.cancel}
        self.openers |= {each.opener for each in request.cancel}
        if self.side is Side.DECODE:
            self.enough += [(each.room, each.choice) for each in request.end_choices]
            self.openers |= {each.opener for each in request.end_choices}
        return [each.room for each in request.cancel if each.room in self.absent]

    def take(self, request: Any) -> tuple[Request, Sequence[Step]]:
        """Record one request of a room, and return it with its script. The message that opens a room may end
        it, too."""
        self.called.append(request.room)
        self.openings.append(request)
        self.openers.add(request.opener)
        asked = request_from_wire(request.request)
        self.asked.append(asked)
        self.left_ms.append(request.request.time_left_ms)
        script = self.scripts.pop(0) if self.scripts else self.script
        return asked, script if self.choose is None else self.choose(asked)

    async def play(self, room: int, asked: Request | None, script: Sequence[Step]) -> AsyncIterator[Any]:
        try:
            for step in script:
                match step:
                    case asyncio.Event():
                        await step.wait()
                    case Exception():
                        raise step
                    case None:
                        return
                    case _:
                        reply = step(asked) if callable(step) else step
                        yield reply
                        if reply.HasField("outcome"):
                            return
            await self.cancelled.wait()
            yield ended(self.side, Cause(Reason.CANCELLED, "as it was told"))
        except (asyncio.CancelledError, GeneratorExit):
            self.cut.append(room)
            raise


class PrefillWorker(
    ScriptedWorker, inference_pb2_grpc.PrefillServiceServicer, workers_pb2_grpc.PresenceServiceServicer
):
    RunRoom = ScriptedWorker.unasked
    RunRooms = ScriptedWorker.play_all

    def message(self, lines: Any) -> Any:
        load = self.says if ends_some(lines) else None
        return rooms_reply(inference_pb2.RunRoomsReply(load=load), lines)

    def add(self, server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)
        workers_pb2_grpc.add_PresenceServiceServicer_to_server(self, server)


class DecodeWorker(
    ScriptedWorker, inference_pb2_grpc.DecodeServiceServicer, workers_pb2_grpc.PresenceServiceServicer
):
    StreamRoom = ScriptedWorker.unasked
    StreamRooms = ScriptedWorker.play_all

    def message(self, lines: Any) -> Any:
        load = self.says if ends_some(lines) else None
        return rooms_reply(inference_pb2.StreamRoomsReply(load=load), lines)

    def add(self, server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)
        workers_pb2_grpc.add_PresenceServiceServicer_to_server(self, server)


class ScriptedDefaults(NamedTuple):
    """Request defaults that a model brings with it, such as its end-of-sequence tokens."""

    name: str = "mine"
    eos_token_ids: tuple[int, ...] = (2,)
    vocabulary: int = 100
    recommended_sampling: RecommendedSampling = RecommendedSampling()


CANARY = canary_request(ScriptedDefaults(), 500)


def asked(max_tokens: int = 3) -> Request:
    return Request("request-1", (1, 2, 3), max_tokens, sampling=Sampling(temperature=0.0))


class House:
    """Registry, rooms and backend; `prefill` and `decode` are registered and proven."""

    def __init__(
        self,
        *,
        max_queue: int = 4,
        queue_timeout_ms: int = 60_000,
        rooms_max: int = 1,
        wait_s: float | None = None,
        timeout_s: float = 20.0,
        places: int = 2,
        max_wait_ms: int | None = None,
    ) -> None:
        """`rooms_max`: for one request; `wait_s`: for a worker, where a side has none; `places`: rooms at a
        time on each worker."""
        self.clock = ManualClock(now_ms=1_000)
        self.registry = Registry("model", first_room=1, lease_ms=LEASE_MS, done_max=50, failed_max=50)
        self.channels = Channels()
        self.metrics = CollectorRegistry()
        self.rooms = RoomController(
            self.registry,
            self.clock,
            self.channels,
            BootstrapMetrics(self.metrics),
            max_queue,
            queue_timeout_ms,
            max_wait_ms=max_wait_ms,
        )
        self.peers = self.reading(())
        """The other bootstraps of the stack: none."""
        self.admission = self.rooms.admission
        queued = self.admission.queued_by_class, self.admission.queued_by_side
        self.metrics.register(RegistryCollector(self.registry, *queued))
        self.metrics.register(
            StackCollector(self.registry, self.admission.queue_counts, self.clock.now_ms, "m")
        )
        self.backend = RoomBackend(self.rooms, 500, timeout_s, RetryBounds(rooms_max, wait_s))
        self.prefill = PrefillWorker("prefill-0", P, Incarnation(11), rooms_max=places, pid=111)
        self.decode = DecodeWorker("decode-0", D, Incarnation(22), rooms_max=places, pid=222)

    def reading(self, addresses: Sequence[str], answer_s: float = PATIENCE_S) -> PeerBootstraps:
        """Return a reader of the pages of the bootstraps at these addresses."""
        known = BootstrapAddresses(addresses)
        return PeerBootstraps(known, self.channels, self.rooms.opener, OWN, self.clock, answer_s)

    def join(self, worker: ScriptedWorker, *, proven: bool = True) -> None:
        self.rooms.credentials.enter(worker.incarnation, worker.credential)
        self.rooms.register(worker.facts)
        if proven:
            self.rooms.proven(worker.incarnation)

    def exited(self, name: str, pid: int) -> None:
        """Report that the worker's process has exited."""
        for incarnation in self.registry.of_process(name, pid):
            self.rooms.lose(incarnation, "its process exited", proof="exited")

    def entry(self, room: int = 1) -> RoomEntry:
        return self.registry.get(RoomId(room))

    def retired(self, room: int = 1) -> None:
        """Report the room retired on all of its workers."""
        for side in self.entry(room).sides:
            self.rooms.side_retired(RoomId(room), side)

    def events(self, room: int = 1) -> list[str]:
        return [event.name for event in self.entry(room).events]

    async def unfollowed(self) -> None:
        """Wait until no room is on a stream to a worker any more."""
        await until(lambda: not self.rooms.streams.rooms())

    async def at_rest(self) -> None:
        """Wait until all rooms are over, and check that nothing of them is left."""
        await self.unfollowed()
        await until(lambda: not self.rooms.streams.over())
        assert self.registry.open_count() == 0
        assert self.admission.queued() == 0
        assert not self.rooms.followers
        assert not self.rooms.timelines.watchers
        assert all(not worker.rooms and worker.tokens == 0 for worker in self.registry.workers())


async def read(stream: RoomStream | RequestStream) -> tuple[list[int], str]:
    """Return all tokens of a stream, and its finish or the reason of its failure."""
    drawn: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        try:
            while True:
                batch = await stream.next()
                drawn += [token.id for token in batch.tokens]
                if batch.finish is not None:
                    return drawn, batch.finish.value
        except RoomFailed as error:
            return drawn, error.reason.value


@asynccontextmanager
async def house(**more: Any) -> AsyncIterator[House]:
    made = House(**more)
    async with AsyncExitStack() as stack:
        for worker in (made.prefill, made.decode):
            worker.address = await stack.enter_async_context(serving(worker.add))
            made.join(worker)
        try:
            yield made
        finally:
            made.rooms.streams.close()
            await made.rooms.finish()
            await made.channels.close()


__all__ = ["House", "RoomPhase", "house"]
