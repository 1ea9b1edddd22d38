"""What does each command change on this rank, the same as on every other?"""

from services.decode.room import DecodeRoom
from services.handover.receiving import Receiving
from services.ids import Generation, Incarnation, RoomId
from services.rooms.errors import PeerFault
from services.runtime.clock import Clock
from services.wire.baton.v1 import group_pb2, inference_pb2
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
from services.worker.reporter import Reporter


class DecodeCommands:
    """They open rooms and end none: that is voted."""

    def __init__(
        self,
        receiving: Receiving[DecodeRoom],
        *,
        callers: Callers[inference_pb2.StreamRoomReply],
        bounds: ModelBounds,
        folds: Folds,
        reporter: Reporter,
        clock: Clock,
    ) -> None:
        self._receiving = receiving
        self._callers = callers
        self._bounds = bounds
        self._folds = folds
        self._reporter = reporter
        self._clock = clock

    def apply(self, command: group_pb2.Command) -> None:
        """Raises Refusal and PeerFault: the command changes nothing."""
        match command.WhichOneof("what"):
            case "stream":
                self._open(command.stream)
            case "cancel":
                cause = cause_from_wire(command.cancel.cause)
                self._receiving.cancel(RoomId(command.cancel.room), cause, self._clock.now_ms())
            case "connected":
                self._receiving.connected(Incarnation(command.connected))
            case "quiet":
                quiet = command.quiet
                self._receiving.quiet(RoomId(quiet.room), Generation(quiet.generation))
            case "departed":
                self._receiving.depart(Incarnation(command.departed))
            case "end_choice":
                self._cut(command.end_choice)
            case "revoke":
                self._receiving.revoke()
            case "drain":
                self._receiving.drain()
            case other:
                raise PeerFault(f"{other} is not a command for a decode worker")

    def _open(self, wire: inference_pb2.StreamRoomRequest) -> None:
        id_, request = room_from_wire(wire.room), request_from_wire(wire.request)
        check_peer(wire.prefill, "prefill")
        self._bounds.check(request)
        now_ms = self._clock.now_ms()
        room = self._receiving.open(
            id_,
            request,
            Incarnation(wire.prefill.incarnation),
            now_ms,
            ends_ms=ends_from_wire(wire.request, now_ms),
            sender_name=wire.prefill.name,
            compiled=not self._folds.needs(request),
        )
        room.prefill.CopyFrom(wire.prefill)
        room.replies = self._callers.take(id_)
        self._folds.begin(room, *(choice.sequence for choice in room.choices))
        self._reporter.opened(id_, request)
        room.reply(inference_pb2.StreamRoomReply(accepted=inference_pb2.Accepted()))

    def _cut(self, wire: inference_pb2.EndChoiceRequest) -> None:
        room, rooms = RoomId(wire.room), self._receiving.roster
        if room in rooms and wire.choice >= rooms.get(room).request.choices:
            raise Malformed(f"choice {wire.choice} of a room that has {rooms.get(room).request.choices}")
        self._receiving.cut(room, wire.choice)
