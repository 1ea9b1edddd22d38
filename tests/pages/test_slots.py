"""Tests of slots: each is zeroed for its new owner and closed to the old one."""

import pytest

from baton.ids import Generation
from baton.pages.errors import IllegalPageMove, OutOfPages
from baton.pages.pool import PageState
from baton.pages.record import SLOT_BYTES
from baton.pages.slots import Slot, SlotPool

BLANK = bytes(SLOT_BYTES)


def pool_of(slots: int, first_generation: int = 1) -> tuple[SlotPool, bytearray]:
    memory = bytearray(b"\xaa" * (slots * SLOT_BYTES))
    return SlotPool(memoryview(memory), first_generation), memory


def test_slot_zero_blank_when_handed_out_whatever_was_there() -> None:
    pool, _ = pool_of(2)
    assert bytes(pool.view(pool.hand_out())) == BLANK


def test_slot_zero_blank_after_release() -> None:
    pool, memory = pool_of(1)
    slot = pool.hand_out()
    pool.view(slot)[:] = b"\x55" * SLOT_BYTES
    pool.release(slot)
    assert bytes(memory) == BLANK


def test_slot_zero_a_write_between_two_tenancies_is_gone() -> None:
    pool, memory = pool_of(1)
    pool.release(pool.hand_out())
    memory[:] = b"\x55" * SLOT_BYTES
    assert bytes(pool.view(pool.hand_out())) == BLANK


def test_a_slots_neighbours_are_left_alone() -> None:
    pool, _ = pool_of(3)
    slots = [pool.hand_out() for _ in range(3)]
    for slot in slots:
        pool.view(slot)[:] = bytes([slot.index + 1]) * SLOT_BYTES
    pool.release(slots[1])
    pool.hand_out()
    assert bytes(pool.view(slots[0])) == b"\x01" * SLOT_BYTES
    assert bytes(pool.view(slots[2])) == b"\x03" * SLOT_BYTES


def test_every_tenancy_has_a_generation_of_its_own() -> None:
    pool, _ = pool_of(2, first_generation=10)
    first, second = pool.hand_out(), pool.hand_out()
    pool.release(first)
    third = pool.hand_out()
    assert (first, second, third) == (
        Slot(0, Generation(10)),
        Slot(1, Generation(11)),
        Slot(0, Generation(12)),
    )


def test_an_old_tenant_can_do_nothing_to_the_new_one() -> None:
    pool, _ = pool_of(1)
    old = pool.hand_out()
    pool.release(old)
    new = pool.hand_out()
    for act in (pool.view, pool.expose, pool.commit, pool.release):
        with pytest.raises(IllegalPageMove, match="tenancy 1 is over"):
            act(old)
    pool.view(new)


def test_a_slot_is_released_once() -> None:
    pool, _ = pool_of(1)
    slot = pool.hand_out()
    pool.release(slot)
    with pytest.raises(IllegalPageMove):
        pool.release(slot)
    assert pool.free == 1


def test_an_exposed_slot_is_not_released() -> None:
    pool, _ = pool_of(1)
    slot = pool.hand_out()
    pool.expose(slot)
    with pytest.raises(IllegalPageMove, match="exposed to free"):
        pool.release(slot)
    pool.quarantine(slot)
    pool.release(slot)
    assert pool.census() == dict.fromkeys(PageState, 0) | {PageState.FREE: 1}


def test_no_slot_left() -> None:
    pool, _ = pool_of(1)
    pool.hand_out()
    with pytest.raises(OutOfPages, match="all 1 metadata slots are taken"):
        pool.hand_out()


@pytest.mark.parametrize(
    "memory", [memoryview(bytearray(SLOT_BYTES + 1)), memoryview(bytes(SLOT_BYTES))], ids=["odd", "readonly"]
)
def test_memory_that_cannot_hold_slots_is_refused(memory: memoryview) -> None:
    with pytest.raises(ValueError, match="writable and a multiple"):
        SlotPool(memory)
