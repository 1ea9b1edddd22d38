"""Bars and arrows in the drawing of a request's timeline, derived from its lines.

The bars of a worker follow the lines of its leader (first rank). The ranks make each move together, so the
bars are drawn for all of them. Evidence and votes of a rank are taken from its own lines.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from baton.bootstrap.timeline.lanes import CLIENT, ENDED_EARLY
from baton.bootstrap.timeline.pauses import PAUSED
from baton.bootstrap.timeline.retry_chains import BETWEEN
from baton.bootstrap.timeline.timeline_schema import Activity, Arrow, Bar, Lane, Line
from baton.fleet.room_entry import RoomEntry, RoomPhase
from baton.rooms.phases import Side
from baton.rooms.timeline import BOOTSTRAP, Event, Moment

Begin = tuple[Activity, str]

BEGINS: Final[Mapping[str, Mapping[str, Begin]]] = {
    BOOTSTRAP: {
        Moment.QUEUED: (Activity.WAIT, "waits for a pair of workers"),
        Moment.OPENED: (Activity.WAIT, "waits for the first token"),
        Moment.FIRST_TOKEN_PASSED_ON: (Activity.STREAM, "passes tokens on"),
        Moment.ANSWERED: (Activity.CLOSE, "waits until both workers have given everything back"),
        Moment.FAILED: (Activity.CLOSE, "waits until both workers have given everything back"),
        Moment.RETRACTED: (Activity.CLOSE, "waits until both workers have given everything back"),
        Moment.WORKER_FULL: (Activity.CLOSE, "waits until both workers have given everything back"),
    },
    Side.PREFILL.value: {
        Moment.ACCEPTED: (Activity.WAIT, "waits for a destination"),
        Moment.DESTINATION_KNOWN: (Activity.WAIT, "waits for its turn and for pages"),
        Moment.COMPUTING: (Activity.COMPUTE, "computes the prompt, and sends what is done"),
        Moment.FIRST_TOKEN: (Activity.TRANSFER, "sends the rest, the record and the seal"),
        Moment.SEALED: (Activity.CLOSE, "has sealed; gives back"),
        Moment.FAILED: (Activity.KEPT, "keeps its pages until its writes have ended"),
    },
    Side.DECODE.value: {
        Moment.ACCEPTED: (Activity.WAIT, "connects to the prefill worker"),
        Moment.CONNECTED: (Activity.WAIT, "waits for pages and a slot"),
        Moment.LOCAL: (Activity.WAIT, "is to compute the prompt itself; waits for pages"),
        Moment.COMPUTING: (Activity.COMPUTE, "computes the prompt, beside the sequences that run"),
        Moment.GRANTED: (Activity.TRANSFER, "has exposed its pages: the sender may write to them"),
        Moment.LANDED: (Activity.AGREE, "has pages and seal; waits for its other ranks and the next step"),
        Moment.ADMITTED: (Activity.STREAM, "decodes"),
        Moment.FINISHED: (Activity.CLOSE, "has drawn the last token; gives back"),
        Moment.FAILED: (Activity.KEPT, "keeps its pages until nothing can land in them"),
        Moment.RETRACTED: (Activity.CLOSE, "needs the pages for older rooms; gives back"),
    },
}
"""Events that begin a bar in the drawing, with the bar's activity and text, by role of the lane. The bar
before ends there."""

LINKS: Final = (
    ("room", BOOTSTRAP, Moment.OPENED, Side.PREFILL.value, Moment.ACCEPTED),
    ("room", BOOTSTRAP, Moment.OPENED, Side.DECODE.value, Moment.ACCEPTED),
    ("destination", Side.DECODE.value, Moment.GRANTED, Side.PREFILL.value, Moment.DESTINATION_KNOWN),
    ("first token", Side.PREFILL.value, Moment.FIRST_TOKEN, BOOTSTRAP, Moment.FIRST_TOKEN_PASSED_ON),
    ("pages and seal", Side.PREFILL.value, Moment.SEALED, Side.DECODE.value, Moment.LANDED),
)


def bars_of(entry: RoomEntry, lines: Sequence[Line], lanes: Sequence[Lane]) -> Iterator[Bar]:
    """Yield the bars that the drawing has for one room, except those in the client's lane."""
    ended_ms = max(line.at_ms for line in lines) if entry.phase is RoomPhase.RETIRED and lines else None
    for lane in lanes:
        leader = BOOTSTRAP if lane.role == BOOTSTRAP else lane.worker
        if lane.role not in BEGINS or (lane.role != BOOTSTRAP and leader not in _workers(entry)):
            continue
        own = [line for line in lines if line.lane == leader]
        yield from _walk(lane.id, BEGINS[lane.role], own, _end_ms(lane.role, own, lines, ended_ms))


