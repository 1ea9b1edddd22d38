"""Tests of a turn of one rank: what it returns when, what it refuses, and which turn follows."""

import json
from functools import partial
from typing import Any

import pytest

from baton.handover.turn import CAUSES_MAX, TEXT_MAX, Lap, Turn
from baton.ids import RoomId
from baton.rooms.errors import Cause, LocalBug, Reason, RostersDiverged
from baton.rooms.evidence import Connected, Failed
from baton.rooms.phases import Effect, Phase, Vote
from baton.rooms.receiver import Receiver
from baton.rooms.roster import Capacity, Roster
from tests.rooms.group import receiver

ROOM = RoomId(7)
FREE = Capacity((4,), 4)
NO_SLOT = Capacity((4,), 0)
LOST_WRITE = Cause(Reason.TRANSFER_FAILED, "a write was lost")


def one_room(*evidence: Any) -> Roster[Receiver]:
    """Return a roster with one room, and this evidence of it."""
    roster: Roster[Receiver] = Roster(2)
    roster.open(ROOM, partial(receiver, ROOM), 0)
    for each in evidence:
        roster.note(ROOM, each)
    return roster


def voted(
    roster: Roster[Receiver], *, ranks: int = 1, capacity: Capacity = FREE, **may: Any
) -> Turn[Receiver]:
    return Turn(3, roster, 0, capacity, ranks=ranks, **may)


def met(*turns: Turn[Receiver]) -> None:
    """Let all ranks agree."""
    least = [min(words) for words in zip(*(turn.ballot.encode() for turn in turns), strict=True)]
    for turn in turns:
        turn.agree(least)


def settled(*turns: Turn[Receiver]) -> list[list[tuple[Receiver, Any]]]:
    """Let all ranks agree, exchange their causes and move. Return the moves by rank."""
    met(*turns)
    causes = [each for each in [turn.causes() for turn in turns] if each is not None]
    return [turn.settle(causes) for turn in turns]


@pytest.mark.parametrize(
    "act",
    [
        lambda turn: turn.settle(),
        lambda turn: turn.causes(),
        lambda turn: list(turn.dissents()),
        lambda turn: turn.computes,
        lambda turn: turn.end(found=False, more=False),
    ],
    ids=["settle", "causes", "dissents", "computes", "end"],
)
def test_apply_verdict_nothing_follows_before_all_ranks_have_agreed(act: Any) -> None:
    roster = one_room(Connected())
    with pytest.raises(LocalBug, match="turn 3"):
        act(voted(roster, ranks=2))
    assert roster.get(ROOM).phase is Phase.BOOTSTRAPPING


def test_a_turn_moves_its_rooms_once_and_before_it_ends() -> None:
    turn = voted(one_room(Connected()))
    met(turn)
    with pytest.raises(LocalBug, match="before its rooms have moved"):
        turn.end(found=False, more=False)
    assert [effect for _, effect in turn.settle()] == [Effect.QUEUE]
    with pytest.raises(LocalBug, match="settles twice"):
        turn.settle()


def test_divergence_detected_before_anything_moves() -> None:
    one, other = voted(one_room(Connected())), voted(Roster(2))
    with pytest.raises(RostersDiverged):
        met(one, other)
    with pytest.raises(LocalBug):
        one.settle()


def test_first_cause_wins_on_the_rank_that_saw_nothing() -> None:
    rosters = [one_room(Failed(LOST_WRITE)), one_room(Connected())]
    moves = settled(*(voted(roster, ranks=2) for roster in rosters))
    assert [[effect for _, effect in each] for each in moves] == [[Effect.FENCE]] * 2
    assert [roster.get(ROOM).cause for roster in rosters] == [LOST_WRITE] * 2
    assert [roster.get(ROOM).ended_for for roster in rosters] == [LOST_WRITE.reason] * 2


def test_no_rank_of_a_group_moves_without_the_causes_of_all() -> None:
    turns = [voted(one_room(Failed(LOST_WRITE)), ranks=2) for _ in range(2)]
    met(*turns)
    with pytest.raises(LocalBug, match="without the causes"):
        turns[0].settle()


