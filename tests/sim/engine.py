"""A model whose KV says what it was computed from, in virtual time.

Every word of every page says which layer, half, head and position it is for, and which tokens the sequence
had up to there, whichever rank holds it: those who begin alike may share it, and nobody else. A step reads
all that it may read when it starts and again when it ends, fills what it is to write with noise, and
reports every foreign word: one page that changed hands too early, one that was sent too early, one byte of
another layer or head is seen. What lands is read once more when it is admitted.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from hashlib import shake_128
from typing import Any, Final

from baton.engine_interface import PageSumRequest, Row, RowResult, take
from baton.engine_interface import Sequence as TokenSequence
from baton.pages.kv_checksum import key, lane, mix, multiplier
from baton.pages.layout import GroupHead, KvLayout
from baton.rooms.request import Request, Token
from baton.runtime.host_memory import HostMemory
from tests.layouts import group_of, one_group
from tests.sim.loop import VirtualLoop
from tests.sim.states import SimulatedStates

VOCABULARY: Final = 50_000
CONTEXT: Final = 512
REPEATS: Final = VOCABULARY - 1
FEW: Final = 3
"""Tokens of an answer that goes round."""


PAGE_TOKENS: Final = 4
WHOLE: Final = one_group("toy", "float32", PAGE_TOKENS, (0, 3, 5), (1, 2), 1)
"""Layout of a whole worker for page sizes of its own, in runs without more heads."""
WORD: Final = group_of(WHOLE).planes[0].elements * 4
_NOISE: Final = b"\xa5"
_MASK: Final = (1 << 64) - 1
_FACTOR: Final = 1_000_003


def luck(asked: Request) -> int:
    """Return the number, beside the tokens, on which a draw depends."""
    return asked.sampling.seed if asked.sampling.temperature else 0


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """Return the model's next token. It depends on each token and its place, and at every third place on
    the seed, so that choices agree for a while. Prompts that begin with REPEATS repeat themselves."""
    return _drawn(tokens, _mixed(tokens), seed)


def answer(asked: Request) -> list[int]:
    """The whole output of `asked`, of one choice, computed without any pages."""
    known, value, seed = list(asked.prompt), _mixed(asked.prompt), luck(asked)
    output = list[int]()
    while asked.finish_reason(output) is None:
        output.append(_drawn(known, value, seed))
        known += output[-1:]
        value = _mixed(output[-1:], value)
    return output


def _mixed(tokens: Sequence[int], value: int = 7) -> int:
    """`value`, of the tokens before, and these."""
    for token in tokens:
        value = (value * _FACTOR + token + 1) & _MASK
    return value


def _drawn(tokens: Sequence[int], value: int, seed: int) -> int:
    """`value`: of all `tokens`."""
    if tokens[0] == REPEATS:
        return (3 * tokens[-1] + tokens[len(tokens) // 2] + len(tokens) // 8 + seed) % FEW
    if len(tokens) % 3 == 0:  # as if the seed had stood before all of them
        value = (value + seed * pow(_FACTOR, len(tokens), _MASK + 1)) & _MASK
    return (value >> 7) % VOCABULARY


def history(known: tuple[int, ...]) -> int:
    """Return a hash of `known` that is equal in every process."""
    return hash(known)


class SimulatedModel:
    """The right content of pages, cached for all ranks with equal shares."""

    def __init__(self, whole: KvLayout = WHOLE) -> None:
        self.lanes = [
            (head, layer, plane)
            for layer, head in whole.groups[0].places()
            for plane in range(len(whole.groups[0].planes))
        ]
        self._words: dict[int, bytes] = {}
        self.pages: dict[tuple[int, ...], dict[tuple[int, int], bytes]] = {}
        """Content of single pages, by a rank's share, then by history and first position."""
        self.whole: dict[tuple[int, ...], dict[int, bytes]] = {}
        """Content of full pages, by a rank's share, then by history."""
        self._draws: dict[tuple[int, int], Token] = {}

    def draw(self, known: tuple[int, ...], seed: int) -> Token:
        """Return the next token, computed once for all ranks."""
        place = (history(known), seed)
        drawn = self._draws.get(place)
        if drawn is None:
            drawn = self._draws[place] = Token(next_token(known, seed))
        return drawn

    def words(self, known: tuple[int, ...]) -> bytes:
        """Return the words of the last position of `known`, one for each lane, all different."""
        place = history(known)
        if place not in self._words:
            what = f"{place} {len(known)} {known[-1]}".encode()
            self._words[place] = shake_128(what).digest(WORD * len(self.lanes))
        return self._words[place]

    def summed(self, known: tuple[int, ...], start: int) -> dict[GroupHead, int]:
        """Return the checksum of positions of `known` from `start` on, by KV head, as
        `baton.pages.kv_checksum` computes it."""
        words = [(position, self.words(known[: position + 1])) for position in range(start, len(known))]
        totals: dict[GroupHead, int] = {}
        for number, (head, layer, plane) in enumerate(self.lanes):
            at = number * WORD
            lane_words = ((position, each[at : at + WORD]) for position, each in words)
            totals[0, head] = totals.get((0, head), 0) + _lane_sum(head, layer, plane, lane_words)
        return totals


