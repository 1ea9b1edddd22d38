"""Collectives of many ranks within one process and one event loop, the same way in every run.

For tests and simulations. The last rank to arrive completes a collective for all; a rank that leaves,
is cancelled while it waits, or makes another call than the others ends the group, by name. There is no
clock here, so that no wait has a time-out: a group in which a rank neither calls nor ends waits for
`Loopback.lose`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from baton.parallel.checks import BallotShape, check_commands, check_gathered, check_rank
from baton.parallel.rank_group import GroupBroken

Brought = TypeVar("Brought")
Outcome = TypeVar("Outcome")


@dataclass(slots=True)
class _Collective:
    """One collective call, with the ranks that have arrived in it so far."""

    call: str
    brought: dict[int, Any] = field(default_factory=dict)
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)


class Loopback:
    """The meeting place of one group's ranks."""

    def __init__(self, size: int) -> None:
        check_rank(0, size)
        self.size = size
        self._number = 0
        self._current: _Collective | None = None
        self.broken: str | None = None

    def groups(self) -> "list[LoopbackGroup]":
        """Return each rank's view of the group, by rank."""
        return [LoopbackGroup(self, rank) for rank in range(self.size)]

    def lose(self, rank: int, why: str) -> None:
        """A rank is gone: every waiting and every further call raises GroupBroken, which says so. Only
        the first loss counts."""
        check_rank(rank, self.size)
        if self.broken is not None:
            return
        self.broken = f"rank {rank} {why} (collective {self._number})"
        current, self._current = self._current, None
        if current is not None:
            for waiter in sorted(current.waiting):
                if not current.waiting[waiter].done():
                    current.waiting[waiter].set_exception(GroupBroken(self.broken))

    async def meet(
        self, rank: int, call: str, brought: Brought, combine: Callable[[Mapping[int, Brought]], Outcome]
    ) -> Outcome:
        """Bring something to the group's next collective, and wait for what all ranks' combine to.
        `call` must be the same on every rank."""
        if self.broken is None and self._current is None:
            self._number += 1
            self._current = _Collective(call)
        current = self._current
        if current is not None and current.call != call:
            self.lose(rank, f"called {call} while others called {current.call}")
        elif current is not None and rank in current.brought:
            self.lose(rank, f"called {call} twice at a time")
        if current is None or self.broken is not None:
            raise GroupBroken(self.broken)
        current.brought[rank] = brought
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        current.waiting[rank] = future
        if len(current.brought) == self.size:
            self._current = None
            outcome = combine(current.brought)
            for waiter in sorted(current.waiting):
                current.waiting[waiter].set_result(outcome)
        try:
            return await future
        except asyncio.CancelledError:
            if self._current is current:
                self.lose(rank, "was cancelled while it waited")
            raise


class LoopbackGroup:
    """`baton.parallel.rank_group.RankGroup` of one rank of a `Loopback`."""

    def __init__(self, meeting: Loopback, rank: int) -> None:
        self._meeting = meeting
        self._shape = BallotShape()
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    @property
    def broken(self) -> str | None:
        return self._meeting.broken

    async def agree(self, ballot: Sequence[int]) -> list[int]:
        self._shape.check(ballot)
        return await self._meeting.meet(self._rank, f"agree on {len(ballot)} words", list(ballot), _least)

    async def broadcast(self, commands: bytes | None) -> bytes:
        check_commands(self._rank, commands)
        return await self._meeting.meet(self._rank, "broadcast", commands, _leaders)

    async def gather(self, data: bytes) -> list[bytes]:
        check_gathered(data)
        return await self._meeting.meet(self._rank, "gather", data, _by_rank)

    async def close(self) -> None:
        self._meeting.lose(self._rank, "has left the group")


def _least(ballots: Mapping[int, list[int]]) -> list[int]:
    first, *others = ballots.values()
    return list(map(min, first, *others)) if others else first


def _by_rank(brought: Mapping[int, bytes]) -> list[bytes]:
    return [brought[rank] for rank in sorted(brought)]


def _leaders(commands: Mapping[int, bytes | None]) -> bytes:
    return commands[0] or b""
