"""Tests of the roster of open rooms, and of the cancels and retired rooms that it remembers."""

import pytest

from baton.ids import NO_OPENER, Opener, RoomId
from baton.rooms.errors import Cause, LocalBug, NotOrphaned, Reason, RoomExists, RosterFull, UnknownRoom
from baton.rooms.evidence import Connected, Failed, Finished
from baton.rooms.phases import Phase, Vote
from baton.rooms.receiver import Receiver
from baton.rooms.roster import FOREIGN, ORPHAN, TOMBSTONE_MS, TOMBSTONES_MAX, Capacity, Roster
from tests.rooms.group import receiver

GONE = Cause(Reason.CLIENT_GONE, "hung up")
PLENTY = Capacity(pages=(1000,), slots=1000)


OURS, THEIRS = Opener(11), Opener(22)


def opened(
    roster: Roster[Receiver], room: int, *, needed: int = 1, now_ms: int = 0, opener: Opener = NO_OPENER
) -> Receiver:
    name = RoomId(room)

    def make(place: int) -> Receiver:
        made = receiver(name, place, needed=needed, now_ms=now_ms)
        made.opener = opener
        return made

    return roster.open(name, make, now_ms)


def waiting(roster: Roster[Receiver], room: int, needed: int) -> Receiver:
    held = opened(roster, room, needed=needed)
    held.note(Connected())
    verdicts = [Vote.STAY] * roster.size
    verdicts[held.index] = Vote.ADVANCE
    roster.settle(verdicts, 0)
    return held


def test_the_lowest_free_place_is_taken() -> None:
    roster = Roster[Receiver](3)
    assert [opened(roster, room).index for room in (7, 8, 9)] == [0, 1, 2]
    roster.retire(RoomId(8), 0)
    assert opened(roster, 10).index == 1


def test_a_full_roster_refuses_and_keeps_the_remembered_cancel() -> None:
    roster = Roster[Receiver](1)
    opened(roster, 7)
    roster.cancel(RoomId(8), GONE, 0)
    with pytest.raises(RosterFull):
        opened(roster, 8)
    roster.retire(RoomId(7), 0)
    assert opened(roster, 8).cause == GONE


def test_room_unique_an_id_is_never_used_twice() -> None:
    roster = Roster[Receiver](2)
    opened(roster, 7)
    with pytest.raises(RoomExists):
        opened(roster, 7)
    roster.retire(RoomId(7), 0)
    with pytest.raises(RoomExists):
        opened(roster, 7)
    assert opened(roster, 8).index == 0, "it took no place"


def test_a_room_that_could_not_be_made_takes_no_place() -> None:
    roster = Roster[Receiver](1)

    def fails(place: int) -> Receiver:
        raise ValueError("bad request")

    with pytest.raises(ValueError, match="bad request"):
        roster.open(RoomId(7), fails, 0)
    assert opened(roster, 7).index == 0


def test_a_room_made_under_another_name_is_a_bug() -> None:
    roster = Roster[Receiver](1)
    with pytest.raises(LocalBug):
        roster.open(RoomId(7), lambda place: receiver(RoomId(8), place), 0)


def test_unknown_has_one_meaning() -> None:
    roster = Roster[Receiver](1)
    opened(roster, 7)
    roster.retire(RoomId(7), 0)
    for room in (7, 8):
        with pytest.raises(UnknownRoom, match=f"room {room} is not known here"):
            roster.get(RoomId(room))


def test_terminal_creates_nothing_late_news_is_counted_and_dropped() -> None:
    roster = Roster[Receiver](2)
    opened(roster, 7)
    roster.retire(RoomId(7), 0)
    for room in (7, 8):
        assert not roster.note(RoomId(room), Failed(GONE))
        assert not roster.note(RoomId(room), Finished())
    assert roster.dropped == {"Failed": 2, "Finished": 2}
    assert len(roster) == 0
    assert opened(roster, 8).cause is None


def test_cancel_remembered() -> None:
    roster = Roster[Receiver](1)
    assert not roster.cancel(RoomId(7), GONE, 0)
    assert len(roster) == 0
    room = opened(roster, 7)
    assert room.cause == GONE
    assert roster.votes(0, PLENTY) == [Vote.ABORT]


