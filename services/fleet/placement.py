"""Which pair of workers gets a request, or which decode worker alone?

On each side one that can begin it now, before one where it would wait in a short queue (`placed-by-use`,
`baton.fleet.worker_usage`). Where nobody has space for it, it waits at the bootstrap until there is more.

A process that serves both sides is a worker of each, by its weight there (`Worker.share`). Where both are the
same process, nothing is to be handed over: its decode side gets the request alone (`kept-at-home`).

Among these, the one with the smallest share of its cache used once it has the request, or in prefill to be
computed. That takes less of a worker that was sent the prompt's beginning before. So a conversation stays
where it is, unless more is used there than that spares, and a short beginning that all prompts share fills
nobody's queue.

Found by looks at few of them, of which none is drawn by chance. Of up to LOOKS_MAX workers of a side it is
the best one. Of more it may be fuller than the best by a beginning that more than HOLDERS_MAX were sent. And
where caches are of several sizes, only LOOKS_MAX with the smallest share used are weighed against each other.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import Final, NoReturn, TypeAlias

from baton.fleet.pair_health import PairHealth, PairId
from baton.fleet.prefix_affinity import Block
from baton.fleet.side_workers import Ranking, SideWorkers
from baton.fleet.worker_record import Worker
from baton.ids import Incarnation
from baton.rooms.choice_pages import positions_of
from baton.rooms.errors import NoCapacity, NoneReady, NoSuchWorker, TooLarge
from baton.rooms.phases import Side
from baton.rooms.worker_facts import WorkerFacts

LOOKS_MAX: Final = 32
"""Workers that were not sent the prompt's beginning, and that are weighed against each other for it."""

GROWN_TOKENS: Final = 24
"""That there is to be space for in each sequence of a worker when one that was retracted comes back to it."""

