"""Tests of KV groups of states: how many pages they take, when they are sent, and what memory they get."""

from dataclasses import replace
from typing import Final

import pytest

from baton.handover.receiving_room import ReceivingRoom
from baton.handover.receiving_side import ReceivingSide
from baton.handover.requests import Grant
from baton.ids import Incarnation, RoomId
from baton.pages.errors import LayoutMismatch
from baton.pages.holdings import Holdings
from baton.pages.layout import KvLayout, KvPlane, full_group, state_group
from baton.pages.pool import PagePool, PageState
from baton.pages.record import SLOT_BYTES
from baton.pages.slots import SlotPool
from baton.pages.transfer_plan import plan_hand_over
from baton.rooms.choice_pages import ChoicePages
from baton.rooms.evidence import Connected
from baton.rooms.phases import Vote
from baton.rooms.request import Request
from tests.pages.test_two_groups import asked, turn
from tests.rooms.group import deadlines

CONTEXT: Final = 64
FULL: Final = full_group("float16", 4, (1,), (0, 1), 2)
STATES: Final = state_group("float32", CONTEXT, (0, 2), (0,), (KvPlane("conv", 3), KvPlane("recurrent", 5)))
LAYOUT: Final = KvLayout("model", (FULL, STATES), CONTEXT)
SENDER: Final = Incarnation(11)


def test_a_sequence_has_one_state_whatever_its_length() -> None:
    assert STATES.page_bytes == 2 * (3 + 5) * 4
    assert STATES.token_bytes == 0, "a state does not grow"
    assert [LAYOUT.pages_for(tokens) for tokens in (0, 1, 4, 5, CONTEXT)] == [
        (0, 0),
        (1, 1),
        (1, 1),
        (2, 1),
        (16, 1),
    ]
    assert LAYOUT.block_tokens == 4, "of the groups that grow"
    assert (LAYOUT.growth, LAYOUT.states) == ((1, 0), (1,))


def test_state_at_its_end_it_is_sent_once_with_the_last_token() -> None:
    plan = plan_hand_over([LAYOUT], [LAYOUT]).between(0, 0)
    tables = [[5, 6, 7], [2]], [[1, 2, 3], [9]]
    assert plan.runs(*tables, 0, 0, 8, ends=False)[1] == []
    size = STATES.page_bytes
    assert plan.runs(*tables, 0, 8, 11, ends=True)[1] == [(2 * size, 9 * size, size)]


def test_states_of_other_context_lengths_do_not_fit() -> None:
    longer = replace(LAYOUT, groups=(FULL, replace(STATES, page_tokens=2 * CONTEXT)))
    with pytest.raises(LayoutMismatch, match="page_tokens"):
        plan_hand_over([LAYOUT], [longer])


def test_choices_apart_each_choice_computes_its_own_state_from_the_first_token_on() -> None:
    pages = ChoicePages(10, 14, 3, LAYOUT.page_tokens, LAYOUT.states)
    assert (pages.shared_tokens, pages.shared) == (0, (0, 0))
    assert pages.needed == (3 * 4, 3), "nothing is shared"
    assert (pages.first, pages.block) == ((4, 1), (1, 0)), "a state does not grow"
    assert pages.begun == [16, 0, 0]


def room_on(states: int) -> tuple[ReceivingSide[ReceivingRoom], ReceivingRoom]:
    holdings = Holdings([PagePool(20), PagePool(states)], SlotPool(memoryview(bytearray(2 * SLOT_BYTES))))
    side = ReceivingSide(
        ReceivingRoom, 2, holdings, LAYOUT, deadlines(), exposure=Incarnation(22), vocabulary=100
    )
    room = side.open(RoomId(7), Request("r", tuple(range(11)), 12), SENDER, 0)
    room.note(Connected())
    turn(side, room)
    return side, room


def test_memory_as_used_rooms_that_grow_keep_no_states_from_others() -> None:
    side, room = room_on(2)
    grant = asked(turn(side, room), Grant)
    assert tuple(map(len, grant.pages)) == (3, 1)
    assert side.capacity().margin == (1, 0)
    assert side.capacity().free == (15, 1), "another room has its state"


def test_a_room_waits_until_there_is_a_state_for_it() -> None:
    side, room = room_on(1)
    _, states = side.holdings.pools
    held = states.reserve(1)
    turn(side, room, Vote.STAY)
    states.release(held)
    assert asked(turn(side, room), Grant)


def test_no_free_under_write_an_exposed_state_waits_for_a_proof() -> None:
    side, room = room_on(1)
    asked(turn(side, room), Grant)
    states = side.holdings.pools[1]
    assert states.census()[PageState.EXPOSED] == 1
    side.depart(SENDER)
    turn(side, room, Vote.ABORT)
    assert states.census()[PageState.QUARANTINED] == 1
    turn(side, room)
    assert states.free == 1