def test_causes_are_bounded_in_number_and_length() -> None:
    roster: Roster[Receiver] = Roster(CAUSES_MAX + 1)
    for number in range(CAUSES_MAX + 1):
        room = RoomId(1 + number)
        roster.open(room, partial(receiver, room), 0)
        roster.note(room, Failed(Cause(Reason.CANCELLED, "x" * (TEXT_MAX + 1))))
    turn = voted(roster, ranks=2)
    met(turn)
    told = json.loads(turn.causes() or b"")
    assert len(told) == CAUSES_MAX
    assert {len(text) for _, text in told} == {TEXT_MAX}


def test_a_rank_reports_its_votes_that_others_did_not_share() -> None:
    ahead, failing = one_room(Connected()), one_room(Failed(LOST_WRITE))
    turns = [voted(ahead, ranks=2), voted(failing, ranks=2)]
    met(*turns)
    told = [[(room.id, vote) for room, vote in turn.dissents()] for turn in turns]
    assert told == [[(ROOM, Vote.ADVANCE)], [(ROOM, Vote.ABORT)]]
    turns = [voted(one_room(Connected()), ranks=2) for _ in range(2)]
    met(*turns)
    assert not list(turns[0].dissents()), "all voted alike"
    alone = voted(one_room(Failed(LOST_WRITE)))
    met(alone)
    assert not list(alone.dissents()), "there is no other rank"


def test_a_step_starts_if_the_engine_of_every_rank_is_free() -> None:
    turns = [voted(one_room(), ranks=2, may_compute=free) for free in (True, False)]
    met(*turns)
    assert [turn.computes for turn in turns] == [False] * 2


def test_all_ranks_leave_together_or_none() -> None:
    turns = [voted(Roster(2), ranks=2, may_leave=may) for may in (True, False)]
    settled(*turns)
    assert Lap.LAST not in [turn.end(found=False, more=False) for turn in turns]
    turns = [voted(Roster(2), ranks=2, may_leave=True) for _ in range(2)]
    settled(*turns)
    assert [turn.end(found=True, more=True) for turn in turns] == [Lap.LAST] * 2


@pytest.mark.parametrize(
    ("evidence", "found", "more", "ranks", "lap"),
    [
        ((Connected(),), False, False, 1, Lap.QUEUED),
        ((Connected(),), True, False, 1, Lap.BUSY),
        ((Failed(LOST_WRITE),), False, False, 1, Lap.BUSY),
        ((), True, False, 1, Lap.BUSY),
        ((), False, True, 1, Lap.BUSY),
        ((), False, False, 1, Lap.IDLE),
        ((), False, False, 2, Lap.IDLE),
    ],
)
def test_the_next_turn_follows_as_soon_as_it_may_have_something_to_do(
    evidence: tuple[Any, ...], found: bool, more: bool, ranks: int, lap: Lap
) -> None:
    turns = [voted(one_room(*evidence), ranks=ranks) for _ in range(ranks)]
    settled(*turns)
    assert {turn.end(found=found, more=more) for turn in turns} == {lap}


@pytest.mark.parametrize(("ranks", "lap"), [(1, Lap.IDLE), (2, Lap.BUSY)])
def test_after_a_grant_a_group_takes_one_more_turn_in_which_it_leaves(ranks: int, lap: Lap) -> None:
    rosters = [one_room(Connected()) for _ in range(ranks)]
    settled(*(voted(roster, ranks=ranks) for roster in rosters))
    turns = [voted(roster, ranks=ranks) for roster in rosters]
    settled(*turns)
    assert {roster.get(ROOM).phase for roster in rosters} == {Phase.TRANSFERRING}
    assert {turn.end(found=False, more=False) for turn in turns} == {lap}


def test_a_rank_with_evidence_that_another_lacks_looks_again_soon() -> None:
    turns = [voted(one_room(*evidence), ranks=2) for evidence in ((Connected(),), ())]
    settled(*turns)
    assert [turn.end(found=False, more=False) for turn in turns] == [Lap.BEHIND, Lap.IDLE]
    turns = [voted(one_room(), ranks=2, may_compute=free) for free in (True, False)]
    settled(*turns)
    assert [turn.end(found=False, more=False) for turn in turns] == [Lap.BEHIND, Lap.IDLE]


def test_a_room_without_space_waits_and_no_turn_follows_at_once() -> None:
    roster = one_room(Connected())
    settled(voted(roster))
    turn = voted(roster, capacity=NO_SLOT)
    assert settled(turn) == [[]]
    assert turn.end(found=False, more=False) is Lap.IDLE
