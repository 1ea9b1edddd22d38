"""World around one rank of a prefill worker.

The product's own half of its hand-overs is driven here, with the `RoomTransfer` of a room's writes and the
`Routes` to the receivers' memory.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

from baton.handover.requests import (
    BeginWrites,
    Forget,
    Orphaned,
    Outcome,
    Report,
    Retired,
    SendPages,
    SendRecord,
    SendSeal,
)
from baton.handover.route import Route
from baton.handover.sending_room import SendingRoom
from baton.handover.sending_side import GIVEN_UP, SendingSide
from baton.ids import Generation, Incarnation, PageTables, RoomId
from baton.pages.errors import Truncated
from baton.pages.holdings import Holdings
from baton.pages.layout import KvLayout
from baton.pages.pool import PagePool
from baton.pages.record import SCHEMA_HASH, SEAL_OFFSET, SLOT_BYTES
from baton.pages.slots import Slot, SlotPool
from baton.prefill.room_transfer import RoomTransfer
from baton.prefill.routes import Routes
from baton.rooms.errors import Cause, NotConnected, PeerFault, Reason, UnknownRoom
from baton.rooms.evidence import Granted, Proof
from baton.rooms.phases import Effect, SenderEffect
from baton.rooms.request import Request, Token
from baton.transfer.transfer_protocol import PutState, Transfer
from baton.wire.baton.v1 import inference_pb2
from baton.wire.layout_messages import layout_to_wire
from tests.model.flights import PAGE, RECORD, SEAL, Airspace, Flight, Line, exposed_by
from tests.model.laws import Broken, Law
from tests.model.rank import FAR, Done, Rank, Told
from tests.model.scopes import Scope
from tests.model.shapes import FIRST_TOKEN, layouts, page_keys, told_sum
from tests.model.standing import Standing


@dataclass(slots=True, eq=False)
class WritingRoom(SendingRoom):
    push: RoomTransfer | None = field(default=None, init=False)


class PrefillRank(Rank[WritingRoom]):
    SEES = Reason.ENGINE_FAILED

    def __init__(self, scope: Scope, rank: int) -> None:
        super().__init__(len(layouts(scope, 0)), adopts=scope.adopts)
        self._theirs = layouts(scope, 1)
        self._sums = scope.sums
        self._pages = scope.prompt_pages
        self._prompt = (1,) * max(scope.prompt_pages, 1)
        """The prompt. It has a token even if no page of it is sent: its receiver then has it cached, and
        counts no pages."""
        self._told_ways = scope.ways
        self._steps = scope.steps
        self._air = Airspace.of(scope, rank)
        self._routes = Routes(cast(Transfer, self._air), layouts(scope, 0), rank)
        self._slot_memory = bytearray(scope.rooms * SLOT_BYTES)
        self.side: SendingSide[WritingRoom] = SendingSide(
            WritingRoom,
            scope.rooms,
            Holdings(
                [PagePool(scope.sender_pages), *[PagePool(scope.sender_pages)] * bool(scope.states)],
                SlotPool(memoryview(self._slot_memory)),
            ),
            layouts(scope, 0)[rank],
            FAR,
            elected=self._routes.elected,
        )

    # ---- commands, the same on every rank

    def _asked(self, room: RoomId) -> Request:
        return Request(f"request-{room}", self._prompt, 1)

    def connect(
        self,
        receiver: Incarnation,
        exposure: Incarnation,
        reached: frozenset[Incarnation],
        reaches: bool = True,
    ) -> str:
        """Connect to a receiver. The result is reported after the next turn. `reached`: exposures by which
        memory can be written. `reaches`: whether the receiver is reachable from this rank."""
        self._air.reaches = reaches
        problem = self._connect(receiver, exposure, reached)
        self._air.reaches = True
        self.side.connection(problem)
        return _name(problem)

    def _connect(
        self, receiver: Incarnation, exposure: Incarnation, reached: frozenset[Incarnation]
    ) -> NotConnected | None:
        problem = None
        try:
            self._routes.connect(_connect(receiver, exposure, self._theirs))
        except NotConnected as error:
            problem = type(error)()
        unproven = [room for room in self._roster if room.proof is None]
        self.side.revoke(receiver, exposure)
        for room in unproven:
            if room.proof is Proof.REVOKED and room.push is not None:
                self._air.give_up(room.id, room.push.in_flight, reached)
        return problem

    def grant(
        self,
        room: RoomId,
        receiver: Incarnation,
        exposure: Incarnation,
        generation: Generation,
        pages: PageTables,
        slot: int,
        reached: frozenset[Incarnation],
    ) -> str:
        """Apply a grant, and return the reason of its refusal or an empty text. The leader's is the answer.
        `reached`: as for `connect`."""
        roster = self._roster
        if not self._told_ways and room in roster and roster.get(room).peer == receiver:
            self._connect(receiver, exposure, reached)
        route: Route | NotConnected
        try:
            route = self._routes.granted(receiver, exposure)
        except NotConnected as error:
            route = error
        try:
            held = len(self._prompt) - self._pages
            self.side.grant(room, receiver, Granted(generation, pages, slot, held), route)
        except (UnknownRoom, PeerFault, NotConnected, Truncated) as error:
            return _name(error)
        return ""

    def claim(self, room: RoomId, receiver: Incarnation) -> str:
        try:
            self.side.claimed(room, receiver)
        except (UnknownRoom, PeerFault) as error:
            return _name(error)
        return ""

    def cause(self, reason: Reason) -> Cause:
        # Called off or given up is the same to a sender: said alike, it makes no more states.
        return GIVEN_UP if reason is Reason.CANCELLED else super().cause(reason)

    def close(self, room: RoomId, receiver: Incarnation, generation: Generation) -> str:
        try:
            self.side.close(room, receiver, generation, 0)
        except PeerFault as error:
            return _name(error)
        self._remember(room)
        return ""

    # ---- what happens to this rank alone

    def ended(self, number: int, state: PutState) -> str:
        """Note that a write has landed or failed."""
        self._air.end(number, state)
        return ""

    def step_ends(self) -> str:
        """End the step: every prompt of the batch is computed."""
        for room in self._step:
            self.side.computed(room, len(self._prompt), Token(FIRST_TOKEN), 0)
        self._step = []
        self._carry_out()
        return ""

    # ---- a turn

    def _observe(self) -> None:
        sending = self.side
        for room in sending.sent():
            if room.push is not None:
                sending.observe(room, room.push, 0, moved=room.push.advance(_uncounted))
        for room in sending.unproven():
            if room.push is None or room.push.drain(_uncounted):
                sending.ended(room)

    def _connects(self) -> int:
        return self.side.connects()

    def _agreed(self, connects: int) -> tuple[tuple[str, ...], list[Done]]:
        return tuple(map(_name, self.side.agreed(connects))), []

    def _perform(self, room: WritingRoom, effect: Effect | SenderEffect) -> Told:
        self.side.perform(room, effect, 0)
        self._carry_out()
        return ()

    def _compute(self) -> None:
        for room in self._roster:
            if room.computable:
                room.busy = True
                self._step.append(room)
        if not self._steps:
            self.step_ends()

    # ---- what the hand-over asks of the world

    def _do(self, request: Any) -> list[tuple[RoomId, Told]]:
        match request:
            case BeginWrites(room, slot):
                self._begin(self._roster.get(room), slot)
            case SendPages(room, tokens, complete):
                self._push(room).ready(tokens, complete=complete)
            case SendRecord(room, record):
                told = replace(record, prompt_tokens=self._pages)
                self._push(room).add_record(told, lambda heads: told_sum(heads) if self._sums else 0)
            case SendSeal(room):
                self._push(room).seal()
            case Retired(room):
                self._air.unwritten.discard(room)
            case Forget(peer):
                self._routes.forget(peer, gone=True)
                self._air.gone.add(peer)
            case Report() | Outcome() | Orphaned():
                pass
            case _:
                raise AssertionError(f"nothing here does {request}")
        return []

    def _begin(self, room: WritingRoom, slot: Slot) -> None:
        if room.grant is None or room.route is None:
            raise AssertionError(f"room {room.id} computes without a destination")
        line = Line(self._air, room.id, room.grant.generation, room.pages, self._slot_memory)
        group = self.side.layout.groups[0]
        room.push = RoomTransfer(
            cast(Transfer, line),
            room.route,
            room.pages,
            group.page_tokens,
            room.grant,
            group.page_bytes,
            self._holdings.slots.view(slot),
            slot.index,
        )

    def _push(self, room: RoomId) -> RoomTransfer:
        push = self._roster.get(room).push
        if push is None:
            raise AssertionError(f"room {room} is written before it has begun")
        return push

    # ---- what it is

    def standing(self) -> Standing:
        told, flying = super().standing(), tuple(self._air.flying.values())
        for flight in flying:
            self._check_source(flight)
        owing = (room.id for room in self._roster if not room.complete or room.id in self._air.unwritten)
        return replace(told, flying=flying, owing=frozenset(owing))

    def _check_source(self, flight: Flight) -> None:
        if exposed_by(flight.peer) in self._air.gone:
            return  # where it was going is no more
        room, holdings = flight.room, self._holdings
        if room not in self._roster or room not in holdings:
            raise Broken(Law.SOURCE_PINNED, f"room {room} gave its pages back while a {flight.kind} is read")
        holding = holdings.get(room)
        mine = page_keys(holding.pages) if flight.kind == PAGE else [holding.slot.index]
        if not set(flight.sources) <= set(mine):
            raise Broken(Law.SOURCE_PINNED, f"room {room}: a {flight.kind} is read from pages not its own")
        if flight.kind == PAGE and not self._roster.get(room).complete:
            raise Broken(Law.WRITTEN_BEFORE_SENT, f"room {room}: a page is sent before it is computed")
        start = holding.slot.index * SLOT_BYTES + (SEAL_OFFSET if flight.kind == SEAL else 0)
        body = bytes(self._slot_memory[start : start + len(flight.body)])
        if flight.kind in (RECORD, SEAL) and body != flight.body:
            raise Broken(Law.SOURCE_PINNED, f"room {room}: what a {flight.kind} is read from has changed")


def _name(problem: Exception | None) -> str:
    return "" if problem is None else type(problem).__name__


def _uncounted(length: int) -> None:
    """Bytes are for a metric."""


@cache
def _connect(
    receiver: Incarnation, exposure: Incarnation, theirs: tuple[KvLayout, ...]
) -> inference_pb2.ConnectRequest:
    """Return a decode worker's description of its ranks' memory. `exposure`: the first rank's."""
    return inference_pb2.ConnectRequest(
        endpoints=[
            inference_pb2.Endpoint(incarnation=exposure + rank, agent=f"{exposure} {rank}", metadata=b"-")
            for rank in range(len(theirs))
        ],
        layouts=[layout_to_wire(layout) for layout in theirs],
        schema=SCHEMA_HASH,
        receiver=receiver,
    )
