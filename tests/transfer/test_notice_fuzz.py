"""Whatever notices come, from whomever: they are taken within bounds or lost, and writes go on beside."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.transfer.bounds import AGENT_CHARS_MAX
from services.transfer.interface import (
    NOTICE_BYTES_MAX,
    NOTICES_PER_CALL_MAX,
    NOTICES_WAITING_MAX,
    PutState,
    TransferError,
)
from services.transfer.nixl import NixlTransfer
from services.transfer.nixl_library import Library, unframed
from tests.forks import fork_call
from tests.transfer.bench import PATIENCE_S, Bench, Node

FLOOD: Final = NOTICES_WAITING_MAX + 1000
LENGTHS: Final = (0, 1, NOTICE_BYTES_MAX, NOTICE_BYTES_MAX + 1, 100_000)
PAYLOADS: Final = st.binary(max_size=64) | st.sampled_from([b"", b"\0" * NOTICE_BYTES_MAX, b"\xff" * 1025])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(payloads=st.lists(PAYLOADS, max_size=12))
def test_any_bytes_arrive_as_they_were_sent_or_are_refused(bench: Bench, payloads: list[bytes]) -> None:
    if not bench.nodes:
        bench.pair()
    sender, receiver = bench.nodes
    receiver.taken.clear()
    sent = []
    for payload in payloads:
        try:
            sender.transfer.notify(receiver.incarnation, payload)
        except TransferError:
            assert len(payload) > NOTICE_BYTES_MAX
        else:
            sent.append(payload)
    name = sender.transfer.endpoint().agent
    bench.until(lambda: len(receiver.taken) >= len(sent))
    assert receiver.taken == [(name, payload) for payload in sent]


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
    longest_call = rounds = 0
    with shouting(agent, unframed(receiver.transfer.endpoint())) as left:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and (rounds < 50 or len(receiver.taken) < NOTICES_WAITING_MAX // 4):
            assert nixl_bench.send(sender, receiver, "kv", [(0, 0, 65536)]) is PutState.DONE
            rounds += 1
            longest_call = max(longest_call, len(receiver.take()))
            if isinstance(agent, bytes) or len(agent) > AGENT_CHARS_MAX:
                time.sleep(0.01)
                if rounds >= 300:
                    break
    assert left == [0]
    assert receiver.read("kv", 0, 65536) == b"\x07" * 65536
    assert longest_call <= NOTICES_PER_CALL_MAX
    assert all(len(payload) <= NOTICE_BYTES_MAX for _, payload in receiver.taken)
    assert all(len(name) <= AGENT_CHARS_MAX for name, _ in receiver.taken)
    sender.transfer.notify(receiver.incarnation, b"heard all the same")
    nixl_bench.until(lambda: (own_name(sender), b"heard all the same") in receiver.taken)
