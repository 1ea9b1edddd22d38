"""Record of one registered worker in the router: its lease, its state, its rooms and its load."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from baton.fleet.kv_event_reader import KvEventReader
from baton.fleet.prefill_queue import PrefillQueue
from baton.fleet.prefix_affinity import SentPrefixes
from baton.fleet.worker_usage import WorkerUsage
from baton.ids import RoomId
from baton.pages.block_hashes import BLOCK_TOKENS, Block
from baton.rooms.phases import Side
from baton.rooms.worker_facts import WEIGHT_TOTAL, WorkerFacts
from baton.rooms.worker_load import WorkerLoad


class WorkerState(StrEnum):
    JOINING = "joining"
    """State of a registered worker through which no canary (test request) has passed yet."""
    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"
    """State of a worker to which a call broke. It gets no rooms until it renews its lease."""


@dataclass(slots=True)
class Worker:
    facts: WorkerFacts
    lease_until_ms: int
    state: WorkerState = WorkerState.JOINING
    proven: bool = False
    """Whether a canary (test request) has passed through the worker."""
    dismissed: bool = False
    """Whether the worker is draining and knows that no more rooms will come."""
    reserved: bool = False
    """Whether the worker is reserved for one request, so that other requests of the same queue scan are not
    placed on it."""
    rooms: set[RoomId] = field(default_factory=set)
    canaries: set[RoomId] = field(default_factory=set)
    """Rooms of canaries (test requests) among `rooms`."""
    other_rooms: int = 0
    """Number of rooms on the worker that other routers opened, by its last report."""
    reports: int = 0
    """Serial number of the worker's last report of its load."""
    is_full: bool = field(default=False, init=False)
    """Whether the worker has refused a room since its last report, because all its places are taken. It gets
    no rooms before it reports again (`full-is-no-failure`)."""
    joined_ms: int = 0
    """Time of the worker's first registration, in milliseconds."""
    usage: WorkerUsage = field(init=False)
    """Used and free space of the worker's KV cache."""
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    """Work that waits on this worker if it is a prefill worker: prompt tokens to compute."""
    sent_prefixes: SentPrefixes = field(init=False)
    """Prompt prefixes that the worker was sent, and that its log does not show as cached. It may have them
    in its prefix cache, or soon."""
    kv_log: KvEventReader = field(init=False)
    """Prompt prefixes that the worker has cached, by its own log."""
    twin: "Worker | None" = field(default=None, init=False, repr=False, compare=False)
    """Worker of the other side in the same process, if that worker also holds a lease. None otherwise."""
    weight: int = field(default=WEIGHT_TOTAL, init=False)
    """Percentage of its process's time that is meant for this worker. With 0, the worker gets no rooms while
    another worker of its side serves."""

    def __post_init__(self) -> None:
        facts, other = self.facts, self.facts.other_side
        if other is not None:
            self.weigh(other.prefill_weight)
        self.sent_prefixes = SentPrefixes(facts.tokens_max if facts.keeps_prefixes else 0)
        self.kv_log = KvEventReader(facts.tokens_max // min(facts.page_tokens, BLOCK_TOKENS))
        self.usage = WorkerUsage(facts.tokens_max, facts.group_page_tokens or (facts.page_tokens,))

    def note_others(self, load: WorkerLoad) -> bool:
        """Take the number of other routers' rooms from a report. Return whether the worker has more places
        than was assumed. A report that is older than the last one is ignored."""
        if load.number <= self.reports:
            return False
        before, self.reports, self.other_rooms = self.rooms_left, load.number, load.other_rooms
        self.is_full = False
        return self.rooms_left > before

    @property
    def is_serving(self) -> bool:
        """Whether the worker gets rooms now, or may again as soon as it renews its lease."""
        return self.state is WorkerState.READY or (self.state is WorkerState.SUSPECT and self.proven)

    def cached_tokens(self, prompt: Sequence[Block]) -> int:
        """Return the number of a prompt's leading tokens that the worker has cached by its log, or was sent
        and may have cached soon."""
        known = 0
        for block in prompt:
            if block not in self.kv_log.blocks and block not in self.sent_prefixes:
                break
            known += BLOCK_TOKENS
        return known

    @property
    def client_rooms(self) -> int:
        """Number of clients' rooms on the worker; canaries are not counted."""
        return len(self.rooms) - len(self.canaries)

    @property
    def accepts_retracted(self) -> bool:
        """Whether the worker is draining but still serves the requests that it has begun. Those whose rooms
        it retracted are among them."""
        return self.state is WorkerState.DRAINING and not self.dismissed

    @property
    def rooms_left(self) -> int:
        """Number of clients' rooms that the worker may get in addition to those it has. May be negative."""
        left = self.facts.rooms_max - self.client_rooms - self.other_rooms
        return min(left, 0) if self.is_full else left

    @property
    def tokens(self) -> int:
        """Number of positions in the worker's KV cache that are used, or that rooms waiting on it need."""
        return self.usage.tokens

    @property
    def tokens_ahead(self) -> int:
        """Work before a room that is placed on the worker now, in tokens.

        For a prefill worker that reports its load, it is the number of tokens to compute. Prompts that are
        computed but not handed over yet delay no new room there. For any other worker, it is `tokens`.
        """
        return self.tokens if self.queue.load is None else self.queue.tokens

    @property
    def share(self) -> float:
        """Work on the worker as a share of its cache: `tokens_ahead` over the cache's positions.

        If its process serves both sides, the other side's share is added. The sum is divided by the worker's
        share of the process's time (`weight`).
        """
        return self.share_with(0)

    def share_with(self, tokens: int) -> float:
        """Return the value that `share` would have if the worker had to hold `tokens` more KV positions."""
        share = self._own_share(tokens)
        if self.twin is not None:
            share += self.twin._own_share(0)
        return share * (WEIGHT_TOTAL / max(self.weight, 1))

    def _own_share(self, more: int) -> float:
        return (self.tokens_ahead + more) / max(self.facts.tokens_max, 1)

    def weigh(self, prefill: int) -> None:
        """Set the prefill weight of the worker's process: the percentage of its time that is meant for
        prefill."""
        self.weight = prefill if self.facts.side is Side.PREFILL else WEIGHT_TOTAL - prefill

    @property
    def prefill_weight(self) -> int | None:
        """Present prefill weight of the worker's process, of 100. None if the process serves one side
        only."""
        if self.facts.other_side is None:
            return None
        return self.weight if self.facts.side is Side.PREFILL else WEIGHT_TOTAL - self.weight

    @property
    def has_free_room(self) -> bool:
        """Whether the worker may get one more room of a client, as far as the number of rooms is
        concerned."""
        return self.state is WorkerState.READY and not self.reserved and self.rooms_left > 0
