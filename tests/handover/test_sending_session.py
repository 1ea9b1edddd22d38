"""Dialogues of a prefill worker's half of a session, in plain values."""

from baton.handover.early_grants import EarlyGrants
from baton.handover.requests import StartTimer, StopTimer
from baton.handover.sending_session import (
    EARLY_GRANT_S,
    AnswerClose,
    AnswerGrant,
    ApplyClose,
    ApplyGrant,
    AwaitQuiet,
    SendingSession,
)
from baton.handover.session_messages import Timer, TimerKind
from baton.ids import Generation, Incarnation, RoomId
from baton.rooms.errors import PeerFault, UnknownRoom

ROOM, OTHER = RoomId(7), RoomId(8)
FIRST = Generation(5)
UNKNOWN = UnknownRoom("room 7 is not here")
TIMER = Timer(TimerKind.EARLY_GRANT, ROOM)
RECEIVER = Incarnation(22)


class Stream:
    """A stream with its session, which owns the session's early grants."""

    def __init__(self, early_grants: EarlyGrants[str], receiver: int = RECEIVER) -> None:
        self.session: SendingSession[str] = SendingSession(early_grants, self)
        self.session.receiver = Incarnation(receiver)

    def room_opened(self, room: RoomId) -> None:
        self.session.room_opened(room)

    def came_early(self, room: RoomId, grant: str = "a grant") -> list[object]:
        """Apply a grant whose room is not here yet. Return what is requested then."""
        self.session.grant(room, grant)
        assert self.session.take_requests() == [ApplyGrant(room, grant)]
        self.session.grant_applied(room, grant, UNKNOWN, is_open=False, is_retired=False)
        return list(self.session.take_requests())


def test_a_grant_is_answered_with_the_result_of_its_turn() -> None:
    session = Stream(EarlyGrants(4)).session
    fault = PeerFault("the registry named another receiver")
    for error in (None, fault):
        session.grant_applied(ROOM, "a grant", error, is_open=True, is_retired=False)
        assert session.take_requests() == [AnswerGrant(ROOM, error)]


def test_room_issued_a_grant_that_comes_before_its_room_is_applied_when_the_room_opens() -> None:
    early_grants: EarlyGrants[str] = EarlyGrants(4)
    stream = Stream(early_grants)
    assert stream.came_early(ROOM) == [StartTimer(TIMER, EARLY_GRANT_S)]
    early_grants.apply(OTHER)
    assert stream.session.take_requests() == []
    early_grants.apply(ROOM)
    assert stream.session.take_requests() == [StopTimer(TIMER), ApplyGrant(ROOM, "a grant")]
    early_grants.apply(ROOM)
    stream.session.fire(TIMER)
    assert stream.session.take_requests() == []
    assert len(early_grants) == 0


def test_a_grant_whose_room_opened_in_its_turn_is_applied_again() -> None:
    session = Stream(EarlyGrants(4)).session
    session.grant_applied(ROOM, "a grant", UNKNOWN, is_open=True, is_retired=False)
    assert session.take_requests() == [ApplyGrant(ROOM, "a grant")]


def test_terminal_reaches_peer_a_grant_of_a_room_that_is_over_is_refused_at_once() -> None:
    early_grants: EarlyGrants[str] = EarlyGrants(4)
    session = Stream(early_grants).session
    session.grant_applied(ROOM, "a grant", UNKNOWN, is_open=False, is_retired=True)
    assert session.take_requests() == [AnswerGrant(ROOM, UNKNOWN)]
    assert len(early_grants) == 0


def test_an_early_grant_is_refused_when_its_time_is_over() -> None:
    early_grants: EarlyGrants[str] = EarlyGrants(4)
    stream = Stream(early_grants)
    stream.came_early(ROOM)
    stream.session.fire(TIMER)
    assert stream.session.take_requests() == [AnswerGrant(ROOM, UNKNOWN)]
    assert len(early_grants) == 0


