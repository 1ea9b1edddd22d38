"""Tests that ranks agree on why rooms end, however many end at once and however long the texts are."""

import asyncio

import pytest

from baton.handover.turn import CAUSES_MAX, TEXT_MAX
from baton.ids import RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.evidence import Failed
from baton.rooms.phases import Phase
from baton.rooms.receiver import Receiver
from baton.rooms.roster import Roster
from baton.worker.turn_loop import TurnProgress, take_turn
from tests.parallel.groups import loopback_groups
from tests.parallel.test_dimensions import RoomsOnly
from tests.rooms.group import receiver
from tests.support.manual_clock import ManualClock

FIRST = 2**62


@pytest.mark.parametrize(
    "letter",
    ["x", "é", "\N{GRINNING FACE}", "\x01", '"', "\udc80"],
    ids=["ascii", "accent", "emoji", "control", "quote", "surrogate"],
)
async def test_first_cause_wins_whatever_it_is_written_in(letter: str) -> None:
    """A caller may end all of its rooms at once, and say why in its own words."""
    groups, clock = await loopback_groups(2), ManualClock()
    ranks = [RoomsOnly() for _ in groups]
    cause = Cause(Reason.CANCELLED, letter * TEXT_MAX)
    for rank in ranks:
        rank.roster = Roster[Receiver](CAUSES_MAX)
        for room in range(CAUSES_MAX):
            rank.roster.open(RoomId(FIRST + room), lambda place: receiver(RoomId(FIRST + place), place), 0)
    ranks[1].news = [(room.id, Failed(cause)) for room in ranks[1].roster]
    laps = zip(ranks, groups, strict=True)
    await asyncio.gather(*(take_turn(work, group, clock, TurnProgress(clock)) for work, group in laps))
    for rank in ranks:
        assert [(room.phase, room.cause) for room in rank.roster] == [(Phase.FAILED, cause)] * CAUSES_MAX
