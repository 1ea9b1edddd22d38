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
    """Registered; no canary hand-over has passed through it yet."""
    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"
    """A call to it broke; it gets no rooms until it renews its lease."""


@dataclass(slots=True)
class Worker:
    facts: WorkerFacts
    lease_until_ms: int
    state: WorkerState = WorkerState.JOINING
    proven: bool = False
    """A canary hand-over has passed through it."""
    dismissed: bool = False
    """It drains, and was told that nothing comes any more."""
    reserved: bool = False
    """For one request, while the others that wait are looked at."""
    rooms: set[RoomId] = field(default_factory=set)
    canaries: set[RoomId] = field(default_factory=set)
    """Those of them that no client asked for."""
    joined_ms: int = 0
    """When it registered first."""
    usage: WorkerUsage = field(init=False)
    """Of its cache."""
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    """Of a prefill worker: what it has yet to compute."""
    sent: SentPrefixes = field(init=False)
    """Beginnings of prompts that it may hold."""
    twin: "Worker | None" = field(default=None, init=False, repr=False, compare=False)
    """The other side of its process, while that holds a lease too."""
    weight: int = field(default=WEIGHT_TOTAL, init=False)
    """How much of its process's time it is meant to have; with 0 it gets no room while another of its side
    serves."""

    def __post_init__(self) -> None:
        facts, other = self.facts, self.facts.other_side
        if other is not None:
            self.weigh(other.prefill_weight)
        self.sent = SentPrefixes(facts.tokens_max if facts.keeps_prefixes else 0)
        self.usage = WorkerUsage(facts.tokens_max, facts.group_page_tokens or (facts.page_tokens,))

    @property
    def is_serving(self) -> bool:
        """It gets rooms, or may again as soon as it renews its lease."""
        return self.state is WorkerState.READY or (self.state is WorkerState.SUSPECT and self.proven)

    @property
    def places_taken(self) -> int:
        """Rooms of clients that it holds."""
        return len(self.rooms) - len(self.canaries)

    @property
    def takes_back(self) -> bool:
        """It drains, and serves what it has started: a request whose room it retracted is that, too."""
        return self.state is WorkerState.DRAINING and not self.dismissed

    @property
    def places_left(self) -> int:
        return self.facts.rooms_max - self.places_taken

    @property
    def tokens(self) -> int:
        """KV positions of its cache that are used or asked for."""
        return self.usage.tokens

    @property
    def tokens_ahead(self) -> int:
        """What a room that is placed on it now stands behind. Of a prefill worker that says so: tokens that
        are to be computed. A room that is computed, and whose pages decode does not take yet, delays nobody
        there. Of any other, its `tokens`."""
        return self.tokens if self.queue.load is None else self.queue.tokens

    @property
    def share(self) -> float:
        """The same, of what its cache holds. One whose process serves both sides stands behind what the other
        side has, too, and all of that counts as often as its `weight` goes into the whole."""
        return self.share_with(0)

    def share_with(self, tokens: int) -> float:
        """The same, with so many more of them."""
        share = self._own_share(tokens)
        if self.twin is not None:
            share += self.twin._own_share(0)
        return share * (WEIGHT_TOTAL / max(self.weight, 1))

    def _own_share(self, more: int) -> float:
        return (self.tokens_ahead + more) / max(self.facts.tokens_max, 1)

    def weigh(self, prefill: int) -> None:
        """So many of 100 parts of its process's time are meant for prefill."""
        self.weight = prefill if self.facts.side is Side.PREFILL else WEIGHT_TOTAL - prefill

    @property
    def prefill_weight(self) -> int | None:
        """The weight by which its process was chosen last; None where that serves one side alone."""
        if self.facts.other_side is None:
            return None
        return self.weight if self.facts.side is Side.PREFILL else WEIGHT_TOTAL - self.weight

    @property
    def has_place(self) -> bool:
        """For one more client's room, now, if it has the space."""
        return self.state is WorkerState.READY and not self.reserved and self.places_left > 0