def test_cancel_remembered_keeps_the_first_cause_and_expires() -> None:
    roster = Roster[Receiver](2)
    roster.cancel(RoomId(7), GONE, 0)
    roster.cancel(RoomId(7), Cause(Reason.CANCELLED, "later"), 5)
    roster.cancel(RoomId(8), GONE, 0)
    assert opened(roster, 7, now_ms=TOMBSTONE_MS - 1).cause == GONE
    assert opened(roster, 8, now_ms=TOMBSTONE_MS).cause is None


def test_a_cancel_of_a_retired_room_leaves_it_retired() -> None:
    roster = Roster[Receiver](1)
    opened(roster, 7)
    roster.retire(RoomId(7), 0)
    assert not roster.cancel(RoomId(7), GONE, 0)
    assert roster.retired(RoomId(7))
    with pytest.raises(RoomExists):
        opened(roster, 7)


def test_a_cancel_of_a_retired_room_is_for_no_later_room_of_that_id() -> None:
    roster = Roster[Receiver](1)
    opened(roster, 7)
    roster.retire(RoomId(7), 0)
    roster.cancel(RoomId(7), GONE, 10)
    assert opened(roster, 7, now_ms=TOMBSTONE_MS).cause is None


def test_opener_owns_a_cancel_of_another_router_is_counted_and_changes_nothing() -> None:
    roster = Roster[Receiver](1)
    room = opened(roster, 7, opener=OURS)
    assert not roster.cancel(RoomId(7), GONE, 0, THEIRS)
    assert not roster.cancel(RoomId(7), GONE, 0)
    assert room.cause is None
    assert roster.dropped == {FOREIGN: 2}
    assert roster.cancel(RoomId(7), GONE, 0, OURS)
    assert room.cause == GONE


def test_opener_owns_a_remembered_cancel_is_for_rooms_of_its_router() -> None:
    roster = Roster[Receiver](1)
    roster.cancel(RoomId(7), GONE, 0, THEIRS)
    assert opened(roster, 7, opener=OURS).cause is None
    roster.retire(RoomId(7), 0)
    roster.cancel(RoomId(8), Cause(Reason.CANCELLED, "theirs"), 0, THEIRS)
    roster.cancel(RoomId(8), GONE, 0, OURS)
    assert opened(roster, 8, opener=OURS).cause == GONE


def test_opener_owns_an_id_is_open_once_whoever_opens_it() -> None:
    roster = Roster[Receiver](2)
    opened(roster, 7, opener=OURS)
    with pytest.raises(RoomExists):
        opened(roster, 7, opener=THEIRS)
    assert roster.get(RoomId(7)).opener == OURS
    roster.retire(RoomId(7), 0)
    with pytest.raises(RoomExists):
        opened(roster, 7, opener=THEIRS)


def test_a_room_without_an_opener_obeys_every_router() -> None:
    roster = Roster[Receiver](1)
    room = opened(roster, 7)
    assert roster.cancel(RoomId(7), GONE, 0, THEIRS)
    assert room.cause == GONE


def orphan(roster: Roster[Receiver], room: int = 7, until_ms: int = 500) -> Receiver:
    held = opened(roster, room, opener=OURS)
    assert roster.orphan(held.id, OURS, until_ms)
    return held


def test_adopt_first_wins_an_orphan_is_given_once_and_its_former_router_is_refused() -> None:
    roster = Roster[Receiver](1)
    held = orphan(roster)
    assert roster.adopt(held.id, THEIRS) is held
    assert (held.opener, held.term, held.is_orphan) == (THEIRS, 1, False)
    with pytest.raises(NotOrphaned):
        roster.adopt(held.id, Opener(33))
    roster.cancel(held.id, GONE, 0, OURS)
    assert not roster.orphan(held.id, OURS, 9), "the late end of the former router's stream"
    assert (held.cause, held.is_orphan, roster.dropped[FOREIGN]) == (None, False, 2)
    assert roster.cancel(held.id, GONE, 0, THEIRS)
    assert (roster.orphaned, roster.adopted) == (1, 1)


