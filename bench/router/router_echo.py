"""Echo workers, which answer at once over Baton's own protocol.

One process is a prefill and a decode worker. It is registered, proven by a canary, called over the same
streams and reports the same events as real workers. An answer repeats its prompt's tokens. The request's
seed is the number of tokens per step. A step covers all open rooms.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

import uvloop

from baton.ids import NO_OPENER, Opener, RoomId
from baton.pages.layout import KvLayout, full_group
from baton.rooms.phases import Side
from baton.rooms.request import FinishReason, Request, Token
from baton.rooms.timeline import Moment
from baton.rooms.worker_load import WorkerLoad
from baton.runtime.clock import SystemClock
from baton.wire import worker_credential
from baton.wire.baton.v1 import inference_pb2, inference_pb2_grpc, rooms_pb2, workers_pb2
from baton.wire.bootstrap_addresses import BootstrapAddresses
from baton.wire.channel import Channels, Server
from baton.wire.conversions import (
    finish_to_wire,
    outcome_to_wire,
    request_from_wire,
    side_to_wire,
    token_to_wire,
)
from baton.wire.layout_messages import layout_to_wire
from baton.wire.load_messages import load_to_wire
from baton.wire.service_role import ServiceRole
from baton.worker.lifecycle.bootstrap_leases import BootstrapLeases
from baton.worker.lifecycle.lease_keeper import LeaseKeeper
from baton.worker.reporter import Reporter
from baton.worker.shared_stream import ends_some, rooms_reply

HOST: Final = "127.0.0.1"
ROOMS_MAX: Final = 512
TOKENS_MAX: Final = 10_000_000
GROUP: Final = full_group("float32", 16, (0,), (0,), 64)
PREFILL_LINES: Final = (
    Moment.ACCEPTED,
    Moment.DESTINATION_KNOWN,
    Moment.COMPUTING,
    Moment.FIRST_TOKEN,
    Moment.SEALED,
)
DECODE_LINES: Final = (
    Moment.ACCEPTED,
    Moment.CONNECTED,
    Moment.GRANTED,
    Moment.LANDED,
    Moment.ADMITTED,
    Moment.FINISHED,
)
"""Events of a room's timeline that the decode worker reports."""

Lines = list[tuple[RoomId, Any]]
Replies = list[inference_pb2.StreamRoomReply]


