"""Does every write land where its own room may be written to, at the moment in which it lands?"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.pages.holdings import Holding, Holdings, Standing
from services.pages.record import SLOT_BYTES
from services.rooms.ids import Incarnation
from services.runtime.host_memory import HostMemory
from services.transfer.fabric import MemoryFabric, Write
from services.transfer.faults import NO_FAULTS, FaultPlan
from services.transfer.interface import Region, Run
from services.transfer.memory import MemoryTransfer
from tests.sim.engine import LAYOUT
from tests.sim.loop import VirtualLoop
from tests.sim.network import Network
from tests.sim.trace import Trace

WRITABLE = frozenset({Standing.EXPOSED, Standing.QUARANTINED})


@dataclass(frozen=True, slots=True)
class Bank:
    """One rank's memory, and who holds what of it."""

    name: str
    host: str
    rank: int
    kv: HostMemory
    slots: HostMemory
    holdings: Holdings

    def unit(self, address: int) -> tuple[str, int] | None:
        """Which page or slot lies there. None: memory that was taken back from its writers."""
        if 0 <= address - self.kv.address < self.kv.length:
            return "page", (address - self.kv.address) // LAYOUT.page_bytes
        if 0 <= address - self.slots.address < self.slots.length:
            return "slot", (address - self.slots.address) // SLOT_BYTES
        return None

    def owner(self, unit: tuple[str, int]) -> tuple[int, Holding] | None:
        kind, index = unit
        for room, holding in self.holdings._held.items():
            if index in holding.pages if kind == "page" else index == holding.slot.index:
                return room, holding
        return None


class WatchedFabric(MemoryFabric):
    """Asks the product's own pools, on both sides, whenever something lands."""

    def __init__(self, plan: FaultPlan, loop: VirtualLoop, network: Network, trace: Trace) -> None:
        super().__init__(plan)
        self._plan = NO_FAULTS  # until everything is up
        self._loop = loop
        self._network = network
        self._trace = trace
        self._banks: dict[Incarnation, Bank] = {}
        self._rooms: dict[int, tuple[Write, int]] = {}
        """Of writes under way (by identity): which room its sender held the source for."""

    def endpoint(self, incarnation: Incarnation, bank: Bank) -> MemoryTransfer:
        self._banks[incarnation] = bank
        return MemoryTransfer(self, incarnation)

    def post(
        self, sender: Incarnation, receiver: Incarnation, source: Region, target: Region, runs: Sequence[Run]
    ) -> Write:
        write = super().post(sender, receiver, source, target, runs)
        bank = self._banks[sender]
        unit = bank.unit(source.address + runs[0].source)
        owner = None if unit is None else bank.owner(unit)
        room = 0 if owner is None else owner[0]
        if owner is None:
            self._violate("source-pinned", f"{bank.name} sends {unit}, which no room of it holds", room)
        self._rooms[id(write)] = (write, room)
        if any(part.due - self._step > self._plan.delay_steps_max + 1 for part in write.parts):
            self._trace.fault(self._loop.time(), "write held", bank.name)
        self._note(bank.name, f"posts {target.name}", room, f"{len(runs)} runs to {self._name(receiver)}")
        return write

    def follow(self, plan: FaultPlan) -> None:
        """From the next put on; what is under way does as was drawn."""
        self._plan = plan

    def _land(self, write: Write) -> None:
        sender, receiver = self._banks[write.sender], self._banks[write.receiver]
        if self._network.is_cut(sender.host, receiver.host):
            return
        if write.fails_at is not None and write.fails_at <= self._step:
            super()._land(write)
            self._trace.fault(self._loop.time(), "write failed")
            return
        landing = [part for part in write.parts if part.due <= self._step]
        if not landing:
            return
        room = self._rooms[id(write)][1]
        for part in landing:
            unit = receiver.unit(part.target)
            if unit is None:
                self._violate("no-free-under-write", f"a write outside {receiver.name}'s memory", room)
                continue
            size = LAYOUT.page_bytes if unit[0] == "page" else SLOT_BYTES
            for index in range(unit[1], unit[1] + -(-part.length // size)):
                self._check(receiver, (unit[0], index), room, WRITABLE, "no-free-under-write")
            if isinstance(part.source, int):
                self._check(sender, sender.unit(part.source), room, frozenset(Standing), "source-pinned")
            self._note(receiver.name, f"{unit[0]} {unit[1]} written", room, f"{part.length} bytes")
        super()._land(write)
        if not write.parts:
            del self._rooms[id(write)]

    def _check(
        self,
        bank: Bank,
        unit: tuple[str, int] | None,
        room: int,
        allowed: frozenset[Standing],
        invariant: str,
    ) -> None:
        owner = None if unit is None else bank.owner(unit)
        if owner is not None and owner[0] == room and owner[1].standing in allowed:
            return
        found = "nobody's" if owner is None else f"room {owner[0]}'s ({owner[1].standing.value})"
        self._violate(invariant, f"a write of room {room} lands: {unit} of {bank.name} is {found}", room)

    def _name(self, incarnation: Incarnation) -> str:
        bank = self._banks.get(incarnation)
        return "nobody" if bank is None else bank.name

    def _note(self, who: str, what: str, room: int, detail: str) -> None:
        self._trace.note(self._loop.time(), who, what, room, detail)

    def _violate(self, invariant: str, text: str, room: int) -> None:
        self._trace.violate(self._loop.time(), invariant, text, room)
