"""Conversion of a worker's load to a message and back. The router places rooms by it."""

from typing import Final

from baton.ids import RoomId
from baton.pages.layout import GROUPS_MAX
from baton.rooms.steps.step_cost import SCORE_PRICE_MAX
from baton.rooms.worker_load import WorkerLoad
from baton.wire.baton.v1 import rooms_pb2

RATE_MAX: Final = 2**32 - 1
"""Largest token rate in a message, in tokens per second."""


def load_to_wire(load: WorkerLoad, number: int) -> rooms_pb2.WorkerLoad:
    """Convert a worker's load to its message. `number`: serial number, higher than any that this process has
    sent."""
    return rooms_pb2.WorkerLoad(
        number=number,
        free_pages=load.free,
        asked_pages=load.requested,
        waiting=load.waiting,
        running=load.running,
        running_max=load.running_max,
        entered=load.entered,
        tokens_waiting=load.tokens_waiting,
        tokens_per_s=min(load.tokens_per_s, RATE_MAX),
        score_price=load.score_price,
    )


def load_from_wire(wire: rooms_pb2.WorkerLoad) -> WorkerLoad:
    """Convert a message to a worker's load.

    Page counts for more KV groups than any layout has are cut, but to one group too many. So they match no
    worker's layout.
    """
    return WorkerLoad(
        free=tuple(wire.free_pages[: GROUPS_MAX + 1]),
        requested=tuple(wire.asked_pages[: GROUPS_MAX + 1]),
        waiting=wire.waiting,
        running=wire.running,
        running_max=wire.running_max,
        entered=RoomId(wire.entered),
        number=wire.number,
        tokens_waiting=wire.tokens_waiting,
        tokens_per_s=wire.tokens_per_s,
        score_price=min(wire.score_price, SCORE_PRICE_MAX),
    )
