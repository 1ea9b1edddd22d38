"""Tests that each backend keeps the contract of `baton.transfer.transfer_protocol`."""

import pickle
import random
from dataclasses import replace

import pytest

from baton.ids import Incarnation
from baton.transfer.transfer_protocol import (
    Endpoint,
    OutOfRegion,
    PutId,
    PutState,
    Region,
    Run,
    TransferError,
    UnknownPeer,
)
from tests.transfer.bench import KV_BYTES, SLOTS_BYTES, Bench, Node

NOBODY = Incarnation(0xDEAD)
WHOLE = [(0, 0, KV_BYTES)]


def pattern(node: Node) -> bytes:
    """Fill "kv" with bytes that differ everywhere, so that a shifted copy shows."""
    data = random.Random(7).randbytes(KV_BYTES)
    node.memory["kv"].view[:] = data
    return data


# ---- register, endpoint


def test_an_endpoint_tells_what_was_registered_and_does_not_change(bench: Bench) -> None:
    node = bench.node()
    endpoint = node.transfer.endpoint()
    assert endpoint.incarnation == node.incarnation
    assert [(region.name, region.length) for region in endpoint.regions] == [
        ("kv", KV_BYTES),
        ("slots", SLOTS_BYTES),
    ]
    assert endpoint.metadata
    assert node.transfer.endpoint() == endpoint


def test_default_agent_names_differ_between_incarnations(bench: Bench) -> None:
    assert bench.node().transfer.endpoint().agent != bench.node().transfer.endpoint().agent


def test_a_region_is_registered_once_per_name_and_before_the_endpoint(bench: Bench) -> None:
    node = bench.node()
    region = Region("kv", node.memory["kv"].address, 64)
    with pytest.raises(TransferError, match="registered already"):
        node.transfer.register(region)
    node.transfer.endpoint()
    with pytest.raises(TransferError, match="after the first endpoint"):
        node.transfer.register(replace(region, name="late"))


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"length": 0},
        {"length": -1},
        {"address": 0},
        {"address": -8},
        {"address": (1 << 64) - 8},
        {"device": "tpu"},
        {"device": "cuda:"},
        {"device": "cuda:x"},
    ],
    ids=str,
)
def test_a_region_that_cannot_be_memory_is_refused(bench: Bench, change: dict[str, object]) -> None:
    transfer = bench.blank()
    region = Region("extra", bench.node().memory["kv"].address, 64)
    with pytest.raises(TransferError):
        transfer.register(replace(region, **change))  # type: ignore[arg-type]
    assert transfer.endpoint().regions == ()
    transfer.close()


# ---- connect


def test_connect_is_idempotent_per_incarnation(bench: Bench) -> None:
    sender, receiver = bench.pair()
    assert sender.transfer.connected(receiver.incarnation)
    sender.transfer.connect(receiver.transfer.endpoint())
    assert sender.transfer.connected(receiver.incarnation)
    assert bench.send(sender, receiver, "kv", WHOLE) is PutState.DONE


def test_one_way_is_enough_to_put(bench: Bench) -> None:
    sender, receiver = bench.pair()
    assert not receiver.transfer.connected(sender.incarnation)
    sender.fill("kv", 3)
    assert bench.send(sender, receiver, "kv", WHOLE) is PutState.DONE
    assert receiver.read("kv") == sender.read("kv")


def test_both_ways_at_once(bench: Bench) -> None:
    left, right = bench.pair()
    right.transfer.connect(left.transfer.endpoint())
    left.fill("kv", 1)
    right.fill("slots", 2)
    there = left.transfer.put(right.incarnation, "kv", WHOLE)
    back = right.transfer.put(left.incarnation, "slots", [(0, 0, SLOTS_BYTES)])
    assert bench.finish(right, back) is PutState.DONE
    assert bench.finish(left, there) is PutState.DONE
    assert right.read("kv") == left.read("kv")
    assert left.read("slots") == right.read("slots")


