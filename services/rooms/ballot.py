"""What does one rank bring to a turn's agreement, and what do all ranks take from it?

A ballot is a fixed-shape vector of 64-bit integers, agreed element by element by MIN. A value that
must be equal on all ranks is sent with its complement: the minimum of both is the value and its
complement only if every rank sent the same. A wish that one rank's hold must block is sent as 0/1.

    [turn, ~turn, roster digest, ~digest, may compute, may leave, vote of place 0, vote of place 1, …]
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.rooms.errors import RostersDiverged
from services.rooms.phases import Vote

HEADER = 6


@dataclass(frozen=True, slots=True)
class Ballot:
    turn: int
    digest: int
    may_compute: bool
    """This rank's engine is free to start a step."""
    may_leave: bool
    """This rank is draining and holds nothing."""
    votes: Sequence[Vote]

    def encode(self) -> list[int]:
        header = [self.turn, ~self.turn, self.digest, ~self.digest, self.may_compute, self.may_leave]
        return [int(word) for word in header] + [int(vote) for vote in self.votes]


@dataclass(frozen=True, slots=True)
class Verdict:
    compute: bool
    """Every rank's engine is free: all start the step that their equal tables name."""
    leave: bool
    votes: tuple[Vote, ...]


def read_verdict(mine: Ballot, agreed: Sequence[int]) -> Verdict:
    """Decode the minimum over all ranks. Raises RostersDiverged when ranks disagree on turn or rooms."""
    turn, turn_complement, digest, digest_complement, compute, leave = agreed[:HEADER]
    if turn != ~turn_complement:
        raise RostersDiverged(f"turn {mine.turn}: ranks are in different turns ({turn}..{~turn_complement})")
    if digest != ~digest_complement:
        raise RostersDiverged(
            f"turn {mine.turn}: ranks hold different rooms: digests {digest:#x} and {~digest_complement:#x},"
            f" this rank {mine.digest:#x}"
        )
    return Verdict(bool(compute), bool(leave), tuple(Vote(word) for word in agreed[HEADER:]))
