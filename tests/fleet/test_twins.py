"""Tests of placement on processes that serve both prefill and decode, by their weights."""

from dataclasses import replace
from typing import Final

import pytest

from baton.fleet.need import Need
from baton.fleet.placement import Pair
from baton.fleet.registry import Registry
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import NoCapacity, UnknownWorker
from baton.rooms.phases import Side
from baton.rooms.worker_facts import OtherSide, WorkerFacts
from baton.rooms.worker_load import WorkerLoad
from tests.fleet import test_registry
from tests.fleet.test_registry import apart, registry_of

P1, D1 = (replace(each, tokens_max=10_000, rooms_max=64) for each in (test_registry.P1, test_registry.D1))
NEED: Final = Need(10, 20, may_be_local=True)
SCORED: Final = replace(NEED, may_be_local=False)


def twins(number: int, weight: int = 50) -> tuple[WorkerFacts, WorkerFacts]:
    """The prefill and the decode side of process `both-{number}`."""
    process = f"both-{number}"
    one, other = Incarnation(1_000 + number), Incarnation(2_000 + number)
    prefill = replace(
        P1, name=f"{process}-prefill", incarnation=one, other_side=OtherSide(other, process, weight)
    )
    decode = replace(
        D1,
        name=f"{process}-decode",
        incarnation=other,
        computes=True,
        other_side=OtherSide(one, process, weight),
    )
    return prefill, decode


A, B = twins(0), twins(1)


def names(pair: Pair) -> tuple[str | None, str]:
    prefill, decode = pair
    return None if prefill is None else prefill.facts.name, decode.facts.name


def opened(stack: Registry, need: Need = NEED) -> tuple[str | None, str]:
    """Open a room now that stays open, and return the names of its workers."""
    pair = stack.place(need)
    stack.open_room("request", pair, need, 0)
    return names(pair)


def full(stack: Registry, worker: WorkerFacts) -> None:
    """Report a load of the worker in which all of its pages are taken."""
    taken = WorkerLoad((0,), (0,), 8, running=64, running_max=64, entered=RoomId(0), number=1)
    stack.update_load(worker.incarnation, taken, 0)


def test_one_process_gets_a_room_alone_and_is_said_to_keep_it() -> None:
    stack = registry_of(*A)
    pair = stack.place(NEED)
    assert names(pair) == (None, "both-0-decode")
    entry = stack.open_room("request", pair, NEED, 0)
    assert entry.is_same_process
    assert entry.where == "on both-0-decode, whose process serves both sides"
    assert names(stack.place(SCORED)) == ("both-0-prefill", "both-0-decode"), "prefill alone scores prompts"


def test_rooms_go_to_the_process_that_has_less_on_either_side() -> None:
    stack = registry_of(*A, *B)
    assert [opened(stack)[1] for _ in range(4)] == [f"both-{n}-decode" for n in (0, 1, 0, 1)]
    again = registry_of(*A, *B)
    opened(again, SCORED)
    assert opened(again) == (None, "both-1-decode"), (
        "its decode side waits for what its prefill side computes"
    )


def test_where_all_other_decode_workers_are_full_an_idle_process_keeps_what_it_computes() -> None:
    stack = registry_of(P1, D1, *B)
    full(stack, D1)
    for _ in range(3):
        stack.open_room("request", (stack.worker(P1.incarnation), stack.worker(D1.incarnation)), NEED, 0)
    assert names(stack.place(NEED)) == (None, "both-1-decode")


def test_a_weight_moves_rooms_from_one_side_to_the_other_from_the_next_one_on() -> None:
    stack = registry_of(*A, *B)
    stack.weigh("both-0", 100)
    stack.weigh("both-1", 0)
    before = [opened(stack) for _ in range(6)]
    assert before == [("both-0-prefill", "both-1-decode")] * 6
    stack.weigh("both-0", 0)
    stack.weigh("both-1", 100)
    after = [opened(stack) for _ in range(6)]
    assert after == [("both-1-prefill", "both-0-decode")] * 6


