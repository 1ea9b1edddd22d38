"""Choice of a prefill and a decode worker for a request, or of one decode worker alone.

On each side, a worker that can begin the request now is preferred to one where it would wait in a short queue
(`placed-by-use`, `baton.fleet.worker_usage`). If no worker has space, the request waits at the router.

A process that serves both sides counts as one worker on each side, with a weight on each (`Worker.share`). If
the two chosen workers are one process, nothing needs to be handed over. Then its decode side gets the request
alone (`kept-at-home`).

Among the workers of a side, the one with the smallest used share of its cache is chosen. The request itself
is counted in that share. A prefill worker's share is the work that waits there. A worker that was sent the
prompt's prefix before needs less for the request. So a conversation stays where it is, unless that worker is
fuller by more than the prefix saves.

A placement looks at few workers, and draws nothing by chance. Up to LOOKS_MAX workers a side it finds the
best one. With more, the chosen worker may be fuller than the best if more than HOLDERS_MAX workers were sent
the prefix. If caches differ in size, only the LOOKS_MAX workers with the smallest used share are compared.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from heapq import heappop, heappush
from itertools import islice
from typing import Final, NoReturn, TypeAlias

from baton.fleet.need import Need
from baton.fleet.pair_health import PairHealth, PairId
from baton.fleet.side_workers import Ranking, SideWorkers
from baton.fleet.worker_record import Worker
from baton.ids import Incarnation
from baton.rooms.errors import NoCapacity, NoneReady, NoSuchWorker, TooLarge
from baton.rooms.phases import Side

LOOKS_MAX: Final = 32
"""Most workers of a side that one placement compares, in addition to those that were sent the prompt's
prefix."""

Pair: TypeAlias = tuple[Worker | None, Worker]
"""Prefill and decode worker of a request. If prefill is None, decode computes the prompt itself."""
Fullness: TypeAlias = tuple[bool, float, int, str]
"""Sort key by which a placement compares workers, the best first. It has: whether the request would wait, the
used share of the cache with the request, the positions added, and the worker's name."""


def place(
    workers: Mapping[Side, SideWorkers],
    need: Need,
    avoid: Collection[Incarnation] = (),
    pairs: PairHealth | None = None,
) -> Pair:
    """Choose a pair for a request from `workers`, which are given by side.

    `avoid`: incarnations of workers that get the request only if no other worker of their side could hold it,
    even later. (A worker that fails every request at once always has space.) `pairs`: health of pairs; a
    broken pair gets the request only if no other pair could hold it.

    A decode worker that computes prompts gets the request alone, if the request may be local. That is so if
    no prefill worker that could hold it is ready, or if no pair connects. Raises NoCapacity if waiting helps,
    and NoSuchWorker if it does not. NoSuchWorker comes first.
    """
    prefill, decode = _choices(workers, need)
    if prefill is None:
        return None, decode.without(avoid).best()
    wanted = prefill.without(avoid), decode.without(avoid)
    if pairs is not None and pairs.broken_count():
        for one, other in (wanted, (prefill, decode)):
            if _has_whole(one, other, pairs):
                return _merge_same_process(_best_pair(one, other, pairs), need)
        if (alone := _alone(workers, need)) is not None:
            return None, alone.without(avoid).best()
    return _merge_same_process((wanted[0].best(), wanted[1].best()), need)


def _merge_same_process(pair: tuple[Worker, Worker], need: Need) -> Pair:
    """Return the decode worker alone if both workers are one process that may compute the prompt. Return the
    pair otherwise."""
    prefill, decode = pair
    is_one = decode.twin is prefill and need.may_be_local and decode.facts.computes
    return (None, decode) if is_one else pair