class SimulatedEngine:
    """The memory of one rank, and what is computed in it."""

    def __init__(
        self,
        layout: KvLayout,
        pages: int,
        model: SimulatedModel,
        foreign: Callable[..., None],
        unreleased: Callable[[str], None],
        states: SimulatedStates | None = None,
    ) -> None:
        """`foreign`, `unreleased`: report content that is not a room's own, and wrong releases. `states`:
        memory for states, if the model has some."""
        group = layout.groups[0]
        self._page_bytes = group.page_bytes
        self._size = group.page_tokens
        self._states = states
        self._lanes = tuple(
            number
            for number, (head, layer, _) in enumerate(model.lanes)
            if head in group.heads and layer in group.layers
        )
        self._lane_bytes = self._size * WORD
        self._model = model
        self._foreign = foreign
        self._unreleased = unreleased
        self.live: set[TokenSequence] = set()
        """Sequences that a step had a row of, and that were not released."""
        self._released: set[TokenSequence] = set()
        self._computing: set[TokenSequence] = set()
        self.memory = HostMemory(pages * self._page_bytes)
        self._pages = model.pages.setdefault((self._size, *self._lanes), {})
        self._whole = model.whole.setdefault((self._size, *self._lanes), {})

    def bind_thread(self) -> None: ...

    def release(self, sequence: TokenSequence) -> None:
        if sequence not in self.live:
            self._unreleased(f"request {sequence.request.request_id} is released twice")
        if sequence in self._computing:
            self._unreleased(f"request {sequence.request.request_id} is released while its row is computed")
        self.live.discard(sequence)
        self._released.add(sequence)

    def end(self) -> None:
        """Note that nothing is computed."""
        self._computing = set()

    def begin(self, rows: Sequence[Row]) -> None:
        self._computing = {row.sequence for row in rows}
        self.live |= self._computing
        for row in rows:
            if row.sequence in self._released:
                self._unreleased(f"request {row.sequence.request.request_id} has a row after its release")
        self._read(rows, "starts")
        for row in rows:
            if row.state_from and self._states is not None:
                self._states.copy(row.state_from[1][0], row.tables[1][0])
            if row.start and self._states is not None:
                known = row.sequence.tokens(0, row.start)
                self._check_state(row.sequence.request, row.tables, known, "a step starts")
        noise = _NOISE * self._page_bytes
        for row in rows:
            for first in range(row.start - row.start % self._size, row.end, self._size):
                self._write(row, first, noise)
            if self._states is not None:
                self._states.write(row.tables[1][0], ())

    def step(self, rows: Sequence[Row]) -> list[RowResult]:
        """End a step: read again, write what was computed, and return the results."""
        self._read(rows, "ends")
        taken: list[RowResult] = []
        for row in rows:
            known = tuple(row.sequence.tokens(0, row.stop))
            fed = (*known, *row.drafts)
            for first in range(row.start - row.start % self._size, row.end, self._size):
                self._write(row, first, self._page(first, fed))
            seed = luck(row.sequence.request)
            draws = (self._model.draw(fed[:stop], seed) for stop in range(row.stop, row.end + 1))
            taken.append(take(row.drafts, draws) if row.sample else ())
            if self._states is not None:
                self._check_state(row.sequence.request, row.tables, (), "a step ends")
                self._states.write(row.tables[1][0], fed)
                if row.state_to:
                    self._states.copy(row.tables[1][0], row.state_to[1][0])
            summed = row.sequence.page_sum
            if summed is not None and summed.stop < row.stop:
                summed.add(self._model.summed(known, summed.stop), row.stop)
                if self._states is not None and row.sample:
                    summed.add({(1, 0): self._states.summed(self._states.right(known))}, row.stop)
            if summed is not None and row.sample:
                # What the ranks tell each other is known here without.
                summed.everywhere = dict(summed.here)
        return taken

    def sum_pages(self, parts: Sequence[PageSumRequest]) -> None:
        """Return the checksum of the pages' present content."""
        view, page_bytes = self.memory.view, self._page_bytes
        for part in parts:
            places = [
                (position, part.tables[0][position // self._size] * page_bytes + position % self._size * WORD)
                for position in range(part.sum.stop, part.stop)
            ]
            totals: dict[GroupHead, int] = {}
            for place, number in enumerate(self._lanes):
                head, layer, half = self._model.lanes[number]
                start = place * self._lane_bytes
                words = ((position, view[start + at : start + at + WORD]) for position, at in places)
                totals[0, head] = totals.get((0, head), 0) + _lane_sum(head, layer, half, words)
            part.sum.add(totals, part.stop)
            if self._states is not None and part.ends:
                found = self._states.there(part.tables[1][0])
                part.sum.add({(1, 0): self._states.summed(found)}, part.stop)

    def check_landed(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Check that a room's memory holds all known tokens of `request`, when it is admitted."""
        known, when = request.tokens, "it is admitted"
        self.check(request, tables[0], known, request.prefill_tokens, when)
        if self._states is not None:
            self._check_state(request, tables, known, when, "state-at-its-end")

    def _check_state(
        self,
        request: Request,
        tables: Sequence[Sequence[int]],
        known: Sequence[int],
        when: str,
        invariant: str = "stale-never-served",
    ) -> None:
        (page,) = tables[1]
        if self._states is not None and not self._states.holds(page, known):
            text = f"request {request.request_id}: the state behind {len(known)} tokens, page {page}"
            self._foreign(f"{text}, is foreign when {when}", invariant)

    def check(
        self, request: Request, pages: Sequence[int], known: Sequence[int], stop: int, when: str
    ) -> None:
        """Check that `pages` hold positions [0, stop) of `request`, in each layer and head of this rank."""
        view, page_bytes = self.memory.view, self._page_bytes
        full = stop // self._size
        there = b"".join([view[page * page_bytes : (page + 1) * page_bytes] for page in pages[:full]])
        right = there == self._full(tuple(known[: full * self._size]))
        for first in range(full * self._size if right else 0, stop, self._size):
            page = self._page(first, known)
            at = pages[first // self._size] * page_bytes
            length = min(stop - first, self._size) * WORD
            found = view[at : at + page_bytes]
            for number, start in zip(self._lanes, range(0, page_bytes, self._lane_bytes), strict=True):
                if found[start : start + length] != page[start : start + length]:
                    head, layer, half = self._model.lanes[number]
                    self._foreign(
                        f"request {request.request_id}: {half} of layer {layer}, head {head}, tokens {first}"
                        f" to {first + length // WORD}, page {at // page_bytes}, is foreign when {when}"
                    )
                    return

    def _read(self, rows: Sequence[Row], when: str) -> None:
        for row in rows:
            known = row.sequence.tokens(0, row.stop)
            self.check(row.sequence.request, row.tables[0], known, row.start, f"a step {when}")

    def _write(self, row: Row, first: int, page: bytes) -> None:
        """The part of `page`, of the tokens from `first` on, that is in the row."""
        view, page_bytes = self.memory.view, self._page_bytes
        at = row.tables[0][first // self._size] * page_bytes
        low = max(row.start - first, 0) * WORD
        high = min(row.end - first, self._size) * WORD
        if high - low == self._lane_bytes:
            view[at : at + page_bytes] = page
            return
        for start in range(0, page_bytes, self._lane_bytes):
            view[at + start + low : at + start + high] = page[start + low : start + high]

    def _full(self, known: tuple[int, ...]) -> bytes:
        """Return the right content of the pages that `known` fills."""
        place = history(known)
        whole = self._whole.get(place)
        if whole is None:
            firsts = range(0, len(known), self._size)
            whole = self._whole[place] = b"".join([self._page(first, known) for first in firsts])
        return whole

    def _page(self, first: int, known: Sequence[int]) -> bytes:
        """Return the right content of the page of tokens from `first` on, as far as they are known."""
        known = tuple(known[: first + self._size])
        place = (history(known), first)
        page = self._pages.get(place)
        if page is None:
            words = [self._model.words(known[:stop]) for stop in range(first + 1, len(known) + 1)]
            words += [bytes(WORD * len(self._model.lanes))] * (first + self._size - len(known))
            starts = [number * WORD for number in self._lanes]
            page = self._pages[place] = b"".join([each[at : at + WORD] for at in starts for each in words])
        return page


def _lane_sum(head: int, layer: int, plane: int, words: Iterable[tuple[int, bytes | memoryview]]) -> int:
    start, times = lane(layer, plane, head), multiplier(0)
    return sum(
        mix(key(start, position) + int.from_bytes(word, "little", signed=True) * times)
        for position, word in words
    )


class StepFault(Exception):
    """Error that the simulation raises in a step. The product logs it as an error of its engine."""


class SimulatedThread(Executor):
    """The thread that runs the steps of a rank's engine, in virtual time."""

    def __init__(
        self,
        engine: SimulatedEngine,
        loop: VirtualLoop,
        rng: random.Random,
        fails: Callable[[], bool],
        slow: float = 1.0,
    ) -> None:
        """`slow`: how many times as long as usual a step takes."""
        self._engine = engine
        self._loop = loop
        self._random = rng
        self._fails = fails
        self._slow = slow

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> "Future[Any]":
        ended: Future[Any] = Future()
        self._loop.call_later(
            self._random.uniform(0.002, 0.006) * self._slow, self._end, ended, partial(work, *given, **named)
        )
        if work == self._engine.step:
            self._engine.begin(*given)
        return ended

    def _end(self, ended: "Future[Any]", work: Callable[[], Any]) -> None:
        if self._fails():
            ended.set_exception(StepFault("a fault of the simulation"))
        else:
            ended.set_result(work())
        self._engine.end()