def test_a_close_drops_the_early_grant_of_its_room_and_a_later_grant_does_not_wait() -> None:
    early_grants: EarlyGrants[str] = EarlyGrants(4)
    stream = Stream(early_grants)
    stream.came_early(ROOM)
    stream.session.close(ROOM, FIRST)
    assert stream.session.take_requests() == [StopTimer(TIMER), ApplyClose(ROOM, FIRST)]
    assert stream.came_early(ROOM) == [AnswerGrant(ROOM, UNKNOWN)]
    assert len(early_grants) == 0


def test_ack_is_proof_a_close_is_answered_once_and_only_when_its_room_is_quiet() -> None:
    session = Stream(EarlyGrants(4)).session
    session.close(ROOM, FIRST)
    session.close(ROOM, FIRST)
    assert session.take_requests() == [ApplyClose(ROOM, FIRST)]
    session.close_applied(ROOM, FIRST, None)
    session.close(ROOM, FIRST)
    assert session.take_requests() == [AwaitQuiet(ROOM, FIRST)]
    session.quiet(ROOM, FIRST)
    assert session.take_requests() == [AnswerClose(ROOM, FIRST, None)]
    session.close(ROOM, FIRST)
    assert session.take_requests() == [ApplyClose(ROOM, FIRST)]


def test_a_close_that_no_turn_takes_is_refused_and_may_come_again() -> None:
    session, fault = Stream(EarlyGrants(4)).session, PeerFault("another generation")
    session.close(ROOM, FIRST)
    session.close_applied(ROOM, FIRST, fault)
    session.close(ROOM, FIRST)
    asked = [ApplyClose(ROOM, FIRST), AnswerClose(ROOM, FIRST, fault), ApplyClose(ROOM, FIRST)]
    assert session.take_requests() == asked


def test_malformed_is_contained_early_grants_are_bounded_for_each_receiver() -> None:
    early_grants: EarlyGrants[str] = EarlyGrants(2)
    greedy, stream = Stream(early_grants, 33), Stream(early_grants)
    answers = [greedy.came_early(RoomId(room)) for room in range(1, 5)]
    assert [each[0] for each in answers[2:]] == [AnswerGrant(RoomId(room), UNKNOWN) for room in (3, 4)]
    assert stream.came_early(ROOM) == [StartTimer(TIMER, EARLY_GRANT_S)]
    assert len(early_grants) == 3


def test_a_stream_that_ends_takes_its_own_early_grants_along_and_no_others() -> None:
    """A grant that is repeated on another stream belongs to that stream."""
    early_grants: EarlyGrants[str] = EarlyGrants(4)
    last, other, next_one = Stream(early_grants), Stream(early_grants, 33), Stream(early_grants)
    last.came_early(ROOM)
    last.came_early(OTHER)
    other.came_early(ROOM)
    next_one.came_early(ROOM, "the grant again")
    last.session.fire(TIMER)
    assert last.session.take_requests() == [], "it is not this stream's any more"
    last.session.end()
    assert len(early_grants) == 2
    early_grants.apply(ROOM)
    assert next_one.session.take_requests()[-1] == ApplyGrant(ROOM, "the grant again")
    assert other.session.take_requests()[-1] == ApplyGrant(ROOM, "a grant")


def test_ack_is_proof_a_close_of_another_generation_has_an_answer_of_its_own() -> None:
    session, second = Stream(EarlyGrants(4)).session, Generation(6)
    session.close(ROOM, FIRST)
    session.close(ROOM, second)
    assert session.take_requests() == [ApplyClose(ROOM, FIRST), ApplyClose(ROOM, second)]
    session.quiet(ROOM, FIRST)
    session.close(ROOM, second)
    session.quiet(ROOM, second)
    assert session.take_requests() == [AnswerClose(ROOM, each, None) for each in (FIRST, second)]
