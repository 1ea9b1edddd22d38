"""A model whose KV says what it was computed from, in virtual time.

Every word of every page says which layer, half, head and position it is for, and which tokens the sequence
had up to there, whichever rank holds it: those who begin alike may share it, and nobody else. A step reads
all that it may read when it starts and again when it ends, fills what it is to write with noise, and
reports every foreign word: one page that changed hands too early, one that was sent too early, one byte of
another layer or head is seen. What lands is read once more when it is admitted.
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
WHOLE: Final = KvLayout("toy", "float32", PAGE_TOKENS, (0, 3, 5), (1, 2), 1)
"""What the ranks of any worker hold together, in pages of their own size."""
WORD: Final = WHOLE.head_dim * 4
_LANES: Final = [(head, layer, half) for head in WHOLE.kv_heads for layer in WHOLE.layers for half in "KV"]
_NOISE: Final = b"\xa5"
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


def history(known: tuple[int, ...]) -> int:
    """What tells `known` from any other tokens, in every process alike."""
    return hash(known)


class Model:
    """What pages must hold, remembered for all ranks that hold the same of it."""

    def __init__(self) -> None:
        self._words: dict[int, bytes] = {}
        self.pages: dict[tuple[int, ...], dict[tuple[int, int], bytes]] = {}
        """By what a rank holds, then by history and first position."""

    def words(self, known: tuple[int, ...]) -> bytes:
        """Of the last position of `known`, one for each of _LANES: no two are alike."""
        key = history(known)
        if key not in self._words:
            what = f"{key} {len(known)} {known[-1]}".encode()
            self._words[key] = blake2b(what, digest_size=WORD * len(_LANES)).digest()
        return self._words[key]


class Engine:
    """One rank's memory and what is computed in it."""

    def __init__(self, layout: KvLayout, pages: int, model: Model, foreign: Callable[[str], None]) -> None:
        self._layout = layout
        self._size = layout.page_tokens
        self._lanes = tuple(
            number
            for number, (head, layer, _) in enumerate(_LANES)
            if head in layout.kv_heads and layer in layout.layers
        )
        self._lane_bytes = self._size * WORD
        self._model = model
        self._foreign = foreign
        self.memory = HostMemory(pages * layout.page_bytes)
        self._pages = model.pages.setdefault((self._size, *self._lanes), {})

    def begin(self, rows: Sequence[Row]) -> None:
        self._read(rows, "starts")
        noise = _NOISE * self._layout.page_bytes
        for row in rows:
            for first in range(row.start - row.start % self._size, row.stop, self._size):
                self._write(row, first, noise)

    def end(self, rows: Sequence[Row]) -> list[Token | None]:
        self._read(rows, "ends")
        drawn = []
        for row in rows:
            known = row.sequence.tokens(0, row.stop)
            for first in range(row.start - row.start % self._size, row.stop, self._size):
                self._write(row, first, self._page(first, known))
            drawn.append(Token(next_token(known)) if row.sample else None)
        return drawn

    def check(
        self, request: Request, pages: Sequence[int], known: Sequence[int], stop: int, when: str
    ) -> None:
        """Do `pages` hold positions [0, stop) of `request`, each layer and head that this rank has?"""
        view, page_bytes = self.memory.view, self._layout.page_bytes
        for first in range(0, stop, self._size):
            page = self._page(first, known)
            at = pages[first // self._size] * page_bytes
            length = min(stop - first, self._size) * WORD
            found = view[at : at + page_bytes]
            if length == self._lane_bytes and found == page:
                continue
            for lane, start in zip(self._lanes, range(0, page_bytes, self._lane_bytes), strict=True):
                if found[start : start + length] != page[start : start + length]:
                    head, layer, half = _LANES[lane]
                    self._foreign(
                        f"request {request.request_id}: {half} of layer {layer}, head {head}, tokens {first}"
                        f" to {first + length // WORD}, page {at // page_bytes}, is foreign when {when}"
                    )
                    return

    def _read(self, rows: Sequence[Row], when: str) -> None:
        for row in rows:
            known = row.sequence.tokens(0, row.stop)
            self.check(row.sequence.request, row.pages, known, row.start, f"a step {when}")

    def _write(self, row: Row, first: int, page: bytes) -> None:
        """The part of `page`, of the tokens from `first` on, that is in the row."""
        view, page_bytes = self.memory.view, self._layout.page_bytes
        at = row.pages[first // self._size] * page_bytes
        low = max(row.start - first, 0) * WORD
        high = min(row.stop - first, self._size) * WORD
        if high - low == self._lane_bytes:
            view[at : at + page_bytes] = page
            return
        for start in range(0, page_bytes, self._lane_bytes):
            view[at + start + low : at + start + high] = page[start + low : start + high]

    def _page(self, first: int, known: Sequence[int]) -> bytes:
        """What the page of tokens from `first` on must hold, as far as they are known."""
        known = tuple(known[: first + self._size])
        key = (history(known), first)
        page = self._pages.get(key)
        if page is None:
            words = [self._model.words(known[:stop]) for stop in range(first + 1, len(known) + 1)]
            words += [bytes(WORD * len(_LANES))] * (first + self._size - len(known))
            lanes = [lane * WORD for lane in self._lanes]
            page = self._pages[key] = b"".join([each[lane : lane + WORD] for lane in lanes for each in words])
        return page


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
