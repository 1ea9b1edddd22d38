"""Tests that a worker's load arrives whole, and stays within bounds whoever sends it."""

from baton.ids import RoomId
from baton.pages.layout import GROUPS_MAX
from baton.rooms.worker_load import WorkerLoad
from baton.wire.baton.v1 import rooms_pb2
from baton.wire.load_messages import load_from_wire, load_to_wire


def test_all_of_it_comes_through() -> None:
    load = WorkerLoad((5, 6), (1, 2), 3, 40, 64, RoomId(2**63), 9, 2**40, 3_000, other_rooms=7)
    sent = rooms_pb2.WorkerLoad.FromString(load_to_wire(load, 9).SerializeToString())
    assert load_from_wire(sent) == load


def test_more_groups_than_there_may_be_are_cut_off_and_still_too_many() -> None:
    told = load_from_wire(rooms_pb2.WorkerLoad(free_pages=range(1_000), asked_pages=range(1_000)))
    assert len(told.free) == len(told.requested) == GROUPS_MAX + 1
