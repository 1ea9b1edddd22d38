"""Tests of the division of prompts into the parts that a prefill step computes."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.ids import Incarnation, RoomId
from baton.prefill.prefill_room import PrefillRoom
from baton.rooms.request import Request
from baton.rooms.steps.step_cost import PROMPTS, PROMPTS_ALIKE, StepCost
from baton.worker.prompt_chunks import next_chunks
from tests.prefill import toy
from tests.prefill.bench import deadlines


def room(name: int, prompt: int, computed: int = 0, top: int | None = None) -> PrefillRoom:
    """Return a room with `computed` of `prompt` tokens computed. `top`: score the prompt, with this many
    likeliest tokens."""
    asked = toy.request(str(name), range(prompt), prompt_logprobs=top)
    opened = made(asked)
    opened.computed = computed
    return opened


def made(asked: Request) -> PrefillRoom:
    name = RoomId(int(asked.request_id))
    return PrefillRoom(name, asked.request_id, Incarnation(2), 0, (1,), deadlines(), 0, request=asked)


def may_take(room: PrefillRoom, budget: int) -> int:
    """Return the most tokens of a room for one step: all that are left, or less so that a long prompt's last
    part is small."""
    left = len(room.request.prompt) - room.computed
    long = len(room.request.prompt) > 3 * budget
    return max(left - budget // 4, left // 2) if long and left > budget // 4 else left


@pytest.mark.parametrize(
    ("prompt", "stops"),
    [
        (24, [8, 16, 24]),
        (26, [8, 16, 24, 26]),
        (27, [8, 16, 24, 25, 27]),
        (31, [8, 16, 24, 29, 31]),
        (32, [8, 16, 24, 30, 32]),
    ],
)
def test_the_last_part_of_a_prompt_of_several_steps_is_small(prompt: int, stops: list[int]) -> None:
    long, seen = room(1, prompt), []
    while not long.complete:
        (part,) = next_chunks([long], 8, 8)
        seen.append(part.stop)
        assert part.start == long.computed
        long.computed = part.stop
    assert seen == stops


def test_what_is_left_before_a_small_last_part_is_no_sliver() -> None:
    assert told([room(1, 1665, computed=1536)], 512) == [(1, 1536, 1600, False)]


Told = list[tuple[int, int, int, bool]]


def told(rooms: list[PrefillRoom], budget: int, scored: int = 1, fixed: int | None = None) -> Told:
    parts = next_chunks(rooms, budget, scored, fixed_tokens=fixed)
    return [(each.room.id, each.start, each.stop, each.last) for each in parts]


def test_several_prompts_share_a_step() -> None:
    assert told([room(1, 5), room(2, 3, computed=1), room(3, 2)], 12) == [
        (1, 0, 5, True),
        (2, 1, 3, True),
        (3, 0, 2, True),
    ]


def test_prompts_of_one_length_are_computed_one_after_the_other() -> None:
    assert told([room(1, 8), room(2, 8), room(3, 8)], 8) == [(1, 0, 8, True)]
    assert told([room(1, 8), room(2, 8), room(3, 8)], 12) == [(1, 0, 8, True), (2, 0, 4, False)]


def test_a_short_prompt_does_not_wait_for_a_long_one_that_came_before_it() -> None:
    assert told([room(1, 1000), room(2, 900), room(3, 3)], 8) == [(1, 0, 5, False), (3, 0, 3, True)]


def test_a_long_prompt_is_not_kept_waiting_by_short_ones_that_never_end() -> None:
    long, steps = room(1, 100), 0
    while not long.complete:
        rooms = [long, *(room(2 + number, 4) for number in range(9))]
        for part in next_chunks(rooms, 10, 1):
            part.room.computed = part.stop
        steps += 1
    assert steps <= 100 // (10 // 2)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=8), st.integers(1, 30))
def test_half_is_the_oldests_and_no_budget_is_left_over_or_exceeded(
    sizes: list[tuple[int, int]], budget: int
) -> None:
    rooms = [room(name, prompt, min(done, prompt)) for name, (prompt, done) in enumerate(sizes, 1)]
    parts = next_chunks(rooms, budget, 1)
    wanted = [each for each in rooms if not each.complete]
    assert [part.room for part in parts] == [each for each in wanted if each in [part.room for part in parts]]
    taken = [part.stop - part.start for part in parts]
    assert all(count > 0 for count in taken)
    assert sum(taken) == min(budget, sum(may_take(each, budget) for each in wanted))
    assert all(part.start == part.room.computed for part in parts)
    if wanted:
        assert parts[0].room is wanted[0]
        assert taken[0] >= min(budget / 2, may_take(wanted[0], budget))


def test_prompts_that_are_scored_share_the_part_of_a_step_that_may_be() -> None:
    """The logits of their positions take memory. The others fill the rest."""
    rooms = [room(1, 9, top=0), room(2, 20), room(3, 9, top=5), room(4, 2, top=0)]
    assert told(rooms, 20, scored=6) == [
        (1, 0, 4, False),
        (2, 0, 14, False),
        (4, 0, 2, True),
    ]


def test_behind_the_last_token_that_is_scored_nothing_is() -> None:
    """The prompt's last token is scored by the position before it."""
    assert told([room(1, 9, computed=8, top=0), room(2, 9, computed=3, top=0)], 20, scored=4) == [
        (1, 8, 9, True),
        (2, 3, 7, False),
    ]
    (part,) = next_chunks([room(1, 9, computed=4, top=0)], 20, 20)
    assert part.scored == 4
    (part,) = next_chunks([room(1, 9, computed=8, top=0)], 20, 20)
    assert part.scored == 0


