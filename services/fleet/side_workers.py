"""Workers of one side, sorted as placement needs them: by free space, by size, and by the prefixes they were
sent.

The orders are maintained, so that a placement need not look at all workers. The caller reports when a
worker's state or load changes (`changed`, `loaded`). A load changes several times between two placements, so
changed workers are sorted again only by the next one.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Final

from baton.fleet.kv_event_reader import KvChange
from baton.fleet.worker_record import Worker, WorkerState
from baton.ids import Incarnation
from baton.pages.block_hashes import Block

HOLDERS_MAX: Final = 32
"""Most workers that may have been sent a prefix for it to matter. A prefix that more workers were sent does
not distinguish them."""

Rank = tuple[float, ...]
_worker_of: Final = itemgetter(2)


class Ranking:
    """Workers sorted by a rank that changes, the least first, then by name. A change costs a binary search.
    Setting the same rank again costs nothing."""

    def __init__(self) -> None:
        self._order: list[tuple[Rank, str, Worker]] = []
        self._entries: dict[Incarnation, tuple[Rank, str, Worker]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, worker: Worker) -> bool:
        return worker.facts.incarnation in self._entries

    def __iter__(self) -> Iterator[Worker]:
        return map(_worker_of, self._order)

    @property
    def first(self) -> Worker | None:
        return self._order[0][2] if self._order else None

    @property
    def tokens_max(self) -> int:
        """Most KV positions of a request on the first worker of this ranking; 0 without workers."""
        first = self.first
        return 0 if first is None else first.facts.tokens_max

    def put(self, worker: Worker, rank: Rank | None) -> None:
        """Set the rank of a worker, which decides its place in the order. With None, the worker is
        removed."""
        incarnation = worker.facts.incarnation
        before = self._entries.get(incarnation)
        if rank == (None if before is None else before[0]):
            return
        if before is not None:
            del self._order[bisect_left(self._order, before)], self._entries[incarnation]
        if rank is not None:
            entry = self._entries[incarnation] = (rank, worker.facts.name, worker)
            insort(self._order, entry)


class SideWorkers:
    """Workers of one side that hold a lease, in several orders."""

    def __init__(self) -> None:
        self.known, self.ready, self.serving = Ranking(), Ranking(), Ranking()
        """Rankings of three sets of workers: all, the ready ones, and those that serve now or may again soon.
        In each, the worker with the largest cache is first."""
        self.computing = Ranking()
        """Workers that can compute prompts, in any state, the largest cache first."""
        self._open, self._roomy, self._short = Ranking(), Ranking(), Ranking()
        self._moved: dict[Incarnation, Worker] = {}
        """Workers whose positions in `open`, `roomy` and `short` have to be updated."""
        self.joining: dict[Incarnation, Worker] = {}
        self.draining: dict[Incarnation, Worker] = {}
        self.changes = 0
        """Number of times so far that a worker of this side registered, left, or changed its state."""
        self.page_sizes: Counter[int] = Counter()
        """Number of workers, by tokens per page."""
        self._holders: dict[Block, tuple[Worker, ...]] = {}
        """Workers that were sent a block, or have it cached by their log."""

    @property
    def open(self) -> Ranking:
        """Workers on which a client's room may begin now. The order is by used share of the cache, smallest
        first, then by size, largest first."""
        self._settle()
        return self._open

    @property
    def roomy(self) -> Ranking:
        """Workers on which a client's room may begin now, the one with the most free space first."""
        self._settle()
        return self._roomy

    @property
    def short(self) -> Ranking:
        """Workers with a short queue, on which one more room may wait. The order is by used share of the
        cache, smallest first, then by size, largest first."""
        self._settle()
        return self._short

    @property
    def has_space(self) -> bool:
        """Whether some worker has space for a client's request, if it is small enough."""
        return bool(len(self.open) or len(self.short))

    def with_space(self) -> Iterator[Worker]:
        """Yield the workers on which a small request of a client may be placed now. Some are yielded
        twice."""
        return chain(self.open, self.short)

    @property
    def tokens_max(self) -> int:
        """Most KV positions of a request on the largest worker of this side; 0 without workers."""
        return self.known.tokens_max

    @property
    def tokens_max_now(self) -> int:
        """Most KV positions of a request on the largest serving worker, or on the largest of all if none
        serves."""
        return self.serving.tokens_max or self.known.tokens_max

    def enter(self, worker: Worker) -> None:
        self.page_sizes[worker.facts.page_tokens] += 1
        self.known.put(worker, _size(worker))
        self.computing.put(worker, _size(worker) if worker.facts.computes else None)
        self.changed(worker)

    def remove(self, worker: Worker) -> None:
        size, incarnation = worker.facts.page_tokens, worker.facts.incarnation
        self.page_sizes[size] -= 1
        if not self.page_sizes[size]:
            del self.page_sizes[size]
        by_size = self.known, self.computing, self.ready, self.serving
        for ranking in (*by_size, self._open, self._roomy, self._short):
            ranking.put(worker, None)
        self._moved.pop(incarnation, None)
        for by_state in (self.joining, self.draining):
            by_state.pop(incarnation, None)
        self.changes += 1
        self._forget(worker, worker.sent_prefixes)
        self._forget(worker, worker.kv_log.blocks)

    def changed(self, worker: Worker) -> None:
        """Record that the state of a worker changed."""
        size = _size(worker)
        self.ready.put(worker, size if worker.state is WorkerState.READY else None)
        self.serving.put(worker, size if worker.is_serving else None)
        for state, by_state in ((WorkerState.JOINING, self.joining), (WorkerState.DRAINING, self.draining)):
            if worker.state is state:
                by_state[worker.facts.incarnation] = worker
            else:
                by_state.pop(worker.facts.incarnation, None)
        self.changes += 1
        self.loaded(worker)

    def loaded(self, worker: Worker) -> None:
        """Record that the rooms on a worker, or the usage of its cache, have changed."""
        self._moved[worker.facts.incarnation] = worker

    def record_sent(self, worker: Worker, prompt: Sequence[Block]) -> Sequence[Block]:
        """Record that a worker gets a prompt with these prefix blocks. Return the blocks that it has not got
        before, and that its log does not show as cached."""
        logged = worker.kv_log.blocks
        new, forgotten = worker.sent_prefixes.add([block for block in prompt if block not in logged])
        self._add(worker, new)
        self._forget(worker, forgotten)
        return new

    def apply_log(self, worker: Worker, change: KvChange) -> None:
        """Record what a worker's log says about its prefix cache. What it shows as cached is no estimate any
        more."""
        sent = set(worker.sent_prefixes.drop(change.stored | change.passed))
        self._add(worker, change.stored - sent)
        self._forget(worker, change.removed | (change.passed & sent))

    def forget_sent(self, worker: Worker, blocks: Sequence[Block]) -> None:
        """Record that a worker does not have blocks cached that it was sent."""
        self._forget(worker, worker.sent_prefixes.drop(blocks))

    def holders_of(self, prompt: Sequence[Block]) -> Sequence[Worker]:
        """Return the workers that have more of a prompt's prefix than others, at most HOLDERS_MAX.

        They have it cached by their log, or were sent it. A worker that has a block has all blocks before it,
        and forgets it before them. So the workers that have a block are among those that have the block
        before.
        """
        for block in prompt:
            found = self._holders.get(block, ())
            if len(found) <= HOLDERS_MAX:
                return found
        return ()

    def _settle(self) -> None:
        for worker in self._moved.values():
            usage, has_place = worker.usage, worker.has_free_room
            left = usage.left
            begins = has_place and left > 0 and usage.has_batch_space
            waits = has_place and usage.accepts_waiting
            by_share = (worker.share, -worker.facts.tokens_max) if begins or waits else None
            self._open.put(worker, by_share if begins else None)
            self._roomy.put(worker, (-left,) if begins else None)
            self._short.put(worker, by_share if waits else None)
        self._moved.clear()

    def _add(self, worker: Worker, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._holders[block] = (*self._holders.get(block, ()), worker)

    def _forget(self, worker: Worker, blocks: Iterable[Block]) -> None:
        for block in blocks:
            left = tuple(each for each in self._holders[block] if each is not worker)
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]


def _size(worker: Worker) -> Rank:
    return (-worker.facts.tokens_max,)
