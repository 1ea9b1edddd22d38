"""Tests of the number of drafts that a step checks, and of the measured cost of one more position."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from baton.rooms.steps.draft_budget import (
    DRAFTS_MAX,
    PAUSE_MAX,
    PAUSE_MIN,
    POSITIONS_MAX,
    Acceptance,
    Drafts,
    allocate_drafts,
)
from baton.rooms.steps.step_cost import BEFORE, PROMPTS, PROMPTS_ALIKE, SENT_STEPS, StepCost

COST = 150


def _acceptance(*taken_of: tuple[int, int]) -> Acceptance:
    acceptance = Acceptance()
    for taken, drafted in taken_of:
        acceptance.note(drafted, taken)
    return acceptance


def _taken(drafted: int = 4, steps: int = 8) -> Acceptance:
    return _acceptance(*[(drafted, drafted)] * steps)


def _missed(steps: int = 8) -> Acceptance:
    return _acceptance(*[(0, 1)] * steps)


def test_what_is_taken_is_drafted_further_and_what_is_not_is_not() -> None:
    assert allocate_drafts([Drafts(_taken(), 9)], 1, 1, COST) == [9]
    assert allocate_drafts([Drafts(_taken(16), 99)], 1, 1, COST) == [DRAFTS_MAX]
    assert allocate_drafts([Drafts(_missed(), 9)], 1, 1, COST) == [0]
    assert 0 < allocate_drafts([Drafts(Acceptance(), 9)], 1, 1, COST)[0] < 9, "nobody knows yet"


def test_drafts_are_fewer_where_a_position_takes_longer_and_where_more_is_drawn_without() -> None:
    half = _acceptance(*[(2, 4)] * 8)
    cheap, dear = (allocate_drafts([Drafts(half, 16)], 1, 1, cost)[0] for cost in (10, 300))
    assert cheap > dear
    alone, beside_many = (allocate_drafts([Drafts(half, 16)], rows, rows, 50)[0] for rows in (1, 32))
    assert alone > beside_many
    beside_a_prompt = allocate_drafts([Drafts(half, 16)], 1, 1 + 64, 300)[0]
    assert beside_a_prompt > dear, "it adds less to a step that is long anyway"


def test_the_promising_ones_come_first() -> None:
    some = _acceptance(*[(1, 2)] * 8)
    counts = allocate_drafts([Drafts(some, 8), Drafts(_taken(), 8), Drafts(_missed(), 8)], 3, 3, COST)
    assert counts[1] > counts[0] >= counts[2] == 0


def test_what_is_certain_is_drafted_whatever_it_costs_and_what_is_behind_it_is_not() -> None:
    assert allocate_drafts([Drafts(_missed(), 9, certain=5)], 1, 1, 10_000) == [5]
    assert allocate_drafts([Drafts(_missed(), 9, certain=5), Drafts(_missed(), 9)], 40, 40, COST) == [5, 0]
    assert allocate_drafts([Drafts(_taken(16), 9, certain=2)], 1, 1, COST) == [9]
    assert allocate_drafts([Drafts(_missed(), 99, certain=99)], 1, 1, COST) == [DRAFTS_MAX]


def test_one_that_was_given_none_for_long_is_tried_ever_less_often() -> None:
    acceptance, tried = _missed(), []
    for step in range(4 * PAUSE_MAX):
        (count,) = allocate_drafts([Drafts(acceptance, 8)], 1, 1, COST)
        assert count <= 1
        if count:
            tried.append(step)
        acceptance.note(count, 0)
    pauses = [then - now for now, then in pairwise(tried)]
    assert tried[0] == PAUSE_MIN
    assert pauses == sorted(pauses)
    assert pauses[-1] == PAUSE_MAX + 1
    for _ in range(4):
        acceptance.note(1, 1)
    assert allocate_drafts([Drafts(acceptance, 8)], 1, 1, COST)[0] > 1, "it is taken again"


def test_drafts_that_are_not_taken_cost_little() -> None:
    """In a text where no draft is right, all steps take at most 2 % longer than without drafts."""
    acceptance, steps, time = Acceptance(), 128, 0.0
    for _ in range(steps):
        (count,) = allocate_drafts([Drafts(acceptance, 8)], 1, 1, COST)
        acceptance.note(count, 0)
        time += 1 + COST / 1000 * (1 + count)
    assert time / (steps * (1 + COST / 1000)) < 1.02


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=100),
    st.integers(1, 64),
    st.integers(1, 10_000),
)
def test_no_more_than_there_are_and_no_more_than_a_step_may(
    each: list[tuple[int, int]], rows: int, cost: int
) -> None:
    drafts = [Drafts(_taken(steps=steps), available) for steps, available in each]
    counts = allocate_drafts(drafts, rows, rows, cost)
    assert all(0 <= count <= min(of.available, DRAFTS_MAX) for count, of in zip(counts, drafts, strict=True))
    assert sum(counts) <= POSITIONS_MAX


def _measured(*steps: tuple[int, float]) -> StepCost:
    cost = StepCost()
    for positions, ms in steps:
        cost.note(positions, ms)
    return cost


def test_a_line_through_the_steps_says_what_a_position_takes() -> None:
    steps = [(1 + step % 8, 10 + 2.0 * (1 + step % 8)) for step in range(200)]
    cost = _measured(*steps)
    assert 170 < cost.costs.position < 215, "2 of 10"
    costs = cost.costs
    assert cost.news() == costs != BEFORE
    assert cost.agreed == BEFORE, "until all ranks have heard it"
    assert cost.news() is None, "it is said once"


def test_steps_that_are_all_alike_say_nothing_new() -> None:
    assert _measured(*[(4, 20.0)] * 100).news() is None
    assert _measured(*[(1 + step % 8, 50.0) for step in range(SENT_STEPS - 1)]).news() is None, "too few"


def test_a_step_that_was_held_up_changes_little() -> None:
    steps = [(1 + step % 8, 10 + 2.0 * (1 + step % 8)) for step in range(200)]
    steps[150] = (2, 5_000.0)
    assert 100 < _measured(*steps).costs.position < 300


def test_what_a_draft_models_token_takes_is_told_beside_a_position() -> None:
    cost = _measured(*[(1 + step % 8, 10 + 2.0 * (1 + step % 8)) for step in range(200)])
    assert cost.costs.draft == BEFORE.draft, "no model drafted"
    for _ in range(100):
        cost.drafted(4.0)
    cost.drafted(5_000.0)
    assert 350 < cost.costs.draft < 480, "4 of 10, and what was held up changes little"
    told = cost.news()
    assert told is not None
    assert told.draft > 2 * BEFORE.draft


def _of_prompts(*steps: tuple[int, float]) -> StepCost:
    """Return a StepCost that has seen these prefill steps, read after each one as the leader does."""
    cost = StepCost(PROMPTS, PROMPTS_ALIKE)
    for positions, ms in steps:
        cost.note(positions, ms)
        cost.news()
    return cost


def test_steps_of_prompts_say_how_many_tokens_a_step_is_worth() -> None:
    """This holds where a long prompt follows many short ones, too: it takes long because of its length."""
    assert PROMPTS.fixed_tokens == 1000, "until it was measured steps are long"
    mixed = [(64 + 64 * (step % 8), 14 + 1.07 * (64 + 64 * (step % 8))) for step in range(60)]
    assert 10 < _of_prompts(*mixed).costs.fixed_tokens < 17
    late = [(64, 14 + 1.07 * 64)] * 30 + [(512, 14 + 1.07 * 512)] * 4
    assert 5 < _of_prompts(*late).costs.fixed_tokens < 50


def test_steps_of_prompts_that_are_alike_say_nothing() -> None:
    """With prompts of 500 to 506 tokens, something other than the length decides how long a step takes."""
    alike = [(500 + step % 7, 20.0 + step % 5) for step in range(100)]
    assert _of_prompts(*alike).costs.fixed_tokens > 400
