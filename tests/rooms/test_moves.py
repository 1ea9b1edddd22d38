"""Tests that rooms make exactly the phase transitions that the tables list."""

import pytest

from baton.handover.receiving_room import ReceivingRoom
from baton.ids import Generation, RoomId
from baton.rooms.choice_pages import ChoicePages
from baton.rooms.errors import Cause, IllegalMove, LocalBug, Reason
from baton.rooms.evidence import (
    Computed,
    Connected,
    Evidence,
    Failed,
    Fenced,
    Finished,
    Granted,
    Landed,
    Proof,
    Sealed,
    Written,
)
from baton.rooms.phases import GATED, LOCAL_MOVES, RECEIVER_MOVES, SENDER_MOVES, Effect, Moves, Phase, Vote
from baton.rooms.receiver import Receiver
from baton.rooms.request import Request
from baton.rooms.room import Room
from baton.rooms.sender import Sender
from tests.pages.ids import page_ids
from tests.rooms.group import LIVE, PEER, deadlines, receiver, sender

ROOM = RoomId(7)
GEN = Generation(3)
FIRST = Cause(Reason.TRANSFER_FAILED, "the first")
SECOND = Cause(Reason.CANCELLED, "the second")


class Claimed(Receiver):
    """A receiver that computes the prompt itself."""


TABLES: dict[type[Room], Moves] = {Sender: SENDER_MOVES, Receiver: RECEIVER_MOVES, Claimed: LOCAL_MOVES}
WAY: dict[type[Room], list[list[Evidence]]] = {
    Sender: [[Granted(GEN, (page_ids(4),), 0)], [], [Written()], [Sealed(GEN)]],
    Receiver: [[Connected()], [], [Landed(GEN, (1,)), Sealed(GEN)]],
    Claimed: [[Connected()], [], [Computed()]],
}
"""Evidence that lets a room advance from each of its live phases, in order."""

PHASES = [
    (kind, phase)
    for kind, moves in TABLES.items()
    for phase in Phase
    if phase in {to for to, _ in moves.values()} | {Phase.BOOTSTRAPPING}
]
LIVING = [(kind, phase) for kind, phase in PHASES if phase in LIVE]


def room_in(kind: type[Room], phase: Phase, *, ms: int = 100) -> Room:
    """Return a room that came to `phase` by its own evidence."""
    room: Room = sender(ROOM, 0, ms=ms) if kind is Sender else receiver(ROOM, 0, ms=ms)
    for evidence in WAY[kind]:
        if room.phase is phase or phase is Phase.FAILED:
            break
        _claim(kind, room)
        if isinstance(room, Receiver) and room.phase is Phase.TRANSFERRING:
            room.expose(GEN, (0,))
        for each in evidence:
            room.note(each)
        room.settle(Vote.ADVANCE, 0)
    _claim(kind, room)
    if phase is Phase.FAILED:
        room.note(Failed(FIRST))
        room.settle(Vote.ABORT, 0)
    if phase is Phase.RETIRED:
        room.note(Finished())
        room.settle(Vote.ADVANCE, 0)
    assert room.phase is phase
    return room


def _claim(kind: type[Room], room: Room) -> None:
    if kind is Claimed and isinstance(room, Receiver) and room.phase is Phase.WAITING_FOR_INPUT:
        room.claim_local()


@pytest.mark.parametrize("vote", [Vote.ABORT, Vote.ADVANCE], ids=str)
@pytest.mark.parametrize(("kind", "phase"), PHASES, ids=str)
def test_moves_listed(kind: type[Room], phase: Phase, vote: Vote) -> None:
    """A listed transition is made. One that is not listed raises IllegalMove, which stops the process."""
    room = room_in(kind, phase)
    listed = TABLES[kind].get((phase, vote))
    if listed is None:
        with pytest.raises(IllegalMove):
            room.settle(vote, 1, Reason.CANCELLED)
        assert room.phase is phase
        return
    if phase in GATED and vote is Vote.ADVANCE:
        if kind is Receiver and isinstance(room, Receiver):
            room.expose(GEN, (0,))
        for each in WAY[kind][3 if phase is Phase.SEALING else 2]:
            room.note(each)
    after, effect = listed
    assert room.settle(vote, 1, Reason.CANCELLED) is effect
    assert room.phase is after


@pytest.mark.parametrize(("kind", "phase"), PHASES, ids=str)
def test_stay_changes_nothing(kind: type[Room], phase: Phase) -> None:
    room = room_in(kind, phase)
    assert room.settle(Vote.STAY, 1) is None
    assert (room.phase, room.entered_ms) == (phase, 0)


