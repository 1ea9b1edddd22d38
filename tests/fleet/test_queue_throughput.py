"""Waits are judged by what was done while something waited, and by nothing else."""

from itertools import pairwise

from baton.fleet.fair_queue import QueuedWork
from baton.fleet.queue_throughput import (
    BUSY_MS_MIN,
    CLASSES_MAX,
    DONE_MIN,
    SPREAD_MS,
    WINDOW_MS,
    BusyThroughput,
    QueueThroughput,
)


def measured(busy_ms: int, done: int, units: int = 1) -> BusyThroughput:
    """Return a measurement of a stack that was busy for so long and did so much, evenly spread."""
    pace = BusyThroughput()
    pace.look(0, waits=True)
    for number in range(1, done + 1):
        pace.look(number * busy_ms // done, waits=True)
        pace.done(units)
    return pace


def test_without_enough_of_a_measurement_nothing_is_said() -> None:
    assert BusyThroughput().wait_ms(1) is None
    assert measured(BUSY_MS_MIN - 1, DONE_MIN).wait_ms(1) is None
    assert measured(BUSY_MS_MIN, DONE_MIN - 1).wait_ms(1) is None
    assert measured(BUSY_MS_MIN, DONE_MIN).wait_ms(1) == BUSY_MS_MIN // DONE_MIN


def test_what_waits_takes_as_long_as_as_much_took_before_it() -> None:
    pace = measured(10_000, 100, units=50)
    assert pace.wait_ms(50) == 100
    assert pace.wait_ms(5_000) == 10_000


def test_an_idle_hour_makes_nothing_slow_and_what_is_done_in_it_does_not_count() -> None:
    pace = measured(10_000, 10)
    pace.look(10_000, waits=False)
    pace.done()
    pace.look(3_600_000, waits=True)
    assert pace.wait_ms(1) == 1_000


def test_what_was_long_ago_is_forgotten() -> None:
    pace = measured(10_000, 1_000)
    for second in range(10, 15 + WINDOW_MS // 1000):
        pace.look(1_000 * second, waits=True)
        pace.done()
    assert pace.wait_ms(1) in range(980, 1_001)


def test_it_keeps_no_more_than_its_window_however_often_it_is_asked() -> None:
    pace = BusyThroughput()
    for now_ms in range(0, 4 * WINDOW_MS, 7):
        pace.look(now_ms, waits=True)
        pace.done()
    assert len(pace.spans) <= WINDOW_MS / 250 + 2
    assert pace.wait_ms(1_000) in range(6_990, 7_011)


TOKENS = 50
"""Work of each request."""


def behind(of_all: int, in_class: int) -> QueuedWork:
    return QueuedWork(of_all, in_class, TOKENS * of_all, TOKENS * in_class)


def waits_ms(pace: QueueThroughput, of_all: int, in_class: int, priority: int) -> int:
    wait_ms = pace.wait_ms(behind(of_all, in_class), priority, TOKENS)
    assert wait_ms is not None
    return wait_ms


def served_by_class(*rounds: int) -> QueueThroughput:
    """Serve a room every 100 ms, of these classes in turn, while requests of all of them wait."""
    pace = QueueThroughput()
    for priority in {*rounds}:
        pace.waits(priority)
    pace.look(0, 1, lambda _: 1)
    for number in range(200):
        pace.look(100 * number, 1, lambda _: 1)
        pace.served(rounds[number % len(rounds)], TOKENS)
        pace.progressed(TOKENS, 1)
    return pace


def test_a_class_is_judged_by_how_fast_it_was_served_itself() -> None:
    pace = served_by_class(0, 0, 0, 0, 1)
    assert waits_ms(pace, 9, 9, 0) in range(1_200, 1_300)
    assert waits_ms(pace, 10, 0, 1) in range(1_050, 1_150), "by how many wait"
    assert waits_ms(pace, 10, 9, 1) in range(4_700, 5_100), "by how few of it were served"
    assert waits_ms(pace, 10, 0, 2) in range(1_050, 1_150), "of a class that is not known all is known"


def test_those_that_are_turned_away_come_back_one_by_one_and_all_of_them_soon() -> None:
    pace = served_by_class(0)
    told = [pace.come_back_ms(20_000, behind(50, 50), 0, TOKENS, 4_000) for _ in range(1_000)]
    assert all(each is not None for each in told)
    away = [each for each in told if each is not None]
    assert away[0] in range(1_000, 1_200), "by then it waits 4 s"
    steps = [later - sooner for sooner, later in pairwise(away)]
    assert {*steps[:500]} == {99}, "a place after the other"
    assert away[-1] == away[0] + SPREAD_MS
    assert pace.come_back_ms(20_000 + 2 * SPREAD_MS, behind(9, 9), 0, TOKENS, 4_000) in range(99, 102), (
        "all have come"
    )


def test_of_classes_without_number_the_last_are_known() -> None:
    pace = QueueThroughput()
    for priority in range(10 * CLASSES_MAX):
        pace.waits(priority)
        pace.look(priority, 1, lambda _: 1)
    assert len(pace.classes) == CLASSES_MAX
