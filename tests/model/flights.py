"""One-sided writes under way, and their possible ends.

A posted write cannot be recalled. It lands at any later time, for as long as the process that posted it
lives and the memory it is aimed at exists; its poster learns that it ended at any time after that. Aimed at
an exposure that was revoked, it ends all the same, and changes nothing that anybody reads.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Final, TypeVar

from baton.ids import Generation, Incarnation, PageTables, RoomId
from baton.pages.record import SEAL_BYTES, SEAL_OFFSET, SLOT_BYTES
from baton.transfer.transfer_protocol import (
    SLOTS,
    Endpoint,
    PutId,
    PutState,
    PutsUnended,
    Run,
    TransferError,
    kv_region,
)
from tests.model.laws import Broken, Law
from tests.model.scopes import Scope
from tests.model.shapes import STRIP, content, layouts, page_key, strips

PAGE, RECORD, SEAL = "page", "record", "seal"
_KINDS: Final = (RECORD, PAGE, SEAL)
SLOT: Final = "slot"
"""Target of records and seals."""

_TIMES: Final = 100
"""A worker exposes its memory less often than that, on …"""
_RANKS: Final = 10
"""… fewer ranks than that."""
_PAGES: Final = 100
"""A rank has fewer than that."""
_OTHERS: Final = 1 << 20
"""Above the numbers of all rooms' writes."""

V = TypeVar("V")


def exposure(receiver: Incarnation, number: int, rank: int) -> Incarnation:
    """Return the id under which a rank of a decode worker exposes its memory for the `number`-th time."""
    return Incarnation((receiver * _TIMES + number) * _RANKS + rank)


def exposed_anew(exposure: Incarnation) -> Incarnation:
    """Return the id under which the same memory is exposed the next time."""
    return Incarnation(exposure + _RANKS)


def exposed_before(exposure: Incarnation) -> Incarnation:
    """Return the id under which the same memory was exposed the time before."""
    return Incarnation(exposure - _RANKS)


