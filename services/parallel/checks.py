"""Checks of a rank's own input to a collective."""

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
    """Length of ballots, which the first ballot fixes."""

    def __init__(self) -> None:
        self.words: int | None = None

    def check(self, ballot: Sequence[int]) -> None:
        """Check a ballot. The first valid one fixes the length. Raises BallotRefused.

        Only the header has arbitrary numbers. The rest are votes, of which there are few values.
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
    """Check a broadcast. Raises BallotRefused if the leader has none, another rank has one, or it is too
    long."""
    if (commands is None) == (rank == 0):
        raise BallotRefused("the leader, and only the leader, brings commands")
    if commands is not None and len(commands) > COMMAND_BYTES_MAX:
        raise BallotRefused(f"{len(commands)} bytes of commands; at most {COMMAND_BYTES_MAX} in one turn")


def check_gathered(data: bytes) -> None:
    """Check the data for a gather. Raises BallotRefused if it is too long."""
    if len(data) > GATHER_BYTES_MAX:
        raise BallotRefused(f"{len(data)} bytes to gather; at most {GATHER_BYTES_MAX} a rank")


def check_rank(rank: int, size: int) -> None:
    """Check that `rank` is in a group of `size` ranks. Raises ValueError."""
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}: ranks are 0 to size - 1, and a group has one at least")
