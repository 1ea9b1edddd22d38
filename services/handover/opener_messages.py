"""Values that enter and leave a room at its opener: messages of its workers, and requests to its driver.

Messages come in the order in which their worker sent them, each at most once. No message follows an outcome
or the break of the worker's stream. Requests are carried out in the order in which they are returned
(`OpenedRoom.take_requests`). The driver decides nothing when it carries one out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from baton.handover.requests import Report, StartTimer, StopTimer
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.rooms.request import FinishReason, Score, Token, TokenBatch

ANSWERED: Final = Cause(Reason.ANSWERED, "it was answered")
"""Cause with which the end of an answered room is sent to a worker that still has it."""


class TokenMessage(NamedTuple):
    """Message of decode: tokens of one choice."""

    batch: TokenBatch
    """The tokens, with the choice and its finish reason. It is passed on as it is if all of its tokens are
    new."""
    first: int
    """Position of the message's first token in the output of its choice."""
    cached_tokens: int = 0
    """Number of prompt tokens whose KV was cached. 0 if the message does not tell it."""
    is_local: bool = False
    """Whether decode computed the prompt."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Message: the worker has accepted the room, or given it to this router."""

    term: int = 0
    """Number of times that the room was adopted."""


class FirstToken(NamedTuple):
    """Message of prefill: the first token of the output."""

    token: Token
    finish: FinishReason | None
    cached_tokens: int
    """Number of prompt tokens whose KV was cached."""


@dataclass(frozen=True, slots=True)
class ScoreMessage:
    """Message of prefill: log-probabilities of prompt tokens."""

    first: int
    """Index of the first of these tokens in the prompt."""
    scores: Sequence[Score]


class RoomOutcome(NamedTuple):
    """Message: how the worker's part of the room ended. It is the worker's last message about the room."""

    cause: Cause | None
    """Reason for which it ended early. None if the worker completed its part."""


WorkerMessage: TypeAlias = TokenMessage | Accepted | FirstToken | ScoreMessage | RoomOutcome


class Break(Enum):
    """Way in which a worker's stream ended without the room's outcome."""

    LOST = "lost"
    """The stream broke, or was never made."""
    CLOSED = "closed"
    """The worker ended the stream without an error."""
    REPLACED = "replaced"
    """Another process answers at the worker's address. It never got the room."""
    REFUSED = "refused"
    """The worker refused the room, and has nothing of it."""
    DRAINING = "draining"
    """The worker refused the room, and takes no others."""
    FULL = "full"
    """The worker refused the room, because all its places for rooms are taken."""


class RoomTimer(Enum):
    __hash__ = object.__hash__  # Enum's own would hash the name at each look-up in a table
    LIMIT = "limit"
    """Timer of the room's time limit."""
    ROOT = "root"
    """Timer that runs while decode's cause is awaited, after prefill reported that decode closed the room."""
    LINGER = "linger"
    """Timer that runs while outcomes of workers are awaited after the room's end."""


@dataclass(slots=True)
class Open:
    """Request to send the room to its worker on one side. `OpenedRoom.opened` confirms that."""

    side: Side


@dataclass(slots=True)
class Adopt:
    """Request to adopt the room on one side. `OpenedRoom.opened` confirms that it was sent."""

    side: Side
    term: int
    """Term of the adoption, which decode has decided. 0 for decode itself."""


@dataclass(slots=True)
class MarkAdopted:
    """Request to record that the room is this router's from now on."""


@dataclass(slots=True)
class MarkNotAdopted:
    """Request to forget the room, because it is not this router's."""

    cause: Cause


@dataclass(slots=True)
class EndChoice:
    """Request to let decode sample no more tokens of one choice."""

    choice: int


@dataclass(slots=True)
class Leave:
    """Request to send a worker the room's end, and to pass on no more of its messages."""

    side: Side
    cause: Cause


@dataclass(slots=True)
class Stream:
    """Request to record that the first token is about to be passed on."""


@dataclass(slots=True)
class CountPrompt:
    """Request to count the room's prompt as computed on one side."""

    side: Side
    tokens: int
    """Number of its tokens that were not cached."""


@dataclass(slots=True)
class MarkLocal:
    """Request to record that decode computes the prompt, so that prefill has no part of the room."""


@dataclass(slots=True)
class Suspect:
    """Request to give a worker no rooms until it renews its lease."""

    side: Side


@dataclass(slots=True)
class MarkFull:
    """Request to give a worker no rooms until it next reports its load."""

    side: Side


@dataclass(slots=True)
class MarkAnswered:
    """Request to record that the client has its complete response, which the workers complete, too."""

    detail: str
    """Text for the timeline."""


@dataclass(slots=True)
class Stop:
    """Request to record that the client has its complete response, and to end the room on its workers."""


@dataclass(slots=True)
class Fail:
    """Request to end the room with its first cause, and to send its end to both workers."""

    cause: Cause


@dataclass(slots=True)
class FailRest:
    """Request to end an answered room on its other worker, because its hand-over failed."""

    cause: Cause


@dataclass(slots=True)
class FailReader:
    """Request to end the reader's stream with an error."""

    cause: Cause


@dataclass(slots=True)
class MarkRetired:
    """Request to record that a worker has nothing of the room, because it never got it."""

    side: Side


OpenerRequest: TypeAlias = (
    TokenBatch
    | Open
    | Adopt
    | MarkAdopted
    | MarkNotAdopted
    | EndChoice
    | Leave
    | Stream
    | CountPrompt
    | MarkLocal
    | Suspect
    | MarkFull
    | MarkAnswered
    | Stop
    | Fail
    | FailRest
    | FailReader
    | MarkRetired
    | StartTimer[RoomTimer]
    | StopTimer[RoomTimer]
    | Report
)
"""Request of a room at its opener. A `TokenBatch` is passed on to the reader."""
