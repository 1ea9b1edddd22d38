"""Queue of requests that wait for workers: fair between tenants, and with priority classes.

Requests that had a room before come first, the oldest of them first, since their clients have waited longest.
The others are served by class, the lowest number first, as vLLM's `priority`. For every 16 tokens of requests
that are served before lower classes, these classes get one token. It goes to the class that was served least
recently (`no-starvation`).

Within a class, tenants take turns by deficit round robin over tokens. Each tenant gets QUANTUM tokens with
every lap, and saves them until they pay for its oldest request. A new tenant joins the next lap, after all
tenants in it. So two tenants that both wait get equal tokens, to within one request each. No number of new
tenants keeps another from its turn. A tenant without waiting requests is forgotten, with its savings. Laps in
which no tenant can pay are skipped: each tenant is ranked by the lap in which it can.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Final, Generic, NamedTuple, TypeVar

QUANTUM: Final = 256
"""Number of tokens that each tenant gets in one lap of the round robin."""
LOWER_PART: Final = 16
"""Ratio of the tokens served in higher classes to the tokens that the lower classes get in return."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueKey:
    """Attributes of a waiting request that decide when it is served: class, tenant, work and arrival."""

    priority: int = 0
    """Priority class. The lowest number is served first."""
    tenant: bytes = b""
    """Tenant (a group of clients) whose share of the queue pays for the request."""
    tokens: int = 1
    """Expected work of the request in tokens, which its tenant pays for; at least 1."""
    arrived_ms: int = 0
    """Arrival time of the request in milliseconds. It does not change when the request gets a room and waits
    again."""
    had_room: bool = False


class QueuedWork(NamedTuple):
    """Number of requests that are expected to be served before a given one, and their work."""

    all: int
    in_class: int
    """Number of requests served before a given one that are of the same class and had no room before."""
    tokens: int
    """Expected work of all requests served before a given one, in tokens (`QueueKey.tokens`)."""
    tokens_in_class: int


NOTHING_QUEUED: Final = QueuedWork(0, 0, 0, 0)


@dataclass(slots=True, eq=False)
class QueueEntry(Generic[T]):
    """A waiting request with its key and its serial number in the queue."""

    waiting: T
    claim: QueueKey
    number: int
    """Serial number of the request, in the order in which requests entered the queue."""
    is_queued: bool = True
    is_skipped: bool = False
    """Whether the current scan has skipped the request because it fits no worker now."""

    @property
    def age(self) -> tuple[int, int]:
        """Sort key of requests by age. The least is the oldest."""
        return self.claim.arrived_ms, self.number


