"""Dialogues of a decode worker's half of a session, in plain values."""

import pytest

from baton.handover.receiving_session import OPEN_PAUSE_MAX_S, UNNAMED_PAUSE_MAX_S, ReceivingSession
from baton.handover.requests import ClaimRoom, Grant, StartTimer, StopTimer
from baton.handover.sender_problem import ProblemKind, SenderProblem
from baton.handover.session_messages import (
    Answer,
    CancelRoom,
    CloseAnswer,
    CloseOverdue,
    ConnectAnswer,
    ConnectionFailed,
    ConnectionMade,
    GrantAnswer,
    SenderQuiet,
    Timer,
    TimerKind,
    Unneeded,
)
from baton.ids import Generation, Incarnation, PageId, RoomId
from baton.rooms.errors import Reason

ROOM, OTHER = RoomId(7), RoomId(8)
SENDER, EXPOSURE = Incarnation(11), Incarnation(1)
FIRST = Generation(5)
TIMEOUT_S = 0.12
CONNECT_AGAIN = Timer(TimerKind.CONNECT_AGAIN)


def problem(kind: ProblemKind) -> SenderProblem:
    return SenderProblem(kind, f"it is {kind.value}")


LOST, AGAIN = problem(ProblemKind.LOST), problem(ProblemKind.SEND_AGAIN)
NOT_QUIET, NOT_CONNECTED = problem(ProblemKind.NOT_QUIET), problem(ProblemKind.NOT_CONNECTED)


def grant_of(room: RoomId, exposure: Incarnation = EXPOSURE) -> Grant:
    return Grant(room, SENDER, exposure, FIRST, ((PageId(3),),), slot=0, prefix_tokens=0)


class Dialogue:
    """A session, what it sends, and what it requests."""

    def __init__(self, *rooms: RoomId) -> None:
        """Make a session that is connected, if rooms wait for it."""
        self.session = ReceivingSession("prefill-0", EXPOSURE)
        for room in rooms:
            self.session.connect(room)
        if rooms:
            assert self.sent() == ["connect"]
            self.answer(ConnectAnswer(EXPOSURE))
            assert self.asked() == [ConnectionMade(rooms_wait=True)]

    def sent(self) -> list[str]:
        """Take all messages that are due, and return them in order."""
        session, messages = self.session, []
        while session.is_due:
            messages += ["connect"] if session.take_connect() else []
            while (grant := session.take_grant()) is not None:
                messages.append(f"{'claim' if isinstance(grant, ClaimRoom) else 'grant'} {grant.room}")
            messages += [f"close {room} {generation}" for room, generation in session.take_closes()]
        return messages

    def answer(self, *answers: Answer) -> None:
        self.session.receive(answers, TIMEOUT_S)

    def asked(self) -> list[object]:
        """Return the requests that are about no timer of a close."""
        about = (TimerKind.CLOSE_OVERDUE, TimerKind.CLOSE_AGAIN)
        return [
            each
            for each in self.session.take_requests()
            if not (isinstance(each, StartTimer | StopTimer) and each.timer.kind in about)
        ]

    def cancelled(self) -> dict[RoomId, Reason]:
        return {each.room: each.cause.reason for each in self.asked() if isinstance(each, CancelRoom)}


@pytest.fixture
def granted() -> Dialogue:
    """Return a session that has sent the grant of a room, without an answer yet."""
    dialogue = Dialogue(ROOM)
    dialogue.session.grant(grant_of(ROOM))
    assert dialogue.sent() == [f"grant {ROOM}"]
    return dialogue


def test_rooms_wait_for_one_connect_and_a_connected_sender_costs_none() -> None:
    dialogue = Dialogue(ROOM, OTHER)
    assert dialogue.session.connect(RoomId(9))
    assert dialogue.sent() == []


def test_live_is_not_lost_nothing_is_repeated_while_the_stream_lives(granted: Dialogue) -> None:
    granted.session.connect(OTHER)
    assert granted.sent() == []
    assert granted.asked() == []
    assert granted.session.is_asking


