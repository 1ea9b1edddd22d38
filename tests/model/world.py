"""One state of the world, and its parts.

The ranks of either side, the control messages under way, what the registry knows of
each room, the two halves of the session, and how much trouble may still strike. Everything is small and
hashable: ranks are numbers of a `Cast`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from baton import ids
from baton.ids import NO_OPENER, Incarnation, RoomId
from baton.rooms.phases import Phase
from tests.model.book import Book, BookStanding, check_book
from tests.model.cast import Cast, Deed
from tests.model.decode_rank import DecodeRank
from tests.model.flights import PAGE, SEAL, Flight, exposure
from tests.model.laws import Broken, Law
from tests.model.opener import Opener, OpenerStanding, check_opener
from tests.model.pair import DecodeLink, LinkStanding, PrefillStream, StreamStanding
from tests.model.prefill_rank import PrefillRank
from tests.model.rank import FIRST_OPENER, Met
from tests.model.scopes import TROUBLES, Scope
from tests.model.shapes import layouts
from tests.model.standing import Standing, check_step

PREFILL, DECODE, BOOTSTRAP = 0, 1, 2
SIDES = ("prefill", "decode", "the bootstrap")

Message = tuple[Any, ...]
"""(to: PREFILL, DECODE or BOOTSTRAP, deed, arguments …)"""
Lag = tuple[int, int, Met]
"""(side, rank, results of the turn's collectives)"""


UNISSUED, GONE, OVER, DEAD = -1, -2, -3, -4
"""Values in place of a room's opener: the room is not issued; its opener is gone without a message; it has
ended, and nobody reads of it; its bootstrap is dead, and another may adopt it."""


class Entry(NamedTuple):
    opener: int
    """Number in `World.openers`, or UNISSUED, GONE or OVER."""
    peers: tuple[Incarnation, Incarnation]
    owner: ids.Opener = NO_OPENER
    """Number of the bootstrap that opened or adopted the room last, in scopes where bootstraps may die."""

    def with_opener(self, opener: int) -> "Entry":
        return Entry(opener, self.peers, self.owner)


class State(NamedTuple):
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    """Their ranks, the leader's first."""
    mail: frozenset[Message]
    rooms: tuple[Entry, ...]
    peers: tuple[Incarnation, Incarnation]
    """Incarnations that live now."""
    left: tuple[int, ...]
    """Remaining occurrences of each kind of TROUBLES."""
    link: int
    """Decode's half of the session, in `World.links`."""
    stream: int
    """Prefill's half of the session, in `World.streams`."""
    stalled: bool = False
    """The prefill worker stands still."""
    draining: int | None = None
    """The side whose worker was asked to leave and has not left."""
    book: int = 0
    """The registry's tables, in `World.books`."""
    lag: Lag | None = None
    """The rank that has not yet done what its worker's last turn asked of it."""

    def ranks(self, side: int) -> tuple[int, ...]:
        return self.senders if side == PREFILL else self.receivers

    def with_ranks(self, side: int, ranks: Sequence[int]) -> "State":
        """Return the state with other ranks. Faster than `_replace`, because ranks change most often."""
        if side == PREFILL:
            return State(tuple(ranks), *self[1:])
        return State(self.senders, tuple(ranks), *self[2:])

    def send(self, *messages: Message) -> "State":
        """Return the state with these messages in its mail, too."""
        return self._replace(mail=self.mail.union(messages))

    def take(self, message: Message) -> "State":
        """Return the state without a message in its mail."""
        return self._replace(mail=self.mail - {message})

    def with_mail(self, mail: frozenset[Message]) -> "State":
        return self._replace(mail=mail)

    def with_room(self, room: RoomId, entry: Entry) -> "State":
        """Return the state with other knowledge of one room."""
        rooms = list(self.rooms)
        rooms[room - 1] = entry
        return self._replace(rooms=tuple(rooms))

    def with_peers(self, peers: tuple[Incarnation, Incarnation]) -> "State":
        return self._replace(peers=peers)

    def with_left(self, left: tuple[int, ...]) -> "State":
        return self._replace(left=left)

    def with_link(self, link: int) -> "State":
        return self._replace(link=link)

    def with_stream(self, stream: int) -> "State":
        return self._replace(stream=stream)

    def with_stalled(self, stalled: bool) -> "State":
        return self._replace(stalled=stalled)

    def with_draining(self, draining: int | None) -> "State":
        return self._replace(draining=draining)

    def with_book(self, book: int) -> "State":
        return self._replace(book=book)

    def with_lag(self, lag: Lag | None) -> "State":
        return self._replace(lag=lag)


class World:
    """The ranks of a scope, and queries to a state."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.casts: tuple[Cast[Standing], Cast[Standing]] = (Cast(check_step), Cast(check_step))
        self.cancels: dict[frozenset[Message], tuple[Message, ...]] = {}
        """Cancels among a mail's messages, by mail."""
        self.links: Cast[LinkStanding] = Cast(unchecked)
        self.streams: Cast[StreamStanding] = Cast(unchecked)
        self.books: Cast[BookStanding] = Cast(check_book)
        self.books.enter(Book(scope))
        self.openers: Cast[OpenerStanding] = Cast(check_opener)
        self.new_opener = self.openers.enter(Opener(scope.choices))
        self.new_adopter = self.openers.enter(Opener(scope.choices, is_adopted=True))
        self.turns: dict[tuple[int, tuple[int, ...], Any], Any] = {}
        """Result of each group's turn: see `tests.model.turns`."""
        self._sound: set[tuple[int, int]] = set()
        self._apart: set[tuple[int, ...]] = set()

    def start(self) -> State:
        first = Incarnation(1)
        nothing = Entry(UNISSUED, (first, first), FIRST_OPENER if self.scope.adopts else NO_OPENER)
        return State(
            self.blank(PREFILL, first),
            self.blank(DECODE, first),
            frozenset(),
            (nothing,) * self.scope.rooms,
            (first, first),
            tuple(getattr(self.scope.budget, name) for name in TROUBLES),
            self.links.enter(DecodeLink(exposure(first, 1, 0), ways=self.scope.ways)),
            self.streams.enter(PrefillStream(first)),
        )

    def blank(self, side: int, incarnation: Incarnation) -> tuple[int, ...]:
        """The ranks of a worker that has just started."""
        ranks = range(len(layouts(self.scope, side)))
        if side == PREFILL:
            return tuple(self.casts[side].enter(PrefillRank(self.scope, rank)) for rank in ranks)
        return tuple(self.casts[side].enter(DecodeRank(self.scope, incarnation, rank)) for rank in ranks)

    def standing(self, side: int, rank: int) -> Standing:
        return self.casts[side].standings[rank]

    def standings(self, state: State, side: int) -> list[Standing]:
        standings = self.casts[side].standings
        return [standings[rank] for rank in state.ranks(side)]

    def is_over(self, entry: Entry) -> bool:
        """Return whether a room has an outcome."""
        return entry.opener in (OVER, DEAD) or (
            entry.opener >= 0 and self.openers.standings[entry.opener].over
        )

    def is_running(self, entry: Entry) -> bool:
        """Return whether a room has no outcome, and its opener lives."""
        return entry.opener >= 0 and not self.openers.standings[entry.opener].over

    def is_local(self, entry: Entry) -> bool:
        """Return whether a room's opener knows that decode computes it."""
        return entry.opener >= 0 and self.openers.standings[entry.opener].local

    def check(self, state: State) -> None:
        """Check what must hold between ranks of different sides, and between the sender's ranks. Raises
        Broken."""
        if state.senders not in self._apart:
            check_writers(self.standings(state, PREFILL))
            self._apart.add(state.senders)
        for sender in state.senders:
            for receiver in state.receivers:
                if (sender, receiver) not in self._sound:
                    self._check_flights(sender, receiver)
                    self._sound.add((sender, receiver))

    def _check_flights(self, sender: int, receiver: int) -> None:
        there = self.standing(DECODE, receiver)
        for flight in self.standing(PREFILL, sender).flying:
            if flight.peer in there.reached_by:
                check_target(flight, there)

    def reached(self, state: State) -> frozenset[Incarnation]:
        """Exposures by which memory can be written."""
        return frozenset(peer for standing in self.standings(state, DECODE) for peer in standing.reached_by)

    def receiver_end(self, state: State) -> tuple[bool, bool]:
        """Whether decode is idle, and whether it has admitted the last room: its client is being answered."""
        at = self.standings(state, DECODE)[0].at(RoomId(len(state.rooms)))
        served = at is not None and at.phase is Phase.SUCCESS and at.cause is None
        return self.side_idle(state, DECODE), served

    def shared_end(self, state: State) -> tuple[bool, bool, bool]:
        """Whether every room has ended, and its end is known wherever it is waited for; whether prefill
        stands still; and whether the last room has not been issued, and who would serve it is there."""
        link, stream = self.links.standings[state.link], self.streams.standings[state.stream]
        idle = (
            not link.closes
            and (state.stalled or (not link.is_asking and stream.idle))
            and all(entry.opener == UNISSUED or self.is_over(entry) for entry in state.rooms)
            and self.books.standings[state.book].idle
        )
        return idle, state.stalled, state.rooms[-1].opener == UNISSUED and not state.stalled

    def side_idle(self, state: State, side: int) -> bool:
        """Return whether on this side every room has ended and every count is back at its start."""
        return all(standing.idle for standing in self.standings(state, side))


def unchecked(before: object, after: object, deed: Deed) -> None:
    """Check nothing: what a half of a session did shows in what follows."""


def check_target(flight: Flight, there: Standing) -> None:
    """Check that a write which may still land is aimed at memory that its room still holds and has not read
    from."""
    kind = flight.memory
    for place in flight.targets:
        room, generation, is_open = there.held.get((kind, place), (None, 0, False))
        if (room, generation) != (flight.room, flight.generation):
            owner = "free" if room is None else f"room {room}'s, generation {generation}"
            text = f"a {flight.kind} of room {flight.room} can still land, and {kind} {place} is {owner}"
            raise Broken(Law.NO_FREE_UNDER_WRITE, text)
        if not is_open:
            text = f"room {room} counts {kind} {place} as its own while a write may still land there"
            raise Broken(Law.EXPOSURE_ON_PAGE, text)


def check_writers(senders: Sequence[Standing]) -> None:
    """Check that one rank writes a room's records and seals. Seals come after every rank has written all its
    pages of the room."""
    telling = {
        (rank, flight.room, flight.kind)
        for rank, standing in enumerate(senders)
        for flight in standing.flying
        if flight.kind != PAGE
    }
    for rank, room, kind in telling:
        if (writers := {each for each, about, _ in telling if about == room}) != {rank}:
            raise Broken(Law.ONE_WRITER, f"ranks {sorted(writers)} all write the record of room {room}")
        for other, standing in enumerate(senders if kind == SEAL else ()):
            pending = any(flight.room == room and flight.kind != SEAL for flight in standing.flying)
            if pending or room in standing.owing:
                wanting = "flies" if pending else "is not written"
                raise Broken(
                    Law.SEAL_LAST,
                    f"r{rank} writes the seal of room {room}, of which something of r{other} {wanting}",
                )


def one_rank(world: World, state: State, side: int, rank: int, deed: tuple[Any, ...]) -> State:
    """Return the state after one rank alone carries out `deed`."""
    ranks = list(state.ranks(side))
    ranks[rank], _ = world.casts[side].do(ranks[rank], deed)
    return state.with_ranks(side, ranks)