def test_a_larger_weight_gets_more_of_the_rooms_of_its_side() -> None:
    stack = registry_of(*A, *B)
    for _ in range(4):
        opened(stack)  # it has looked at both, before a weight changes
    stack.weigh("both-0", 20)
    taken = [opened(stack) for _ in range(26)]
    decode = [name for _, name in taken]
    assert decode.count("both-0-decode") > decode.count("both-1-decode")
    assert ("both-1-prefill", "both-0-decode") in taken


def test_a_side_of_weight_nothing_gets_no_room_while_another_serves_and_all_when_none_does() -> None:
    stack = registry_of(*A, *B)
    stack.weigh("both-1", 100)
    full(stack, A[1])
    with pytest.raises(NoCapacity, match="every decode worker is full"):
        stack.place(NEED)
    stack.leave(A[1].incarnation, "exited", 0)
    assert stack.place(NEED)[1].facts == B[1]


def test_where_all_others_are_to_be_avoided_a_side_of_weight_nothing_is_not() -> None:
    """A request that failed on the other processes is tried on one whose weight for this side is zero."""
    stack = registry_of(*A, *B)
    stack.weigh("both-0", 100)
    stack.weigh("both-1", 0)
    assert names(stack.place(SCORED)) == ("both-0-prefill", "both-1-decode")
    tried_again = stack.place(SCORED, avoid={A[0].incarnation, B[1].incarnation})
    assert names(tried_again) == ("both-1-prefill", "both-0-decode")


def test_a_process_without_its_other_side_is_a_worker_of_one() -> None:
    stack = registry_of(*A)
    stack.leave(A[0].incarnation, None, 0)
    assert names(stack.place(NEED)) == (None, "both-0-decode")
    entry = stack.open_room("request", stack.place(NEED), NEED, 0)
    assert not entry.is_same_process, "there is no prefill worker"
    stack = registry_of(*A)
    stack.leave(A[1].incarnation, None, 0)
    assert stack.worker(A[0].incarnation).twin is None


def test_a_call_that_broke_says_as_much_of_the_other_side_until_each_renews_its_lease() -> None:
    stack = registry_of(*A, *B)
    stack.suspect(A[1].incarnation)
    assert names(stack.place(SCORED)) == ("both-1-prefill", "both-1-decode")
    stack.renew(A[0].incarnation, 0)
    stack.renew(A[1].incarnation, 0)
    assert names(stack.place(SCORED)) == ("both-0-prefill", "both-0-decode")


def test_sides_that_do_not_name_each_other_are_not_one_process() -> None:
    stranger = replace(A[1], other_side=OtherSide(Incarnation(7), "both-0"))
    stack = registry_of(A[0], stranger)
    assert names(stack.place(NEED)) == ("both-0-prefill", "both-0-decode")


def test_what_one_side_was_told_before_the_other_came_is_of_both() -> None:
    stack = registry_of(A[0])
    stack.weigh("both-0", 80)
    stack.register(A[1], 0)
    assert [stack.worker(each.incarnation).weight for each in A] == [80, 20]


def test_both_sides_tell_the_same_weight_which_a_worker_of_one_has_none_of() -> None:
    stack = registry_of(*A, P1)
    stack.weigh("both-0", 80)
    told = [stack.worker(each.incarnation).prefill_weight for each in (*A, P1)]
    assert told == [80, 80, None]


def test_a_weight_is_of_a_process_of_both_sides_alone() -> None:
    stack = registry_of(*A, P1)
    for name in (P1.name, "both-0-decode", ""):
        with pytest.raises(UnknownWorker, match="serves both sides here"):
            stack.weigh(name, 10)
    assert {each.facts.side for each in stack.weigh("both-0", 10)} == set(Side)


def test_a_pair_that_does_not_connect_is_passed_by_in_its_own_process() -> None:
    stack = registry_of(*A, P1)
    apart(stack, P1, A[1])
    assert names(stack.place(NEED)) == (None, "both-0-decode")
