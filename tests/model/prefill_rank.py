"""What does one rank of a prefill worker do? As `services.prefill.turn`, with the product's own parts,
the `Push` of a room's writes and the `Ways` to the receivers' memory among them.

Left out: tensors, gRPC, and words for people. Time stands still; a deadline that passes is an event.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, cast

from services.pages.holdings import Holdings
from services.pages.plan import TransferPlan
from services.pages.pool import PagePool
from services.pages.record import SCHEMA_HASH, SLOT_BYTES, MetadataRecord
from services.pages.slots import SlotPool
from services.prefill.push import Push, Stage
from services.prefill.ways import Way, Ways
from services.rooms.ballot import Ballot, read_verdict
from services.rooms.errors import Cause, PeerFault, Reason, Refusal
from services.rooms.evidence import Failed, Fenced, Finished, Granted, Proof, Sealed
from services.rooms.ids import Generation, Incarnation, RoomId
from services.rooms.phases import Effect, Phase
from services.rooms.roster import TOMBSTONE_MS, Capacity, Roster
from services.rooms.sender import Sender
from services.transfer.interface import PutState, Transfer
from services.wire.baton.v1 import inference_pb2
from services.wire.conversions import layout_to_wire
from services.wire.errors import NotConnected
from tests.model.decode_rank import FIRST_TOKEN, Done
from tests.model.flights import LAYOUT, PAGE, Airspace, Flight, Line, exposed_by
from tests.model.laws import Broken, Law
from tests.model.passing import FAR, expired
from tests.model.scopes import Scope
from tests.model.standing import At, Standing, check_tables, nothing_held

NOTHING: Final = TransferPlan(page_bytes=0)
"""Of a rank that holds no layer of those that its receiver has: it sends the record alone."""


@dataclass(slots=True)
class Job:
    sender: Sender
    way: Way | None = None
    push: Push | None = None
    pages: tuple[int, ...] = ()
    computed: bool = False


class PrefillRank:
    def __init__(self, scope: Scope, *, sends: bool = True) -> None:
        """`sends`: it holds layers, and so has pages to send."""
        self._sends = sends
        self._draining = self._left = False
        self._prompt = scope.prompt_pages
        self._told_ways = scope.ways
        self._steps = scope.steps
        self._slot_memory = bytearray(scope.rooms * SLOT_BYTES)
        self._holdings = Holdings(PagePool(scope.sender_pages), SlotPool(memoryview(self._slot_memory)))
        self._roster: Roster[Sender] = Roster(scope.rooms)
        self._jobs: dict[RoomId, Job] = {}
        self._step: list[RoomId] = []
        self._opened: set[RoomId] = set()
        self._forgotten: set[RoomId] = set()
        self._cancelled: set[RoomId] = set()
        self._air = Airspace(breaks=scope.ways)
        self._ways = Ways(cast(Transfer, self._air), LAYOUT)

    # ---- commands, the same on every rank

    def open(self, room: RoomId, peer: Incarnation) -> str:
        def make(place: int) -> Sender:
            return Sender(room, f"request-{room}", peer, place, self._prompt, FAR, 0)

        try:
            sender = self._roster.open(room, make, 0)
        except Refusal as error:
            return type(error).__name__
        if room in self._cancelled and sender.cause is None:
            raise Broken(Law.CANCEL_REMEMBERED, f"room {room} was cancelled before it came, and it runs")
        self._opened.add(room)
        self._cancelled.discard(room)
        self._forgotten.discard(room)
        self._jobs[room] = Job(sender)
        return ""

    def connect(self, receiver: Incarnation, exposure: Incarnation) -> str:
        try:
            self._ways.connect(_connect(receiver, exposure))
        except NotConnected as error:
            return type(error).__name__
        return ""

    def grant(
        self,
        room: RoomId,
        receiver: Incarnation,
        exposure: Incarnation,
        generation: Generation,
        pages: tuple[int, ...],
        slot: int,
        leads: bool = True,
    ) -> str:
        """Not empty: why it was refused. `leads`: this rank gives the answer."""
        grant = Granted(generation, pages, slot)
        if room not in self._roster:
            self._roster.note(room, grant)
            return "UnknownRoom"
        sender = self._roster.get(room)
        if receiver != sender.peer:
            return "PeerFault"
        if len(pages) != sender.pages_needed:
            return "Truncated"
        if not self._told_ways:
            self.connect(receiver, exposure)
        try:
            self._jobs[room].way = self._ways.granted(receiver, exposure)
        except NotConnected as error:
            if not leads:
                sender.note(Failed(Cause(Reason.CONNECT_FAILED, "not connected here")))
            return type(error).__name__
        try:
            sender.note(grant)
        except PeerFault as error:
            return type(error).__name__
        return ""

    def cancel(self, room: RoomId, reason: Reason) -> str:
        self._roster.cancel(room, Cause(reason, "as the world tells"), 0)
        if room not in self._opened:
            self._cancelled.add(room)
        return ""

    def close(self, room: RoomId, receiver: Incarnation, generation: Generation) -> str:
        if room in self._roster:
            sender = self._roster.get(room)
            if sender.peer != receiver:
                return "PeerFault"
            if sender.grant is not None and sender.grant.generation != generation:
                return "PeerFault"
        return self.cancel(room, Reason.CANCELLED)

    def depart(self, peer: Incarnation) -> str:
        for job in self._jobs.values():
            if job.sender.peer == peer:
                job.sender.note(Failed(Cause(Reason.DECODE_LOST, "its process is gone")))
                job.sender.note(Fenced(Proof.DEAD))
        self._ways.forget(peer)
        self._air.gone.add(peer)
        return ""

    def drain(self) -> str:
        """Hold no more rooms than there are, and leave when there are none."""
        self._draining = True
        return ""

    def forget(self) -> str:
        """What is remembered of rooms that are not here has expired."""
        self._roster._forget_old(TOMBSTONE_MS)
        self._forgotten |= self._opened - self._jobs.keys()
        self._cancelled.clear()
        return ""

    # ---- what happens to this rank alone

    def fail(self, room: RoomId) -> str:
        """Something here tells of a failure, perhaps of a room that is over."""
        self._roster.note(room, Failed(Cause(Reason.ENGINE_FAILED, "seen here")))
        return ""

    def ended(self, number: int, state: PutState) -> str:
        """A write has landed, or has failed."""
        self._air.end(number, state)
        return ""

    def step_ends(self) -> str:
        """Every prompt of the batch is computed."""
        for room in self._step:
            job = self._jobs[room]
            sender = job.sender
            sender.busy, job.computed = False, True
            if job.push is None or sender.phase is not Phase.TRANSFERRING or sender.grant is None:
                continue
            job.push.ready(len(job.pages))
            job.push.conclude(
                MetadataRecord(
                    room, sender.grant.generation, self._prompt, 0, len(sender.grant.pages), FIRST_TOKEN
                )
            )
        self._step = []
        return ""

    # ---- a turn

    def ballot(self, late: RoomId | None) -> tuple[int, ...]:
        """See and vote. `late`: the room whose deadline has passed here."""
        with expired(self._roster, late):
            return tuple(self._ballot().encode())

    def turn(self, agreed: Sequence[int], late: RoomId | None) -> tuple[Done, ...]:
        """See, vote, take the verdict, act, compute."""
        with expired(self._roster, late):
            ballot = self._ballot()
            verdict = read_verdict(ballot, agreed)
            moves = self._roster.settle(verdict.votes, 0, verdict.reasons)
        self._left = verdict.leave
        for sender, effect in moves:
            self._perform(sender, effect)
        if verdict.compute:
            self._compute()
        return tuple((sender.id, effect, ()) for sender, effect in moves)

    def _ballot(self) -> Ballot:
        for job in list(self._jobs.values()):
            if job.sender.phase is Phase.TRANSFERRING:
                self._see_push(job)
            elif job.sender.phase is Phase.FAILED and job.sender.proof is None and not job.sender.busy:
                self._see_quiet(job)
        capacity = Capacity(self._holdings.pages.free, self._holdings.slots.free)
        votes, digest = self._roster.votes(0, capacity), self._roster.digest()
        may_leave = self._draining and not self._jobs
        return Ballot(0, digest, not self._step, may_leave, votes, self._roster.reasons(0))

    def _see_push(self, job: Job) -> None:
        push, sender = job.push, job.sender
        if push is None or sender.grant is None or sender.sealed or sender.cause is not None:
            return
        push.advance(_uncounted)
        if push.failure is not None:
            sender.note(Failed(Cause(Reason.TRANSFER_FAILED, push.failure)))
        elif push.stage is Stage.SEALED:
            sender.note(Sealed(sender.grant.generation))

    def _see_quiet(self, job: Job) -> None:
        if job.push is None:
            job.sender.note(Fenced(Proof.UNEXPOSED))
        elif job.push.drain(_uncounted):
            job.sender.note(Fenced(Proof.QUIET))

    def _perform(self, sender: Sender, effect: Effect) -> None:
        match effect:
            case Effect.COMPUTE:
                self._begin(self._jobs[sender.id])
            case Effect.REPORT:
                sender.note(Finished())
            case Effect.RELEASE:
                self._holdings.give_back(sender.id)
                self._roster.retire(sender.id, 0)
                del self._jobs[sender.id]
            case _:
                pass

    def _begin(self, job: Job) -> None:
        sender, grant = job.sender, job.sender.grant
        if grant is None or job.way is None:
            raise AssertionError(f"room {sender.id} computes without a destination")
        holding = self._holdings.take(sender.id, sender.pages_needed)
        job.pages = holding.pages
        line = Line(self._air, sender.id, grant.generation, self._slot_memory)
        staging = self._holdings.slots.view(holding.slot)
        job.push = Push(
            cast(Transfer, line),
            job.way.peer,
            job.way.plan if self._sends else NOTHING,
            holding.pages[len(holding.pages) - len(grant.pages) :],
            grant,
            LAYOUT.page_bytes,
            staging,
            holding.slot.index,
        )

    def _compute(self) -> None:
        for room, job in self._jobs.items():
            if job.sender.phase is Phase.TRANSFERRING and not job.computed:
                job.sender.busy = True
                self._step.append(room)
        if not self._steps:
            self.step_ends()

    # ---- what it is

    def standing(self) -> Standing:
        check_tables(self._roster, self._holdings, self._jobs, self._opened, self._forgotten)
        flying = tuple(self._air.flying.values())
        for flight in flying:
            self._check_source(flight)
        rooms = {room: At(job.sender.phase, job.sender.cause) for room, job in self._jobs.items()}
        return Standing(
            rooms,
            frozenset(self._opened - rooms.keys() - self._forgotten),
            not self._jobs and nothing_held(self._roster, self._holdings),
            bool(self._step),
            self._draining,
            self._left,
            self._sends,
            flying=flying,
        )

    def _check_source(self, flight: Flight) -> None:
        if exposed_by(flight.peer) in self._air.gone:
            return  # where it was going is no more
        room = flight.room
        if room not in self._jobs or room not in self._holdings:
            raise Broken(Law.SOURCE_PINNED, f"room {room} gave its pages back while a {flight.kind} is read")
        holding = self._holdings.get(room)
        mine = holding.pages if flight.kind == PAGE else (holding.slot.index,)
        if not set(flight.sources) <= set(mine):
            raise Broken(Law.SOURCE_PINNED, f"room {room}: a {flight.kind} is read from pages not its own")
        if flight.kind == PAGE and not self._jobs[room].computed:
            raise Broken(Law.WRITTEN_BEFORE_SENT, f"room {room}: a page is sent before it is computed")


def _uncounted(length: int) -> None:
    """Bytes are for a metric."""


@cache
def _connect(receiver: Incarnation, exposure: Incarnation) -> inference_pb2.ConnectRequest:
    """What a decode worker says of its memory. Each rank is shown the endpoint that is for it."""
    return inference_pb2.ConnectRequest(
        endpoints=[inference_pb2.Endpoint(incarnation=exposure, agent=f"exposure {exposure}", metadata=b"-")],
        layout=layout_to_wire(LAYOUT),
        schema=SCHEMA_HASH,
        receiver=receiver,
    )
