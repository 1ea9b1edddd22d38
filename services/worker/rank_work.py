"""Common work of a prefill or decode rank in each turn.

Commands, evidence and time go into the core (`baton.handover`). Its requests to the world are carried out
here, and their results go into the core again. Nothing is decided here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from baton.handover.handover_side import HandOverSide
from baton.handover.requests import Orphaned, Outcome, Report, Retired
from baton.ids import Opener, RoomId
from baton.pages.errors import LayoutMismatch, Truncated
from baton.rooms.errors import Cause, PeerFault, Refusal
from baton.rooms.phases import Phase, Vote
from baton.rooms.queues import RoomQueue
from baton.rooms.roster import Capacity, Roster
from baton.rooms.timeline import Moment
from baton.rooms.worker_load import WorkerLoad
from baton.wire.baton.v1 import group_pb2, rooms_pb2, workers_pb2
from baton.wire.census import census_to_wire
from baton.wire.load_messages import Orphan, load_to_wire, orphans_to_wire
from baton.worker.assembly import RankPorts
from baton.worker.called_room import Reply
from baton.worker.callers import Callers
from baton.worker.metrics import WorkerMetrics
from baton.worker.rank_commands import RankCommands
from baton.worker.reporter import wish_text
from baton.worker.step_scheduler import StepScheduler

OwnRequest = TypeVar("OwnRequest")


class RankWork(ABC, Generic[Reply, OwnRequest]):
    """Base class of `PrefillWork` and `DecodeWork`: the part of `baton.worker.turn_loop.Work` that they
    share.

    `OwnRequest`: requests that only this side's core makes, besides `SideRequest`.
    """

    def __init__(
        self,
        core: HandOverSide[Any, OwnRequest],
        ports: RankPorts,
        metrics: WorkerMetrics,
        computing: StepScheduler[Any],
    ) -> None:
        self.roster = core.roster
        self.callers: Callers[Reply] = Callers(ports.mailbox, core.has_room)
        self._core = core
        self.ports = ports
        self._metrics = metrics
        self.scheduler = computing
        self._turns = 0
        self._loads = 0
        """Number of load reports made so far, which is also the number of the latest report."""
        self._orphan_keys: dict[RoomId, bytes] = {}
        """Adoption keys of rooms that became orphans, by room. Empty on the prefill side."""
        self._renew_leases: Callable[[], None] = lambda: None
        """Function that renews all leases now, so that routers learn of an orphan."""

    # ---- methods and attributes of one side alone

    roster: Roster[Any]
    _commands: RankCommands[Any]
    scheduler: StepScheduler[Any]
    _metrics: WorkerMetrics

    @abstractmethod
    def observe(self) -> bool: ...
    @abstractmethod
    def on_agreement(self, connects: int) -> None: ...
    @abstractmethod
    def compute(self) -> bool: ...
    @abstractmethod
    async def rest(self) -> bool: ...

    @abstractmethod
    def _do(self, request: OwnRequest) -> None:
        """Carry out a request that only this side (prefill or decode) of a hand-over makes."""

    @abstractmethod
    def _load(self, opener: Opener | None) -> WorkerLoad:
        """Return the worker's present load, by which a router decides which rooms this worker gets.
        `opener`: the router, or None for the ids of all routers' rooms."""

    @abstractmethod
    def _queues(self, rooms: Mapping[Phase, int]) -> Mapping[RoomQueue, int]:
        """Return the number of rooms in each queue of this side. `rooms`: number of rooms in each phase."""

    # ---- calls of the leader's process

    @property
    def draining(self) -> bool:
        return self._core.draining

    def names_of(self, room: RoomId) -> Mapping[str, str]:
        """Return ids of a room's request, such as its request id, by the field name in log lines. Empty once
        the room is retired."""
        names: Mapping[str, str] = self.roster.get(room).request.names if room in self.roster else {}
        return names

    def break_off(self, cause: Cause) -> None:
        """Send the callers of all rooms their last reply, because this worker ends at once, perhaps in the
        middle of a turn.

        A room that already has a cause keeps it (`first-cause-wins`). No memory is given back, because it
        ends with the process.
        """
        for room in self.roster:
            room.conclude(None if room.succeeded else room.cause or cause)

    def load(self, opener: Opener | None = None) -> rooms_pb2.WorkerLoad:
        """Return the worker's present load as a protobuf message. A router decides by it which rooms this
        worker gets. `opener`: the router, or None for the ids of all routers' rooms."""
        self._loads += 1
        return load_to_wire(self._load(opener), self._loads)

    def holds(self, opener: Opener | None = None) -> workers_pb2.RenewRequest:
        """Return the message to renew the lease at a router, with the worker's present load and its numbers
        of rooms and pages. `opener`: the router, as for `load`."""
        rooms = self.roster.census()
        tokens = self.scheduler.tokens
        census = census_to_wire(self._queues(rooms), rooms, self._core.holdings, self._turns, tokens)
        orphans = orphans_to_wire(
            Orphan(room.id, self._orphan_keys[room.id], room.peer)
            for room in self._core.orphans()
            if room.id in self._orphan_keys
        )
        return workers_pb2.RenewRequest(census=census, load=self.load(opener), orphans=orphans)

    def renew_leases_by(self, renew: Callable[[], None]) -> None:
        """Set the function that renews all leases now."""
        self._renew_leases = renew

    # ---- Work

    def take_commands(self) -> bytes:
        cost = self.scheduler.cost.news()
        if cost is not None:
            costs = group_pb2.StepCosts(position=cost.position, draft=cost.draft, scored=cost.scored)
            self.ports.mailbox.put(group_pb2.Command(step_costs=costs))
        return self.ports.mailbox.take()

    def apply(self, commands: bytes) -> None:
        if not commands:
            return  # most turns have none
        for command in group_pb2.Commands.FromString(commands).commands:
            problem: Exception | None = None
            try:
                self._commands.apply(command)
            except (Refusal, PeerFault, Truncated, LayoutMismatch) as error:
                problem = error
            self._carry_out()
            self._answer(command, problem)

    def _answer(self, command: group_pb2.Command, problem: Exception | None) -> None:  # noqa: ARG002
        self.ports.mailbox.answer(problem)

    def capacity(self) -> Capacity:
        return self._core.capacity()

    def may_compute(self) -> bool:
        return self.scheduler.free

    def may_leave(self) -> bool:
        return self._core.may_leave() and self.ports.mailbox.empty

    def connects(self) -> int:
        return 0

    def gather_payload(self) -> bytes | None:
        return None

    def on_gathered(self, costs: Sequence[bytes]) -> None:  # noqa: ARG002
        raise AssertionError("the ranks of this worker tell each other nothing")

    def record_vote(self, room: Any, wish: Vote, now_ms: int) -> None:
        if room.voted != (room.phase, wish):
            room.voted = (room.phase, wish)
            self.ports.reporter.report_of_rank(room.id, Moment.VOTED, wish_text(room, wish, now_ms))

    def perform(self, room: Any, effect: Any) -> None:
        self._core.perform(room, effect, self.ports.clock.now_ms())
        self._carry_out()

    def record(self, agreement_s: float) -> None:
        rooms, holdings = self.roster.census(), self._core.holdings
        self._metrics.record_turn(agreement_s, self.ports.reporter.dropped)
        self._metrics.record_rooms(rooms, self.roster.dropped.total())
        self._metrics.record_orphans(self.roster.orphaned, self.roster.adopted)
        self._metrics.record_memory(holdings.census(), holdings.slots.census())
        self._metrics.record_queues(self._queues(rooms))
        self._turns += 1

    async def pause(self, most_s: float) -> None:
        await self.ports.mailbox.rest(most_s)

    # ---- requests of the hand-over core

    def _carry_out(self) -> None:
        """Carry out all requests of the hand-over core, until none is left. Carrying one out may lead to
        further requests."""
        reporter = self.ports.reporter
        while requests := self._core.take_requests():
            for request in requests:
                match request:
                    case Report():
                        report = reporter.report_of_rank if request.of_rank else reporter.report
                        report(request.room, request.moment, request.detail)
                    case Outcome():
                        self._conclude(self.roster.get(request.room), request.cause)
                    case Retired():
                        self._retired(request)
                    case Orphaned():
                        self._orphaned(request.room)
                    case _:
                        self._do(request)

    def _orphaned(self, room: RoomId) -> None:
        """Report a room to all routers, any of which may adopt it. Decode reports it for both sides."""

    def _conclude(self, room: Any, cause: Cause | None) -> None:
        """Send the room's last reply, and release its sequences in the engine. No later step has a row of
        them (`each-is-released`)."""
        room.conclude(cause)
        for sequence in room.sequences:
            self.ports.step_thread.release(sequence)
        if cause is not None:
            self._metrics.room_failed(cause)
            self.ports.reporter.failed(room.id, cause)

    def _retired(self, retired: Retired, detail: str = "") -> None:
        """Forget a room that is over on this worker and has given back all its memory."""
        self.ports.grammar_states.forget(retired.room)
        self._orphan_keys.pop(retired.room, None)
        self._metrics.room_retired(retired.phase_ms)
        self.ports.reporter.retired(retired.room, detail)