Pair: TypeAlias = tuple[Worker | None, Worker]
"""A prefill and a decode worker, or that alone, which computes the prompt itself."""
Fullness: TypeAlias = tuple[bool, float, int, str]
"""Whether it would wait there, the share used by then, what the request adds to it, and the worker's name."""


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
    margin: int = 0
    """KV positions that decode is to have free beside those that the room begins with: one that was retracted
    asks for them, so that it is not retracted again at once."""
    may_be_local: bool = False
    """Where there is no prefill worker for it, or none but the same process, a decode worker that computes
    prompts gets it alone."""
    scores: int = 0
    """Tokens of the prompt that prefill scores beside computing them."""

    def on(self, worker: WorkerFacts) -> int:
        """KV positions that it may come to take of this worker."""
        return self.prompt_tokens if worker.side is Side.PREFILL else self.on_decode(worker.page_tokens)

    def on_decode(self, page_tokens: int) -> int:
        """KV positions that it may come to take in pages of so many."""
        if self.choices == 1:
            return self.tokens
        return positions_of(self.prompt_tokens, self.tokens, self.choices, page_tokens)

    def first_on(self, worker: WorkerFacts) -> int:
        """KV positions that it begins with."""
        return self.prompt_tokens if worker.side is Side.PREFILL else self.first_on_decode(worker.page_tokens)

    def first_on_decode(self, page_tokens: int) -> int:
        """In pages of so many: those of the tokens that are known and of a page more, which are granted at
        once, and a page of each choice, which is left for it to grow into."""
        granted = -(-min(self.prompt_tokens + page_tokens, self.tokens) // page_tokens)
        return min((granted + self.choices) * page_tokens, self.on_decode(page_tokens))

    def asked_of(self, worker: Worker) -> int:
        """KV positions that are to be free for it to begin. What is left for one that was retracted to grow
        into, all others on the worker grow into, too."""
        facts = worker.facts
        first = self.first_on(facts)
        if facts.side is Side.PREFILL or not self.margin:
            return first
        own, least = (
            min(first + more, self.on(facts)) for more in (self.margin, GROWN_TOKENS * self.choices)
        )
        return max(own, least + GROWN_TOKENS * worker.usage.growing)

    def told(self, side: Side) -> str:
        if side is Side.PREFILL:
            return f"{self.prompt_tokens} tokens"
        return f"{self.tokens} tokens" if self.choices == 1 else f"{self.choices} times {self.tokens} tokens"


def place(
    workers: Mapping[Side, SideWorkers],
    need: Need,
    avoid: Collection[Incarnation] = (),
    pairs: PairHealth | None = None,
) -> Pair:
    """Of each side's `workers`. Raises NoSuchWorker, which waiting for a place does not mend, before
    NoCapacity, which it does.

    `avoid`: those that get the request only if their side has no other that could hold it, be it full now: a
    worker that fails everything at once always has a free place. `pairs`: broken ones get it only if there is
    no other that could hold it.

    Where no prefill worker that could hold it is ready, or no pair connects, a decode worker that computes
    prompts gets it alone, if it may be local.
    """
    prefill, decode = _choices(workers, need)
    if prefill is None:
        return None, decode.without(avoid).best()
    wanted = prefill.without(avoid), decode.without(avoid)
    if pairs is not None and pairs.broken_count():
        for one, other in (wanted, (prefill, decode)):
            if _has_whole(one, other, pairs):
                return _kept(_best_pair(one, other, pairs), need)
        if (alone := _alone(workers, need)) is not None:
            return None, alone.without(avoid).best()
    return _kept((wanted[0].best(), wanted[1].best()), need)


def _kept(pair: tuple[Worker, Worker], need: Need) -> Pair:
    """Of one process that serves both sides its decode side alone, where that may compute the prompt."""
    prefill, decode = pair
    is_one = decode.twin is prefill and need.may_be_local and decode.facts.computes
    return (None, decode) if is_one else pair


def place_back(
    workers: Mapping[Side, SideWorkers],
    need: Need,
    decode: Worker,
    avoid: Collection[Incarnation] = (),
    pairs: PairHealth | None = None,
) -> Pair:
    """On a decode worker that drains, which retracted the request's room, and a prefill worker that reaches
    it. Where there is none, on that alone, if it computes the prompt. Raises NoSuchWorker and NoCapacity."""
    alone = need.may_be_local and decode.facts.computes
    prefill: _Choice | None = None
    try:
        prefill = _Choice(workers[Side.PREFILL], Side.PREFILL, need)
    except NoSuchWorker:
        if not alone:
            raise
    if decode.places_left <= 0 or not decode.usage.begins(need.asked_of(decode)):
        raise NoCapacity(f"{decode.facts.name} drains, and has no space to go on now", Side.DECODE)
    if prefill is None or (alone and not prefill.is_ready):
        return None, decode

    def is_reached(sender: Worker) -> bool:
        return pairs is None or not pairs.is_broken(_id(sender, decode))

    for choice in (prefill.without(avoid), prefill):
        if any(map(is_reached, choice.ready())):
            senders = (sender for _, sender in choice.in_order() if is_reached(sender))
            if (best := next(senders, None)) is not None:
                return _kept((best, decode), need)
            raise NoCapacity(f"every prefill worker that reaches {decode.facts.name} is full", Side.PREFILL)
    return (None, decode) if alone else _kept((prefill.without(avoid).best(), decode), need)


def to_reserve(
    workers: Mapping[Side, SideWorkers],
    need: Need,
    avoid: Collection[Incarnation],
    pairs: PairHealth,
    before: Worker | None,
) -> Worker | None:
    """The decode worker that is left to a request for which none has space now, so that nobody else takes
    what comes free there; None where no worker may be. It is ready, could hold the request, and is reserved
    for nobody.

    The same one as `before`, if it may be: it gets no other room, so the request begins there at the latest
    when those on it are over. Else, of LOOKS_MAX, one that connects, with the most left.
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
    """Of each side those that could hold it; of decode alone, where no prefill worker that could is ready and
    it may be local. Raises NoSuchWorker."""
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
    """The decode workers that could compute and hold it, if it may be local and there are any. `lacks`: what
    is said of prefill. Raises NoSuchWorker where one that may be there later is all that could serve it."""
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
    """KV positions that a request begins with on a worker, beyond what that was sent of its prompt: at least
    one. In prefill that is what it computes. In decode it is spared the transfer alone."""
    return max(need.first_on(worker.facts) - worker.sent.tokens(need.blocks), 1)


class _Choice:
    """The workers of a side that could hold a request, at least one: those that are ready, or, where none is,
    those that may be again at once."""

    def __init__(self, workers: SideWorkers, side: Side, need: Need, *, alone: bool = False) -> None:
        """`alone`: of those that compute prompts. Raises NoSuchWorker."""
        self._alone = alone
        self._workers = workers
        self._side = side
        self._need = need
        self._avoid: Collection[Incarnation] = ()
        self._least = need.prompt_tokens if side is Side.PREFILL else need.on_decode(1)
        """What it may come to take of a worker, whatever the worker's pages are."""
        page_tokens = min(workers.page_sizes, default=1)
        self._first = need.prompt_tokens if side is Side.PREFILL else need.first_on_decode(page_tokens)
        """The least that it begins with."""
        self.is_ready = self._is_weighed = False
        """`_is_weighed`: those whose weight is 0 are left out, since there are others."""
        for worker in self.ready():
            self.is_ready = True
            if worker.weight:
                self._is_weighed = True
                break
        if not self.is_ready and not any(self._able(workers.serving)):
            self._refuse()

    def without(self, avoid: Collection[Incarnation]) -> "_Choice":
        """Those that are not to be avoided, if there are any: of weight 0, where no others are left."""
        if not avoid:
            return self
        for is_weighed in (True, False) if self._is_weighed else (False,):
            kept = copy(self)
            kept._is_weighed = is_weighed
            if any(worker.facts.incarnation not in avoid for worker in kept.ready()):
                kept._avoid = avoid
                return kept
        return self

    def ready(self) -> Iterator[Worker]:
        return self._able(self._workers.ready)

    def reservable(self, before: Worker | None) -> list[Worker]:
        """Ready ones that are reserved for nobody: up to LOOKS_MAX, and `before` if it is one."""
        looked = list(islice((worker for worker in self.ready() if not worker.reserved), LOOKS_MAX))
        if before is not None and not before.reserved:
            looked += [before] if before in self._workers.ready and self._can_be(before) else []
        return looked

    def best(self) -> Worker:
        """Of those with space for it the least full one by then. Raises NoCapacity."""
        found = next(self.in_order(), None)
        if found is not None:
            return found[1]
        side, told = self._side.value, self._need.told(self._side)
        text = f"every {side} worker is full: none has space for {told} now"
        if not self.is_ready:
            text = f"a stream to every {side} worker broke: waiting for one to renew its lease"
        raise NoCapacity(text, self._side)

    def in_order(self) -> Iterator[tuple[Fullness, Worker]]:
        """Those with space for it, the least full by then first: that a prompt's beginning was sent to it
        before spares a worker as much. Those where it would wait come last, or not at all: one that was
        retracted would begin there as soon as what it had fits, without its margin."""
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
        """Of a ranking by what is used, those that it fits.

        Looks at those that were sent more of the beginning than the others, and then at others for as long as
        one of these may come next, at LOOKS_MAX at a time. It leaves off after as many that it does not fit.
        """
        looked: list[tuple[Fullness, Worker]] = []
        seen: set[Incarnation] = set()
        for worker in self._workers.sent_before(self._need.blocks):
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
        return worker.usage.begins(self._need.asked_of(worker))

    def _waits(self, worker: Worker) -> bool:
        return not self._begins(worker)

    def _can_be(self, worker: Worker) -> bool:
        facts = worker.facts
        if self._is_weighed and not worker.weight:
            return False
        fits = facts.tokens_max >= self._need.on(facts) and facts.incarnation not in self._avoid
        return fits and (facts.computes or not self._alone)

    def _able(self, by_size: Ranking) -> Iterator[Worker]:
        """Those that can hold it, of workers of which the largest comes first."""
        for worker in by_size:
            if worker.facts.tokens_max < self._least:
                return
            if self._can_be(worker):
                yield worker

    def _refuse(self) -> NoReturn:
        """No worker that serves can hold it: is that for want of any, or of one that is large enough?"""
        side, told = self._side.value, self._need.told(self._side)
        if self._workers.tokens_max and not any(self._able(self._workers.known)):
            raise TooLarge(f"no {side} worker can hold {told}: the largest holds {self._workers.tokens_max}")
        ready = (each.facts for each in self._workers.ready if each.facts.computes or not self._alone)
        for most in (facts.tokens_max for facts in ready):
            raise NoSuchWorker(f"no {side} worker that is ready can hold {told}: the largest holds {most}")
        raise NoneReady(self._side)


def _has_whole(prefill: _Choice, decode: _Choice, pairs: PairHealth) -> bool:
    """Some pair of these connects. Looks at no more pairs than are broken, and one."""
    return any(not pairs.is_broken(_id(one, other)) for one in prefill.ready() for other in decode.ready())


def _best_pair(prefill: _Choice, decode: _Choice, pairs: PairHealth) -> tuple[Worker, Worker]:
    """Of pairs with free places that connect, the one whose fuller worker is the least full by then."""
    best: tuple[list[Fullness], tuple[Worker, Worker]] | None = None
    for full, one in prefill.in_order():
        if best is not None and full > best[0][0]:
            break  # nor is any of the next ones less full
        others = enumerate(decode.in_order())
        reached = ((at, *each) for at, each in others if not pairs.is_broken(_id(one, each[1])))
        for at, other_full, other in islice(reached, 1):
            fullness = sorted((full, other_full), reverse=True)
            if best is None or fullness < best[0]:
                best = fullness, (one, other)
            if at == 0:
                return best[1]  # no next one has a better partner
    if best is None:
        raise NoCapacity("every pair of workers that reach each other is full")
    return best[1]


def _id(prefill: Worker, decode: Worker) -> PairId:
    return prefill.facts.incarnation, decode.facts.incarnation
