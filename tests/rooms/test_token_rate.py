"""Tests of the token rate of a worker's last steps, which is absent while nothing is known."""

from baton.rooms.steps.token_rate import KNOWN_MS, WINDOW_US, TokenRate


def test_it_is_that_of_the_last_steps() -> None:
    rate = TokenRate(64)
    assert rate.per_s(0) == 0
    rate.stepped(512, 250_000, now_ms=0)
    assert rate.per_s(0) == 2_048
    for _ in range(20):
        rate.stepped(512, WINDOW_US, now_ms=0)
    assert rate.per_s(0) == 256, "what was so once is forgotten"


def test_a_step_of_a_few_tokens_says_nothing_of_many() -> None:
    rate = TokenRate(64)
    rate.stepped(24, 300_000, now_ms=0)
    assert rate.per_s(0) == 0, "as of a canary, whose step is the first"
    rate.stepped(64, 64_000, now_ms=0)
    rate.stepped(1, 900_000, now_ms=0)
    assert rate.per_s(0) == 1_000


def test_a_step_that_was_left_no_more_says_how_fast_it_goes() -> None:
    rate = TokenRate(64)
    rate.stepped(23, 23_000, now_ms=0, most=24)
    assert rate.per_s(0) == 0
    rate.stepped(24, 48_000, now_ms=0, most=24)
    assert rate.per_s(0) == 500
    rate.stepped(64, 48_000, now_ms=0, most=512)
    assert rate.per_s(0) > 500


def test_a_step_that_was_held_up_changes_little() -> None:
    """A rank that was stopped for ten seconds computed nothing in that time."""
    rate = TokenRate(64)
    for _ in range(20):
        rate.stepped(512, 250_000, now_ms=0)
    rate.stepped(512, 10_000_000, now_ms=0)
    assert 1_500 < rate.per_s(0) <= 2_048
    for _ in range(20):
        rate.stepped(512, 10_000_000, now_ms=0)
    assert rate.per_s(0) < 100, "a worker that is slow from now on"


def test_it_is_known_for_a_while_and_asked_anew_then() -> None:
    rate = TokenRate(64)
    rate.stepped(100, 100_000, now_ms=5)
    assert rate.per_s(5 + KNOWN_MS) == 1_000
    assert rate.per_s(6 + KNOWN_MS) == 0
    rate.stepped(100, 1, now_ms=KNOWN_MS * 2)
    assert rate.per_s(KNOWN_MS * 2) > 0