def place_retracted(
    workers: Mapping[Side, SideWorkers],
    need: Need,
    decode: Worker,
    avoid: Collection[Incarnation] = (),
    pairs: PairHealth | None = None,
) -> Pair:
    """Place a retracted request again on the draining decode worker that retracted it.

    The prompt is computed by a prefill worker that reaches this decode worker. Without one, the decode worker
    computes it, if it can. Raises NoSuchWorker and NoCapacity.
    """
    alone = need.may_be_local and decode.facts.computes
    prefill: _Choice | None = None
    try:
        prefill = _Choice(workers[Side.PREFILL], Side.PREFILL, need)
    except NoSuchWorker:
        if not alone:
            raise
    if decode.rooms_left <= 0 or not decode.usage.can_start(need.required_free(decode)):
        raise NoCapacity(f"{decode.facts.name} drains, and has no space to go on now", Side.DECODE)
    if prefill is None or (alone and not prefill.is_ready):
        return None, decode

    def is_reached(sender: Worker) -> bool:
        return pairs is None or not pairs.is_broken(_id(sender, decode))

    for choice in (prefill.without(avoid), prefill):
        if any(map(is_reached, choice.ready())):
            senders = (sender for _, sender in choice.in_order() if is_reached(sender))
            if (best := next(senders, None)) is not None:
                return _merge_same_process((best, decode), need)
            raise NoCapacity(f"every prefill worker that reaches {decode.facts.name} is full", Side.PREFILL)
    return (None, decode) if alone else _merge_same_process((prefill.without(avoid).best(), decode), need)


def choose_reserved(
    workers: Mapping[Side, SideWorkers],
    need: Need,
    avoid: Collection[Incarnation],
    pairs: PairHealth,
    before: Worker | None,
) -> Worker | None:
    """Choose a decode worker to reserve for a request that fits no worker now, or return None. Other requests
    do not get the space that becomes free on a reserved worker.

    The worker is ready, could hold the request, and is not reserved yet. `before`, the worker reserved last
    time, is chosen again if possible: it gets no other rooms, so the request begins there at the latest when
    those on it have ended. Otherwise it is the one with the most free space, of LOOKS_MAX workers that
    connect to a prefill worker.
    """
    try:
        prefill, decode = _choices(workers, need)
    except NoSuchWorker:
        return None
    senders = () if prefill is None else tuple(islice(prefill.without(avoid).ready(), LOOKS_MAX))

    def fitness(worker: Worker) -> tuple[bool, bool, int]:
        connects = any(not pairs.is_broken(_id(one, worker)) for one in senders)
        return connects, worker is before, worker.usage.left

    return max(decode.without(avoid).reservable(before), key=fitness, default=None)


def _choices(workers: Mapping[Side, SideWorkers], need: Need) -> "tuple[_Choice | None, _Choice]":
    """Return the prefill and the decode workers that could hold a request. Prefill is None if no prefill
    worker is ready and the request may be local. Raises NoSuchWorker."""
    prefill = lacks = None
    try:
        prefill = _Choice(workers[Side.PREFILL], Side.PREFILL, need)
    except NoSuchWorker as error:
        lacks = error
    if prefill is None or not prefill.is_ready:
        alone = _alone(workers, need, lacks)
        if alone is not None and (alone.is_ready or prefill is None):
            return None, alone
    if lacks is not None:
        raise lacks
    return prefill, _Choice(workers[Side.DECODE], Side.DECODE, need)


def _alone(
    workers: Mapping[Side, SideWorkers], need: Need, lacks: NoSuchWorker | None = None
) -> "_Choice | None":
    """Return the decode workers that could serve a request without prefill. None if the request may not be
    local (computed on decode), or there are none.

    `lacks`: error that says why no prefill worker can serve the request. Raises NoSuchWorker if only a worker
    that may come later could.
    """
    if not need.may_be_local:
        return None
    decode = workers[Side.DECODE]
    try:
        return _Choice(decode, Side.DECODE, need, alone=True)
    except TooLarge:
        return None
    except NoSuchWorker:
        if isinstance(lacks, TooLarge) and decode.tokens_max:
            raise
        return None


def uncached_tokens(worker: Worker, need: Need) -> int:
    """Return the number of KV positions with which a request begins on a worker, without its cached prefix;
    at least 1. Prefill computes these positions. Decode needs no transfer for cached ones."""
    return max(need.initial_on(worker.facts) - worker.cached_tokens(need.blocks), 1)


