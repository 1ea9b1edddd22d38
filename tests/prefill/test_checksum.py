"""Tests that the record holds the checksum of the pages that were sent, when the receiver checks pages."""

from collections.abc import AsyncIterator

import pytest

from baton.pages.kv_checksum import KvChecksum, nonzero_sum
from baton.rooms.errors import WorkerRefused
from baton.testing.memory_fabric import MemoryFabric
from baton.wire.baton.v1 import group_pb2
from baton.wire.conversions import Malformed
from tests.prefill import toy
from tests.prefill.bench import PrefillBench, Receiver, connect_request

PROMPT = tuple(range(100, 110))
GRANTED = (9, 2, 3)


class Pair:
    def __init__(self, checksum: KvChecksum, *, reuse: bool = False) -> None:
        fabric = MemoryFabric()
        self.receiver = Receiver(fabric)
        self.bench = PrefillBench(fabric, checksum=checksum, reuse=reuse)

    async def connect(self, checksum: str) -> None:
        wire = connect_request(self.receiver)
        wire.kv_checksum = checksum
        await self.bench.enter(group_pb2.Command(connect=wire))

    async def settle(self) -> None:
        for _ in range(500):
            if not len(self.bench.work.roster):
                return
            if not self.bench.step_thread.free:
                await self.bench.step_end()
            await self.bench.turn()
        raise AssertionError("rooms are left")

    def landed(self, table: tuple[int, ...], start: int, stop: int) -> int:
        """Return the checksum of these pages in the receiver's memory."""
        return nonzero_sum(toy.summed(self.receiver.kv, table, start, stop))

    def said(self, slot: int, room: int) -> int:
        record = self.receiver.record(slot, room, 5)
        assert record is not None
        return record.pages_checksum


@pytest.fixture
async def summing() -> AsyncIterator[Pair]:
    made = Pair(KvChecksum.PAGES)
    await made.connect("pages")
    yield made
    made.bench.close()


async def test_the_record_says_what_landed_sums_up_to_over_several_chunks(summing: Pair) -> None:
    await summing.bench.run(toy.request("1", PROMPT))
    await summing.bench.run(toy.request("2", PROMPT[:7]))
    await summing.bench.grant(1, GRANTED)
    await summing.bench.grant(2, (4, 5), slot=1)
    await summing.settle()
    assert summing.bench.engine.steps > 1
    assert summing.said(0, 1) == summing.landed(GRANTED, 0, len(PROMPT))
    assert summing.said(1, 2) == summing.landed((4, 5), 0, 7)
    assert summing.said(0, 1) != summing.said(1, 2)


async def test_a_prefix_that_the_receiver_holds_is_not_summed(summing: Pair) -> None:
    """The sum begins behind the prefix, though the sender computes all. A whole hit has the sum of
    nothing."""
    await summing.bench.run(toy.request("1", PROMPT))
    await summing.bench.run(toy.request("2", PROMPT[:8]))
    await summing.bench.grant(1, GRANTED[1:], prefix=4)
    await summing.bench.grant(2, (), prefix=8, slot=1)
    await summing.settle()
    assert summing.said(0, 1) == summing.landed(GRANTED, 4, len(PROMPT))
    assert summing.said(1, 2) == nonzero_sum(0)


@pytest.mark.parametrize("prefix", [0, 4, 8])
async def test_what_was_computed_for_an_earlier_room_is_summed_like_the_rest(prefix: int) -> None:
    reusing = Pair(KvChecksum.PAGES, reuse=True)
    await reusing.connect("pages")
    for room, pages, held in ((1, GRANTED, 0), (1001, (4, 5, 6)[prefix // 4 :], prefix)):
        await reusing.bench.run(toy.request(str(room), PROMPT))
        await reusing.bench.grant(room, pages, prefix=held)
        await reusing.settle()
    assert reusing.bench.gauge("baton_prefix_reused_tokens_total") == 8
    assert reusing.said(0, 1001) == reusing.landed((4, 5, 6), prefix, len(PROMPT))
    reusing.bench.close()


async def test_what_changes_in_a_senders_page_before_it_leaves_shows(summing: Pair) -> None:
    summing.bench.engine.hold()
    summing.bench.engine.go(1)
    await summing.bench.run(toy.request("1", PROMPT))
    await summing.bench.grant(1, GRANTED)
    while summing.bench.step_thread.free:
        await summing.bench.turn()
    await summing.bench.step_end()
    summing.bench.engine.memory.view[toy.GROUP.token_bytes] ^= 1
    summing.bench.engine.go()
    await summing.settle()
    assert summing.said(0, 1) != summing.landed(GRANTED, 0, len(PROMPT))


async def test_nothing_is_summed_unless_asked_for() -> None:
    pair = Pair(KvChecksum.RECORD)
    await pair.connect("record")
    await pair.bench.run(toy.request("1", PROMPT))
    await pair.bench.grant(1, GRANTED)
    await pair.settle()
    assert pair.said(0, 1) == 0
    pair.bench.close()


@pytest.mark.parametrize("ours", list(KvChecksum), ids=str)
async def test_schema_agreed_a_receiver_that_checks_something_else_is_refused_by_name(
    ours: KvChecksum,
) -> None:
    pair = Pair(ours)
    for theirs in KvChecksum:
        if theirs is ours:
            await pair.connect(theirs.value)
            continue
        said = f"kv_checksum differs: this stack has {ours.value}, the worker has {theirs.value}"
        with pytest.raises(WorkerRefused, match=said) as refused:
            await pair.connect(theirs.value)
        assert refused.value.field == "kv_checksum"
    pair.bench.close()


async def test_a_receiver_that_does_not_say_checks_records_and_one_that_babbles_is_malformed() -> None:
    pair = Pair(KvChecksum.RECORD)
    await pair.connect("")
    with pytest.raises(Malformed, match="kv_checksum has the unknown value 'crc'"):
        await pair.connect("crc")
    pair.bench.close()
