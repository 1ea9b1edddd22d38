"""Dialogues with a room at its opener, in plain values, and what holds whatever its two workers send."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.handover.adopted_room import AdoptedRoom
from baton.handover.opened_room import LINGER_S, ROOT_S, OpenedRoom
from baton.handover.opener_messages import (
    ANSWERED,
    Accepted,
    Adopt,
    Break,
    CountPrompt,
    EndChoice,
    Fail,
    FailReader,
    FailRest,
    FirstToken,
    Leave,
    MarkAdopted,
    MarkAnswered,
    MarkFull,
    MarkLocal,
    MarkNotAdopted,
    MarkRetired,
    Open,
    RoomOutcome,
    RoomTimer,
    ScoreMessage,
    Stop,
    Stream,
    Suspect,
    TokenMessage,
)
from baton.handover.requests import Report, StartTimer, StopTimer
from baton.ids import RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.rooms.reasons import LOST
from baton.rooms.request import FinishReason, Request, Sampling, Score, Token, TokenBatch

P, D = Side.PREFILL, Side.DECODE
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
LIMIT_S: Final = 20.0
NAMES: Final = {P: "prefill-0", D: "decode-0"}
GONE: Final = Cause(Reason.CLIENT_GONE, "the client hung up")
NAN: Final = Cause(Reason.ENGINE_FAILED, "NaN")
CLOSED: Final = Cause(Reason.RECEIVER_CLOSED, "the decode worker gave the room up")
LOCAL: Final = RoomOutcome(Cause(Reason.LOCAL, "decode computes it"))
DONE: Final = RoomOutcome(None)
NOT_LOCAL: Final = "a room that prefill computes is said to be local"
SCORES: Final = (Score(-1.0, 1), Score(-2.0, 1))


def request(max_tokens: int = 3, **more: Any) -> Request:
    return Request("request-1", (1, 2, 3), max_tokens, sampling=Sampling(temperature=0.0), **more)


def first(token: int, finish: FinishReason | None = None) -> FirstToken:
    return FirstToken(Token(token), finish, 0)


def tokens(
    start: int, ids: Sequence[int], finish: FinishReason | None = None, choice: int = 0, **more: Any
) -> TokenMessage:
    return TokenMessage(batch(ids, finish, choice), start, **more)


def batch(ids: Sequence[int], finish: FinishReason | None = None, choice: int = 0) -> TokenBatch:
    return TokenBatch(tuple(map(Token, ids)), finish, choice)


@dataclass
class Driver:
    """Carries out the requests of one room, and checks that each is possible where the room stands."""

    room: OpenedRoom
    opened: list[Side] = field(default_factory=list)
    open: set[Side] = field(default_factory=set)
    timers: set[RoomTimer] = field(default_factory=set)
    retired: list[Side] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    errors: list[Cause] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    counted: list[CountPrompt] = field(default_factory=list)

    def take(self) -> list[Any]:
        """Carry out all requests, and return them without lines of the timeline."""
        done: list[Any] = []
        while requests := self.room.take_requests():
            for each in requests:
                self._do(each)
            done += [each for each in requests if not isinstance(each, Report)]
        return done

    def message(self, side: Side, message: Any) -> list[Any]:
        continued = self.room.receive(side, message)
        if continued is not None:
            assert not self.room.take_requests(), "such a message requests nothing else"
            self._do(continued)
            return [continued]
        if isinstance(message, RoomOutcome):
            self.open.discard(side)
        return self.take()

    def broken(self, side: Side, how: Break = Break.LOST, text: str = "reset") -> list[Any]:
        self.room.broken(side, how, text)
        self.open.discard(side)
        return self.take()

    def passed(self, timer: RoomTimer) -> list[Any]:
        self.timers.discard(timer)
        self.room.passed(timer)
        return self.take()

    def _do(self, each: Any) -> None:
        match each:
            case Open(side) | Adopt(side):
                assert not self.room.is_over
                self.opened.append(side)
                self.open.add(side)
                self.room.opened(side)
            case Leave(side):
                assert side in self.open, "nobody leaves a stream that has ended"
                self.open.discard(side)
            case StopTimer(timer):
                self.timers.remove(timer)
            case StartTimer(timer):
                self.timers.add(timer)
            case MarkRetired(side):
                self.retired.append(side)
            case MarkAnswered() | Stop() | Fail() | MarkNotAdopted():
                self.ends.append(each)
            case FailReader(cause):
                self.errors.append(cause)
            case CountPrompt():
                self.counted.append(each)
            case TokenBatch(drawn, finish, choice):
                assert not self.errors
                assert choice not in self.complete, "nothing comes after the last token"
                self.outputs.setdefault(choice, []).extend(token.id for token in drawn)
                self.complete |= {choice} if finish is not None else set()


def started(made: Request | None = None, names: dict[Side, str] = NAMES) -> Driver:
    driver = Driver(OpenedRoom(RoomId(7), made or request(), names, LIMIT_S))
    driver.room.start()
    driver.take()
    return driver


def streaming(made: Request | None = None) -> Driver:
    """Return a room whose first token, 7, was passed on from prefill, and prefill's part is complete."""
    driver = started(made)
    for message in (Accepted(), first(7), DONE):
        driver.message(P, message)
    return driver