class _Choice:
    """Workers of one side that could hold a request, at least one. They are ready workers, or if there are
    none, workers that may be ready again soon."""

    def __init__(self, workers: SideWorkers, side: Side, need: Need, *, alone: bool = False) -> None:
        """Find the workers of a side for a request. `alone`: only decode workers that compute prompts. Raises
        NoSuchWorker if there are none."""
        self._alone = alone
        self._workers = workers
        self._side = side
        self._need = need
        self._avoid: Collection[Incarnation] = ()
        self._least = need.prompt_tokens if side is Side.PREFILL else need.positions_on_decode(1)
        """Fewest KV positions that the whole request needs on a worker, whatever its page size."""
        page_tokens = min(workers.page_sizes, default=1)
        self._first = need.prompt_tokens if side is Side.PREFILL else need.initial_on_decode(page_tokens)
        """Fewest KV positions that the request needs to begin, with the smallest page size among the
        workers."""
        self.is_ready = self._is_weighed = False
        """Whether some of the workers that could hold the request are ready. `_is_weighed`: whether workers
        of weight 0 are left out, because there are others."""
        for worker in self.ready():
            self.is_ready = True
            if worker.weight:
                self._is_weighed = True
                break
        if not self.is_ready and not any(self._able(workers.serving)):
            self._refuse()

    def without(self, avoid: Collection[Incarnation]) -> "_Choice":
        """Return a choice without the workers in `avoid`, or this choice if none would be left. Workers of
        weight 0 stay only if there are no others."""
        if not avoid:
            return self
        for is_weighed in (True, False) if self._is_weighed else (False,):
            choice = copy(self)
            choice._is_weighed = is_weighed
            if any(worker.facts.incarnation not in avoid for worker in choice.ready()):
                choice._avoid = avoid
                return choice
        return self

    def ready(self) -> Iterator[Worker]:
        return self._able(self._workers.ready)

    def reservable(self, before: Worker | None) -> list[Worker]:
        """Return ready workers that are not reserved for another request yet, at most LOOKS_MAX. In addition,
        `before` is returned if it is one."""
        looked = list(islice((worker for worker in self.ready() if not worker.reserved), LOOKS_MAX))
        if before is not None and not before.reserved:
            looked += [before] if before in self._workers.ready and self._can_be(before) else []
        return looked

    def best(self) -> Worker:
        """Return the least full worker that has space for the request. Raises NoCapacity if none has."""
        found = next(self.in_order(), None)
        if found is not None:
            return found[1]
        side, needed = self._side.value, self._need.describe(self._side)
        text = f"every {side} worker is full: none has space for {needed} now"
        if not self.is_ready:
            text = f"a stream to every {side} worker broke: waiting for one to renew its lease"
        raise NoCapacity(text, self._side)

    def in_order(self) -> Iterator[tuple[Fullness, Worker]]:
        """Yield workers with space for the request, the least full first. Fullness counts the request, less
        its cached prefix. Workers on which it would wait come last.

        A retracted request does not wait on a worker: it would begin as soon as its tokens fit, without the
        margin.
        """
        workers = self._workers
        roomiest = workers.roomy.first
        if roomiest is not None and roomiest.usage.left >= self._first:
            found: set[Incarnation] = set()
            for full, worker in self._by_share(workers.open, self._begins, waits=False):
                found.add(worker.facts.incarnation)
                yield full, worker
            for worker in workers.roomy:
                if worker.usage.left < self._first:
                    break
                if worker.facts.incarnation not in found and self._can_be(worker) and self._begins(worker):
                    yield self._look(worker, waits=False)
        if self._side is Side.PREFILL or not self._need.margin:
            yield from self._by_share(workers.short, self._waits, waits=True)

    def _by_share(
        self, ranking: Ranking, fits: Callable[[Worker], bool], *, waits: bool
    ) -> Iterator[tuple[Fullness, Worker]]:
        """Yield the workers of a ranking on which the request fits, the least full first.

        Workers that were sent more of the prompt's prefix than others are compared first. Further workers are
        compared while one of them may be less full, LOOKS_MAX at a time. The search stops after LOOKS_MAX
        workers on which the request does not fit.
        """
        looked: list[tuple[Fullness, Worker]] = []
        seen: set[Incarnation] = set()
        for worker in self._workers.holders_of(self._need.blocks):
            seen.add(worker.facts.incarnation)
            if worker in ranking and self._can_be(worker) and fits(worker):
                heappush(looked, self._look(worker, waits=waits))
        looked_max = len(looked) + LOOKS_MAX
        misfits_left = LOOKS_MAX
        largest = self._workers.ready.tokens_max
        for worker in ranking:
            facts = worker.facts
            if facts.incarnation in seen or not self._can_be(worker):
                continue
            if not fits(worker):
                misfits_left -= 1
                if not misfits_left:
                    break
                continue
            if looked:
                least = waits, worker.share + self._first / largest, self._first, facts.name
                while looked and (looked[0][0] <= least or len(looked) == looked_max):
                    yield heappop(looked)
            heappush(looked, self._look(worker, waits=waits))
        while looked:
            yield heappop(looked)

    def _look(self, worker: Worker, *, waits: bool) -> tuple[Fullness, Worker]:
        more = uncached_tokens(worker, self._need)
        return (waits, worker.share_with(more), more, worker.facts.name), worker

    def _begins(self, worker: Worker) -> bool:
        return worker.usage.can_start(self._need.required_free(worker))

    def _waits(self, worker: Worker) -> bool:
        return not self._begins(worker)

    def _can_be(self, worker: Worker) -> bool:
        facts = worker.facts
        if self._is_weighed and not worker.weight:
            return False
        fits = facts.tokens_max >= self._need.positions_on(facts) and facts.incarnation not in self._avoid
        return fits and (facts.computes or not self._alone)

    def _able(self, by_size: Ranking) -> Iterator[Worker]:
        """Yield the workers of a ranking that can hold the request. `by_size`: ranking with the largest cache
        first."""
        for worker in by_size:
            if worker.facts.tokens_max < self._least:
                return
            if self._can_be(worker):
                yield worker

    def _refuse(self) -> NoReturn:
        """Raise the error for a request that no worker can hold: NoneReady, NoSuchWorker or TooLarge."""
        side, needed = self._side.value, self._need.describe(self._side)
        if self._workers.tokens_max and not any(self._able(self._workers.known)):
            raise TooLarge(
                f"no {side} worker can hold {needed}: the largest holds {self._workers.tokens_max}"
            )
        ready = (each.facts for each in self._workers.ready if each.facts.computes or not self._alone)
        for most in (facts.tokens_max for facts in ready):
            raise NoSuchWorker(f"no {side} worker that is ready can hold {needed}: the largest holds {most}")
        raise NoneReady(self._side)


