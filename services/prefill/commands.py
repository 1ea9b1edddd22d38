"""What does each command change on this rank, the same as on every other?"""

from collections import abc
from typing import cast

from services.ids import Generation, Incarnation, PageId, RoomId
from services.pages.errors import LayoutMismatch, Truncated
from services.pages.layout import KvLayout
from services.prefill.early_grants import EarlyGrants
from services.prefill.job import Job
from services.prefill.receivers import Receivers
from services.prefill.ways import Ways
from services.rooms.deadlines import Deadlines
from services.rooms.errors import Cause, NotConnected, PeerFault, Reason, Refusal, UnknownRoom
from services.rooms.evidence import Failed, Fenced, Granted, Proof
from services.rooms.plurals import counted
from services.rooms.roster import Roster
from services.rooms.sender import Sender
from services.rooms.timeline import Moment
from services.runtime.clock import Clock
from services.wire.baton.v1 import group_pb2, inference_pb2
from services.wire.conversions import (
    cause_from_wire,
    check_peer,
    ends_from_wire,
    request_from_wire,
    room_from_wire,
)
from services.wire.model_bounds import ModelBounds
from services.worker.callers import Callers
from services.worker.folds import Folds
from services.worker.mailbox import Answer, Mailbox
from services.worker.reporter import Reporter