def adopting() -> Driver:
    driver = Driver(AdoptedRoom(RoomId(7), request(), NAMES, LIMIT_S))
    driver.room.start()
    assert driver.take() == [StartTimer(RoomTimer.LIMIT, LIMIT_S), Adopt(D, 0)]
    return driver


def over(cause: Cause, *left: Any) -> list[Any]:
    """Return the requests with which a failure ends a room."""
    return [Fail(cause), FailReader(cause), StopTimer(RoomTimer.LIMIT), *left]


LINGER: Final = StartTimer(RoomTimer.LINGER, LINGER_S)
NO_LINGER: Final = StopTimer(RoomTimer.LINGER)


def test_both_workers_are_called_before_either_answers_and_decode_first() -> None:
    room = Driver(OpenedRoom(RoomId(7), request(), NAMES, LIMIT_S))
    room.room.start()
    assert room.take() == [StartTimer(RoomTimer.LIMIT, LIMIT_S), Open(D), Open(P)]


def test_each_position_is_passed_on_once_from_whichever_worker_is_first() -> None:
    room = started()
    assert room.message(P, Accepted()) == []
    assert room.message(P, first(7)) == [CountPrompt(P, 3), Stream(), batch([7])]
    assert room.message(D, Accepted()) == room.message(P, DONE) == []
    assert room.message(D, tokens(0, [7, 8])) == [batch([8])]
    end = [StopTimer(RoomTimer.LIMIT), LINGER, MarkAnswered("3 tokens passed on"), batch([9], LENGTH)]
    assert room.message(D, tokens(1, [8, 9], LENGTH)) == end
    assert room.message(D, DONE) == [NO_LINGER]
    assert room.room.is_settled


def test_decode_may_be_first_with_all_tokens() -> None:
    room = started()
    room.message(D, tokens(0, [7, 8], STOP))
    assert room.message(D, DONE) == room.message(P, Accepted()) == []
    assert room.message(P, first(7)) == [CountPrompt(P, 3)]
    assert (room.outputs, room.message(P, DONE)) == ({0: [7, 8]}, [NO_LINGER])


def test_a_room_without_a_prefill_worker_has_its_tokens_from_decode() -> None:
    room = started(names={D: "decode-0"})
    assert room.opened == [D]
    taken = room.message(D, tokens(0, [7], STOP, cached_tokens=2, is_local=True))
    assert taken[:2] == [Stream(), CountPrompt(D, 1)]


@pytest.mark.parametrize("side", [P, D])
def test_either_worker_reports_that_decode_computes_the_prompt(side: Side) -> None:
    room = started()
    room.message(P, Accepted())
    if side is P:
        assert room.message(P, LOCAL) == [MarkLocal()]
    taken = room.message(D, tokens(0, [7], is_local=True))
    assert taken == [*[MarkLocal()] * (side is D), Stream(), CountPrompt(D, 3), batch([7])]
    assert not room.room.is_over


