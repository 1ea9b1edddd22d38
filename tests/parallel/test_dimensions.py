"""Tests that ranks of all dimensions act in step: tensor, pipeline, and a context dimension that no engine
computes yet.

Agreement knows ranks only. Eight of them, two in each dimension, take the product's own turns over its own
tables. Evidence that one context rank alone has or lacks decides for all eight."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

import pytest

from baton.ids import RoomId
from baton.parallel.rank_group import RankGroup
from baton.rooms.errors import Cause, Reason
from baton.rooms.evidence import Connected, Evidence, Failed, Fenced, Proof
from baton.rooms.phases import AnyEffect, Effect, Phase
from baton.rooms.room import Room
from baton.testing.idle_work import IdleWork
from baton.topology import RankCoordinates, Topology
from baton.worker.turn_loop import TurnProgress, take_turn
from tests.parallel.groups import gloo_groups, loopback_groups
from tests.rooms.group import receiver
from tests.support.manual_clock import ManualClock

CUBE: Final = Topology(tensor=2, pipeline=2, context=2)
FAILING: Final = RoomId(7)
STAYING: Final = RoomId(8)
PLACES: Final = 4


class RoomsOnly(IdleWork):
    """`baton.worker.turn_loop.Work` of a rank that only holds rooms."""

    def __init__(self) -> None:
        super().__init__(PLACES)
        self.news: list[tuple[RoomId, Evidence]] = []
        self.performed: list[tuple[RoomId, AnyEffect]] = []
        self.commands = b""

    def take_commands(self) -> bytes:
        commands, self.commands = self.commands, b""
        return commands

    def apply(self, commands: bytes) -> None:
        """Open one room for each byte of the command."""
        for room in map(RoomId, commands):
            self.roster.open(room, partial(receiver, room), 0)

    def observe(self) -> bool:
        news, self.news = self.news, []
        for room, evidence in news:
            assert self.roster.note(room, evidence)
        return bool(news)

    def perform(self, room: Room, effect: AnyEffect) -> None:
        self.performed.append((room.id, effect))
        if effect is Effect.RELEASE:
            self.roster.retire(room.id, 0)

    def phases(self) -> dict[RoomId, Phase]:
        return {room.id: room.phase for room in self.roster}


class Cube:
    """Eight ranks that take turns together."""

    def __init__(self, groups: list[RankGroup]) -> None:
        self._groups = groups
        self._clock = ManualClock()
        self._progress = [TurnProgress(self._clock) for _ in groups]
        self.ranks = [RoomsOnly() for _ in groups]

    def rank_at(self, place: RankCoordinates) -> RoomsOnly:
        return next(rooms for rank, rooms in enumerate(self.ranks) if CUBE.coordinates(rank) == place)

    async def turn(self) -> dict[RoomId, Phase]:
        """The phases of the rooms, the same on every rank."""
        laps = zip(self.ranks, self._groups, self._progress, strict=True)
        await asyncio.gather(*(take_turn(work, group, self._clock, own) for work, group, own in laps))
        first, *others = self.ranks
        for other in others:
            assert other.phases() == first.phases()
            assert other.performed == first.performed
        return first.phases()


@pytest.fixture(params=[loopback_groups, gloo_groups], ids=["loopback", "gloo"])
async def cube(request: pytest.FixtureRequest) -> AsyncIterator[Cube]:
    groups: list[RankGroup] = await request.param(CUBE.ranks)
    yield Cube(groups)
    for group in groups:
        await group.close()


async def test_a_room_waits_for_the_last_context_rank_and_ends_on_all_when_it_fails_there_alone(
    cube: Cube,
) -> None:
    lone = cube.rank_at(RankCoordinates(tensor=0, pipeline=1, context=1))
    cube.ranks[0].commands = bytes([FAILING, STAYING])
    for rank in cube.ranks:
        rank.news += [(STAYING, Connected())] + ([] if rank is lone else [(FAILING, Connected())])
    assert await cube.turn() == {FAILING: Phase.BOOTSTRAPPING, STAYING: Phase.WAITING_FOR_INPUT}
    lone.news.append((FAILING, Connected()))
    assert await cube.turn() == {FAILING: Phase.WAITING_FOR_INPUT, STAYING: Phase.WAITING_FOR_INPUT}

    root = Cause(Reason.TRANSFER_FAILED, "seen by one rank")
    lone.news.append((FAILING, Failed(root)))
    assert await cube.turn() == {FAILING: Phase.FAILED, STAYING: Phase.WAITING_FOR_INPUT}
    assert [rank.roster.get(FAILING).cause for rank in cube.ranks] == [root] * 8

    for rank in cube.ranks:
        if rank is not lone:
            rank.news.append((FAILING, Fenced(Proof.DONE)))
    assert (await cube.turn())[FAILING] is Phase.FAILED
    lone.news.append((FAILING, Fenced(Proof.DONE)))
    assert await cube.turn() == {STAYING: Phase.WAITING_FOR_INPUT}
    assert [len(rank.roster) for rank in cube.ranks] == [1] * 8
    assert lone.performed[-1] == (FAILING, Effect.RELEASE)