class Commands:
    """They open rooms, in the roster and among the jobs, and end none: that is voted."""

    def __init__(
        self,
        *,
        roster: Roster[Sender],
        jobs: abc.MutableMapping[RoomId, Job],
        callers: Callers[inference_pb2.RunRoomReply],
        receivers: Receivers,
        early: EarlyGrants,
        ways: Ways,
        bounds: ModelBounds,
        folds: Folds,
        layout: KvLayout,
        cache_pages: int,
        deadlines: Deadlines,
        mailbox: Mailbox,
        reporter: Reporter,
        clock: Clock,
    ) -> None:
        """`cache_pages`: that this rank has for all its rooms."""
        self.draining = False
        self._roster = roster
        self._jobs = jobs
        self._callers = callers
        self._receivers = receivers
        self._early = early
        self._ways = ways
        self._bounds = bounds
        self._folds = folds
        self._layout = layout
        self._cache_pages = cache_pages
        self._deadlines = deadlines
        self._mailbox = mailbox
        self._reporter = reporter
        self._clock = clock
        self._connecting: list[tuple[Answer, Exception | None]] = []
        """The turn's connections, and what became of them on this rank."""

    def apply(self, commands: bytes) -> None:
        for command in group_pb2.Commands.FromString(commands).commands:
            problem: Exception | None = None
            try:
                self._apply(command)
            except (Refusal, PeerFault, Truncated, LayoutMismatch) as error:
                problem = error
            if command.WhichOneof("what") == "connect":
                self._connecting.append((self._mailbox.hold(), problem))
            else:
                self._mailbox.answer(problem)

    def connects(self) -> int:
        problems = [problem is not None for _, problem in self._connecting]
        return problems.index(True) if True in problems else len(problems)

    def agreed(self, connects: int) -> None:
        """Behind the first that failed it is not known of the others what became of them: asked again, a
        connection that was made is found."""
        for place, (answer, problem) in enumerate(self._connecting):
            if place >= connects and problem is None:
                problem = NotConnected("not every rank of this prefill worker reaches the decode worker")
            answer(problem)
        self._connecting.clear()

    # ---- one by one

    def _apply(self, command: group_pb2.Command) -> None:
        match command.WhichOneof("what"):
            case "run":
                self._open(command.run)
            case "grant":
                self._grant(command.grant)
            case "cancel":
                cause = cause_from_wire(command.cancel.cause)
                self._roster.cancel(RoomId(command.cancel.room), cause, self._clock.now_ms())
            case "close":
                self._close(command.close)
            case "connect":
                self._connect(command.connect)
            case "departed":
                self._depart(Incarnation(command.departed))
            case "drain":
                self.draining = True
            case other:
                raise PeerFault(f"{other} is not a command for a prefill worker")

    def _open(self, wire: inference_pb2.RunRoomRequest) -> None:
        room, request = room_from_wire(wire.room), request_from_wire(wire.request)
        check_peer(wire.decode, "decode")
        self._bounds.check(request)
        pages = self._layout.pages_for(request.prefill_tokens)
        if pages > self._cache_pages:
            raise Refusal(
                f"{request.prefill_tokens} tokens to compute: the cache of this worker never holds it"
            )
        now_ms = self._clock.now_ms()

        def make(place: int) -> Sender:
            peer = Incarnation(wire.decode.incarnation)
            return Sender(
                room,
                request.request_id,
                peer,
                place,
                pages,
                self._deadlines,
                now_ms,
                ends_from_wire(wire.request, now_ms),
                elected=self._ways.elected,
                compiled=not self._folds.needs(request),
            )

        sender = self._roster.open(room, make, now_ms)
        job = Job(sender, request, wire.decode.name, self._callers.take(room))
        self._jobs[room] = job
        self._folds.begin(sender, job.sequence)
        self._reporter.opened(room, request)
        job.reply(inference_pb2.RunRoomReply(accepted=inference_pb2.Accepted()))
        needs = f"{counted(request.prefill_tokens, 'token')} to compute, {counted(pages, 'page')}"
        self._reporter.note(room, Moment.ACCEPTED, needs)
        self._early.come(room)

    def _grant(self, wire: inference_pb2.GrantRequest) -> None:
        room, receiver = RoomId(wire.room), Incarnation(wire.receiver)
        grant = Granted(
            Generation(wire.generation),
            cast(tuple[PageId, ...], tuple(wire.pages)),
            wire.slot,
            wire.prefix_tokens,
        )
        if room not in self._roster:
            self._roster.note(room, grant)  # counted, and creates nothing
            raise UnknownRoom(f"room {room} is not known here")
        sender = self._roster.get(room)
        if receiver != sender.peer:
            raise PeerFault(f"room {room}: the registry named another receiver")  # `authorised-writer`
        job = self._jobs[room]
        try:
            way = self._ways.granted(receiver, Incarnation(wire.exposure))
        except NotConnected as error:
            if not self._ways.elected:
                # The leader answers the grant, and may have taken it: this rank alone ends the room.
                sender.note(Failed(Cause(Reason.CONNECT_FAILED, f"prefill: {error}")))
            raise
        # `promise-kept`: what the receiver holds already are whole pages, which are not written over.
        if wire.prefix_tokens % way.page_tokens or wire.prefix_tokens > job.request.prefill_tokens:
            raise PeerFault(
                f"room {room}: a prefix of {wire.prefix_tokens} tokens does not end with a page of its"
                f" {job.request.prefill_tokens}"
            )
        expected = -(-(job.request.prefill_tokens - wire.prefix_tokens) // way.page_tokens)
        if len(grant.pages) != expected:
            raise Truncated(f"room {room}: {len(grant.pages)} pages granted, {expected} to be sent")
        sender.note(grant)
        job.way = way

    def _connect(self, wire: inference_pb2.ConnectRequest) -> None:
        try:
            self._ways.connect(wire)
        except NotConnected:
            self._revoke(wire)  # true whether or not the memory can be reached where it is now
            raise
        self._revoke(wire)

    def _revoke(self, wire: inference_pb2.ConnectRequest) -> None:
        """What the receiver exposed before was taken back: whoever writes there ends, proven quiet. A write
        that still reads its source pages reaches nobody, so that they may be used anew (`source-pinned`)."""
        receiver, exposure = Incarnation(wire.receiver), Incarnation(wire.endpoints[0].incarnation)
        for job in self._jobs.values():
            if job.sender.peer == receiver and job.way is not None and job.way.revoked_by(exposure):
                text = f"decode worker {job.decode_name} took its memory back"
                job.sender.note(Failed(Cause(Reason.MEMORY_REVOKED, text)))
                job.sender.note(Fenced(Proof.REVOKED))

    def _close(self, wire: inference_pb2.CloseRequest) -> None:
        """The answer to a close is a proof, so it is for the room's own receiver and tenancy alone."""
        room = room_from_wire(wire.room)
        if room in self._roster:
            sender = self._roster.get(room)
            if sender.peer != wire.receiver:
                raise PeerFault(f"room {room}: the registry named another receiver")
            if sender.grant is not None and sender.grant.generation != wire.generation:
                raise PeerFault(f"room {room}: generation {wire.generation} was not granted")
        cause = Cause(Reason.RECEIVER_CLOSED, "the decode worker gave the room up")
        self._roster.give_up(room, Incarnation(wire.receiver), cause, self._clock.now_ms())

    def _depart(self, peer: Incarnation) -> None:
        """A decode process is known to be gone: nothing can land in it any more."""
        for job in self._jobs.values():
            if job.sender.peer == peer:
                job.sender.note(Failed(Cause(Reason.DECODE_LOST, f"decode worker {job.decode_name} is gone")))
                job.sender.note(Fenced(Proof.DEAD))
        self._ways.forget(peer, gone=True)
        self._receivers.forget(peer)
