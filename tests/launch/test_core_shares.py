"""Tests of the cores of each worker, and of the wait before a restart."""

from hypothesis import given
from hypothesis import strategies as st

from baton.launch.core_shares import cut_cores, deal_cores, share_cores
from baton.launch.level_filter import LevelFilter
from baton.launch.restart_backoff import Backoff


def test_one_of_each_on_two_cores_get_one_core_each() -> None:
    assert share_cores([0, 1], 1, 1) == ([(0,)], [(1,)])


def test_roles_stay_apart_when_workers_outnumber_cores() -> None:
    assert share_cores([0, 1], 2, 2) == ([(0,), (0,)], [(1,), (1,)])


def test_cores_are_split_in_runs_by_role() -> None:
    assert share_cores(range(8), 1, 3) == ([(0, 1)], [(2, 3), (4, 5), (6, 7)])


def test_a_role_gets_cores_by_its_ranks_and_its_workers_share_them_evenly() -> None:
    assert share_cores(range(8), 1, 2, prefill_ranks=4, decode_ranks=2) == (
        [(0, 1, 2, 3)],
        [(4, 5), (6, 7)],
    )


def test_a_workers_cores_are_dealt_to_its_ranks() -> None:
    assert deal_cores([4, 5, 6, 7, 8], 2) == [(4, 5, 6), (7, 8)]
    assert deal_cores([4, 5], 3) == [(4,), (5,), (4,)]


def test_workers_of_both_sides_have_runs_of_their_own_and_leave_the_others_theirs() -> None:
    assert cut_cores([0, 1], 2, 0) == ([(0,), (1,)], (0, 1))
    assert cut_cores(range(6), 1, 2) == ([(0, 1)], (2, 3, 4, 5))
    assert cut_cores([5], 1, 2) == ([(5,)], (5,))
    assert cut_cores(range(2), 0, 2) == ([], (0, 1))
    assert share_cores(range(3), 0, 1) == ([], [(0, 1, 2)])


def test_one_core_is_shared_by_all() -> None:
    assert share_cores([5], 1, 2) == ([(5,)], [(5,), (5,)])


@given(st.sets(st.integers(0, 300), min_size=2, max_size=128), st.integers(1, 20), st.integers(1, 20))
def test_every_worker_has_cores_and_roles_never_share(cores: set[int], prefill: int, decode: int) -> None:
    for_prefill, for_decode = share_cores(sorted(cores), prefill, decode)
    assert (len(for_prefill), len(for_decode)) == (prefill, decode)
    assert all(for_prefill)
    assert all(for_decode)
    prefill_cores = {cpu for share in for_prefill for cpu in share}
    decode_cores = {cpu for share in for_decode for cpu in share}
    assert prefill_cores.isdisjoint(decode_cores)
    assert prefill_cores | decode_cores == cores or len(cores) < prefill + decode


def test_the_wait_doubles_up_to_its_most_and_starts_over_after_a_stable_run() -> None:
    backoff = Backoff()
    assert [backoff.next_ms(ran_ms=100) for _ in range(9)] == [
        0,
        500,
        1000,
        2000,
        4000,
        8000,
        16000,
        30000,
        30000,
    ]
    assert backoff.next_ms(ran_ms=10_000) == 0
    assert backoff.next_ms(ran_ms=9_999) == 500


def test_only_lines_of_the_level_and_what_follows_them_are_shown() -> None:
    shown = LevelFilter("warning")
    lines = {
        "a native library says hello": False,
        "2026-01-31T12:00:00.000Z INFO x started": False,
        "a line that follows it": False,
        "2026-01-31T12:00:00.000Z ERROR x failed": True,
        "Traceback (most recent call last):": True,
        '{"time": "2026-01-31T12:00:00.000Z", "level": "info", "logger": "x"}': False,
        '{"time": "2026-01-31T12:00:00.000Z", "level": "warning", "logger": "x"}': True,
    }
    assert [shown(line) for line in lines] == list(lines.values())
