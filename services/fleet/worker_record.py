"""Record of one registered worker at the router: its lease, its state, its rooms and its load."""

from dataclasses import dataclass, field
from enum import StrEnum

from baton.fleet.prefill_queue import PrefillQueue
from baton.fleet.prefix_affinity import SentPrefixes
from baton.fleet.worker_usage import WorkerUsage
from baton.ids import RoomId
from baton.rooms.phases import Side
from baton.rooms.worker_facts import WEIGHT_TOTAL, WorkerFacts


class WorkerState(StrEnum):
    JOINING = "joining"
    """Registered, but no canary hand-over has passed through it yet."""
    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"
    """A call to it broke. It gets no rooms until it renews its lease."""


@dataclass(slots=True)
class Worker:
    facts: WorkerFacts
    lease_until_ms: int
    state: WorkerState = WorkerState.JOINING
    proven: bool = False
    """Whether a canary hand-over has passed through it."""
    dismissed: bool = False
    """Whether the worker drains, and knows that it gets no room any more."""
    reserved: bool = False
    """Whether it is reserved for one request, while the other waiting ones are looked at."""
    rooms: set[RoomId] = field(default_factory=set)
    canaries: set[RoomId] = field(default_factory=set)
    """Rooms of canaries among `rooms`."""
    joined_ms: int = 0
    """Time of its first registration."""
    usage: WorkerUsage = field(init=False)
    """Usage of its KV cache."""
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    """Prompt tokens that wait there, for a prefill worker."""
    sent_prefixes: SentPrefixes = field(init=False)
    """Prompt prefixes that the worker was sent, and so may have cached."""
    twin: "Worker | None" = field(default=None, init=False, repr=False, compare=False)
    """The worker of the other side of its process, while that holds a lease too."""
    weight: int = field(default=WEIGHT_TOTAL, init=False)
    """Share of its process's time that it is meant to have, of 100. With 0 it gets no room while another
    worker of its side serves."""

    def __post_init__(self) -> None:
        facts, other = self.facts, self.facts.other_side
        if other is not None:
            self.weigh(other.prefill_weight)
        self.sent_prefixes = SentPrefixes(facts.tokens_max if facts.keeps_prefixes else 0)
        self.usage = WorkerUsage(facts.tokens_max, facts.group_page_tokens or (facts.page_tokens,))

    @property
    def is_serving(self) -> bool:
        """Whether it gets rooms, or may again as soon as it renews its lease."""
        return self.state is WorkerState.READY or (self.state is WorkerState.SUSPECT and self.proven)

    @property
    def client_rooms(self) -> int:
        """Number of clients' rooms that it holds."""
        return len(self.rooms) - len(self.canaries)

    @property
    def accepts_retracted(self) -> bool:
        """Whether it drains and still serves what it has started, including requests whose rooms it
        retracted."""
        return self.state is WorkerState.DRAINING and not self.dismissed

    @property
    def rooms_left(self) -> int:
        return self.facts.rooms_max - self.client_rooms

    @property
    def tokens(self) -> int:
        """KV positions of its cache that are used or asked for."""
        return self.usage.tokens

    @property
    def tokens_ahead(self) -> int:
        """Work before a room that is placed on it now, in tokens. For a prefill worker that reports its load,
        it is the tokens to compute. A computed room whose pages decode does not take yet delays none there.
        For any other worker, it is `tokens`."""
        return self.tokens if self.queue.load is None else self.queue.tokens

    @property
    def share(self) -> float:
        """`tokens_ahead` as a share of its cache. If its process serves both sides, the other side's share is
        added. The sum is divided by the part of the time that its `weight` gives it."""
        return self.share_with(0)

    def share_with(self, tokens: int) -> float:
        """Return `share` with `tokens` more."""
        share = self._own_share(tokens)
        if self.twin is not None:
            share += self.twin._own_share(0)
        return share * (WEIGHT_TOTAL / max(self.weight, 1))

    def _own_share(self, more: int) -> float:
        return (self.tokens_ahead + more) / max(self.facts.tokens_max, 1)

    def weigh(self, prefill: int) -> None:
        """Set the part of its process's time that is meant for prefill, of 100."""
        self.weight = prefill if self.facts.side is Side.PREFILL else WEIGHT_TOTAL - prefill

    @property
    def prefill_weight(self) -> int | None:
        """Weight of prefill that its process has now; None if it serves one side only."""
        if self.facts.other_side is None:
            return None
        return self.weight if self.facts.side is Side.PREFILL else WEIGHT_TOTAL - self.weight

    @property
    def has_free_room(self) -> bool:
        """Whether one more client's room may be placed on it, if it has the space."""
        return self.state is WorkerState.READY and not self.reserved and self.rooms_left > 0
