"""A model whose KV says whose it is: every position of every page holds its room's mark and its token.

What a step reads of earlier positions it checks, so that one foreign, missing or late byte is seen.
"""

import ctypes
import struct
import threading
from collections.abc import Sequence as Sequenced

from services.engine.engine import Row
from services.pages.layout import KvLayout
from services.rooms.request import Request, Sampling, Token
from services.transfer.host_memory import HostMemory

VOCABULARY = 1000
CONTEXT = 256
PAGE_TOKENS = 4
LAYOUT = KvLayout("toy", "float32", PAGE_TOKENS, (0,), (0,), 2)
_UNHELD = 100_000
_POSITION = struct.Struct("<QQ")


def request(name: str, prompt: Sequenced[int], max_tokens: int = 1, **more: object) -> Request:
    """`name` is the room's mark as a decimal number."""
    return Request(name, tuple(prompt), max_tokens, sampling=Sampling(temperature=0.0), **more)  # type: ignore[arg-type]


def next_token(tokens: Sequenced[int]) -> int:
    """What the toy model says comes after `tokens`."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % VOCABULARY
    return value


def answer(asked: Request) -> list[int]:
    """The whole output of `asked`, computed without any pages."""
    tokens = list(asked.prompt)
    for _ in range(asked.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(asked.prompt) :]


class ToyEngine:
    """Use through a `Stepper`. `hold` it, and a step waits in its thread until `go`."""

    def __init__(self, pages: int) -> None:
        assert LAYOUT.token_bytes == _POSITION.size
        self.memory = HostMemory(pages * LAYOUT.page_bytes)
        self.foreign: list[str] = []
        """Positions that did not hold what their room had written."""
        self.steps = 0
        self.fail_next: Exception | None = None
        self._permits = threading.Semaphore(_UNHELD)

    def hold(self) -> None:
        """Steps from now on wait, but for as many as `go` lets through."""
        while self._permits.acquire(blocking=False):
            pass

    def go(self, steps: int = _UNHELD) -> None:
        self._permits.release(steps)

    def step(self, rows: Sequenced[Row]) -> list[Token | None]:
        if not self._permits.acquire(timeout=20):
            raise TimeoutError("a held step was never let go")
        self.steps += 1
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        return [self._row(row) for row in rows]

    def _row(self, row: Row) -> Token | None:
        mark = int(row.sequence.request.request_id)
        known = list(row.sequence.tokens(0, row.stop))
        for position in range(row.start):
            found = _POSITION.unpack_from(self.memory.view, self._offset(row, position))
            if found != (mark, known[position]):
                self.foreign.append(f"room {mark} position {position}: {found}")
        for position in range(row.start, row.stop):
            _POSITION.pack_into(self.memory.view, self._offset(row, position), mark, known[position])
        if not row.sample:
            return None
        token = next_token(known)
        asked = row.sequence.request.sampling.top_logprobs
        return Token(token) if asked is None else Token(token, -0.5, ((token, -0.5),)[:asked])

    def _offset(self, row: Row, position: int) -> int:
        page = row.pages[position // PAGE_TOKENS]
        return page * LAYOUT.page_bytes + position % PAGE_TOKENS * LAYOUT.token_bytes


def read(address: int, length: int) -> bytes:
    return ctypes.string_at(address, length)
