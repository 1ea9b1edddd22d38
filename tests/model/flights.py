"""Which one-sided writes are under way, and what may become of each?

A posted write cannot be recalled. It lands at any later time, for as long as the process that posted it
lives and the memory it is aimed at exists; its poster learns that it ended at any time after that. Aimed at
an exposure that was revoked, it ends all the same, and changes nothing that anybody reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from services.pages.layout import KvLayout
from services.pages.record import SEAL_BYTES, SEAL_OFFSET, SLOT_BYTES
from services.prefill.push import KV
from services.rooms.ids import Generation, Incarnation, RoomId
from services.transfer.interface import Endpoint, PutId, PutState, Run, TransferError
from tests.model.laws import Broken, Law

PAGE, RECORD, SEAL = "page", "record", "seal"

LAYOUT: Final = KvLayout("model", "float16", 1, (0,), (0,), 1)
"""A token a page."""

_EXPOSURES: Final = 1000


def exposure(receiver: Incarnation, number: int) -> Incarnation:
    """Under which name a decode worker's memory is exposed, for the `number`-th time."""
    return Incarnation(receiver * _EXPOSURES + number)


def exposed_by(exposure: Incarnation) -> Incarnation:
    return Incarnation(exposure // _EXPOSURES)


@dataclass(frozen=True, slots=True)
class Flight:
    """One posted write, aimed at memory that was named once and may have changed hands since."""

    number: int
    room: RoomId
    generation: Generation
    peer: Incarnation
    """The exposure that it goes to."""
    kind: str
    sources: tuple[int, ...]
    """Pages, or the staging slot, that it reads."""
    targets: tuple[int, ...]
    """Pages, or the slot, that it writes."""
    body: bytes = b""
    """What it writes to the slot."""


@dataclass(slots=True)
class Airspace:
    """One sender rank's writes, and the ways they take: of `services.transfer.interface.Transfer`, what
    the product's `Ways` calls."""

    flying: dict[int, Flight] = field(default_factory=dict)
    ended: dict[int, tuple[PutState, Incarnation]] = field(default_factory=dict)
    """Landed or failed, and not polled yet; and whereto."""
    up: set[Incarnation] = field(default_factory=set)
    broken: set[Incarnation] = field(default_factory=set)
    gone: set[Incarnation] = field(default_factory=set)
    """Decode workers that do not exist any more."""
    breaks: bool = True
    """A way is seen to be broken once a write on it has failed."""

    def end(self, number: int, state: PutState) -> None:
        self.ended[number] = state, self.flying.pop(number).peer

    def poll(self, number: int) -> PutState:
        if number not in self.ended:
            return PutState.PENDING
        state, peer = self.ended.pop(number)
        if state is PutState.FAILED and self.breaks and peer in self.up:
            self.up.remove(peer)
            self.broken.add(peer)
        return state

    def connect(self, endpoint: Endpoint) -> None:
        peer = endpoint.incarnation
        if exposed_by(peer) in self.gone:
            raise TransferError("there is nobody")
        if peer in self.broken:
            if peer in self.whereto():
                raise TransferError("the connection broke, and puts on it have not ended yet")
            self.broken.remove(peer)
        self.up.add(peer)

    def connected(self, peer: Incarnation) -> bool:
        return peer in self.up

    def disconnect(self, peer: Incarnation) -> None:
        self.up.discard(peer)
        if peer not in self.whereto():
            self.broken.discard(peer)

    def whereto(self) -> set[Incarnation]:
        """Where writes are under way to, as far as their poster has looked."""
        return {flight.peer for flight in self.flying.values()} | {peer for _, peer in self.ended.values()}


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
        if peer not in self.air.up:
            raise TransferError("the way there is not open")
        number = 0
        while number in self.air.flying or number in self.air.ended:
            number += 1
        if region == KV:
            sources = tuple(page for run in runs for page in _pages(run.source, run.length))
            targets = tuple(page for run in runs for page in _pages(run.target, run.length))
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
        return self.air.poll(put.number)


def _pages(start: int, length: int) -> range:
    return range(start // LAYOUT.page_bytes, (start + length) // LAYOUT.page_bytes)
