"""gRPC services of the router, called by workers, by other routers and by their tools.

Each method parses a message, calls the core and renders the answer, and decides nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, Final

import grpc

from baton.bootstrap.admission.placement_request import QueueFull
from baton.bootstrap.peer_bootstraps import PAGE_BYTES_MAX
from baton.bootstrap.room_controller import RoomController
from baton.bootstrap.room_messages import room_to_wire
from baton.bootstrap.timeline import live_view
from baton.bootstrap.timeline.page_json import page_json
from baton.bootstrap.timeline.request_lookup import find_timeline
from baton.fleet.room_entry import RoomPhase
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, NoCapacity, Reason, Refusal, UnknownRoom, UnknownWorker
from baton.rooms.phases import Side
from baton.rooms.reasons import REASONS
from baton.rooms.request import CHOICES_MAX
from baton.wire.baton.v1 import (
    bootstraps_pb2,
    bootstraps_pb2_grpc,
    rooms_pb2,
    rooms_pb2_grpc,
    workers_pb2,
    workers_pb2_grpc,
)
from baton.wire.census import census_from_wire
from baton.wire.conversions import Malformed, outcome_from_wire, peer_to_wire
from baton.wire.errors import errors_as_status
from baton.wire.event_messages import event_to_wire, line_from_wire
from baton.wire.load_messages import load_from_wire, orphans_from_wire
from baton.wire.message_limits import REPORTS_MAX
from baton.wire.method_authorization import BOOTSTRAP, check_caller_side, has_certificate
from baton.wire.registration import process_from_wire, weight_from_wire, worker_from_wire
from baton.wire.text_validation import name_from_wire, request_id_from_wire, shown_from_wire

LIST_DEFAULT: Final = 100
LIST_MAX: Final = 10_000
WATCH_S: Final = 1.0
"""Longest time that a client that watches a room waits for an event before the room is looked at again, in
seconds."""
WHY_CHARS_MAX: Final = 256
CALLER: Final = "caller"
"""Source name of timeline lines that the opener of a room reports, if it calls the workers itself without
this router."""


class WorkerRegistry(workers_pb2_grpc.WorkerRegistryServicer):
    def __init__(self, rooms: RoomController) -> None:
        self._rooms = rooms

    async def Register(
        self, request: workers_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> workers_pb2.RegisterReply:
        async with errors_as_status(context):
            facts, registry = worker_from_wire(request), self._rooms.registry
            for known in (facts.incarnation, *registry.silent(facts.name)):
                side = registry.side_of(known)
                if side is not None:
                    check_caller_side(context, side)
            credentials = self._rooms.credentials
            credentials.check_new(facts.incarnation, request.credential)
            await self._rooms.check_name_is_free(facts.name, facts.incarnation)
            self._rooms.register(facts, request.turn_ms)
            credentials.enter(facts.incarnation, request.credential)
        return workers_pb2.RegisterReply(lease_ms=self._rooms.registry.lease_ms, opener=self._rooms.opener)

    async def Renew(
        self, request: workers_pb2.RenewRequest, context: grpc.aio.ServicerContext
    ) -> workers_pb2.RenewReply:
        async with errors_as_status(context):
            registry = self._rooms.registry
            worker = registry.worker(Incarnation(request.incarnation))
            check_caller_side(context, worker.facts.side)
            self._rooms.credentials.check(worker.facts.incarnation, request.credential)
            load = load_from_wire(request.load) if request.HasField("load") else None
            census = census_from_wire(request.census)
            orphans = orphans_from_wire(request.orphans)
            self._rooms.renew(worker.facts.incarnation, census, request.turn_ms, load, orphans)
            return workers_pb2.RenewReply(
                lease_ms=registry.lease_ms,
                departed=registry.departed(),
                unproven=not worker.proven,
                prefill_weight=worker.prefill_weight,
                opener=self._rooms.opener,
            )

    async def Drain(
        self, request: workers_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> workers_pb2.DrainReply:
        async with errors_as_status(context):
            worker = self._rooms.registry.worker(Incarnation(request.incarnation))
            check_caller_side(context, worker.facts.side)
            self._rooms.credentials.check(worker.facts.incarnation, request.credential)
            admission = self._rooms.admission
            awaited = admission.drain(worker.facts.incarnation, broken=request.broken)
            return workers_pb2.DrainReply(rooms=awaited)

    async def Leave(
        self, request: workers_pb2.LeaveRequest, context: grpc.aio.ServicerContext
    ) -> workers_pb2.LeaveReply:
        async with errors_as_status(context):
            incarnation = Incarnation(request.incarnation)
            side = self._rooms.registry.side_of(incarnation)
            if side is None:
                # Peers reuse memory after a Leave, so a Leave needs a known sender.
                raise UnknownWorker(f"incarnation {incarnation} is not known here: nobody speaks for it")
            check_caller_side(context, side)
            self._rooms.credentials.check(incarnation, request.credential)
            self._rooms.lose(incarnation, "it has left", proof="left")
        return workers_pb2.LeaveReply()

    async def ReportExit(
        self, request: workers_pb2.ReportExitRequest, context: grpc.aio.ServicerContext
    ) -> workers_pb2.ReportExitReply:
        async with errors_as_status(context):
            registry = self._rooms.registry
            name_from_wire(request.name, "name")
            for incarnation in registry.of_process(request.name, request.pid):
                side = registry.side_of(incarnation)
                if side is not None:
                    # A starter of the whole stack shows the bootstrap's certificate.
                    check_caller_side(context, side, also=BOOTSTRAP)
            await self._rooms.report_exit(request.name, request.pid, request.secret)
        return workers_pb2.ReportExitReply()

    async def SetWeight(
        self, request: workers_pb2.SetWeightRequest, context: grpc.aio.ServicerContext
    ) -> workers_pb2.SetWeightReply:
        async with errors_as_status(context):
            self._rooms.weigh(process_from_wire(request.process), weight_from_wire(request.prefill_weight))
        return workers_pb2.SetWeightReply()


class BootstrapService(bootstraps_pb2_grpc.BootstrapServiceServicer):
    """Service for the stack's other bootstraps. It answers from this one's own rooms and queue."""

    def __init__(self, rooms: RoomController) -> None:
        self._rooms = rooms

    async def GetPage(
        self, request: bootstraps_pb2.GetPageRequest, context: grpc.aio.ServicerContext
    ) -> bootstraps_pb2.GetPageReply:
        async with errors_as_status(context):
            page = page_json(self._page(request)).encode()
            if len(page) > PAGE_BYTES_MAX:
                raise Refusal(f"its page has {len(page)} bytes, at most {PAGE_BYTES_MAX} are sent: call it")
        return bootstraps_pb2.GetPageReply(opener=self._rooms.opener, json=page)

    def _page(self, request: bootstraps_pb2.GetPageRequest) -> Any:
        """Return what a page shows. Raises Malformed."""
        match request.WhichOneof("page"):
            case "timeline":
                return find_timeline(self._rooms, request.timeline) or {}
            case "summary":
                return live_view.summary(self._rooms)
            case "requests":
                page = request.requests
                if not 1 <= page.limit <= live_view.REQUESTS_MAX:
                    raise Malformed(f"requests.limit must be 1 to {live_view.REQUESTS_MAX}")
                found = live_view.requests(self._rooms, page.limit, page.search, failed=page.failed)
                return {"requests": found}
            case _:
                raise Malformed("page is not set")


class RoomService(rooms_pb2_grpc.RoomServiceServicer):
    def __init__(self, rooms: RoomController) -> None:
        self._rooms = rooms

    async def OpenRoom(
        self, request: rooms_pb2.OpenRoomRequest, context: grpc.aio.ServicerContext
    ) -> rooms_pb2.OpenRoomReply:
        async with errors_as_status(context):
            if not 1 <= request.prompt_tokens <= request.tokens:
                raise Malformed("tokens must be at least prompt_tokens, which must be at least 1")
            if request.choices > CHOICES_MAX:
                raise Malformed(f"choices must be at most {CHOICES_MAX}")
            try:
                request_id = request_id_from_wire(request.request_id)
                entry = await self._rooms.admission.admit(
                    request_id,
                    request.prompt_tokens,
                    request.tokens,
                    choices=max(request.choices, 1),
                    may_be_local=request.may_be_local,
                )
            except (QueueFull, TimeoutError) as error:
                raise NoCapacity(str(error) or "no pair of workers had space in time") from error
        return rooms_pb2.OpenRoomReply(
            room=entry.id,
            prefill=None if entry.prefill is None else peer_to_wire(entry.prefill),
            decode=peer_to_wire(entry.decode),
            prefill_ms=entry.prefill_ms,
            prefill_own_ms=entry.prefill_own_ms,
            key=self._rooms.credentials.key_of(entry.id),
            opener=self._rooms.opener,
        )

    async def WatchRoom(
        self, request: rooms_pb2.WatchRoomRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rooms_pb2.RoomEvent]:
        async with errors_as_status(context):
            room, changed = RoomId(request.room), asyncio.Event()
            entry = self._rooms.registry.get(room)
            self._rooms.timelines.watch(room, changed)
            sent = 0
            try:
                while True:
                    changed.clear()
                    for event in islice(entry.events, sent, None):
                        sent += 1
                        yield event_to_wire(event)
                    if entry.phase is RoomPhase.RETIRED and sent == len(entry.events):
                        return
                    with suppress(TimeoutError):
                        async with asyncio.timeout(WATCH_S):
                            await changed.wait()
            finally:
                self._rooms.timelines.unwatch(room, changed)

    async def ReportRooms(
        self, request: rooms_pb2.ReportRoomsRequest, context: grpc.aio.ServicerContext
    ) -> rooms_pb2.ReportRoomsReply:
        async with errors_as_status(context):
            if len(request.reports) > REPORTS_MAX:
                raise Malformed(f"reports has more than {REPORTS_MAX} lines")
            reporter = Incarnation(request.incarnation)
            if has_certificate(context):
                for side in self._sides(reporter, request.reports):
                    check_caller_side(context, side)
            if reporter:
                if not self._rooms.credentials.knows(reporter):
                    return rooms_pb2.ReportRoomsReply()  # it has no room here
                self._rooms.credentials.check(reporter, request.credential, request.rank)
            else:
                for report in request.reports:
                    self._check_opener(context, RoomId(report.room), report.key)
            if reporter and not request.rank and request.HasField("load"):
                self._rooms.update_load(reporter, load_from_wire(request.load))
            by_room: dict[RoomId, list[rooms_pb2.RoomReport]] = {}
            for report in request.reports:  # grouped by room, each room's reports in their order
                by_room.setdefault(RoomId(report.room), []).append(report)
            for room, reports in by_room.items():
                self._report(reporter, request.rank, room, reports)
        return rooms_pb2.ReportRoomsReply()

    async def CancelRoom(
        self, request: rooms_pb2.CancelRoomRequest, context: grpc.aio.ServicerContext
    ) -> rooms_pb2.CancelRoomReply:
        async with errors_as_status(context):
            entry = self._rooms.registry.get(RoomId(request.room))
            self._check_opener(context, entry.id, request.key)
            self._rooms.fail(
                entry.id, Cause(Reason.CANCELLED, shown_from_wire(request.why, WHY_CHARS_MAX) or "cancelled")
            )
        return rooms_pb2.CancelRoomReply()

    async def GetRoom(
        self, request: rooms_pb2.GetRoomRequest, context: grpc.aio.ServicerContext
    ) -> rooms_pb2.Room:
        async with errors_as_status(context):
            return room_to_wire(self._rooms.registry.get(RoomId(request.room)), events=True)

    async def ListRooms(
        self, request: rooms_pb2.ListRoomsRequest, context: grpc.aio.ServicerContext
    ) -> rooms_pb2.ListRoomsReply:
        async with errors_as_status(context):
            registry = self._rooms.registry
            entries = (
                registry.find(request_id_from_wire(request.request_id))
                if request.request_id
                else registry.rooms()
            )
            limit = min(request.limit or LIST_DEFAULT, LIST_MAX)
            rooms = [room_to_wire(entry, events=False) for entry in islice(entries, limit)]
        return rooms_pb2.ListRoomsReply(rooms=rooms)

    def _check_opener(self, context: grpc.aio.ServicerContext, room: RoomId, key: bytes) -> None:
        """Check that a caller may end a room. A caller without a certificate has to show the key that it got
        when it opened the room. Raises NotProven."""
        if not has_certificate(context):
            self._rooms.credentials.check_key(room, key)

    def _sides(self, reporter: Incarnation, reports: Iterable[rooms_pb2.RoomReport]) -> set[Side]:
        """Return the sides of the workers that send these reports. The side of a worker that has left is
        found by its rooms."""
        side = self._rooms.registry.side_of(reporter)
        sides = set() if side is None else {side}
        for report in reports:
            with suppress(UnknownRoom):
                sides.update(self._rooms.registry.get(RoomId(report.room)).sides_of(reporter))
        return sides

    def _report(
        self, reporter: Incarnation, rank: int, room: RoomId, reports: Iterable[rooms_pb2.RoomReport]
    ) -> None:
        """Take one worker's reports of one room. Reports of a worker that is not in the room are ignored.
        Only the first rank's reports change the room."""
        try:
            entry = self._rooms.registry.get(room)
        except UnknownRoom:
            return
        sides = entry.sides_of(reporter)
        if reporter and not sides:
            return
        # The source comes from the authenticated caller, so no worker can write lines as another.
        name = entry.worker(sides[0]).name if sides else CALLER
        self._rooms.registry.mark_delivered(room, sides)
        source = f"{name}/{rank}" if rank else name
        self._rooms.timelines.wake(room)  # its watchers run after all reports are recorded
        for report in reports:
            if report.event:
                entry.record(line_from_wire(report.event, source))
            if rank:
                continue
            if reporter == 0 and report.HasField("outcome"):
                cause = outcome_from_wire(report.outcome)
                if cause is None:
                    self._rooms.answered(room)
                elif not REASONS[cause.reason].ends_room:
                    self._rooms.registry.mark_local(room)
                else:
                    self._rooms.fail(room, cause)
            if report.retired:
                for side in sides:
                    self._rooms.side_retired(room, side)
