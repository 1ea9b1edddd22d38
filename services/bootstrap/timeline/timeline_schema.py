"""Parts of a request's timeline. Times are in milliseconds since its first line.

The JSON of `/requests/{id}` has the fields of these classes.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final


class State(StrEnum):
    """State of a request in its timeline: where it is, or how it ended."""

    QUEUED = "queued"
    """The request waits: no pair of workers has had space for it yet."""
    PREFILL = "prefill"
    """The request has a room, and its client waits for the first token."""
    STREAMING = "streaming"
    RETRYING = "retrying"
    """The request's room failed, and it may go on in another room."""
    PAUSED = "paused"
    """The request's room was retracted since its worker needed the pages. The request goes on in another
    room."""
    ANSWERED = "answered"
    FAILED = "failed"
    GONE = "gone"
    """The request's client hung up."""
    REFUSED = "refused"
    """The request was refused before it had a room."""


OVER: Final = frozenset({State.ANSWERED, State.FAILED, State.GONE, State.REFUSED})


class LineKind(StrEnum):
    """Kind of a timeline line, which decides how the line is drawn."""

    EVIDENCE = "evidence"
    """Line about a fact that one rank observed."""
    VOTE = "vote"
    """Line about the vote of one rank, written if the ranks voted differently."""
    MOVE = "move"
    """Line about a step in the room's life that all ranks of a worker, or the router, made."""
    SEAL = "seal"
    TOKEN = "token"  # noqa: S105 - a kind of line
    """Line about the first token: that it is drawn, or passed on."""
    FAILURE = "failure"
    END = "end"
    NOTE = "note"


class Activity(Enum):
    """What a lane's worker or client does during a bar of the drawing."""

    WAIT = "wait"
    COMPUTE = "compute"
    TRANSFER = "transfer"
    AGREE = "agree"
    STREAM = "stream"
    STALL = "stall"
    """The client's stream pauses because its room failed."""
    PAUSE = "pause"
    """The client's stream pauses because its room was retracted: the worker needed the pages."""
    CLOSE = "close"
    KEPT = "kept"
    """The room has failed, and its memory stays reserved until nothing can be written to it any more."""


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
    """Time at which the bar ends, in milliseconds; None while it goes on."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """Arrow in the drawing: a message from one lane to another."""

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
    """Role of the lane: client, bootstrap, prefill or decode."""
    worker: str
    rank: int
    clock: str
    """Clock by which the lane's lines are placed. "host": the monotonic clock of the router's host. "wall":
    the time of day of another host. "none": the lane has no lines."""


@dataclass(frozen=True, slots=True)
class RequestStep:
    """Stage of a request in one room, with its duration."""

    room: str
    text: str
    ms: float
    first_token: bool
    """Whether the stage is part of the time to the first token."""


@dataclass(frozen=True, slots=True)
class CauseInfo:
    reason: str
    text: str
    meaning: str
    """Explanation of the reason for operators, with advice on where to look."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One of the rooms that a request had, as part of its timeline."""

    room: str
    phase: str
    prefill: str
    decode: str
    same_process: bool
    """Whether the decode worker's process would be the prefill worker, too, so that nothing is handed
    over."""
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
    """Headline of the request: a summary in one or more sentences."""
    cause: CauseInfo | None
    begun_wall_ms: int
    total_ms: float
    """Time until the request ended, or until now, in milliseconds."""
    first_token_ms: float | None
    attempts: list[Attempt]
    lanes: list[Lane]
    bars: list[Bar]
    links: list[Arrow]
    stages: list[RequestStep]
    lines: list[Line]
    others: list[str]
    """Ids of the last rooms of other requests with the same request id, newest first."""
    trace_id: str
    """Trace id of the request's spans; empty if it has none."""
