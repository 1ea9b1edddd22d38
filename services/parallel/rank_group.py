"""How do the ranks of one worker reach the same verdict, and hear the same commands, in every turn?

The smallest interface that a turn needs. Backends: `gloo` (one process per rank) and `solo` (one rank). One
conformance suite, `tests/parallel`, runs on each, and on the group within one process that tests and the
simulation use.

Every rank makes the same calls in the same order, one at a time. A group that fails once is over: every
further call raises, and the worker ends.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from baton.rooms.ballot import HEADER, PLACES_MAX

BALLOT_WORDS_MAX: Final = HEADER + PLACES_MAX
"""Longest ballot."""

COMMAND_BYTES_MAX: Final = 16 << 20
"""Longest message of one broadcast."""

GATHER_BYTES_MAX: Final = 1 << 20
"""Longest message that one rank brings to a gathering."""

INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1


class GroupBroken(Exception):
    """The ranks can no longer agree: one left, died, was late, or made another call. Names the turn, and
    the rank where it is known. Not to be recovered from within the process."""


class BallotRefused(ValueError):
    """This rank's own input is wrong: another length than before, a number outside 64 bits, too long a
    message, commands from a rank that does not lead. A bug of the caller; nothing was sent."""


class RankGroup(Protocol):
    """One rank's view of its group."""

    @property
    def rank(self) -> int:
        """0 leads."""

    @property
    def size(self) -> int:
        """Ranks in the group, >= 1."""

    @property
    def broken(self) -> str | None:
        """Why the group is over, as soon as this rank knows it: also between two calls."""

    async def agree(self, ballot: Sequence[int]) -> list[int]:
        """The element-wise minimum over all ranks' ballots, the same list on every rank.

        Numbers are signed 64-bit. The first ballot fixes the length for the life of the group, and the
        ranks' lengths are compared then. Raises BallotRefused, GroupBroken.
        """

    async def broadcast(self, commands: bytes | None) -> bytes:
        """The leader gives `commands` (possibly empty), the others None; all return the leader's bytes,
        in the leader's order. Raises BallotRefused, GroupBroken."""

    async def gather(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, by rank, the same list on every rank. Raises BallotRefused, GroupBroken."""

    async def close(self) -> None:
        """Leave. Idempotent; never raises. The other ranks' next call fails, so leaving is agreed first."""