@pytest.mark.parametrize("moves", TABLES.values(), ids=["sender", "receiver", "claimed"])
def test_terminal_absorbs(moves: Moves) -> None:
    """SUCCESS and FAILED are left for RETIRED alone, and RETIRED not at all."""
    after = {phase: {to for (at, _), (to, _) in moves.items() if at is phase} for phase in Phase}
    assert after[Phase.SUCCESS] == {Phase.SUCCESS, Phase.RETIRED}
    assert after[Phase.FAILED] == {Phase.RETIRED}
    assert after[Phase.RETIRED] == set()


@pytest.mark.parametrize(("kind", "moves"), TABLES.items(), ids=["sender", "receiver", "claimed"])
def test_every_live_phase_can_fail_and_every_phase_can_end(kind: type[Room], moves: Moves) -> None:
    for phase in (phase for each, phase in LIVING if each is kind):
        assert moves[phase, Vote.ABORT] == (Phase.FAILED, Effect.FENCE)
    releasing = {phase for (phase, _), (_, effect) in moves.items() if effect is Effect.RELEASE}
    assert releasing == {Phase.SUCCESS, Phase.FAILED}


@pytest.mark.parametrize(("kind", "phase"), LIVING, ids=str)
def test_first_cause_wins(kind: type[Room], phase: Phase) -> None:
    room = room_in(kind, phase)
    room.note(Failed(FIRST))
    room.note(Failed(SECOND))
    room.settle(Vote.ABORT, 10_000, Reason.DEADLINE)
    room.note(Failed(SECOND))
    assert room.cause == FIRST


def test_first_proof_wins() -> None:
    room = room_in(Receiver, Phase.FAILED)
    room.note(Fenced(Proof.DEAD))
    room.note(Fenced(Proof.QUIET))
    assert room.proof is Proof.DEAD


@pytest.mark.parametrize(
    ("kind", "phase"),
    [*LIVING, (Sender, Phase.SUCCESS), (Receiver, Phase.SUCCESS), (Claimed, Phase.SUCCESS)],
    ids=str,
)
def test_deadline_everywhere_starts_on_entry_and_changes_the_vote_alone(
    kind: type[Room], phase: Phase
) -> None:
    room = room_in(kind, phase, ms=40)
    assert room.vote(39, has_capacity=False) is Vote.STAY
    assert room.vote(40, has_capacity=False) is Vote.ABORT
    assert room.phase is phase
    assert room.cause is None
    room.settle(Vote.ABORT, 40)
    assert room.cause is not None
    assert room.cause.reason is Reason.DEADLINE
    assert phase.value in room.cause.text


@pytest.mark.parametrize("kind", TABLES, ids=["sender", "receiver", "claimed"])
def test_no_deadline_is_a_proof(kind: type[Room]) -> None:
    """`proof-not-time`: a failed room stays however long it takes."""
    room = room_in(kind, Phase.FAILED, ms=40)
    assert room.vote(10**12, has_capacity=True) is Vote.STAY
    room.note(Fenced(Proof.QUIET))
    assert room.vote(10**12, has_capacity=True) is Vote.ADVANCE


@pytest.mark.parametrize("kind", TABLES, ids=["sender", "receiver", "claimed"])
def test_free_capacity_moves_a_room_that_waits_for_it_and_no_other(kind: type[Room]) -> None:
    for phase in (phase for each, phase in LIVING if each is kind):
        vote = room_in(kind, phase).vote(1, has_capacity=True)
        assert (vote is Vote.ADVANCE) == (phase is Phase.WAITING_FOR_INPUT)


def test_progress_starts_the_deadline_anew_and_the_next_phase_has_its_own() -> None:
    room = room_in(Sender, Phase.TRANSFERRING, ms=40)
    room.progressed(30)
    assert room.vote(69, has_capacity=False) is Vote.STAY
    assert room.vote(70, has_capacity=False) is Vote.ABORT
    room.note(Written())
    room.settle(Vote.ADVANCE, 60)
    assert room.phase is Phase.SEALING
    assert room.deadline_ms == 100


WAITING = [
    (Sender, Phase.BOOTSTRAPPING),
    (Sender, Phase.WAITING_FOR_INPUT),
    (Receiver, Phase.WAITING_FOR_INPUT),
    (Receiver, Phase.TRANSFERRING),
    (Receiver, Phase.SUCCESS),
    (Claimed, Phase.WAITING_FOR_INPUT),
    (Claimed, Phase.SUCCESS),
]


@pytest.mark.parametrize(
    ("kind", "phase"),
    [*LIVING, (Sender, Phase.SUCCESS), (Receiver, Phase.SUCCESS), (Claimed, Phase.SUCCESS)],
    ids=str,
)
def test_waiting_has_no_deadline_but_its_requests_and_what_is_no_waiting_keeps_its_own(
    kind: type[Room], phase: Phase
) -> None:
    room = room_in(kind, phase, ms=40)
    room.ends_ms = 500
    ends_ms = 500 if (kind, phase) in WAITING else 40
    assert room.vote(ends_ms - 1, has_capacity=False) is Vote.STAY
    assert room.vote(ends_ms, has_capacity=False) is Vote.ABORT
    room.settle(Vote.ABORT, ends_ms)
    assert room.cause is not None
    assert room.cause.reason is Reason.DEADLINE
    assert ("its request's time is over" in room.cause.text) == ((kind, phase) in WAITING)


