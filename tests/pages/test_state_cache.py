"""Tests of cached states: which prefix a computation can begin behind, and who holds the states' pages."""

from typing import Final

import pytest

from baton.engine_interface import Row, Sequence
from baton.ids import PageId, RoomId
from baton.pages.errors import OutOfPages
from baton.pages.holdings import Holdings
from baton.pages.pool import PagePool, PageState
from baton.pages.prefix_tree import PrefixTree
from baton.pages.record import SLOT_BYTES
from baton.pages.slots import SlotPool
from baton.rooms.request import Request
from baton.worker.prompt_chunks import next_chunks

SIZE: Final = 4
PROMPT: Final = tuple(range(19))
"""Four blocks, and three tokens more."""
STATES: Final = 6


def holdings(states: int = STATES, pages: int = 24) -> Holdings:
    """Return holdings of pages of 4 tokens beside states, which rooms store at least 4 tokens apart."""
    slots = SlotPool(memoryview(bytearray(8 * SLOT_BYTES)))
    return Holdings([PagePool(pages), PagePool(states)], slots, PrefixTree((SIZE, 0)), state_gap_tokens=SIZE)


def computed(held: Holdings, room: int, tokens: tuple[int, ...]) -> None:
    """Compute a prompt, store its states and keep its pages, as a prefill worker does."""
    held.take(RoomId(room), (-(-len(tokens) // SIZE), 1), tokens[:-1], computes=True)
    held.store_states(RoomId(room), tokens[:-1])
    held.keep(RoomId(room), tokens)
    held.give_back(RoomId(room))


def begun(held: Holdings, room: int, tokens: tuple[int, ...]) -> int:
    """Return how many tokens a room does not have to compute."""
    pages = -(-len(tokens) // SIZE), 1
    return held.take(RoomId(room), pages, tokens[:-1], computes=True).shared_tokens


def test_a_prompt_is_begun_behind_the_last_block_of_an_equal_one() -> None:
    held = holdings()
    assert begun(held, 1, PROMPT) == 0
    stored = dict(held.store_states(RoomId(1), PROMPT[:-1]))
    assert list(stored) == [16], "behind its last whole block"
    held.keep(RoomId(1), PROMPT)
    held.give_back(RoomId(1))
    assert held.cached(PROMPT[:-1]) == 16
    assert begun(held, 2, PROMPT) == 16
    holding = held.get(RoomId(2))
    assert holding.restored == stored[16]
    assert holding.pages[1] != holding.restored[1], "the cached state is only read"
    assert held.pools[1].census()[PageState.COMMITTED] == 1
    held.give_back(RoomId(2))
    assert held.available == held.sizes


def test_without_a_state_no_computation_begins_behind_cached_pages_and_a_grant_does() -> None:
    held = holdings()
    held.take(RoomId(1), (5, 1), PROMPT[:-1], computes=True)
    held.keep(RoomId(1), PROMPT)
    held.give_back(RoomId(1))
    assert held.cached(PROMPT[:-1]) == 0
    assert begun(held, 2, PROMPT) == 0
    held.give_back(RoomId(2))
    assert held.take(RoomId(3), (5, 1), PROMPT[:-1]).shared_tokens == 16, "its state is sent to it"


def test_where_prompts_part_a_state_is_stored_for_the_third() -> None:
    held = holdings()
    computed(held, 1, PROMPT)
    other = (*PROMPT[:9], *range(100, 112))
    assert begun(held, 2, other) == 0, "the first has left none where they part"
    assert sorted(held.store_states(RoomId(2), other[:-1])) == [8, 20]
    held.keep(RoomId(2), other)
    held.give_back(RoomId(2))
    assert begun(held, 3, (*PROMPT[:9], *range(200, 230))) == 8


def test_a_state_that_is_there_already_is_spared() -> None:
    held = holdings()
    for room in (1, 2):
        held.take(RoomId(room), (5, 1), (), computes=True)
        held.store_states(RoomId(room), PROMPT[:-1])
    for room in (1, 2):
        held.keep(RoomId(room), PROMPT)
        held.give_back(RoomId(room))
    assert held.pools[1].census()[PageState.CACHED] == 1
    assert held.available == held.sizes


def test_a_room_that_fails_gives_back_the_states_that_it_was_to_store() -> None:
    held = holdings()
    begun(held, 1, PROMPT)
    assert held.store_states(RoomId(1), PROMPT[:-1])
    assert held.returning(RoomId(1)) == (5, 2)
    held.give_back(RoomId(1))
    assert held.pools[1].free == STATES


def test_memory_as_used_states_are_stored_while_half_of_all_are_available() -> None:
    held = holdings(states=4)
    for room in (1, 2):
        begun(held, room, PROMPT)
    assert not held.store_states(RoomId(1), PROMPT[:-1]), "one would be left"


def test_states_are_evicted_before_and_with_their_blocks_but_not_in_use() -> None:
    held = holdings(states=2, pages=8)
    held.take(RoomId(1), (5, 1), PROMPT[:-1], computes=True)
    held.by_room[RoomId(1)].stored[16] = ((), held.pools[1].reserve(1))
    held.keep(RoomId(1), PROMPT)
    held.give_back(RoomId(1))
    assert begun(held, 2, PROMPT) == 16
    assert held.available == (3, 0), "the state is in use"
    with pytest.raises(OutOfPages):
        held.take(RoomId(3), (1, 1))
    held.give_back(RoomId(2))
    assert held.available == (8, 2)
    held.take(RoomId(4), (1, 1))
    held.take(RoomId(5), (1, 1))
    assert (held.cached(PROMPT[:-1]), len(held.prefixes)) == (0, 4), "the state went, and its block stayed"


def test_a_block_that_is_evicted_takes_its_state_along() -> None:
    held = holdings(pages=8)
    computed(held, 1, PROMPT)
    held.take(RoomId(2), (8, 1))
    assert held.pools[1].census()[PageState.CACHED] == 0
    assert held.prefixes.evictable_states == 0
    held.give_back(RoomId(2))
    assert held.available == held.sizes


def test_a_state_is_pinned_by_each_room_that_begins_with_it() -> None:
    tree = PrefixTree((SIZE, 0))
    way = tree.enter(PROMPT[:4], ((PageId(7),), ()), 0, states={1: ((), (PageId(3),))}).way
    assert tree.pin_state(way[0]) == (((), (3,)), True)
    assert tree.pin_state(way[0]) == (((), (3,)), False)
    assert tree.unpin_state(way[0]) == ()
    assert tree.evictable_states == 0
    assert tree.unpin_state(way[0]) == ((), (3,))
    assert tree.evict_states(1) == ((), (3,))


class Prompt:
    """A room whose prompt is computed."""

    cached = computed = 0
    request = Request("r", PROMPT, 1)

    def prompt_row(self, start: int, stop: int) -> Row:
        return Row(Sequence(self.request, []), start, stop, ((), ()), sample=False)


def test_a_chunk_ends_where_a_state_is_stored() -> None:
    room, stops = Prompt(), []
    while room.computed < len(PROMPT):
        (chunk,) = next_chunks([room], 100, ends=lambda _: (8, 16))
        stops.append(chunk.stop)
        room.computed = chunk.stop
    assert stops == [8, 16, 19]
