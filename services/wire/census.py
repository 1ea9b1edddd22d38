"""Message with the counts (rooms, pages, queues) that a worker sends with each renewal of its lease.

They are for display only.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from baton.pages.holdings import Holdings
from baton.rooms.phases import Phase
from baton.rooms.queues import RoomQueue
from baton.wire.baton.v1 import workers_pb2
from baton.wire.text_validation import shown_from_wire

KEYS_MAX: Final = 32
KEY_CHARS_MAX: Final = 32


def census_to_wire(
    queues: Mapping[RoomQueue, int], rooms: Mapping[Phase, int], holdings: Holdings, turns: int, tokens: int
) -> workers_pb2.WorkerCensus:
    return workers_pb2.WorkerCensus(
        queues=_by_value(queues),
        rooms=_by_value({phase: count for phase, count in rooms.items() if phase is not Phase.RETIRED}),
        pages=_by_value(holdings.census()),
        slots=_by_value(holdings.slots.census()),
        turns=turns,
        tokens=tokens,
    )


def census_from_wire(wire: workers_pb2.WorkerCensus) -> dict[str, Any]:
    """Return a worker's counts as a JSON-ready dictionary, as the operators' pages show them.

    Entries beyond the bounds are left out, because nothing depends on them.
    """
    values: dict[str, Any] = {
        name: {shown_from_wire(key, KEY_CHARS_MAX): int(counts[key]) for key in sorted(counts)[:KEYS_MAX]}
        for name, counts in (
            ("queues", wire.queues),
            ("rooms", wire.rooms),
            ("pages", wire.pages),
            ("slots", wire.slots),
        )
    }
    return {**values, "turns": wire.turns, "tokens": wire.tokens}


def _by_value(census: Mapping[Any, int]) -> dict[str, int]:
    return {_name(member): count for member, count in census.items()}


def _name(member: Enum) -> str:
    return str(member.value)