def test_what_an_earlier_room_drew_is_not_scored() -> None:
    asked = toy.request("1", range(6), 9, output=(1, 2, 3), prompt_logprobs=0)
    (part,) = next_chunks([made(asked)], 20, 20)
    assert (part.stop, part.scored) == (9, 5)


PRICE = 13_000
"""Thousandths of a token that scoring one costs."""


def bought(rooms: list[PrefillRoom], budget: int, price: int = PRICE) -> Told:
    parts = next_chunks(rooms, budget, 341, score_price=price)
    return [(each.room.id, each.start, each.stop, each.last) for each in parts]


def test_counted_work_a_step_scores_as_many_tokens_as_its_budget_pays_for() -> None:
    assert bought([room(1, 7800, top=1)], 512) == [(1, 0, 512 // 14, False)]
    assert bought([room(1, 7800, top=1)], 512, price=0) == [(1, 0, 341, False)], "of which memory is left"


def test_counted_work_a_short_prompt_has_its_part_beside_one_that_is_scored() -> None:
    for price in (0, 1_000, PRICE, 64_000):
        long, short = room(1, 7800, top=1), room(2, 200)
        taken = {
            int(part.room.id): part.stop for part in next_chunks([long, short], 512, 341, score_price=price)
        }
        assert taken[2] == (171 if price == 0 else 200), "whole, but where half is the other's"
        assert taken[1] > 0


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=8), st.integers(1, 30))
def test_counted_work_no_step_costs_more_than_its_budget_or_one_token(
    sizes: list[tuple[int, bool]], budget: int
) -> None:
    rooms = [room(name, prompt, top=0 if scored else None) for name, (prompt, scored) in enumerate(sizes, 1)]
    parts = next_chunks(rooms, budget, 20, score_price=PRICE)
    costs = [part.stop - part.start + 13 * part.scored for part in parts]
    assert parts[0].room is rooms[0]
    assert sum(costs) <= max(budget, 14 + budget // 2)


def test_counted_work_a_scored_prompt_is_not_kept_waiting_by_short_ones_that_never_end() -> None:
    long, steps = room(1, 100, top=0), 0
    while not long.complete:
        rooms = [long, *(room(2 + number, 4) for number in range(9))]
        for part in next_chunks(rooms, 10, 20, score_price=64_000):
            part.room.computed = part.stop
        steps += 1
    assert steps <= 100


def test_counted_work_what_scoring_costs_is_measured_and_steps_are_as_long_as_others() -> None:
    """A step takes 20 ms, one for each token, and 13 for each that is scored."""
    cost, longest = StepCost(PROMPTS, PROMPTS_ALIKE), 0
    for number in range(200):
        rooms = [room(1, 7800, top=1)] if number % 4 else [room(2, 128 + 64 * (number % 7))]
        parts = next_chunks(rooms, 512, 341, score_price=cost.agreed.score_price)
        tokens, scored = sum(part.stop - part.start for part in parts), sum(part.scored for part in parts)
        ms = 20 + tokens + 13 * scored
        cost.note(tokens, ms, scored)
        cost.agreed = cost.news() or cost.agreed
        longest = max(longest, ms) if number >= 100 else 0
    assert 10_000 < cost.agreed.score_price < 16_000
    assert longest < 1.3 * (20 + 512)


FIXED = 13
"""Tokens that take as long as what a step takes besides."""


def lot(rooms: list[PrefillRoom], budget: int = 512, fixed: int = FIXED) -> Told:
    return told(rooms, budget, fixed=fixed)


def test_a_step_is_no_longer_than_is_worth_it_to_those_that_wait() -> None:
    eight = [room(name, 64) for name in range(1, 9)]
    assert lot(eight) == [(1, 0, 64, True), (2, 0, 64, True), (3, 0, 35, False)], "twice the root of 512 * 13"
    assert lot(eight, fixed=1000) == told(eight, 512), "where each step takes long, they share one"
    assert lot([room(1, 300), room(2, 300)]) == [(1, 0, 300, True)]
    assert lot([room(1, 500), room(2, 40)], fixed=0) == [(1, 0, 40, False), (2, 0, 40, True)]
    assert lot([room(1, 2), room(2, 300)], fixed=0) == [(1, 0, 2, True), (2, 0, 62, False)], "no sliver"


def test_where_no_prompt_would_end_a_step_is_as_long_as_it_may_be() -> None:
    assert lot([room(1, 1500), room(2, 1500)]) == [(1, 0, 512, False)]
    assert lot([room(1, 1500)], fixed=0) == [(1, 0, 512, False)]
    ends_late = [room(1, 2000, computed=1700), room(2, 200)]
    assert lot(ends_late) == told(ends_late, 512), "its last part is one of its own"
    scored = [room(1, 300, top=0), *(room(name, 60) for name in range(2, 8))]
    assert any(last for *_, last in lot(scored, fixed=1))


@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(0, 400), st.sampled_from([None, None, 0])),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 200),
    st.integers(0, 40),
)
@example([(80, 68, None), (8, 0, None)], 20, 0)
@example([(300, 0, 0), *[(60, 0, None)] * 6], 200, 1)
def test_where_the_longest_step_ends_a_prompt_the_chosen_one_ends_one(
    sizes: list[tuple[int, int, int | None]], budget: int, fixed: int
) -> None:
    rooms = [room(name, prompt, min(done, prompt), top) for name, (prompt, done, top) in enumerate(sizes, 1)]
    longest, chosen = told(rooms, budget), lot(rooms, budget, fixed)
    taken, most = (sum(stop - start for _, start, stop, _ in each) for each in (chosen, longest))
    assert taken <= most
    ended, ends = (sum(last for *_, last in each) for each in (longest, chosen))
    assert bool(ends) == bool(ended)
    if not ends:
        assert chosen == longest
    first = next((each for each in rooms if not each.complete), None)
    if first is not None and first.request.prompt_logprobs is None:
        assert chosen[0][2] - chosen[0][1] >= min(taken / 2, may_take(first, budget)), "half is the oldest's"


def test_a_prompt_that_is_computed_whole_is_one_part_alone_in_its_step_whatever_the_budget() -> None:
    rooms = [room(1, 40), room(2, 3)]
    (part,) = next_chunks(rooms, 8, 8, fixed_tokens=4, whole=True)
    assert (part.room, part.start, part.stop, part.last) == (rooms[0], 0, 40, True)
    rooms[0].computed = 40
    (part,) = next_chunks(rooms, 8, 8, whole=True)
    assert (part.room, part.stop) == (rooms[1], 3)
