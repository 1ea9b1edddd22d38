"""Checks of growth: all ranks of a decode worker grow, retract and release alike, and the oldest room goes
on.

Looked at where each rank begins a step, or finds that there is none to begin.
"""

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from baton.decode.decode_room import DecodeRoom
from baton.handover.receiving_side import ReceivingSide
from baton.ids import PageCounts, RoomId
from baton.rooms.phases import Phase

Violate: TypeAlias = Callable[[str, str, RoomId], None]
"""An invariant, a text and the room that it is about."""
Table: TypeAlias = tuple[tuple[RoomId, Phase, PageCounts], ...]
"""Pages held by each room."""
TURNS_MAX: Final = 8
"""Most turns by which one rank is ahead of another."""


class WorkerGrowth:
    """Growth of all ranks of one decode worker."""

    def __init__(self, ranks: int, violate: Violate) -> None:
        self.retractions = 0
        """Retractions of the leader's rooms."""
        self._violate = violate
        self._turns = [0] * ranks
        self._tables: dict[int, Table] = {}
        """Table of each turn, as its first rank had it."""
        self._retracted = [set[RoomId]() for _ in range(ranks)]
        """Rooms of each rank that are retracted and not released."""

    def look(self, rank: int, receiving: ReceivingSide[DecodeRoom], *, computes: bool) -> None:
        """Check a rank's rooms in a turn in which every rank's engine was free. `computes`: whether a step
        runs now."""
        if len(self._turns) > 1:
            self._compare(rank, tuple(_held(receiving)))
        self._look_at_retractions(rank, receiving)
        if not computes:
            self._look_for_a_step(receiving)

    def _compare(self, rank: int, table: Table) -> None:
        self._turns[rank] += 1
        turn = self._turns[rank]
        first = self._tables.setdefault(turn, table)
        if first != table:
            text = f"rank {rank} holds {table} behind turn {turn}, and another rank {first}"
            self._violate("growth-is-agreed", text, RoomId(0))
        for old in [each for each in self._tables if each < turn - TURNS_MAX]:
            del self._tables[old]

    def _look_at_retractions(self, rank: int, receiving: ReceivingSide[DecodeRoom]) -> None:
        known = self._retracted[rank]
        retracted = [room for room in receiving.roster if room.retracting is not None]
        for room in [each for each in retracted if each.id not in known]:
            self.retractions += rank == 0
            older = [each.id for each in receiving.roster if each.runs and each.age < room.age]
            if not older:
                text = f"room {room.id} is retracted, and none that runs is older"
                self._violate("oldest-goes-on", text, room.id)
        known.clear()
        known.update(room.id for room in retracted)

    def _look_for_a_step(self, receiving: ReceivingSide[DecodeRoom]) -> None:
        """Check that if all rooms with pages run, one of them takes part in a step."""
        holding = [room for room in receiving.roster if room.id in receiving.holdings]
        if holding and all(room.runs and room.cause is None for room in holding):
            oldest = min(holding, key=lambda room: room.age)
            self._violate("oldest-goes-on", f"no room computes, and room {oldest.id} runs", oldest.id)


def _held(receiving: ReceivingSide[DecodeRoom]) -> Iterator[tuple[RoomId, Phase, PageCounts]]:
    holdings = receiving.holdings
    for room in receiving.roster:
        if room.id in holdings:
            yield room.id, room.phase, tuple(map(len, holdings.get(room.id).pages))
