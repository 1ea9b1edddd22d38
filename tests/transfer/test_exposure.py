"""Tests of revoking exposed memory: every byte of it stays, and no later write of a peer arrives."""

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import pytest

from baton.ids import Incarnation
from baton.runtime.host_memory import MOVES_MAX, CannotMove, HostMemory
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.memory_transfer import MemoryTransfer
from baton.testing.transfer_faults import FaultPlan
from baton.transfer.exposure import Exposure
from baton.transfer.transfer_protocol import PutId, PutState, Transfer, TransferError
from tests.transfer.bench import KV_BYTES, Bench, MakeTransfer, Node

WHOLE = [(0, 0, KV_BYTES)]


@dataclass
class ExposedProcess:
    """A process that exposes "kv" and "slots"."""

    make: MakeTransfer
    memories: dict[str, HostMemory] = field(
        default_factory=lambda: {"kv": HostMemory(KV_BYTES), "slots": HostMemory(4096)}
    )
    ids: Iterator[int] = field(default_factory=lambda: count(0xE000))
    made: list[Transfer] = field(default_factory=list)
    exposure: Exposure = field(init=False)

    def __post_init__(self) -> None:
        self.exposure = Exposure(self._make, lambda: Incarnation(next(self.ids)), self.memories)

    def _make(self, incarnation: Incarnation) -> Transfer:
        self.made.append(self.make(incarnation, None))
        return self.made[-1]

    def contents(self) -> dict[str, bytes]:
        return {name: bytes(memory.view) for name, memory in self.memories.items()}

    def fill(self, seed: int) -> dict[str, bytes]:
        for memory in self.memories.values():
            memory.view[:] = random.Random(seed).randbytes(memory.length)
        return self.contents()


@pytest.fixture
def receiver(bench: Bench) -> Iterator[ExposedProcess]:
    receiver = ExposedProcess(bench.make)
    yield receiver
    receiver.exposure.close()


def sender(bench: Bench, receiver: ExposedProcess) -> Node:
    """Return a sender that is connected to the receiver, with memory full of 0xEE."""
    node = bench.node()
    for region in node.memory:
        node.fill(region, 0xEE)
    node.transfer.connect(receiver.exposure.endpoint())
    return node


def revoke(receiver: ExposedProcess) -> dict[str, memoryview]:
    """Revoke the memory, and return the sinks that take its place."""
    sinks = {name: memory.view for name, memory in receiver.memories.items()}
    receiver.exposure.revoke()
    return sinks


def end(bench: Bench, node: Node, receiver: ExposedProcess, put: PutId) -> PutState:
    states: list[PutState] = []

    def ended() -> bool:
        receiver.exposure.transfer.progress()
        states.append(node.transfer.poll(put))
        return states[-1] is not PutState.PENDING

    bench.until(ended)
    return states[-1]


def test_an_exposure_registers_every_memory_under_its_own_id(receiver: ExposedProcess) -> None:
    endpoint = receiver.exposure.endpoint()
    assert endpoint.incarnation == receiver.exposure.id
    assert [(region.name, region.address, region.length) for region in endpoint.regions] == [
        (name, memory.address, memory.length) for name, memory in receiver.memories.items()
    ]
    assert receiver.exposure.transfer is receiver.made[0]


def test_revoking_keeps_every_byte_and_exposes_it_anew(receiver: ExposedProcess) -> None:
    before, endpoints = receiver.fill(1), [receiver.exposure.endpoint()]
    for _ in range(3):
        receiver.exposure.revoke()
        endpoints.append(receiver.exposure.endpoint())
        assert receiver.contents() == before
    assert len({endpoint.incarnation for endpoint in endpoints}) == 4
    assert len({endpoint.agent for endpoint in endpoints}) == 4
    for name in range(2):
        assert len({endpoint.regions[name].address for endpoint in endpoints}) == 4
    assert receiver.exposure.endpoint().regions[0].address == receiver.memories["kv"].address
    assert receiver.exposure.transfer is receiver.made[3]
    for transfer in receiver.made[:3]:
        with pytest.raises(TransferError, match="closed"):
            transfer.endpoint()