@pytest.mark.parametrize("how", ["broken", "refused", "late"])
def test_mine_or_granted_a_local_room_does_not_end_with_its_prefill_worker(how: str) -> None:
    """Decode reported that it computes the prompt, before prefill did."""
    room = started()
    room.message(P, Accepted())
    room.message(D, tokens(0, [7], is_local=True))
    match how:
        case "broken":
            assert room.broken(P) == [Suspect(P)]
        case "refused":
            assert room.broken(P, Break.REFUSED) == []
        case _:
            assert room.message(P, RoomOutcome(Cause(Reason.DEADLINE, "no grant came"))) == []
    assert room.message(D, tokens(1, [8, 9], LENGTH))[-1] == batch([8, 9], LENGTH)
    assert room.message(D, DONE)[0] == NO_LINGER
    assert (room.errors, room.outputs) == ([], {0: [7, 8, 9]})


@pytest.mark.parametrize(
    ("made", "before", "side", "message", "text"),
    [
        ({}, [Accepted(), first(7)], D, tokens(1, [8], is_local=True), NOT_LOCAL),
        ({}, [Accepted(), first(7)], P, LOCAL, NOT_LOCAL),
        ({"prompt_logprobs": 0}, [Accepted()], P, LOCAL, NOT_LOCAL),
        ({}, [Accepted()], D, LOCAL, "the outcome local of a decode worker"),
        ({"further_seeds": (1,)}, [], D, tokens(0, [7], choice=2), "tokens of choice 2 of 2"),
        ({}, [], P, DONE, "an outcome before the room was accepted"),
    ],
    ids=["local by decode", "local by prefill", "scored", "decode's own", "another choice", "not accepted"],
)
def test_malformed_is_contained_nonsense_ends_the_room_and_its_worker_is_not_read_on(
    made: dict[str, Any], before: Sequence[Any], side: Side, message: Any, text: str
) -> None:
    room = started(request(**made))
    for each in before:
        room.message(P, each)
    room.message(side, message)
    (cause,) = room.errors
    assert cause.text == f"{side.value} worker sent nonsense: {text}"
    assert (cause.reason, room.room.reporter) == (LOST[side], side)
    assert room.open == {P, D} - {side}


def test_record_fits_decodes_tokens_wait_for_prefills_scores() -> None:
    room = started(request(prompt_logprobs=0))
    assert room.message(D, tokens(0, [7, 8], STOP)) == room.message(D, DONE) == []
    room.message(P, Accepted())
    assert room.message(P, ScoreMessage(1, SCORES)) == []
    assert room.message(P, first(7))[:3] == [
        CountPrompt(P, 3),
        Stream(),
        TokenBatch((Token(7),), None, 0, SCORES),
    ]
    assert room.outputs == {0: [7, 8]}


@pytest.mark.parametrize(
    "messages",
    [
        [ScoreMessage(1, SCORES), first(7), ScoreMessage(1, SCORES)],
        [first(7)],
        [ScoreMessage(2, (Score(-1.0, 1),))],
        [ScoreMessage(1, (Score(-1.0, 1),) * 3)],
        [ScoreMessage(1, (Score(-1.0, 1),)), first(7)],
    ],
    ids=["again", "none", "a gap", "too many", "too few"],
)
def test_malformed_is_contained_scores_that_do_not_fit_end_the_room(messages: Sequence[Any]) -> None:
    room = started(request(prompt_logprobs=0))
    for message in (Accepted(), *messages):
        room.message(P, message)
    (cause,) = room.errors
    assert cause.reason is Reason.PREFILL_LOST
    assert "sent nonsense" in cause.text
    assert room.open == {D}, "no more of its messages are read"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (tokens(2, [9]), "tokens 1 to 2 are missing"),
        (tokens(0, [7, 8, 9, 10]), "decode worker decode-0 drew on behind the last token"),
        (tokens(1, [8, 9]), "decode worker decode-0 drew on behind the last token"),
        (DONE, "decode worker ended the room before its answer was complete"),
    ],
    ids=["a gap", "too many tokens", "no finish", "too few tokens"],
)
def test_tokens_that_decode_lost_end_the_room(message: Any, text: str) -> None:
    room = streaming()
    assert room.message(D, message)[:2] == over(Cause(Reason.DECODE_LOST, text))[:2]
    assert (room.outputs, room.room.reporter) == ({0: [7]}, D)


def test_room_ends_a_first_token_that_prefill_alone_has_and_does_not_send_is_not_awaited() -> None:
    """Decode's tokens wait for it, and its part of the room may be over."""
    missing = Cause(Reason.PREFILL_LOST, "prefill worker ended the room before its first token")
    room = started(request(prompt_logprobs=0))
    room.message(D, tokens(0, [7], STOP))
    room.message(D, DONE)
    room.message(P, Accepted())
    assert room.message(P, DONE) == over(missing)


