"""Tests that the in-process network loses, delays and lands writes as its plan says, equally for equal
seeds."""

import pytest

from baton.ids import Incarnation
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.memory_transfer import MemoryTransfer
from baton.testing.transfer_faults import FaultPlan
from baton.transfer.transfer_protocol import PutState, Transfer, TransferError
from tests.transfer.bench import KV_BYTES, Bench, Node

WHOLE = [(0, 0, KV_BYTES)]


def bench_over(fabric: MemoryFabric) -> Bench:
    def make(incarnation: Incarnation, agent: str | None) -> Transfer:
        return MemoryTransfer(fabric, incarnation, agent)

    return Bench(make)


def steps(node: Node, count: int) -> None:
    for _ in range(count):
        node.transfer.progress()


def trace(seed: int) -> list[int]:
    """Return the order in which a sender sees 40 puts end under every fault at once."""
    plan = FaultPlan(
        seed,
        delay_steps_max=5,
        hold_share=0.2,
        hold_steps=30,
    )
    bench = bench_over(MemoryFabric(plan))
    sender, receiver = bench.pair()
    puts = []
    for number in range(40):
        run = (number * 8, number * 8, 8)
        puts.append(sender.transfer.put(receiver.incarnation, "kv", [run]))
    seen: list[int] = []
    for _ in range(60):
        receiver.transfer.progress()
        for put in list(puts):
            if sender.transfer.poll(put) is not PutState.PENDING:
                puts.remove(put)
                seen.append(put.number)
    assert puts == []
    bench.close()
    return seen


def test_one_seed_is_one_schedule() -> None:
    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


def test_delays_reorder_puts_and_lose_none() -> None:
    seen = trace(1)
    assert sorted(seen) == list(range(1, 41))
    assert seen != sorted(seen)


def test_bytes_are_read_and_written_when_they_land_not_when_they_are_posted() -> None:
    bench = bench_over(MemoryFabric())
    sender, receiver = bench.pair()
    sender.fill("kv", 1)
    put = sender.transfer.put(receiver.incarnation, "kv", WHOLE)
    assert receiver.read("kv", 0, 8) == bytes(8)
    sender.fill("kv", 2)
    assert bench.finish(sender, put) is PutState.DONE
    assert receiver.read("kv", 0, 8) == bytes([2]) * 8
    bench.close()


def test_runs_of_one_put_land_one_by_one() -> None:
    bench = bench_over(MemoryFabric(FaultPlan(3, delay_steps_max=50)))
    sender, receiver = bench.pair()
    sender.fill("kv", 1)
    runs = [(i * 16, i * 16, 8) for i in range(100)]
    put = sender.transfer.put(receiver.incarnation, "kv", runs)
    landed = []
    while sender.transfer.poll(put) is PutState.PENDING:
        landed.append(receiver.read("kv").count(1))
    assert landed == sorted(landed)
    assert any(0 < count < 800 for count in landed)
    assert receiver.read("kv").count(1) == 800
    bench.close()


def test_a_held_put_lands_late_after_disconnect_and_even_after_close() -> None:
    fabric = MemoryFabric(FaultPlan(hold_share=1.0, hold_steps=20))
    bench = bench_over(fabric)
    sender, receiver = bench.pair()
    sender.fill("kv", 7)
    put = sender.transfer.put(receiver.incarnation, "kv", WHOLE)
    steps(receiver, 10)
    sender.transfer.disconnect(receiver.incarnation)
    assert sender.transfer.poll(put) is PutState.PENDING
    bench.shut(sender)
    sender.fill("kv", 8)  # closed: its memory is its owner's again
    assert receiver.read("kv", 0, 8) == bytes(8)
    assert fabric.puts_under_way == 1
    steps(receiver, 20)
    assert receiver.read("kv") == bytes([7]) * KV_BYTES
    assert fabric.puts_under_way == 0
    # The sender has not seen it end, so it never says so.
    assert sender.transfer.poll(put) is PutState.PENDING
    assert sender.transfer.pending(receiver.incarnation) == 1
    bench.close()


def test_nothing_lands_in_memory_whose_endpoint_has_closed() -> None:
    fabric = MemoryFabric(FaultPlan(hold_share=1.0, hold_steps=20))
    bench = bench_over(fabric)
    sender, receiver = bench.pair()
    sender.fill("kv", 7)
    put = sender.transfer.put(receiver.incarnation, "kv", WHOLE)
    bench.shut(receiver)
    assert bench.finish(sender, put) is PutState.FAILED
    steps(sender, 40)
    assert receiver.read("kv") == bytes(KV_BYTES)
    bench.close()


