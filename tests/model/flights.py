"""Which one-sided writes are under way, and what may become of each?

A posted write cannot be recalled. It lands at any later time, for as long as the process that posted it
lives and the memory it is aimed at exists; its poster learns that it ended at any time after that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.pages.record import SEAL_BYTES, SEAL_OFFSET, SLOT_BYTES
from services.prefill.push import KV
from services.rooms.ids import Generation, Incarnation, RoomId
from services.transfer.interface import PutId, PutState, Run
from tests.model.laws import Broken, Law

PAGE, RECORD, SEAL = "page", "record", "seal"


@dataclass(frozen=True, slots=True)
class Flight:
    """One posted write, aimed at memory that was named once and may have changed hands since."""

    number: int
    room: RoomId
    generation: Generation
    peer: Incarnation
    kind: str
    sources: tuple[int, ...]
    """Pages, or the staging slot, that it reads."""
    targets: tuple[int, ...]
    """Pages, or the slot, that it writes."""
    body: bytes = b""
    """What it writes to the slot."""


@dataclass(slots=True)
class Airspace:
    """One sender rank's writes."""

    flying: dict[int, Flight] = field(default_factory=dict)
    ended: dict[int, PutState] = field(default_factory=dict)
    """Landed or failed, and not polled yet."""

    def end(self, number: int, state: PutState) -> None:
        del self.flying[number]
        self.ended[number] = state


@dataclass(slots=True)
class Line:
    """What a `Push` posts through, for one room: the part of `services.transfer.interface.Transfer` that
    it calls."""

    air: Airspace
    room: RoomId
    generation: Generation
    slot_memory: bytearray

    def put(self, peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
        """Numbers are used anew once nobody knows them any more, so that a world's past leaves no trace."""
        number = 0
        while number in self.air.flying or number in self.air.ended:
            number += 1
        if region == KV:
            sources = tuple(page for run in runs for page in range(run.source, run.source + run.length))
            targets = tuple(page for run in runs for page in range(run.target, run.target + run.length))
            flight = Flight(number, self.room, self.generation, peer, PAGE, sources, targets)
        else:
            (run,) = runs
            kind = SEAL if run.length == SEAL_BYTES and run.target % SLOT_BYTES == SEAL_OFFSET else RECORD
            if any(flight.room == self.room for flight in self.air.flying.values()):
                raise Broken(Law.SEAL_LAST, f"room {self.room}: its {kind} is posted while other writes fly")
            body = bytes(self.slot_memory[run.source : run.source + run.length])
            ends = (run.source // SLOT_BYTES,), (run.target // SLOT_BYTES,)
            flight = Flight(number, self.room, self.generation, peer, kind, *ends, body)
        self.air.flying[number] = flight
        return PutId(peer, number)

    def poll(self, put: PutId) -> PutState:
        return self.air.ended.pop(put.number, PutState.PENDING)