def test_a_seal_after_the_deadline_does_not_save_the_room() -> None:
    """A rank has one vote. A room past its deadline votes for the end, whether it is sealed or not."""
    room = room_in(Sender, Phase.SEALING, ms=40)
    room.note(Sealed(GEN))
    assert room.vote(39, has_capacity=False) is Vote.ADVANCE
    assert room.vote(40, has_capacity=False) is Vote.ABORT


@pytest.mark.parametrize("phase", [Phase.SUCCESS, Phase.FAILED])
@pytest.mark.parametrize("kind", TABLES, ids=["sender", "receiver", "claimed"])
def test_a_room_that_a_running_step_uses_stays(kind: type[Room], phase: Phase) -> None:
    room = room_in(kind, phase)
    room.note(Finished())
    room.note(Fenced(Proof.DEAD))
    room.busy = True
    assert room.vote(1, has_capacity=False) is Vote.STAY
    room.busy = False
    assert room.vote(1, has_capacity=False) is Vote.ADVANCE


@pytest.mark.parametrize("kind", TABLES, ids=["sender", "receiver", "claimed"])
def test_ending_early_in_success_is_agreed_first(kind: type[Room]) -> None:
    room = room_in(kind, Phase.SUCCESS)
    room.note(Failed(FIRST))
    room.busy = True
    assert room.vote(1, has_capacity=False) is Vote.ABORT
    assert room.settle(Vote.ABORT, 1) is Effect.STOP
    assert room.stopping
    assert room.vote(2, has_capacity=False) is Vote.STAY
    room.busy = False
    assert room.vote(3, has_capacity=False) is Vote.ADVANCE
    assert room.settle(Vote.ADVANCE, 3) is Effect.RELEASE
    assert room.phase_ms[Phase.SUCCESS] == 3


@pytest.mark.parametrize("kind", TABLES, ids=["sender", "receiver", "claimed"])
def test_a_finished_room_does_not_ask_to_be_stopped(kind: type[Room]) -> None:
    room = room_in(kind, Phase.SUCCESS)
    room.note(Finished())
    room.note(Failed(FIRST))
    assert room.vote(10**9, has_capacity=False) is Vote.ADVANCE


def test_a_retired_room_that_was_not_retired_is_a_bug() -> None:
    with pytest.raises(LocalBug, match="after its RELEASE"):
        room_in(Sender, Phase.RETIRED).vote(1, has_capacity=True)


@pytest.mark.parametrize("kind", TABLES, ids=["sender", "receiver", "claimed"])
def test_a_verdict_that_the_rank_never_wished_is_a_bug(kind: type[Room]) -> None:
    """A seal that is missing after the gate is a bug, not a reason for a retry."""
    for phase in (phase for each, phase in LIVING if each is kind and phase in GATED):
        room = room_in(kind, phase)
        with pytest.raises(IllegalMove, match="said to be ready"):
            room.settle(Vote.ADVANCE, 1)


def test_an_abort_that_nobody_can_explain_is_a_bug() -> None:
    with pytest.raises(IllegalMove, match="no rank said why"):
        room_in(Sender, Phase.TRANSFERRING).settle(Vote.ABORT, 1)


def test_time_is_kept_by_phase() -> None:
    room = sender(ROOM, 0, now_ms=10)
    room.note(Granted(GEN, (page_ids(4),), 0))
    room.settle(Vote.ADVANCE, 15)
    room.settle(Vote.ADVANCE, 22)
    assert room.phase_ms == {Phase.BOOTSTRAPPING: 5, Phase.WAITING_FOR_INPUT: 7}


@pytest.mark.parametrize("seen", [None, FIRST], ids=["nothing else here", "a failure here"])
@pytest.mark.parametrize("agreed", [Reason.RETRACTED, Reason.ENGINE_FAILED])
def test_retracted_is_no_failure_and_gives_way_to_whatever_else_ended_the_room(
    seen: Cause | None, agreed: Reason
) -> None:
    request = Request("request-7", (1,), 9)
    parts = (ROOM, request.request_id, PEER, 0, (1,), deadlines(), 0)
    room = ReceivingRoom(*parts, request=request, division=ChoicePages(1, 9, 1, (4,)), pages_expected=(1,))
    room.phase = Phase.SUCCESS
    room.retracting = Cause(Reason.RETRACTED, "its pages are needed")
    if seen is not None:
        room.note(Failed(seen))
    assert room.vote(0, has_capacity=False) is Vote.ABORT
    room.settle(Vote.ABORT, 0, agreed)
    assert room.cause is not None
    assert room.cause.reason is (agreed if seen is None else seen.reason)
    assert room.ended_for is agreed
