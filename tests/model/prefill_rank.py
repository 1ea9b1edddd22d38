"""What does one rank of a prefill worker do? As `services.prefill`, with the product's own parts,
the `Push` of a room's writes and the `Ways` to the receivers' memory among them.

Left out: tensors, gRPC, and words for people. Time stands still; a deadline that passes is an event.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

from services.handover.route import Route
from services.ids import Generation, Incarnation, PageId, RoomId
from services.pages.holdings import Holdings
from services.pages.layout import KvLayout
from services.pages.pool import PagePool
from services.pages.record import SCHEMA_HASH, SEAL_OFFSET, SLOT_BYTES, MetadataRecord
from services.pages.slots import SlotPool
from services.prefill.push import Push, Stage
from services.prefill.ways import Ways
from services.rooms.ballot import Ballot, read_verdict
from services.rooms.errors import Cause, NotConnected, PeerFault, Reason, Refusal
from services.rooms.evidence import Failed, Fenced, Finished, Granted, Proof, Sealed, Written
from services.rooms.phases import GATED, Effect, Phase, SenderEffect
from services.rooms.roster import TOMBSTONE_MS, Capacity, Roster
from services.rooms.sender import Sender
from services.transfer.interface import PutState, Transfer
from services.wire.baton.v1 import inference_pb2
from services.wire.conversions import layout_to_wire
from tests.model.decode_rank import FIRST_TOKEN, Done, told_sum
from tests.model.flights import PAGE, RECORD, SEAL, Airspace, Flight, Line, exposed_by
from tests.model.laws import Broken, Law
from tests.model.passing import FAR, expired
from tests.model.scopes import Scope
from tests.model.shapes import layouts
from tests.model.standing import At, Standing, check_tables, nothing_held


@dataclass(slots=True)
class Job:
    sender: Sender
    way: Route | None = None
    push: Push | None = None
    pages: tuple[PageId, ...] = ()
    computed: bool = False


class PrefillRank:
    def __init__(self, scope: Scope, rank: int) -> None:
        self._layout = layouts(scope, 0)[rank]
        self._theirs = layouts(scope, 1)
        self._sums = scope.sums
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
        self._air = Airspace.of(scope, rank)
        self._ways = Ways(cast(Transfer, self._air), layouts(scope, 0), rank)
        self._connecting: list[str] = []
        """The turn's connections, and what became of them on this rank: "" for a way that was made."""

    # ---- commands, the same on every rank

    def open(self, room: RoomId, peer: Incarnation) -> str:
        def make(place: int) -> Sender:
            return Sender(
                room, f"request-{room}", peer, place, self._prompt, FAR, 0, elected=self._ways.elected
            )

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

    def connect(
        self,
        receiver: Incarnation,
        exposure: Incarnation,
        reached: frozenset[Incarnation],
        reaches: bool = True,
    ) -> str:
        """What became of it here; whoever asked is told after the next turn. `reached`: exposures by which
        memory can be written in truth. `reaches`: this one can be reached from this rank."""
        self._air.reaches = reaches
        self._connecting.append(self._connect(receiver, exposure, reached))
        self._air.reaches = True
        return self._connecting[-1]

    def _connect(self, receiver: Incarnation, exposure: Incarnation, reached: frozenset[Incarnation]) -> str:
        answer = ""
        try:
            self._ways.connect(_connect(receiver, exposure, self._theirs))
        except NotConnected as error:
            answer = type(error).__name__
        for job in self._jobs.values():
            if job.sender.peer == receiver and job.way is not None and job.way.revoked_by(exposure):
                job.sender.note(Failed(Cause(Reason.MEMORY_REVOKED, "taken back")))
                job.sender.note(Fenced(Proof.REVOKED))
                if job.push is not None:
                    self._air.give_up(job.sender.id, job.push._in_flight, reached)
        return answer

    def grant(
        self,
        room: RoomId,
        receiver: Incarnation,
        exposure: Incarnation,
        generation: Generation,
        pages: tuple[PageId, ...],
        slot: int,
        reached: frozenset[Incarnation],
    ) -> str:
        """Not empty: why it was refused. The leader gives the answer. `reached`: as for `connect`."""
        grant = Granted(generation, pages, slot)
        if room not in self._roster:
            self._roster.note(room, grant)
            return "UnknownRoom"
        sender = self._roster.get(room)
        if receiver != sender.peer:
            return "PeerFault"
        if not self._told_ways:
            self._connect(receiver, exposure, reached)
        try:
            way = self._ways.granted(receiver, exposure)
        except NotConnected as error:
            if not self._ways.elected:
                sender.note(Failed(Cause(Reason.CONNECT_FAILED, "not connected here")))
            return type(error).__name__
        if len(pages) != sender.pages_needed:
            return "Truncated"
        try:
            sender.note(grant)
        except PeerFault as error:
            return type(error).__name__
        self._jobs[room].way = way
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
        self._roster.give_up(room, receiver, Cause(Reason.CANCELLED, "as the world tells"), 0)
        if room not in self._opened:
            self._cancelled.add(room)
        return ""

    def depart(self, peer: Incarnation) -> str:
        for job in self._jobs.values():
            if job.sender.peer == peer:
                job.sender.note(Failed(Cause(Reason.DECODE_LOST, "its process is gone")))
                job.sender.note(Fenced(Proof.DEAD))
        self._ways.forget(peer, gone=True)
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
            if job.push is not None and sender.phase is Phase.TRANSFERRING:
                job.push.ready(self._prompt, complete=True)
                if sender.elected:
                    self._tell(job.push, sender)
        self._step = []
        return ""

    # ---- a turn

    def ballot(self, late: RoomId | None) -> tuple[int, ...]:
        """See and vote. `late`: the room whose deadline has passed here."""
        with expired(self._roster, late):
            return tuple(self._ballot().encode())

    def turn(self, agreed: Sequence[int], late: RoomId | None) -> tuple[tuple[Done, ...], tuple[str, ...]]:
        """See, vote, take the verdict, act, compute. Returns the answers to the turn's connections, too."""
        with expired(self._roster, late):
            ballot = self._ballot()
            verdict = read_verdict(ballot, list(agreed))
            moves = self._roster.settle(verdict.votes, 0, verdict.reasons)
        self._left = verdict.leave
        answers = self._connected(verdict.connects)
        for sender, effect in moves:
            self._perform(sender, effect)
        if verdict.compute:
            self._compute()
        return tuple((sender.id, effect, ()) for sender, effect in moves), answers

    def _connected(self, count: int) -> tuple[str, ...]:
        answers = [
            NotConnected.__name__ if place >= count and not problem else problem
            for place, problem in enumerate(self._connecting)
        ]
        self._connecting.clear()
        return tuple(answers)

    def _ballot(self) -> Ballot:
        for job in list(self._jobs.values()):
            if job.sender.phase in GATED:
                self._see_push(job)
            elif job.sender.phase is Phase.FAILED and job.sender.proof is None and not job.sender.busy:
                self._see_quiet(job)
        capacity = Capacity(self._holdings.pages.free, self._holdings.slots.free)
        votes, digest = self._roster.votes(0, capacity), self._roster.digest()
        may_leave = self._draining and not self._jobs
        made = [not problem for problem in self._connecting]
        connects = made.index(False) if False in made else len(made)
        return Ballot(0, digest, not self._step, may_leave, votes, self._roster.reasons(0, votes), connects)

    def _see_push(self, job: Job) -> None:
        push, sender = job.push, job.sender
        if push is None or sender.grant is None or sender.sealed or sender.cause is not None:
            return
        push.advance(_uncounted)
        if push.failure is not None:
            sender.note(Failed(Cause(Reason.TRANSFER_FAILED, push.failure)))
            return
        if push.written and not sender.written:
            sender.note(Written())
        if push.stage is Stage.SEALED:
            sender.note(Sealed(sender.grant.generation))

    def _see_quiet(self, job: Job) -> None:
        if job.push is None:
            job.sender.note(Fenced(Proof.UNEXPOSED))
        elif job.push.drain(_uncounted):
            job.sender.note(Fenced(Proof.QUIET))

    def _perform(self, sender: Sender, effect: Effect) -> None:
        match effect:
            case SenderEffect.COMPUTE:
                self._begin(self._jobs[sender.id])
            case SenderEffect.SEAL:
                self._seal(self._jobs[sender.id])
            case SenderEffect.REPORT:
                sender.note(Finished())
            case Effect.RELEASE:
                self._air.unwritten.discard(sender.id)
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
        line = Line(self._air, sender.id, grant.generation, holding.pages, self._slot_memory)
        staging = self._holdings.slots.view(holding.slot)
        job.push = Push(
            cast(Transfer, line),
            job.way,
            holding.pages,
            self._layout.page_tokens,
            grant,
            self._layout.page_bytes,
            staging,
            holding.slot.index,
        )

    def _seal(self, job: Job) -> None:
        sender, push = job.sender, job.push
        if push is None or not job.computed:
            raise AssertionError(f"room {sender.id} is sealed before it was computed")
        if sender.elected:
            push.seal()

    def _tell(self, push: Push, sender: Sender) -> None:
        if sender.grant is None:
            raise AssertionError(f"room {sender.id} was computed without a destination")
        record = MetadataRecord(
            room=sender.id,
            generation=sender.grant.generation,
            prompt_tokens=self._prompt,
            cached_tokens=0,
            pages=len(sender.grant.pages),
            first_token=FIRST_TOKEN,
        )
        push.tell(record, lambda heads: told_sum(heads) if self._sums else 0)

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
            flying=flying,
            owing=frozenset(
                room for room, job in self._jobs.items() if not job.computed or room in self._air.unwritten
            ),
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
        start = holding.slot.index * SLOT_BYTES + (SEAL_OFFSET if flight.kind == SEAL else 0)
        body = bytes(self._slot_memory[start : start + len(flight.body)])
        if flight.kind in (RECORD, SEAL) and body != flight.body:
            raise Broken(Law.SOURCE_PINNED, f"room {room}: what a {flight.kind} is read from has changed")


def _uncounted(length: int) -> None:
    """Bytes are for a metric."""


@cache
def _connect(
    receiver: Incarnation, exposure: Incarnation, theirs: tuple[KvLayout, ...]
) -> inference_pb2.ConnectRequest:
    """What a decode worker says of its ranks' memory. `exposure`: the first one's."""
    return inference_pb2.ConnectRequest(
        endpoints=[
            inference_pb2.Endpoint(incarnation=exposure + rank, agent=f"{exposure} {rank}", metadata=b"-")
            for rank in range(len(theirs))
        ],
        layouts=[layout_to_wire(layout) for layout in theirs],
        schema=SCHEMA_HASH,
        receiver=receiver,
    )