def test_the_outcome_of_one_worker_is_the_rooms_first_cause() -> None:
    room = started()
    room.message(P, Accepted())
    assert room.message(P, RoomOutcome(NAN)) == over(NAN, LINGER)
    assert (room.room.reporter, room.room.cause) == (P, NAN)
    assert room.message(D, RoomOutcome(Cause(Reason.CANCELLED, "as it was told"))) == [NO_LINGER]
    assert room.room.cause == NAN


def test_first_cause_wins_decodes_own_cause_is_awaited() -> None:
    """Decode's cause is queued behind its tokens, so prefill learns of decode's close earlier."""
    room = started()
    for message in (Accepted(), first(7)):
        room.message(P, message)
    assert room.message(P, RoomOutcome(CLOSED)) == [StartTimer(RoomTimer.ROOT, ROOT_S)]
    assert room.message(D, tokens(1, [8])) == [batch([8])]
    assert room.message(D, RoomOutcome(NAN)) == over(NAN, StopTimer(RoomTimer.ROOT))
    assert room.room.is_settled


def test_a_decode_worker_that_does_not_report_its_cause_is_not_awaited_for_long() -> None:
    room = started()
    room.message(P, Accepted())
    room.message(P, RoomOutcome(CLOSED))
    assert room.passed(RoomTimer.ROOT) == over(CLOSED, LINGER)
    assert room.passed(RoomTimer.LINGER) == [Leave(D, CLOSED)]
    assert room.room.is_settled


def test_a_decode_worker_whose_stream_has_ended_is_not_awaited() -> None:
    room = started()
    room.message(P, Accepted())
    room.broken(D)
    assert room.message(P, RoomOutcome(CLOSED)) == [NO_LINGER]
    assert room.errors[0].reason is Reason.DECODE_LOST


def test_terminal_reaches_peer_a_failure_after_the_answer_ends_the_other_worker() -> None:
    """The request needed only prefill's one token. Its pages never arrive, so decode need not wait."""
    failed = Cause(Reason.TRANSFER_FAILED, "a write ended without reaching the decode worker")
    room = started(request(1))
    room.message(P, Accepted())
    assert MarkAnswered("1 token passed on") in room.message(P, first(7, LENGTH))
    assert room.message(P, RoomOutcome(failed)) == [FailRest(failed)]
    assert room.message(D, RoomOutcome(ANSWERED)) == [NO_LINGER]
    assert room.errors == []


def test_a_worker_that_the_end_of_an_answered_room_reached_ends_nothing() -> None:
    room = streaming()
    room.room.stop()
    assert room.take() == [StopTimer(RoomTimer.LIMIT), LINGER, Stop()]
    assert room.message(D, RoomOutcome(ANSWERED)) == [NO_LINGER]


@pytest.mark.parametrize(
    ("how", "reason", "text", "requests"),
    [
        (Break.LOST, Reason.DECODE_LOST, "decode worker decode-0 broke off: why", [Suspect(D)]),
        (Break.CLOSED, Reason.DECODE_LOST, "decode worker decode-0 ended without an outcome", []),
        (
            Break.REPLACED,
            Reason.DECODE_LOST,
            "decode worker decode-0 is another process now: why",
            [Suspect(D), MarkRetired(D)],
        ),
        (Break.REFUSED, Reason.REFUSED, "decode worker decode-0: why", [MarkRetired(D)]),
        (Break.DRAINING, Reason.REFUSED, "decode worker decode-0: why", [Suspect(D), MarkRetired(D)]),
        (
            Break.FULL,
            Reason.WORKER_FULL,
            "decode worker decode-0 is full: why",
            [MarkFull(D), MarkRetired(D)],
        ),
    ],
)
def test_a_broken_stream_ends_the_room(
    how: Break, reason: Reason, text: str, requests: Sequence[Any]
) -> None:
    """A worker that cannot serve other rooms is avoided, and one that never got this room is not awaited."""
    room = started()
    taken = room.broken(D, how, "why") + room.broken(P, Break.CLOSED)
    assert [each for each in taken if isinstance(each, Suspect | MarkFull | MarkRetired)] == requests
    assert room.ends == [Fail(Cause(reason, text))]
    assert (room.room.reporter, room.timers) == (D, set())


