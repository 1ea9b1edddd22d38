"""What do the ranks have in place of the leader's outside, when nobody outside talks to them?"""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from services.decode.peers import Peers
from services.parallel.interface import RankGroup
from services.rooms.ids import Generation, Incarnation, RoomId
from services.wire.baton.v1 import inference_pb2, rooms_pb2
from services.wire.mailbox import Mailbox
from services.wire.reporter import Reporter


class SilentReporter(Reporter):
    """The leader reports for its group."""

    def __init__(self) -> None:
        self.dropped = 0

    def note(self, room: RoomId, wall_ms: int, name: str, detail: str = "") -> None: ...

    def retired(self, room: RoomId, wall_ms: int, detail: str = "") -> None: ...


class NoPeers(Peers):
    """The leader connects, grants and closes for its group; what it learns comes as commands."""

    def __init__(self) -> None: ...

    def connect(self, peer: rooms_pb2.Peer, room: RoomId) -> bool:
        return True  # not for a follower to hold up: the leader's vote says when

    def grant(self, peer: rooms_pb2.Peer, request: inference_pb2.GrantRequest) -> None: ...

    def close(self, peer: rooms_pb2.Peer, room: RoomId, generation: Generation) -> None: ...

    def stop_closing(self, room: RoomId) -> None: ...

    def forget(self, peer: Incarnation) -> None: ...

    def doubt(self, peer: Incarnation) -> None: ...

    def doubt_all(self) -> None: ...

    async def stop(self) -> None: ...


class PatientMailbox(Mailbox):
    """Looks less often than production does: each look costs the simulation a turn."""

    def __init__(self, look_s: float) -> None:
        super().__init__()
        self._look_s = look_s

    async def rest(self, bound_s: float) -> None:
        await super().rest(max(bound_s, self._look_s))


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

    async def agree(self, ballot: Sequence[int]) -> list[int]:
        await self._be_late()
        return await self._group.agree(ballot)

    async def broadcast(self, commands: bytes | None) -> bytes:
        await self._be_late()
        return await self._group.broadcast(commands)

    async def close(self) -> None:
        await self._group.close()

    async def _be_late(self) -> Any:
        if self._late_s:
            await asyncio.sleep(self._random.uniform(0.0, self._late_s))
