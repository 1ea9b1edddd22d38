"""Who of those that wait is next?

Those that had a room before come first, the oldest of them first: their clients have waited longest. The
others come by class, the lowest number first (`priority`, vLLM's). But of the tokens that pass classes below
by, a sixteenth is theirs: whichever of them had no room for longest gets the next one (`no-starvation`).

Within a class, tenants take turns by deficit round robin over tokens: each gets QUANTUM with every lap, and
saves until that pays for its oldest request. A tenant that comes joins the next lap, behind all that are in
it. So two tenants that both wait get equal tokens, but for a request of each, and no number of newcomers
keeps another from its turn. A tenant with nobody waiting is forgotten, with what it saved. Laps in which
nobody can pay are not walked: each tenant is ranked by the lap in which it can.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Final, Generic, NamedTuple, TypeVar

QUANTUM: Final = 256
"""Tokens that a tenant gets with a lap."""
LOWER_PART: Final = 16
"""One token for the classes below, of so many that pass them by."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueKey:
    """What a request's turn follows from."""

    priority: int = 0
    """Its class: the lowest is served first."""
    tenant: bytes = b""
    """In whose share it is served."""
    tokens: int = 1
    """What it takes of that share, at least 1."""
    arrived_ms: int = 0
    """When the request came, be it for an earlier room."""
    had_room: bool = False


class QueuedWork(NamedTuple):
    """Requests that are expected to be served before a request, and their work."""

    all: int
    in_class: int
    """Requests of its own class that had no room."""
    tokens: int
    """Work of all of them, as of `QueueKey.tokens`."""
    tokens_in_class: int


NOTHING_QUEUED: Final = QueuedWork(0, 0, 0, 0)


@dataclass(slots=True, eq=False)
class QueueEntry(Generic[T]):
    """One that waits."""

    waiting: T
    claim: QueueKey
    number: int
    """In the order in which they came to the line."""
    is_in: bool = True
    is_aside: bool = False
    """It was passed over in this look."""

    @property
    def age(self) -> tuple[int, int]:
        """The least is the oldest."""
        return self.claim.arrived_ms, self.number


