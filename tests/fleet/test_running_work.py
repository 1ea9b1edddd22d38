"""Work of running requests: each counts what it was expected to take, however it ends."""

from itertools import count

import pytest

from baton.fleet.running_work import OUTPUT_TOKENS, RunningWork
from baton.ids import RoomId

ROOM = RoomId(7)


def test_a_request_counts_its_prompt_with_its_first_token_and_what_is_left_when_it_is_over() -> None:
    work = RunningWork()
    work.opened(ROOM, 100, 64, 1)
    assert work.progressed(ROOM, 1) == 101
    assert work.progressed(ROOM, 3) == 3
    assert work.ended(ROOM, is_over=True) == 60
    assert work.progressed(ROOM, 1) == work.ended(ROOM, is_over=True) == 0, "once"


def test_what_goes_on_in_another_room_is_no_work_done() -> None:
    work = RunningWork()
    work.opened(ROOM, 100, 64, 1)
    assert work.ended(ROOM, is_over=False) == 0


@pytest.mark.parametrize("drawn", [10, OUTPUT_TOKENS, 3 * OUTPUT_TOKENS])
def test_an_answer_counts_no_less_than_was_expected_and_no_less_than_was_drawn(drawn: int) -> None:
    work = RunningWork()
    work.opened(ROOM, 5, 10 * OUTPUT_TOKENS, 1)
    done = sum(work.progressed(ROOM, 1) for _ in range(drawn)) + work.ended(ROOM, is_over=True)
    assert done == 5 + max(drawn, OUTPUT_TOKENS)


def test_answers_without_a_bound_are_expected_to_be_as_long_as_the_last_ones() -> None:
    work, rooms = RunningWork(), map(RoomId, count(1))
    assert work.output_tokens(100_000, 2) == 2 * OUTPUT_TOKENS
    for room in (next(rooms) for _ in range(100)):
        work.opened(room, 5, 100_000, 1)
        work.progressed(room, 900)
        work.ended(room, is_over=True)
    assert work.output_tokens(100_000, 1) in range(880, 901)
    assert work.output_tokens(300, 1) == 300, "no longer than may be"
    for room in (next(rooms) for _ in range(100)):
        work.opened(room, 5, 8, 1)
        work.progressed(room, 8)
        work.ended(room, is_over=True)
    assert work.output_tokens(100_000, 1) in range(880, 901), "short ones say nothing of them"


def test_the_prompts_that_are_being_computed_are_known() -> None:
    work = RunningWork()
    assert work.running_prompt_tokens == 0
    work.opened(ROOM, 100, 64, 1)
    work.opened(RoomId(8), 300, 64, 1)
    work.opened(RoomId(9), 500, 64, 1)
    assert work.running_prompt_tokens == 300
    for _ in range(2):
        work.progressed(RoomId(8), 1)
    assert work.running_prompt_tokens == 300
    work.ended(RoomId(8), is_over=True)
    work.ended(RoomId(9), is_over=False)
    assert work.running_prompt_tokens == 100
