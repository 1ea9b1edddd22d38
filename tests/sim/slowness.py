"""Parts of ranks that are slower in the simulation than in production, or late."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from baton.parallel.rank_group import RankGroup
from baton.runtime.clock import Clock
from baton.worker.mailbox import Mailbox
from baton.worker.turn_loop import Work
from tests.sim.loop import SimulatedProcess


class PatientMailbox(Mailbox):
    """Looks less often than production does: each look costs the simulation a turn."""

    def __init__(self, look_s: float) -> None:
        super().__init__()
        self._look_s = look_s

    async def rest(self, bound_s: float) -> bool:
        return await super().rest(max(bound_s, self._look_s))


class SlowGroup:
    """A rank that is late to every meeting."""

    def __init__(self, group: RankGroup, rng: random.Random, late_s: float) -> None:
        self._group = group
        self._random = rng
        self._late_s = late_s

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def broken(self) -> str | None:
        return self._group.broken

    async def agree(self, ballot: Sequence[int]) -> list[int]:
        await self._be_late()
        return await self._group.agree(ballot)

    async def broadcast(self, commands: bytes | None) -> bytes:
        await self._be_late()
        return await self._group.broadcast(commands)

    async def gather(self, data: bytes) -> list[bytes]:
        await self._be_late()
        return await self._group.gather(data)

    async def close(self) -> None:
        await self._group.close()

    async def _be_late(self) -> Any:
        if self._late_s:
            await asyncio.sleep(self._random.uniform(0.0, self._late_s))


class BusyWork:
    """The work of a rank whose turns take its core for some time."""

    def __init__(self, work: Work, process: SimulatedProcess, turn_s: float) -> None:
        self._work = work
        self._process = process
        self._turn_s = turn_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def observe(self) -> bool:
        self._process.compute(self._turn_s)
        return self._work.observe()


class CoreClock:
    """The clock of a process, read where its core has done all that it took on by now."""

    def __init__(self, clock: Clock, process: SimulatedProcess) -> None:
        self.now_ms = clock.now_ms
        self.wall_ms = clock.wall_ms
        self._clock = clock
        self._process = process

    def host_us(self) -> int:
        return max(self._clock.host_us(), int(self._process.busy_until_s * 1_000_000))


class QueuedArrivals:
    """`baton.worker.pending_events.PendingEvents`: nothing is between the simulated network and the loop."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process

    def waiting(self, lull_us: int) -> bool:
        return self._process.waits

    def came(self) -> None: ...
