"""Handlers of the commands that prefill and decode workers have in common. Every rank applies the same
commands."""

from abc import ABC, abstractmethod
from typing import Any, Final, Generic, TypeVar

from baton.handover.receiving_side import ReceivingSide
from baton.handover.sending_side import SendingSide
from baton.ids import NO_PEER, Incarnation, Opener, RoomId
from baton.rooms.errors import Cause, NotOrphaned, PeerFault, Reason
from baton.rooms.steps.step_cost import Costs, StepCost
from baton.wire.baton.v1 import group_pb2, inference_pb2, rooms_pb2
from baton.wire.conversions import (
    cause_from_wire,
    check_peer,
    ends_from_wire,
    outcome_to_wire,
    request_from_wire,
    room_from_wire,
)
from baton.wire.load_messages import adoption_key
from baton.wire.registration import routers_from_wire
from baton.worker.assembly import RankPorts
from baton.worker.callers import Callers

ADOPTED: Final = Cause(Reason.BOOTSTRAP_LOST, "another bootstrap has adopted the room")
"""Outcome for a router that still reads a room when another one adopts it."""

Core = TypeVar("Core", bound=SendingSide[Any] | ReceivingSide[Any])


class RankCommands(ABC, Generic[Core]):
    """Handler that applies commands of the leader's mailbox on one rank. Commands open rooms but do not end
    them, because the ranks vote on an end."""

    def __init__(self, core: Core, callers: Callers[Any], ports: RankPorts, cost: StepCost) -> None:
        self._core: Core = core
        self._callers: Callers[Any] = callers
        self._ports = ports
        self._cost = cost

    def apply(self, command: group_pb2.Command) -> None:
        """Apply a command on this rank. Raises Refusal, PeerFault, Truncated or LayoutMismatch, which become
        the answer to the command's sender."""
        match command.WhichOneof("what"):
            case "cancel":
                cancel, now_ms = command.cancel, self._ports.clock.now_ms()
                cause = cause_from_wire(cancel.cause)
                self._core.cancel(RoomId(cancel.room), cause, now_ms, Opener(cancel.opener))
            case "orphan":
                orphan, now_ms = command.orphan, self._ports.clock.now_ms()
                cause = cause_from_wire(orphan.cause)
                self._core.orphan(RoomId(orphan.room), Opener(orphan.opener), cause, now_ms)
            case "adopt":
                self._adopt(command.adopt)
            case "departed":
                self._core.depart(Incarnation(command.departed))
            case "bootstraps":
                routers, gone, is_only_one = routers_from_wire(command.bootstraps)
                self._ports.reporter.use(routers, gone, is_only_one=is_only_one)
            case "drain":
                self._core.drain()
            case "step_costs":
                costs = command.step_costs
                self._cost.agreed = Costs(costs.position, costs.draft, costs.scored)
            case what:
                if not self._apply(what, command):
                    raise PeerFault(f"{what} is not a command for this worker")

    @abstractmethod
    def _apply(self, what: str | None, command: group_pb2.Command) -> bool:
        """Apply a command that only this side (prefill or decode) has. Return False if this side has no such
        command."""

    @abstractmethod
    def _adopt(self, wire: inference_pb2.AdoptRequest) -> None:
        """Give a room to the router that adopts it. Raises Malformed and Refusal."""

    def _give(self, wire: inference_pb2.AdoptRequest, term: int | None) -> Any:
        """Give a room to the router that adopts it, and send that router the reply `accepted`. A router that
        still reads the room gets its outcome. Return the room's record.

        `term`: see `Roster.adopt`. Raises Malformed and Refusal.
        """
        name, opener = room_from_wire(wire.room), Opener(wire.opener)
        here = self._core.roster.get(name)
        if not here.is_replayable or adoption_key(here.request) != wire.key:
            raise NotOrphaned(f"room {name} does not compute that request")
        room = self._core.adopt(name, opener, term)
        room.reply(room.REPLY(outcome=outcome_to_wire(ADOPTED)))
        room.replies = self._callers.take(name)
        self._ports.reporter.adopted(name, opener)
        room.reply(room.REPLY(accepted=inference_pb2.Accepted(term=room.term)))
        return room

    def _open(
        self,
        wire: inference_pb2.RunRoomRequest | inference_pb2.StreamRoomRequest,
        peer: rooms_pb2.Peer | None,
        field: str,
    ) -> Any:
        """Open a room on this rank, and send its caller the reply `accepted`. Return the room's record.

        `peer`: worker of the other side that takes part in the room, or None. `field`: name of the protobuf
        field with `peer`, for error texts. Raises Malformed and Refusal.
        """
        name, request, ports = room_from_wire(wire.room), request_from_wire(wire.request), self._ports
        if peer is not None:
            check_peer(peer, field)
        ports.bounds.check(request)
        now_ms = ports.clock.now_ms()
        room = self._core.open(
            name,
            request,
            NO_PEER if peer is None else Incarnation(peer.incarnation),
            now_ms,
            ends_ms=ends_from_wire(wire.request, now_ms),
            peer_name="" if peer is None else peer.name,
            compiled=not ports.grammar_states.needs(request),
            opener=Opener(wire.opener),
        )
        room.replies = self._callers.take(name)
        ports.grammar_states.begin(room, *room.sequences)
        ports.reporter.opened(name, request, room.opener)
        room.reply(room.REPLY(accepted=inference_pb2.Accepted()))
        return room