def test_several_peers_of_one_endpoint(bench: Bench) -> None:
    sender = bench.node()
    receivers = [bench.node() for _ in range(3)]
    for byte, receiver in enumerate(receivers, start=1):
        sender.transfer.connect(receiver.transfer.endpoint())
        sender.fill("slots", byte)
        assert bench.send(sender, receiver, "slots", [(0, 0, 8)]) is PutState.DONE
    assert [receiver.read("slots", 0, 8) for receiver in receivers] == [
        bytes([byte]) * 8 for byte in (1, 2, 3)
    ]


def test_an_endpoint_does_not_connect_to_itself(bench: Bench) -> None:
    node = bench.node()
    with pytest.raises(TransferError, match="own"):
        node.transfer.connect(node.transfer.endpoint())
    assert not node.transfer.connected(node.incarnation)


def test_an_incarnation_has_one_endpoint(bench: Bench) -> None:
    sender, receiver = bench.pair()
    other = replace(receiver.transfer.endpoint(), regions=())
    with pytest.raises(TransferError, match="differs"):
        sender.transfer.connect(other)
    assert sender.transfer.connected(receiver.incarnation)


def bad_endpoints(good: Endpoint) -> dict[str, Endpoint]:
    kv, slots = good.regions
    return {
        "incarnation zero": replace(good, incarnation=Incarnation(0)),
        "incarnation of 65 bits": replace(good, incarnation=Incarnation(1 << 64)),
        "no agent": replace(good, agent=""),
        "agent with a line break": replace(good, agent="a\nb"),
        "endless agent": replace(good, agent="a" * 1000),
        "no metadata": replace(good, metadata=b""),
        "foreign metadata": replace(good, metadata=b"\x80\x04}."),
        "metadata cut short": replace(good, metadata=good.metadata[:-1]),
        "metadata with a bit flipped": replace(
            good, metadata=good.metadata[:-3] + bytes([good.metadata[-3] ^ 1]) + good.metadata[-2:]
        ),
        "metadata with a tail": replace(good, metadata=good.metadata + b"\0"),
        "endless metadata": replace(good, metadata=bytes(2 << 20)),
        "two regions of one name": replace(good, regions=(kv, replace(slots, name="kv"))),
        "a region without bytes": replace(good, regions=(replace(kv, length=0),)),
        "a region before memory": replace(good, regions=(replace(kv, address=-4096),)),
        "a region past memory": replace(good, regions=(replace(kv, address=(1 << 64) - 1),)),
        "an unknown device": replace(good, regions=(replace(kv, device="disk"),)),
        "many regions": replace(good, regions=tuple(replace(kv, name=f"r{i}") for i in range(100))),
    }


BAD_ENDPOINTS = list(
    bad_endpoints(Endpoint(NOBODY, "a", b"meta", (Region("kv", 1, 1), Region("slots", 1, 1))))
)


@pytest.mark.parametrize("name", BAD_ENDPOINTS)
def test_an_endpoint_that_makes_no_sense_is_refused_and_harms_nothing(bench: Bench, name: str) -> None:
    sender, receiver = bench.node(), bench.node()
    good = receiver.transfer.endpoint()
    bad = bad_endpoints(good)[name]
    with pytest.raises(TransferError):
        sender.transfer.connect(bad)
    assert not sender.transfer.connected(bad.incarnation)
    sender.transfer.connect(good)
    sender.fill("kv", 9)
    assert bench.send(sender, receiver, "kv", WHOLE) is PutState.DONE
    assert receiver.read("kv") == sender.read("kv")


def test_another_agents_metadata_is_refused(bench: Bench) -> None:
    sender, receiver, other = bench.node(), bench.node(), bench.node()
    stolen = replace(receiver.transfer.endpoint(), agent=other.transfer.endpoint().agent)
    with pytest.raises(TransferError):
        sender.transfer.connect(stolen)
    sender.transfer.connect(receiver.transfer.endpoint())
    sender.transfer.connect(other.transfer.endpoint())
    assert bench.send(sender, receiver, "kv", WHOLE) is PutState.DONE
    assert bench.send(sender, other, "kv", WHOLE) is PutState.DONE


