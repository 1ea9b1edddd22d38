"""Tests of a prefill rank's connections to a decode worker's memory: how they are made, replaced and lost."""

from collections.abc import AsyncIterator

import pytest

from baton.ids import Incarnation
from baton.rooms.errors import NotConnected, PeerFault, WorkerRefused
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.transfer_faults import FaultPlan
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.conversions import Malformed
from baton.wire.errors import NotQuiet
from tests.prefill import toy
from tests.prefill.bench import DECODE, PrefillBench, Receiver, connect_request

PROMPT = tuple(range(100, 110))
GRANTED = (9, 2, 3)
AGAIN = Incarnation(23)


class Pair:
    def __init__(self) -> None:
        self.fabric = MemoryFabric(FaultPlan(hold_share=1.0, hold_steps=100))
        self.receiver = Receiver(self.fabric)
        self.anew = Receiver(self.fabric, AGAIN)
        """The same worker's memory after its revocation, under another exposure."""
        self.bench = PrefillBench(self.fabric)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    made.bench.connect(made.receiver)
    yield made
    made.bench.close()


async def connect(bench: PrefillBench, wire: inference_pb2.ConnectRequest) -> None:
    await bench.enter(group_pb2.Command(connect=wire))


async def settle(bench: PrefillBench) -> None:
    for _ in range(500):
        if not len(bench.work.roster):
            return
        if not bench.step_thread.free:
            await bench.step_end()
        await bench.turn()
    raise AssertionError(f"rooms are left: {bench.work.roster.census()}")


async def test_connecting_again_to_the_same_exposure_changes_nothing(pair: Pair) -> None:
    await pair.bench.run(toy.request("1", PROMPT))
    await pair.bench.grant(1, GRANTED)
    await connect(pair.bench, connect_request(pair.receiver))
    await settle(pair.bench)
    assert pair.receiver.record(0, 1, 5) is not None


async def test_a_grant_of_memory_that_was_taken_back_is_refused(pair: Pair) -> None:
    await pair.bench.run(toy.request("1", PROMPT))
    await connect(pair.bench, connect_request(pair.anew))
    with pytest.raises(NotConnected, match="connect first"):
        await pair.bench.grant(1, GRANTED)
    await pair.bench.grant(1, GRANTED, exposure=AGAIN)
    await settle(pair.bench)
    assert pair.anew.record(0, 1, 5) is not None
    assert pair.receiver.record(0, 1, 5) is None


async def test_a_grant_of_memory_that_is_not_known_yet_is_refused(pair: Pair) -> None:
    await pair.bench.run(toy.request("1", PROMPT))
    with pytest.raises(NotConnected, match="connect first"):
        await pair.bench.grant(1, GRANTED, exposure=AGAIN)
    await pair.bench.cancel(1)
    await settle(pair.bench)


@pytest.mark.parametrize("begun", [False, True])
async def test_what_the_old_exposure_granted_never_reaches_the_new_one(pair: Pair, begun: bool) -> None:
    caller = await pair.bench.run(toy.request("1", PROMPT))
    await pair.bench.grant(1, GRANTED)
    if begun:
        await pair.bench.turns(3)
        await pair.bench.step_end()
        await pair.bench.turns(2)
        assert pair.fabric.puts_under_way > 0
    await connect(pair.bench, connect_request(pair.anew))
    await settle(pair.bench)
    assert await caller.outcome() == "memory_revoked"
    assert bytes(pair.anew.kv.view) == bytes(pair.anew.kv.length)
    assert bytes(pair.anew.slots.view) == bytes(pair.anew.slots.length)
    pair.bench.assert_empty()


async def test_as_many_layouts_as_endpoints_are_told(pair: Pair) -> None:
    wire = connect_request(pair.receiver, pair.anew)
    del wire.layouts[1]
    with pytest.raises(Malformed, match="2 endpoints and 1 layouts: one of each a rank"):
        await connect(pair.bench, wire)
    with pytest.raises(Malformed, match="0 endpoints and 0 layouts"):
        await connect(pair.bench, inference_pb2.ConnectRequest(receiver=DECODE, schema=wire.schema))


async def test_another_record_schema_is_refused_by_name(pair: Pair) -> None:
    wire = connect_request(pair.anew)
    wire.schema = "record-0"
    with pytest.raises(WorkerRefused, match="schema differs"):
        await connect(pair.bench, wire)


@pytest.mark.parametrize("field", ["receiver", "endpoint"])
async def test_a_connect_that_names_nobody_is_malformed(pair: Pair, field: str) -> None:
    wire = connect_request(pair.anew)
    if field == "receiver":
        wire.receiver = 0
    else:
        wire.endpoints[0].incarnation = 0
    with pytest.raises(Malformed):
        await connect(pair.bench, wire)


async def test_memory_that_cannot_be_reached_leaves_no_way(pair: Pair) -> None:
    wire = connect_request(pair.anew)
    pair.anew.transfer.close()
    with pytest.raises(NotConnected, match="cannot reach"):
        await connect(pair.bench, wire)
    await pair.bench.run(toy.request("1", PROMPT))
    for exposure in (DECODE, AGAIN):
        with pytest.raises(NotConnected):
            await pair.bench.grant(1, GRANTED, exposure=exposure)
    await pair.bench.cancel(1)
    await settle(pair.bench)


async def test_a_way_that_broke_says_whether_it_is_waited_for_writes(pair: Pair) -> None:
    """The error has a kind of its own, so that the receiver can decide what to do."""
    await pair.bench.run(toy.request("1", PROMPT))
    await pair.bench.grant(1, GRANTED)
    await pair.bench.turns(3)
    await pair.bench.step_end()
    await pair.bench.turns(2)
    assert pair.bench.transfer.pending(DECODE) > 0
    pair.bench.transfer.ledger.broke(DECODE)
    with pytest.raises(NotQuiet, match=r"broke, and \d+ puts have not ended yet"):
        await connect(pair.bench, connect_request(pair.receiver))
    await settle(pair.bench)
    assert pair.bench.transfer.pending(DECODE) == 0
    await connect(pair.bench, connect_request(pair.receiver))


async def test_nonsense_takes_no_way_from_anyone(pair: Pair) -> None:
    await pair.bench.run(toy.request("1", PROMPT))
    nonsense = connect_request(pair.anew)
    nonsense.endpoints[0].regions[0].length = 0
    with pytest.raises(Malformed, match="has 0 bytes"):
        await connect(pair.bench, nonsense)
    anothers = connect_request(pair.receiver)
    anothers.receiver = AGAIN
    with pytest.raises(Malformed, match="another receiver's"):
        await connect(pair.bench, anothers)
    await pair.bench.grant(1, GRANTED)
    await settle(pair.bench)
    assert pair.receiver.record(0, 1, 5) is not None


async def test_a_second_destination_that_is_refused_changes_nothing(pair: Pair) -> None:
    await pair.bench.run(toy.request("1", PROMPT))
    await pair.bench.grant(1, GRANTED)
    with pytest.raises(PeerFault, match="second, different destination"):
        await pair.bench.grant(1, (4, 5, 6))
    with pytest.raises(NotConnected):
        await pair.bench.grant(1, GRANTED, exposure=AGAIN)
    await settle(pair.bench)
    assert pair.receiver.record(0, 1, 5) is not None
