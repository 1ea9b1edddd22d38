"""Tests of the choice of sequences for the next decode step."""

from baton.decode.batch import how_many, next_batch, unfinished
from baton.decode.decode_room import DecodeRoom
from baton.ids import Incarnation, RoomId
from baton.rooms.choice_pages import ChoicePages
from baton.rooms.phases import Phase
from tests.prefill import toy
from tests.prefill.bench import deadlines


def _room(
    id_: int,
    phase: Phase = Phase.SUCCESS,
    *,
    finished: bool = False,
    stopping: bool = False,
    choices: int = 1,
    prompt: int = 1,
) -> DecodeRoom:
    """Return a room, admitted or not, with no token drawn for its further choices."""
    asked = toy.request(str(id_), (1,) * prompt, max_tokens=9, further_seeds=(7,) * (choices - 1))
    room = DecodeRoom(
        RoomId(id_),
        str(id_),
        Incarnation(1),
        0,
        (1,),
        deadlines(),
        0,
        pages_expected=(1,),
        request=asked,
        division=ChoicePages(prompt, asked.tokens_max, choices, (toy.PAGE_TOKENS,)),
    )
    room.phase, room.stopping, room.finished = phase, stopping, finished
    room.outputs[0].append(1)
    room.filled = [prompt, *[room.division.shared_tokens] * (choices - 1)]
    room.pages = [((),)] * choices
    return room


def _drawn(room: DecodeRoom) -> None:
    for choice in room.choices[1:]:
        room.filled[choice.place] = choice.sequence.length
        choice.sequence.output.append(1)


def _batch(rooms: list[DecodeRoom], max_running: int) -> list[tuple[int, int]]:
    return [(room.id, choice.place) for room, choice in next_batch(rooms, max_running)]


def test_the_oldest_run_and_the_others_wait_in_their_order() -> None:
    rooms = [_room(room) for room in range(1, 6)]
    assert [room for room, _ in next_batch(rooms, 3)] == rooms[:3]
    assert [room for room, _ in next_batch(rooms[1:], 3)] == rooms[1:4]
    assert [room for room, _ in next_batch(rooms, 9)] == rooms
    assert next_batch([], 3) == []


def test_none_takes_part_that_is_not_admitted_or_has_ended() -> None:
    others = [_room(room, phase) for room, phase in enumerate(Phase, 10) if phase is not Phase.SUCCESS]
    goes_on = _room(3)
    rooms = [*others, _room(1, finished=True), _room(2, stopping=True), goes_on]
    assert [room for room, _ in unfinished(rooms)] == [goes_on]
    assert [room for room, _ in next_batch(rooms, 1)] == [goes_on], "nor do they take a place"


def test_sequences_are_counted_and_a_rooms_choices_that_fit_run_in_their_order() -> None:
    rooms = [_room(1, choices=3), _room(2), _room(3)]
    _drawn(rooms[0])
    assert _batch(rooms, 2) == [(1, 0), (1, 1)]
    assert _batch(rooms, 4) == [(1, 0), (1, 1), (1, 2), (2, 0)]
    rooms[0].ends.end(1)
    assert _batch(rooms, 4) == [(1, 0), (1, 2), (2, 0), (3, 0)]
    assert how_many(rooms) == len(unfinished(rooms)) == 4


def test_so_many_choices_begin_in_a_step_that_it_computes_no_more_tokens_than_a_full_batch() -> None:
    rooms = [_room(1), _room(2, choices=4, prompt=7), _room(3)]
    assert [part.positions for part in unfinished(rooms)] == [1, 1, 3, 3, 3, 1]
    assert _batch(rooms, 9) == [(1, 0), (2, 0), (2, 1), (2, 2), (3, 0)]
    _drawn(rooms[1])
    assert _batch(rooms, 9) == [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0)]


def test_one_begins_whatever_else_runs() -> None:
    rooms = [_room(1), _room(2, choices=3, prompt=8)]
    assert [part.positions for part in unfinished(rooms)] == [1, 1, 4, 4]
    assert _batch(rooms, 4) == [(1, 0), (2, 0), (2, 1)]
