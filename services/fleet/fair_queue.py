"""Queue of requests that wait for workers, fair between tenants, and with priority classes.

Requests that had a room before come first, the oldest of them first: their clients have waited longest. The
others are served by class, the lowest number first, as vLLM's `priority`. A sixteenth of the tokens that pass
the lower classes by is theirs. It goes to the class that was served least recently (`no-starvation`).

Within a class, tenants take turns by deficit round robin over tokens. Each tenant gets QUANTUM tokens with
every lap, and saves them until they pay for its oldest request. A new tenant joins the next lap, behind all
that are in it. So two tenants that both wait get equal tokens, to within one request each. No number of
newcomers keeps another tenant from its turn. A tenant without waiting requests is forgotten, with its
savings. Laps in which no tenant can pay are skipped: each tenant is ranked by the lap in which it can.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Final, Generic, NamedTuple, TypeVar

QUANTUM: Final = 256
"""Tokens that a tenant gets with each lap."""
LOWER_PART: Final = 16
"""Tokens that pass the lower classes by, for each token that these classes get."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueKey:
    """Attributes of a request that decide its turn."""

    priority: int = 0
    """Priority class. The lowest number is served first."""
    tenant: bytes = b""
    """Tenant whose share pays for the request."""
    tokens: int = 1
    """Tokens that the request takes of that share, at least 1."""
    arrived_ms: int = 0
    """Time when the request came, also if it had rooms since, in milliseconds."""
    had_room: bool = False


class QueuedWork(NamedTuple):
    """Requests that are expected to be served before a given one, and their work."""

    all: int
    in_class: int
    """Number of requests of its own class that had no room."""
    tokens: int
    """Work of all these requests, in tokens (`QueueKey.tokens`)."""
    tokens_in_class: int


NOTHING_QUEUED: Final = QueuedWork(0, 0, 0, 0)


@dataclass(slots=True, eq=False)
class QueueEntry(Generic[T]):
    """A waiting request, with its position in the queue."""

    waiting: T
    claim: QueueKey
    number: int
    """Serial number, in the order of arrival at the queue."""
    is_queued: bool = True
    is_skipped: bool = False
    """Whether the current scan has skipped the request."""

    @property
    def age(self) -> tuple[int, int]:
        """Sort key by age. The least is the oldest."""
        return self.claim.arrived_ms, self.number


