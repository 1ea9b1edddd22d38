"""Which workers of a side get rooms, how much is on each, and which were sent a prompt's beginning?

Kept in order, so that whoever asks need not look at all. Whoever changes a worker's state or load says so
(`changed`, `loaded`). A load changes several times between two looks at who has space: those that did are put
in their places by the next look.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Final

from baton.fleet.prefix_affinity import Block
from baton.fleet.worker_record import Worker, WorkerState
from baton.ids import Incarnation

HOLDERS_MAX: Final = 32
"""A beginning that more workers of a side were sent distinguishes none of them."""

Rank = tuple[float, ...]
_worker_of: Final = itemgetter(2)


class Ranking:
    """Workers by a rank that changes, the least first; those of one rank by their names. A change costs a
    search by halves, and what is no change costs nothing."""

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
        """KV positions that a request may take of the first; 0 without any."""
        first = self.first
        return 0 if first is None else first.facts.tokens_max

    def put(self, worker: Worker, rank: Rank | None) -> None:
        """None: it is not among them."""
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
    """Of one side, all that hold a lease."""

    def __init__(self) -> None:
        self.known, self.ready, self.serving = Ranking(), Ranking(), Ranking()
        """Each with the largest cache first."""
        self.computing = Ranking()
        """Of all of them, those that compute prompts, whatever their side: the largest cache first."""
        self._open, self._roomy, self._short = Ranking(), Ranking(), Ranking()
        self._moved: dict[Incarnation, Worker] = {}
        """Those whose places in these three are to be found anew."""
        self.joining: dict[Incarnation, Worker] = {}
        self.draining: dict[Incarnation, Worker] = {}
        self.changes = 0
        """How often somebody came or left, or changed its state."""
        self.page_sizes: Counter[int] = Counter()
        """Workers by how many tokens a page of theirs holds."""
        self._sent: dict[Block, tuple[Worker, ...]] = {}

    @property
    def open(self) -> Ranking:
        """Those where a client's room may begin now: the one with the smallest share of its cache used first,
        and of equals the largest."""
        self._settle()
        return self._open

    @property
    def roomy(self) -> Ranking:
        """The same, the one with the most left first."""
        self._settle()
        return self._roomy

    @property
    def short(self) -> Ranking:
        """Those that one more may wait on, in the order of `open`."""
        self._settle()
        return self._short

    @property
    def has_space(self) -> bool:
        """For some client's request."""
        return bool(len(self.open) or len(self.short))

    def with_space(self) -> Iterator[Worker]:
        """For some client's request; some of them twice."""
        return chain(self.open, self.short)

    @property
    def tokens_max(self) -> int:
        """KV positions that a request may take, of the largest; 0 without any."""
        return self.known.tokens_max

    @property
    def tokens_max_now(self) -> int:
        """The same of those that serve, or of all where none does."""
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
        self._forget(worker, worker.sent)

    def changed(self, worker: Worker) -> None:
        """Its state."""
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
        """Its rooms, or what is used of it."""
        self._moved[worker.facts.incarnation] = worker

    def sent(self, worker: Worker, prompt: Sequence[Block]) -> Sequence[Block]:
        """It gets this beginning of a prompt. Returns the blocks that it was not sent before."""
        new, forgotten = worker.sent.add(prompt)
        for block in new:
            self._sent[block] = (*self._sent.get(block, ()), worker)
        self._forget(worker, forgotten)
        return new

    def not_kept(self, worker: Worker, blocks: Sequence[Block]) -> None:
        """It does not hold these, although it was sent them."""
        self._forget(worker, worker.sent.drop(blocks))

    def sent_before(self, prompt: Sequence[Block]) -> Sequence[Worker]:
        """Workers that were sent more of its beginning than others, at most HOLDERS_MAX.

        Who was sent a block was sent all before it, and forgets it before them: those of a block are among
        those of the one before.
        """
        for block in prompt:
            found = self._sent.get(block, ())
            if len(found) <= HOLDERS_MAX:
                return found
        return ()

    def _settle(self) -> None:
        for worker in self._moved.values():
            usage, has_place = worker.usage, worker.has_place
            left = usage.left
            begins = has_place and left > 0 and usage.has_row
            waits = has_place and usage.may_wait
            by_share = (worker.share, -worker.facts.tokens_max) if begins or waits else None
            self._open.put(worker, by_share if begins else None)
            self._roomy.put(worker, (-left,) if begins else None)
            self._short.put(worker, by_share if waits else None)
        self._moved.clear()

    def _forget(self, worker: Worker, blocks: Iterable[Block]) -> None:
        for block in blocks:
            left = tuple(each for each in self._sent[block] if each is not worker)
            if left:
                self._sent[block] = left
            else:
                del self._sent[block]


def _size(worker: Worker) -> Rank:
    return (-worker.facts.tokens_max,)
