"""What is a request's story made of? Times are milliseconds since its first line.

The JSON of `/requests/{id}` is these classes, field by field.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final


class State(StrEnum):
    """Where a request is, or how it ended."""

    QUEUED = "queued"
    """No pair of workers has had space for it yet."""
    PREFILL = "prefill"
    """Its client waits for the first token."""
    STREAMING = "streaming"
    RETRYING = "retrying"
    """Its room failed; it may go on in another."""
    PAUSED = "paused"
    """Its worker needed its pages; it goes on in another room."""
    ANSWERED = "answered"
    FAILED = "failed"
    GONE = "gone"
    """Its client hung up."""
    REFUSED = "refused"
    """It never had a room."""


OVER: Final = frozenset({State.ANSWERED, State.FAILED, State.GONE, State.REFUSED})


class LineKind(StrEnum):
    """What a line is, and so how it is drawn."""

    EVIDENCE = "evidence"
    """Something that one rank saw."""
    VOTE = "vote"
    """What one rank wished, where the ranks differed."""
    MOVE = "move"
    """What all ranks of a worker did together, or the bootstrap."""
    SEAL = "seal"
    TOKEN = "token"  # noqa: S105 - a kind of line
    """The first token, on its way."""
    FAILURE = "failure"
    END = "end"
    NOTE = "note"


class Activity(Enum):
    """What a stretch of time was spent on, in one lane."""

    WAIT = "wait"
    COMPUTE = "compute"
    TRANSFER = "transfer"
    AGREE = "agree"
    STREAM = "stream"
    STALL = "stall"
    """The stream stands still, because its room failed."""
    PAUSE = "pause"
    """The stream stands still, because its worker needed the pages."""
    CLOSE = "close"
    KEPT = "kept"
    """Failed; memory is kept until nothing can be written to it any more."""


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
    """None while it goes on."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """What one lane said to another."""

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
    """client, bootstrap, prefill or decode."""
    worker: str
    rank: int
    clock: str
    """host: placed by the monotonic clock of the bootstrap's host; wall: by the time of day of another host;
    none: it said nothing."""


@dataclass(frozen=True, slots=True)
class RequestStep:
    """A step on the way of a room's request, and how long it took."""

    room: str
    text: str
    ms: float
    first_token: bool
    """It is on the way to the first token."""


@dataclass(frozen=True, slots=True)
class CauseInfo:
    reason: str
    text: str
    meaning: str
    """Of the reason, and what follows from it."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One room of the request."""

    room: str
    phase: str
    prefill: str
    decode: str
    same_process: bool
    """Its decode worker's process is its prefill worker, too."""
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
    """What happened, in a sentence."""
    cause: CauseInfo | None
    begun_wall_ms: int
    total_ms: float
    """Until its end, or so far."""
    first_token_ms: float | None
    attempts: list[Attempt]
    lanes: list[Lane]
    bars: list[Bar]
    links: list[Arrow]
    stages: list[RequestStep]
    lines: list[Line]
    others: list[str]
    """Newest rooms of other requests that came with the same id, newest first."""
    trace_id: str
    """Under which its spans are found; empty where it has none."""