@dataclass(slots=True, eq=False)
class _TenantQueue(Generic[T]):
    name: bytes
    number: int
    """Position in each lap."""
    visited: int
    """Lap that `saved` belongs to."""
    saved: int
    waiting: OrderedDict[int, QueueEntry[T]]
    """Requests by serial number, the oldest first, without the skipped ones."""
    count: int = 0
    """Number of requests, with the skipped ones."""
    tokens: int = 0
    rank: tuple[int, int] | None = None
    """Lap in which the tenant can pay for its oldest request, and its position. None if it has no request to
    look at."""

    def laps(self, tokens: int) -> int:
        """Return how many more laps it takes until `tokens` are saved."""
        return max(-(-(tokens - self.saved) // QUANTUM), 0)


class _ClassQueue(Generic[T]):
    """Requests of one class that had no room."""

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0
        self._lap = 0
        self._tenants: dict[bytes, _TenantQueue[T]] = {}
        self._order: list[tuple[int, int, _TenantQueue[T]]] = []
        """Tenants by rank. No two ranks are equal."""

    def first(self) -> QueueEntry[T] | None:
        """Return the request whose turn it is, without the skipped ones."""
        return next(iter(self._order[0][2].waiting.values())) if self._order else None

    def oldest_first(self) -> list[QueueEntry[T]]:
        found = [each for tenant in self._tenants.values() for each in tenant.waiting.values()]
        return sorted(found, key=lambda each: each.number)

    def last(self) -> QueueEntry[T]:
        """Return the newest request of the tenant with the most."""
        most = max(self._tenants.values(), key=lambda tenant: tenant.count)
        return next(reversed(most.waiting.values()))

    def enter(self, one: QueueEntry[T]) -> None:
        name = one.claim.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _TenantQueue(name, one.number, self._lap, 0, OrderedDict())
        tenant.waiting[one.number] = one
        self._count(tenant, one, 1)
        if len(tenant.waiting) == 1:
            self._rank(tenant)

    def remove(self, one: QueueEntry[T], *, served: bool) -> None:
        """Remove a request. `served`: whether its tenant pays for it."""
        tenant = self._tenants[one.claim.tenant]
        if served:
            laps = tenant.laps(one.claim.tokens)
            tenant.saved += laps * QUANTUM - one.claim.tokens
            self._lap = max(self._lap, tenant.visited + laps)
            # What it could have had of laps in which none of its requests fitted is not saved up.
            tenant.visited = self._lap
        tenant.waiting.pop(one.number, None)
        self._count(tenant, one, -1)
        if not tenant.count:
            del self._tenants[tenant.name]
        self._rank(tenant)

    def set_aside(self, one: QueueEntry[T]) -> None:
        tenant = self._tenants[one.claim.tenant]
        del tenant.waiting[one.number]
        self._rank(tenant)

    def put_back(self, one: QueueEntry[T]) -> None:
        """Undo a skip. The last one skipped is put back first, so that it stands before those that came
        later."""
        tenant = self._tenants[one.claim.tenant]
        tenant.waiting[one.number] = one
        tenant.waiting.move_to_end(one.number, last=False)
        self._rank(tenant)

    def ahead(self, claim: QueueKey) -> tuple[int, int]:
        """Return how many requests are before a newcomer, and their tokens. All requests of its own tenant
        are. Of the others, as many are as the tokens that its tenant takes meanwhile pay for."""
        mine = self._tenants.get(claim.tenant)
        own, own_tokens = (0, 0) if mine is None else (mine.count, mine.tokens)
        others, others_tokens = self.count - own, self.tokens - own_tokens
        if not others:
            return own, own_tokens
        tenants = len(self._tenants) - (mine is not None)
        paid_tokens = min(tenants * (own_tokens + claim.tokens), others_tokens)
        return own + -(-paid_tokens * others // others_tokens), own_tokens + paid_tokens

    def _count(self, tenant: _TenantQueue[T], one: QueueEntry[T], step: int) -> None:
        tokens = step * one.claim.tokens
        self.count, self.tokens = self.count + step, self.tokens + tokens
        tenant.count, tenant.tokens = tenant.count + step, tenant.tokens + tokens

    def _rank(self, tenant: _TenantQueue[T]) -> None:
        if tenant.rank is not None:
            del self._order[bisect_left(self._order, tenant.rank, key=lambda each: each[:2])]
            tenant.rank = None
        if tenant.waiting:
            oldest = next(iter(tenant.waiting.values()))
            tenant.rank = tenant.visited + tenant.laps(oldest.claim.tokens), tenant.number
            insort(self._order, (*tenant.rank, tenant), key=lambda each: each[:2])


class FairQueue(Generic[T]):
    """Waiting requests in the order in which they are served.

    A scan gets the `first` request and takes, removes or skips it. A skipped request is out of the scan
    until `end_scan`. A call costs a binary search at most, however many requests wait.
    """

    def __init__(self) -> None:
        self._retried: list[tuple[tuple[int, int], QueueEntry[T]]] = []
        """Requests that had a room before, by age."""
        self._retried_skipped = False
        """Whether the scan has skipped all of these that are left."""
        self._classes: dict[int, _ClassQueue[T]] = {}
        self._order: list[int] = []
        """Classes with waiting requests, in ascending order."""
        self._unserved: OrderedDict[int, None] = OrderedDict()
        """The same classes, the one that was served least recently first."""
        self._for_lower = 0
        """Tokens that passed lower classes by, and that these have not used yet."""
        self._lower_skipped = False
        """Whether the lower class whose turn it was had no request that fits, in this scan."""
        self._skipped: list[QueueEntry[T]] = []
        self._numbers = count()
        self.retried = 0
        """Number of waiting requests that had a room before."""
        self._retried_tokens = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[QueueEntry[T]]:
        """Yield requests that had a room, then those of each class, the oldest first. For display: the cost
        grows with the number of requests."""
        yield from (one for _, one in self._retried)
        for priority in self._order:
            yield from self._classes[priority].oldest_first()

    def enter(self, waiting: T, claim: QueueKey) -> QueueEntry[T]:
        one = QueueEntry(waiting, claim, next(self._numbers))
        self._count += 1
        if claim.had_room:
            self.retried += 1
            self._retried_tokens += claim.tokens
            insort(self._retried, (one.age, one), key=lambda each: each[0])
            return one
        priority = claim.priority
        if priority not in self._classes:
            self._classes[priority] = _ClassQueue()
            self._unserved[priority] = None
            insort(self._order, priority)
        self._classes[priority].enter(one)
        return one

    def first(self) -> QueueEntry[T] | None:
        """Return the next request of the scan, or None."""
        if self._retried and not self._retried_skipped:
            return self._retried[0][1]
        lower = self._lower()
        if lower is not None and self._for_lower >= LOWER_PART * lower.claim.tokens:
            return lower
        highest = self._highest()
        return None if highest is None else self._classes[highest].first()

    def last(self) -> QueueEntry[T] | None:
        """Return the request that is turned away first if one has to be: the newest of the tenant with the
        most, in the lowest class. Requests that had a room are never chosen. Not for use within a scan."""
        return self._classes[self._order[-1]].last() if self._order else None

    def take(self, one: QueueEntry[T]) -> None:
        """Remove a request that is served. Its tenant and class pay for it."""
        self._remove(one, served=True)

    def leave(self, one: QueueEntry[T]) -> bool:
        """Remove a request that is not served, and pays nothing. Return False if it was not in the queue any
        more."""
        if not one.is_queued:
            return False
        self._remove(one, served=False)
        return True

    def skip(self, one: QueueEntry[T]) -> None:
        """Skip a request that does not fit now. It keeps its turn."""
        one.is_skipped = True
        self._skipped.append(one)
        if one.claim.had_room:
            self._forget_again(one)
        else:
            self._lower_skipped |= one.claim.priority != self._highest()
            self._classes[one.claim.priority].set_aside(one)

    def skip_retried(self) -> None:
        """Skip all requests that had a room before and are not skipped yet. They keep their turns."""
        self._retried_skipped = True

    def end_scan(self) -> None:
        """End the scan: all skipped requests are back."""
        self._lower_skipped = self._retried_skipped = False
        for one in reversed(self._skipped):
            one.is_skipped = False
            if not one.is_queued:
                continue
            if one.claim.had_room:
                insort(self._retried, (one.age, one), key=lambda each: each[0])
            else:
                self._classes[one.claim.priority].put_back(one)
        self._skipped.clear()

    def count_up_to(self, priority: int) -> int:
        """Return how many requests had a room before, or are of this class or of a lower number."""
        sooner = takewhile(lambda each: each <= priority, self._order)
        return self.retried + sum(self._classes[each].count for each in sooner)

    def by_class(self) -> Counter[int]:
        """Return the number of waiting requests by class, with those that had a room. The cost grows with the
        number of the latter."""
        waiting = Counter(one.claim.priority for _, one in self._retried)
        return waiting + Counter({priority: line.count for priority, line in self._classes.items()})

    def in_class(self, priority: int) -> int:
        """Return how many requests of a class wait that had no room."""
        return self._classes[priority].count if priority in self._classes else 0

    def ahead(self, claim: QueueKey) -> QueuedWork:
        """Return the requests before a newcomer, as far as they are known: later ones may be served
        sooner."""
        if claim.had_room:
            older = bisect_right(self._retried, claim.arrived_ms, key=lambda each: each[0][0])
            return QueuedWork(older, 0, sum(one.claim.tokens for _, one in self._retried[:older]), 0)
        line = self._classes.get(claim.priority)
        in_class, tokens = (0, 0) if line is None else line.ahead(claim)
        sooner = takewhile(lambda each: each < claim.priority, self._order)
        before = self._retried_tokens + sum(self._classes[each].tokens for each in sooner)
        return QueuedWork(self.count_up_to(claim.priority - 1) + in_class, in_class, before + tokens, tokens)

    def in_all(self) -> QueuedWork:
        """Return all waiting requests, as work before the one that is served last. That one is counted with
        them."""
        lowest = self._classes[self._order[-1]] if self._order else None
        of_all = self._retried_tokens + sum(each.tokens for each in self._classes.values())
        count, tokens = (0, 0) if lowest is None else (lowest.count, lowest.tokens)
        return QueuedWork(self._count, count, of_all, tokens)

    # ---- inside

    def _highest(self) -> int | None:
        """Return the highest class with a request that is not skipped."""
        return next((each for each in self._order if self._classes[each].first() is not None), None)

    def _lower(self) -> QueueEntry[T] | None:
        """Return the first request of the lower class that was served least recently."""
        highest = self._highest()
        if highest is None or self._lower_skipped:
            return None
        for priority in self._unserved:
            first = self._classes[priority].first()
            if priority != highest and first is not None:
                return first
        return None

    def _remove(self, one: QueueEntry[T], *, served: bool) -> None:
        one.is_queued = False
        self._count -= 1
        if one.claim.had_room:
            self.retried -= 1
            self._retried_tokens -= one.claim.tokens
            if not one.is_skipped:
                self._forget_again(one)
            return
        priority = one.claim.priority
        if served:
            self._share(one)
        line = self._classes[priority]
        line.remove(one, served=served)
        if not line.count:
            del self._classes[priority], self._unserved[priority]
            del self._order[bisect_left(self._order, priority)]
        if not self._classes:
            self._for_lower = 0

    def _share(self, one: QueueEntry[T]) -> None:
        """Count what a served request gives to the lower classes, or takes of their part."""
        priority, tokens = one.claim.priority, one.claim.tokens
        if self._order[0] < priority:
            self._for_lower = max(self._for_lower - LOWER_PART * tokens, 0)
        lower = self._lower()
        # Once it is enough for one of theirs no more is saved: who does not fit does not come back with many.
        if priority < self._order[-1] and lower and self._for_lower < LOWER_PART * lower.claim.tokens:
            self._for_lower += tokens
        self._unserved.move_to_end(priority)

    def _forget_again(self, one: QueueEntry[T]) -> None:
        del self._retried[bisect_left(self._retried, one.age, key=lambda each: each[0])]
