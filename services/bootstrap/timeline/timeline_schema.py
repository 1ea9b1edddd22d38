"""Parts of a request's timeline. Times are in milliseconds since its first line.

The JSON of `/requests/{id}` has the fields of these classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final


class State(StrEnum):
    """State of a request in its timeline: where it is, or how it ended."""

    QUEUED = "queued"
    """State of a request that waits, because no pair of workers has had space for it yet."""
    PREFILL = "prefill"
    """State of a request that has a room, and whose client waits for the first token."""
    STREAMING = "streaming"
    RETRYING = "retrying"
    """State of a request whose room failed, and which may continue in another room."""
    PAUSED = "paused"
    """State of a request whose room was retracted, because its worker needed the pages, or refused by a full
    worker. The request continues in another room."""
    ANSWERED = "answered"
    FAILED = "failed"
    GONE = "gone"
    """State of a request whose client hung up."""
    REFUSED = "refused"
    """State of a request that was refused before it had a room."""


OVER: Final = frozenset({State.ANSWERED, State.FAILED, State.GONE, State.REFUSED})


class LineKind(StrEnum):
    """Kind of a timeline line, which decides how the line is drawn."""

    EVIDENCE = "evidence"
    """Kind of a line about a fact that one rank observed."""
    VOTE = "vote"
    """Kind of a line about the vote of one rank, which is written if the ranks voted differently."""
    MOVE = "move"
    """Kind of a line about a move of the room that all ranks of a worker, or the router, made."""
    SEAL = "seal"
    TOKEN = "token"  # noqa: S105 - a kind of line
    """Kind of a line about the first token: it was sampled, or passed on to the client."""
    FAILURE = "failure"
    END = "end"
    NOTE = "note"


class Activity(Enum):
    """Activity of a worker or of the client, as a bar in the drawing of a timeline shows it."""

    WAIT = "wait"
    COMPUTE = "compute"
    TRANSFER = "transfer"
    AGREE = "agree"
    STREAM = "stream"
    STALL = "stall"
    """Activity: the client's stream stands still, because its room failed."""
    PAUSE = "pause"
    """Activity: the client's stream stands still, because its room was retracted for its pages."""
    CLOSE = "close"
    KEPT = "kept"
    """Activity: the room has failed, and the worker keeps its memory reserved until nothing can be written to
    it any more."""


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
    """Time at which the bar ends, in milliseconds since the first line. None while it continues."""


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
    """Whether the stage counts towards the time to the first token."""


@dataclass(frozen=True, slots=True)
class CauseInfo:
    reason: str
    text: str
    meaning: str
    """Explanation of the reason for operators, with advice on where to look."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One of a request's rooms, as the request's timeline lists it."""

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
    """Milliseconds from the request's first line until its end, or until now."""
    first_token_ms: float | None
    attempts: list[Attempt]
    lanes: list[Lane]
    bars: list[Bar]
    links: list[Arrow]
    stages: list[RequestStep]
    lines: list[Line]
    others: list[str]
    """Ids of other requests with the same request id, newest first. Each is given by the id of its last
    room."""
    trace_id: str
    """Trace id of the request's spans; empty if it has none."""
    bootstrap: str = ""
    """Address of the bootstrap whose timeline this is; empty for the one that was called."""
    unanswered: Sequence[str] = ()
    """Sentences that say which other bootstraps did not answer."""
