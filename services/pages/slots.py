"""Pool of metadata slots: small buffers that senders write a room's record and seal to.

A slot is zeroed when a room gets it and again when it is released. Each use has its own generation number
(`slot-zero`). So the data of an earlier room, or of its late writer, is never read as the present room's. The
pool owns the memory of the slots, so that no caller can forget to zero them.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from baton.ids import Generation
from baton.pages.errors import IllegalPageMove, OutOfPages
from baton.pages.pool import PAGE_MOVES, PageState
from baton.pages.record import BLANK_SEAL, SEAL_BYTES, SEAL_OFFSET, SLOT_BYTES


@dataclass(frozen=True, slots=True)
class Slot:
    """One use of a metadata slot by one room: the slot's index in its pool, and the generation number of this
    use."""

    index: int
    generation: Generation


class SlotPool:
    """Pool of a fixed number of metadata slots, which lie one after the other in `memory`. A slot has the
    same states as a KV page."""

    def __init__(self, memory: memoryview, first_generation: int = 1) -> None:
        """Make a pool of blank slots. `memory`: writable bytes, a multiple of SLOT_BYTES. `first_generation`:
        generation of the first use, from which later ones count up."""
        slots, rest = divmod(len(memory), SLOT_BYTES)
        if rest or memory.readonly:
            raise ValueError(f"slot memory must be writable and a multiple of {SLOT_BYTES} bytes")
        self._memory = memory
        self._states = [PageState.FREE] * slots
        self._count = dict.fromkeys(PageState, 0) | {PageState.FREE: slots}
        self._tenants: list[Generation | None] = [None] * slots
        """Generation number of the present use of each slot, by slot index. None for a free slot."""
        self._free = list(range(slots))
        self._generation = Generation(first_generation)

    def __len__(self) -> int:
        return len(self._states)

    @property
    def free(self) -> int:
        return len(self._free)

    def census(self) -> Mapping[PageState, int]:
        return dict(self._count)

    def hand_out(self) -> Slot:
        """Reserve a free, blank slot under a new generation. Raises OutOfPages if none is free."""
        if not self._free:
            raise OutOfPages(f"all {len(self)} metadata slots are taken")
        slot = Slot(heapq.heappop(self._free), self._generation)
        self._generation = Generation(self._generation + 1)
        self._tenants[slot.index] = slot.generation
        self._move(slot, PageState.RESERVED)
        self._zero(slot)
        return slot

    def expose(self, slot: Slot) -> None:
        self._move(slot, PageState.EXPOSED)

    def commit(self, slot: Slot) -> None:
        self._move(slot, PageState.COMMITTED)

    def quarantine(self, slot: Slot) -> None:
        self._move(slot, PageState.QUARANTINED)

    def release(self, slot: Slot) -> None:
        """Free a slot and zero it. Raises IllegalPageMove for a state that forbids it, such as EXPOSED."""
        self._move(slot, PageState.FREE)
        self._zero(slot)
        self._tenants[slot.index] = None
        heapq.heappush(self._free, slot.index)

    def view(self, slot: Slot) -> memoryview:
        """Return the SLOT_BYTES bytes of a slot as a writable view. The view is valid until the slot is
        released."""
        self._check_tenant(slot)
        start = slot.index * SLOT_BYTES
        return self._memory[start : start + SLOT_BYTES]

    def is_touched(self, slot: Slot) -> bool:
        """Return whether a peer has written any byte of a slot's seal (the mark that all data is written).
        Whether the seal is valid, `read_slot` checks."""
        self._check_tenant(slot)
        start = slot.index * SLOT_BYTES + SEAL_OFFSET
        return self._memory[start : start + SEAL_BYTES] != BLANK_SEAL

    def moved(self, memory: memoryview) -> None:
        """Use `memory` as the memory of all slots from now on. The caller has copied the bytes of the old
        memory to it."""
        if len(memory) != len(self._memory) or memory.readonly:
            raise ValueError(f"{len(memory)} bytes for {len(self)} slots")
        self._memory = memory

    def _zero(self, slot: Slot) -> None:
        self.view(slot)[:] = bytes(SLOT_BYTES)

    def _check_tenant(self, slot: Slot) -> None:
        if self._tenants[slot.index] != slot.generation:
            raise IllegalPageMove(f"slot {slot.index}: tenancy {slot.generation} is over")

    def _move(self, slot: Slot, to: PageState) -> None:
        self._check_tenant(slot)
        state = self._states[slot.index]
        if (state, to) not in PAGE_MOVES:
            raise IllegalPageMove(f"slot {slot.index}: {state.value} to {to.value}")
        self._states[slot.index] = to
        self._count[state] -= 1
        self._count[to] += 1
