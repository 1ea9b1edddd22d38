"""Simulated writes: each has to land where its own room may be written, and the seal has to be written
last."""

import ctypes
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.ids import Incarnation, PageId, RoomId
from baton.pages.holding import Holding, Standing
from baton.pages.holdings import Holdings
from baton.pages.record import SEAL_OFFSET, SLOT_BYTES
from baton.runtime.host_memory import HostMemory
from baton.testing.memory_fabric import MemoryFabric, Write, due_next
from baton.testing.memory_transfer import MemoryTransfer
from baton.testing.transfer_faults import NO_FAULTS, FaultPlan
from baton.transfer.transfer_protocol import Region, Run
from tests.sim.loop import VirtualLoop
from tests.sim.network import Network
from tests.sim.trace import Trace

WRITABLE = frozenset({Standing.EXPOSED, Standing.QUARANTINED})
ANY = frozenset(Standing)
BEFORE = {"pages": (), "records": (), "seals": ("pages", "records")}
"""Writes of a room that are DONE before these are posted, whichever rank's they are."""


@dataclass(frozen=True, slots=True)
class Bank:
    """The memory of one rank, and the holders of its parts."""

    name: str
    host: str
    worker: Incarnation
    rank: int
    kv: Sequence[tuple[int, HostMemory]]
    """Bytes of a page, and memory, by KV group."""
    slots: HostMemory
    holdings: Holdings

    def units(self, address: int, length: int) -> Iterator[tuple[str, int] | None]:
        """Pages or slots at this address. None: the memory was taken back from its writers."""
        pages = ((f"page {group}", memory, size) for group, (size, memory) in enumerate(self.kv))
        for kind, memory, size in (*pages, ("slot", self.slots, SLOT_BYTES)):
            start = address - memory.address
            if 0 <= start < memory.length:
                for index in range(start // size, (start + length - 1) // size + 1):
                    yield kind, index
                return
        yield None

    def owner(self, unit: tuple[str, int], guess: RoomId) -> tuple[RoomId, Holding] | None:
        """`guess`: a room that is looked at first."""
        held = self.holdings.by_room
        if guess in held and _in(unit, held[guess]):
            return guess, held[guess]
        return next(((room, holding) for room, holding in held.items() if _in(unit, holding)), None)

    def rooms(self, address: int) -> set[RoomId]:
        """Return all rooms that hold the memory at this address. Several rooms may share a page of a known
        prefix."""
        unit = next(self.units(address, 1))
        return {room for room, held in self.holdings.by_room.items() if unit is not None and _in(unit, held)}

    def shared(self, unit: tuple[str, int]) -> bool:
        """Return whether this page holds a known prefix, so that other rooms may read it."""
        return unit[0] == "page 0" and PageId(unit[1]) in self.holdings.prefixes


def _in(unit: tuple[str, int], holding: Holding) -> bool:
    kind, index = unit
    if kind == "slot":
        return index == holding.slot.index
    return index in holding.pages[int(kind.removeprefix("page "))]


class WatchedFabric(MemoryFabric):
    """Asks the product's own pools, on both sides, whenever something lands."""

    def __init__(self, plan: FaultPlan, loop: VirtualLoop, network: Network, trace: Trace) -> None:
        super().__init__(plan)
        self._plan = NO_FAULTS  # until everything is up
        self._loop = loop
        self._network = network
        self._trace = trace
        self._banks: dict[Incarnation, Bank] = {}
        self._rooms: dict[int, tuple[Write, RoomId, str]] = {}
        """Writes under way by identity: the room whose source the sender holds, and the kind (pages,
        records or seals)."""
        self._pending: Counter[tuple[Incarnation, RoomId, str]] = Counter()
        """Number of writes that did not end DONE, by the sender's worker, room and kind."""
        self._sealed: set[tuple[Incarnation, RoomId]] = set()
        self._random_rank = random.Random(f"{plan.seed}/late")
        self.late_share = 0.0
        """Share of rooms whose records and seals reach one rank late."""
        self.late_steps = 0
        self._random_flip = random.Random(f"{plan.seed}/flip")
        self.flip_share = 0.0
        """Share of page writes in which one bit is flipped."""

    def endpoint(self, incarnation: Incarnation, bank: Bank) -> MemoryTransfer:
        self._banks[incarnation] = bank
        return MemoryTransfer(self, incarnation)

    def post(
        self, sender: Incarnation, receiver: Incarnation, source: Region, target: Region, runs: Sequence[Run]
    ) -> Write:
        write = super().post(sender, receiver, source, target, runs)
        bank = self._banks[sender]
        at, to, _ = runs[0]
        rooms = bank.rooms(source.address + at)
        meant = rooms & self._banks[receiver].rooms(target.address + to)
        room = min(meant or rooms, default=RoomId(0))
        if not rooms:
            self._violate("source-pinned", f"{bank.name} sends what no room of it holds", room)
        carries = "pages"
        if target.name == "slots":
            carries = "seals" if to % SLOT_BYTES == SEAL_OFFSET else "records"
            self._come_late(write)
        self._check_order(bank, room, carries)
        self._rooms[id(write)] = (write, room, carries)
        self._pending[bank.worker, room, carries] += 1
        if any(part.due - self._step > self._plan.delay_steps_max + 1 for part in write.parts):
            self._trace.fault(self._loop.time(), "write held", bank.name)
        self._note(bank.name, f"posts {carries}", room, f"{len(runs)} runs to {self._name(receiver)}")
        return write

    def follow(self, plan: FaultPlan) -> None:
        """Use the fault plan from the next put on. Puts that are under way keep what was drawn for them."""
        self._plan = plan

    def land(self, write: Write) -> None:
        sender, receiver = self._banks[write.sender], self._banks[write.receiver]
        if self._network.is_cut(sender.host, receiver.host):
            return
        if write.fails_at is not None and write.fails_at <= self._step:
            super().land(write)
            self._trace.fault(self._loop.time(), "write failed")
            return
        landing = [part for part in write.parts if part.due <= self._step]
        if not landing:
            return
        _, room, carries = self._rooms[id(write)]
        for part in landing:
            written = list(receiver.units(part.target, part.length))
            for unit in written:
                if unit is None:
                    self._violate("no-free-under-write", f"a write outside {receiver.name}'s memory", room)
                elif receiver.shared(unit):
                    text = f"a write of room {room} lands: {unit} of {receiver.name} is others', too"
                    self._violate("shared-is-read-only", text, room)
                else:
                    self._check(receiver, unit, room, WRITABLE, "no-free-under-write")
            if isinstance(part.source, int):
                for unit in sender.units(part.source, part.length):
                    self._check(sender, unit, room, ANY, "source-pinned")
            self._note(receiver.name, f"{written[0]} written", room, f"{part.length} bytes")
        super().land(write)
        if carries == "pages" and self._random_flip.random() < self.flip_share:
            part = self._random_flip.choice(landing)
            at = part.target + self._random_flip.randrange(part.length)
            ctypes.c_uint8.from_address(at).value ^= 1 << self._random_flip.randrange(8)
            self._trace.fault(self._loop.time(), "bit flipped", receiver.name)
        if not write.parts:
            del self._rooms[id(write)]
            self._pending[sender.worker, room, carries] -= 1

    def _come_late(self, write: Write) -> None:
        """Delay a record or seal to one rank of a receiver, long after the others."""
        if self._random_rank.random() < self.late_share:
            self._trace.fault(self._loop.time(), "write held", self._name(write.receiver))
            for part in write.parts:
                part.due += self.late_steps
            write.due = due_next(write)  # or it would be looked at in every step until then

    def _check_order(self, bank: Bank, room: RoomId, carries: str) -> None:
        """Seals follow all pages and records of all ranks, nothing follows a seal (`seal-last`), and one rank
        writes records and seals (`one-writer`)."""
        if carries != "pages" and bank.rank:
            self._violate("one-writer", f"{bank.name} writes {carries} of room {room}", room)
        for earlier in BEFORE[carries]:
            count = self._pending[bank.worker, room, earlier]
            if count:
                text = f"{bank.name} posts {carries} of room {room}: {count} writes of {earlier} are not DONE"
                self._violate("seal-last", text, room)
        if carries == "seals":
            self._sealed.add((bank.worker, room))
        elif (bank.worker, room) in self._sealed:
            self._violate("seal-last", f"{bank.name} posts {carries} of room {room} behind its seal", room)

    def _check(
        self,
        bank: Bank,
        unit: tuple[str, int] | None,
        room: RoomId,
        allowed: frozenset[Standing],
        invariant: str,
    ) -> None:
        owner = None if unit is None else bank.owner(unit, room)
        if owner is not None and owner[0] == room and owner[1].standing in allowed:
            return
        found = "nobody's" if owner is None else f"room {owner[0]}'s ({owner[1].standing.value})"
        self._violate(invariant, f"a write of room {room} lands: {unit} of {bank.name} is {found}", room)

    def _name(self, incarnation: Incarnation) -> str:
        bank = self._banks.get(incarnation)
        return "nobody" if bank is None else bank.name

    def _note(self, who: str, what: str, room: RoomId, detail: str) -> None:
        self._trace.note(self._loop.time(), who, what, room, detail)

    def _violate(self, invariant: str, text: str, room: RoomId) -> None:
        self._trace.violate(self._loop.time(), invariant, text, room)