def _has_whole(prefill: _Choice, decode: _Choice, pairs: PairHealth) -> bool:
    """Return whether at least one pair of a prefill and a decode worker connects. The number of pairs that
    are looked at is at most one more than the number of broken pairs."""
    return any(not pairs.is_broken(_id(one, other)) for one in prefill.ready() for other in decode.ready())


def _best_pair(prefill: _Choice, decode: _Choice, pairs: PairHealth) -> tuple[Worker, Worker]:
    """Return the pair of workers that connect and have space, whose fuller worker is the least full. Raises
    NoCapacity."""
    best: tuple[list[Fullness], tuple[Worker, Worker]] | None = None
    for full, one in prefill.in_order():
        if best is not None and full > best[0][0]:
            break  # the next ones are not less full
        others = enumerate(decode.in_order())
        reached = ((at, *each) for at, each in others if not pairs.is_broken(_id(one, each[1])))
        for at, other_full, other in islice(reached, 1):
            fullness = sorted((full, other_full), reverse=True)
            if best is None or fullness < best[0]:
                best = fullness, (one, other)
            if at == 0:
                return best[1]  # this one has the best partner, and the next ones are fuller
    if best is None:
        raise NoCapacity("every pair of workers that reach each other is full")
    return best[1]


def _id(prefill: Worker, decode: Worker) -> PairId:
    return prefill.facts.incarnation, decode.facts.incarnation