def test_ids_grow_whatever_is_drawn(receiver: ExposedProcess) -> None:
    """A peer that is told of two exposures knows the newer one by its larger id."""
    receiver.ids = iter([0xE005, 0xE004, 0xE100])
    told = []
    for _ in range(3):
        receiver.exposure.revoke()
        told.append(receiver.exposure.id)
    assert told == [0xE005, 0xE006, 0xE100]
    assert receiver.exposure.endpoint().incarnation == 0xE100


def test_a_put_under_way_ends_and_changes_nothing(bench: Bench, receiver: ExposedProcess) -> None:
    node, old = sender(bench, receiver), receiver.exposure.id
    before = receiver.fill(2)
    put = node.transfer.put(old, "kv", WHOLE)
    early = bytes(receiver.memories["kv"].view)  # some paths copy in the call
    revoke(receiver)
    assert receiver.contents() == {**before, "kv": early}
    end(bench, node, receiver, put)
    assert node.transfer.pending(old) == 0
    assert receiver.contents() == {**before, "kv": early}


def test_a_put_to_the_old_endpoint_never_changes_the_memory(bench: Bench, receiver: ExposedProcess) -> None:
    node, old = sender(bench, receiver), receiver.exposure.id
    put = node.transfer.put(old, "slots", [(0, 0, 64)])
    assert end(bench, node, receiver, put) is PutState.DONE
    before = receiver.fill(3)
    sinks = revoke(receiver)
    for _ in range(3):
        try:
            put = node.transfer.put(old, "kv", WHOLE)
        except TransferError:
            break
        state = end(bench, node, receiver, put)
        assert state is PutState.FAILED or bytes(sinks["kv"]) == b"\xee" * KV_BYTES, "it is in the sink"
    assert receiver.contents() == before
    assert node.transfer.pending(old) == 0


def test_who_held_the_old_endpoint_connects_to_the_new_one(bench: Bench, receiver: ExposedProcess) -> None:
    node, old = sender(bench, receiver), receiver.exposure.id
    bystander = sender(bench, receiver)
    receiver.exposure.revoke()
    for writer in (node, bystander):
        writer.transfer.connect(receiver.exposure.endpoint())
        before = receiver.fill(4)
        put = writer.transfer.put(receiver.exposure.id, "kv", [(0, 64, 100)])
        assert end(bench, writer, receiver, put) is PutState.DONE
        kv = before["kv"]
        assert receiver.contents() == {**before, "kv": kv[:64] + b"\xee" * 100 + kv[164:]}
        writer.transfer.disconnect(old)


def test_an_endpoint_that_was_revoked_is_reached_by_nobody_new(
    bench: Bench, receiver: ExposedProcess
) -> None:
    stale, before = receiver.exposure.endpoint(), receiver.fill(5)
    receiver.exposure.revoke()
    node = bench.node()
    try:
        node.transfer.connect(stale)
        put = node.transfer.put(stale.incarnation, "kv", WHOLE)
    except TransferError:
        pass
    else:
        end(bench, node, receiver, put)
    assert receiver.contents() == before


def test_memory_that_cannot_move_leaves_nothing_exposed(receiver: ExposedProcess) -> None:
    for _ in range(MOVES_MAX):
        receiver.memories["slots"].move()
    with pytest.raises(CannotMove):
        receiver.exposure.revoke()
    assert_closed(receiver)


def test_an_endpoint_that_cannot_be_made_leaves_nothing_exposed(receiver: ExposedProcess) -> None:
    def none(incarnation: Incarnation, agent: str | None) -> Transfer:
        raise TransferError("no agent")

    receiver.make = none
    with pytest.raises(TransferError, match="no agent"):
        receiver.exposure.revoke()
    assert_closed(receiver)


