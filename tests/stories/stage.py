"""What happens when both sides of a hand-over, of several ranks each, do what a story tells?

The product's own classes act: rosters, receivers, senders, ballots, holdings, records. Here is only what
surrounds them in production: applying effects (as the workers' turns do), memory, and a remote writer
who writes where it was told to, whatever has become of that memory since.
"""

from dataclasses import dataclass, field

from services.ids import Generation, PageId, RoomId
from services.pages.errors import PagesError
from services.pages.holdings import Holdings, Standing
from services.pages.pool import PagePool
from services.pages.record import SEAL_OFFSET, SLOT_BYTES, MetadataRecord, read_slot, seal_bytes
from services.pages.slots import SlotPool
from services.rooms.errors import Cause, PeerFault, Reason
from services.rooms.evidence import Failed, Fenced, Finished, Granted, Landed, Proof, Sealed
from services.rooms.phases import AnyEffect, Effect, Phase, ReceiverEffect, SenderEffect
from services.rooms.receiver import Receiver
from services.rooms.room import Room
from services.rooms.roster import Capacity
from services.rooms.sender import Sender
from tests.rooms.group import PEER, RosterGroup, Settled


@dataclass(frozen=True, slots=True)
class Destination:
    """What a sender was told once, and may use at any later time."""

    pages: tuple[PageId, ...]
    slot: int
    generation: Generation


@dataclass(slots=True)
class Memory:
    """One rank's memory. `kv` holds one byte a page: the room that wrote it last, 0 for none."""

    kv: bytearray
    slots: bytearray
    holdings: Holdings
    told: dict[RoomId, Destination] = field(default_factory=dict)
    posted: set[RoomId] = field(default_factory=set)
    """Sender: rooms with writes under way."""

    @classmethod
    def of(cls, pages: int, slots: int) -> "Memory":
        slot_bytes = bytearray(slots * SLOT_BYTES)
        return cls(bytearray(pages), slot_bytes, Holdings(PagePool(pages), SlotPool(memoryview(slot_bytes))))

    def capacity(self) -> Capacity:
        return Capacity(self.holdings.pages.free, self.holdings.slots.free)

    def foreign_pages(self) -> int:
        """Pages that a room holds and that another room wrote to since."""
        return sum(
            self.kv[page] not in (0, room)
            for room in self.told
            if room in self.holdings and self.holdings.get(room).standing is not Standing.QUARANTINED
            for page in self.holdings.get(room).pages
        )


