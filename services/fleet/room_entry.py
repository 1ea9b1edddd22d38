"""Record of one room in the router: its workers, its phase, its outcome and its timeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from baton.fleet.pair_health import PairId
from baton.ids import Incarnation, RoomId
from baton.pages.block_hashes import Block
from baton.rooms.errors import Cause, LocalBug
from baton.rooms.phases import Side
from baton.rooms.reasons import REASONS
from baton.rooms.timeline import Event, Line
from baton.rooms.worker_facts import WorkerFacts

EVENTS_PER_ROOM_MAX: Final = 256
_PAIR: Final = tuple(Side)
_ALONE: Final = (Side.DECODE,)


class RoomPhase(Enum):
    """Phase of a room as the router knows it. The phases on the workers are in `baton.rooms.phases`."""

    __hash__ = object.__hash__  # Enum's own would hash the name at each look-up in a table
    OPEN = "open"
    STREAMING = "streaming"
    """Phase of a room whose first token was passed on to the client."""
    CLOSING = "closing"
    """Phase of a room whose outcome is known, but which not all of its workers have reported retired."""
    RETIRED = "retired"


@dataclass(slots=True)
class RoomEntry:
    id: RoomId
    request_id: str
    prefill: WorkerFacts | None
    """Prefill worker of the room. If None, decode computes the prompt: there was no prefill worker, or only
    decode's own process (`is_same_process`)."""
    decode: WorkerFacts
    prompt_tokens: int
    """Number of KV positions that prefill computes for the room, without the cached prefix."""
    tokens: int
    """Number of KV positions that the room takes on decode when it begins."""
    opened_ms: int
    canary: bool = False
    retry_of: RoomId | None = None
    """Id of the earlier room of the same request that this room continues. None for the first room of a
    request."""
    trace_id: str = ""
    """Trace id of the request; empty if there is none."""
    phase: RoomPhase = RoomPhase.OPEN
    closing_ms: int = 0
    cause: Cause | None = None
    waiting_for: set[Side] = field(init=False)
    """Sides whose workers have not reported the room retired."""
    undelivered: set[Side] = field(init=False)
    """Sides to whose workers the room has not been sent yet by its opener (the process that asked for it), as
    far as the router knows."""
    lines: list[Line] = field(default_factory=list)
    """Lines of the room's timeline, in the order in which they arrived."""
    events_dropped: int = 0
    choices: int = 1
    """Number of choices (sequences) that are sampled in the room."""
    prefill_ms: int | None = None
    """Expected time until prefill has computed the prompt, as estimated when the room was opened, in
    milliseconds. None if unknown."""
    prefill_own_ms: int = 0
    """Part of `prefill_ms` that computing this room's own prompt takes, in milliseconds."""
    is_same_process: bool = False
    """Whether the decode worker's process would be the prefill worker, too, so that decode computes the
    prompt and nothing is handed over."""
    is_local: bool = False
    """Whether the decode worker computes the room's prompt."""
    is_returned: bool = False
    """Whether the decode worker retracted an earlier room of the same request. It serves this room to its end
    even while it drains."""
    uncomputed_blocks: Sequence[Block] = ()
    """Blocks of the prompt that the prefill worker had not computed for any room when this one was opened.
    Empty once it has."""

    def __post_init__(self) -> None:
        self.is_local = self.prefill is None
        self.waiting_for, self.undelivered = set(self.sides), set(self.sides)

    @property
    def sides(self) -> tuple[Side, ...]:
        """Sides on which the room has a worker: both, or decode alone."""
        return _ALONE if self.prefill is None else _PAIR

    @property
    def waits_for_opener(self) -> set[Side]:
        """Sides that still count as holding the room, although its opener (the process that asked for it) has
        not sent it to them."""
        return self.undelivered & self.waiting_for

    @property
    def events(self) -> Sequence[Event]:
        """Events of the room's timeline, decoded."""
        events = [each if isinstance(each, Event) else each() for each in self.lines]
        self.lines[:] = events
        return events

    def record(self, line: Line) -> None:
        """Add a line to the room's timeline. Beyond EVENTS_PER_ROOM_MAX lines it is counted and dropped."""
        if len(self.lines) >= EVENTS_PER_ROOM_MAX:
            self.events_dropped += 1
        else:
            self.lines.append(line)

    def sides_of(self, incarnation: Incarnation) -> tuple[Side, ...]:
        """Return the sides that a worker serves in this room. Empty if the worker is not in the room."""
        sides = _ALONE if self.decode.incarnation == incarnation else ()
        if self.prefill is not None and self.prefill.incarnation == incarnation:
            return (Side.PREFILL, *sides)
        return sides

    def worker(self, side: Side) -> WorkerFacts:
        """Return the worker on one side of the room. Raises LocalBug if the room has none on this side."""
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
        """Names of the room's workers, by side."""
        if self.prefill is None:
            return {Side.DECODE: self.decode.name}
        return {Side.PREFILL: self.prefill.name, Side.DECODE: self.decode.name}

    @property
    def where(self) -> str:
        """Description of the room's workers for timelines, such as "on prefill-0 and decode-0"."""
        if self.is_same_process:
            return f"on {self.decode.name}, whose process serves both sides"
        return f"on {' and '.join(self.names.values())}" + " alone" * (self.prefill is None)

    @property
    def pair(self) -> PairId | None:
        """Ids of the room's prefill and decode worker, if prefill hands the room over to decode. None
        otherwise."""
        if self.prefill is None or self.is_local:
            return None
        return self.prefill.incarnation, self.decode.incarnation

    def needs(self, incarnation: Incarnation) -> bool:
        """Return whether the room ends if this worker, one of its two, is lost. A local room does not need
        its prefill worker."""
        return not self.is_local or incarnation == self.decode.incarnation

    @property
    def has_failed(self) -> bool:
        """Whether the room has failed. A room that its client ended has not."""
        return self.cause is not None and REASONS[self.cause.reason].is_failure

    def tokens_on(self, side: Side) -> int:
        return self.prompt_tokens if side is Side.PREFILL else self.tokens