def test_a_temporary_refusal_is_repeated_until_the_timeout_and_then_shuts_this_worker_out() -> None:
    dialogue = Dialogue()
    dialogue.session.connect(ROOM)
    pauses = 0
    while dialogue.sent():
        dialogue.answer(ConnectAnswer(EXPOSURE, NOT_QUIET))
        requests = dialogue.asked()
        if requests[0] == StartTimer(CONNECT_AGAIN, 0.05):
            pauses += 1
            assert dialogue.sent() == [], "before the pause is over"
            dialogue.session.fire(CONNECT_AGAIN)
    assert pauses == 3
    failed, cancel, end = requests
    assert failed == ConnectionFailed(NOT_QUIET, is_shut_out=True)
    assert isinstance(cancel, CancelRoom)
    assert cancel.cause.reason is Reason.CONNECT_FAILED
    assert "cannot connect to prefill worker prefill-0: it is not quiet" in cancel.cause.text
    assert end == Unneeded()


def test_another_layout_is_refused_at_once_and_shuts_nobody_out() -> None:
    dialogue = Dialogue()
    dialogue.session.connect(ROOM)
    dialogue.sent()
    refusal = problem(ProblemKind.REFUSED)
    dialogue.answer(ConnectAnswer(EXPOSURE, refusal))
    assert dialogue.asked()[0] == ConnectionFailed(refusal, is_shut_out=False)
    dialogue.session.fire(CONNECT_AGAIN)
    assert dialogue.sent() == []


def test_who_waits_for_nothing_is_not_shut_out() -> None:
    dialogue = Dialogue(ROOM)
    dialogue.session.exposed_anew(Incarnation(2))
    for _ in range(4):
        assert dialogue.sent() == ["connect"]
        dialogue.answer(ConnectAnswer(Incarnation(2), NOT_QUIET))
        dialogue.session.fire(CONNECT_AGAIN)
    assert ConnectionFailed(NOT_QUIET, is_shut_out=False) in dialogue.asked()


def test_memory_that_moved_under_a_connect_is_made_known_again_and_its_refusals_count_anew() -> None:
    dialogue = Dialogue()
    dialogue.session.connect(ROOM)
    for moved in range(1, 6):
        exposure = Incarnation(EXPOSURE + moved)
        assert dialogue.sent() == ["connect"]
        dialogue.answer(ConnectAnswer(Incarnation(exposure - 1), NOT_QUIET))
        dialogue.session.exposed_anew(exposure)
        dialogue.session.fire(CONNECT_AGAIN)
    dialogue.sent()
    dialogue.answer(ConnectAnswer(EXPOSURE), ConnectAnswer(Incarnation(99)))
    assert not dialogue.session.is_connected, "answers about other exposures say nothing"
    assert dialogue.cancelled() == {}
    dialogue.answer(ConnectAnswer(Incarnation(EXPOSURE + 5)))
    assert dialogue.session.is_connected


def test_an_answer_about_an_exposure_that_moved_is_followed_by_a_connect_for_the_new_one() -> None:
    dialogue = Dialogue()
    dialogue.session.connect(ROOM)
    dialogue.sent()
    dialogue.session.exposed_anew(Incarnation(2))
    dialogue.answer(ConnectAnswer(EXPOSURE))
    assert not dialogue.session.is_connected
    assert dialogue.sent() == ["connect"]


def test_room_ends_a_sender_that_knew_of_memory_learns_where_it_is_without_a_room() -> None:
    dialogue = Dialogue(ROOM)
    dialogue.session.over(ROOM)
    dialogue.session.exposed_anew(Incarnation(2))
    assert dialogue.sent() == ["connect"]
    dialogue.session.stream_ended(LOST)
    assert dialogue.sent() == ["connect"], "it may be back"
    dialogue.session.stream_ended(problem(ProblemKind.OTHER_PROCESS))
    assert dialogue.sent() == []
    assert dialogue.asked()[-1] == Unneeded()


