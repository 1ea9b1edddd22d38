"""What does one rank of a decode worker do? As `services.decode`, with the product's own parts.

Left out: tensors, gRPC, and words for people. Time stands still; a deadline that passes is an event.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.ids import Generation, Incarnation, RoomId
from services.pages.errors import RecordCorrupt, RecordForeign
from services.pages.holdings import Holdings
from services.pages.holdings import Standing as Held
from services.pages.pool import PagePool
from services.pages.record import SEAL_BYTES, SEAL_OFFSET, SLOT_BYTES, MetadataRecord, read_slot, seal_bytes
from services.pages.slots import SlotPool
from services.rooms.ballot import Ballot, read_verdict
from services.rooms.choice_pages import ChoicePages
from services.rooms.choices import Choices
from services.rooms.errors import Cause, PeerFault, Reason, Refusal
from services.rooms.evidence import Connected, Failed, Fenced, Finished, Landed, Proof, Sealed
from services.rooms.phases import AnyEffect, Effect, Phase, ReceiverEffect
from services.rooms.quarantine import in_quarantine, revocation_due
from services.rooms.reasons import REASONS, Fault
from services.rooms.receiver import Receiver
from services.rooms.roster import TOMBSTONE_MS, Capacity, Roster
from tests.model.flights import PAGE, RECORD, Flight, exposed_anew, exposure, leaders
from tests.model.laws import Broken, Law
from tests.model.passing import FAR, expired
from tests.model.scopes import Scope
from tests.model.shapes import content, layouts, strips
from tests.model.standing import At, Standing, check_tables, nothing_held

FIRST_TOKEN = 5
_DRAWN, _DRAWN_MAX = 200, 8
"""What is drawn, at most so many tokens of each choice, says this and more, and no prompt does."""
_LATE_MS = 1 << 50
"""When every proof is overdue."""

Done = tuple[RoomId, AnyEffect, tuple[object, ...]]
"""What a rank did for a room in a turn, and what the world is to know of it."""


@dataclass(slots=True)
class Job:
    receiver: Receiver
    ends: Choices
    steps: list[int]
    """Of each choice, that have ended and counted."""
    record: MetadataRecord | None = None
    cut: frozenset[int] = frozenset()
    """Choices that the world has said are enough."""
    exposure: Incarnation | None = None
    """By which its sender was told of its memory."""


class DecodeRank:
    def __init__(self, scope: Scope, incarnation: Incarnation, rank: int) -> None:
        layout = layouts(scope, 1)[rank]
        self._strips = strips(layout)
        """Of each page."""
        self._sum = told_sum(layout.kv_heads) if scope.sums else 0
        """That the record is to tell."""
        self._incarnation = incarnation
        self._exposure = exposure(incarnation, 1, rank)
        self._reached_by = {self._exposure}
        """Exposures by which writes still reach what is read here."""
        self._revoking = False
        self._draining = self._left = False
        self._prompt = scope.prompt_pages
        self._division = ChoicePages(
            scope.prompt_pages, scope.prompt_pages + scope.more_pages, scope.choices, page_tokens=1
        )
        self._lasts = [scope.tokens + choice % 2 for choice in range(scope.choices)]
        """Steps of each choice."""
        self._steps = scope.steps or scope.receiver_steps
        self._slot_memory = bytearray(scope.slots * SLOT_BYTES)
        self._kv = bytearray(scope.pages * len(self._strips))
        """What was written to each strip since its page was taken: 0 for nothing."""
        self._slot_writers: dict[int, int] = {}
        """Which rank of the sender wrote to a slot since it was handed out."""
        self._holdings = Holdings(PagePool(scope.pages), SlotPool(memoryview(self._slot_memory)))
        self._roster: Roster[Receiver] = Roster(scope.rooms)
        self._jobs: dict[RoomId, Job] = {}
        self._step: list[tuple[RoomId, int]] = []
        """Rooms, and which choice of each."""
        self._opened: set[RoomId] = set()
        self._forgotten: set[RoomId] = set()
        self._cancelled: set[RoomId] = set()
        """Before they were opened."""
        self._later = scope.budget.lags > 0 and len(layouts(scope, 1)) > 1
        """The sender is told where to write when every rank has exposed it: after the next agreement. (Where
        no rank is late, that makes no difference but one more turn.)"""
        self._granting: list[Done] = []
        """Exposed here, and not yet known to be so on every rank."""
        self._gone: set[Incarnation] = set()
        """Prefill workers known to be gone: nobody connects to them any more."""

    # ---- commands, the same on every rank

    def open(self, room: RoomId, peer: Incarnation, connected: bool = True) -> str:
        """`connected`: the sender knows this memory; else `connected` will tell."""

        def make(place: int) -> Receiver:
            return Receiver(
                room,
                f"request-{room}",
                peer,
                place,
                self._division.needed,
                FAR,
                0,
                pages_expected=self._prompt,
            )

        try:
            receiver = self._roster.open(room, make, 0)
        except Refusal as error:
            return type(error).__name__
        if room in self._cancelled and receiver.cause is None:
            raise Broken(Law.CANCEL_REMEMBERED, f"room {room} was cancelled before it came, and it runs")
        self._opened.add(room)
        self._cancelled.discard(room)
        self._forgotten.discard(room)
        count = self._division.choices
        self._jobs[room] = Job(receiver, Choices(count), [0] * count)
        if peer in self._gone:
            receiver.note(Failed(Cause(Reason.CONNECT_FAILED, "its process is gone")))
        elif connected:
            receiver.note(Connected())
        return ""

    def connected(self, peer: Incarnation) -> str:
        for job in self._jobs.values():
            if job.receiver.peer == peer:
                job.receiver.note(Connected())
        return ""

    def cancel(self, room: RoomId, reason: Reason) -> str:
        self._roster.cancel(room, Cause(reason, "as the world tells"), 0)
        if room not in self._opened:
            self._cancelled.add(room)
        return ""

    def end_choice(self, room: RoomId, choice: int) -> str:
        job = self._jobs.get(room)
        if job is not None:
            job.cut |= {choice}
            job.ends.cut.add(choice)
            if choice in job.ends.going_on and job.ends.end(choice):
                job.receiver.note(Finished())
        return ""

    def quiet(self, room: RoomId, generation: Generation) -> str:
        if room in self._roster and self._roster.get(room).generation != generation:
            return "PeerFault"
        self._roster.note(room, Fenced(Proof.QUIET))
        return ""

    def depart(self, peer: Incarnation) -> str:
        for job in self._jobs.values():
            if job.receiver.peer != peer or job.receiver.phase is Phase.SUCCESS:
                continue
            if job.receiver.phase is Phase.TRANSFERRING and job.record is None:
                self._see_slot(job)
            if job.record is None:
                job.receiver.note(Failed(Cause(Reason.PREFILL_LOST, "its process is gone")))
            job.receiver.note(Fenced(Proof.DEAD))
        self._gone.add(peer)
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

    def revoke(self) -> str:
        """Every room whose memory is exposed ends: all of it is about to go."""
        self._revoking = True
        for job in self._jobs.values():
            if job.receiver.phase is Phase.TRANSFERRING:
                job.receiver.note(Failed(Cause(Reason.MEMORY_REVOKED, "taken back from another")))
        return ""

    # ---- what happens to this rank alone

    def fail(self, room: RoomId) -> str:
        """Something here tells of a failure, perhaps of a room that is over."""
        self._roster.note(room, Failed(Cause(Reason.TRANSFER_FAILED, "seen here")))
        return ""

    def land(self, flight: Flight) -> str:
        if flight.peer not in self._reached_by:
            return ""
        if flight.kind == PAGE:
            self._land_pages(flight)
            return ""
        (slot,) = flight.targets
        if self._slot_writers.setdefault(slot, flight.by) != flight.by:
            raise Broken(Law.ONE_WRITER, f"two ranks write the record of room {flight.room} to slot {slot}")
        start = slot * SLOT_BYTES + (0 if flight.kind == RECORD else SEAL_OFFSET)
        self._slot_memory[start : start + len(flight.body)] = flight.body
        return ""

    def _land_pages(self, flight: Flight) -> None:
        pages = self._holdings.get(flight.room).exposed if flight.room in self._holdings else ()
        for page, strip, content_there in flight.strips:
            at = page * len(self._strips) + strip
            if page in pages and content_there != self._expected(flight.room, pages.index(page), strip):
                raise Broken(
                    Law.LAYERS_BY_ID, f"room {flight.room}: another layer's or head's bytes go to page {page}"
                )
            if self._kv[at] == content_there:
                raise Broken(Law.ONE_WRITER, f"room {flight.room}: bytes of page {page} are written twice")
            self._kv[at] = content_there

    def _expected(self, room: RoomId, page: int, strip: int) -> int:
        return content(room, page, self._strips[strip])

    def _blank(self, pages: Sequence[int]) -> None:
        size = len(self._strips)
        for page in pages:
            self._kv[page * size : (page + 1) * size] = bytes(size)

    def step_ends(self) -> str:
        """Every sequence of the batch has drawn a token."""
        for room, _ in self._step:
            self._jobs[room].receiver.busy = False
        for room, choice in self._step:
            job = self._jobs[room]
            if self._division.choices > 1:
                self._read(job, choice)
                self._write(job, choice)
            if choice not in job.ends.going_on or job.receiver.stopping:
                continue
            job.steps[choice] += 1
            if job.steps[choice] == self._lasts[choice] and job.ends.end(choice):
                job.receiver.note(Finished())
        self._step = []
        return ""

    # ---- a turn

    def ballot(self, late: RoomId | None) -> tuple[int, ...]:
        """See and vote. `late`: the room whose deadline has passed here."""
        with expired(self._roster, late):
            return tuple(self._ballot().encode())

    def turn(self, agreed: Sequence[int], late: RoomId | None) -> tuple[tuple[Done, ...], tuple[str, ...]]:
        """See, vote, take the verdict, act, compute."""
        with expired(self._roster, late):
            ballot = self._ballot()
            verdict = read_verdict(ballot, list(agreed))
            moves = self._roster.settle(verdict.votes, 0, verdict.reasons)
        self._left = verdict.leave
        done, self._granting = self._granting, []
        done += [(room.id, effect, self._perform(room, effect)) for room, effect in moves]
        if verdict.compute and self._revoking:
            self._take_memory_back()
        elif verdict.compute:
            self._compute()
        return tuple(done), ()

    def _ballot(self) -> Ballot:
        for job in self._jobs.values():
            if job.receiver.phase is Phase.TRANSFERRING and not job.receiver.sealed:
                self._see_slot(job)
        votes, digest = self._roster.votes(0, self._capacity()), self._roster.digest()
        may_leave = self._draining and not self._jobs
        return Ballot(0, digest, not self._step, may_leave, votes, self._roster.reasons(0, votes))

    def _capacity(self) -> Capacity:
        if self._revoking:
            return Capacity(0, 0)
        return Capacity(self._holdings.pages.free, self._holdings.slots.free)

    def _see_slot(self, job: Job) -> None:
        receiver = job.receiver
        slot = self._holdings.get(receiver.id).slot
        generation = Generation(slot.generation)
        try:
            record = read_slot(self._holdings.slots.view(slot), receiver.id, generation)
            if record is None:
                return
            self._check_record(receiver, record)
            receiver.note(Landed(generation, record.pages))
        except (RecordCorrupt, RecordForeign, PeerFault) as error:
            receiver.note(Failed(Cause(Reason.RECORD_CORRUPT, str(error))))
            return
        job.record = record
        receiver.note(Sealed(generation))

    def _check_record(self, receiver: Receiver, record: MetadataRecord) -> None:
        if (record.prompt_tokens, record.pages) != (self._prompt, receiver.pages_expected):
            raise RecordCorrupt(f"it tells of {record.pages} pages")
        if record.pages_checksum != self._sum:
            raise RecordCorrupt("it tells the checksum of another rank's pages")

    def _perform(self, receiver: Receiver, effect: Effect) -> tuple[object, ...]:
        match effect:
            case ReceiverEffect.GRANT:
                return self._grant(receiver)
            case ReceiverEffect.ADMIT:
                if self._jobs[receiver.id].record is None:
                    raise Broken(Law.GATE_BEFORE_AGREE, f"room {receiver.id} is admitted without its record")
                self._holdings.commit(receiver.id)
            case Effect.FENCE:
                if not self._holdings.quarantine(receiver.id):
                    receiver.note(Fenced(Proof.UNEXPOSED))
                elif receiver.generation is not None and receiver.proof is None:
                    return ("close", receiver.generation, _doubtful(receiver))
            case Effect.RELEASE:
                self._release(receiver)
            case _:
                pass
        return ()

    def _grant(self, receiver: Receiver) -> tuple[object, ...]:
        self._holdings.take(receiver.id, receiver.pages_needed)
        holding = self._holdings.expose(receiver.id, receiver.pages_expected)
        self._blank(holding.pages)
        self._slot_writers.pop(holding.slot.index, None)
        if any(self._holdings.slots.view(holding.slot)):
            raise Broken(Law.SLOT_ZERO, f"slot {holding.slot.index} is handed to room {receiver.id} written")
        receiver.expose(Generation(holding.slot.generation))
        self._jobs[receiver.id].exposure = self._exposure
        where = holding.slot.generation, holding.exposed, holding.slot.index
        told = ("grant", leaders(self._exposure), *where)
        if not self._later:
            return told
        self._granting.append((receiver.id, ReceiverEffect.GRANT, told))
        return ()

    def _take_memory_back(self) -> None:
        if self._step:
            raise Broken(Law.APPLY_VERDICT, "memory is taken back under a running step")
        self._move()
        for job in self._jobs.values():
            if in_quarantine(job.receiver):
                job.receiver.note(Fenced(Proof.REVOKED))
        self._revoking = False

    def _move(self) -> None:
        """As `services.transfer.exposure`: its contents lie elsewhere from now on, under another name; what
        goes by an older one lands where nobody reads."""
        self._slot_memory = bytearray(self._slot_memory)
        self._kv = bytearray(self._kv)
        self._holdings.slots.moved(memoryview(self._slot_memory))
        self._reached_by.clear()
        self._exposure = exposed_anew(self._exposure)
        self._reached_by.add(self._exposure)

    def _release(self, receiver: Receiver) -> None:
        if receiver.phase is Phase.RETIRED and receiver.cause is not None and receiver.proof is None:
            raise Broken(Law.PROOF_NOT_TIME, f"room {receiver.id} gives its memory back without a proof")
        if any(room == receiver.id for room, _ in self._step):
            raise Broken(Law.EXITS_RELEASE_ALL, f"room {receiver.id} is released under a running step")
        if receiver.cause is None and not receiver.stopping:
            self._check_ends(self._jobs[receiver.id])
        if receiver.id in self._holdings:
            holding = self._holdings.get(receiver.id)
            self._blank(holding.pages)
            self._slot_writers.pop(holding.slot.index, None)
        self._holdings.give_back(receiver.id)
        self._roster.retire(receiver.id, 0)
        del self._jobs[receiver.id]

    def _compute(self) -> None:
        for room, job in self._jobs.items():
            receiver = job.receiver
            if receiver.phase is Phase.SUCCESS and not receiver.finished and not receiver.stopping:
                receiver.busy = True
                self._step += [(room, choice) for choice in job.ends.going_on]
        if self._division.choices > 1:
            for room, choice in self._step:
                self._begin(self._jobs[room], choice)
        if not self._steps:
            self.step_ends()

    # ---- choices, of rooms that have several

    def _begin(self, job: Job, choice: int) -> None:
        """A step computes the choice's next token."""
        if job.steps[choice] >= self._lasts[choice] or choice in job.cut:
            text = f"choice {choice} of room {job.receiver.id} has ended, and is drawn on"
            raise Broken(Law.CHOICES_END_ALONE, text)
        tables = [self._table(job, each) for each in range(self._division.choices)]
        position = self._position(job, choice)
        if len(tables[choice]) <= position:
            raise Broken(Law.CHOICES_APART, f"choice {choice} has no page for token {position}")
        page = tables[choice][position]
        for other, table in enumerate(tables):
            if other != choice and page in table:
                raise Broken(Law.CHOICES_APART, f"choice {choice} writes to page {page}, as {other} reads")
        self._read(job, choice)

    def _table(self, job: Job, choice: int) -> Sequence[int]:
        return self._division.table(self._holdings.get(job.receiver.id).pages, choice)

    def _position(self, job: Job, choice: int) -> int:
        """Of the token that its next step computes: choice 0's first was drawn by the sender's side."""
        return self._division.known_tokens + job.steps[choice] - (choice > 0)

    def _read(self, job: Job, choice: int) -> None:
        table, size = self._table(job, choice), len(self._strips)
        for position in range(self._position(job, choice)):
            for strip in range(size):
                there = self._kv[table[position] * size + strip]
                if there != self._drawn(job, choice, position, strip):
                    text = f"choice {choice} of room {job.receiver.id} reads another's token {position}"
                    raise Broken(Law.CHOICES_APART, text)

    def _write(self, job: Job, choice: int) -> None:
        position, size = self._position(job, choice), len(self._strips)
        page = self._table(job, choice)[position]
        for strip in range(size):
            self._kv[page * size + strip] = self._drawn(job, choice, position, strip)

    def _drawn(self, job: Job, choice: int, position: int, strip: int) -> int:
        """What a strip of a token says: choices differ in what they have drawn."""
        if position < self._prompt:
            return self._expected(job.receiver.id, position, strip)
        return _DRAWN + choice * _DRAWN_MAX + position - self._prompt

    def _check_ends(self, job: Job) -> None:
        """The room is answered."""
        for choice, lasts in enumerate(self._lasts):
            if job.steps[choice] < lasts and choice not in job.cut:
                text = f"room {job.receiver.id} is answered, and its choice {choice} has not ended"
                raise Broken(Law.CHOICES_END_ALONE, text)

    # ---- what it is

    def standing(self) -> Standing:
        check_tables(self._roster, self._holdings, self._jobs, self._opened, self._forgotten)
        owners: dict[int, tuple[RoomId, bool]] = {}
        slots: dict[int, tuple[RoomId, int, bool]] = {}
        sealed: set[RoomId] = set()
        landed: set[RoomId] = set()
        for room in self._jobs:
            if room not in self._holdings:
                continue
            holding = self._holdings.get(room)
            open_to_peer = holding.standing in (Held.EXPOSED, Held.QUARANTINED)
            exposed = holding.exposed if holding.standing is not Held.QUARANTINED else holding.pages
            owners |= {page: (room, open_to_peer and page in exposed) for page in holding.pages}
            generation = holding.slot.generation
            slots[holding.slot.index] = (room, generation, open_to_peer)
            if self._seal_there(room, holding.slot.index, generation):
                sealed.add(room)
                if self._pages_there(room, holding.exposed):
                    landed.add(room)
            if holding.standing is Held.EXPOSED and self._jobs[room].exposure != self._exposure:
                raise Broken(
                    Law.EXPOSURE_ON_PAGE,
                    f"room {room} waits for writes by an exposure that was taken back",
                )
        self._check_memory(slots, landed)
        receivers = [job.receiver for job in self._jobs.values()]
        rooms = {room: At(job.receiver.phase, job.receiver.cause) for room, job in self._jobs.items()}
        return Standing(
            rooms,
            frozenset(self._opened - rooms.keys() - self._forgotten),
            not self._jobs and nothing_held(self._roster, self._holdings),
            bool(self._step),
            self._draining,
            self._left,
            exposure=self._exposure,
            reached_by=frozenset(self._reached_by),
            revoking=self._revoking,
            overdue=revocation_due(receivers, _LATE_MS, len(self._holdings.pages)),
            owners=owners,
            slots=slots,
            sealed=frozenset(sealed),
            landed=frozenset(landed),
        )

    def _seal_there(self, room: RoomId, slot: int, generation: Generation) -> bool:
        seal = slot * SLOT_BYTES + SEAL_OFFSET
        return bytes(self._slot_memory[seal : seal + SEAL_BYTES]) == seal_bytes(room, generation)

    def _pages_there(self, room: RoomId, pages: Sequence[int]) -> bool:
        size = len(self._strips)
        return all(
            self._kv[page * size + strip] == self._expected(room, index, strip)
            for index, page in enumerate(pages)
            for strip in range(size)
        )

    def _check_memory(self, slots: dict[int, tuple[RoomId, int, bool]], landed: set[RoomId]) -> None:
        for index in range(len(self._holdings.slots)):
            bytes_there = self._slot_memory[index * SLOT_BYTES : (index + 1) * SLOT_BYTES]
            if index not in slots and any(bytes_there):
                raise Broken(Law.SLOT_ZERO, f"slot {index} belongs to nobody and is not blank")
        for room, job in self._jobs.items():
            if job.receiver.phase is Phase.SUCCESS and room not in landed:
                raise Broken(Law.STALE_NEVER_SERVED, f"room {room} decodes from bytes that are not its own")


def _doubtful(receiver: Receiver) -> bool:
    """Whether the way from its sender may be what went wrong."""
    return receiver.cause is None or REASONS[receiver.cause.reason].fault is not Fault.CALLER


def told_sum(heads: Sequence[int]) -> int:
    """The checksum of a rank's pages, as its record tells it where the scope has `sums`."""
    return 1 + heads[0]