@dataclass(slots=True, eq=False)
class _TenantQueue(Generic[T]):
    name: bytes
    number: int
    """Position of the tenant within each lap of the round robin. The lowest is served first."""
    visited: int
    """Number of the round robin's lap up to which the tenant has got its tokens."""
    saved: int
    waiting: OrderedDict[int, QueueEntry[T]]
    """Waiting requests of the tenant by serial number, the oldest first. Skipped requests are left out."""
    count: int = 0
    """Number of the tenant's requests, skipped ones included."""
    tokens: int = 0
    rank: tuple[int, int] | None = None
    """Sort key of the tenant within its class: the lap in which its savings pay for its oldest request, and
    its position in a lap. None if all its requests are skipped."""

    def laps(self, tokens: int) -> int:
        """Return how many more laps the tenant needs to save `tokens` tokens."""
        return max(-(-(tokens - self.saved) // QUANTUM), 0)


class _ClassQueue(Generic[T]):
    """Waiting requests of one priority class that had no room before."""

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0
        self._lap = 0
        self._tenants: dict[bytes, _TenantQueue[T]] = {}
        self._order: list[tuple[int, int, _TenantQueue[T]]] = []
        """Tenants sorted by rank. No two ranks are equal."""

    def first(self) -> QueueEntry[T] | None:
        """Return the request of this class that is served next, or None. Requests that the present scan has
        skipped are left out."""
        return next(iter(self._order[0][2].waiting.values())) if self._order else None

    def oldest_first(self) -> list[QueueEntry[T]]:
        found = [each for tenant in self._tenants.values() for each in tenant.waiting.values()]
        return sorted(found, key=lambda each: each.number)

    def last(self) -> QueueEntry[T]:
        """Return the newest waiting request of the tenant that has the most waiting requests."""
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
        """Remove a request from the class. `served`: whether it got a room, so that its tenant pays for
        it."""
        tenant = self._tenants[one.claim.tenant]
        if served:
            laps = tenant.laps(one.claim.tokens)
            tenant.saved += laps * QUANTUM - one.claim.tokens
            self._lap = max(self._lap, tenant.visited + laps)
            # Tokens of laps in which none of its requests fitted a worker are not saved.
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
        """Put a skipped request back. To be called in the reverse order of skipping, so that a tenant's
        requests keep their order."""
        tenant = self._tenants[one.claim.tenant]
        tenant.waiting[one.number] = one
        tenant.waiting.move_to_end(one.number, last=False)
        self._rank(tenant)

    def ahead(self, claim: QueueKey) -> tuple[int, int]:
        """Return the number of requests that are served before a new one, and their expected work in tokens.

        All waiting requests of the new one's tenant are among them. Until those are served, other tenants get
        as many tokens each.
        """
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

    A scan gets the `first` request and takes, removes or skips it. A skipped request is not returned again
    until `end_scan`. A call costs a binary search at most, however many requests wait.
    """

    def __init__(self) -> None:
        self._retried: list[tuple[tuple[int, int], QueueEntry[T]]] = []
        """Requests that had a room before, the oldest first."""
        self._retried_skipped = False
        """Whether the scan skips all remaining requests that had a room before."""
        self._classes: dict[int, _ClassQueue[T]] = {}
        self._order: list[int] = []
        """Priority classes with waiting requests, in ascending order."""
        self._unserved: OrderedDict[int, None] = OrderedDict()
        """Priority classes with waiting requests. The class that was served longest ago is first."""
        self._for_lower = 0
        """Number of tokens served in higher classes for which lower classes have not got their part yet."""
        self._lower_skipped = False
        """Whether this scan has skipped a request of a lower class whose turn it was, because it fits no
        worker."""
        self._skipped: list[QueueEntry[T]] = []
        self._numbers = count()
        self.retried = 0
        """Number of waiting requests that had a room before."""
        self._retried_tokens = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[QueueEntry[T]]:
        """Yield requests that had a room before, then those of each class, the oldest first. For display
        only: the cost grows with the number of requests."""
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
        """Return the next request of the scan, or None if none is left."""
        if self._retried and not self._retried_skipped:
            return self._retried[0][1]
        lower = self._lower()
        if lower is not None and self._for_lower >= LOWER_PART * lower.claim.tokens:
            return lower
        highest = self._highest()
        return None if highest is None else self._classes[highest].first()

    def last(self) -> QueueEntry[T] | None:
        """Return the request that is rejected if the queue is too long. It is the newest one of the tenant
        with the most requests in the lowest class.

        Requests that had a room before are never rejected. Not for use within a scan.
        """
        return self._classes[self._order[-1]].last() if self._order else None

    def take(self, one: QueueEntry[T]) -> None:
        """Remove a request that gets a room. Its tenant's savings, and its class, pay for it."""
        self._remove(one, served=True)

    def leave(self, one: QueueEntry[T]) -> bool:
        """Remove a request that gets no room, so that its tenant pays nothing. Return False if it has left
        the queue before."""
        if not one.is_queued:
            return False
        self._remove(one, served=False)
        return True

    def skip(self, one: QueueEntry[T]) -> None:
        """Skip a request that fits no worker now, until the end of the scan. It keeps its turn."""
        one.is_skipped = True
        self._skipped.append(one)
        if one.claim.had_room:
            self._forget_again(one)
        else:
            self._lower_skipped |= one.claim.priority != self._highest()
            self._classes[one.claim.priority].set_aside(one)

    def skip_retried(self) -> None:
        """Skip the remaining requests that had a room before, until the end of the scan. They keep their
        turns."""
        self._retried_skipped = True

    def end_scan(self) -> None:
        """End the scan of the queue, so that requests which it skipped may be returned again."""
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
        """Return the number of waiting requests that had a room before, or whose class has a number up to
        `priority`."""
        sooner = takewhile(lambda each: each <= priority, self._order)
        return self.retried + sum(self._classes[each].count for each in sooner)

    def by_class(self) -> Counter[int]:
        """Return the number of waiting requests, by class. Requests that had a room before are included, and
        the cost of the call grows with their number."""
        waiting = Counter(one.claim.priority for _, one in self._retried)
        return waiting + Counter({priority: line.count for priority, line in self._classes.items()})

    def in_class(self, priority: int) -> int:
        """Return the number of waiting requests of a class that had no room before."""
        return self._classes[priority].count if priority in self._classes else 0

    def ahead(self, claim: QueueKey) -> QueuedWork:
        """Return the number and the work of the requests that are served before a new one with this key.
        Requests that arrive later may be served sooner, but are not counted."""
        if claim.had_room:
            older = bisect_right(self._retried, claim.arrived_ms, key=lambda each: each[0][0])
            return QueuedWork(older, 0, sum(one.claim.tokens for _, one in self._retried[:older]), 0)
        line = self._classes.get(claim.priority)
        in_class, tokens = (0, 0) if line is None else line.ahead(claim)
        sooner = takewhile(lambda each: each < claim.priority, self._order)
        before = self._retried_tokens + sum(self._classes[each].tokens for each in sooner)
        return QueuedWork(self.count_up_to(claim.priority - 1) + in_class, in_class, before + tokens, tokens)

    def in_all(self) -> QueuedWork:
        """Return the number and the work of all waiting requests."""
        lowest = self._classes[self._order[-1]] if self._order else None
        of_all = self._retried_tokens + sum(each.tokens for each in self._classes.values())
        count, tokens = (0, 0) if lowest is None else (lowest.count, lowest.tokens)
        return QueuedWork(self._count, count, of_all, tokens)

    # ---- inside

    def _highest(self) -> int | None:
        """Return the highest class (lowest number) with a request that is not skipped."""
        return next((each for each in self._order if self._classes[each].first() is not None), None)

    def _lower(self) -> QueueEntry[T] | None:
        """Return the next request of the class that was served least recently, without the highest class."""
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
        """Count the tokens of a served request: in a higher class, lower classes get a part; in a lower
        class, it uses that part."""
        priority, tokens = one.claim.priority, one.claim.tokens
        if self._order[0] < priority:
            self._for_lower = max(self._for_lower - LOWER_PART * tokens, 0)
        lower = self._lower()
        # Once there are enough tokens for the next lower request, no more are saved. Otherwise, requests that
        # fitted no worker for a while would later be served many at a time.
        if priority < self._order[-1] and lower and self._for_lower < LOWER_PART * lower.claim.tokens:
            self._for_lower += tokens
        self._unserved.move_to_end(priority)

    def _forget_again(self, one: QueueEntry[T]) -> None:
        del self._retried[bisect_left(self._retried, one.age, key=lambda each: each[0])]