def test_reconnect_a_grant_that_finds_no_connection_is_sent_once_more(granted: Dialogue) -> None:
    granted.answer(GrantAnswer(ROOM, NOT_CONNECTED))
    assert granted.sent() == ["connect"]
    granted.answer(ConnectAnswer(EXPOSURE))
    assert granted.asked() == [ConnectionMade(rooms_wait=False)]
    assert granted.sent() == [f"grant {ROOM}"]
    granted.answer(GrantAnswer(ROOM, NOT_CONNECTED))
    assert granted.cancelled() == {ROOM: Reason.CONNECT_FAILED}
    assert granted.sent() == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ProblemKind.REFUSED, Reason.CONNECT_FAILED),
        (ProblemKind.OTHER_PROCESS, Reason.PREFILL_LOST),
        (ProblemKind.LOST, Reason.PREFILL_LOST),
    ],
)
def test_the_cause_of_a_refused_grant_says_whether_the_sender_is_gone(
    granted: Dialogue, kind: ProblemKind, reason: Reason
) -> None:
    granted.answer(GrantAnswer(ROOM, problem(kind)))
    assert granted.cancelled() == {ROOM: reason}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ProblemKind.NOT_QUIET, Reason.CONNECT_FAILED),
        (ProblemKind.REFUSED, Reason.CONNECT_FAILED),
        (ProblemKind.OTHER_PROCESS, Reason.PREFILL_LOST),
    ],
)
def test_first_cause_wins_a_grant_ends_with_the_problem_of_its_second_connect(
    granted: Dialogue, kind: ProblemKind, reason: Reason
) -> None:
    granted.answer(GrantAnswer(ROOM, NOT_CONNECTED))
    granted.session.connect(OTHER)
    while granted.sent():
        granted.answer(ConnectAnswer(EXPOSURE, problem(kind)))
        granted.session.fire(CONNECT_AGAIN)
    assert granted.cancelled() == {OTHER: Reason.CONNECT_FAILED, ROOM: reason}


def test_a_stream_that_ends_loses_unanswered_grants_and_repeats_claims_and_closes(granted: Dialogue) -> None:
    answered, claimed, closed = RoomId(1), RoomId(2), RoomId(3)
    granted.session.grant(grant_of(answered))
    granted.session.grant(ClaimRoom(claimed, SENDER))
    granted.session.close(closed, FIRST)
    assert granted.sent() == [f"grant {answered}", f"claim {claimed}", f"close {closed} {FIRST}"]
    granted.answer(GrantAnswer(answered))
    granted.session.stream_ended(LOST)
    assert granted.cancelled() == {ROOM: Reason.PREFILL_LOST}
    assert granted.sent() == [f"claim {claimed}", f"close {closed} {FIRST}"]


def test_a_stream_that_was_not_taken_repeats_everything(granted: Dialogue) -> None:
    granted.session.close(OTHER, FIRST)
    granted.sent()
    granted.session.stream_ended(AGAIN)
    assert granted.asked() == []
    assert granted.sent() == [f"grant {ROOM}", f"close {OTHER} {FIRST}"]


def test_zero_at_idle_a_sender_that_takes_no_stream_is_left_alone_without_a_room() -> None:
    dialogue = Dialogue()
    dialogue.session.connect(ROOM)
    dialogue.session.stream_ended(AGAIN)
    assert dialogue.sent() == ["connect"]
    dialogue.session.over(ROOM)
    dialogue.session.stream_ended(AGAIN)
    assert dialogue.sent() == []
    assert dialogue.asked() == [Unneeded()]


def test_pauses_between_streams_grow_to_a_bound_and_begin_anew_after_an_answer() -> None:
    session = Dialogue(ROOM).session
    pauses = [session.stream_ended(LOST) for _ in range(9)]
    assert pauses[:3] == [0.05, 0.1, 0.2]
    assert pauses[-1] == OPEN_PAUSE_MAX_S
    unnamed = [session.stream_ended(AGAIN) for _ in range(9)]
    assert unnamed[:3] == [0.001, 0.002, 0.004]
    assert unnamed[-1] == UNNAMED_PAUSE_MAX_S
    session.receive([], TIMEOUT_S)
    assert session.stream_ended(LOST) == 0.05
    assert session.stream_ended(AGAIN) == 0.001


