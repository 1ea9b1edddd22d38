"""How do one room's pages, its record and its seal get to the receiver, and when is that quiet?

Pages leave in windows as chunks are computed; the record is posted when every window is DONE, and the
seal when the record is DONE (`seal-last`). Nothing relies on an order between two writes. A room of which no
page is to be sent has a record and a seal all the same (`zero-page-hand-over`), and each of the receiver's
slots has one writer: the sender's rank that fills the pages beside it (`one-writer`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

from services.pages.plan import TransferPlan, windows
from services.pages.record import SEAL_BYTES, SEAL_OFFSET, SLOT_BYTES, MetadataRecord, seal_bytes
from services.rooms.evidence import Granted
from services.rooms.ids import Incarnation
from services.transfer.interface import PutId, PutState, Run, Transfer, TransferError

WINDOWS_IN_FLIGHT_MAX: Final = 2

KV: Final = "kv"
SLOTS: Final = "slots"


class Stage(Enum):
    PAGES = "pages"
    RECORD = "record"
    SEAL = "seal"
    SEALED = "sealed"


class Push:
    """One room's writes. `advance` is called every turn; it never waits."""

    def __init__(
        self,
        transfer: Transfer,
        peer: Incarnation,
        plan: TransferPlan,
        source: Sequence[int],
        grant: Granted,
        window_bytes: int,
        staging: memoryview,
        staging_index: int,
    ) -> None:
        """`source`: the room's pages from the prefix on, as many as `grant.pages`. `staging`: this side's
        metadata slot, from which record and seal are written."""
        self._transfer = transfer
        self.peer = peer
        self._plan = plan
        self._source = tuple(source)
        self._grant = grant
        self._window_bytes = window_bytes
        self._staging = staging
        self._staging_offset = staging_index * SLOT_BYTES
        self._slot_offset = grant.slot * SLOT_BYTES
        self._planned = 0
        self._waiting: deque[list[Run]] = deque()
        self._in_flight: dict[PutId, int] = {}
        self._record: MetadataRecord | None = None
        self.stage = Stage.PAGES
        self.failure: str | None = None

    def ready(self, pages: int) -> None:
        """The first `pages` pages will not change any more: they may leave."""
        if pages > self._planned:
            runs = self._plan.runs(
                self._source[self._planned : pages], self._grant.pages[self._planned : pages]
            )
            for window in windows(runs, self._window_bytes):
                self._waiting.append([Run(run.source, run.target, run.length) for run in window])
            self._planned = pages

    def conclude(self, record: MetadataRecord) -> None:
        """Every page is ready, and this is what the receiver is to know beside them."""
        self._record = record

    def advance(self, count_bytes: Callable[[int], None]) -> bool:
        """Poll what is under way and post what may follow. True when something moved."""
        moved = self._poll(count_bytes)
        if self.failure is not None:
            return moved
        try:
            return self._post() or moved
        except TransferError as error:
            self.failure = str(error)
            return True

    def drain(self, count_bytes: Callable[[int], None]) -> bool:
        """Post nothing more; poll what is under way. True when it is quiet."""
        self._waiting.clear()
        self._poll(count_bytes)
        return not self._in_flight

    @property
    def under_way(self) -> bool:
        return bool(self._in_flight or self._waiting)

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
            elif self.stage is Stage.PAGES:
                count_bytes(length)
        return moved

    def _post(self) -> bool:
        if self.stage is Stage.SEALED:
            return False
        if self._waiting:
            if len(self._in_flight) >= WINDOWS_IN_FLIGHT_MAX:
                return False
            self._put(KV, self._waiting.popleft())
            return True
        if self._in_flight or self._record is None or self._planned < len(self._grant.pages):
            return False
        match self.stage:
            case Stage.PAGES:
                body = self._record.pack()
                self._staging[: len(body)] = body
                self._put(SLOTS, [Run(self._staging_offset, self._slot_offset, len(body))])
                self.stage = Stage.RECORD
            case Stage.RECORD:
                seal = seal_bytes(self._record.room, self._record.generation)
                self._staging[SEAL_OFFSET : SEAL_OFFSET + SEAL_BYTES] = seal
                source, target = self._staging_offset + SEAL_OFFSET, self._slot_offset + SEAL_OFFSET
                self._put(SLOTS, [Run(source, target, SEAL_BYTES)])
                self.stage = Stage.SEAL
            case Stage.SEAL:
                self.stage = Stage.SEALED
        return True

    def _put(self, region: str, runs: list[Run]) -> None:
        put = self._transfer.put(self.peer, region, runs)
        self._in_flight[put] = sum(run.length for run in runs)
