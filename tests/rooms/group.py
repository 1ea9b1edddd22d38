"""Several ranks of one worker that take turns in one process, without a collective library. The turns are the
product's own (`baton.handover.turn`). Only the collectives are replaced, the all-reduce by `min`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from baton.handover.turn import Turn
from baton.ids import Incarnation, RoomId
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
        ranks = len(self.rosters)
        turns = [
            Turn(self.turn_number, roster, now_ms, room_for, ranks=ranks)
            for roster, room_for in zip(self.rosters, capacity, strict=True)
        ]
        self.turn_number += 1
        least = [min(words) for words in zip(*(turn.ballot.encode() for turn in turns), strict=True)]
        for turn in turns:
            turn.agree(least)
        agreed()
        causes = [each for each in [turn.causes() for turn in turns] if each is not None]
        return Settled(
            [turn.ballot.votes for turn in turns],
            [dict(turn.ballot.reasons) for turn in turns],
            turns[0].verdict.votes,
            [turn.settle(causes) for turn in turns],
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
