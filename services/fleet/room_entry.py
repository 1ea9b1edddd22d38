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
    """Phase of a room, as the registry knows it."""

    OPEN = "open"
    STREAMING = "streaming"
    """The first token has left for the client."""
    CLOSING = "closing"
    """The outcome is known, but not all of its workers have reported it retired."""
    RETIRED = "retired"


@dataclass(slots=True)
class RoomEntry:
    id: RoomId
    request_id: str
    prefill: WorkerFacts | None
    """Prefill worker. None if there was none, or only decode's own process (`is_same_process`). Then decode
    computes the prompt."""
    decode: WorkerFacts
    prompt_tokens: int
    """KV positions that prefill computes, without the cached prefix."""
    tokens: int
    """KV positions that the room begins with on decode."""
    opened_ms: int
    canary: bool = False
    retry_of: RoomId | None = None
    """Room of the same request that ended, and that this one continues."""
    trace_id: str = ""
    """Trace id of the request; empty if there is none."""
    phase: RoomPhase = RoomPhase.OPEN
    closing_ms: int = 0
    cause: Cause | None = None
    waiting_for: set[Side] = field(init=False)
    """Sides that have not reported the room retired."""
    undelivered: set[Side] = field(init=False)
    """Sides that the opener has not delivered the room to yet, as far as the router knows."""
    lines: list[Line] = field(default_factory=list)
    """Timeline, in the order in which lines came."""
    events_dropped: int = 0
    choices: int = 1
    """Number of sequences that are drawn in the room."""
    prefill_ms: int | None = None
    """Time in which prefill was expected to have computed the prompt when the room was opened, in
    milliseconds. None if unknown."""
    prefill_own_ms: int = 0
    """Part of that time for this very prompt, in milliseconds."""
    is_same_process: bool = False
    """Whether its decode worker's process is its prefill worker, too, so that nothing is handed over."""
    is_local: bool = False
    """Whether its decode worker computes the prompt."""
    is_returned: bool = False
    """Whether its decode worker retracted the request before. It serves the room to its end even while it
    drains."""
    uncomputed_blocks: Sequence[Block] = ()
    """Blocks of the prompt that no room of its prefill worker had computed when this one was opened, until it
    has."""

    def __post_init__(self) -> None:
        self.is_local = self.prefill is None
        self.waiting_for, self.undelivered = set(self.sides), set(self.sides)

    @property
    def sides(self) -> tuple[Side, ...]:
        """Sides on which the room has a worker."""
        return _ALONE if self.prefill is None else _PAIR

    @property
    def waits_for_opener(self) -> set[Side]:
        """Sides that hold the room open, and that it was not delivered to."""
        return self.undelivered & self.waiting_for

    @property
    def events(self) -> Sequence[Event]:
        """Events of the timeline, decoded."""
        events = [each if isinstance(each, Event) else each() for each in self.lines]
        self.lines[:] = events
        return events

    def record(self, line: Line) -> None:
        """Add a line to the timeline, while there is space."""
        if len(self.lines) >= EVENTS_PER_ROOM_MAX:
            self.events_dropped += 1
        else:
            self.lines.append(line)

    def sides_of(self, incarnation: Incarnation) -> tuple[Side, ...]:
        """Return the sides that a worker serves in this room."""
        sides = _ALONE if self.decode.incarnation == incarnation else ()
        if self.prefill is not None and self.prefill.incarnation == incarnation:
            return (Side.PREFILL, *sides)
        return sides

    def worker(self, side: Side) -> WorkerFacts:
        """Return the worker of one of its `sides`. Raises LocalBug for another side."""
        if side is Side.DECODE:
            return self.decode
        if self.prefill is None:
            raise LocalBug(f"room {self.id} has no prefill worker")
        return self.prefill

    @property
    def workers(self) -> tuple[WorkerFacts, ...]:
        """Workers of the room, prefill first."""
        return tuple(map(self.worker, self.sides))

    @property
    def names(self) -> Mapping[Side, str]:
        """Names of its workers by side."""
        return {side: self.worker(side).name for side in self.sides}

    @property
    def where(self) -> str:
        """Description of its workers, for display."""
        if self.is_same_process:
            return f"on {self.decode.name}, whose process serves both sides"
        return f"on {' and '.join(self.names.values())}" + " alone" * (self.prefill is None)

    @property
    def pair(self) -> PairId | None:
        """Its prefill and its decode worker, if the one hands over to the other. None otherwise."""
        if self.prefill is None or self.is_local:
            return None
        return self.prefill.incarnation, self.decode.incarnation

    def needs(self, incarnation: Incarnation) -> bool:
        """Return whether the room cannot go on without this worker, which is one of its own."""
        return not self.is_local or incarnation == self.decode.incarnation

    @property
    def has_failed(self) -> bool:
        """Whether the room ended in a way that is not the client's own."""
        return self.cause is not None and REASONS[self.cause.reason].is_failure

    def tokens_on(self, side: Side) -> int:
        return self.prompt_tokens if side is Side.PREFILL else self.tokens
