"""Scheduling of all rooms' writes to decode workers in a turn, and the metrics of these writes."""

from baton.engine_interface import PageSum
from baton.handover.sending_side import SendingSide
from baton.pages.kv_checksum import KvChecksum
from baton.pages.slots import Slot
from baton.prefill.metrics import PrefillMetrics
from baton.prefill.prefill_room import PrefillRoom
from baton.prefill.room_transfer import Quota, RoomTransfer, TransferStage
from baton.rooms.phases import Phase
from baton.rooms.plurals import counted
from baton.rooms.timeline import Moment
from baton.worker.assembly import RankPorts


class TransferScheduler:
    def __init__(
        self,
        sending: SendingSide[PrefillRoom],
        ports: RankPorts,
        metrics: PrefillMetrics,
        window_bytes: int,
    ) -> None:
        self._sending = sending
        self._transfer = ports.exposure.transfer
        self._window_bytes = window_bytes
        self._checksum = ports.checksum
        self._ports = ports
        self._metrics = metrics
        self._first: PrefillRoom | None = None
        """First room that could start no write in the last turn, because the quota of the turn was used up.
        It comes first in the next turn."""

    def begin(self, room: PrefillRoom, slot: Slot) -> None:
        """Begin the transfer of a room that has pages here and a destination. From now on its whole pages may
        be sent."""
        if room.grant is None or room.route is None:
            raise AssertionError(f"room {room.id} computes without a destination")
        if self._checksum is KvChecksum.PAGES:
            room.sequence.page_sum = PageSum(room.grant.prefix_tokens)
        room.push = RoomTransfer(
            self._transfer,
            room.route,
            room.pages,
            self._sending.layout.block_tokens,
            room.grant,
            self._window_bytes,
            self._sending.holdings.slots.view(slot),
            slot.index,
        )

    def poll(self, *, beside: bool) -> bool:
        """Poll the writes of every room, and start the next ones, as far as the quota of a turn allows. The
        order of the rooms changes, so that none waits long.

        Arguments and result: see `poll_room`.
        """
        rooms, quota, moved = list(self._sending.sent()), Quota(), False
        first, self._first = self._first, None
        start = rooms.index(first) if first is not None and first in rooms else 0
        for room in (*rooms[start:], *rooms[:start]):
            if not quota.windows and self._first is None:
                self._first = room
            moved |= self.poll_room(room, quota, beside=beside)
        return moved

    def poll_room(self, room: PrefillRoom, quota: Quota | None = None, *, beside: bool) -> bool:
        """Poll the writes of one room, and start the next ones. Return whether there is new evidence for this
        rank's vote about the room.

        `quota`: windows that all rooms may still start in this turn. `beside`: whether an engine step is
        running.
        """
        if room.push.waits:
            return False
        moved, written = self._advance(room, quota, beside=beside), room.written
        now_ms = self._ports.clock.now_ms()
        news = self._sending.observe(room, room.push, now_ms, moved=moved)
        if room.written and not written:
            self._count(room)
        if room.sealed and room.grant is not None:
            spent_ms = room.phase_ms[Phase.TRANSFERRING] + now_ms - room.entered_ms
            self._metrics.sealed(spent_ms / 1000)
            pages = f"{counted(sum(map(len, room.grant.pages)), 'page')}, generation {room.grant.generation}"
            self._ports.reporter.report(room.id, Moment.SEALED, f"{pages}, {room.overlap.summary}")
        return news

    def drain(self) -> bool:
        """Poll the writes of failed rooms, and start no more. Return whether the last write of some room has
        ended."""
        ended = False
        for room in self._sending.unproven():
            if not room.begun or room.push.drain(self._metrics.sent):
                self._sending.ended(room)
                ended = True
        return ended

    def give_up(self, room: PrefillRoom) -> None:
        """Stop measuring the transfer of a failed room. If not all of its pages were written, the time until
        now goes into the metrics."""
        if room.begun and not room.written:
            self._count(room)

    def _count(self, room: PrefillRoom) -> None:
        """Record in the metrics how long the transfer of a room's pages took."""
        self._metrics.transferred(room.overlap.spent_us / 1e6, room.overlap.hidden_us / 1e6)

    def _advance(self, room: PrefillRoom, quota: Quota | None, *, beside: bool) -> bool:
        push = room.push
        if push.stage is not TransferStage.PAGES or not push.under_way:
            return push.advance(self._metrics.sent, quota)

        def sent(length: int) -> None:
            self._metrics.sent(length)
            room.overlap.length += length

        start_us = self._ports.clock.host_us()
        moved = push.advance(sent, quota)
        room.overlap.looked(start_us, self._ports.clock.host_us(), goes_on=push.under_way, beside=beside)
        return moved
