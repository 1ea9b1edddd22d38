"""Writes of one room: its pages, its record and its seal, from this rank to the receiver.

Pages are sent in windows (writes of bounded size) as chunks are computed. The bytes of a window are located
when it is posted, so that a turn costs no more for a long prompt. When the whole prompt is computed, the
elected rank writes the record to each rank of the receiver, before the remaining pages. So the receiver knows
that the seal is near. When the writes of every rank of this worker are DONE, the elected rank writes the
seals (`seal-last`, `one-writer`). Nothing relies on an order between two writes. A room without pages to send
has a record and a seal all the same (`zero-page-hand-over`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import Final

from baton.handover.route import Route
from baton.ids import Incarnation, PageTables
from baton.pages.layout import GroupHead
from baton.pages.record import SEAL_BYTES, SEAL_OFFSET, SLOT_BYTES, MetadataRecord, seal_bytes
from baton.pages.transfer_plan import Window, windows
from baton.rooms.evidence import Granted
from baton.transfer.transfer_protocol import SLOTS, PutId, PutState, Run, Transfer, TransferError, kv_region

WINDOWS_IN_FLIGHT_MAX: Final = 2
POSTS_A_TURN_MAX: Final = 3
"""Most windows (writes of bounded size) that one room starts in a turn."""
WINDOWS_A_TURN_MAX: Final = 6
"""Most windows (writes of bounded size) that all rooms together start in a turn. Some transports copy the
bytes when a write starts."""
RUNS_MAX: Final = 4096
"""Most runs of adjacent bytes in one window (one write). Each run costs a microsecond or two, both to plan
and to transfer."""


class TransferStage(Enum):
    PAGES = "pages"
    """Stage in which pages and the metadata record are written to the receiver."""
    SEAL = "seal"
    """Stage in which the seal (the mark that all data is written) is to be written. Every rank has written
    everything else."""
    SEALING = "sealing"
    SEALED = "sealed"


@dataclass(slots=True)
class Quota:
    """Budget of one turn: number of windows (writes of bounded size) that all rooms together may still start
    in it."""

    windows: int = WINDOWS_A_TURN_MAX


class RoomTransfer:
    """All writes of one room from this rank to its receiver. `advance` is called every turn, and never
    blocks."""

    def __init__(
        self,
        transfer: Transfer,
        route: Route,
        source: PageTables,
        block_tokens: int,
        grant: Granted,
        window_bytes: int,
        staging: memoryview,
        staging_index: int,
    ) -> None:
        """Make the writes of a room.

        `source`: page tables of the room on this side, by KV group, from position 0. `block_tokens`: tokens
        per block here, the fewest that fill whole pages. `staging`: metadata slot of this side, from which
        record and seal are written.
        """
        self._transfer = transfer
        self._route = route
        self._source = source
        self._block_tokens = block_tokens
        self._grant = grant
        self._window_bytes = window_bytes
        self._targets = [each for each in route.targets if not each.plan.empty]
        """Ranks of the receiver to which this rank sends pages."""
        stretches = [each.plan.stretch(window_bytes, RUNS_MAX) for each in self._targets]
        self._stretch = min(stretches, default=0)
        """Number of positions whose writes are planned in one go, for one target rank after the other."""
        self._staging = staging
        self._staging_offset = staging_index * SLOT_BYTES
        self._slot_offset = grant.slot * SLOT_BYTES
        self._ready = grant.prefix_tokens
        """Position up to which pages need no more computation: they may be sent, or the receiver has them in
        its prefix cache."""
        self._planned = grant.prefix_tokens
        """Position up to which the writes to all target ranks have been planned."""
        self._planning = (0, 0)
        """State of the planning of the next positions: their end position, and for how many target ranks the
        writes are planned so far."""
        self._complete = False
        self._waiting: deque[tuple[Incarnation, str, Window]] = deque()
        self.in_flight: dict[PutId, int] = {}
        """Writes under way: number of bytes of pages in each, by the id of the write. 0 for a write of a
        record or a seal."""
        self._records: deque[tuple[MetadataRecord, list[Incarnation]]] = deque()
        self._seal = b""
        self.stage = TransferStage.PAGES
        self.failure: str | None = None

    def ready(self, tokens: int, *, complete: bool = False) -> None:
        """Let the whole pages of the first `tokens` positions be sent, because their KV is computed.

        `complete`: whether `tokens` is the number of all positions. If so, the last pages are sent even if
        they are not full.
        """
        stop = tokens if complete else tokens // self._block_tokens * self._block_tokens
        self._complete |= complete
        self._ready = max(self._ready, stop)
        if not self._targets:
            self._planned = self._ready

    @property
    def sealed(self) -> bool:
        """Whether the seals (the marks that all data is written) have arrived at all ranks of the
        receiver."""
        return self.stage is TransferStage.SEALED

    @property
    def written(self) -> bool:
        """Whether all pages of the room and its records have arrived at the receiver, as far as this rank
        sends them."""
        return self._complete and self.failure is None and not (self._unposted or self.in_flight)

    def add_record(self, record: MetadataRecord, checksum: Callable[[Sequence[GroupHead]], int]) -> None:
        """Queue the metadata record for each rank of the receiver, and start the first write at once.

        Called on the elected rank only, together with the last pages. `checksum`: function that returns the
        checksum of the pages for given KV heads, those of one rank of the receiver.
        """
        sums = [(checksum(target.heads), target.peer) for target in self._route.targets]
        for value, group in groupby(sums, key=lambda each: each[0]):
            own = record if value == record.pages_checksum else replace(record, pages_checksum=value)
            self._records.append((own, [peer for _, peer in group]))
        self._seal = seal_bytes(record.room, record.generation)
        try:
            self._post_record()
        except TransferError as error:
            self.failure = str(error)

    def seal(self) -> None:
        """Let the next calls of `advance` write the seals, because every rank has written the rest. Call it
        after `add_record`."""
        self._staging[SEAL_OFFSET : SEAL_OFFSET + SEAL_BYTES] = self._seal
        self.stage = TransferStage.SEAL

    def advance(self, count_bytes: Callable[[int], None], quota: Quota | None = None) -> bool:
        """Poll the writes under way, and start the next ones: at most POSTS_A_TURN_MAX in a call.

        `quota`: number of windows that all rooms may still start in this turn. A record or a seal does not
        count. Return whether a write was started or has ended, or the transfer has failed.
        """
        quota = quota or Quota()
        moved = False
        for _ in range(POSTS_A_TURN_MAX):
            if self.in_flight:
                moved = self._poll(count_bytes) or moved
            if self.failure is not None:
                break
            try:
                if not self._post(quota):
                    break
            except TransferError as error:
                self.failure = str(error)
                break
            moved = True
        return moved or self.failure is not None

    def drain(self, count_bytes: Callable[[int], None]) -> bool:
        """Poll the writes under way, and start no more. Return True when none is left."""
        self._waiting.clear()
        self._ready, self._planning = self._planned, (0, 0)
        self._records.clear()
        self._poll(count_bytes)
        return not self.in_flight

    @property
    def under_way(self) -> bool:
        return bool(self.in_flight) or self._unposted

    @property
    def waits(self) -> bool:
        """Whether there is nothing to send until the engine has computed more: no write is under way, and
        none is due."""
        return not (self._complete or self.under_way or self.failure)

    @property
    def _unposted(self) -> bool:
        """Whether the write of a record, or of a page that is ready, has not been started yet."""
        return bool(self._records) or self._pages_left

    @property
    def _pages_left(self) -> bool:
        return bool(self._waiting) or self._planned < self._ready

    def _poll(self, count_bytes: Callable[[int], None]) -> bool:
        moved = False
        for put, length in list(self.in_flight.items()):
            state = self._transfer.poll(put)
            if state is PutState.PENDING:
                continue
            moved = True
            del self.in_flight[put]
            if state is PutState.FAILED:
                self.failure = "a write ended without reaching the decode worker"
            elif length:
                count_bytes(length)
        return moved

    def _plan(self) -> None:
        """Plan the writes of the next positions, at most `_stretch` of them, to the next target rank."""
        stop, count = self._planning
        if count == 0:
            stop = min(self._planned + self._stretch, self._ready)
        target, first = self._targets[count], self._grant.prefix_tokens
        ends = self._complete and stop == self._ready
        runs = target.plan.runs(self._source, self._grant.pages, first, self._planned, stop, ends=ends)
        for group, each in enumerate(runs):
            for window in windows(each, self._window_bytes):
                self._waiting.append((target.peer, kv_region(group), window))
        self._planning = (stop, count + 1)
        if count + 1 == len(self._targets):
            self._planned, self._planning = stop, (0, 0)

    def _post(self, quota: Quota) -> bool:
        windows = sum(map(bool, self.in_flight.values()))
        if self._records and windows == len(self.in_flight):
            self._post_record()
            return True
        if self._pages_left:
            if not quota.windows or windows >= WINDOWS_IN_FLIGHT_MAX:
                return False
            while not self._waiting and self._planned < self._ready:
                self._plan()
        if self._waiting:
            peer, region, (length, runs) = self._waiting.popleft()
            quota.windows -= 1
            self._put(peer, region, runs, length)
            return True
        if self.in_flight or self.stage in (TransferStage.PAGES, TransferStage.SEALED):
            return False
        if self.stage is TransferStage.SEAL:
            self._write_slots([target.peer for target in self._route.targets], SEAL_OFFSET, SEAL_BYTES)
            self.stage = TransferStage.SEALING
        else:
            self.stage = TransferStage.SEALED
        return True

    def _post_record(self) -> None:
        """Start the writes of the next metadata record. No earlier write may still read the metadata slot,
        because the record overwrites it."""
        record, peers = self._records.popleft()
        body = record.pack()
        self._staging[: len(body)] = body
        self._write_slots(peers, 0, len(body))

    def _write_slots(self, peers: Sequence[Incarnation], start: int, length: int) -> None:
        for peer in peers:
            run = (self._staging_offset + start, self._slot_offset + start, length)
            self._put(peer, SLOTS, [run])

    def _put(self, peer: Incarnation, region: str, runs: Sequence[Run], of_pages: int = 0) -> None:
        self.in_flight[self._transfer.put(peer, region, runs)] = of_pages
