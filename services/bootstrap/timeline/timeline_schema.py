"""Parts of a request's timeline. Times are milliseconds since its first line.

The JSON of `/requests/{id}` has these classes, field by field.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final


class State(StrEnum):
    """State of a request, or how it ended."""

    QUEUED = "queued"
    """No pair of workers has had space for it yet."""
    PREFILL = "prefill"
    """Its client waits for the first token."""
    STREAMING = "streaming"
    RETRYING = "retrying"
    """Its room failed, and it may go on in another."""
    PAUSED = "paused"
    """Its worker needed its pages, and it goes on in another room."""
    ANSWERED = "answered"
    FAILED = "failed"
    GONE = "gone"
    """Its client hung up."""
    REFUSED = "refused"
    """It never had a room."""


OVER: Final = frozenset({State.ANSWERED, State.FAILED, State.GONE, State.REFUSED})


class LineKind(StrEnum):
    """Kind of a line, which decides how it is drawn."""

    EVIDENCE = "evidence"
    """A fact that one rank observed."""
    VOTE = "vote"
    """Vote of one rank, if the ranks differed."""
    MOVE = "move"
    """A move of all ranks of a worker, or of the router."""
    SEAL = "seal"
    TOKEN = "token"  # noqa: S105 - a kind of line
    """The first token on its way."""
    FAILURE = "failure"
    END = "end"
    NOTE = "note"


class Activity(Enum):
    """Activity of a lane during a bar."""

    WAIT = "wait"
    COMPUTE = "compute"
    TRANSFER = "transfer"
    AGREE = "agree"
    STREAM = "stream"
    STALL = "stall"
    """The stream pauses because its room failed."""
    PAUSE = "pause"
    """The stream pauses because its worker needed the pages."""
    CLOSE = "close"
    KEPT = "kept"
    """The room failed, and its memory is reserved until nothing can be written to it any more."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a room's timeline."""

    at_ms: float
    lane: str
    room: str
    kind: LineKind
    name: str
    detail: str
    wall_ms: int


@dataclass(frozen=True, slots=True)
class Bar:
    lane: str
    room: str
    doing: Activity
    text: str
    from_ms: float
    to_ms: float | None
    """End of the bar; None while it goes on."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """A message from one lane to another."""

    room: str
    text: str
    from_lane: str
    from_ms: float
    to_lane: str
    to_ms: float


@dataclass(frozen=True, slots=True)
class Lane:
    id: str
    role: str
    """One of client, bootstrap, prefill and decode."""
    worker: str
    rank: int
    clock: str
    """Clock that places the lane. "host": the monotonic clock of the router's host. "wall": the time of day
    of another host. "none": it has no lines."""


@dataclass(frozen=True, slots=True)
class RequestStep:
    """A stage of a room's request, with its duration."""

    room: str
    text: str
    ms: float
    first_token: bool
    """Whether the stage is before the first token."""


@dataclass(frozen=True, slots=True)
class CauseInfo:
    reason: str
    text: str
    meaning: str
    """Meaning of the reason, and its consequences."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One room of the request."""

    room: str
    phase: str
    prefill: str
    decode: str
    same_process: bool
    """Whether its decode worker's process is its prefill worker, too."""
    canary: bool
    retry_of: str | None
    from_ms: float
    to_ms: float | None
    cause: CauseInfo | None
    events_dropped: int


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    request_id: str
    state: State
    headline: str
    """Summary of the request in a sentence."""
    cause: CauseInfo | None
    begun_wall_ms: int
    total_ms: float
    """Time until its end, or so far, in milliseconds."""
    first_token_ms: float | None
    attempts: list[Attempt]
    lanes: list[Lane]
    bars: list[Bar]
    links: list[Arrow]
    stages: list[RequestStep]
    lines: list[Line]
    others: list[str]
    """Newest rooms of other requests with the same id, newest first."""
    trace_id: str
    """Trace id of its spans; empty if it has none."""
