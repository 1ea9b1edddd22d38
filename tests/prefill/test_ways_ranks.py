"""Tests that a prefill worker's ranks connect to all the ranks of a decode worker that they need, or to
none."""

import pytest

from baton.ids import Incarnation
from baton.pages.errors import LayoutMismatch
from baton.rooms.errors import NotConnected
from baton.testing.memory_fabric import MemoryFabric
from baton.topology import Topology
from baton.transfer.transfer_protocol import TransferError
from baton.wire.conversions import Malformed
from baton.wire.layout_messages import layout_to_wire
from tests.prefill.ranks import RECEIVER, RECEIVER_RANKS, RankMemory, Ranks, layouts


def ranks(senders: Topology, receivers: Topology) -> Ranks:
    return Ranks(MemoryFabric(), senders, receivers)


def exposed_anew(at: Ranks) -> list[RankMemory]:
    """Replace the receiver's ranks by ones that have revoked their memory, and return them."""
    at.receivers = [
        RankMemory(at.fabric, Incarnation(each.known.incarnation + 50), each.layout) for each in at.receivers
    ]
    return at.receivers


def known(at: Ranks, rank: int) -> list[int]:
    """Return the receiver's ranks that a sender's rank is connected to."""
    transfer = at.senders[rank]
    return [each for each, of in enumerate(at.receivers) if transfer.connected(of.known.incarnation)]


def test_the_elected_rank_reaches_every_rank_and_the_others_those_that_they_have_pages_for() -> None:
    at = ranks(Topology(2), Topology(2))
    at.connect()
    assert [known(at, 0), known(at, 1)] == [[0, 1], [1]]
    at = ranks(Topology(pipeline=2), Topology(2))
    at.connect()
    assert [known(at, 0), known(at, 1)] == [[0, 1], [0, 1]]
    at = ranks(Topology(4), Topology())
    at.connect()
    assert [known(at, rank) for rank in range(4)] == [[0], [], [0], []]


def test_grants_name_the_exposure_of_rank_0_on_every_rank() -> None:
    at = ranks(Topology(2), Topology(2))
    at.connect()
    for each in at.routes:
        assert each.granted(RECEIVER, RECEIVER_RANKS).exposure == RECEIVER_RANKS
        with pytest.raises(NotConnected):
            each.granted(RECEIVER, Incarnation(RECEIVER_RANKS + 1))


def test_where_one_rank_cannot_be_reached_there_is_no_way_and_no_connection_is_left() -> None:
    at = ranks(Topology(), Topology(4))
    at.receivers[2].close()
    with pytest.raises(NotConnected, match="cannot reach the decode worker's memory"):
        at.connect()
    assert known(at, 0) == []
    assert len(at.routes[0]) == 0
    with pytest.raises(NotConnected):
        at.routes[0].granted(RECEIVER, RECEIVER_RANKS)


def test_a_connection_that_one_rank_broke_leaves_the_others_as_they_were() -> None:
    """Asked again while one of the known ranks cannot be reached: what held before is not torn down, and is
    not granted by either, since not all of it holds."""
    at = ranks(Topology(), Topology(2))
    at.connect()
    at.senders[0].disconnect(at.receivers[1].known.incarnation)
    at.receivers[1].close()
    with pytest.raises(NotConnected):
        at.connect()
    assert known(at, 0) == [0]
    with pytest.raises(NotConnected, match="connect first"):
        at.routes[0].granted(RECEIVER, RECEIVER_RANKS)
    at.routes[0].forget(RECEIVER, gone=False)
    assert known(at, 0) == []


def test_another_exposure_takes_the_place_of_the_one_before_on_every_rank() -> None:
    at = ranks(Topology(2), Topology(2))
    at.connect()
    before = [each.known.incarnation for each in at.receivers]
    exposed_anew(at)
    at.connect()
    assert [known(at, 0), known(at, 1)] == [[0, 1], [1]]
    for transfer in at.senders:
        assert not any(transfer.connected(each) for each in before)
    for each in at.routes:
        assert len(each) == 1
        with pytest.raises(NotConnected):
            each.granted(RECEIVER, before[0])


def test_another_exposure_that_cannot_be_reached_leaves_none_of_either() -> None:
    """Grants of the earlier exposure are void by then."""
    at = ranks(Topology(), Topology(2))
    at.connect()
    before = [each.known.incarnation for each in at.receivers]
    exposed_anew(at)[1].close()
    with pytest.raises(NotConnected):
        at.connect()
    assert known(at, 0) == []
    assert not any(at.senders[0].connected(each) for each in before)
    assert len(at.routes[0]) == 0


def test_connecting_and_forgetting_again_and_again_leaves_nothing_in_the_transfer() -> None:
    at = ranks(Topology(pipeline=2), Topology(2))
    for _ in range(3):
        at.connect()
        at.connect()
        exposed_anew(at)
        at.connect()
        for each in at.routes:
            each.forget(RECEIVER, gone=False)
            each.forget(RECEIVER, gone=False)
    for transfer in at.senders:
        assert transfer.ledger.links == {}


def test_a_receiver_that_holds_another_model_is_refused_on_every_rank_by_the_field() -> None:
    at = ranks(Topology(2), Topology(2))
    wire = at.request()
    wire.layouts[1].groups[0].layers.pop()
    for each in at.routes:
        with pytest.raises(LayoutMismatch, match=r"layers|heads"):
            each.connect(wire)
    wire = at.request()
    for layout in wire.layouts:
        layout.groups[0].page_tokens = 3
    for each in at.routes:
        with pytest.raises(LayoutMismatch, match="page_tokens"):
            each.connect(wire)
    assert [known(at, 0), known(at, 1)] == [[], []]


def test_one_endpoint_is_one_rank_of_one_receiver() -> None:
    at = ranks(Topology(2), Topology(2))
    at.connect()
    twice = at.request()
    twice.endpoints[1].CopyFrom(twice.endpoints[0])
    anothers = at.request()
    anothers.receiver = 77
    first = at.request()
    first.receiver, first.endpoints[1].incarnation = 77, 7_000
    assert known(at, 1) == [1], "the rank that is named is none of those that it writes to"
    for each in at.routes:
        for wire in (twice, anothers, first):
            with pytest.raises(Malformed):
                each.connect(wire)
        assert each.granted(RECEIVER, RECEIVER_RANKS)


def test_a_way_that_broke_to_one_rank_is_made_anew_once_nothing_is_under_way() -> None:
    at = ranks(Topology(), Topology(2))
    routes = at.routes[0]
    at.connect()
    peer = at.receivers[1].known.incarnation
    at.senders[0].ledger.broke(peer)
    with pytest.raises(NotConnected):
        routes.granted(RECEIVER, RECEIVER_RANKS)
    at.connect()
    assert routes.granted(RECEIVER, RECEIVER_RANKS)
    assert known(at, 0) == [0, 1]


def test_a_closed_transfer_is_told_as_not_connected() -> None:
    at = ranks(Topology(), Topology(2))
    at.senders[0].close()
    with pytest.raises(NotConnected):
        at.connect()
    with pytest.raises(TransferError):
        at.senders[0].endpoint()


def test_a_wire_layout_says_what_its_rank_holds() -> None:
    """Rank by rank: layers and heads by their ids."""
    held = [layout_to_wire(each) for each in layouts(Topology(2, 2))]
    assert [(list(group.layers), list(group.heads)) for each in held for group in each.groups] == [
        ([0, 3], [1]),
        ([0, 3], [2]),
        ([5], [1]),
        ([5], [2]),
    ]
