"""A model whose KV is large and says whose it is: every byte of every position holds its room and its token.

Rooms of tens of megabytes, so that a write takes its time; a step reads all earlier positions and reports
what is not its room's own.
"""

import struct
import threading
from collections.abc import Sequence
from typing import Final

from services.engine.engine import Row, SumPart
from services.pages.layout import KvLayout
from services.rooms.request import Token
from services.runtime.host_memory import HostMemory
from services.wire.model_bounds import ModelBounds
from tests.prefill import toy

PAGE_TOKENS: Final = 16
LAYOUT: Final = KvLayout("wide", "float32", PAGE_TOKENS, (0,), (0,), 8192)
BOUNDS: Final = ModelBounds(toy.VOCABULARY, 4096)
HELD_S: Final = 60.0
_POSITION: Final = struct.Struct("<QQ")
_UNHELD: Final = 100_000


class WideEngine:
    """Use through a `Stepper`. `hold` it, and a step waits in its thread until `go`."""

    def __init__(self, memory: HostMemory) -> None:
        """`memory`: of whole pages."""
        self.memory = memory
        self.foreign: list[str] = []
        """Positions that did not hold what their room had written."""
        self._permits = threading.Semaphore(_UNHELD)

    def hold(self) -> None:
        while self._permits.acquire(blocking=False):
            pass

    def go(self) -> None:
        self._permits.release(_UNHELD)

    def step(self, rows: Sequence[Row]) -> list[Token | None]:
        if not self._permits.acquire(timeout=HELD_S):
            raise TimeoutError("a held step was never let go")
        return [self._row(row) for row in rows]

    def sum_pages(self, parts: Sequence[SumPart]) -> None:
        raise AssertionError("no room here asked for sums")

    def _row(self, row: Row) -> Token | None:
        room = int(row.sequence.request.request_id)
        known = list(row.sequence.tokens(0, row.stop))
        view = self.memory.view
        for position in range(row.stop):
            start = row.pages[position // PAGE_TOKENS] * LAYOUT.page_bytes
            start += position % PAGE_TOKENS * LAYOUT.token_bytes
            own = _POSITION.pack(room, known[position]) * (LAYOUT.token_bytes // _POSITION.size)
            place = view[start : start + LAYOUT.token_bytes]
            if position >= row.start:
                place[:] = own
            elif bytes(place) != own:
                self.foreign.append(f"room {room} position {position}: {whose(place)}")
        return Token(toy.next_token(known)) if row.sample else None


def whose(place: memoryview) -> str:
    rooms = {room for room, _ in _POSITION.iter_unpack(place)}
    return f"of rooms {sorted(rooms)[:4]}"
