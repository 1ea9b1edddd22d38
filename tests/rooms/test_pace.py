"""Is what waits judged by what was done while something waited, and by nothing else?"""

from services.rooms.pace import BUSY_MS_MIN, DONE_MIN, WINDOW_MS, Pace


def measured(busy_ms: int, done: int, units: int = 1) -> Pace:
    """Busy for so long, with so much done, spread over it."""
    pace = Pace()
    pace.look(0, waits=True)
    for number in range(1, done + 1):
        pace.look(number * busy_ms // done, waits=True)
        pace.done(units)
    return pace


def test_without_enough_of_a_measurement_nothing_is_said() -> None:
    assert Pace().wait_ms(1) is None
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
    pace = Pace()
    for now_ms in range(0, 4 * WINDOW_MS, 7):
        pace.look(now_ms, waits=True)
        pace.done()
    assert len(pace._spans) <= WINDOW_MS / 250 + 2
    assert pace.wait_ms(1_000) in range(6_990, 7_011)