@pytest.mark.parametrize("fails", ["register", "endpoint"])
def test_an_endpoint_that_takes_no_memory_is_closed(
    receiver: ExposedProcess, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise TransferError(f"no {fails}")

    monkeypatch.setattr(type(receiver.exposure.transfer), fails, refuse)
    with pytest.raises(TransferError, match=f"no {fails}"):
        receiver.exposure.revoke()
    monkeypatch.undo()
    assert len(receiver.made) == 2
    assert_closed(receiver)


def assert_closed(receiver: ExposedProcess) -> None:
    for transfer in receiver.made:
        with pytest.raises(TransferError, match="closed"):
            transfer.endpoint()
    with pytest.raises(TransferError, match="closed"):
        receiver.exposure.endpoint()


def test_closing_is_idempotent(receiver: ExposedProcess) -> None:
    receiver.exposure.close()
    receiver.exposure.close()
    assert_closed(receiver)


# ---- the in-process network, where a path that asks no endpoint can be had at will


def blind(share: float, seed: int = 0, **more: int) -> tuple[MemoryFabric, Bench, ExposedProcess]:
    plan = FaultPlan(seed, blind_share=share, **more)
    fabric = MemoryFabric(plan)

    def make(incarnation: Incarnation, agent: str | None) -> Transfer:
        return MemoryTransfer(fabric, incarnation, agent)

    return fabric, Bench(make), ExposedProcess(make)


def drain(fabric: MemoryFabric) -> None:
    while fabric.puts_under_way:
        fabric.step()


@pytest.mark.parametrize("posted", ["before", "after"])
def test_a_write_that_asks_no_endpoint_lands_in_the_sink(posted: str) -> None:
    fabric, bench, receiver = blind(1.0, delay_steps_max=20)
    node, old, before = sender(bench, receiver), receiver.exposure.id, receiver.fill(6)
    runs = [(at, at, 4096) for at in range(0, KV_BYTES, 4096)]
    if posted == "before":
        put = node.transfer.put(old, "kv", runs)
        sinks = revoke(receiver)
    else:
        sinks = revoke(receiver)
        put = node.transfer.put(old, "kv", runs)
    assert fabric.puts_under_way == 1
    drain(fabric)
    assert node.transfer.poll(put) is PutState.DONE
    assert bytes(sinks["kv"]) == b"\xee" * KV_BYTES
    assert receiver.contents() == before


def test_without_the_move_such_a_write_corrupts() -> None:
    """A new endpoint over the same memory does not keep an old writer out. This is why the memory moves and a
    sink takes its place."""
    fabric, bench, receiver = blind(1.0)
    node, old, before = sender(bench, receiver), receiver.exposure.id, receiver.fill(7)
    receiver.exposure.close()
    ExposedProcess(receiver.make, receiver.memories, count(0xF000))
    node.transfer.put(old, "kv", WHOLE)
    drain(fabric)
    assert receiver.contents() == {**before, "kv": b"\xee" * KV_BYTES}


def test_a_process_that_died_is_written_to_by_no_path() -> None:
    fabric, bench, receiver = blind(1.0)
    node, old = sender(bench, receiver), receiver.exposure.id
    sinks = revoke(receiver)
    under_way = node.transfer.put(old, "kv", WHOLE)
    fabric.kill(old)
    fabric.kill(receiver.exposure.id)
    assert fabric.puts_under_way == 0
    late = node.transfer.put(old, "kv", WHOLE)
    for put in (under_way, late):
        assert node.transfer.poll(put) is PutState.FAILED
    assert bytes(sinks["kv"]) == bytes(KV_BYTES)


@pytest.mark.parametrize("seed", range(20))
def test_under_every_fault_nothing_posted_to_an_old_exposure_changes_the_memory(seed: int) -> None:
    fabric, bench, receiver = blind(0.5, seed, delay_steps_max=9, hold_steps=40)
    draw = random.Random(seed)
    nodes = [sender(bench, receiver) for _ in range(3)]
    for _ in range(4):
        for node in nodes:
            at = draw.randrange(0, KV_BYTES - 4096)
            node.transfer.put(receiver.exposure.id, "kv", [(at, at, 4096)])
        old = receiver.exposure.id
        for _ in range(draw.randrange(6)):
            fabric.step()
        receiver.exposure.revoke()
        before = receiver.fill(draw.randrange(99))
        for node in nodes:
            for _ in range(draw.randrange(3)):
                with suppress(TransferError):  # the way was seen to break
                    node.transfer.put(old, "kv", [(0, draw.randrange(99), 5000)])
        drain(fabric)
        assert receiver.contents() == before
        for node in nodes:
            node.transfer.connect(receiver.exposure.endpoint())
