"""Tests that random NIXL notices from other processes are dropped and disturb no write. Baton itself sends
none."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from baton.transfer.nixl import NixlTransfer
from baton.transfer.nixl_library import Library, unframed
from baton.transfer.transfer_protocol import PutState
from tests.forks import fork_call
from tests.transfer.bench import PATIENCE_S, Bench, Node

FLOOD: Final = 5000
LENGTHS: Final = (0, 1, 1024, 100_000)

NAMES: Final = {"stranger": "stranger", "long": "x" * 5000, "no text": b"\xff\xfe", "the sender's": ""}


def shout(agent: str | bytes, metadata: bytes) -> None:
    """A foreign process: it learnt an agent's metadata as any peer does, and sends what it likes."""
    shouting = Library().new_agent(agent)  # type: ignore[arg-type]
    heard = shouting.add_remote_agent(metadata).decode()
    for length in LENGTHS:
        shouting.send_notif(heard, b"\xff" * length)
    for number in range(FLOOD):
        shouting.send_notif(heard, number.to_bytes(8, "little"))
        if number % 64 == 0:
            shouting.get_new_notifs()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        shouting.get_new_notifs()


@contextmanager
def shouting(agent: str | bytes, metadata: bytes) -> Iterator[list[int | None]]:
    """Yields where its exit code will be, once it has left."""
    left: list[int | None] = []
    process = fork_call(shout, (agent, metadata))
    try:
        yield left
        left.append(process.wait(PATIENCE_S))
    finally:
        process.kill()
        process.wait(PATIENCE_S)


@pytest.fixture
def nixl_bench() -> Iterator[Bench]:
    bench = Bench(NixlTransfer)
    yield bench
    bench.close()


def own_name(sender: Node) -> str:
    return sender.transfer.endpoint().agent


@pytest.mark.parametrize("agent", NAMES.values(), ids=NAMES)
def test_a_foreign_agent_that_shouts_hinders_nobody(nixl_bench: Bench, agent: str | bytes) -> None:
    sender, receiver = nixl_bench.pair()
    agent = agent or own_name(sender)
    sender.fill("kv", 7)
    rounds = 0
    with shouting(agent, unframed(receiver.transfer.endpoint())) as left:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and rounds < 100:
            assert nixl_bench.send(sender, receiver, "kv", [(0, 0, 65536)]) is PutState.DONE
            rounds += 1
            time.sleep(0.003)
    assert left == [0]
    assert receiver.read("kv", 0, 65536) == b"\x07" * 65536
    assert nixl_bench.send(sender, receiver, "kv", [(0, 0, 65536)]) is PutState.DONE
