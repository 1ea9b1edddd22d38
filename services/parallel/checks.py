"""Checks of the arguments that a rank passes to a collective (ballot, commands, gathered bytes,
rank number)."""

from collections.abc import Sequence

from baton.parallel.rank_group import (
    BALLOT_WORDS_MAX,
    COMMAND_BYTES_MAX,
    GATHER_BYTES_MAX,
    INT64_MAX,
    INT64_MIN,
    BallotRefused,
)
from baton.rooms.ballot import HEADER


class BallotShape:
    """Checker that all ballots of a rank (its lists of votes) have the same length, which the first ballot
    fixes."""

    def __init__(self) -> None:
        self.words: int | None = None

    def check(self, ballot: Sequence[int]) -> None:
        """Check one ballot (a rank's list of votes). The first valid one fixes the length. Raises
        BallotRefused.

        Only numbers of the ballot's header are checked for 64 bits. The other numbers are votes, which are
        small.
        """
        if not 1 <= len(ballot) <= BALLOT_WORDS_MAX:
            raise BallotRefused(f"a ballot of {len(ballot)} words; 1 to {BALLOT_WORDS_MAX} are possible")
        if self.words is not None and len(ballot) != self.words:
            raise BallotRefused(f"a ballot of {len(ballot)} words; the group's first had {self.words}")
        for place, word in enumerate(ballot[:HEADER]):
            if not INT64_MIN <= word <= INT64_MAX:
                raise BallotRefused(f"word {place} of the ballot is {word}: not a signed 64-bit number")
        self.words = len(ballot)


def check_commands(rank: int, commands: bytes | None) -> None:
    """Check the commands that this rank passes to a broadcast, which only the leader (rank 0) may send.

    Raises BallotRefused if the leader passes none, if another rank passes some, or if they are too long.
    """
    if (commands is None) == (rank == 0):
        raise BallotRefused("the leader, and only the leader, brings commands")
    if commands is not None and len(commands) > COMMAND_BYTES_MAX:
        raise BallotRefused(f"{len(commands)} bytes of commands; at most {COMMAND_BYTES_MAX} in one turn")


def check_gathered(data: bytes) -> None:
    """Check the bytes that this rank passes to a gather. Raises BallotRefused if there are too many."""
    if len(data) > GATHER_BYTES_MAX:
        raise BallotRefused(f"{len(data)} bytes to gather; at most {GATHER_BYTES_MAX} a rank")


def check_rank(rank: int, size: int) -> None:
    """Raise ValueError unless `rank` is a valid rank number of a group of `size` ranks."""
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}: ranks are 0 to size - 1, and a group has one at least")
