"""Tests of writes that failed in a way that does not prove that they have ended."""

from collections.abc import Iterator
from typing import Any

import pytest

from baton.transfer.transfer_protocol import PutState, PutsUnended
from tests.transfer.bench import Bench, Node
from tests.transfer.conftest import over_nixl

RUNS = [(0, 0, 64)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(over_nixl())
    yield bench
    bench.close()


def go_wrong(node: Node, monkeypatch: pytest.MonkeyPatch, call: str = "transfer") -> None:
    """Make each later post, or each later call of `call`, fail without proof of its end."""
    transfer: Any = node.transfer
    library = transfer._nixl
    error = next(each for each in library.errors if each not in (*library.ends, *library.refusals))

    def raising(*_: object) -> str:
        raise error("the backend is out of order")

    monkeypatch.setattr(transfer._agent, call, raising)


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
        sender.transfer.progress()
    assert not sender.transfer.connected(peer)
    with pytest.raises(PutsUnended, match="1 puts have not ended yet"):
        sender.transfer.connect(receiver.transfer.endpoint())
    sender.transfer.disconnect(peer, gone=gone)
    sender.transfer.progress()
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


@pytest.mark.parametrize("gone", [False, True])
def test_what_goes_wrong_after_its_peer_was_known_to_be_gone_has_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """The put's target is torn down while it is under way, and no later event reports that its peer is
    gone."""
    sender, receiver = bench.pair()
    peer = receiver.incarnation
    put = sender.transfer.put(peer, "kv", RUNS)
    transfer: Any = sender.transfer
    transfer.ledger.write(put).fate = None  # a copy on one host has ended by now; over a network it has not
    sender.transfer.disconnect(peer, gone=gone)
    go_wrong(sender, monkeypatch, "check_xfer_state")
    sender.transfer.progress()
    assert sender.transfer.pending(peer) == (0 if gone else 1)
    assert sender.transfer.poll(put) is (PutState.FAILED if gone else PutState.PENDING)
    assert (peer in transfer.ledger.links) == (not gone), "handle, link and remote agent are let go"
