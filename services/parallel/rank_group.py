"""Protocol of a rank group: agreement and broadcast among the ranks of one worker in every turn.

It is the smallest interface that a turn needs. Backends are `gloo` (one process per rank) and `solo` (one
rank). One conformance suite, `tests/parallel`, runs on each, and on the in-process group of tests and the
simulation.

Every rank makes the same calls in the same order, one at a time. A group that fails once has ended: every
further call raises, and the worker ends.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from baton.rooms.ballot import HEADER, ROOMS_MAX

BALLOT_WORDS_MAX: Final = HEADER + ROOMS_MAX
"""Most numbers in a ballot: its header and one vote for each room."""

COMMAND_BYTES_MAX: Final = 16 << 20
"""Most bytes of commands that the leader may send in one broadcast."""

GATHER_BYTES_MAX: Final = 1 << 20
"""Most bytes that one rank may pass to one gather."""

INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1


class GroupBroken(Exception):
    """The ranks can no longer agree: one left, died, was late, or made another call.

    The text names the turn, and the rank if known. The process cannot recover.
    """


class BallotRefused(ValueError):
    """The arguments that this rank passed to a collective are invalid, which is a bug of the caller.

    Nothing was sent. A ballot may differ in length from earlier ones, or have a number outside 64 bits. The
    bytes may be too long, or come from a rank that is not the leader.
    """


class RankGroup(Protocol):
    """One rank's view of the group of all ranks of a worker, and the collectives that it calls."""

    @property
    def rank(self) -> int:
        """Index of this rank. Rank 0 is the leader."""

    @property
    def size(self) -> int:
        """Number of ranks in the group, >= 1."""

    @property
    def broken(self) -> str | None:
        """Reason why the group has ended, or None. It is set as soon as this rank knows it, also between two
        calls."""

    async def agree(self, ballot: Sequence[int]) -> list[int]:
        """Return the element-wise minimum over all ranks' ballots, the same list on every rank.

        A ballot is a list of signed 64-bit numbers, of which most are votes on rooms. The first ballot fixes
        the length for the life of the group. The ranks' lengths are compared then. Raises BallotRefused,
        GroupBroken.
        """

    async def broadcast(self, commands: bytes | None) -> bytes:
        """Send the leader's `commands` to all ranks, and return them on every rank, in the leader's order.

        The leader passes bytes, possibly empty, and the others None. Raises BallotRefused, GroupBroken.
        """

    async def gather(self, data: bytes) -> list[bytes]:
        """Return the `data` of all ranks in rank order, the same list on every rank. Raises BallotRefused,
        GroupBroken."""

    async def close(self) -> None:
        """Leave the group. Idempotent, and never raises.

        The next call of the other ranks fails. So the ranks first agree that they leave.
        """
