"""What does each command say to a prefill rank's half of its hand-overs?"""

from typing import cast

from services.handover.route import Route
from services.handover.sending import Sending
from services.ids import Generation, Incarnation, PageId, RoomId
from services.prefill.early_grants import EarlyGrants
from services.prefill.room import PrefillRoom
from services.prefill.ways import Ways
from services.rooms.errors import NotConnected, PeerFault
from services.rooms.evidence import Granted
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
from services.worker.reporter import Reporter


class PrefillCommands:
    """The same on every rank. They open rooms and end none: that is voted."""

    def __init__(
        self,
        sending: Sending[PrefillRoom],
        *,
        callers: Callers[inference_pb2.RunRoomReply],
        early: EarlyGrants,
        ways: Ways,
        bounds: ModelBounds,
        folds: Folds,
        reporter: Reporter,
        clock: Clock,
    ) -> None:
        self._sending = sending
        self._callers = callers
        self._early = early
        self._ways = ways
        self._bounds = bounds
        self._folds = folds
        self._reporter = reporter
        self._clock = clock

    def apply(self, command: group_pb2.Command) -> None:
        """Raises Refusal, PeerFault, Truncated and LayoutMismatch, for whoever asked."""
        match command.WhichOneof("what"):
            case "run":
                self._open(command.run)
            case "grant":
                self._grant(command.grant)
            case "cancel":
                cause = cause_from_wire(command.cancel.cause)
                self._sending.cancel(RoomId(command.cancel.room), cause, self._clock.now_ms())
            case "close":
                room, receiver = room_from_wire(command.close.room), Incarnation(command.close.receiver)
                generation = Generation(command.close.generation)
                self._sending.close(room, receiver, generation, self._clock.now_ms())
            case "connect":
                self._connect(command.connect)
            case "departed":
                self._sending.depart(Incarnation(command.departed))
            case "drain":
                self._sending.drain()
            case other:
                raise PeerFault(f"{other} is not a command for a prefill worker")

    def _open(self, wire: inference_pb2.RunRoomRequest) -> None:
        name, request = room_from_wire(wire.room), request_from_wire(wire.request)
        check_peer(wire.decode, "decode")
        self._bounds.check(request)
        now_ms = self._clock.now_ms()
        room = self._sending.open(
            name,
            request,
            Incarnation(wire.decode.incarnation),
            now_ms,
            ends_ms=ends_from_wire(wire.request, now_ms),
            receiver_name=wire.decode.name,
            compiled=not self._folds.needs(request),
        )
        room.replies = self._callers.take(name)
        self._folds.begin(room, room.sequence)
        self._reporter.opened(name, request)
        room.reply(inference_pb2.RunRoomReply(accepted=inference_pb2.Accepted()))
        self._early.come(name)

    def _grant(self, wire: inference_pb2.GrantRequest) -> None:
        receiver = Incarnation(wire.receiver)
        pages = cast(tuple[PageId, ...], tuple(wire.pages))
        grant = Granted(Generation(wire.generation), pages, wire.slot, wire.prefix_tokens)
        route: Route | NotConnected
        try:
            route = self._ways.granted(receiver, Incarnation(wire.exposure))
        except NotConnected as error:
            route = error
        self._sending.grant(RoomId(wire.room), receiver, grant, route)

    def _connect(self, wire: inference_pb2.ConnectRequest) -> None:
        try:
            self._ways.connect(wire)
        except NotConnected:
            self._revoke(wire)  # true whether or not the memory can be reached where it is now
            raise
        self._revoke(wire)

    def _revoke(self, wire: inference_pb2.ConnectRequest) -> None:
        self._sending.revoke(Incarnation(wire.receiver), Incarnation(wire.endpoints[0].incarnation))