def client_bars(rooms: Sequence[RoomEntry], lines: Sequence[Line], *, over: bool) -> Iterator[Bar]:
    """Yield the bars of the client's lane: it waits for the first token, it reads, and after a failed room it
    waits for the next token."""
    began: tuple[float, Activity, str, str] | None = None
    own = [each for each in lines if each.lane == BOOTSTRAP]
    end = last_word(line for line in own if line.room == str(rooms[-1].id)) if over else None
    for line in own:
        reading = began is not None and began[1] is not Activity.WAIT
        now = ENDED if line is end else _seen(line, reading=reading)
        if now is None or (began is not None and now == began[1:3]):
            continue
        if began is not None:
            yield Bar(CLIENT, began[3], began[1], began[2], began[0], line.at_ms)
        if now == ENDED:
            return
        began = (line.at_ms, *now, line.room)
    if began is not None:
        yield Bar(CLIENT, began[3], began[1], began[2], began[0], None)


def links_of(entry: RoomEntry, lines: Sequence[Line]) -> Iterator[Arrow]:
    first: dict[tuple[str, str], Line] = {}
    for line in lines:
        first.setdefault((line.lane, line.name), line)
    names = {BOOTSTRAP: BOOTSTRAP, **{side.value: name for side, name in entry.names.items()}}
    for text, role, name, to_role, to_name in LINKS:
        if role not in names or to_role not in names:
            continue
        begin, end = first.get((names[role], name)), first.get((names[to_role], to_name))
        if begin is not None and end is not None:
            # The sender's line may have been written after the receiver's.
            began_ms = min(begin.at_ms, end.at_ms)
            yield Arrow(str(entry.id), text, begin.lane, began_ms, end.lane, end.at_ms)


ENDED: Final = (Activity.CLOSE, "")
Named = TypeVar("Named", Line, Event)
LAST_WORDS: Final = (*BETWEEN, Moment.FAILED)
"""Events that end a request. The router writes them into the timeline of its last room. If there are several,
the first of this list counts."""


def last_word(lines: Iterable[Named]) -> Named | None:
    """Return the line that ended the client's wait, among the router's lines of a request's last room. None
    if there is none."""
    words = [each for each in lines if each.name in LAST_WORDS]
    return next((each for name in LAST_WORDS for each in words if each.name == name), None)


def _seen(line: Line, *, reading: bool) -> Begin | None:
    """Return what the client does after a line of the router: the activity, and its text in the drawing. None
    if the line changes nothing."""
    match line.name:
        case Moment.QUEUED | Moment.OPENED if not reading:
            return Activity.WAIT, "waits for the first token"
        case Moment.FIRST_TOKEN_PASSED_ON:
            return Activity.STREAM, "reads"
        case Moment.FAILED if reading:
            return Activity.STALL, "its stream stands still"
        case Moment.RETRACTED if reading:
            return Activity.PAUSE, PAUSED
        case _:
            return None


def _walk(lane: str, begins: Mapping[str, Begin], own: Sequence[Line], end_ms: float | None) -> Iterator[Bar]:
    at: Line | None = None
    for line in own:
        if line.name not in begins and line.name != Moment.RETIRED:
            continue
        if at is not None and line.at_ms > at.at_ms:
            yield _bar(lane, begins, at, line.at_ms)
        if line.name == Moment.RETIRED:
            return
        at = line
    if at is not None and (end_ms is None or end_ms > at.at_ms):
        yield _bar(lane, begins, at, end_ms)


def _bar(lane: str, begins: Mapping[str, Begin], begun: Line, to_ms: float | None) -> Bar:
    doing, text = begins[begun.name]
    return Bar(lane, begun.room, doing, text, begun.at_ms, to_ms)


def _end_ms(role: str, own: Sequence[Line], lines: Sequence[Line], ended_ms: float | None) -> float | None:
    """Return the time at which a lane's last bar ends if no line ends it: the end of the room, in
    milliseconds.

    A worker that died writes no more lines, so its bar ends when the router failed the room. A live worker
    writes a line about that itself.
    """
    failed = [line.at_ms for line in lines if line.lane == BOOTSTRAP and line.name in ENDED_EARLY]
    if role == BOOTSTRAP or not failed:
        return ended_ms
    ended_itself = any(line.name in ENDED_EARLY for line in own)
    return None if ended_itself else max([*failed, *(line.at_ms for line in own)])


def _workers(entry: RoomEntry) -> set[str]:
    return set(entry.names.values())
