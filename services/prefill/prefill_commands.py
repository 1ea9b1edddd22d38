"""Handlers of the commands that only a prefill worker has. Every rank applies the same commands."""

from baton.handover.early_grants import EarlyGrants
from baton.handover.route import Route
from baton.handover.sending_side import SendingSide
from baton.ids import Generation, Incarnation, RoomId
from baton.prefill.prefill_room import PrefillRoom
from baton.prefill.routes import Routes
from baton.rooms.errors import NotConnected, Refusal
from baton.rooms.evidence import Granted
from baton.rooms.steps.step_cost import StepCost
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.conversions import room_from_wire, tables_from_wire
from baton.worker.assembly import RankPorts
from baton.worker.callers import Callers
from baton.worker.rank_commands import RankCommands


class PrefillCommands(RankCommands[SendingSide[PrefillRoom]]):
    def __init__(
        self,
        sending: SendingSide[PrefillRoom],
        callers: Callers[inference_pb2.RunRoomReply],
        ports: RankPorts,
        cost: StepCost,
        early: EarlyGrants[inference_pb2.GrantRequest],
        routes: Routes,
    ) -> None:
        super().__init__(sending, callers, ports, cost)
        self._early = early
        self._routes = routes

    def _apply(self, what: str | None, command: group_pb2.Command) -> bool:
        match what:
            case "run":
                if self._ports.bounds.whole_prompts and command.run.request.HasField("prompt_logprobs"):
                    raise Refusal("the engine computes a prompt as a whole: it scores none")
                room: PrefillRoom = self._open(command.run, command.run.decode, "decode")
                self._early.apply(room.id)
            case "grant":
                self._grant(command.grant)
            case "close":
                closed, receiver = room_from_wire(command.close.room), Incarnation(command.close.receiver)
                generation = Generation(command.close.generation)
                self._core.close(closed, receiver, generation, self._ports.clock.now_ms())
            case "connect":
                self._connect(command.connect)
            case _:
                return False
        return True

    def _adopt(self, wire: inference_pb2.AdoptRequest) -> None:
        room: PrefillRoom = self._give(wire, wire.term)
        if room.succeeded:
            room.conclude(None)

    def _grant(self, wire: inference_pb2.GrantRequest) -> None:
        receiver = Incarnation(wire.receiver)
        if wire.mine:
            self._core.claimed(RoomId(wire.room), receiver)
            return
        pages = tables_from_wire(wire.pages)
        grant = Granted(Generation(wire.generation), pages, wire.slot, wire.prefix_tokens)
        route: Route | NotConnected
        try:
            route = self._routes.granted(receiver, Incarnation(wire.exposure))
        except NotConnected as error:
            route = error
        self._core.grant(RoomId(wire.room), receiver, grant, route)

    def _connect(self, wire: inference_pb2.ConnectRequest) -> None:
        try:
            self._routes.connect(wire)
        except NotConnected:
            self._revoke(wire)  # valid even if the memory cannot be reached now
            raise
        self._revoke(wire)

    def _revoke(self, wire: inference_pb2.ConnectRequest) -> None:
        self._core.revoke(Incarnation(wire.receiver), Incarnation(wire.endpoints[0].incarnation))