def test_a_worker_that_names_itself_in_a_refusal_is_named_once() -> None:
    room = started()
    room.broken(P, Break.DRAINING, "prefill worker prefill-0: rank 1 has gone")
    assert room.errors == [Cause(Reason.REFUSED, "prefill worker prefill-0: rank 1 has gone")]


def test_a_client_that_hangs_up_ends_the_room_once_and_gets_no_error() -> None:
    room = streaming()
    room.room.give_up(GONE)
    room.room.give_up(GONE)
    room.room.stop()
    assert room.take() == [StopTimer(RoomTimer.LIMIT), LINGER, Fail(GONE)]
    assert room.passed(RoomTimer.LINGER) == [Leave(D, GONE)]
    assert (room.errors, room.room.cause, room.retired) == ([], None, [])


def test_a_cause_from_elsewhere_ends_the_room_at_once() -> None:
    lost = Cause(Reason.DECODE_LOST, "its lease ran out")
    room = streaming()
    room.room.end(lost)
    room.room.end(NAN)
    assert room.take() == over(lost, LINGER)[1:], "who knew the cause has recorded it"
    assert room.broken(D) == [Suspect(D), NO_LINGER]
    assert (room.room.cause, room.room.reporter) == (lost, None)


def test_a_room_that_failed_before_it_was_started_is_sent_to_nobody() -> None:
    room = Driver(OpenedRoom(RoomId(7), request(), NAMES, LIMIT_S))
    room.room.end(NAN)
    room.room.start()
    assert room.take() == [FailReader(NAN), MarkRetired(P), MarkRetired(D)]


def test_deadline_everywhere_the_time_limit_ends_the_room_on_both_workers() -> None:
    late = Cause(Reason.DEADLINE, "prefill worker prefill-0 did not end the room in time")
    room = started()
    taken = room.passed(RoomTimer.LIMIT)
    assert taken == [*over(late)[:2], LINGER, Leave(P, late), Leave(D, late), NO_LINGER]
    assert room.passed(RoomTimer.LIMIT) == []


def test_an_error_of_the_opener_ends_the_room() -> None:
    room = started()
    room.room.abandon()
    taken = room.take()
    assert taken[0].cause.reason is Reason.BOOTSTRAP_LOST
    assert [each.side for each in taken if isinstance(each, Leave)] == [P, D]


def test_choices_end_alone_the_room_is_answered_with_the_last_of_them() -> None:
    room = streaming(request(further_seeds=(1, 2)))
    assert room.message(D, tokens(0, [5], STOP, choice=1)) == [batch([5], STOP, 1)]
    room.room.end_choice(0)
    assert room.take() == [EndChoice(0)]
    assert room.message(D, tokens(1, [8])) == [], "its reader has enough of it"
    room.room.end_choice(2)
    assert room.take()[-1] == Stop()


def test_what_earlier_rooms_passed_on_is_not_passed_on_again() -> None:
    room = started(replace(request(4), output=(5, 6)))
    room.message(P, Accepted())
    assert room.message(P, first(7))[-1] == batch([7])
    taken = room.message(D, tokens(2, [7, 8], LENGTH))
    assert taken[-2:] == [
        MarkAnswered("4 tokens passed on, 2 of them by earlier rooms"),
        batch([8], LENGTH),
    ]


# ---- whatever comes


def test_adopt_first_wins_decode_decides_and_sends_the_whole_output_again() -> None:
    driver = adopting()
    assert driver.message(D, Accepted(3)) == [MarkAdopted(), Adopt(P, 3)]
    assert driver.message(P, Accepted(3)) == []
    assert driver.message(P, first(7)) == [], "without its position it could be any room's first token"
    assert driver.message(D, tokens(0, [7, 8])) == [Stream(), batch([7, 8])]
    driver.message(P, DONE)
    driver.message(D, tokens(2, [9], LENGTH))
    assert driver.message(D, DONE) == [NO_LINGER]
    assert driver.outputs == {0: [7, 8, 9]}
    assert not driver.counted, "its prompt was counted by the bootstrap that opened it"


