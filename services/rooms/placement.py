"""Which pair of workers gets a request?

On each side the one with the smallest share of its cache spoken for once it has the request, which takes less
of a worker that was sent the prompt's beginning before. So a conversation stays where it is, unless more is
spoken for there than that spares, and a short beginning that all prompts share fills nobody's queue.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.rooms.affinity import Block
from services.rooms.entries import Worker, WorkerState
from services.rooms.errors import NoCapacity, NoneReady, NoSuchWorker, TooLarge
from services.rooms.ids import Incarnation
from services.rooms.phases import Side


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes of its two workers, and what they may have of it."""

    prompt_tokens: int
    """KV positions that prefill computes."""
    tokens: int
    """KV positions that decode may come to hold."""
    blocks: tuple[Block, ...] = ()
    """Of its prompt, where there is a choice to be made by them."""

    def on(self, side: Side) -> int:
        return self.prompt_tokens if side is Side.PREFILL else self.tokens


def place(
    workers: Mapping[Side, Sequence[Worker]], need: Need, avoid: Collection[Incarnation] = ()
) -> tuple[Worker, Worker]:
    """Of each side's `workers`. Raises NoSuchWorker, which waiting for a place does not mend, before
    NoCapacity, which it does.

    `avoid`: those that get the request only if their side has no other that could hold it, be it full now: a
    worker that fails everything at once always has a free place.
    """
    prefill = _able(workers[Side.PREFILL], Side.PREFILL, need.prompt_tokens)
    decode = _able(workers[Side.DECODE], Side.DECODE, need.tokens)
    return _best(_without(prefill, avoid), need), _best(_without(decode, avoid), need)


def beyond(worker: Worker, need: Need) -> int:
    """KV positions that a request takes of a worker, at least one, beyond what it was sent of its prompt.
    In prefill that is what it computes. In decode it is spared the transfer alone."""
    return max(need.on(worker.facts.side) - worker.sent.tokens(need.blocks), 1)


def all_full(workers: Iterable[Iterable[Worker]]) -> bool:
    """One of the sides with these workers has no place for any request."""
    return not all(any(worker.has_place for worker in side) for side in workers)


def largest(workers: Iterable[Worker]) -> int:
    """KV positions that a request may take on the side of these workers; 0 without any."""
    return max((worker.facts.tokens_max for worker in workers), default=0)


def _able(role: Sequence[Worker], side: Side, tokens: int) -> list[Worker]:
    """Workers of a side that could hold so many tokens, at least one: those that are ready, or, where none
    is, those that may be again at once."""
    large = [worker for worker in role if worker.facts.tokens_max >= tokens]
    if role and not large:
        raise TooLarge(f"no {side.value} worker can hold {tokens} tokens: the largest holds {largest(role)}")
    able = [worker for worker in large if worker.state is WorkerState.READY]
    able = able or [worker for worker in large if worker.is_serving]
    if able:
        return able
    ready = largest(worker for worker in role if worker.state is WorkerState.READY)
    if ready:
        raise NoSuchWorker(
            f"no {side.value} worker that is ready can hold {tokens} tokens: the largest holds {ready}"
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

    def by_then(worker: Worker) -> tuple[float, int, str]:
        more = beyond(worker, need)
        return (worker.tokens + more) / worker.facts.tokens_max, more, worker.facts.name

    return min(free, key=by_then)
