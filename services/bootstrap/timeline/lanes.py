"""Lanes (rows) in the drawing of a request's timeline, and the kind of each of its lines."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from baton.bootstrap.timeline.aligned_clock import AlignedClock
from baton.bootstrap.timeline.timeline_schema import Lane, Line, LineKind
from baton.fleet.room_entry import RoomEntry
from baton.rooms.phases import Side
from baton.rooms.timeline import BOOTSTRAP, Moment

CLIENT: Final = "client"
RANKS_SHOWN_MAX: Final = 64
"""Most ranks of one worker that get a lane in the drawing. Lines of the other ranks are only in the list of
lines."""

ENDED_EARLY: Final = (Moment.FAILED, Moment.RETRACTED, Moment.WORKER_FULL)
"""Events of a room that ended before its request was answered."""

KINDS: Final[Mapping[str, LineKind]] = {
    Moment.LANDED: LineKind.EVIDENCE,
    Moment.WRITTEN: LineKind.EVIDENCE,
    Moment.VOTED: LineKind.VOTE,
    Moment.SEALED: LineKind.SEAL,
    Moment.FIRST_TOKEN: LineKind.TOKEN,
    Moment.FIRST_TOKEN_PASSED_ON: LineKind.TOKEN,
    Moment.FAILED: LineKind.FAILURE,
    Moment.NOT_RETRIED: LineKind.FAILURE,
    Moment.GIVEN_UP: LineKind.END,
    Moment.ANSWERED: LineKind.END,
    Moment.FINISHED: LineKind.END,
    Moment.RETIRED: LineKind.END,
    Moment.FILED: LineKind.END,
    Moment.OPENED: LineKind.MOVE,
    Moment.RETRACTED: LineKind.MOVE,
    Moment.WORKER_FULL: LineKind.MOVE,
    Moment.GOES_ON: LineKind.MOVE,
    Moment.RETRIED: LineKind.MOVE,
    Moment.DESTINATION_KNOWN: LineKind.MOVE,
    Moment.COMPUTING: LineKind.MOVE,
    Moment.CONNECTED: LineKind.MOVE,
    Moment.LOCAL: LineKind.MOVE,
    Moment.GRANTED: LineKind.MOVE,
    Moment.ADMITTED: LineKind.MOVE,
    Moment.FORKED: LineKind.MOVE,
    Moment.CHOICE_ENDED: LineKind.END,
    Moment.STOPPED: LineKind.MOVE,
    Moment.QUARANTINED: LineKind.MOVE,
}
"""Kind of a timeline line, by its event. A line of any other event is a note, such as one from a worker of
another version."""


def lines_of(rooms: Iterable[RoomEntry], clock: AlignedClock) -> list[Line]:
    """Return the timeline lines of all rooms, in the order in which their events happened."""
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


def lanes_of(rooms: Sequence[RoomEntry], clock: AlignedClock) -> list[Lane]:
    """Return the lanes of the drawing: the client, the router, the ranks of each prefill worker, the ranks of
    each decode worker, and other sources of lines."""
    lanes = [Lane(CLIENT, CLIENT, "", 0, "host"), Lane(BOOTSTRAP, BOOTSTRAP, "", 0, "host")]
    for side in Side:
        workers = dict.fromkeys(
            (entry.worker(side).name, entry.worker(side).topology.ranks)
            for entry in rooms
            if side in entry.sides
        )
        for name, ranks in workers:
            lanes += [_lane(name, side.value, rank, clock) for rank in range(min(ranks, RANKS_SHOWN_MAX))]
    known = {lane.id for lane in lanes}
    strangers = dict.fromkeys(each.source for entry in rooms for each in entry.events)
    lanes += [_lane(each, CLIENT, 0, clock) for each in strangers if each not in known]
    return list({lane.id: lane for lane in lanes}.values())


def _lane(worker: str, role: str, rank: int, clock: AlignedClock) -> Lane:
    source = f"{worker}/{rank}" if rank else worker
    shared = clock.shared.get(source)
    return Lane(source, role, worker, rank, "none" if shared is None else "host" if shared else "wall")
