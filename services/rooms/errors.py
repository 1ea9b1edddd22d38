"""Errors of the pure core, by whose fault they are.

There are three kinds. A `LocalBug` stops the process, a `PeerFault` ends at most one room, and a `Refusal`
answers a caller whose request cannot be granted.
"""

from dataclasses import dataclass
from enum import Enum

from baton.rooms.phases import Side


class Reason(Enum):
    """Reason that a room ended for. A closed set: it is a metric label, a wire value and a word of
    timelines."""

    RETRACTED = "retracted"
    """Not a failure: the room's pages are needed, and its request goes on in another room. It stands first,
    since of the reasons that ranks give the one listed last is agreed."""
    LOCAL = "local"
    """Not a failure, and reported by prefill workers only: decode computes the prompt itself, and the room
    goes on there."""
    ANSWERED = "answered"
    """Not a failure: the client has its complete answer, and the rest is not needed."""
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
    """The pages that landed differ from what prefill computed."""
    RECEIVER_CLOSED = "receiver_closed"
    MEMORY_REVOKED = "memory_revoked"
    """The decode worker took its exposed memory back, because another sender did not answer."""
    ENGINE_FAILED = "engine_failed"
    GRAMMAR_FAILED = "grammar_failed"
    """A worker could not constrain the output by the request's grammar, or could not go on doing so."""
    GROUP_BROKEN = "group_broken"
    """A rank of the worker died, did not answer in time, or disagreed with the others."""
    DRAINING = "draining"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Cause:
    """First cause of a room's end, with a text for its client."""

    reason: Reason
    text: str


class RoomError(Exception):
    """Base of everything the pure core raises."""


class LocalBug(RoomError):
    """This process broke its own rules. It has to stop rather than guess."""


class IllegalMove(LocalBug):
    """A verdict that the transition table does not list (`moves-listed`)."""


class RostersDiverged(LocalBug):
    """The ranks of a group disagree about which rooms exist (`divergence-detected`)."""


class PeerFault(RoomError):
    """A peer sent something that does not fit. It ends at most the room that it names."""


class StaleGeneration(PeerFault):
    """A message was addressed to an earlier tenancy of the same slot."""


class Refusal(RoomError):
    """A caller's request cannot be granted. The text is for the caller."""


class UnknownRoom(Refusal):
    """The room is not known here: it was never opened, or is retired (`unknown-has-one-meaning`)."""


class RoomExists(Refusal):
    """The room id is or was in use (`room-unique`)."""


class RosterFull(Refusal):
    """The roster has no free entry."""


class NotGone(Refusal):
    """A worker was reported gone, but it answers."""


class UnknownWorker(Refusal):
    """No worker of that incarnation holds a lease."""


class DeclaredGone(UnknownWorker):
    """This very incarnation was declared gone, and others may have reused its memory. If it lives, it has to
    end."""


class TurnStalled(Refusal):
    """The worker's turns do not go on, so none of its rooms would."""


class NotConnected(Refusal):
    """The caller has not connected to this incarnation."""


class WorkerRefused(Refusal):
    """A registration does not fit the stack. `field` names the difference."""

    def __init__(self, field: str, want: str, got: str) -> None:
        super().__init__(f"{field} differs: this stack has {want}, the worker has {got}")
        self.field = field


class NameInUse(Refusal):
    """Another live incarnation holds the worker's name."""


class NoCapacity(Refusal):
    """Workers of the side exist, but none has space now. Waiting can help."""

    def __init__(self, text: str, side: Side | None = None) -> None:
        """`side`: the side without space, if it is one only."""
        super().__init__(text)
        self.side = side


class NoSuchWorker(Refusal):
    """No worker of the side is ready. The text names the side."""


class NoneReady(NoSuchWorker):
    """No worker of the side is ready, however small the request is."""

    def __init__(self, side: Side) -> None:
        super().__init__(f"no {side.value} worker is ready")
        self.side = side


class TooLarge(NoSuchWorker):
    """No worker of the side, in whatever state, can ever hold the tokens of the request."""