def test_adopt_first_wins_a_room_that_its_router_reads_or_that_is_over_is_not_given() -> None:
    roster = Roster[Receiver](3)
    read, failed = opened(roster, 1, opener=OURS), orphan(roster, 2)
    failed.note(Failed(GONE))
    verdicts = [Vote.STAY, Vote.ABORT, Vote.STAY]
    roster.settle(verdicts, 0, {failed.index: GONE.reason})
    for room in (read, failed):
        with pytest.raises(NotOrphaned):
            roster.adopt(room.id, THEIRS)
    with pytest.raises(UnknownRoom):
        roster.adopt(RoomId(3), THEIRS)


def test_adopt_first_wins_what_one_rank_alone_has_seen_does_not_decide() -> None:
    roster = Roster[Receiver](1)
    held = orphan(roster)
    held.note(Failed(GONE))
    assert roster.adopt(held.id, THEIRS).cause == GONE, "the ranks vote on its end"


def test_adopt_first_wins_the_later_adoption_has_the_higher_term() -> None:
    roster = Roster[Receiver](1)
    held = opened(roster, 7, opener=OURS)
    assert roster.adopt(held.id, Opener(33), 2).term == 2, "decided elsewhere, before the stream broke here"
    for late in (1, 2):
        with pytest.raises(NotOrphaned):
            roster.adopt(held.id, THEIRS, late)
    assert held.opener == Opener(33)


def test_orphan_ends_a_room_that_nobody_adopts_ends_in_time() -> None:
    roster = Roster[Receiver](1)
    held = orphan(roster, until_ms=50)
    assert held.deadline_ms == 50
    assert held.vote(49, has_capacity=False) is Vote.STAY
    assert held.vote(50, has_capacity=False) is Vote.ABORT
    cause = held.ending(50)
    assert cause is not None
    assert cause.reason is Reason.ORPHANED
    roster.adopt(held.id, THEIRS)
    assert held.ending(50) is None


def test_orphan_ends_the_proof_of_a_failed_orphan_is_awaited_as_of_any_other() -> None:
    roster = Roster[Receiver](1)
    held = orphan(roster, until_ms=50)
    roster.settle([Vote.ABORT], 70, {held.index: Reason.ORPHANED})
    assert held.deadline_ms == 70 + held.deadlines.fence_ms


def test_a_broken_stream_of_a_room_that_is_not_here_is_counted() -> None:
    roster = Roster[Receiver](1)
    assert not roster.orphan(RoomId(7), OURS, 500)
    assert roster.dropped[ORPHAN] == 1


def test_exact_match_a_cancel_ends_one_room() -> None:
    roster = Roster[Receiver](3)
    rooms = [opened(roster, room) for room in (1, 12, 121)]
    assert roster.cancel(RoomId(12), GONE, 0)
    assert [room.cause for room in rooms] == [None, GONE, None]


def test_tombstones_are_bounded_and_the_oldest_go_first() -> None:
    roster = Roster[Receiver](1)
    for room in range(1, TOMBSTONES_MAX + 3):
        roster.cancel(RoomId(room), GONE, 0)
    assert opened(roster, 1).cause is None
    roster.retire(RoomId(1), 0)
    assert opened(roster, TOMBSTONES_MAX + 2).cause == GONE


def test_retire_is_idempotent_and_the_only_way_out() -> None:
    roster = Roster[Receiver](1)
    opened(roster, 7)
    assert RoomId(7) in roster
    assert roster.retire(RoomId(7), 0)
    assert not roster.retire(RoomId(7), 0)
    assert not roster.retire(RoomId(8), 0)
    assert not roster.retired(RoomId(8))
    assert (len(roster), list(roster)) == (0, [])


def test_no_starvation_capacity_goes_in_the_order_of_opening() -> None:
    roster = Roster[Receiver](4)
    for room, needed in ((1, 3), (2, 4), (3, 1)):
        waiting(roster, room, needed)
    assert roster.votes(1, Capacity((8,), 3))[:3] == [Vote.ADVANCE] * 3
    assert roster.votes(1, Capacity((8,), 2))[:3] == [Vote.ADVANCE, Vote.ADVANCE, Vote.STAY]
    assert roster.votes(1, Capacity((6,), 3))[:3] == [Vote.ADVANCE, Vote.STAY, Vote.STAY]
    assert roster.votes(1, Capacity((2,), 3))[:3] == [Vote.STAY] * 3


