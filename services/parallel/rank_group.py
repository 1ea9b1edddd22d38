"""Protocol of a rank group: agreement and broadcast among the ranks of one worker in every turn.

It is the smallest interface that a turn needs. Backends are `gloo` (one process per rank) and `solo` (one
rank). One conformance suite, `tests/parallel`, runs on each, and on the in-process group of tests and the
simulation.

Every rank makes the same calls in the same order, one at a time. A group that fails once is over: every
further call raises, and the worker ends.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from baton.rooms.ballot import HEADER, ROOMS_MAX

BALLOT_WORDS_MAX: Final = HEADER + ROOMS_MAX
"""Most numbers of a ballot."""

COMMAND_BYTES_MAX: Final = 16 << 20
"""Most bytes of one broadcast."""

GATHER_BYTES_MAX: Final = 1 << 20
"""Most bytes of one rank in a gather."""

INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1


class GroupBroken(Exception):
    """The ranks can no longer agree: one left, died, was late, or made another call.

    The text names the turn, and the rank if known. The process cannot recover.
    """


class BallotRefused(ValueError):
    """This rank's own input is invalid, which is a bug of the caller. Nothing was sent.

    It has another length than before, a number outside 64 bits, is too long, or has commands of a rank that
    does not lead.
    """


class RankGroup(Protocol):
    """View of the group from one rank."""

    @property
    def rank(self) -> int:
        """Index of this rank. Rank 0 leads."""

    @property
    def size(self) -> int:
        """Number of ranks in the group, >= 1."""

    @property
    def broken(self) -> str | None:
        """Reason for which the group is over, or None. It is set as soon as this rank knows it, also
        between two calls."""

    async def agree(self, ballot: Sequence[int]) -> list[int]:
        """Return the element-wise minimum over all ranks' ballots, the same list on every rank.

        Numbers are signed 64-bit. The first ballot fixes the length for the life of the group, and the
        ranks' lengths are compared then. Raises BallotRefused, GroupBroken.
        """

    async def broadcast(self, commands: bytes | None) -> bytes:
        """Return the leader's `commands`, on every rank in the leader's order.

        The leader passes bytes, possibly empty, and the others None. Raises BallotRefused, GroupBroken.
        """

    async def gather(self, data: bytes) -> list[bytes]:
        """Return the `data` of all ranks in rank order, the same list on every rank. Raises BallotRefused,
        GroupBroken."""

    async def close(self) -> None:
        """Leave the group. Idempotent, and never raises. The other ranks' next call fails, so agree to
        leave first."""
