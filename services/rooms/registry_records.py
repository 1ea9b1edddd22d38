"""What does the registry write down about a worker, and what about a room?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from typing import Final

from baton.fleet.pair_health import PairId
from baton.fleet.prefill_queue import PrefillQueue
from baton.fleet.prefix_affinity import Block, Sent
from baton.fleet.worker_usage import WorkerUsage
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, LocalBug
from baton.rooms.phases import Side
from baton.rooms.reasons import REASONS
from baton.rooms.timeline import Event, Line
from baton.topology import ONE_RANK, Topology

CANARY_ROOMS: Final = 1
"""Rooms that a worker can hold beyond `rooms_max`: a canary takes no place that a client is given."""
CANARY_TOKENS: Final = 25
"""KV positions that a canary takes of a worker: with less it would never be ready."""

BOTH: Final = frozenset(Side)
_PAIR: Final = tuple(Side)
_ALONE: Final = (Side.DECODE,)
EVENTS_PER_ROOM_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class StackFacts:
    """What must be equal across the stack. The last five hold one value for each group of the KV layout."""

    schema: str = ""
    """Of the metadata record."""
    kv_checksum: str = ""
    quantize: str = ""
    kind: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    """How many."""
    heads: tuple[int, ...] = ()
    """How many."""
    planes: tuple[str, ...] = ()

    def in_words(self) -> dict[str, str]:
        """Each value by its field, in the order in which they are compared."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value if isinstance(value, str) else "; ".join(map(str, value))
            for name, value in sorted(told.items())
        }


WHOLE: Final = 100
"""Parts of a process's time, as its weights count them."""


@dataclass(frozen=True, slots=True)
class OtherSide:
    """Of a worker whose process serves both sides: what registers as the other one."""

    incarnation: Incarnation
    process: str
    """What both are called together."""
    prefill_weight: int = WHOLE // 2
    """Of 100: how much of its time the process is meant to have for prefill, as it registers."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says of itself when it registers. It does not change during an incarnation."""

    name: str
    """One process at a time has it in the whole stack, whatever its side."""
    side: Side
    incarnation: Incarnation
    address: str
    """host:port of its gRPC server."""
    model: str
    """Fingerprint of configuration and weights."""
    stack: StackFacts
    tokens_max: int
    """KV positions that its whole cache holds."""
    rooms_max: int
    """Rooms of clients that it holds at once."""
    context_length: int = 0
    """Most tokens of a sequence; 0: not said."""
    page_tokens: int = 1
    """Of a block: the fewest positions of which every group has whole pages. Of any two workers of the stack,
    one's is a multiple of the other's."""
    group_page_tokens: tuple[int, ...] = ()
    """Of a page of each group; empty: there is one, and that is its block."""
    topology: Topology = ONE_RANK
    pid: int = 0
    """Of its process, for whoever started it on the same machine; 0: not told."""
    keeps_prefixes: bool = True
    """Pages of ended sequences are kept for prompts that begin alike."""
    computes: bool = False
    """Of a decode worker: it computes the prompt of a room itself where no prefill worker does."""
    other_side: OtherSide | None = None
    """None: its process serves this side alone."""
    secret_digest: bytes = field(default=b"", repr=False)
    """Of a decode worker: by which senders know who speaks to them. Nobody can show the secret itself by
    it."""
    exit_digest: bytes = b""
    """SHA-256 of the secret by which the starter of its process reports the exit; empty: nobody can."""


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
    sent: Sent = field(init=False)
    """Beginnings of prompts that it may hold."""
    twin: "Worker | None" = field(default=None, init=False, repr=False, compare=False)
    """The other side of its process, while that holds a lease too."""
    weight: int = field(default=WHOLE, init=False)
    """How much of its process's time it is meant to have; with 0 it gets no room while another of its side
    serves."""

    def __post_init__(self) -> None:
        facts, other = self.facts, self.facts.other_side
        if other is not None:
            self.weigh(other.prefill_weight)
        self.sent = Sent(facts.tokens_max if facts.keeps_prefixes else 0)
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
        return share * (WHOLE / max(self.weight, 1))

    def _own_share(self, more: int) -> float:
        return (self.tokens_ahead + more) / max(self.facts.tokens_max, 1)

    def weigh(self, prefill: int) -> None:
        """So many of 100 parts of its process's time are meant for prefill."""
        self.weight = prefill if self.facts.side is Side.PREFILL else WHOLE - prefill

    @property
    def prefill_weight(self) -> int | None:
        """The weight by which its process was chosen last; None where that serves one side alone."""
        if self.facts.other_side is None:
            return None
        return self.weight if self.facts.side is Side.PREFILL else WHOLE - self.weight

    @property
    def has_place(self) -> bool:
        """For one more client's room, now, if it has the space."""
        return self.state is WorkerState.READY and not self.reserved and self.places_left > 0


