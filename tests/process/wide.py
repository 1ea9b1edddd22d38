"""A model whose KV is large and says whose it is: every byte of every position holds its room and its token.

Rooms of tens of megabytes, so that a write takes its time; a step reads all earlier positions and reports
what is not its room's own.
"""

import struct
import threading
from collections.abc import Sequence
from typing import Final

import torch

from baton.engine_interface import PageSumRequest, Row, RowResult
from baton.engine_interface import Sequence as TokenSequence
from baton.rooms.request import Token
from baton.wire.model_bounds import ModelBounds
from bench.pages.device_memory import Memory, bytes_of
from tests.layouts import group_of, one_group
from tests.prefill import toy

PAGE_TOKENS: Final = 16
LAYOUT: Final = one_group("wide", "float32", PAGE_TOKENS, (0,), (0,), 8192)
BOUNDS: Final = ModelBounds(toy.VOCABULARY, 4096)
HELD_S: Final = 60.0
_POSITION: Final = struct.Struct("<QQ")
_UNHELD: Final = 100_000


class WideEngine:
    """Use through a `StepThread`. `hold` it, and a step waits in its thread until `go`."""

    def __init__(self, memory: Memory) -> None:
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

    def bind_thread(self) -> None: ...

    def step(self, rows: Sequence[Row]) -> list[RowResult]:
        if not self._permits.acquire(timeout=HELD_S):
            raise TimeoutError("a held step was never let go")
        drawn = [self._row(row) for row in rows]
        if self.memory.device != "cpu":
            torch.cuda.synchronize(self.memory.device)
        return drawn

    def release(self, sequence: TokenSequence) -> None:
        """Do nothing: nothing is stored by sequence."""

    def sum_pages(self, parts: Sequence[PageSumRequest]) -> None:
        raise AssertionError("no room here asked for sums")

    def _row(self, row: Row) -> RowResult:
        room = int(row.sequence.request.request_id)
        known = list(row.sequence.tokens(0, row.stop))
        everything = bytes_of(self.memory)
        for position in range(row.stop):
            start = row.pages[position // PAGE_TOKENS] * group_of(LAYOUT).page_bytes
            start += position % PAGE_TOKENS * group_of(LAYOUT).token_bytes
            own = bytearray(
                _POSITION.pack(room, known[position]) * (group_of(LAYOUT).token_bytes // _POSITION.size)
            )
            wanted = torch.frombuffer(own, dtype=torch.uint8).to(everything.device)
            place = everything[start : start + group_of(LAYOUT).token_bytes]
            if position >= row.start:
                place.copy_(wanted)
            elif not torch.equal(place, wanted):
                found = place.cpu().numpy().tobytes()
                self.foreign.append(f"room {room} position {position}: {whose(found)}")
        return (Token(toy.next_token(known)),) if row.sample else ()


def whose(place: bytes) -> str:
    rooms = {room for room, _ in _POSITION.iter_unpack(place)}
    return f"of rooms {sorted(rooms)[:4]}"
