"""Link of a decode worker to one prefill worker, for many rooms at a time.

It is one stream to the worker's process, opened with the first room for it and left open. Messages of
several rooms at one time travel together. No deadline runs while the sender has not answered: as long as
the stream lives, the sender is busy and not lost (`live-is-not-lost`). A room that cannot wait ends by its
own deadline. Only the end of the stream shows the waiting rooms that the sender is lost. The stream is
opened anew, after growing pauses, for as long as a message is due.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import grpc

from baton.decode.pending_closes import PendingCloses
from baton.decode.receiver_identity import ReceiverIdentity
from baton.ids import Generation, Incarnation, RoomId
from baton.pages.errors import LayoutMismatch
from baton.pages.transfer_plan import plan_hand_over
from baton.rooms.errors import Cause, NotConnected, Reason
from baton.runtime.logging import Log
from baton.wire.baton.v1 import group_pb2, inference_pb2, inference_pb2_grpc, rooms_pb2
from baton.wire.channel import Channels
from baton.wire.conversions import Malformed, cause_to_wire
from baton.wire.duplex_stream import ChannelClosed, run_duplex
from baton.wire.errors import NotQuiet, RemoteError, UnknownReceiver, WrongIncarnation, refusal_from_wire
from baton.wire.layout_messages import layout_from_wire
from baton.wire.service_role import ServiceRole
from baton.worker.mailbox import Mailbox

log = Log(__name__)

CONNECT_PAUSE_S: Final = 0.05
"""Seconds before the next connect to a prefill worker that refused one temporarily."""
OPEN_PAUSE_MIN_S: Final = 0.05
OPEN_PAUSE_MAX_S: Final = 2.0
"""Longest pause in seconds before a broken stream is opened anew. It grows while no message arrives."""
UNNAMED_PAUSE_MIN_S: Final = 0.001
UNNAMED_PAUSE_MAX_S: Final = 0.1
"""Longest pause in seconds before a new stream, while the prefill worker does not know this worker yet."""
MESSAGE_BYTES: Final = 1 << 20
"""Length in bytes at which a message is full, so that further grants go into the next message."""

Call: TypeAlias = "grpc.aio.StreamStreamCall[inference_pb2.HandOverRequest, inference_pb2.HandOverReply]"
Problem: TypeAlias = RemoteError | Malformed | LayoutMismatch


@dataclass(slots=True)
class _Grant:
    """Unanswered grant, or notice that this worker computes the prompt itself (`GrantRequest.mine`)."""

    request: inference_pb2.GrantRequest
    is_waiting: bool = False
    """Whether the grant is sent only when the prefill worker has connected anew."""
    was_refused: bool = False
    """Whether the grant was refused once for lack of a connection."""


class SenderLink:
    """Link to one incarnation of a prefill worker. Its size is bounded by the rooms that this worker can
    have."""

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
        self.connected = False
        """Whether the sender is connected to the present exposure of this worker's memory, and the connection
        is not in doubt."""
        self.knows = False
        """Whether the sender knows an exposure of this memory, so that it has to learn the next one, too."""
        self.connecting = False
        self._identity = identity
        self._mailbox = mailbox
        self._channels = channels
        self._connect_timeout_s = connect_timeout_s
        self._shut_out = shut_out
        self._unneeded = unneeded
        self._waiting: dict[RoomId, None] = {}
        """Rooms for which the prefill worker has to be connected first."""
        self._connect_exposure: int | None = None
        """Id of the memory exposure that the last connect message named."""
        self._refused_s = 0.0
        """Seconds for which the sender has refused to connect, as a sum of pauses. Time without an answer
        does not count."""
        self._grants: dict[RoomId, _Grant] = {}
        self.closes = PendingCloses(peer.name, self._wake_stream, self._report_quiet)
        self._connect_to_send = False
        self._grants_to_send: dict[RoomId, None] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ended = False
        self._greeted = self._answered = False
        """Whether the greeting was sent on the present stream, and whether any reply has come on it."""

    @property
    def asking(self) -> bool:
        """Whether a connect or a grant to the prefill worker has no answer yet."""
        return self.connecting or bool(self._grants)

    @property
    def _is_due(self) -> bool:
        """Whether a message to the prefill worker is to be sent."""
        return self._connect_to_send or bool(self._grants_to_send) or self.closes.are_due

    @property
    def needed(self) -> bool:
        return self.knows or self.asking or len(self.closes) > 0

    # ---- calls of the turns

    def connect(self, room: RoomId) -> bool:
        """Make this worker's memory known to the sender, for a room (`Peers.connect`)."""
        if self.connected:
            return True
        self._waiting[room] = None
        self._want_connection()
        return False

    def grant(self, request: inference_pb2.GrantRequest) -> None:
        room = RoomId(request.room)
        if request.mine:
            self._waiting.pop(room, None)
        self._grants[room] = _Grant(request)
        self._grants_to_send[room] = None
        self._wake_stream()

    def close(self, room: RoomId, generation: Generation) -> None:
        self._forget_grant(room)
        self._waiting.pop(room, None)
        self.closes.add(room, generation)

    def over(self, room: RoomId) -> None:
        """Stop all messages to the sender about a room."""
        self._waiting.pop(room, None)
        self._forget_grant(room)
        self.closes.forget(room)
        self._let_go()

    def exposed_anew(self) -> None:
        """Send the new exposure to a sender that knew an older one, with or without a room for it
        (`room-ends`)."""
        self.connected = False
        if self.knows:
            self._want_connection()

    def end(self) -> None:
        """End the link and its stream."""
        self._ended = True
        self.closes.clear()
        if self._task is not None:
            self._task.cancel()

    async def wait_ended(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    # ---- connecting

    def _want_connection(self) -> None:
        if not self.connecting:
            self.connecting = True
            self._refused_s = 0.0
            self._ask_connection()

    def _ask_connection(self) -> None:
        if self.connecting and not self._ended:
            self._connect_to_send = True
            self._wake_stream()

    def _connect_answered(self, reply: inference_pb2.ConnectReply) -> None:
        if not self.connecting or reply.exposure != self._connect_exposure:
            return
        if self._connect_exposure != self._identity.exposure:  # the memory was moved meanwhile
            self._ask_connection()
            return
        problem = self._problem(reply)
        if problem is None:
            self._connection_made()
        elif _may_pass(problem) and self._refused_s < self._connect_timeout_s():
            self._refused_s += CONNECT_PAUSE_S
            asyncio.get_running_loop().call_later(CONNECT_PAUSE_S, self._ask_connection)
        else:
            self._connection_failed(problem)

    def _problem(self, reply: inference_pb2.ConnectReply) -> Problem | None:
        if reply.HasField("refused"):
            return refusal_from_wire(reply.refused)
        try:
            plan_hand_over([layout_from_wire(each) for each in reply.layouts], self._identity.layouts)
        except (Malformed, LayoutMismatch) as error:
            return error
        return None

    def _connection_made(self) -> None:
        self.connecting, self.connected, self.knows = False, True, True
        if self._waiting:
            self._waiting.clear()
            self._mailbox.put(group_pb2.Command(connected=self.incarnation))
        log.info("connected", worker=self.peer.name)
        for room, grant in self._grants.items():
            if grant.is_waiting:
                grant.is_waiting, grant.was_refused = False, True
                self._grants_to_send[room] = None
        if self._grants_to_send:
            self._wake_stream()

    def _connection_failed(self, problem: Problem) -> None:
        self.connecting = self.connected = self._connect_to_send = False
        log.warning("not connected", worker=self.peer.name, cause=str(problem))
        refused = [room for room, grant in self._grants.items() if grant.is_waiting]
        sees_no_end = isinstance(problem, RemoteError) and problem.kind == NotQuiet.__name__
        if sees_no_end and (self._waiting or refused):
            self._shut_out()
        text = f"decode cannot connect to prefill worker {self.peer.name}: {problem}"
        waiting, self._waiting = self._waiting, {}
        for room in waiting:
            self._cancel(room, Cause(Reason.CONNECT_FAILED, text))
        for room in refused:
            self._forget_grant(room)
            self._cancel(room, Cause(_blame(problem), text))

    # ---- grants

    def _grant_answered(self, reply: inference_pb2.GrantReply) -> None:
        room = RoomId(reply.room)
        grant = self._grants.get(room)
        if grant is None or grant.is_waiting or room in self._grants_to_send:
            return  # not wanted any more, or never sent
        if not reply.HasField("refused") or grant.request.mine:
            del self._grants[room]
            return
        problem = refusal_from_wire(reply.refused)
        if problem.kind == NotConnected.__name__ and not grant.was_refused:
            # The connection broke, or leads to memory that was moved: connect anew (`reconnect`).
            grant.is_waiting, self.connected = True, False
            self._want_connection()
            return
        self._grant_failed(room, problem)

    def _grant_failed(self, room: RoomId, problem: RemoteError) -> None:
        """Cancel the room of a failed grant.

        If the sender refused it, it does not have the room any more, or cannot take it. If it did not answer,
        it may have the grant, so the room's memory is quarantined until its close is answered. The cause says
        whether the sender is gone.
        """
        self._forget_grant(room)
        text = f"prefill worker {self.peer.name} did not take the destination: {problem}"
        self._cancel(room, Cause(_blame(problem), text))

    def _forget_grant(self, room: RoomId) -> None:
        self._grants.pop(room, None)
        self._grants_to_send.pop(room, None)

    # ---- the stream

    def _wake_stream(self) -> None:
        self._news.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"sender link to {self.peer.name}")

    async def _run(self) -> None:
        """Run one stream after another. Each begins when a message is due."""
        pause_s = unnamed_s = 0.0
        while not self._ended:
            await self._news.wait()
            error = await self._stream()
            if self._answered:
                pause_s = unnamed_s = 0.0
            if _is_no_answer(error):
                unnamed_s = min(max(unnamed_s * 2, UNNAMED_PAUSE_MIN_S), UNNAMED_PAUSE_MAX_S)
            else:
                pause_s = min(max(pause_s * 2, OPEN_PAUSE_MIN_S), OPEN_PAUSE_MAX_S)
            self._broke(error)
            await asyncio.sleep(unnamed_s if _is_no_answer(error) else pause_s)

    async def _stream(self) -> RemoteError:
        """Run one stream to its end. Return the error that ended it."""
        channel = self._channels.to(self.peer.address, ServiceRole.PREFILL, self.incarnation)
        self._greeted = self._answered = False
        call: Call = inference_pb2_grpc.HandoverServiceStub(channel).HandOver()
        return await run_duplex(call, self._news, self._next, self._receive)

    def _next(self) -> inference_pb2.HandOverRequest | None:
        """Return the next message to the prefill worker, or None. The first one has a greeting."""
        if not self._is_due:
            return None
        message = self._message()
        if not self._greeted:
            self._greeted = True
            message.greeting.incarnation = self.incarnation
            message.greeting.receiver = self._identity.incarnation
            message.greeting.secret = self._identity.secret
        return message

    def _message(self) -> inference_pb2.HandOverRequest:
        """Return the next message to the sender: a connect, grants and closes that are due."""
        message = inference_pb2.HandOverRequest()
        if self._connect_to_send:
            self._connect_to_send = False
            if self._connect_exposure != self._identity.exposure:
                self._connect_exposure, self._refused_s = self._identity.exposure, 0.0
            message.connect.CopyFrom(self._identity.connect())
        length = 0
        while self._grants_to_send and length < MESSAGE_BYTES:
            room = next(iter(self._grants_to_send))
            del self._grants_to_send[room]
            message.grants.append(self._grants[room].request)
            length += self._grants[room].request.ByteSize()
        if not self._grants_to_send:
            message.closes.extend(self.closes.take_due())
        return message

    def _receive(self, reply: inference_pb2.HandOverReply) -> None:
        self._answered = True
        for connect in reply.connects:
            self._connect_answered(connect)
        for grant in reply.grants:
            self._grant_answered(grant)
        for close in reply.closes:
            self.closes.answered(close)
        self._let_go()

    def _broke(self, error: RemoteError) -> None:
        """Process the end of a stream. Its unanswered messages are sent again on the next stream, or fail."""
        if _is_no_answer(error):
            self._grants_to_send.update(
                {room: None for room, grant in self._grants.items() if not grant.is_waiting}
            )
        else:
            if self.connecting or self._grants:
                log.info("a stream to a sender broke", worker=self.peer.name, cause=str(error))
            for room, grant in [each for each in self._grants.items() if not each[1].is_waiting]:
                if grant.request.mine:
                    self._grants_to_send[room] = None  # its answer is not needed, but the sender waits for it
                else:
                    self._grant_failed(room, error)
            if error.kind == WrongIncarnation.__name__:
                self.knows = False  # the process that knew it is gone
            if self.connecting:
                self._connection_failed(error)
                self.connecting = self.knows  # it knows an older exposure, and has to learn of this one
        if not (self.knows or self._waiting or self._grants):
            self.connecting = False  # the rooms that needed it have ended (`zero-at-idle`)
        self._connect_to_send = self.connecting
        self.closes.send_again()
        self._let_go()
        if self._is_due:
            self._news.set()
        else:
            self._news.clear()

    def _let_go(self) -> None:
        if not self.needed and not self._ended:
            self._unneeded(self)

    def _report_quiet(self, close: inference_pb2.CloseRequest) -> None:
        self._mailbox.put(group_pb2.Command(quiet=close))

    def _cancel(self, room: RoomId, cause: Cause) -> None:
        cancel = inference_pb2.CancelRequest(room=room, cause=cause_to_wire(cause))
        self._mailbox.put(group_pb2.Command(cancel=cancel))


def _is_no_answer(error: RemoteError) -> bool:
    """Return whether a stream ended without an answer, so that all messages are sent again."""
    return isinstance(error, ChannelClosed) or error.kind == UnknownReceiver.__name__


def _may_pass(problem: Problem) -> bool:
    """Return whether a refused connect may succeed later: a broken connection can be made anew when no write
    is under way on it."""
    kinds = (NotConnected.__name__, NotQuiet.__name__)
    return isinstance(problem, RemoteError) and problem.kind in kinds


def _blame(problem: Problem) -> Reason:
    """Return the reason for the failed rooms of a sender: PREFILL_LOST if it does not answer any more, or its
    address has another process."""
    gone = isinstance(problem, RemoteError) and (
        problem.unreachable or problem.kind == WrongIncarnation.__name__
    )
    return Reason.PREFILL_LOST if gone else Reason.CONNECT_FAILED