@pytest.mark.parametrize("how", list(Break))
def test_adopt_first_wins_a_room_that_decode_does_not_give_is_forgotten(how: Break) -> None:
    driver = adopting()
    done = driver.broken(D, how, "another bootstrap reads it")
    cause = Cause(Reason.NOT_ADOPTED, "another bootstrap reads it")
    assert done == [
        MarkNotAdopted(cause),
        StopTimer(RoomTimer.LIMIT),
        MarkRetired(P),
        MarkRetired(D),
    ]
    assert driver.room.is_settled
    assert not driver.errors


def test_adopt_first_wins_a_decode_worker_that_answers_late_ends_the_room() -> None:
    driver = adopting()
    assert isinstance(driver.room, AdoptedRoom)
    driver.room.stop_adopting("it did not answer")
    cause = Cause(Reason.NOT_ADOPTED, "it did not answer")
    assert driver.take()[:3] == [MarkNotAdopted(cause), StopTimer(RoomTimer.LIMIT), Leave(D, cause)]
    driver.room.stop_adopting("again")
    assert driver.take() == []


def test_adopt_first_wins_a_room_whose_worker_is_lost_before_it_is_given_is_forgotten() -> None:
    driver = adopting()
    driver.room.end(Cause(Reason.DECODE_LOST, "its lease ran out"))
    cause = Cause(Reason.NOT_ADOPTED, "its lease ran out")
    assert driver.take()[:3] == [MarkNotAdopted(cause), StopTimer(RoomTimer.LIMIT), Leave(D, cause)]
    assert not driver.errors


def test_a_full_prefill_worker_ends_no_room_that_decode_has_given() -> None:
    driver = adopting()
    driver.message(D, Accepted(1))
    assert driver.broken(P, Break.FULL, "all places are taken") == [MarkFull(P), MarkRetired(P)]
    driver.message(D, tokens(0, [7, 8, 9], LENGTH))
    driver.message(D, DONE)
    assert driver.ends == [MarkAnswered("3 tokens passed on")]


def test_an_adopted_room_goes_on_where_prefills_part_is_over() -> None:
    driver = adopting()
    driver.message(D, Accepted(1))
    assert driver.broken(P, Break.REFUSED, "room 7 is not known here") == [MarkRetired(P)]
    driver.message(D, tokens(0, [7, 8, 9], LENGTH))
    driver.message(D, DONE)
    assert driver.ends == [MarkAnswered("3 tokens passed on")]


def test_a_client_that_hangs_up_while_its_room_is_adopted_ends_the_room() -> None:
    driver = adopting()
    driver.room.give_up(GONE)
    driver.take()
    assert driver.ends == [Fail(GONE)]
    assert driver.message(D, Accepted(1)) == [MarkAdopted()], "and prefill is not asked"
    driver.message(D, RoomOutcome(GONE))
    assert driver.room.is_settled


@st.composite
def dialogues(draw: st.DrawFn) -> tuple[Request, dict[int, list[int]], list[tuple[str, Any]]]:
    """Draw a request, its right outputs, and all that happens: both workers' messages in any order, any of
    which may be cut off, left out or repeated, with commands and ends of timers between them."""
    choices = draw(st.integers(1, 3))
    scored = draw(st.booleans())
    made = request(4, further_seeds=tuple(range(1, choices)), prompt_logprobs=0 if scored else None)
    outputs = {each: [7, *draw(st.lists(st.integers(0, 99), max_size=3))] for each in range(choices)}
    local = not scored and draw(st.booleans())
    prefill: list[Any] = [Accepted()]
    if local:
        prefill.append(LOCAL)
    else:
        if scored:
            prefill.append(ScoreMessage(1, SCORES))
        prefill += [first(7, _finish(outputs[0], 1)), DONE]
    decode: list[Any] = [Accepted()]
    left = dict.fromkeys(outputs, 0)
    while left:
        choice = draw(st.sampled_from(sorted(left)))
        start, output = left[choice], outputs[choice]
        stop = draw(st.integers(start + 1, len(output)))
        decode.append(
            tokens(start, output[start:stop], _finish(output, stop), choice, is_local=local and start == 0)
        )
        left[choice] = stop
        if stop == len(output):
            del left[choice]
    decode.append(draw(st.sampled_from([DONE, RoomOutcome(NAN), RoomOutcome(ANSWERED)])))
    for messages in (prefill, decode):
        for _ in range(draw(st.integers(0, 2)) * draw(st.booleans())):
            place = draw(st.integers(0, len(messages) - 1))
            if draw(st.booleans()):
                del messages[place : place + 1]
            elif not isinstance(messages[place], RoomOutcome):
                messages.insert(place, messages[place])
            if not messages:
                break
    events: list[tuple[str, Any]] = []
    queues = {P: prefill, D: decode}
    while any(queues.values()):
        side = draw(st.sampled_from([each for each in (P, D) if queues[each]]))
        events.append(("message", (side, queues[side].pop(0))))
        if draw(st.integers(0, 5)) == 0:
            kind = draw(
                st.sampled_from(["broken", "passed", "give_up", "stop", "end", "end_choice", "abandon"])
            )
            about = {
                "broken": st.tuples(st.sampled_from([P, D]), st.sampled_from(list(Break))),
                "passed": st.sampled_from(list(RoomTimer)),
                "end_choice": st.integers(0, choices - 1),
            }.get(kind, st.none())
            events.append((kind, draw(about)))
    return made, outputs, events


