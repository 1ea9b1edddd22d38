"""Errors of the pure core (code without I/O), and the reasons for which rooms end.

There are three kinds of errors, by whose fault they are. A `LocalBug` stops the process, a `PeerFault` ends
at most one room, and a `Refusal` answers a caller whose request cannot be granted.
"""

from dataclasses import dataclass
from enum import Enum

from baton.rooms.phases import Side


class Reason(Enum):
    """Reason for which a room ended. The set is closed: a reason is a metric label, a wire value and a word
    of timelines."""

    RETRACTED = "retracted"
    """The room was retracted: its pages are needed, and its request goes on in another room. This is no
    failure.

    It stands first, so that any reason of another rank prevails: if ranks give several, the last listed is
    agreed.
    """
    LOCAL = "local"
    """The decode worker computes the prompt itself, and the room goes on there. Only prefill workers report
    this, and it is no failure."""
    ANSWERED = "answered"
    """The client has its complete answer, and the workers may stop. This is no failure."""
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
    """The pages that arrived at decode differ from those that prefill computed."""
    RECEIVER_CLOSED = "receiver_closed"
    MEMORY_REVOKED = "memory_revoked"
    """The decode worker took its exposed memory back, because another sender did not answer."""
    ENGINE_FAILED = "engine_failed"
    GRAMMAR_FAILED = "grammar_failed"
    """A worker could not constrain the output by the request's grammar, at the beginning or later."""
    GROUP_BROKEN = "group_broken"
    """A rank of the worker died, did not answer in time, or disagreed with the other ranks."""
    DRAINING = "draining"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Cause:
    """First cause of a room's end: its reason, and a text for the client."""

    reason: Reason
    text: str


class RoomError(Exception):
    """Base class of all errors that the pure core raises."""


class LocalBug(RoomError):
    """This process broke a rule of its own. It has to stop rather than guess."""


class IllegalMove(LocalBug):
    """The verdict of a turn demands a move that the room's transition table does not list
    (`moves-listed`)."""


class RostersDiverged(LocalBug):
    """The ranks of a worker disagree about which rooms exist (`divergence-detected`)."""


class PeerFault(RoomError):
    """Another worker sent a message that does not fit. It ends at most the room that the message names."""


class StaleGeneration(PeerFault):
    """A message named an older use (generation) of a metadata slot than the present one."""


class Refusal(RoomError):
    """A caller's request cannot be granted. The text is for the caller."""


class UnknownRoom(Refusal):
    """The room is not known to this process: it was never opened, or is retired
    (`unknown-has-one-meaning`)."""


class RoomExists(Refusal):
    """A room of this id exists already, or did (`room-unique`)."""


class RosterFull(Refusal):
    """The worker holds as many rooms as its roster has entries."""


class NotGone(Refusal):
    """A worker was reported to have exited, but it answers."""


class UnknownWorker(Refusal):
    """No worker of the given incarnation holds a lease."""


class DeclaredGone(UnknownWorker):
    """The worker's incarnation was declared gone, so others may have reused its memory. If its process still
    runs, it has to end."""


class TurnStalled(Refusal):
    """The turns (iterations of the loop) of a worker have stopped, so none of its rooms would make
    progress."""


class NotConnected(Refusal):
    """The caller has not connected to this incarnation of the worker."""


class WorkerRefused(Refusal):
    """A worker's registration differs from the other workers of the stack, in the value that `field`
    names."""

    def __init__(self, field: str, want: str, got: str) -> None:
        super().__init__(f"{field} differs: this stack has {want}, the worker has {got}")
        self.field = field


class NameInUse(Refusal):
    """Another live process is registered under the worker's name."""


class NoCapacity(Refusal):
    """Workers of the side exist, but none has space for the request now. Waiting can help."""

    def __init__(self, text: str, side: Side | None = None) -> None:
        """Make the error. `side`: the side without space, None if it is not one side alone."""
        super().__init__(text)
        self.side = side


class NoSuchWorker(Refusal):
    """No worker of a side can take the request now, and waiting in the queue does not help. The text names
    the side."""


class NoneReady(NoSuchWorker):
    """No worker of the side is ready, so not even the smallest request could be served."""

    def __init__(self, side: Side) -> None:
        super().__init__(f"no {side.value} worker is ready")
        self.side = side


class TooLarge(NoSuchWorker):
    """The request has more tokens than any worker of the side can hold, whatever the worker's state."""
