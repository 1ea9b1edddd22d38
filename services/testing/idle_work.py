"""A worker without rooms, for tests and benchmarks of the turn loop."""

from collections.abc import Sequence

from baton.rooms.phases import AnyEffect, Vote
from baton.rooms.receiver import Receiver
from baton.rooms.room import Room
from baton.rooms.roster import NOTHING, Capacity, Roster


class IdleWork:
    """Worker without rooms: takes part in turns and never has anything to do
    (`baton.worker.turn_loop.Work`)."""

    def __init__(self, room_limit: int) -> None:
        self.roster = Roster[Receiver](room_limit)

    def take_commands(self) -> bytes:
        return b""

    def apply(self, commands: bytes) -> None: ...

    def observe(self) -> bool:
        return False

    def capacity(self) -> Capacity:
        return NOTHING

    def may_compute(self) -> bool:
        return True

    def may_leave(self) -> bool:
        return False

    def connects(self) -> int:
        return 0

    def on_agreement(self, connects: int) -> None: ...

    def record_vote(self, room: Room, wish: Vote, now_ms: int) -> None: ...

    def perform(self, room: Room, effect: AnyEffect) -> None: ...

    def compute(self) -> bool:
        return False

    def gather_payload(self) -> bytes | None:
        return None

    def on_gathered(self, payloads: Sequence[bytes]) -> None: ...

    def record(self, agreement_s: float) -> None: ...

    async def rest(self) -> bool:
        return False

    async def pause(self, most_s: float) -> None: ...
