"""Rank group of a worker with one rank: no communication, but the same checks as in a larger group."""

from collections.abc import Sequence
from typing import Final

from baton.parallel.checks import BallotShape, check_commands, check_gathered
from baton.parallel.rank_group import GroupBroken


class SoloGroup:
    """Rank group with this rank alone (`baton.parallel.rank_group.RankGroup`)."""

    rank: Final = 0
    size: Final = 1
    broken: Final = None

    def __init__(self) -> None:
        self._shape = BallotShape()
        self._closed = False

    async def agree(self, ballot: Sequence[int]) -> list[int]:
        self._check_open()
        self._shape.check(ballot)
        return list(ballot)

    async def broadcast(self, commands: bytes | None) -> bytes:
        self._check_open()
        check_commands(self.rank, commands)
        return commands or b""

    async def gather(self, data: bytes) -> list[bytes]:
        self._check_open()
        check_gathered(data)
        return [data]

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise GroupBroken("rank 0 has left the group")
