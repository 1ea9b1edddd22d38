"""Who has a lane in the picture of a request, and what is each line of a timeline?"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from services.bootstrap.story.clocks import BOOTSTRAP, OneClock
from services.bootstrap.story.parts import Lane, Line, LineKind
from services.rooms.entries import RoomEntry, WorkerFacts
from services.rooms.phases import Side

CLIENT: Final = "client"
RANKS_SHOWN_MAX: Final = 64
"""Of one worker. What others say is among the lines."""

KINDS: Final = {
    "landed": LineKind.EVIDENCE,
    "written": LineKind.EVIDENCE,
    "voted": LineKind.VOTE,
    "sealed": LineKind.SEAL,
    "first token": LineKind.TOKEN,
    "first token passed on": LineKind.TOKEN,
    "failed": LineKind.FAILURE,
    "not retried": LineKind.FAILURE,
    "answered": LineKind.END,
    "finished": LineKind.END,
    "retired": LineKind.END,
    "filed": LineKind.END,
    "opened": LineKind.MOVE,
    "retried": LineKind.MOVE,
    "destination known": LineKind.MOVE,
    "computing": LineKind.MOVE,
    "connected": LineKind.MOVE,
    "granted": LineKind.MOVE,
    "admitted": LineKind.MOVE,
    "forked": LineKind.MOVE,
    "choice ended": LineKind.END,
    "stopped": LineKind.MOVE,
    "quarantined": LineKind.MOVE,
}
"""By the words that the services say; others are notes."""


def lines_of(rooms: Iterable[RoomEntry], clock: OneClock) -> list[Line]:
    """Of all rooms, in the order in which they happened."""
    lines = [
        Line(
            at_ms=clock.at_ms(event),
            lane=event.source,
            room=str(entry.id),
            kind=KINDS.get(event.name, LineKind.NOTE),
            name=event.name,
            detail=event.detail,
            wall_ms=event.wall_ms,
        )
        for entry in rooms
        for event in entry.events
    ]
    return sorted(lines, key=lambda line: line.at_ms)


def lanes_of(rooms: Sequence[RoomEntry], clock: OneClock) -> list[Lane]:
    """The client, the bootstrap, the ranks of each prefill worker, those of each decode worker, and whoever
    else said something."""
    lanes = [Lane(CLIENT, CLIENT, "", 0, "host"), Lane(BOOTSTRAP, BOOTSTRAP, "", 0, "host")]
    for side in Side:
        workers = dict.fromkeys((entry.worker(side).name, ranks_of(entry.worker(side))) for entry in rooms)
        for name, ranks in workers:
            lanes += [_lane(name, side.value, rank, clock) for rank in range(min(ranks, RANKS_SHOWN_MAX))]
    known = {lane.id for lane in lanes}
    strangers = dict.fromkeys(each.source for entry in rooms for each in entry.events)
    lanes += [_lane(each, CLIENT, 0, clock) for each in strangers if each not in known]
    return list({lane.id: lane for lane in lanes}.values())


def ranks_of(worker: WorkerFacts) -> int:
    """From its topology, such as tp2pp1."""
    ranks = 1
    for dimension in re.findall(r"[0-9]+", worker.topology):
        ranks *= int(dimension)
    return max(ranks, 1)


def _lane(worker: str, role: str, rank: int, clock: OneClock) -> Lane:
    source = f"{worker}/{rank}" if rank else worker
    shared = clock.shared.get(source)
    return Lane(source, role, worker, rank, "none" if shared is None else "host" if shared else "wall")
