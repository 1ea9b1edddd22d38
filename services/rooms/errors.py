"""What can go wrong in a room, and whose fault is it?

Three kinds, never mixed: `LocalBug` stops the process, `PeerFault` ends at most one room, `Refusal`
is an answer to a caller who asked for something that cannot be given.
"""

from dataclasses import dataclass
from enum import Enum

from baton.rooms.phases import Side


class Reason(Enum):
    """Why a room failed. A closed set: it is a metric label, a wire value and a timeline word."""

    RETRACTED = "retracted"
    """Not a failure: its pages are needed, and its request goes on in another room. It stands first: of the
    reasons that ranks give, the one listed last is agreed, and whatever else ended the room is more."""
    LOCAL = "local"
    """Not a failure, and said by prefill workers alone: decode computes the prompt itself, and the room goes
    on there."""
    ANSWERED = "answered"
    """Not a failure: the client has all that it asked for, and the rest is not needed."""
    CLIENT_GONE = "client_gone"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    PREFILL_LOST = "prefill_lost"
    DECODE_LOST = "decode_lost"
    BOOTSTRAP_LOST = "bootstrap_lost"
    CONNECT_FAILED = "connect_failed"
    TRANSFER_FAILED = "transfer_failed"
    RECORD_CORRUPT = "record_corrupt"
    PAGES_CORRUPT = "pages_corrupt"
    """What landed is not what the prefill worker computed."""
    RECEIVER_CLOSED = "receiver_closed"
    MEMORY_REVOKED = "memory_revoked"
    """The decode worker took its exposed memory back, because some other sender did not answer."""
    ENGINE_FAILED = "engine_failed"
    GRAMMAR_FAILED = "grammar_failed"
    """A worker cannot hold the answer to the request's grammar, or not any further."""
    GROUP_BROKEN = "group_broken"
    """A rank of the worker died, did not answer in time, or no longer agreed with the others."""
    DRAINING = "draining"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Cause:
    """The first thing that ended a room, in words that its client can act on."""

    reason: Reason
    text: str


class RoomError(Exception):
    """Base of everything the pure core raises."""


class LocalBug(RoomError):
    """This process broke its own rules. It must stop rather than guess."""


class IllegalMove(LocalBug):
    """A verdict that the transition table does not list (`moves-listed`)."""


class RostersDiverged(LocalBug):
    """The ranks of a group disagree about which rooms exist (`divergence-detected`)."""


class PeerFault(RoomError):
    """A peer sent something that does not fit. Ends at most the room it names."""


class StaleGeneration(PeerFault):
    """Something addressed to an earlier tenant of the same slot."""


class Refusal(RoomError):
    """A request of a caller that cannot be granted; the text is for the caller."""


class UnknownRoom(Refusal):
    """No such room here: never opened, or retired. One meaning everywhere (`unknown-has-one-meaning`)."""


class RoomExists(Refusal):
    """The room id is or was in use (`room-unique`)."""


class RosterFull(Refusal):
    """Every place of the roster is taken."""


class NotGone(Refusal):
    """A worker was reported gone, and it answers."""


class UnknownWorker(Refusal):
    """No worker of that incarnation holds a lease."""


class DeclaredGone(UnknownWorker):
    """This very incarnation was declared gone, and others may have reused memory on it: if it lives it
    ends."""


class TurnStalled(Refusal):
    """The turns of the worker do not go on: no room of it would."""


class NotConnected(Refusal):
    """The caller has not connected to this incarnation."""


class WorkerRefused(Refusal):
    """A registration that does not fit the stack; names the differing field."""

    def __init__(self, field: str, want: str, got: str) -> None:
        super().__init__(f"{field} differs: this stack has {want}, the worker has {got}")
        self.field = field


class NameInUse(Refusal):
    """Another live incarnation holds the worker's name."""


class NoCapacity(Refusal):
    """Workers of the role exist, but none has space now. Waiting can help."""

    def __init__(self, text: str, side: Side | None = None) -> None:
        """`side`: the one that has none, where it is one alone."""
        super().__init__(text)
        self.side = side


class NoSuchWorker(Refusal):
    """No worker of the role is ready. The text names the role."""


class NoneReady(NoSuchWorker):
    """No worker of the role is ready, however little is asked of it."""

    def __init__(self, side: Side) -> None:
        super().__init__(f"no {side.value} worker is ready")
        self.side = side


class TooLarge(NoSuchWorker):
    """No worker of the role, in whatever state, can ever hold so many tokens."""
