"""Timeline of a request over all its rooms, as the web page and `baton explain` show it."""

from collections.abc import Mapping, Sequence
from typing import Final

from baton.api.errors import CLIENT_GONE
from baton.bootstrap.history import NO_STATUS, RefusedRequest
from baton.bootstrap.timeline.aligned_clock import AlignedClock
from baton.bootstrap.timeline.drawing import bars_of, client_bars, last_word, links_of
from baton.bootstrap.timeline.lanes import lanes_of, lines_of
from baton.bootstrap.timeline.pauses import pauses_of
from baton.bootstrap.timeline.retry_chains import Chain, is_paused, was_interrupted, was_refused
from baton.bootstrap.timeline.stages import stages_of
from baton.bootstrap.timeline.text import format_ms, headline, why
from baton.bootstrap.timeline.timeline_schema import (
    OVER,
    Attempt,
    CauseInfo,
    Line,
    LineKind,
    RequestTimeline,
    State,
)
from baton.fleet.room_entry import RoomEntry, RoomPhase
from baton.rooms.errors import Reason
from baton.rooms.phases import Side
from baton.rooms.timeline import BOOTSTRAP, Event, Moment


def build_timeline(rooms: Chain, others: Sequence[Chain], now: Event, *, retrying: bool) -> RequestTimeline:
    """Build the timeline of a request from its rooms.

    `others`: other requests with the same id. `now`: event of the router at this moment. `retrying`: whether
    the last room failed and another is being looked for.
    """
    clock = AlignedClock([entry.events for entry in rooms])
    lines, lanes = lines_of(rooms, clock), lanes_of(rooms, clock)
    state = state_of(rooms, retrying=retrying)
    over = state in OVER
    now_ms = max(clock.at_ms(now), 0.0)
    total_ms = _ended_ms(rooms[-1], lines, now_ms) if over else now_ms
    first_ms = next((line.at_ms for line in lines if line.name == Moment.FIRST_TOKEN_PASSED_ON), None)
    own = {str(entry.id): [line for line in lines if line.room == str(entry.id)] for entry in rooms}
    pauses = pauses_of(rooms, lines, total_ms)
    bars = list(client_bars(rooms, lines, over=over))
    for entry in rooms:
        bars += bars_of(entry, own[str(entry.id)], lanes)
    return RequestTimeline(
        request_id=rooms[-1].request_id,
        state=state,
        headline=headline(
            state,
            rooms,
            total_ms,
            first_ms,
            _passed_on(lines),
            _detail(lines, Moment.NOT_RETRIED),
            pauses,
            _detail(lines, name=Moment.LOCAL),
        ),
        cause=cause_of(state, rooms[-1]),
        begun_wall_ms=clock.begun_wall_ms,
        total_ms=round(total_ms, 3),
        first_token_ms=first_ms,
        attempts=[_attempt(entry, own[str(entry.id)]) for entry in rooms],
        lanes=lanes,
        bars=bars,
        links=[link for entry in rooms for link in links_of(entry, own[str(entry.id)])],
        stages=[stage for entry in rooms for stage in stages_of(entry, own[str(entry.id)], pauses)],
        lines=lines,
        others=[str(each[-1].id) for each in others],
        trace_id=rooms[-1].trace_id,
    )


def of_refused(refused: RefusedRequest) -> RequestTimeline:
    """Build the timeline of a request that was refused and got no room."""
    line = Line(
        refused.waited_ms, BOOTSTRAP, "", LineKind.FAILURE, Moment.REFUSED, refused.why, refused.wall_ms
    )
    gone = refused.status == CLIENT_GONE
    if gone:
        headline = "The client hung up while it waited"
    elif refused.status == NO_STATUS:
        headline = f"Given up: {refused.why}"
    else:
        headline = f"Refused with {refused.status}: {refused.why}"
    when = f"after {format_ms(refused.waited_ms)} in the queue" if refused.waited_ms else "at once"
    return _roomless(
        refused.request_id,
        State.GONE if gone else State.REFUSED,
        f"{headline}, {when}.",
        CauseInfo(
            State.REFUSED.value,
            refused.why,
            "No pair of workers had a place for it. Look at the workers, and at the queue."
            if refused.status != NO_STATUS
            else "It waited for a pair of workers, and went with the request. Look at its other prompts.",
        ),
        refused.wall_ms - refused.waited_ms,
        refused.waited_ms,
        [line],
    )