def test_a_stalled_process_neither_receives_nor_sends_until_it_resumes() -> None:
    fabric = MemoryFabric()
    bench = bench_over(fabric)
    sender, receiver = bench.pair()
    other = bench.node()
    sender.transfer.connect(other.transfer.endpoint())
    other.transfer.connect(sender.transfer.endpoint())
    sender.fill("kv", 7)
    fabric.stall(receiver.incarnation)
    put = sender.transfer.put(receiver.incarnation, "kv", WHOLE)
    assert bench.send(sender, other, "kv", WHOLE) is PutState.DONE
    steps(sender, 50)
    assert sender.transfer.poll(put) is PutState.PENDING
    assert receiver.read("kv") == bytes(KV_BYTES)
    fabric.resume(receiver.incarnation)
    assert bench.finish(sender, put) is PutState.DONE

    fabric.stall(sender.incarnation)
    sender.fill("kv", 9)
    late = sender.transfer.put(receiver.incarnation, "kv", WHOLE)
    steps(receiver, 50)
    assert receiver.read("kv", 0, 1) == b"\x07"
    fabric.resume(sender.incarnation)
    assert bench.finish(sender, late) is PutState.DONE
    bench.close()


def test_what_a_killed_process_had_posted_never_lands() -> None:
    fabric = MemoryFabric(FaultPlan(hold_share=1.0, hold_steps=20))
    bench = bench_over(fabric)
    sender, receiver = bench.pair()
    sender.fill("kv", 7)
    sender.transfer.put(receiver.incarnation, "kv", WHOLE)
    fabric.kill(sender.incarnation)
    fabric.kill(sender.incarnation)
    steps(receiver, 40)
    assert receiver.read("kv") == bytes(KV_BYTES)
    assert fabric.puts_under_way == 0
    bench.close()


def test_puts_to_a_killed_process_fail_and_it_cannot_be_connected() -> None:
    fabric = MemoryFabric(FaultPlan(hold_share=1.0, hold_steps=20))
    bench = bench_over(fabric)
    sender, receiver = bench.pair()
    endpoint = receiver.transfer.endpoint()
    put = sender.transfer.put(receiver.incarnation, "kv", WHOLE)
    fabric.kill(receiver.incarnation)
    assert bench.finish(sender, put) is PutState.FAILED
    assert not sender.transfer.connected(receiver.incarnation)
    with pytest.raises(TransferError, match="cannot be reached"):
        sender.transfer.connect(endpoint)
    bench.close()


def test_a_put_that_fails_breaks_the_connection_which_connect_makes_anew() -> None:
    bench = bench_over(MemoryFabric(FaultPlan(seed=1, fail_share=0.5)))
    sender, receiver = bench.pair()
    endpoint = receiver.transfer.endpoint()
    ends = []
    for _ in range(40):
        put = sender.transfer.put(receiver.incarnation, "kv", [(0, 0, 8)])
        ends.append(bench.finish(sender, put))
        assert sender.transfer.connected(receiver.incarnation) is (ends[-1] is PutState.DONE)
        if ends[-1] is PutState.FAILED:
            with pytest.raises(TransferError, match="broke"):
                sender.transfer.put(receiver.incarnation, "kv", WHOLE)
        sender.transfer.connect(endpoint)
        assert sender.transfer.connected(receiver.incarnation)
    assert set(ends) == {PutState.DONE, PutState.FAILED}
    bench.close()


def test_a_broken_connection_is_not_renewed_while_puts_are_under_way() -> None:
    bench = bench_over(MemoryFabric(FaultPlan(seed=1, fail_share=0.5, hold_share=0.5, hold_steps=30)))
    sender, receiver = bench.pair()
    puts = [sender.transfer.put(receiver.incarnation, "kv", [(0, 0, 8)]) for _ in range(20)]
    while sender.transfer.connected(receiver.incarnation):
        sender.transfer.poll(puts.pop(0))
    with pytest.raises(TransferError, match="have not ended"):
        sender.transfer.connect(receiver.transfer.endpoint())
    sender.transfer.disconnect(receiver.incarnation)
    bench.until(lambda: sender.transfer.pending(receiver.incarnation) == 0)
    sender.transfer.connect(receiver.transfer.endpoint())
    assert sender.transfer.connected(receiver.incarnation)
    bench.close()


@pytest.mark.parametrize(
    "faults",
    [{"hold_share": 1.5}, {"fail_share": -0.1}, {"delay_steps_max": -1}, {"hold_steps": -1}],
    ids=str,
)
def test_a_plan_that_makes_no_sense_is_refused(faults: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(faults))):
        FaultPlan(**faults)
