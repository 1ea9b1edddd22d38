"""A model whose KV says whose it is, in virtual time.

Every word of every page says which request, rank, layer, half, head, position and token it is for. A step
reads all that it may read when it starts and again when it ends, fills what it is to write with noise in
between, and reports every foreign word: one page that changed hands too early, one that was sent too early,
one byte of another rank or head is seen.
"""

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, cast

from services.engine.engine import Row
from services.engine.stepper import StepFailed, Stepper
from services.pages.layout import KvLayout
from services.rooms.request import Request, Token
from services.runtime.host_memory import HostMemory
from tests.sim.loop import VirtualLoop

VOCABULARY: Final = 50_000
CONTEXT: Final = 512
PAGE_TOKENS: Final = 4
LAYOUT: Final = KvLayout("toy", "float32", PAGE_TOKENS, (0, 3), (1, 2), 2)
WORD: Final = LAYOUT.head_dim * 4
LANES: Final = tuple(
    (layer, half, head) for layer in LAYOUT.layers for half in (0, 1) for head in LAYOUT.kv_heads
)
LANE: Final = PAGE_TOKENS * WORD
NOISE: Final = b"\xa5" * WORD
_MASK: Final = (1 << 64) - 1


def next_token(tokens: Sequence[int]) -> int:
    """What the model says comes after `tokens`: it depends on each of them and its place."""
    value = 7
    for token in tokens:
        value = (value * 1_000_003 + token + 1) & _MASK
    return (value >> 7) % VOCABULARY


def answer(asked: Request) -> list[int]:
    """The whole output of `asked`, computed without any pages."""
    tokens = list(asked.prompt)
    for _ in range(asked.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(asked.prompt) :]


def mark(request: Request) -> int:
    """What tells a request from every other, its id included, which clients use again."""
    return request.sampling.seed


class Engine:
    """One rank's memory and what is computed in it."""

    def __init__(self, rank: int, pages: int, foreign: Callable[[str], None]) -> None:
        self._rank = rank
        self._foreign = foreign
        self.memory = HostMemory(pages * LAYOUT.page_bytes)
        self._pages: dict[tuple[int, int, tuple[int, ...]], bytes] = {}

    def begin(self, rows: Sequence[Row]) -> None:
        self._read(rows, "starts")
        view = self.memory.view
        for row in rows:
            for position in range(row.start, row.stop):
                at = self._offset(row, position)
                for lane in range(len(LANES)):
                    view[at + lane * LANE : at + lane * LANE + WORD] = NOISE

    def end(self, rows: Sequence[Row]) -> list[Token | None]:
        self._read(rows, "ends")
        view, drawn = self.memory.view, []
        for row in rows:
            known = row.sequence.tokens(0, row.stop)
            for first in range(row.start - row.start % PAGE_TOKENS, row.stop, PAGE_TOKENS):
                page = self._page(row.sequence.request, first, known)
                at = row.pages[first // PAGE_TOKENS] * LAYOUT.page_bytes
                low = max(row.start - first, 0) * WORD
                high = min(row.stop - first, PAGE_TOKENS) * WORD
                for start in range(0, LAYOUT.page_bytes, LANE):
                    view[at + start + low : at + start + high] = page[start + low : start + high]
            drawn.append(Token(next_token(known)) if row.sample else None)
        return drawn

    def _read(self, rows: Sequence[Row], when: str) -> None:
        view = self.memory.view
        for row in rows:
            known = row.sequence.tokens(0, row.stop)
            for first in range(0, row.start, PAGE_TOKENS):
                page = self._page(row.sequence.request, first, known)
                at = row.pages[first // PAGE_TOKENS] * LAYOUT.page_bytes
                if row.start - first >= PAGE_TOKENS:
                    same = view[at : at + LAYOUT.page_bytes] == page
                else:
                    length = (row.start - first) * WORD
                    same = all(
                        view[at + start : at + start + length] == page[start : start + length]
                        for start in range(0, LAYOUT.page_bytes, LANE)
                    )
                if not same:
                    self._foreign(
                        f"request {row.sequence.request.request_id} rank {self._rank}: page"
                        f" {row.pages[first // PAGE_TOKENS]} (tokens {first} to"
                        f" {min(first + PAGE_TOKENS, row.start)}) holds foreign bytes when a step {when}"
                    )

    def _page(self, request: Request, first: int, known: Sequence[int]) -> bytes:
        """What the page of tokens from `first` on must hold, as far as they are known."""
        tokens = tuple(known[first : first + PAGE_TOKENS])
        key = (mark(request), first, tokens)
        page = self._pages.get(key)
        if page is None:
            words = [self._words(key[0], first + place, token) for place, token in enumerate(tokens)]
            words += [bytes(WORD * len(LANES))] * (PAGE_TOKENS - len(tokens))
            lanes = range(0, WORD * len(LANES), WORD)
            page = self._pages[key] = b"".join([each[lane : lane + WORD] for lane in lanes for each in words])
        return page

    def _words(self, mark: int, position: int, token: int) -> bytes:
        """Of one position, one for each layer, half and head: no two are alike."""
        what = f"{mark} {self._rank} {position} {token}".encode()
        return blake2b(what, digest_size=WORD * len(LANES)).digest()

    def _offset(self, row: Row, position: int) -> int:
        return row.pages[position // PAGE_TOKENS] * LAYOUT.page_bytes + position % PAGE_TOKENS * WORD


class SimStepper:
    """`services.engine.stepper.Stepper` in virtual time."""

    def __init__(
        self,
        engine: Engine,
        loop: VirtualLoop,
        rng: random.Random,
        on_done: Callable[[], None],
        fails: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._random = rng
        self._on_done = on_done
        self._fails = fails
        self._rows: Sequence[Row] | None = None
        self._ended: list[Token | None] | StepFailed | None = None
        self.slow = 1.0
        """How many times longer than usual a step takes."""

    def as_stepper(self) -> Stepper:
        return cast(Stepper, self)

    @property
    def free(self) -> bool:
        return self._rows is None

    def start(self, rows: Sequence[Row]) -> None:
        if self._rows is not None:
            raise RuntimeError("a step is running")
        self._rows = rows
        self._engine.begin(rows)
        self._loop.call_later(self._random.uniform(0.002, 0.006) * self.slow, self._end)

    def take(self) -> list[Token | None] | None:
        ended, self._ended = self._ended, None
        if ended is None:
            return None
        self._rows = None
        if isinstance(ended, StepFailed):
            raise ended
        return ended

    def take_sum(self) -> bool:
        return False

    def _end(self) -> None:
        assert self._rows is not None
        if self._fails():
            self._ended = StepFailed("RuntimeError: a fault of the simulation")
        else:
            self._ended = self._engine.end(self._rows)
        self._on_done()