def of_queued(request_id: str, queued: Event, now: Event) -> RequestTimeline:
    """Build the timeline of a request that waits for its first room."""
    waited_ms = max(now.wall_ms - queued.wall_ms, 0)
    line = Line(0.0, BOOTSTRAP, "", LineKind.NOTE, queued.name, queued.detail, queued.wall_ms)
    headline = f"Waits for a pair of workers since {format_ms(waited_ms)}."
    return _roomless(request_id, State.QUEUED, headline, None, queued.wall_ms, waited_ms, [line])


def state_of(rooms: Chain, *, retrying: bool) -> State:
    last = rooms[-1]
    if is_paused(last):
        return State.PAUSED
    if retrying:
        return State.RETRYING
    if last.phase is RoomPhase.OPEN:
        # A request that goes on may have had its first token from an earlier room.
        streams = any(event.name == Moment.FIRST_TOKEN_PASSED_ON for entry in rooms for event in entry.events)
        return State.STREAMING if streams else State.PREFILL
    if last.phase is RoomPhase.STREAMING:
        return State.STREAMING
    if last.cause is None:
        return State.ANSWERED
    if last.cause.reason is Reason.CLIENT_GONE:
        return State.GONE
    if was_interrupted(last):
        ended = last_word(event for event in last.events if event.source == BOOTSTRAP)
        return State.ANSWERED if ended is None else UNPAUSED.get(ended.name, State.ANSWERED)
    return State.FAILED if last.has_failed else State.ANSWERED


UNPAUSED: Final[Mapping[str, State]] = {Moment.NOT_RETRIED: State.FAILED, Moment.GIVEN_UP: State.GONE}
"""Final state of a request whose last room was retracted (preempted) or refused by a full worker, by the
event that ended the request."""


def cause_of(state: State, last: RoomEntry) -> CauseInfo | None:
    """Return the cause for which a request was not answered, or None if it was answered."""
    if state is State.ANSWERED:
        return None
    if state is State.FAILED and was_interrupted(last):
        before = "A worker was full" if was_refused(last) else "Its decode worker needed its pages"
        return CauseInfo(
            Moment.NOT_RETRIED.value,
            _detail(last.events, Moment.NOT_RETRIED),
            f"{before}, and in its time no pair of workers had space for it to go on. Look at the workers,"
            " and at the queue.",
        )
    return why(last.cause)


def _ended_ms(last: RoomEntry, lines: Sequence[Line], now_ms: float) -> float:
    """Return when the client got its last message, in milliseconds since the first line of the timeline."""
    end = last_word(line for line in lines if line.lane == BOOTSTRAP and line.room == str(last.id))
    return now_ms if end is None else end.at_ms


def _attempt(entry: RoomEntry, lines: Sequence[Line]) -> Attempt:
    times = [line.at_ms for line in lines]
    return Attempt(
        room=str(entry.id),
        phase=entry.phase.value,
        prefill=entry.names.get(Side.PREFILL, ""),
        same_process=entry.is_same_process,
        decode=entry.decode.name,
        canary=entry.canary,
        retry_of=None if entry.retry_of is None else str(entry.retry_of),
        from_ms=min(times, default=0.0),
        to_ms=max(times, default=0.0) if entry.phase is RoomPhase.RETIRED else None,
        cause=why(entry.cause),
        events_dropped=entry.events_dropped,
    )


def _passed_on(lines: Sequence[Line]) -> str:
    """Return a text that says how many tokens the client got."""
    rooms = sum(line.name == Moment.ANSWERED for line in lines)
    if rooms > 1:
        return f"its choices ended in {rooms} rooms"
    return _detail(lines, Moment.ANSWERED) or _detail(lines, Moment.BROKEN_OFF)


def _detail(lines: Sequence[Line | Event], name: Moment) -> str:
    """Return the detail text of the last line with this event and a detail. Return "" if there is none."""
    return next((line.detail for line in reversed(lines) if line.name == name and line.detail), "")


def _roomless(
    request_id: str,
    state: State,
    headline: str,
    cause: CauseInfo | None,
    begun_wall_ms: int,
    total_ms: float,
    lines: list[Line],
) -> RequestTimeline:
    return RequestTimeline(
        request_id=request_id,
        state=state,
        headline=headline,
        cause=cause,
        begun_wall_ms=begun_wall_ms,
        total_ms=total_ms,
        first_token_ms=None,
        attempts=[],
        lanes=[],
        bars=[],
        links=[],
        stages=[],
        lines=lines,
        others=[],
        trace_id="",
    )
