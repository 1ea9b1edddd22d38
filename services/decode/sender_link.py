"""Link of a decode worker to one prefill worker, for many rooms at a time.

It is one stream to the worker's process, opened with the first room for it and left open. Messages of
several rooms at one time travel together. What is sent, and what an answer or the end of the stream means, is
decided by `baton.handover.receiving_session`. The stream is opened anew for as long as a message is due.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias, assert_never

import grpc

from baton.decode.receiver_identity import ReceiverIdentity
from baton.handover.receiving_session import ReceivingSession
from baton.handover.requests import ClaimRoom, Grant, StartTimer, StopTimer
from baton.handover.sender_problem import ProblemKind, SenderProblem
from baton.handover.session_messages import (
    Answer,
    CancelRoom,
    CloseAnswer,
    CloseOverdue,
    ConnectAnswer,
    ConnectionFailed,
    ConnectionMade,
    GrantAnswer,
    SenderQuiet,
    SessionRequest,
    Timer,
    Unneeded,
)
from baton.ids import Generation, Incarnation, RoomId
from baton.pages.errors import LayoutMismatch
from baton.pages.transfer_plan import plan_hand_over
from baton.rooms.errors import NotConnected
from baton.runtime.logging import Log
from baton.runtime.timers import Timers
from baton.wire.baton.v1 import group_pb2, inference_pb2, inference_pb2_grpc, rooms_pb2
from baton.wire.channel import Channels
from baton.wire.conversions import Malformed, cause_to_wire, tables_to_wire
from baton.wire.duplex_stream import ChannelClosed, run_duplex
from baton.wire.errors import NotQuiet, RemoteError, UnknownReceiver, WrongIncarnation, refusal_from_wire
from baton.wire.layout_messages import layout_from_wire
from baton.wire.service_role import ServiceRole
from baton.worker.mailbox import Mailbox

log = Log(__name__)

MESSAGE_BYTES: Final = 1 << 20
"""Length in bytes at which a message is full, so that further grants go into the next message."""
PROBLEM_KINDS: Final = {
    NotConnected.__name__: ProblemKind.NOT_CONNECTED,
    NotQuiet.__name__: ProblemKind.NOT_QUIET,
    WrongIncarnation.__name__: ProblemKind.OTHER_PROCESS,
    UnknownReceiver.__name__: ProblemKind.SEND_AGAIN,
}
"""Kinds of a prefill worker's errors, by class name. All others are refusals."""

Call: TypeAlias = "grpc.aio.StreamStreamCall[inference_pb2.HandOverRequest, inference_pb2.HandOverReply]"