def exposed_by(exposure: Incarnation) -> Incarnation:
    return Incarnation(exposure // (_TIMES * _RANKS))


def rank_of(exposure: Incarnation) -> int:
    return exposure % _RANKS


def leaders(exposure: Incarnation) -> Incarnation:
    """Exposure of the receiver's first rank at the same time, which a grant names."""
    return Incarnation(exposure - rank_of(exposure))


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
    """Numbers of pages among those of all KV groups, or the staging slot, that it reads."""
    targets: tuple[int, ...]
    """Pages, or the slot, that it writes."""
    by: int
    """The sender's rank."""
    body: bytes = b""
    """Bytes written to the slot."""
    strips: tuple[tuple[int, int, int], ...] = ()
    """Strips written to pages: page, strip of it, content."""

    @property
    def memory(self) -> str:
        """Return the kind of its targets."""
        return PAGE if self.kind == PAGE else SLOT


@dataclass(slots=True)
class Airspace:
    """One sender rank's writes, and the ways they take: of `baton.transfer.transfer_protocol.Transfer`, what
    the product's `Routes` calls."""

    rank: int
    mine: tuple[tuple[int, ...], ...]
    """Strips of a page of this rank, by KV group."""
    theirs: tuple[tuple[int, ...], ...]
    """Number of strips of a page, by rank of the receiver, then by KV group."""
    flying: dict[int, Flight] = field(default_factory=dict)
    ended: dict[int, tuple[PutState, Incarnation]] = field(default_factory=dict)
    """Landed or failed, and not polled yet; and whereto."""
    up: set[Incarnation] = field(default_factory=set)
    broken: set[Incarnation] = field(default_factory=set)
    gone: set[Incarnation] = field(default_factory=set)
    """Decode workers that do not exist any more."""
    breaks: bool = True
    """A way is seen to be broken once a write on it has failed."""
    reaches: bool = True
    """Whether a new connection can be reached from this rank."""
    unwritten: set[RoomId] = field(default_factory=set)
    """Rooms of which a page's write has failed."""

    @classmethod
    def of(cls, scope: Scope, rank: int) -> "Airspace":
        theirs = tuple(tuple(map(len, strips(layout))) for layout in layouts(scope, 1))
        return cls(rank, strips(layouts(scope, 0)[rank]), theirs, breaks=scope.ways)

    def end(self, number: int, state: PutState) -> None:
        flight = self.flying.pop(number)
        self.ended = _with(self.ended, number, (state, flight.peer))
        if state is PutState.FAILED and flight.kind == PAGE:
            self.unwritten.add(flight.room)

    def give_up(self, room: RoomId, puts: Iterable[PutId], reached: Set[Incarnation]) -> None:
        """Count writes of a room as ended, where that makes no difference any more. `reached`: exposures by
        which memory can still be written."""
        for put in puts:
            flight = self.flying.pop(put.number, None)
            self.ended.pop(put.number, None)
            if flight is not None and flight.peer in reached:
                text = f"room {room} counts as quiet while a {flight.kind} of it can still land"
                raise Broken(Law.SOURCE_PINNED, text)

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
        if exposed_by(peer) in self.gone or not self.reaches:
            raise TransferError("there is nobody")
        if peer in self.broken:
            if peer in self.whereto():
                raise PutsUnended("the connection broke, and puts on it have not ended yet")
            self.broken.remove(peer)
        self.up.add(peer)

    def connected(self, peer: Incarnation) -> bool:
        return peer in self.up

    def disconnect(self, peer: Incarnation, *, gone: bool = False) -> None:
        self.up.discard(peer)
        if peer not in self.whereto():
            self.broken.discard(peer)

    def whereto(self) -> set[Incarnation]:
        """Return targets of writes under way, as far as their poster has looked."""
        return {flight.peer for flight in self.flying.values()} | {peer for _, peer in self.ended.values()}


def _with(writes: dict[int, V], number: int, told: V) -> dict[int, V]:
    """Return the flights sorted by number, because their order cannot be observed."""
    return dict(sorted([*writes.items(), (number, told)], key=itemgetter(0)))


@dataclass(slots=True)
class Line:
    """The part of `Transfer` that a `RoomTransfer` of one room calls."""

    air: Airspace
    room: RoomId
    generation: Generation
    pages: PageTables
    """Pages of the room on this rank by KV group, in the prompt's order."""
    slot_memory: bytearray

    def put(self, peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
        """Post a write, and return its number. The number stands for the content and is reused once no rank
        knows it, so that a state has no trace of its past."""
        if peer not in self.air.up:
            raise TransferError("the way there is not open")
        flight = self._slot(peer, runs) if region == SLOTS else self._pages(peer, region, runs)
        first = _KINDS.index(flight.kind) + len(_KINDS) * (flight.room * _PAGES + flight.sources[0])
        number = first * _RANKS + rank_of(peer)
        while number in self.air.flying or number in self.air.ended:
            number += _OTHERS
        self.air.flying = _with(self.air.flying, number, replace(flight, number=number))
        return PutId(peer, number)

    def poll(self, put: PutId) -> PutState:
        return self.air.poll(put.number)

    def _pages(self, peer: Incarnation, region: str, runs: Sequence[Run]) -> Flight:
        group = [kv_region(each) for each in range(len(self.pages))].index(region)
        strips, theirs = self.air.mine[group], self.air.theirs[rank_of(peer)][group]
        read, written = [], []
        for source, target, length in runs:
            for offset in range(0, length, STRIP):
                page, strip = divmod((source + offset) // STRIP, len(strips))
                holds = content(self.room, self.pages[group].index(page), strips[strip])
                read.append(page_key(group, page))
                to_page, to_strip = divmod((target + offset) // STRIP, theirs)
                written.append((page_key(group, to_page), to_strip, holds))
        sources, targets = dict.fromkeys(read), dict.fromkeys(page for page, _, _ in written)
        return Flight(
            0,
            self.room,
            self.generation,
            peer,
            PAGE,
            tuple(sources),
            tuple(targets),
            self.air.rank,
            strips=tuple(written),
        )

    def _slot(self, peer: Incarnation, runs: Sequence[Run]) -> Flight:
        ((source, target, length),) = runs
        kind = SEAL if length == SEAL_BYTES and target % SLOT_BYTES == SEAL_OFFSET else RECORD
        for flight in self.air.flying.values():
            if kind == SEAL and flight.room == self.room and flight.kind != kind:
                raise Broken(
                    Law.SEAL_LAST, f"room {self.room}: its {kind} is posted while its {flight.kind} flies"
                )
        body = bytes(self.slot_memory[source : source + length])
        ends = (source // SLOT_BYTES,), (target // SLOT_BYTES,)
        return Flight(0, self.room, self.generation, peer, kind, *ends, self.air.rank, body)
