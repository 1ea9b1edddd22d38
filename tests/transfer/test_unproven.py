"""What becomes of a write that went wrong in a way that does not prove its end?"""

from collections.abc import Iterator
from typing import Any

import pytest

from services.transfer.interface import PutState, Run, TransferError
from tests.transfer.bench import Bench, Node
from tests.transfer.conftest import over_nixl

RUNS = [Run(0, 0, 64)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(over_nixl())
    yield bench
    bench.close()


def go_wrong(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is posted from now on."""
    transfer: Any = node.transfer
    library = transfer._nixl
    error = next(each for each in library.errors if each not in (*library.ends, *library.refusals))

    def raising(*_: object) -> str:
        raise error("the backend is out of order")

    monkeypatch.setattr(transfer._agent, "transfer", raising)


@pytest.mark.parametrize("gone", [False, True])
def test_it_is_pending_until_its_peer_is_known_to_be_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    sender, receiver = bench.pair()
    peer = receiver.incarnation
    go_wrong(sender, monkeypatch)
    put = sender.transfer.put(peer, "kv", RUNS)
    for _ in range(3):
        assert sender.transfer.poll(put) is PutState.PENDING
        sender.take()
    assert not sender.transfer.connected(peer)
    with pytest.raises(TransferError, match="1 puts have not ended yet"):
        sender.transfer.connect(receiver.transfer.endpoint())
    sender.transfer.disconnect(peer, gone=gone)
    sender.take()
    assert sender.transfer.pending(peer) == (0 if gone else 1)
    assert sender.transfer.poll(put) is (PutState.FAILED if gone else PutState.PENDING)
    monkeypatch.undo()
    other = bench.node()
    sender.transfer.connect(other.transfer.endpoint())
    assert bench.send(sender, other, "kv", RUNS) is PutState.DONE, "no other peer is the worse for it"


def test_what_does_end_is_still_told_of_a_peer_that_is_gone(bench: Bench) -> None:
    sender, receiver = bench.pair()
    put = sender.transfer.put(receiver.incarnation, "kv", RUNS)
    sender.transfer.disconnect(receiver.incarnation, gone=True)
    assert bench.finish(sender, put) is PutState.DONE
    assert sender.transfer.pending(receiver.incarnation) == 0