class SenderLink:
    """Link to one incarnation of a prefill worker: its session, and the streams that carry it."""

    def __init__(
        self,
        peer: rooms_pb2.Peer,
        identity: ReceiverIdentity,
        mailbox: Mailbox,
        channels: Channels,
        connect_timeout_s: Callable[[], float],
        shut_out: Callable[[], None],
        unneeded: Callable[["SenderLink"], None],
    ) -> None:
        """Make a link without a stream.

        `connect_timeout_s`: longest time for which the sender may refuse a connection temporarily.
        `shut_out`: called when it refused that long because it sees no end of its writes. `unneeded`: called
        when nothing needs the link any more.
        """
        self.peer = peer
        self.incarnation = Incarnation(peer.incarnation)
        self.session = ReceivingSession(peer.name, identity.exposure)
        self._identity = identity
        self._mailbox = mailbox
        self._channels = channels
        self._connect_timeout_s = connect_timeout_s
        self._shut_out = shut_out
        self._unneeded = unneeded
        self._timers: Timers[Timer] = Timers()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ended = False
        self._greeted = False
        """Whether the greeting was sent on the present stream."""

    # ---- calls of the turns

    def connect(self, room: RoomId) -> bool:
        """Make this worker's memory known to the sender, for a room (`Peers.connect`)."""
        is_connected = self.session.connect(room)
        self._carry_out()
        return is_connected

    def grant(self, grant: Grant | ClaimRoom) -> None:
        self.session.grant(grant)
        self._carry_out()

    def close(self, room: RoomId, generation: Generation) -> None:
        self.session.close(room, generation)
        self._carry_out()

    def over(self, room: RoomId) -> None:
        """Stop all messages to the sender about a room."""
        self.session.over(room)
        self._carry_out()

    def exposed_anew(self) -> None:
        """Send the new exposure to a sender that knew an older one."""
        self.session.exposed_anew(self._identity.exposure)
        self._carry_out()

    def end(self) -> None:
        """End the link and its stream."""
        self._ended = True
        self._timers.stop_all()
        if self._task is not None:
            self._task.cancel()

    async def wait_ended(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    # ---- requests of the session

    def _fire(self, timer: Timer) -> None:
        self.session.fire(timer)
        self._carry_out()

    def _carry_out(self) -> None:
        """Carry out the session's requests, and wake the stream if a message is due."""
        for request in self.session.take_requests():
            if not self._ended:
                self._do(request)
        if self.session.is_due and not self._ended:
            self._news.set()
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name=f"sender link to {self.peer.name}")

    def _do(self, request: SessionRequest) -> None:
        match request:
            case ConnectionMade(rooms_wait):
                if rooms_wait:
                    self._mailbox.put(group_pb2.Command(connected=self.incarnation))
                log.info("connected", worker=self.peer.name)
            case ConnectionFailed(problem, is_shut_out):
                log.warning("not connected", worker=self.peer.name, cause=problem.text)
                if is_shut_out:
                    self._shut_out()
            case CancelRoom(room, cause):
                cancel = inference_pb2.CancelRequest(room=room, cause=cause_to_wire(cause))
                self._mailbox.put(group_pb2.Command(cancel=cancel))
            case SenderQuiet(room, generation):
                close = inference_pb2.CloseRequest(room=room, generation=generation)
                self._mailbox.put(group_pb2.Command(quiet=close))
            case CloseOverdue(room, text):
                log.warning("close not answered", room=room, worker=self.peer.name, cause=text)
            case StartTimer(timer, after_s):
                self._timers.start(timer, after_s, self._fire)
            case StopTimer(timer):
                self._timers.stop(timer)
            case Unneeded():
                self._unneeded(self)
            case _:
                assert_never(request)

    # ---- the stream

    async def _run(self) -> None:
        """Run one stream after another. Each begins when a message is due."""
        while not self._ended:
            await self._news.wait()
            problem = problem_of(await self._stream())
            if problem.kind is not ProblemKind.SEND_AGAIN and self.session.is_asking:
                log.info("a stream to a sender broke", worker=self.peer.name, cause=problem.text)
            pause_s = self.session.stream_ended(problem)
            self._news.clear()
            self._carry_out()
            await asyncio.sleep(pause_s)

    async def _stream(self) -> RemoteError:
        """Run one stream to its end. Return the error that ended it."""
        channel = self._channels.to(self.peer.address, ServiceRole.PREFILL, self.incarnation)
        self._greeted = False
        call: Call = inference_pb2_grpc.HandoverServiceStub(channel).HandOver()
        return await run_duplex(call, self._news, self._next, self._receive)

    def _next(self) -> inference_pb2.HandOverRequest | None:
        """Return the next message to the prefill worker, or None. The first one has a greeting."""
        session = self.session
        if not session.is_due:
            return None
        message = inference_pb2.HandOverRequest()
        if session.take_connect():
            message.connect.CopyFrom(self._identity.connect())
        length = 0
        while length < MESSAGE_BYTES and (grant := session.take_grant()) is not None:
            message.grants.append(self._to_wire(grant))
            length += message.grants[-1].ByteSize()
        for room, generation in session.take_closes():
            message.closes.add(room=room, generation=generation)
        if not self._greeted:
            self._greeted = True
            message.greeting.incarnation = self.incarnation
            message.greeting.receiver = self._identity.incarnation
            message.greeting.secret = self._identity.secret
        return message

    def _to_wire(self, grant: Grant | ClaimRoom) -> inference_pb2.GrantRequest:
        receiver = self._identity.incarnation
        if isinstance(grant, ClaimRoom):
            return inference_pb2.GrantRequest(room=grant.room, receiver=receiver, mine=True)
        return inference_pb2.GrantRequest(
            room=grant.room,
            receiver=receiver,
            generation=grant.generation,
            pages=tables_to_wire(grant.pages),
            slot=grant.slot,
            exposure=grant.exposure,
            prefix_tokens=grant.prefix_tokens,
        )

    def _receive(self, reply: inference_pb2.HandOverReply) -> None:
        self.session.receive(self._answers(reply), self._connect_timeout_s())
        self._carry_out()

    def _answers(self, reply: inference_pb2.HandOverReply) -> Iterator[Answer]:
        for connect in reply.connects:
            yield ConnectAnswer(Incarnation(connect.exposure), self._connect_problem(connect))
        for grant in reply.grants:
            yield GrantAnswer(RoomId(grant.room), _refusal(grant))
        for close in reply.closes:
            yield CloseAnswer(RoomId(close.room), Generation(close.generation), _refusal(close))

    def _connect_problem(self, reply: inference_pb2.ConnectReply) -> SenderProblem | None:
        if reply.HasField("refused"):
            return _refusal(reply)
        try:
            plan_hand_over([layout_from_wire(each) for each in reply.layouts], self._identity.layouts)
        except (Malformed, LayoutMismatch) as error:
            return SenderProblem(ProblemKind.REFUSED, str(error))
        return None


def _refusal(
    reply: inference_pb2.ConnectReply | inference_pb2.GrantReply | inference_pb2.CloseReply,
) -> SenderProblem | None:
    return problem_of(refusal_from_wire(reply.refused)) if reply.HasField("refused") else None


def problem_of(error: RemoteError) -> SenderProblem:
    """Return a prefill worker's error, or the end of its stream, in the terms of the session."""
    kind = ProblemKind.LOST if error.unreachable else PROBLEM_KINDS.get(error.kind, ProblemKind.REFUSED)
    if isinstance(error, ChannelClosed):
        kind = ProblemKind.SEND_AGAIN
    return SenderProblem(kind, str(error))
