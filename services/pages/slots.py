"""Which metadata slot belongs to whom, and is it blank?

A slot is zeroed when it is handed out AND when it is released, and each hand-out has a generation of
its own (`slot-zero`): what an earlier tenant, or its late writer, left behind is never read as ours.
The pool owns the slots' memory, so that zeroing cannot be forgotten by a caller.
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
    """One tenancy."""

    index: int
    generation: Generation


class SlotPool:
    """A fixed number of metadata slots over `memory`, in the same states as pages."""

    def __init__(self, memory: memoryview, first_generation: int = 1) -> None:
        """`memory`: writable bytes, a multiple of SLOT_BYTES. Generations count up from the given one."""
        slots, rest = divmod(len(memory), SLOT_BYTES)
        if rest or memory.readonly:
            raise ValueError(f"slot memory must be writable and a multiple of {SLOT_BYTES} bytes")
        self._memory = memory
        self._states = [PageState.FREE] * slots
        self._count = dict.fromkeys(PageState, 0) | {PageState.FREE: slots}
        self._tenants: list[Generation | None] = [None] * slots
        """Generation of the tenancy that each slot is in."""
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
        """Take a free slot, blank, under a fresh generation. Raises OutOfPages."""
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
        """To FREE, and blank, from a state that allows it: never from EXPOSED."""
        self._move(slot, PageState.FREE)
        self._zero(slot)
        self._tenants[slot.index] = None
        heapq.heappush(self._free, slot.index)

    def view(self, slot: Slot) -> memoryview:
        """The slot's SLOT_BYTES bytes, for as long as the tenancy lasts."""
        self._check_tenant(slot)
        start = slot.index * SLOT_BYTES
        return self._memory[start : start + SLOT_BYTES]

    def is_touched(self, slot: Slot) -> bool:
        """Something was written where its seal goes: `read_slot` says what."""
        self._check_tenant(slot)
        start = slot.index * SLOT_BYTES + SEAL_OFFSET
        return self._memory[start : start + SEAL_BYTES] != BLANK_SEAL

    def moved(self, memory: memoryview) -> None:
        """The same bytes lie there from now on."""
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
