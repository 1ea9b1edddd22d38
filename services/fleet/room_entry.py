"""Record of one room at the router: its workers, its phase, its outcome and its timeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from baton.fleet.pair_health import PairId
from baton.fleet.prefix_affinity import Block
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, LocalBug
from baton.rooms.phases import Side
from baton.rooms.reasons import REASONS
from baton.rooms.timeline import Event, Line
from baton.rooms.worker_facts import WorkerFacts

EVENTS_PER_ROOM_MAX: Final = 256
_PAIR: Final = tuple(Side)
_ALONE: Final = (Side.DECODE,)


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
