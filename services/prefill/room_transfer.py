"""How do a room's pages, its record and its seal get from this rank to the receiver, and when is it quiet?

Pages leave in windows as chunks are computed; where a window's bytes lie is found when it is to be posted, so
that a turn costs no more for a long prompt. When all is computed the elected rank writes the record to each
rank of the receiver, before the pages that are left: so the receiver knows that the seal is near. When every
rank of this worker has written what it has to, and all of that is DONE, the elected one writes the seals
(`seal-last`, `one-writer`). Nothing relies on an order between two writes. A room of which no page is to be
sent has a record and a seal all the same (`zero-page-hand-over`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from math import lcm
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
"""Of one room."""
WINDOWS_A_TURN_MAX: Final = 6
"""Of all rooms together: some paths copy while they post."""
RUNS_MAX: Final = 4096
"""Of a window: each takes a microsecond or two, here and in the transfer."""


class TransferStage(Enum):
    PAGES = "pages"
    """And the record."""
    SEAL = "seal"
    """To be written: every rank has written the rest."""
    SEALING = "sealing"
    SEALED = "sealed"


@dataclass(slots=True)
class Quota:
    """What all rooms together may still post in this turn."""

    windows: int = WINDOWS_A_TURN_MAX


class RoomTransfer:
    """One room's writes. `advance` is called every turn; it never waits."""

    def __init__(
        self,
        transfer: Transfer,
        route: Route,
        source: PageTables,
        page_tokens: Sequence[int],
        grant: Granted,
        window_bytes: int,
        staging: memoryview,
        staging_index: int,
    ) -> None:
        """`source`: the room's pages on this side, by group and from position 0 on, of `page_tokens`
        tokens each. `staging`: this side's metadata slot, from which record and seal are written."""
        self._transfer = transfer
        self._route = route
        self._source = source
        self._block_tokens = lcm(*page_tokens)
        self._grant = grant
        self._window_bytes = window_bytes
        self._targets = [each for each in route.targets if not each.plan.empty]
        """That this rank has pages for."""
        stretches = [each.plan.stretch(window_bytes, RUNS_MAX) for each in self._targets]
        self._stretch = min(stretches, default=0)
        """Positions that are planned together, for one target after the other."""
        self._staging = staging
        self._staging_offset = staging_index * SLOT_BYTES
        self._slot_offset = grant.slot * SLOT_BYTES
        self._ready = grant.prefix_tokens
        """Positions before it may leave, or were held by the receiver before."""
        self._planned = grant.prefix_tokens
        """Positions before it are planned for every target."""
        self._planning = (0, 0)
        """Where the stretch behind it ends, and how many targets it is planned for."""
        self._complete = False
        self._waiting: deque[tuple[Incarnation, str, Window]] = deque()
        self._in_flight: dict[PutId, int] = {}
        """How many bytes of pages each carries: none, from the metadata slot."""
        self._records: deque[tuple[MetadataRecord, list[Incarnation]]] = deque()
        self._seal = b""
        self.stage = TransferStage.PAGES
        self.failure: str | None = None

    def ready(self, tokens: int, *, complete: bool = False) -> None:
        """The first `tokens` positions will not change any more: whole pages of them may leave. `complete`:
        there are no more, so that the last pages may leave as they are."""
        stop = tokens if complete else tokens // self._block_tokens * self._block_tokens
        self._complete |= complete
        self._ready = max(self._ready, stop)
        if not self._targets:
            self._planned = self._ready

    @property
    def sealed(self) -> bool:
        """The seals' writes are DONE."""
        return self.stage is TransferStage.SEALED

    @property
    def written(self) -> bool:
        """All pages were ready, and their writes are DONE, as are the records'."""
        return self._complete and self.failure is None and not (self._unposted or self._in_flight)

    def add_record(self, record: MetadataRecord, checksum: Callable[[Sequence[GroupHead]], int]) -> None:
        """What each rank of the receiver is to know beside the pages; it leaves at once. To be called by the
        elected rank alone, with the last of the pages. `checksum`: of the pages, for the KV heads that the
        receiver's rank holds."""
        told = [(checksum(target.heads), target.peer) for target in self._route.targets]
        for value, group in groupby(told, key=lambda each: each[0]):
            own = record if value == record.pages_checksum else replace(record, pages_checksum=value)
            self._records.append((own, [peer for _, peer in group]))
        self._seal = seal_bytes(record.room, record.generation)
        try:
            self._post_record()
        except TransferError as error:
            self.failure = str(error)

    def seal(self) -> None:
        """Every rank has written. After `add_record`."""
        self._staging[SEAL_OFFSET : SEAL_OFFSET + SEAL_BYTES] = self._seal
        self.stage = TransferStage.SEAL

    def advance(self, count_bytes: Callable[[int], None], quota: Quota | None = None) -> bool:
        """Poll what is under way and post what may follow, as long as there is something to post, and no more
        than POSTS_A_TURN_MAX. `quota`: of windows; a record or a seal costs next to nothing. True when
        something moved."""
        quota = quota or Quota()
        moved = False
        for _ in range(POSTS_A_TURN_MAX):
            if self._in_flight:
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
        """Post nothing more; poll what is under way. True when it is quiet."""
        self._waiting.clear()
        self._ready, self._planning = self._planned, (0, 0)
        self._records.clear()
        self._poll(count_bytes)
        return not self._in_flight

    @property
    def under_way(self) -> bool:
        return bool(self._in_flight) or self._unposted

    @property
    def waits(self) -> bool:
        """For more to be computed: nothing is on its way, and nothing to be posted or reported."""
        return not (self._complete or self.under_way or self.failure)

    @property
    def _unposted(self) -> bool:
        """Something is ready that was not posted."""
        return bool(self._records) or self._pages_left

    @property
    def _pages_left(self) -> bool:
        return bool(self._waiting) or self._planned < self._ready

    def _poll(self, count_bytes: Callable[[int], None]) -> bool:
        moved = False
        for put, length in list(self._in_flight.items()):
            state = self._transfer.poll(put)
            if state is PutState.PENDING:
                continue
            moved = True
            del self._in_flight[put]
            if state is PutState.FAILED:
                self.failure = "a write ended without reaching the decode worker"
            elif length:
                count_bytes(length)
        return moved

    def _plan(self) -> None:
        """Find what carries the next stretch to the next target."""
        stop, count = self._planning
        if count == 0:
            stop = min(self._planned + self._stretch, self._ready)
        target, first = self._targets[count], self._grant.prefix_tokens
        runs = target.plan.runs(self._source, self._grant.pages, first, self._planned, stop)
        for group, each in enumerate(runs):
            for window in windows(each, self._window_bytes):
                self._waiting.append((target.peer, kv_region(group), window))
        self._planning = (stop, count + 1)
        if count + 1 == len(self._targets):
            self._planned, self._planning = stop, (0, 0)

    def _post(self, quota: Quota) -> bool:
        windows = sum(map(bool, self._in_flight.values()))
        if self._records and windows == len(self._in_flight):
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
        if self._in_flight or self.stage in (TransferStage.PAGES, TransferStage.SEALED):
            return False
        if self.stage is TransferStage.SEAL:
            self._write_slots([target.peer for target in self._route.targets], SEAL_OFFSET, SEAL_BYTES)
            self.stage = TransferStage.SEALING
        else:
            self.stage = TransferStage.SEALED
        return True

    def _post_record(self) -> None:
        """The next one. Nothing is read from the slot meanwhile that it is written over."""
        record, peers = self._records.popleft()
        body = record.pack()
        self._staging[: len(body)] = body
        self._write_slots(peers, 0, len(body))

    def _write_slots(self, peers: Sequence[Incarnation], start: int, length: int) -> None:
        for peer in peers:
            run = (self._staging_offset + start, self._slot_offset + start, length)
            self._put(peer, SLOTS, [run])

    def _put(self, peer: Incarnation, region: str, runs: Sequence[Run], of_pages: int = 0) -> None:
        self._in_flight[self._transfer.put(peer, region, runs)] = of_pages
