"""Tests that a census of states arrives whole, and stays within bounds whoever sends it."""

from baton.pages.holdings import Holdings
from baton.pages.pool import PagePool
from baton.pages.record import SLOT_BYTES
from baton.pages.slots import SlotPool
from baton.rooms.phases import Phase
from baton.rooms.queues import RoomQueue
from baton.wire.baton.v1 import workers_pb2
from baton.wire.census import KEY_CHARS_MAX, KEYS_MAX, census_from_wire, census_to_wire


def test_what_a_worker_holds_is_told_in_the_words_of_its_metrics() -> None:
    holdings = Holdings([PagePool(8)], SlotPool(memoryview(bytearray(2 * SLOT_BYTES))))
    rooms = {**dict.fromkeys(Phase, 0), Phase.TRANSFERRING: 3}
    told = census_from_wire(census_to_wire({RoomQueue.RUNNING: 2}, rooms, holdings, turns=5, tokens=9))
    assert told["queues"] == {"running": 2}
    assert told["rooms"]["transferring"] == 3
    assert "retired" not in told["rooms"]
    assert told["pages"]["free"] == 8
    assert told["slots"]["free"] == 2
    assert (told["turns"], told["tokens"]) == (5, 9)


def test_more_words_than_there_are_states_are_left_out() -> None:
    wire = workers_pb2.WorkerCensus(queues={f"{place:03}" + "x" * 500: place for place in range(1000)})
    told = census_from_wire(wire)["queues"]
    assert len(told) == KEYS_MAX
    assert all(len(name) == KEY_CHARS_MAX for name in told)
