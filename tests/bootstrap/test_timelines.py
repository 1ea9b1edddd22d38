"""Tests of room timelines: their lines, and the watchers that are woken by a new line."""

import asyncio

from baton.bootstrap.timelines import Timelines
from baton.fleet.need import Need
from baton.fleet.registry import Registry
from baton.fleet.room_entry import RoomEntry
from baton.fleet.worker_record import Worker
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.rooms.timeline import Moment
from baton.telemetry.room_spans import RoomSpans
from tests.bootstrap.scripted import DecodeWorker, PrefillWorker
from tests.support.manual_clock import ManualClock
from tests.trace.notes import PARENT, Notes


class Desk:
    """A registry with one open room, and its timelines."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.clock = ManualClock(now_ms=3, wall_ms=1_000)
        self.registry = Registry("model", first_room=1, lease_ms=1_000, done_max=1, failed_max=1)
        self.timelines = Timelines(self.registry, self.clock, RoomSpans(self.notes))
        prefill = PrefillWorker("prefill-0", Side.PREFILL, Incarnation(11))
        decode = DecodeWorker("decode-0", Side.DECODE, Incarnation(22))
        pair = (Worker(prefill.facts, 1_000), Worker(decode.facts, 1_000))
        self.entry: RoomEntry = self.registry.open_room("request-1", pair, Need(5, 5), 0)


def test_the_bootstraps_own_line_is_in_the_timeline_and_while_it_is_open_in_the_span() -> None:
    at = Desk()
    at.timelines.begin(at.entry, PARENT)
    at.timelines.report(at.entry.id, Moment.BROKEN_OFF, "closely")
    at.timelines.end(at.entry.id, Cause(Reason.DECODE_LOST, "gone"))
    at.timelines.report(at.entry.id, Moment.FILED)
    first, second = at.entry.events
    assert (first.name, first.detail, first.wall_ms, first.host_us) == ("broken off", "closely", 1_000, 3_000)
    assert second.name == "filed"
    (span,) = at.notes.spans
    assert (span.events, span.error, span.ended) == (["broken off"], "decode_lost: gone", 1)
    assert span.attributes["baton.prefill"] == "prefill-0"


def test_who_watches_a_room_hears_of_its_lines_and_of_no_others_until_it_has_seen_enough() -> None:
    at = Desk()
    changed, others = asyncio.Event(), asyncio.Event()
    at.timelines.watch(at.entry.id, changed)
    at.timelines.watch(RoomId(9), others)
    at.timelines.report(at.entry.id, Moment.BROKEN_OFF)
    assert changed.is_set()
    at.timelines.report(RoomId(9), Moment.FILED)
    assert not others.is_set()
    changed.clear()
    for room, event in ((at.entry.id, changed), (RoomId(9), others)):
        at.timelines.unwatch(room, event)
    at.timelines.wake(at.entry.id)
    assert not changed.is_set()
    assert not at.timelines.watchers
