"""A model whose KV says whose it is: every position of every page holds its room's mark and its token.

What a step reads of earlier positions it checks, so that one foreign, missing or late byte is seen.
"""

import ctypes
import struct
import threading
from collections.abc import Sequence as Sequenced

from baton.engine_interface import (
    GrammarUnsatisfied,
    LogitsNotFinite,
    PageSumRequest,
    Row,
    RowResult,
    Sequence,
    take,
)
from baton.pages.kv_checksum import WORD, key, lane, mix, multiplier
from baton.pages.layout import KvLayout, full_group
from baton.rooms.request import Request, Sampling, Score, Token
from baton.runtime.host_memory import HostMemory

VOCABULARY = 1000
CONTEXT = 256
PAGE_TOKENS = 4
GROUP = full_group("float32", PAGE_TOKENS, (0,), (0,), 2)
LAYOUT = KvLayout("toy", (GROUP,))
_UNHELD = 100_000
_POSITION = struct.Struct("<QQ")
_WORDS = struct.Struct("<4i")
"""A position's bytes as the four 32-bit words that are summed."""


def request(
    name: str, prompt: Sequenced[int], max_tokens: int = 1, top: int | None = None, **more: object
) -> Request:
    """Return a request. `name` is the room's number, and its last three digits are the mark in the pages it
    computes."""
    sampling = Sampling(temperature=0.0, top_logprobs=top)
    return Request(name, tuple(prompt), max_tokens, sampling=sampling, **more)  # type: ignore[arg-type]


def mark(asked: Request) -> int:
    """Return the mark of the request's room. Rooms 7, 1007 and 2007 have one mark, so they may share equal
    pages."""
    return int(asked.request_id) % 1000


def luck(asked: Request) -> int:
    """Return the number on which the toy model's draws depend beside the tokens: the seed, or 0 if greedy."""
    return asked.sampling.seed if asked.sampling.temperature else 0


def next_token(tokens: Sequenced[int], seed: int = 0) -> int:
    """Return the token that the toy model draws after `tokens`."""
    value = 7 + seed
    for token in tokens:
        value = (value * 31 + token + 1) % VOCABULARY
    return value


def score_of(asked: Request, position: int) -> Score:
    """Return the toy model's score of the prompt token at `position`."""
    top = ((asked.prompt[position], -0.25), (position, -3.0))[: asked.prompt_logprobs or 0]
    return Score(-float(position), position, top)


def answer(asked: Request) -> list[int]:
    """Return the tokens that `asked` draws behind the output it comes with, computed without any pages."""
    tokens = [*asked.prompt, *asked.output]
    for _ in range(asked.max_tokens - len(asked.output)):
        tokens.append(next_token(tokens, luck(asked)))
    return tokens[asked.prefill_tokens :]


def summed(memory: HostMemory, pages: Sequenced[int], start: int, stop: int) -> int:
    """Return the sum of positions [start, stop) as `baton.pages.kv_checksum` defines it.

    K and V of a position lie side by side.
    """
    total = 0
    for position in range(start, stop):
        words = _WORDS.unpack_from(memory.view, _offset(pages, position))
        for half, at in enumerate((0, 2)):
            vector = words[at] * multiplier(0) + words[at + 1] * multiplier(1)
            total += mix(key(lane(0, half, 0), position) + vector)
    return total & WORD


def _offset(pages: Sequenced[int], position: int) -> int:
    return pages[position // PAGE_TOKENS] * GROUP.page_bytes + position % PAGE_TOKENS * GROUP.token_bytes


class ToyEngine:
    """Use through a `StepThread`. `hold` it, and a step waits in its thread until `go`."""

    def __init__(self, pages: int) -> None:
        assert GROUP.token_bytes == _POSITION.size
        self.memory = HostMemory(pages * GROUP.page_bytes)
        self.ran: list[str] = []
        """"step" or "sum", one after the other."""
        self.foreign: list[str] = []
        """Positions that did not hold what their room had written."""
        self.live: set[Sequence] = set()
        """Sequences that a step had a row of, and that were not released."""
        self.released: set[Sequence] = set()
        self.steps = 0
        self.scored_most = 0
        """Tokens of a row that is scored."""
        self.fail_next: Exception | None = None
        self.broken: set[int] = set()
        """Marks of requests that get no token."""
        self.unheld: set[int] = set()
        """Seeds of choices that get none, by their grammar."""
        self._permits = threading.Semaphore(_UNHELD)

    def hold(self) -> None:
        """Make later steps wait until `go` permits them."""
        while self._permits.acquire(blocking=False):
            pass

    def go(self, steps: int = _UNHELD) -> None:
        self._permits.release(steps)

    def bind_thread(self) -> None: ...

    def step(self, rows: Sequenced[Row]) -> list[RowResult]:
        self._enter()
        self.steps += 1
        self.ran.append("step")
        assert self.released.isdisjoint(row.sequence for row in rows), "each-is-released"
        self.live.update(row.sequence for row in rows)
        tokens = [self._row(row) for row in rows]
        self._carry_on(
            [
                PageSumRequest(row.sequence.page_sum, (row.pages,), row.stop, ends=row.sample)
                for row in rows
                if row.sequence.page_sum
            ]
        )
        for row in rows:
            if row.sample and row.sequence.page_sum is not None:
                row.sequence.page_sum.everywhere = dict(row.sequence.page_sum.here)
        return tokens

    def release(self, sequence: Sequence) -> None:
        assert sequence not in self.released, "each-is-released"
        self.live.discard(sequence)
        self.released.add(sequence)

    def sum_pages(self, parts: Sequenced[PageSumRequest]) -> None:
        self._enter()
        self.ran.append("sum")
        self._carry_on(parts)

    def _enter(self) -> None:
        if not self._permits.acquire(timeout=20):
            raise TimeoutError("a held step was never let go")
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error

    def _carry_on(self, parts: Sequenced[PageSumRequest]) -> None:
        for part in parts:
            if part.sum.stop < part.stop:
                total = summed(self.memory, part.tables[0], part.sum.stop, part.stop)
                part.sum.add({(0, 0): total}, part.stop)

    def _row(self, row: Row) -> RowResult:
        assert row.start < row.stop
        whose = mark(row.sequence.request)
        known = list(row.sequence.tokens(0, row.stop))
        for position in range(row.start):
            found = _POSITION.unpack_from(self.memory.view, _offset(row.pages, position))
            if found != (whose, known[position]):
                self.foreign.append(f"room {whose} position {position}: {found}")
        for position, token in enumerate(row.fed, row.start):
            _POSITION.pack_into(self.memory.view, _offset(row.pages, position), whose, token)
        scores = row.sequence.scores
        if scores is not None:
            scores.values += [score_of(row.sequence.request, position + 1) for position in row.scored]
            self.scored_most = max(self.scored_most, row.stop - row.start)
        if whose in self.broken:
            return LogitsNotFinite()
        if row.sequence.request.sampling.seed in self.unheld:
            return GrammarUnsatisfied("nothing is allowed there")
        if not row.sample:
            return ()
        return take(
            row.drafts, (_drawn(row, [*known, *row.drafts[:count]]) for count in range(1 + len(row.drafts)))
        )


def _drawn(row: Row, tokens: Sequenced[int]) -> Token:
    token = next_token(tokens, luck(row.sequence.request))
    asked = row.sequence.request.sampling.top_logprobs
    return Token(token) if asked is None else Token(token, -0.5, ((token, -0.5),)[:asked])


def read(address: int, length: int) -> bytes:
    return ctypes.string_at(address, length)
