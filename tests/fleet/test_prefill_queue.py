"""Tests of the estimate of a prefill worker's queue: its last report and the rooms placed since."""

import pytest

from baton.fleet.need import Need
from baton.fleet.prefill_queue import LEFT_MS_MAX, PrefillQueue
from baton.ids import RoomId
from baton.rooms.phases import Side
from baton.rooms.worker_load import WorkerLoad
from tests.fleet.test_registry import D1, P1, P2, registry_of

RATE = 1_000
"""Tokens a second, so that a token takes a millisecond."""


def heard(
    queue: PrefillQueue,
    waiting: int,
    number: int,
    now_ms: int = 0,
    entered: int = 0,
    rate: int = RATE,
    brought: bool = True,
) -> None:
    load = WorkerLoad((), (), 0, 0, 0, RoomId(entered), number, waiting, rate)
    queue.update(load, RoomId(entered), lambda _: brought, now_ms)


def test_what_was_placed_since_is_behind_what_waits_there() -> None:
    queue = PrefillQueue()
    assert queue.left_ms(0) is None, "nobody knows how fast it is"
    queue.add(RoomId(1), 100, 0)
    assert queue.left_ms(0) is None
    heard(queue, 50, number=1)
    assert queue.left_ms(0) == 150
    queue.add(RoomId(2), 30, 0)
    assert queue.left_ms(0) == 180
    heard(queue, 90, number=2, entered=1)
    assert queue.left_ms(0) == 120, "room 1 is among what it says, and room 2 is not"


def test_it_computes_meanwhile_and_no_more_than_there_is() -> None:
    queue = PrefillQueue()
    heard(queue, 50, number=1)
    assert queue.left_ms(20) == 30
    assert queue.left_ms(500) == 0
    queue.add(RoomId(1), 10, 500)
    assert queue.left_ms(500) == 10, "what was idle time is not there for it"
    assert queue.left_ms(505) == 5


def test_a_room_that_is_gone_before_the_worker_had_it_is_not_waited_for() -> None:
    queue = PrefillQueue()
    heard(queue, 0, number=1)
    queue.add(RoomId(1), 100, 0)
    queue.add(RoomId(2), 7, 0)
    queue.release(RoomId(1))
    assert queue.left_ms(0) == 7
    heard(queue, 7, number=2, entered=2)
    queue.release(RoomId(2))
    assert queue.left_ms(0) == 7, "what it entered is its own to say"


def test_a_room_that_its_caller_has_not_brought_is_counted_until_it_is() -> None:
    queue = PrefillQueue()
    queue.add(RoomId(1), 100, 0)
    heard(queue, 0, number=1, entered=5, brought=False)
    assert queue.left_ms(0) == 100
    queue.delivered(RoomId(1))
    assert queue.left_ms(0) == 0


def test_an_older_word_is_not_listened_to() -> None:
    queue = PrefillQueue()
    heard(queue, 10, number=2)
    heard(queue, 999, number=1)
    assert queue.left_ms(0) == 10


def test_counted_work_a_prompt_that_is_scored_is_expected_to_take_as_long_as_its_worker_says() -> None:
    stack = registry_of(P1, D1)
    load = WorkerLoad((), (), 0, 0, 0, RoomId(0), 1, 0, RATE, score_price=13_000)
    stack.update_load(P1.incarnation, load, 0)
    scored = Need(100, 200, scores=99)
    entry = stack.open_room("request", stack.place(scored), scored, 0)
    assert entry.prefill_own_ms == entry.prefill_ms == 100 + 13 * 99
    plain = Need(100, 200)
    behind = stack.open_room("request", stack.place(plain), plain, 0)
    assert behind.prefill_ms == 100 + 13 * 99 + 100
    assert behind.prefill_own_ms == 100


@pytest.mark.parametrize("waiting", [2**64 - 1, 10**12])
def test_no_word_makes_a_time_that_no_message_holds(waiting: int) -> None:
    queue = PrefillQueue()
    heard(queue, waiting, number=1, rate=1)
    assert queue.left_ms(0) == LEFT_MS_MAX


def test_of_two_prefill_workers_the_one_with_less_to_compute_gets_it_though_it_holds_more() -> None:
    """Prompts that are computed and wait for decode delay no other prompt."""
    stack = registry_of(P1, P2, D1)
    large, small = Need(600, 700), Need(100, 200)
    first = stack.open_room("request", stack.place(large), large, 0)
    assert stack.place(small)[0] is stack.worker(P2.incarnation), "nobody has said anything"
    for worker, waiting in ((P1, 0), (P2, 90)):
        load = WorkerLoad((), (), 0, 0, 0, first.id, 1, waiting, RATE)
        stack.mark_delivered(first.id, Side)
        stack.update_load(worker.incarnation, load, 0)
    assert stack.place(small)[0] is stack.worker(P1.incarnation)
    stack.open_room("request", stack.place(small), small, 0)
    assert stack.place(small)[0] is stack.worker(P2.incarnation), "what was placed since is there, too"
    huge = Need(500, 600)
    assert stack.place(huge)[0] is stack.worker(P2.incarnation), "the other has no space for it"
