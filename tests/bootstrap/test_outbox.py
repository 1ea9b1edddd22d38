"""Tests of the outbox: another task takes all that one task puts in, in order, whatever happens to it."""

import asyncio

import pytest

from baton.bootstrap.outbox import Outbox
from tests.wire.servers import until


async def test_all_is_taken_in_order_whether_it_was_waited_for_or_not() -> None:
    box: Outbox[int] = Outbox(3)
    box.put(1)
    box.put(2)
    assert [await box.get(), await box.get()] == [1, 2]
    reading = asyncio.ensure_future(box.get())
    await asyncio.sleep(0)
    box.put(3)
    box.put(4)
    assert [await reading, await box.get()] == [3, 4]


@pytest.mark.parametrize("told", [False, True], ids=["before it was told", "after it was told"])
async def test_a_reader_that_is_cancelled_takes_nothing_with_it(told: bool) -> None:
    box: Outbox[int] = Outbox(3)
    reading = asyncio.ensure_future(box.get())
    await asyncio.sleep(0)
    if told:
        box.put(1)
    reading.cancel()
    await until(reading.done)
    assert reading.cancelled()
    if not told:
        box.put(1)
    assert await box.get() == 1


async def test_it_has_a_bound() -> None:
    box: Outbox[int] = Outbox(1)
    box.put(1)
    with pytest.raises(asyncio.QueueFull):
        box.put(2)
