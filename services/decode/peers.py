"""How does a decode worker talk to the prefill workers it receives from?

Three calls: connect (once per incarnation and exposure), grant (where a room may write), close (until it is
proven quiet). Each runs as a task of its own, so that no turn waits; what they learn enters the next turn as
a command. A grant may come before its room does, which is opened on both workers at once: it is made again. A
close is repeated until it is answered or the peer is known to be gone: only the answer is
proof, a deadline that passes is not. When our memory is exposed anew, every sender that knew of it is told at
once: that it was taken back is the proof for a sender that saw no end of its writes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

import grpc

from services.pages.checksum import KvChecksum
from services.pages.errors import LayoutMismatch
from services.pages.layout import KvLayout
from services.pages.plan import plan_hand_over
from services.pages.record import SCHEMA_HASH
from services.rooms.errors import Cause, Reason, UnknownRoom
from services.rooms.ids import Generation, Incarnation, RoomId
from services.runtime.logging import Log
from services.runtime.party import Party
from services.transfer.interface import Endpoint
from services.wire.baton.v1 import group_pb2, inference_pb2, inference_pb2_grpc, rooms_pb2
from services.wire.channel import UNARY_S, Channels
from services.wire.conversions import Malformed, cause_to_wire, layout_from_wire, layout_to_wire
from services.wire.errors import NotConnected, NotQuiet, RemoteError, WrongIncarnation, remote_error
from services.wire.mailbox import Mailbox

log = Log(__name__)

CONNECT_PAUSE_S: Final = 0.05
GRANT_AGAIN_S: Final = 5.0
"""How long a room may take longer to the sender than to us and then back to the sender."""
GRANT_PAUSE_MIN_S: Final = 0.001
GRANT_PAUSE_MAX_S: Final = 0.05
CLOSE_CALL_S: Final = 6.0
CLOSE_PAUSE_MIN_S: Final = 0.05
CLOSE_PAUSE_MAX_S: Final = 2.0
CLOSE_WARNING_S: Final = 3.0
"""From here on it is told, once a room, which sender keeps its memory."""


_Call = Awaitable[inference_pb2.GrantReply]
_Problem = RemoteError | Malformed | LayoutMismatch


class Peers:
    """Keyed by incarnation. The leader's; a departed peer is forgotten with everything about it. A channel is
    open to who knows of our memory, and to others while they are called."""

    def __init__(
        self,
        mailbox: Mailbox,
        channels: Channels,
        incarnation: Incarnation,
        endpoints: Callable[[], Sequence[inference_pb2.Endpoint]],
        layouts: Sequence[KvLayout],
        connect_timeout_s: float,
        checksum: KvChecksum = KvChecksum.RECORD,
    ) -> None:
        """`endpoints`: of every rank as they are now, in rank order, as `layouts` are."""
        self._mailbox = mailbox
        self._channels = channels
        self._incarnation = incarnation
        self._endpoints = endpoints
        self._layouts = tuple(layouts)
        self._connect_timeout_s = connect_timeout_s
        self._checksum = checksum
        self.shut_out = False
        """A sender that a room is for does not connect to this exposure of our memory any more: it has not
        seen the end of what it wrote by a way that broke."""
        self._connected: set[Incarnation] = set()
        self._knowing: dict[Incarnation, rooms_pb2.Peer] = {}
        """Who was connected to this exposure or an older one, until it is gone."""
        self._connecting: dict[Incarnation, list[RoomId]] = {}
        """Which rooms wait for it, if any."""
        self._calls: dict[asyncio.Task[None], Incarnation] = {}
        self._drops: set[asyncio.Task[None]] = set()
        self._closing: dict[RoomId, asyncio.Task[None]] = {}
        self._granting: set[RoomId] = set()
        """Their grants are not answered, and still wanted."""

    def connect(self, peer: rooms_pb2.Peer, room: RoomId) -> bool:
        """Make our memory known to a peer. True when it already is; else a command tells what became of
        it: `connected`, or a cancel of every room that waited."""
        incarnation = Incarnation(peer.incarnation)
        if incarnation in self._connected:
            return True
        if incarnation in self._connecting:
            self._connecting[incarnation].append(room)
            return False
        self._start_connecting(peer, [room])
        return False

    def grant(self, peer: rooms_pb2.Peer, request: inference_pb2.GrantRequest) -> None:
        """Send a destination, as soon as the turn is over. A refusal cancels the room."""
        self._granting.add(RoomId(request.room))
        self._spawn(peer, self._grant(peer, request, self._call(peer, request)))

    def close(self, peer: rooms_pb2.Peer, room: RoomId, generation: Generation) -> None:
        """Ask until it is proven that nothing more is written for (room, generation)."""
        self._granting.discard(room)
        task = self._spawn(peer, self._close(peer, room, generation))
        self._closing[room] = task
        task.add_done_callback(lambda _: self._closing.pop(room, None))

    def stop_closing(self, room: RoomId) -> None:
        """Another proof came first, or none was needed."""
        self._granting.discard(room)
        task = self._closing.pop(room, None)
        if task is not None:
            task.cancel()

    def forget(self, peer: Incarnation) -> None:
        """Its process is gone: who waited for it was told by the same news."""
        for task in [task for task, called in self._calls.items() if called == peer]:
            task.cancel()
        self._connecting.pop(peer, None)
        self._connected.discard(peer)
        self._knowing.pop(peer, None)
        self._drop_unneeded(peer)

    def doubt(self, peer: Incarnation) -> None:
        """A room with it went wrong on the way: the next one connects anew, which costs nothing where the
        way still holds (`reconnect`)."""
        self._connected.discard(peer)

    def exposed_anew(self) -> None:
        """Our memory is exposed anew, and every rank has told where: nobody knows it, and whoever knew the
        older exposure is to hear of this one, whether or not a room is for it (`room-ends`)."""
        self._connected.clear()
        self.shut_out = False
        for incarnation, peer in self._knowing.items():
            if incarnation not in self._connecting:
                self._start_connecting(peer, [])

    @property
    def closing(self) -> int:
        """Rooms whose proof is being sought."""
        return len(self._closing)

    async def stop(self) -> None:
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await asyncio.gather(*self._drops, return_exceptions=True)

    def _start_connecting(self, peer: rooms_pb2.Peer, rooms: list[RoomId]) -> None:
        self._connecting[Incarnation(peer.incarnation)] = rooms
        self._spawn(peer, self._connect(peer))

    async def _connect(self, peer: rooms_pb2.Peer) -> None:
        incarnation = Incarnation(peer.incarnation)
        problem = await self._try_connect(peer)
        rooms = self._connecting.pop(incarnation)
        if problem is None:
            self._connected.add(incarnation)
            self._knowing[incarnation] = peer
            self._mailbox.put(group_pb2.Command(connected=incarnation))
            log.info("connected", worker=peer.name)
            return
        log.warning("not connected", worker=peer.name, cause=str(problem))
        self.shut_out |= _shuts_out(problem) and bool(rooms)
        text = f"decode cannot connect to prefill worker {peer.name}: {problem}"
        for room in rooms:
            self._cancel(room, Cause(Reason.CONNECT_FAILED, text))

    async def _try_connect(self, peer: rooms_pb2.Peer) -> _Problem | None:
        """To our memory where it is in the end. Each exposure of it is given as long; past that, the peer's
        last answer counts."""
        loop = asyncio.get_running_loop()
        exposure, ends = 0, 0.0
        said: _Problem | None = None
        while True:
            endpoints = self._endpoints()
            if endpoints[0].incarnation != exposure:
                exposure, ends, said = endpoints[0].incarnation, loop.time() + self._connect_timeout_s, None
            problem = await self._ask(peer, endpoints, max(ends - loop.time(), CONNECT_PAUSE_S))
            if exposure == self._endpoints()[0].incarnation:
                over = loop.time() + CONNECT_PAUSE_S >= ends
                if over and isinstance(problem, RemoteError) and problem.unreachable:
                    return said or problem
                if problem is None or over or not _may_pass(problem):
                    return problem
                said = problem
            await asyncio.sleep(CONNECT_PAUSE_S)

    async def _ask(
        self, peer: rooms_pb2.Peer, endpoints: Sequence[inference_pb2.Endpoint], timeout_s: float
    ) -> _Problem | None:
        request = inference_pb2.ConnectRequest(
            incarnation=peer.incarnation,
            endpoints=endpoints,
            layouts=[layout_to_wire(each) for each in self._layouts],
            schema=SCHEMA_HASH,
            receiver=self._incarnation,
            kv_checksum=self._checksum.value,
        )
        try:
            stub = inference_pb2_grpc.HandoverServiceStub(self._way(peer))
            reply = await stub.Connect(request, timeout=timeout_s)
            plan_hand_over([layout_from_wire(each) for each in reply.layouts], self._layouts)
        except grpc.aio.AioRpcError as error:
            return remote_error(error)
        except (Malformed, LayoutMismatch) as error:
            return error
        except asyncio.CancelledError:
            if _called_off():
                raise
            text = "the channel was closed under the call"  # another took its place
            return RemoteError(grpc.StatusCode.CANCELLED, NotConnected.__name__, text)
        return None

    async def _grant(self, peer: rooms_pb2.Peer, request: inference_pb2.GrantRequest, call: _Call) -> None:
        room = RoomId(request.room)
        problem: _Problem | None = await self._offer(peer, request, call)
        text = f"prefill worker {peer.name} did not take the destination"
        if isinstance(problem, RemoteError) and problem.kind == NotConnected.__name__:
            # The sender's way here broke, or leads to where our memory was: make it anew (`reconnect`).
            problem = await self._try_connect(peer)
            if problem is None:
                problem = await self._offer(peer, request, self._call(peer, request))
            else:
                self._connected.discard(Incarnation(peer.incarnation))
                self.shut_out |= _shuts_out(problem)
                text = f"decode cannot connect to prefill worker {peer.name}"
        self._granting.discard(room)
        if problem is None:
            return
        # Refused: the sender does not hold the room (any more), or cannot. Unanswered: it may have the grant,
        # so that the room's memory goes into quarantine until the close is answered. Which of the two is to
        # blame is known of a sender that is gone.
        reason = Reason.PREFILL_LOST if _gone(problem) else Reason.CONNECT_FAILED
        self._cancel(room, Cause(reason, f"{text}: {problem}"))

    async def _offer(
        self, peer: rooms_pb2.Peer, request: inference_pb2.GrantRequest, call: _Call
    ) -> RemoteError | None:
        """Until the sender knows the room, for a while, and for as long as the room waits for it here."""
        loop = asyncio.get_running_loop()
        ends, pause_s = loop.time() + GRANT_AGAIN_S, GRANT_PAUSE_MIN_S
        while True:
            remote = await _answer(call)
            if remote is None or remote.kind != UnknownRoom.__name__:
                return remote
            if RoomId(request.room) not in self._granting or loop.time() >= ends:
                return remote
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, GRANT_PAUSE_MAX_S)
            call = self._call(peer, request)

    def _call(self, peer: rooms_pb2.Peer, request: inference_pb2.GrantRequest) -> _Call:
        stub = inference_pb2_grpc.HandoverServiceStub(self._way(peer))
        call: _Call = stub.Grant(request, timeout=UNARY_S)
        return call

    async def _close(self, peer: rooms_pb2.Peer, room: RoomId, generation: Generation) -> None:
        request = inference_pb2.CloseRequest(
            room=room,
            incarnation=peer.incarnation,
            receiver=self._incarnation,
            generation=generation,
        )
        loop, pause_s, told = asyncio.get_running_loop(), CLOSE_PAUSE_MIN_S, False
        since = loop.time()
        while True:
            try:
                stub = inference_pb2_grpc.HandoverServiceStub(self._way(peer))
                await stub.Close(request, timeout=CLOSE_CALL_S)
            except grpc.aio.AioRpcError as error:
                overdue = not told and loop.time() - since > CLOSE_WARNING_S
                told |= overdue
                tell = log.warning if overdue else log.debug
                tell("close not answered", room=room, worker=peer.name, cause=str(remote_error(error)))
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, CLOSE_PAUSE_MAX_S)
            else:
                self._mailbox.put(group_pb2.Command(quiet=request))
                return

    def _way(self, peer: rooms_pb2.Peer) -> grpc.aio.Channel:
        return self._channels.to(peer.address, Party.PREFILL, Incarnation(peer.incarnation))

    def _cancel(self, room: RoomId, cause: Cause) -> None:
        cancel = inference_pb2.CancelRequest(room=room, cause=cause_to_wire(cause))
        self._mailbox.put(group_pb2.Command(cancel=cancel))

    def _spawn(self, peer: rooms_pb2.Peer, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._calls[task] = Incarnation(peer.incarnation)
        task.add_done_callback(lambda ended: self._drop_unneeded(self._calls.pop(ended)))
        return task

    def _needs(self, peer: Incarnation) -> bool:
        return peer in self._knowing or peer in self._calls.values()

    def _drop_unneeded(self, peer: Incarnation) -> None:
        if not self._needs(peer):
            task = asyncio.create_task(self._drop(peer))
            self._drops.add(task)
            task.add_done_callback(self._drops.discard)

    async def _drop(self, peer: Incarnation) -> None:
        if not self._needs(peer):  # a call may have begun since
            await self._channels.drop(peer)


class FollowerPeers(Peers):
    """Of a rank that does not lead: the leader connects, grants and closes for its group, and what it learns
    comes as commands."""

    def __init__(self) -> None: ...

    def connect(self, peer: rooms_pb2.Peer, room: RoomId) -> bool:  # noqa: ARG002
        return True  # not for a follower to hold up: the leader's vote says when

    def grant(self, peer: rooms_pb2.Peer, request: inference_pb2.GrantRequest) -> None: ...

    def close(self, peer: rooms_pb2.Peer, room: RoomId, generation: Generation) -> None: ...

    def stop_closing(self, room: RoomId) -> None: ...

    def forget(self, peer: Incarnation) -> None: ...

    def doubt(self, peer: Incarnation) -> None: ...

    def exposed_anew(self) -> None: ...

    async def stop(self) -> None: ...


def _called_off() -> bool:
    """This task is cancelled, and not merely the call that it waits for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _may_pass(problem: _Problem) -> bool:
    """A way that broke is made anew once nothing is under way on it."""
    kinds = (NotConnected.__name__, NotQuiet.__name__)
    return isinstance(problem, RemoteError) and problem.kind in kinds


def _shuts_out(problem: _Problem) -> bool:
    return isinstance(problem, RemoteError) and problem.kind == NotQuiet.__name__


async def _answer(call: _Call) -> RemoteError | None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return remote_error(error)
    return None


def _gone(problem: _Problem) -> bool:
    """Of a sender that was there: it does not answer any more, or another process does."""
    if not isinstance(problem, RemoteError):
        return False
    return problem.unreachable or problem.kind == WrongIncarnation.__name__


def endpoint_to_wire(endpoint: Endpoint) -> inference_pb2.Endpoint:
    return inference_pb2.Endpoint(
        incarnation=endpoint.incarnation,
        agent=endpoint.agent,
        metadata=endpoint.metadata,
        regions=[
            inference_pb2.Region(name=each.name, address=each.address, length=each.length, device=each.device)
            for each in endpoint.regions
        ],
    )
