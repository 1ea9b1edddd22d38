"""Several ranks of one worker that take turns in one process, without a collective library. Ballots and
verdicts are the product's own. Only the all-reduce is replaced, by `min`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from baton.ids import Incarnation, RoomId
from baton.rooms.ballot import Ballot, read_verdict
from baton.rooms.deadlines import Deadlines
from baton.rooms.errors import Reason
from baton.rooms.phases import AnyEffect, Phase, Vote
from baton.rooms.receiver import Receiver
from baton.rooms.room import Room
from baton.rooms.roster import Capacity, Roster
from baton.rooms.sender import Sender

R = TypeVar("R", bound=Room)

PEER = Incarnation(99)

LIVE: Final = frozenset(
    {
        Phase.BOOTSTRAPPING,
        Phase.WAITING_FOR_INPUT,
        Phase.TRANSFERRING,
        Phase.COMPUTING,
        Phase.SEALING,
    }
)
"""Phases in which a room can still fail. The others are terminal and absorb (`terminal-absorbs`)."""


@dataclass(frozen=True, slots=True)
class Settled(Generic[R]):
    """Result of one turn: each rank's votes, the verdict, and what each rank has to do about it."""

    wishes: Sequence[Sequence[Vote]]
    """Votes of the ranks, as [rank][place]."""
    reasons: Sequence[dict[int, Reason]]
    """Reasons of the ranks' aborts, by rank, then place."""
    verdict: Sequence[Vote]
    """The agreed vote of each place."""
    effects: Sequence[list[tuple[R, AnyEffect]]]
    """[rank], in the order of settling"""


class RosterGroup(Generic[R]):
    """Rosters of one worker's ranks, agreed by MIN."""

    def __init__(self, rosters: Sequence[Roster[R]]) -> None:
        self.rosters = rosters
        self.turn_number = 0

    def open(self, room: int, make: Callable[[RoomId, int], R], now_ms: int) -> list[R]:
        """Open the room on every rank with the same command, as the leader broadcasts it."""
        name = RoomId(room)
        return [roster.open(name, lambda place: make(name, place), now_ms) for roster in self.rosters]

    def turn(
        self, now_ms: int, capacity: Sequence[Capacity], agreed: Callable[[], None] = lambda: None
    ) -> Settled[R]:
        """Vote, agree, settle. `capacity`: each rank's. `agreed`: called when the ranks have met."""
        votes = [
            roster.votes(now_ms, room_for) for roster, room_for in zip(self.rosters, capacity, strict=True)
        ]
        ballots = [
            Ballot(
                self.turn_number,
                roster.digest(),
                may_compute=True,
                may_leave=False,
                votes=wishes,
                reasons=roster.reasons(now_ms, wishes),
            )
            for roster, wishes in zip(self.rosters, votes, strict=True)
        ]
        self.turn_number += 1
        least = [min(words) for words in zip(*(ballot.encode() for ballot in ballots), strict=True)]
        verdicts = [read_verdict(ballot, least) for ballot in ballots]
        agreed()
        return Settled(
            [ballot.votes for ballot in ballots],
            [dict(ballot.reasons) for ballot in ballots],
            verdicts[0].votes,
            [
                roster.settle(verdict.votes, now_ms, verdict.reasons)
                for roster, verdict in zip(self.rosters, verdicts, strict=True)
            ],
        )


def deadlines(ms: int = 100) -> Deadlines:
    """Return the same deadline for every phase, ms."""
    return Deadlines(ms, ms, ms, ms, ms)


def receiver(
    room: RoomId, place: int, *, needed: int = 1, expected: int = 1, now_ms: int = 0, ms: int = 100
) -> Receiver:
    return Receiver(
        room, f"request-{room}", PEER, place, (needed,), deadlines(ms), now_ms, pages_expected=(expected,)
    )


def sender(
    room: RoomId, place: int, *, needed: int = 1, now_ms: int = 0, ms: int = 100, elected: bool = True
) -> Sender:
    return Sender(room, f"request-{room}", PEER, place, (needed,), deadlines(ms), now_ms, elected=elected)