def _finish(output: Sequence[int], stop: int) -> FinishReason | None:
    if stop < len(output):
        return None
    return LENGTH if stop == 4 else STOP


def _happen(driver: Driver, kind: str, about: Any) -> list[Any]:
    room = driver.room
    match kind:
        case "message":
            side, message = about
            return driver.message(side, message) if side in driver.open else []
        case "broken":
            return driver.broken(*about) if about[0] in driver.open else []
        case "passed":
            return driver.passed(about) if about in driver.timers else []
        case "give_up":
            room.give_up(GONE)
        case "stop":
            room.stop()
        case "end":
            room.end(NAN)
        case "end_choice":
            room.end_choice(about)
        case _:
            room.abandon()
    return driver.take()


@given(dialogues())
@settings(max_examples=400, deadline=None)
def test_whatever_comes_tokens_are_a_prefix_and_the_room_ends_once(
    dialogue: tuple[Request, dict[int, list[int]], list[tuple[str, Any]]],
) -> None:
    made, outputs, events = dialogue
    driver = started(made)
    ended_outside = False
    for kind, about in [*events, ("broken", (P, Break.LOST)), ("broken", (D, Break.LOST))]:
        was_over = driver.room.is_over
        taken = _happen(driver, kind, about)
        ended_outside = ended_outside or (kind == "end" and not was_over)
        if was_over:
            assert not [each for each in taken if isinstance(each, TokenBatch | FailReader | Open)]
        for choice, output in driver.outputs.items():
            assert output == outputs[choice][: len(output)], "each position once, and none is left out"
            assert choice not in driver.complete or output == outputs[choice]
        assert len(driver.ends) + ended_outside == driver.room.is_over, "it has one end"
    room = driver.room
    assert room.is_settled, "a room whose streams have ended is over"
    assert not driver.timers
    assert not driver.open
    assert driver.opened == [D, P]
    assert len(driver.retired) == len(set(driver.retired))
    assert len(driver.counted) <= 1
    assert driver.errors == ([] if room.cause is None else [room.cause])
    assert (room.cause is not None) == (
        ended_outside or any(isinstance(each, Fail) and each.cause != GONE for each in driver.ends)
    )


def _is_answer(end: Any) -> bool:
    return isinstance(end, MarkAnswered)


def test_a_whole_dialogue_in_any_order_is_an_answer() -> None:
    """The two streams without any fault, in each order in which their messages can come."""
    prefill, decode = (
        [Accepted(), first(7), DONE],
        [Accepted(), tokens(0, [7, 8]), tokens(2, [9], LENGTH), DONE],
    )
    for order in _orders(len(prefill), len(decode)):
        queues = {P: list(prefill), D: list(decode)}
        driver = started()
        for side in order:
            driver.message(side, queues[side].pop(0))
        assert driver.outputs == {0: [7, 8, 9]}
        assert list(map(_is_answer, driver.ends)) == [True]
        assert driver.room.is_settled
        assert not driver.retired
        assert not driver.errors


def _orders(prefill: int, decode: int) -> list[list[Side]]:
    if not prefill or not decode:
        return [[P] * prefill + [D] * decode]
    return [[P, *rest] for rest in _orders(prefill - 1, decode)] + [
        [D, *rest] for rest in _orders(prefill, decode - 1)
    ]
