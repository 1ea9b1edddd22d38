"""Which pair of workers gets a request?

On each side the one with the smallest share of its cache spoken for once it has the request, which takes less
of a worker that was sent the prompt's beginning before. So a conversation stays where it is, unless more is
spoken for there than that spares, and a short beginning that all prompts share fills nobody's queue.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from services.ids import Incarnation
from services.rooms.affinity import Block
from services.rooms.choice_pages import positions_of
from services.rooms.errors import NoCapacity, NoneReady, NoSuchWorker, TooLarge
from services.rooms.pairs import PairId
from services.rooms.phases import Side
from services.rooms.registry_records import Worker, WorkerFacts, WorkerState

Pair: TypeAlias = tuple[Worker, Worker]


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes of its two workers, and what they may have of it."""

    prompt_tokens: int
    """KV positions that prefill computes."""
    tokens: int
    """KV positions that decode may come to hold of one choice."""
    blocks: tuple[Block, ...] = ()
    """Of its prompt, where there is a choice to be made by them."""
    choices: int = 1
    """Sequences that decode draws behind what prefill computes."""

    def on(self, worker: WorkerFacts) -> int:
        """KV positions that it may come to take of this worker."""
        return self.prompt_tokens if worker.side is Side.PREFILL else self.on_decode(worker.page_tokens)

    def on_decode(self, page_tokens: int) -> int:
        """KV positions that it may come to take in pages of so many."""
        if self.choices == 1:
            return self.tokens
        return positions_of(self.prompt_tokens, self.tokens, self.choices, page_tokens)

    def told(self, side: Side) -> str:
        if side is Side.PREFILL:
            return f"{self.prompt_tokens} tokens"
        return f"{self.tokens} tokens" if self.choices == 1 else f"{self.choices} times {self.tokens} tokens"


def place(
    workers: Mapping[Side, Sequence[Worker]],
    need: Need,
    avoid: Collection[Incarnation] = (),
    broken: Collection[PairId] = (),
) -> tuple[Worker, Worker]:
    """Of each side's `workers`. Raises NoSuchWorker, which waiting for a place does not mend, before
    NoCapacity, which it does.

    `avoid`: those that get the request only if their side has no other that could hold it, be it full now: a
    worker that fails everything at once always has a free place. `broken`: pairs that get it only if there is
    no other that could hold it.
    """
    prefill = _able(workers[Side.PREFILL], Side.PREFILL, need)
    decode = _able(workers[Side.DECODE], Side.DECODE, need)
    wanted = _without(prefill, avoid), _without(decode, avoid)
    if broken:
        whole = _whole(*wanted, broken) or _whole(prefill, decode, broken)
        if whole:
            return _best_pair(whole, need)
    return _best(wanted[0], need), _best(wanted[1], need)


def beyond(worker: Worker, need: Need) -> int:
    """KV positions that a request takes of a worker, at least one, beyond what it was sent of its prompt.
    In prefill that is what it computes. In decode it is spared the transfer alone."""
    return max(need.on(worker.facts) - worker.sent.tokens(need.blocks), 1)


def all_full(workers: Iterable[Iterable[Worker]]) -> bool:
    """One of the sides with these workers has no place for any request."""
    return not all(any(worker.has_place for worker in side) for side in workers)


def largest(workers: Iterable[Worker]) -> int:
    """KV positions that a request may take on the side of these workers; 0 without any."""
    return max((worker.facts.tokens_max for worker in workers), default=0)


def _able(role: Sequence[Worker], side: Side, need: Need) -> list[Worker]:
    """Workers of a side that could hold the request, at least one: those that are ready, or, where none is,
    those that may be again at once."""
    large = [worker for worker in role if worker.facts.tokens_max >= need.on(worker.facts)]
    if role and not large:
        told, most = need.told(side), largest(role)
        raise TooLarge(f"no {side.value} worker can hold {told}: the largest holds {most}")
    able = [worker for worker in large if worker.state is WorkerState.READY]
    able = able or [worker for worker in large if worker.is_serving]
    if able:
        return able
    ready = largest(worker for worker in role if worker.state is WorkerState.READY)
    if ready:
        raise NoSuchWorker(
            f"no {side.value} worker that is ready can hold {need.told(side)}: the largest holds {ready}"
        )
    raise NoneReady(side)


def _without(able: list[Worker], avoid: Collection[Incarnation]) -> list[Worker]:
    """Those that are not to be avoided, if there are any."""
    return [worker for worker in able if worker.facts.incarnation not in avoid] or able


def _best(able: list[Worker], need: Need) -> Worker:
    """Of those with a free place, the one with the smallest share of its cache spoken for by then: that the
    prompt's beginning was sent to it before spares it as much."""
    free = [worker for worker in able if worker.has_place]
    if not free:
        side = able[0].facts.side.value
        if able[0].state is WorkerState.SUSPECT:
            raise NoCapacity(f"a stream to every {side} worker broke: waiting for one to renew its lease")
        raise NoCapacity(f"every {side} worker holds as many rooms as it may")

    return min(free, key=lambda worker: _by_then(worker, need))


def _whole(prefill: list[Worker], decode: list[Worker], broken: Collection[PairId]) -> list[Pair]:
    """Pairs of these that are not broken."""
    pairs = product(prefill, decode)
    return [pair for pair in pairs if (pair[0].facts.incarnation, pair[1].facts.incarnation) not in broken]


def _best_pair(pairs: list[Pair], need: Need) -> Pair:
    """Of pairs with free places, the one whose fuller worker is the least full by then."""
    free = [pair for pair in pairs if all(worker.has_place for worker in pair)]
    if not free:
        raise NoCapacity("every pair of workers that reach each other holds as many rooms as it may")
    return min(free, key=lambda pair: sorted((_by_then(worker, need) for worker in pair), reverse=True))


def _by_then(worker: Worker, need: Need) -> tuple[float, int, str]:
    """How full it is with the request, the less the better."""
    more = beyond(worker, need)
    return (worker.tokens + more) / worker.facts.tokens_max, more, worker.facts.name
