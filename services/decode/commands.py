"""What does each command change on this rank, the same as on every other?"""

from collections import abc

from services.decode.answers import Answers
from services.decode.job import Job
from services.decode.peers import Peers
from services.decode.revocation import Revocation
from services.decode.seals import Seals
from services.ids import Incarnation, RoomId
from services.pages.layout import KvLayout
from services.rooms.choice_pages import ChoicePages
from services.rooms.deadlines import Deadlines
from services.rooms.errors import Cause, PeerFault, Reason, Refusal
from services.rooms.evidence import Connected, Failed, Fenced, Proof
from services.rooms.phases import Phase
from services.rooms.receiver import Receiver
from services.rooms.roster import Roster
from services.runtime.clock import Clock
from services.transfer.exposure import Exposure
from services.wire.baton.v1 import group_pb2, inference_pb2, rooms_pb2
from services.wire.conversions import (
    Malformed,
    cause_from_wire,
    check_peer,
    ends_from_wire,
    request_from_wire,
    room_from_wire,
)
from services.wire.model_bounds import ModelBounds
from services.worker.callers import Callers
from services.worker.folds import Folds
from services.worker.mailbox import Mailbox


class Commands:
    """They open rooms, in the roster and among the jobs, and end none: that is voted."""

    def __init__(
        self,
        *,
        roster: Roster[Receiver],
        jobs: abc.MutableMapping[RoomId, Job],
        callers: Callers[inference_pb2.StreamRoomReply],
        bounds: ModelBounds,
        folds: Folds,
        layout: KvLayout,
        cache_pages: int,
        deadlines: Deadlines,
        peers: Peers,
        exposure: Exposure,
        seals: Seals,
        revocation: Revocation,
        answers: Answers,
        mailbox: Mailbox,
        clock: Clock,
    ) -> None:
        """`cache_pages`: that this rank has for all its rooms."""
        self.draining = False
        self._roster = roster
        self._jobs = jobs
        self._callers = callers
        self._bounds = bounds
        self._folds = folds
        self._layout = layout
        self._cache_pages = cache_pages
        self._deadlines = deadlines
        self._peers = peers
        self._exposure = exposure
        self._seals = seals
        self._revocation = revocation
        self._answers = answers
        self._mailbox = mailbox
        self._clock = clock

    def apply(self, commands: bytes) -> None:
        for command in group_pb2.Commands.FromString(commands).commands:
            try:
                self._apply(command)
            except (Refusal, PeerFault) as error:
                self._mailbox.answer(error)
            else:
                self._mailbox.answer(None)

    # ---- one by one

    def _apply(self, command: group_pb2.Command) -> None:
        match command.WhichOneof("what"):
            case "stream":
                self._open(command.stream)
            case "cancel":
                cause = cause_from_wire(command.cancel.cause)
                self._roster.cancel(RoomId(command.cancel.room), cause, self._clock.now_ms())
            case "connected":
                self._connected(Incarnation(command.connected))
            case "quiet":
                self._quiet(command.quiet)
            case "departed":
                self._depart(Incarnation(command.departed))
            case "end_choice":
                self._end_choice(command.end_choice)
            case "revoke":
                self._revocation.agree(self._roster)
            case "drain":
                self.draining = True
            case other:
                raise PeerFault(f"{other} is not a command for a decode worker")

    def _open(self, wire: inference_pb2.StreamRoomRequest) -> None:
        room, request = room_from_wire(wire.room), request_from_wire(wire.request)
        check_peer(wire.prefill, "prefill")
        self._bounds.check(request)
        division = ChoicePages(
            request.prefill_tokens, request.tokens_max, request.choices, self._layout.page_tokens
        )
        if division.needed > self._cache_pages:
            each = "" if request.choices == 1 else f" in each of {request.choices} choices"
            raise Refusal(
                f"request may grow to {request.tokens_max} tokens{each}: the cache of this worker never holds"
                " it"
            )
        now_ms = self._clock.now_ms()
        expected = self._layout.pages_for(request.prefill_tokens)

        def make(place: int) -> Receiver:
            peer = Incarnation(wire.prefill.incarnation)
            return Receiver(
                room,
                request.request_id,
                peer,
                place,
                division.needed,
                self._deadlines,
                now_ms,
                ends_from_wire(wire.request, now_ms),
                pages_expected=expected,
                compiled=not self._folds.needs(request),
            )

        receiver = self._roster.open(room, make, now_ms)
        peer = rooms_pb2.Peer()
        peer.CopyFrom(wire.prefill)
        job = Job(receiver, request, peer, division, self._callers.take(room))
        self._jobs[room] = job
        self._folds.begin(receiver, *(choice.sequence for choice in job.choices))
        self._answers.accept(job)
        if self._peers.connect(peer, room):
            receiver.note(Connected())

    def _connected(self, peer: Incarnation) -> None:
        for receiver in self._roster:
            if receiver.peer == peer:
                receiver.note(Connected())

    def _end_choice(self, wire: inference_pb2.EndChoiceRequest) -> None:
        """Of a room that is over nothing is to be ended, and nothing is made of that."""
        job = self._jobs.get(RoomId(wire.room))
        if job is None:
            return
        if wire.choice >= len(job.choices):
            raise Malformed(f"choice {wire.choice} of a room that has {len(job.choices)}")
        self._answers.cut(job, job.choices[wire.choice])

    def _quiet(self, wire: inference_pb2.CloseRequest) -> None:
        """The sender acknowledged the close of this room and generation, and of no other."""
        room = RoomId(wire.room)
        if room in self._roster and self._roster.get(room).generation != wire.generation:
            raise PeerFault(f"room {room}: quiet for generation {wire.generation}, which is not ours")
        self._roster.note(room, Fenced(Proof.QUIET))

    def _depart(self, peer: Incarnation) -> None:
        """A prefill process is known to be gone: nothing of it can land any more. What it finished before
        is there, and is not lost with it (`drain-keeps-promises`)."""
        for job in self._jobs.values():
            if job.receiver.peer != peer or job.receiver.phase is Phase.SUCCESS:
                continue
            if job.receiver.phase is Phase.TRANSFERRING and job.record is None:
                self._seals.look(job)
            if job.record is None:
                cause = Cause(Reason.PREFILL_LOST, f"prefill worker {job.prefill.name} is gone")
                job.receiver.note(Failed(cause))
            job.receiver.note(Fenced(Proof.DEAD))
        self._peers.forget(peer)
        self._exposure.transfer.disconnect(peer)