class DecodeStage:
    """A decode worker's rank group."""

    def __init__(self, ranks: int, pages: int, slots: int, places: int = 4) -> None:
        self.group: RosterGroup[Receiver] = RosterGroup(ranks, places)
        self.memories = [Memory.of(pages, slots) for _ in range(ranks)]
        self.said: list[str] = []

    def write(self, room: RoomId, rank: int, pages: int) -> None:
        """The sender's one-sided write of the room's first `pages` pages."""
        memory = self.memories[rank]
        for page in memory.told[room].pages[:pages]:
            memory.kv[page] = room

    def seal(self, room: RoomId, rank: int, pages: int) -> None:
        """The sender's record, telling of `pages` pages, and its seal."""
        memory = self.memories[rank]
        to = memory.told[room]
        start = to.slot * SLOT_BYTES
        record = MetadataRecord(room, to.generation, 16 * pages, 0, pages, first_token=5)
        memory.slots[start : start + SEAL_OFFSET] = record.pack()
        seal = seal_bytes(room, to.generation)
        memory.slots[start + SEAL_OFFSET : start + SEAL_OFFSET + len(seal)] = seal

    def turn(self, now_ms: int) -> Settled[Receiver]:
        for rank, roster in enumerate(self.group.rosters):
            for room in roster:
                if room.phase is Phase.TRANSFERRING and not room.sealed:
                    self._see(rank, room)
        settled = self.group.turn(now_ms, [memory.capacity() for memory in self.memories])
        for rank, effects in enumerate(settled.effects):
            for room, effect in effects:
                self._perform(rank, room, effect, now_ms)
        return settled

    def _see(self, rank: int, room: Receiver) -> None:
        holdings = self.memories[rank].holdings
        slot = holdings.get(room.id).slot
        generation = Generation(slot.generation)
        try:
            record = read_slot(holdings.slots.view(slot), room.id, generation)
            if record is not None:
                room.note(Landed(generation, record.pages))
                room.note(Sealed(generation))
        except (PagesError, PeerFault) as error:
            room.note(Failed(Cause(Reason.RECORD_CORRUPT, str(error))))

    def _perform(self, rank: int, room: Receiver, effect: AnyEffect, now_ms: int) -> None:
        memory = self.memories[rank]
        holdings = memory.holdings
        match effect:
            case ReceiverEffect.GRANT:
                holdings.take(room.id, room.pages_needed)
                holding = holdings.expose(room.id, room.pages_expected)
                room.expose(Generation(holding.slot.generation))
                for page in holding.pages:
                    memory.kv[page] = 0
                memory.told[room.id] = Destination(
                    holding.exposed, holding.slot.index, holding.slot.generation
                )
            case ReceiverEffect.ADMIT:
                slot = holdings.get(room.id).slot
                if read_slot(holdings.slots.view(slot), room.id, slot.generation) is None:
                    self.said.append(f"r{rank} admits room {room.id} without its record")
                holdings.commit(room.id)
            case Effect.FENCE:
                if not holdings.quarantine(room.id):
                    room.note(Fenced(Proof.UNEXPOSED))
            case Effect.RELEASE:
                holdings.give_back(room.id)
                self.group.rosters[rank].retire(room.id, now_ms)
            case _:
                pass


class PrefillStage:
    """A prefill worker's rank group."""

    def __init__(self, ranks: int, pages: int, slots: int, places: int = 4) -> None:
        self.group: RosterGroup[Sender] = RosterGroup(ranks, places)
        self.memories = [Memory.of(pages, slots) for _ in range(ranks)]
        self.said: list[str] = []

    def grant(self, room: RoomId, to: Destination) -> list[bool]:
        """Every rank is told where the receiver's ranks want the room."""
        granted = Granted(Generation(to.generation), to.pages, to.slot)
        return [roster.note(RoomId(room), granted) for roster in self.group.rosters]

    def sealed(self, room: RoomId) -> None:
        """The room's records and seals are written: DONE. The elected rank alone sees that."""
        for roster in self.group.rosters:
            sender = roster.get(RoomId(room))
            if sender.elected and sender.grant is not None:
                sender.note(Sealed(sender.grant.generation))

    def close(self, room: RoomId, now_ms: int) -> bool:
        """The receiver gave the room up. True when every rank can prove that it is quiet."""
        for roster in self.group.rosters:
            cause = Cause(Reason.RECEIVER_CLOSED, "the receiver gave the room up")
            roster.give_up(RoomId(room), PEER, cause, now_ms)
        return all(RoomId(room) not in roster for roster in self.group.rosters)

    def turn(self, now_ms: int) -> Settled[Sender]:
        for roster, memory in zip(self.group.rosters, self.memories, strict=True):
            for room in roster:
                if room.phase is Phase.FAILED and room.id not in memory.posted:
                    room.note(Fenced(Proof.UNEXPOSED if room.grant is None else Proof.QUIET))
        settled = self.group.turn(now_ms, [memory.capacity() for memory in self.memories])
        for rank, effects in enumerate(settled.effects):
            for room, effect in effects:
                self._perform(rank, room, effect, now_ms)
        return settled

    def _perform(self, rank: int, room: Room, effect: AnyEffect, now_ms: int) -> None:
        holdings = self.memories[rank].holdings
        match effect:
            case SenderEffect.COMPUTE:
                holdings.take(room.id, room.pages_needed)
            case SenderEffect.REPORT:
                room.note(Finished())
            case Effect.RELEASE:
                holdings.give_back(room.id)
                self.group.rosters[rank].retire(room.id, now_ms)
            case _:
                pass