def test_nothing_from_a_peer_is_unpickled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpickled(*_: object, **__: object) -> None:
        raise AssertionError("bytes from a peer were unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, unpickled)
    sender, receiver = bench.pair()
    assert bench.send(sender, receiver, "kv", WHOLE) is PutState.DONE


# ---- put


def test_an_unknown_peer_is_named_as_such(bench: Bench) -> None:
    node = bench.node()
    with pytest.raises(UnknownPeer):
        node.transfer.put(NOBODY, "kv", WHOLE)
    assert not node.transfer.connected(NOBODY)
    assert node.transfer.pending(NOBODY) == 0
    node.transfer.disconnect(NOBODY)


def test_a_put_moves_its_runs_and_nothing_else(bench: Bench) -> None:
    sender, receiver = bench.pair()
    data = pattern(sender)
    runs = [(0, 4096, 1), (7, 64, 1000), (KV_BYTES - 5, 0, 5), (500, KV_BYTES - 700, 700)]
    assert bench.send(sender, receiver, "kv", runs) is PutState.DONE
    expected = bytearray(KV_BYTES)
    for source, target, length in runs:
        expected[target : target + length] = data[source : source + length]
    assert receiver.read("kv") == bytes(expected)
    assert receiver.read("slots") == bytes(SLOTS_BYTES)
    assert sender.read("kv") == data


def test_many_scattered_runs(bench: Bench) -> None:
    sender, receiver = bench.pair()
    data = pattern(sender)
    places = list(range(KV_BYTES // 512))
    random.Random(3).shuffle(places)
    runs = [(source * 512, target * 512 + 17, 300) for source, target in enumerate(places)]
    assert bench.send(sender, receiver, "kv", runs) is PutState.DONE
    landed = receiver.read("kv")
    for source, target, length in runs:
        assert landed[target : target + length] == data[source : source + length]
    assert sum(landed[place * 512] for place in places) == 0


def test_neighbouring_runs_land_like_one(bench: Bench) -> None:
    sender, receiver = bench.pair()
    data = pattern(sender)
    # The second goes on where the first ends on both sides; the third only in the source.
    runs = [(0, 100, 50), (50, 150, 50), (100, 400, 50), (150, 450, 10)]
    assert bench.send(sender, receiver, "kv", runs) is PutState.DONE
    assert receiver.read("kv", 100, 100) == data[:100]
    assert receiver.read("kv", 400, 60) == data[100:160]
    assert receiver.read("kv", 200, 200) == bytes(200)


def test_a_put_names_its_region_on_both_sides(bench: Bench) -> None:
    sender, receiver = bench.pair()
    sender.fill("slots", 8)
    assert bench.send(sender, receiver, "slots", [(0, SLOTS_BYTES - 16, 16)]) is PutState.DONE
    assert receiver.read("slots", SLOTS_BYTES - 16) == bytes([8]) * 16
    assert receiver.read("kv") == bytes(KV_BYTES)
    with pytest.raises(TransferError, match="no region 'weights'"):
        sender.transfer.put(receiver.incarnation, "weights", WHOLE)


@pytest.mark.parametrize(
    "run",
    [
        (0, 0, KV_BYTES + 1),
        (1, 0, KV_BYTES),
        (0, 1, KV_BYTES),
        (KV_BYTES, 0, 1),
        (0, KV_BYTES, 1),
        (-1, 0, 8),
        (0, -1, 8),
        (0, 0, 0),
        (0, 0, -8),
        (16, 16, -8),
        (1 << 70, 0, 8),
        (0, 0, 1 << 70),
    ],
    ids=str,
)
def test_a_run_outside_a_region_posts_nothing(bench: Bench, run: Run) -> None:
    sender, receiver = bench.pair()
    sender.fill("kv", 5)
    with pytest.raises(OutOfRegion):
        sender.transfer.put(receiver.incarnation, "kv", [(0, 0, 64), run])
    assert sender.transfer.pending(receiver.incarnation) == 0
    # Whatever was posted before would be seen here: the same connection, a later put.
    assert bench.send(sender, receiver, "slots", [(0, 0, 8)]) is PutState.DONE
    assert receiver.read("kv") == bytes(KV_BYTES)


@pytest.mark.parametrize("smaller", ["source", "target"])
def test_the_smaller_of_both_regions_bounds_a_run(bench: Bench, smaller: str) -> None:
    sender = bench.node(kv_bytes=4096 if smaller == "source" else 8192)
    receiver = bench.node(kv_bytes=4096 if smaller == "target" else 8192)
    sender.transfer.connect(receiver.transfer.endpoint())
    with pytest.raises(OutOfRegion):
        sender.transfer.put(receiver.incarnation, "kv", [(4000, 4000, 200)])
    assert bench.send(sender, receiver, "kv", [(4000, 4000, 96)]) is PutState.DONE


def test_a_put_of_no_runs_is_refused(bench: Bench) -> None:
    sender, receiver = bench.pair()
    with pytest.raises(TransferError, match="no runs"):
        sender.transfer.put(receiver.incarnation, "kv", [])
    assert sender.transfer.pending(receiver.incarnation) == 0


def test_a_put_ends_once_and_its_name_is_never_used_again(bench: Bench) -> None:
    sender, receiver = bench.pair()
    puts = [sender.transfer.put(receiver.incarnation, "slots", [(0, 0, 8)]) for _ in range(5)]
    for put in puts:
        assert bench.finish(sender, put) is PutState.DONE
        with pytest.raises(KeyError):
            sender.transfer.poll(put)
    again = sender.transfer.put(receiver.incarnation, "slots", [(0, 0, 8)])
    assert len({*puts, again}) == 6
    with pytest.raises(KeyError):
        sender.transfer.poll(PutId(receiver.incarnation, again.number + 1))
    with pytest.raises(KeyError):
        sender.transfer.poll(PutId(NOBODY, again.number))
    assert bench.finish(sender, again) is PutState.DONE


def test_pending_counts_the_puts_not_seen_to_end(bench: Bench) -> None:
    sender, receiver = bench.pair()
    other = bench.node()
    sender.transfer.connect(other.transfer.endpoint())
    puts = [sender.transfer.put(receiver.incarnation, "slots", [(0, 0, 8)]) for _ in range(3)]
    assert sender.transfer.pending(receiver.incarnation) == 3
    for left, put in zip((2, 1, 0), puts, strict=True):
        assert bench.finish(sender, put) is PutState.DONE
        assert sender.transfer.pending(receiver.incarnation) == left
    assert sender.transfer.pending(other.incarnation) == 0


def test_a_put_to_an_endpoint_that_closed_ends_without_hanging(bench: Bench) -> None:
    sender, receiver = bench.pair()
    assert bench.send(sender, receiver, "kv", WHOLE) is PutState.DONE
    bench.shut(receiver)

    def broken() -> bool:
        """Return whether the sender has seen that the connection ended. Until then it may write where the
        memory was."""
        try:
            bench.send(sender, receiver, "kv", WHOLE)
        except TransferError:
            assert not sender.transfer.connected(receiver.incarnation)
        return not sender.transfer.connected(receiver.incarnation)

    bench.until(broken)
    assert sender.transfer.pending(receiver.incarnation) == 0
    with pytest.raises(TransferError, match="broke"):
        sender.transfer.put(receiver.incarnation, "kv", WHOLE)
    sender.transfer.disconnect(receiver.incarnation)


# ---- disconnect


def test_disconnect_forgets_the_peer_and_is_idempotent(bench: Bench) -> None:
    sender, receiver = bench.pair()
    sender.transfer.disconnect(receiver.incarnation)
    sender.transfer.disconnect(receiver.incarnation)
    assert not sender.transfer.connected(receiver.incarnation)
    with pytest.raises(UnknownPeer):
        sender.transfer.put(receiver.incarnation, "kv", WHOLE)


def test_the_end_of_an_abandoned_put_can_still_be_polled(bench: Bench) -> None:
    sender, receiver = bench.pair()
    sender.fill("kv", 4)
    put = sender.transfer.put(receiver.incarnation, "kv", WHOLE)
    sender.transfer.disconnect(receiver.incarnation)
    assert sender.transfer.pending(receiver.incarnation) == 1
    assert bench.finish(sender, put) is PutState.DONE
    assert receiver.read("kv") == sender.read("kv")
    assert sender.transfer.pending(receiver.incarnation) == 0
    with pytest.raises(KeyError):
        sender.transfer.poll(put)


def test_abandoned_puts_become_quiet_without_being_polled(bench: Bench) -> None:
    sender, receiver = bench.pair()
    puts = [sender.transfer.put(receiver.incarnation, "slots", [(0, 0, 8)]) for _ in range(3)]
    sender.transfer.disconnect(receiver.incarnation)
    assert sender.transfer.pending(receiver.incarnation) == 3
    bench.until(lambda: sender.transfer.pending(receiver.incarnation) == 0)
    for put in puts:
        assert sender.transfer.poll(put) is PutState.DONE
        with pytest.raises(KeyError):
            sender.transfer.poll(put)


def test_the_same_incarnation_can_be_connected_again(bench: Bench) -> None:
    sender, receiver = bench.pair()
    assert bench.send(sender, receiver, "slots", [(0, 0, 8)]) is PutState.DONE
    sender.transfer.disconnect(receiver.incarnation)
    sender.transfer.connect(receiver.transfer.endpoint())
    under_way = sender.transfer.put(receiver.incarnation, "slots", [(0, 0, 8)])
    sender.transfer.disconnect(receiver.incarnation)
    sender.transfer.connect(receiver.transfer.endpoint())
    assert sender.transfer.pending(receiver.incarnation) == 1
    assert bench.send(sender, receiver, "kv", WHOLE) is PutState.DONE
    assert bench.finish(sender, under_way) is PutState.DONE


def test_a_restarted_peer_is_a_new_peer_even_under_the_same_agent_name(bench: Bench) -> None:
    sender, old = bench.node(), bench.node("worker-0")
    sender.transfer.connect(old.transfer.endpoint())
    assert bench.send(sender, old, "kv", WHOLE) is PutState.DONE
    bench.shut(old)
    new = bench.node("worker-0")
    with pytest.raises(TransferError, match="disconnect it first"):
        sender.transfer.connect(new.transfer.endpoint())
    sender.transfer.disconnect(old.incarnation)
    sender.transfer.connect(new.transfer.endpoint())
    assert not sender.transfer.connected(old.incarnation)
    sender.fill("kv", 6)
    assert bench.send(sender, new, "kv", WHOLE) is PutState.DONE
    assert new.read("kv") == sender.read("kv")
    assert old.read("kv") == bytes(KV_BYTES)


# ---- close


def test_close_is_idempotent_and_ends_every_call(bench: Bench) -> None:
    sender, receiver = bench.pair()
    put = sender.transfer.put(receiver.incarnation, "kv", WHOLE)
    assert bench.finish(sender, put) is PutState.DONE
    endpoint = receiver.transfer.endpoint()
    bench.nodes.remove(sender)
    sender.transfer.close()
    sender.transfer.close()
    assert not sender.transfer.connected(receiver.incarnation)
    assert sender.transfer.pending(receiver.incarnation) == 0
    sender.transfer.disconnect(receiver.incarnation)
    for call in (
        lambda: sender.transfer.register(Region("late", endpoint.regions[0].address, 8)),
        sender.transfer.endpoint,
        lambda: sender.transfer.connect(endpoint),
        lambda: sender.transfer.put(receiver.incarnation, "kv", WHOLE),
        sender.transfer.progress,
    ):
        with pytest.raises(TransferError, match="closed"):
            call()
    # The other side is untouched by it.
    third = bench.node()
    third.transfer.connect(endpoint)
    assert bench.send(third, receiver, "kv", WHOLE) is PutState.DONE


def test_close_without_ever_having_been_used(bench: Bench) -> None:
    transfer = bench.blank()
    transfer.close()
    with pytest.raises(TransferError, match="closed"):
        transfer.endpoint()