class RoomPhase(Enum):
    """Where a room is, as the registry knows it."""

    OPEN = "open"
    STREAMING = "streaming"
    """Its first token has left for the client."""
    CLOSING = "closing"
    """Its outcome is known; its workers have not all reported it retired."""
    RETIRED = "retired"


@dataclass(slots=True)
class RoomEntry:
    id: RoomId
    request_id: str
    prefill: WorkerFacts | None
    """None: there was none, or none but decode's own process (`is_kept`), and decode computes the prompt."""
    decode: WorkerFacts
    prompt_tokens: int
    """KV positions that it takes in prefill, beyond what was sent there before."""
    tokens: int
    """KV positions that it begins with in decode."""
    opened_ms: int
    canary: bool = False
    retry_of: RoomId | None = None
    """The room of the same request that failed, and that this one goes on for."""
    trace_id: str = ""
    """Of its request; empty where nobody gave or made one."""
    phase: RoomPhase = RoomPhase.OPEN
    closing_ms: int = 0
    cause: Cause | None = None
    waiting_for: set[Side] = field(init=False)
    """Sides that have not reported the room retired."""
    untaken: set[Side] = field(init=False)
    """Sides that, as far as is known here, its opener has not asked for it yet."""
    lines: list[Line] = field(default_factory=list)
    """Its timeline."""
    events_dropped: int = 0
    choices: int = 1
    """Sequences that are drawn in it."""
    prefill_ms: int | None = None
    """When it was opened: in how long its prefill worker was expected to have computed its prompt, if that
    was known."""
    prefill_own_ms: int = 0
    """How long of that for this very prompt."""
    is_kept: bool = False
    """Its decode worker's process is its prefill worker, too: there is nothing to hand over."""
    is_local: bool = False
    """Its decode worker computes the prompt."""
    is_back: bool = False
    """Its decode worker retracted the request before, and serves it to its end even while it drains."""
    sent: Sequence[Block] = ()
    """Blocks of the prompt that its prefill worker had not computed when it was opened, until it has."""

    def __post_init__(self) -> None:
        self.is_local = self.prefill is None
        self.waiting_for, self.untaken = set(self.sides), set(self.sides)

    @property
    def sides(self) -> tuple[Side, ...]:
        """On which it has a worker."""
        return _ALONE if self.prefill is None else _PAIR

    @property
    def waits_for_opener(self) -> set[Side]:
        """Sides that hold it open, and that nobody brought it to."""
        return self.untaken & self.waiting_for

    @property
    def events(self) -> Sequence[Event]:
        """Its timeline, as it is read."""
        events = [each if isinstance(each, Event) else each() for each in self.lines]
        self.lines[:] = events
        return events

    def record(self, line: Line) -> None:
        """Add a line to its timeline, while there is space."""
        if len(self.lines) >= EVENTS_PER_ROOM_MAX:
            self.events_dropped += 1
        else:
            self.lines.append(line)

    def sides_of(self, incarnation: Incarnation) -> tuple[Side, ...]:
        """What a worker is in it."""
        sides = _ALONE if self.decode.incarnation == incarnation else ()
        if self.prefill is not None and self.prefill.incarnation == incarnation:
            return (Side.PREFILL, *sides)
        return sides

    def worker(self, side: Side) -> WorkerFacts:
        """Of one of its `sides`."""
        if side is Side.DECODE:
            return self.decode
        if self.prefill is None:
            raise LocalBug(f"room {self.id} has no prefill worker")
        return self.prefill

    @property
    def workers(self) -> tuple[WorkerFacts, ...]:
        """The prefill worker first, if it has one."""
        return tuple(map(self.worker, self.sides))

    @property
    def names(self) -> Mapping[Side, str]:
        """Of its workers."""
        return {side: self.worker(side).name for side in self.sides}

    @property
    def where(self) -> str:
        """On which workers it is, for people."""
        if self.is_kept:
            return f"on {self.decode.name}, whose process serves both sides"
        return f"on {' and '.join(self.names.values())}" + " alone" * (self.prefill is None)

    @property
    def pair(self) -> PairId | None:
        """Its prefill and its decode worker, where the one hands over to the other."""
        if self.prefill is None or self.is_local:
            return None
        return self.prefill.incarnation, self.decode.incarnation

    def needs(self, incarnation: Incarnation) -> bool:
        """It does not go on without this worker, which is one of its own."""
        return not self.is_local or incarnation == self.decode.incarnation

    @property
    def has_failed(self) -> bool:
        """It ended in a way that is not its client's own."""
        return self.cause is not None and REASONS[self.cause.reason].is_failure

    def tokens_on(self, side: Side) -> int:
        return self.prompt_tokens if side is Side.PREFILL else self.tokens