class Echo:
    """Shared half of both workers: identity, lease and reports."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def holds(self, _: Opener) -> workers_pb2.RenewRequest:
        """Return the rooms reported with each lease renewal."""
        return workers_pb2.RenewRequest()

    def _report(self, room: RoomId, lines: Sequence[Moment]) -> None:
        for line in lines:
            self._reporter.report(room, line, "as an echo")
        self._reporter.retired(room)


class EchoPrefill(Echo, inference_pb2_grpc.PrefillServiceServicer):
    async def RunRooms(  # noqa: N802
        self, request_iterator: AsyncIterator[inference_pb2.RunRoomsRequest], _: Any
    ) -> AsyncIterator[inference_pb2.RunRoomsReply]:
        async for asked in request_iterator:
            if lines := list(chain.from_iterable(map(self._lines, asked.open))):
                yield rooms_reply(inference_pb2.RunRoomsReply(), lines)

    async def RunRoom(  # noqa: N802
        self, request: inference_pb2.RunRoomRequest, _: Any
    ) -> AsyncIterator[inference_pb2.RunRoomReply]:
        for _room, reply in self._lines(request):
            yield reply

    def _lines(self, run: inference_pb2.RunRoomRequest) -> Lines:
        room, request = RoomId(run.room), request_from_wire(run.request)
        self._reporter.opened(room, request, Opener(run.opener))
        finish = FinishReason.LENGTH if request.max_tokens == 1 else None
        first = inference_pb2.FirstToken(token=_tokens(request, 0, 1)[0], finish=finish_to_wire(finish))
        self._report(room, PREFILL_LINES)
        return [
            (room, inference_pb2.RunRoomReply(accepted=inference_pb2.Accepted())),
            (room, inference_pb2.RunRoomReply(first_token=first)),
            (room, inference_pb2.RunRoomReply(outcome=outcome_to_wire(None))),
        ]


class EchoDecode(Echo, inference_pb2_grpc.DecodeServiceServicer):
    def __init__(self, reporter: Reporter) -> None:
        super().__init__(reporter)
        self._running: dict[Opener, dict[RoomId, Iterator[Replies]]] = {}
        """Open rooms of each bootstrap, with the replies that are left."""
        self._loads = 0
        reporter.load = self._load

    def holds(self, opener: Opener) -> workers_pb2.RenewRequest:
        return workers_pb2.RenewRequest(load=self._load(opener))

    def _load(self, opener: Opener) -> rooms_pb2.WorkerLoad:
        """Return a load like a worker's, with a cache that is never full."""
        self._loads += 1
        rooms = self._running.get(opener, {})
        running = sum(map(len, self._running.values()))
        load = WorkerLoad(
            free=(TOKENS_MAX // GROUP.page_tokens,),
            requested=(0,),
            waiting=0,
            running=running,
            running_max=0,
            entered=max(rooms, default=RoomId(0)),
            other_rooms=running - len(rooms),
        )
        return load_to_wire(load, self._loads)

    async def StreamRooms(  # noqa: N802
        self, request_iterator: AsyncIterator[inference_pb2.StreamRoomsRequest], _: Any
    ) -> AsyncIterator[inference_pb2.StreamRoomsReply]:
        running: dict[RoomId, Iterator[Replies]] = {}
        opener, news = NO_OPENER, asyncio.Event()

        async def read() -> None:
            nonlocal opener
            async for asked in request_iterator:
                for each in asked.open:
                    opener = Opener(each.opener)
                    self._running[opener] = running
                    running[RoomId(each.room)] = self._steps(each)
                for told in asked.cancel:
                    running.pop(RoomId(told.room), None)
                news.set()

        reading = asyncio.create_task(read())
        try:
            while not reading.done():
                await news.wait()
                news.clear()
                while running:
                    lines = [(room, reply) for room, steps in running.items() for reply in next(steps)]
                    load = self._load(opener) if ends_some(lines) else None
                    yield rooms_reply(inference_pb2.StreamRoomsReply(load=load), lines)
                    for room, reply in lines:
                        if reply.HasField("outcome"):
                            running.pop(room, None)
                            self._report(room, DECODE_LINES)
        finally:
            reading.cancel()

    async def StreamRoom(  # noqa: N802
        self, request: inference_pb2.StreamRoomRequest, _: Any
    ) -> AsyncIterator[inference_pb2.StreamRoomReply]:
        for reply in chain.from_iterable(self._steps(request)):
            yield reply
        self._report(RoomId(request.room), DECODE_LINES)

    def _steps(self, opened: inference_pb2.StreamRoomRequest) -> Iterator[Replies]:
        """Return a room's replies step by step. The outcome comes with the last tokens."""
        request = request_from_wire(opened.request)
        self._reporter.opened(RoomId(opened.room), request, Opener(opened.opener))
        return _replies(request)


def _replies(request: Request) -> Iterator[Replies]:
    """Yield the replies of a room that was opened for `request`, step by step."""
    yield [inference_pb2.StreamRoomReply(accepted=inference_pb2.Accepted())]
    for start in range(0, request.max_tokens, step := max(request.sampling.seed, 1)):
        stop = min(start + step, request.max_tokens)
        over = stop == request.max_tokens
        finish = finish_to_wire(FinishReason.LENGTH if over else None)
        tokens = inference_pb2.Tokens(first=start, tokens=_tokens(request, start, stop), finish=finish)
        said = [inference_pb2.StreamRoomReply(tokens=tokens)]
        yield [*said, inference_pb2.StreamRoomReply(outcome=outcome_to_wire(None))] if over else said


def _tokens(request: Request, start: int, stop: int) -> list[inference_pb2.Token]:
    said = request.prompt[1:] or request.prompt  # not what begins it: no model answers with that
    ids = [said[place % len(said)] for place in range(start, stop)]
    return [token_to_wire(Token(each)) for each in ids]


def _keeper(
    channels: Channels,
    registration: workers_pb2.RegisterRequest,
    echo: Echo,
    address: str,
    on_opener: Callable[[Opener, Opener], None],
) -> LeaseKeeper:
    channel = channels.to(address, ServiceRole.BOOTSTRAP)
    return LeaseKeeper(channel, registration, lambda _: None, lambda _: None, echo.holds, on_opener=on_opener)


async def serve_echo(bootstraps: str, model: str, context_length: str) -> None:
    """Run both workers until this process is stopped. `bootstraps`: addresses of all bootstraps, separated by
    commas. `model`: the stack's fingerprint. `context_length`: most tokens of a sequence."""
    channels, stopped = Channels(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with contextlib.AsyncExitStack() as stack:
        for side in Side:
            own, name = worker_credential.draw(), f"echo-{side.value}"
            incarnation = worker_credential.incarnation_of(own)
            connect = partial(channels.to, party=ServiceRole.BOOTSTRAP)
            reporter = Reporter(connect, incarnation, name, SystemClock(), credential=own)
            server = Server()
            echo: EchoPrefill | EchoDecode
            if side is Side.PREFILL:
                echo = EchoPrefill(reporter)
                inference_pb2_grpc.add_PrefillServiceServicer_to_server(echo, server.grpc)
            else:
                echo = EchoDecode(reporter)
                inference_pb2_grpc.add_DecodeServiceServicer_to_server(echo, server.grpc)
            address = f"{HOST}:{server.bind(HOST, 0)}"
            await server.start(())
            stack.push_async_callback(server.stop, 0)
            print(f"{side.value} {address} {incarnation}", flush=True)
            registration = workers_pb2.RegisterRequest(
                worker=rooms_pb2.Peer(name=name, incarnation=incarnation, address=address),
                side=side_to_wire(side),
                layout=layout_to_wire(KvLayout(model, (GROUP,), int(context_length))),
                schema="echo",
                tokens_max=TOKENS_MAX,
                rooms_max=ROOMS_MAX,
                pid=os.getpid(),
                credential=own,
            )
            leases = BootstrapLeases(
                BootstrapAddresses(bootstraps.split(",")),
                partial(_keeper, channels, registration, echo),
                reporter.use,
            )
            for work in (leases.run(), reporter.run()):
                task = asyncio.create_task(work)
                stack.callback(task.cancel)
        await stopped.wait()
    await channels.close()


if __name__ == "__main__":
    uvloop.run(serve_echo(*sys.argv[1:]))
