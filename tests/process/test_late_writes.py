"""Tests that memory which a peer may still write to is kept from other rooms, until that is proven over.

Real workers in processes of their own, over NIXL's TCP and over what UCX picks on this machine. More of it:
`python -m tests.process.late_writes --times 100`.
"""

import random
from collections.abc import Iterator

import pytest

from tests.process.late_writes import POINTS, trials
from tests.process.pair import LARGE, TRANSPORTS, WorkerTrio, until, workers
from tests.support.shared import Shared


@pytest.fixture(scope="module", params=sorted(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def pairs(transport: str) -> Iterator[Shared[WorkerTrio]]:
    with Shared(lambda: workers(transport)) as shared:
        yield shared


@pytest.fixture
def pair(pairs: Shared[WorkerTrio], request: pytest.FixtureRequest) -> WorkerTrio:
    return pairs.lend(request.node)


@pytest.fixture
def certain(transport: str) -> tuple[str, ...]:
    """Points at which a sender is stopped with certainty before its writes have ended."""
    return tuple(point for point in POINTS[transport] if point != "midway")


def test_without_the_fence_a_late_write_overwrites_the_next_room(
    pair: WorkerTrio, certain: tuple[str, ...]
) -> None:
    """This control shows that the danger is real."""
    tally = trials(pair, "unfenced", certain, random.Random(1))
    assert tally.corrupted == len(certain), tally


def test_with_the_fence_no_room_gets_memory_that_may_be_written_to(
    pair: WorkerTrio, transport: str, certain: tuple[str, ...]
) -> None:
    tally = trials(pair, "fenced", POINTS[transport] * 2, random.Random(2))
    assert tally.corrupted == 0, tally
    assert tally.withheld >= 2 * len(certain), tally


def test_exit_by_starter_a_stopped_senders_exit_that_others_report_frees_no_page(
    pair: WorkerTrio, certain: tuple[str, ...]
) -> None:
    """The stopped sender's lease has run out, the reporter has a certificate of its side, and another
    process has its name."""
    tally = trials(pair, "reported", certain, random.Random(6))
    assert (tally.corrupted, tally.withheld) == (0, len(certain)), tally


def test_if_such_a_report_were_believed_a_late_write_would_overwrite_the_next_room(
    pair: WorkerTrio,
) -> None:
    """This control shows that the danger is real."""
    tally = trials(pair, "believed", ["posting"], random.Random(7))
    assert (tally.corrupted, tally.withheld) == (1, 1), tally


def test_a_stopped_sender_that_is_killed_gives_the_pages_back(pair: WorkerTrio, transport: str) -> None:
    tally = trials(pair, "killed", POINTS[transport][:1], random.Random(3))
    assert (tally.corrupted, tally.withheld) == (0, 1), tally


def test_memory_taken_from_a_stopped_sender_is_not_reached_when_it_goes_on(
    pair: WorkerTrio, transport: str, certain: tuple[str, ...]
) -> None:
    tally = trials(pair, "revoked", POINTS[transport], random.Random(4))
    assert tally.corrupted == 0, tally
    assert tally.withheld >= len(certain), tally


def test_an_endpoint_made_anew_keeps_no_writer_out_that_goes_by_address(
    pair: WorkerTrio, transport: str
) -> None:
    """The control of the move: what goes through the endpoint ends with it, what goes by address does not."""
    tally = trials(pair, "unmoved", ["posting"], random.Random(5))
    assert tally.withheld == 1
    by_address = transport == "cma"
    assert tally.corrupted == by_address, f"{tally}: is there cross-memory attach on this machine?"


@pytest.mark.parametrize("point", ["posting", "under way"])
def test_a_receiver_that_dies_while_it_is_written_to_ends_the_room_and_its_successor_is_served(
    pair: WorkerTrio, point: str
) -> None:
    """The successor has the address of the one that died, and another incarnation."""
    sender, dead = pair.stopped, pair.decode
    sender.ask("hold")
    room = pair.open(sender, LARGE)
    until(lambda: sender.ask("granted", room.id), "the grant")
    if point == "posting":
        sender.ask("stop_before_put")
        sender.ask("go")
        until(lambda: sender.frozen, "the stop")
        dead.kill()
        sender.thaw()
    else:
        sender.ask("go")
        dead.kill()
    for worker in (sender, pair.steady):
        worker.ask("depart", dead.incarnation)
    assert room.at_prefill.outcome() in ("transfer_failed", "decode_lost", "")
    until(lambda: not sender.ask("rooms"), "the room ends")
    pair.decode = pair.start("decode", port=int(dead.address.rpartition(":")[2]))
    assert pair.decode.address == dead.address
    pair.warm_up()
    pair.wait_at_rest()


def test_a_sender_that_comes_back_at_the_same_address_is_another_one(pair: WorkerTrio) -> None:
    dead = pair.stopped
    dead.ask("hold")
    lost = pair.open(dead, LARGE)
    until(lambda: dead.ask("granted", lost.id), "the grant")
    dead.kill()
    lost.at_decode.cancel()
    # Meanwhile decode calls where nobody is, to hear that the room is quiet.
    pair.stopped = pair.start("prefill", port=int(dead.address.rpartition(":")[2]))
    until(lambda: pair.quarantined() == LARGE, "the quarantine")
    pair.open(pair.stopped, 1).check_answered()
    assert pair.quarantined() == LARGE, "what its successor says proves nothing about the dead one"
    pair.decode.ask("depart", dead.incarnation)
    pair.open(pair.stopped, LARGE).check_answered()
    pair.wait_at_rest()