def test_a_room_that_is_over_gets_no_further_message(granted: Dialogue) -> None:
    granted.session.doubt()
    granted.session.connect(OTHER)
    granted.session.over(OTHER)
    granted.session.over(ROOM)
    assert granted.sent() == ["connect"]
    granted.answer(ConnectAnswer(EXPOSURE), GrantAnswer(ROOM, NOT_CONNECTED))
    assert granted.asked() == [ConnectionMade(rooms_wait=False)]
    assert granted.sent() == []


def test_a_claim_needs_no_connection_and_its_refusal_ends_nothing() -> None:
    dialogue = Dialogue()
    dialogue.session.connect(ROOM)
    dialogue.session.grant(ClaimRoom(ROOM, SENDER))
    assert dialogue.sent() == ["connect", f"claim {ROOM}"]
    dialogue.answer(GrantAnswer(ROOM, problem(ProblemKind.REFUSED)), ConnectAnswer(EXPOSURE))
    assert dialogue.asked() == [ConnectionMade(rooms_wait=False)]


def test_a_close_takes_the_place_of_its_rooms_grant(granted: Dialogue) -> None:
    granted.session.grant(grant_of(OTHER))
    granted.session.close(OTHER, FIRST)
    assert granted.sent() == [f"close {OTHER} {FIRST}"]
    granted.session.close(ROOM, FIRST)
    granted.session.stream_ended(LOST)
    assert granted.cancelled() == {}, "its room has failed already"


# ---- closes


def test_ack_is_proof_only_the_answer_to_a_sent_close_of_the_generation_is_one(
    granted: Dialogue,
) -> None:
    granted.session.close(ROOM, FIRST)
    granted.answer(CloseAnswer(ROOM, FIRST))
    assert granted.asked() == [], "it was not sent yet"
    assert granted.sent() == [f"close {ROOM} {FIRST}"]
    granted.answer(CloseAnswer(ROOM, Generation(FIRST - 1)), CloseAnswer(OTHER, FIRST))
    assert granted.asked() == []
    granted.session.stream_ended(LOST)
    granted.answer(CloseAnswer(ROOM, FIRST))
    assert granted.asked() == [], "it was not sent on this stream"
    granted.sent()
    granted.answer(CloseAnswer(ROOM, FIRST), CloseAnswer(ROOM, FIRST))
    assert granted.asked() == [SenderQuiet(ROOM, FIRST)]


def test_an_answer_to_a_grant_that_was_not_sent_is_none() -> None:
    dialogue = Dialogue(ROOM)
    dialogue.session.grant(grant_of(ROOM))
    dialogue.answer(GrantAnswer(ROOM))
    assert dialogue.sent() == [f"grant {ROOM}"]
    assert dialogue.session.is_asking


def test_a_refused_close_is_sent_again_after_growing_pauses(granted: Dialogue) -> None:
    granted.session.close(ROOM, FIRST)
    again, pauses = Timer(TimerKind.CLOSE_AGAIN, ROOM), []
    for _ in range(8):
        assert granted.sent() == [f"close {ROOM} {FIRST}"]
        granted.answer(CloseAnswer(ROOM, FIRST, problem(ProblemKind.REFUSED)))
        started = [each for each in granted.session.take_requests() if isinstance(each, StartTimer)]
        pauses.append(started[-1].after_s)
        assert started[-1].timer == again
        granted.session.fire(again)
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    granted.session.over(ROOM)
    granted.session.take_requests()
    granted.session.fire(again)
    assert granted.sent() == []


def test_a_close_without_an_answer_is_reported_with_its_last_problem(granted: Dialogue) -> None:
    overdue = Timer(TimerKind.CLOSE_OVERDUE, ROOM)
    granted.session.close(ROOM, FIRST)
    assert StartTimer(overdue, 3.0) in granted.session.take_requests()
    granted.session.fire(overdue)
    assert granted.asked() == [CloseOverdue(ROOM, "the sender has not answered")]
    granted.sent()
    granted.answer(CloseAnswer(ROOM, FIRST, problem(ProblemKind.REFUSED)))
    granted.session.take_requests()
    granted.session.fire(overdue)
    assert granted.asked() == [CloseOverdue(ROOM, "it is refused")]
    granted.answer(CloseAnswer(ROOM, FIRST))
    assert StopTimer(overdue) in granted.session.take_requests()
    granted.session.fire(overdue)
    assert granted.asked() == []