@dataclass(slots=True, eq=False)
class _TenantQueue(Generic[T]):
    name: bytes
    number: int
    """Its place in each lap."""
    visited: int
    """The lap that `saved` is of."""
    saved: int
    waiting: OrderedDict[int, QueueEntry[T]]
    """By their numbers, the oldest first. Those that are aside are not among them."""
    count: int = 0
    """With those that are aside."""
    tokens: int = 0
    rank: tuple[int, int] | None = None
    """The lap in which it can pay for its oldest, and its place; None without anybody to look at."""

    def laps(self, tokens: int) -> int:
        """So many more until so much is saved."""
        return max(-(-(tokens - self.saved) // QUANTUM), 0)


class _ClassQueue(Generic[T]):
    """Those of one class that had no room."""

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0
        self._lap = 0
        self._tenants: dict[bytes, _TenantQueue[T]] = {}
        self._order: list[tuple[int, int, _TenantQueue[T]]] = []
        """By their ranks, of which no two are equal."""

    def first(self) -> QueueEntry[T] | None:
        """Of those that are not aside."""
        return next(iter(self._order[0][2].waiting.values())) if self._order else None

    def oldest_first(self) -> list[QueueEntry[T]]:
        found = [each for tenant in self._tenants.values() for each in tenant.waiting.values()]
        return sorted(found, key=lambda each: each.number)

    def last(self) -> QueueEntry[T]:
        """The newest of the tenant with the most."""
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
        """`served`: its tenant pays for it."""
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
        """Before those that came later: whoever was set aside last is put back first."""
        tenant = self._tenants[one.claim.tenant]
        tenant.waiting[one.number] = one
        tenant.waiting.move_to_end(one.number, last=False)
        self._rank(tenant)

    def ahead(self, claim: QueueKey) -> tuple[int, int]:
        """Return how many requests are before a newcomer, and their tokens: all that its tenant has waiting,
        and of the others as many as the tokens that its tenant takes meanwhile pay for."""
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
    """Whoever looks asks for the `first`, and takes it, has it leave, or passes it over: then another one is
    first until it looks again. What one of these costs does not grow with how many wait, but for searches by
    halves."""

    def __init__(self) -> None:
        self._again: list[tuple[tuple[int, int], QueueEntry[T]]] = []
        """That had a room before, by age."""
        self._again_passed = False
        """These were passed over in this look, all that are left of them."""
        self._classes: dict[int, _ClassQueue[T]] = {}
        self._order: list[int] = []
        """The classes in which somebody waits."""
        self._unserved: OrderedDict[int, None] = OrderedDict()
        """The same, whichever had no room for longest first."""
        self._for_lower = 0
        """Tokens that passed lower classes by, which had nothing for them yet."""
        self._lower_passed = False
        """The lower class whose turn it was had nobody who fits, in this look."""
        self._aside: list[QueueEntry[T]] = []
        self._numbers = count()
        self.again = 0
        """How many wait that had a room before."""
        self._again_tokens = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[QueueEntry[T]]:
        """Those that had a room before, and then class by class; the oldest first. For people: costs more the
        more there are."""
        yield from (one for _, one in self._again)
        for priority in self._order:
            yield from self._classes[priority].oldest_first()

    def enter(self, waiting: T, claim: QueueKey) -> QueueEntry[T]:
        one = QueueEntry(waiting, claim, next(self._numbers))
        self._count += 1
        if claim.had_room:
            self.again += 1
            self._again_tokens += claim.tokens
            insort(self._again, (one.age, one), key=lambda each: each[0])
            return one
        priority = claim.priority
        if priority not in self._classes:
            self._classes[priority] = _ClassQueue()
            self._unserved[priority] = None
            insort(self._order, priority)
        self._classes[priority].enter(one)
        return one

    def first(self) -> QueueEntry[T] | None:
        """Whose turn it is, of those that were not passed over."""
        if self._again and not self._again_passed:
            return self._again[0][1]
        lower = self._lower()
        if lower is not None and self._for_lower >= LOWER_PART * lower.claim.tokens:
            return lower
        highest = self._highest()
        return None if highest is None else self._classes[highest].first()

    def last(self) -> QueueEntry[T] | None:
        """Who leaves before all others, if one has to: of the lowest class, and of the tenant that has the
        most waiting there, the newest. None of those that had a room. Not for use within a look."""
        return self._classes[self._order[-1]].last() if self._order else None

    def take(self, one: QueueEntry[T]) -> None:
        """It is served, and its tenant and class have had so much."""
        self._remove(one, served=True)

    def leave(self, one: QueueEntry[T]) -> bool:
        """It waits no more, and had nothing. False if it was not in the line any more."""
        if not one.is_in:
            return False
        self._remove(one, served=False)
        return True

    def pass_over(self, one: QueueEntry[T]) -> None:
        """It does not fit now. It keeps its turn."""
        one.is_aside = True
        self._aside.append(one)
        if one.claim.had_room:
            self._forget_again(one)
        else:
            self._lower_passed |= one.claim.priority != self._highest()
            self._classes[one.claim.priority].set_aside(one)

    def pass_over_again(self) -> None:
        """All that had a room before, and are not passed over yet. They keep their turns."""
        self._again_passed = True

    def look_again(self) -> None:
        """From the beginning: nobody is passed over any more."""
        self._lower_passed = self._again_passed = False
        for one in reversed(self._aside):
            one.is_aside = False
            if not one.is_in:
                continue
            if one.claim.had_room:
                insort(self._again, (one.age, one), key=lambda each: each[0])
            else:
                self._classes[one.claim.priority].put_back(one)
        self._aside.clear()

    def up_to(self, priority: int) -> int:
        """How many wait that had a room before, or are of this class or of one that is served sooner."""
        sooner = takewhile(lambda each: each <= priority, self._order)
        return self.again + sum(self._classes[each].count for each in sooner)

    def by_class(self) -> Counter[int]:
        """How many wait of each class, those included that had a room. Costs more the more those are."""
        waiting = Counter(one.claim.priority for _, one in self._again)
        return waiting + Counter({priority: line.count for priority, line in self._classes.items()})

    def in_class(self, priority: int) -> int:
        """How many of a class wait that had no room."""
        return self._classes[priority].count if priority in self._classes else 0

    def ahead(self, claim: QueueKey) -> QueuedWork:
        """Return who is before a newcomer, as far as can be said: who comes later may be served sooner."""
        if claim.had_room:
            older = bisect_right(self._again, claim.arrived_ms, key=lambda each: each[0][0])
            return QueuedWork(older, 0, sum(one.claim.tokens for _, one in self._again[:older]), 0)
        line = self._classes.get(claim.priority)
        in_class, tokens = (0, 0) if line is None else line.ahead(claim)
        sooner = takewhile(lambda each: each < claim.priority, self._order)
        before = self._again_tokens + sum(self._classes[each].tokens for each in sooner)
        return QueuedWork(self.up_to(claim.priority - 1) + in_class, in_class, before + tokens, tokens)

    def in_all(self) -> QueuedWork:
        """Return all that wait, as those ahead of whoever is served last, who is counted with them."""
        lowest = self._classes[self._order[-1]] if self._order else None
        of_all = self._again_tokens + sum(each.tokens for each in self._classes.values())
        count, tokens = (0, 0) if lowest is None else (lowest.count, lowest.tokens)
        return QueuedWork(self._count, count, of_all, tokens)

    # ---- inside

    def _highest(self) -> int | None:
        """Of the classes with somebody to look at."""
        return next((each for each in self._order if self._classes[each].first() is not None), None)

    def _lower(self) -> QueueEntry[T] | None:
        """The first of the class below the highest one that had no room for longest."""
        highest = self._highest()
        if highest is None or self._lower_passed:
            return None
        for priority in self._unserved:
            first = self._classes[priority].first()
            if priority != highest and first is not None:
                return first
        return None

    def _remove(self, one: QueueEntry[T], *, served: bool) -> None:
        one.is_in = False
        self._count -= 1
        if one.claim.had_room:
            self.again -= 1
            self._again_tokens -= one.claim.tokens
            if not one.is_aside:
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
        """What the classes below may have for what this one has, or has had of it."""
        priority, tokens = one.claim.priority, one.claim.tokens
        if self._order[0] < priority:
            self._for_lower = max(self._for_lower - LOWER_PART * tokens, 0)
        lower = self._lower()
        # Once it is enough for one of theirs no more is saved: who does not fit does not come back with many.
        if priority < self._order[-1] and lower and self._for_lower < LOWER_PART * lower.claim.tokens:
            self._for_lower += tokens
        self._unserved.move_to_end(priority)

    def _forget_again(self, one: QueueEntry[T]) -> None:
        del self._again[bisect_left(self._again, one.age, key=lambda each: each[0])]
