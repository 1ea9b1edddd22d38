"""Stages of a request, such as waiting or prefill. Each lasts from one line of the timeline to another."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Final

from baton.bootstrap.timeline.lanes import ENDED_EARLY
from baton.bootstrap.timeline.pauses import PAUSED, Pause
from baton.bootstrap.timeline.timeline_schema import Line, RequestStep
from baton.fleet.room_entry import RoomEntry
from baton.rooms.phases import Side
from baton.rooms.timeline import BOOTSTRAP, Moment

P, D, B = Side.PREFILL.value, Side.DECODE.value, BOOTSTRAP

STAGES: Final = (
    ("waits for a pair of workers", (B, Moment.QUEUED), (B, Moment.OPENED), True),
    ("prefill accepts", (B, Moment.OPENED), (P, Moment.ACCEPTED), False),
    ("decode accepts", (B, Moment.OPENED), (D, Moment.ACCEPTED), True),
    ("decode reserves pages", (D, Moment.ACCEPTED), (D, Moment.GRANTED), True),
    ("prefill hears where to", (D, Moment.GRANTED), (P, Moment.DESTINATION_KNOWN), True),
    ("waits at prefill", (P, Moment.DESTINATION_KNOWN), (P, Moment.COMPUTING), True),
    ("computes the prompt", (P, Moment.COMPUTING), (P, Moment.FIRST_TOKEN), True),
    ("first token to the bootstrap", (P, Moment.FIRST_TOKEN), (B, Moment.FIRST_TOKEN_PASSED_ON), True),
    ("sends the rest, and seals", (P, Moment.FIRST_TOKEN), (P, Moment.SEALED), False),
    ("decode sees the seal", (P, Moment.SEALED), (D, Moment.LANDED), False),
    ("decode admits", (D, Moment.LANDED), (D, Moment.ADMITTED), False),
    ("decodes", (D, Moment.ADMITTED), (D, Moment.FINISHED), False),
)
"""Stages of a room with a hand-over. Each has a text, the events at its begin and end with their sides, and
whether it counts towards the time to the first token. Those that do follow each other without a gap."""

LOCAL_STAGES: Final = (
    ("waits for workers", (B, Moment.QUEUED), (B, Moment.OPENED), True),
    ("decode accepts", (B, Moment.OPENED), (D, Moment.ACCEPTED), True),
    ("decode takes it as its own", (D, Moment.ACCEPTED), (D, Moment.LOCAL), True),
    ("waits for pages", (D, Moment.LOCAL), (D, Moment.COMPUTING), True),
    ("decode computes the prompt", (D, Moment.COMPUTING), (D, Moment.ADMITTED), True),
    ("first token to the bootstrap", (D, Moment.ADMITTED), (B, Moment.FIRST_TOKEN_PASSED_ON), True),
    ("decodes", (D, Moment.ADMITTED), (D, Moment.FINISHED), False),
)
"""Stages of a room whose prompt decode computes, in the same form as STAGES."""


def stages_of(entry: RoomEntry, lines: Sequence[Line], pauses: Sequence[Pause] = ()) -> Iterator[RequestStep]:
    """Yield the stages of a room that have begun and ended, and then the `pauses` that begin with this room.

    No stage ends after the room's failure: what workers do later is not part of the request's time.
    """
    names = {B: B, **{side.value: name for side, name in entry.names.items()}}
    first: dict[tuple[str, str], float] = {}
    for line in lines:
        first.setdefault((line.lane, line.name), line.at_ms)
    failed_ms = min(first.get((B, word), inf) for word in ENDED_EARLY)
    for text, (role, name), (to_role, to_name), counts in LOCAL_STAGES if entry.is_local else STAGES:
        if role not in names or to_role not in names:
            continue
        begin, end = first.get((names[role], name)), first.get((names[to_role], to_name))
        if begin is not None and end is not None and begin < failed_ms:
            ms = max(min(end, failed_ms) - begin, 0.0)
            yield RequestStep(str(entry.id), text, round(ms, 3), counts)
    for pause in pauses:
        if pause.room == str(entry.id):
            yield RequestStep(pause.room, PAUSED, round(pause.ms, 3), first_token=False)