def test_no_starvation_the_order_is_of_opening_and_not_of_places() -> None:
    roster = Roster[Receiver](2)
    waiting(roster, 1, 1)
    waiting(roster, 2, 2)
    roster.retire(RoomId(1), 0)
    waiting(roster, 3, 1)
    assert roster.get(RoomId(3)).index == 0
    assert roster.votes(1, Capacity((1,), 2)) == [Vote.STAY, Vote.STAY]
    assert roster.votes(1, Capacity((2,), 2)) == [Vote.STAY, Vote.ADVANCE]


def test_no_starvation_a_failure_waits_for_no_capacity_and_holds_none() -> None:
    roster = Roster[Receiver](3)
    waiting(roster, 1, 100)
    waiting(roster, 2, 1)
    roster.cancel(RoomId(1), GONE, 0)
    assert roster.votes(1, Capacity((1,), 1)) == [Vote.ABORT, Vote.ADVANCE, Vote.STAY]


def test_a_place_that_is_empty_votes_to_stay() -> None:
    assert Roster[Receiver](2).votes(10**9, PLENTY) == [Vote.STAY, Vote.STAY]


def test_the_digest_tells_who_sits_where_and_in_which_phase() -> None:
    def roster_of(*rooms: int) -> Roster[Receiver]:
        roster = Roster[Receiver](4)
        for room in rooms:
            opened(roster, room)
        return roster

    moved = roster_of(7, 8)
    moved.get(RoomId(8)).note(Connected())
    moved.get(RoomId(8)).settle(Vote.ADVANCE, 0)
    digests = [each.digest() for each in (roster_of(), roster_of(7), roster_of(8), roster_of(8, 7), moved)]
    digests.append(roster_of(7, 8).digest())
    assert len(set(digests)) == len(digests)
    assert roster_of(7, 8).digest() == digests[-1]
    assert all(0 <= digest < 2**62 for digest in digests)


def test_divergence_detected_when_one_rank_alone_is_stopping_a_room() -> None:
    digests = []
    for verdict in (Vote.STAY, Vote.ABORT):
        roster = Roster[Receiver](1)
        room = opened(roster, 7)
        room.phase = Phase.SUCCESS
        room.settle(verdict, 0, Reason.ENGINE_FAILED)
        digests.append(roster.digest())
    assert digests[0] != digests[1]


def test_divergence_detected_what_could_be_reserved_or_reused_is_in_the_digest() -> None:
    roster = Roster[Receiver](1)
    capacities = [Capacity((3,), 2, 1), Capacity((4,), 2, 1), Capacity((3,), 1, 1), Capacity((3,), 2, 2)]
    assert len({roster.digest(each) for each in capacities}) == len(capacities)


def test_the_census_names_every_phase() -> None:
    roster = Roster[Receiver](2)
    opened(roster, 7)
    assert roster.census() == dict.fromkeys(Phase, 0) | {Phase.BOOTSTRAPPING: 1}


def test_a_remembered_cancel_is_used_up_when_its_room_opens() -> None:
    """A tombstone of that room made later does not keep older tombstones from expiring."""
    roster = Roster[Receiver](1)
    roster.cancel(RoomId(7), GONE, 0)
    opened(roster, 7)
    roster.cancel(RoomId(8), GONE, 10)
    roster.retire(RoomId(7), 500)
    assert opened(roster, 8, now_ms=TOMBSTONE_MS + 10).cause is None


def test_tombstones_expire_in_the_order_they_were_made() -> None:
    roster = Roster[Receiver](1)
    for room, now_ms in enumerate([0, 10, 10, 20], start=1):
        roster.cancel(RoomId(room), GONE, now_ms)
    assert opened(roster, 4, now_ms=TOMBSTONE_MS + 10).cause == GONE
    roster.retire(RoomId(4), TOMBSTONE_MS + 10)
    assert opened(roster, 3, now_ms=TOMBSTONE_MS + 10).cause is None
