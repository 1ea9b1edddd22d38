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
    """Reason: the room was retracted (preempted) for its pages, and its request continues in another room.
    This is no failure.

    It is listed first, because if ranks give several reasons, the one listed last is agreed. So any other
    reason prevails.
    """
    LOCAL = "local"
    """Reason: the decode worker computes the prompt itself, and the room continues there. Only prefill
    workers report this, and it is no failure."""
    WORKER_FULL = "worker_full"
    """Reason: a worker had no place for the room, and its request waits for one again. Only the router gives
    this reason, and it is no failure."""
    NOT_ADOPTED = "not_adopted"
    """Reason: the router could not adopt the room of another router, so it computes the answer again. Only
    that router records it, and it is no failure."""
    ANSWERED = "answered"
    """Reason: the client has its complete response, and the workers may stop. This is no failure."""
    CLIENT_GONE = "client_gone"
    CANCELLED = "cancelled"
    ORPHANED = "orphaned"
    """Reason: the stream of the room's router broke, and no router adopted the room in time."""
    DEADLINE = "deadline"
    PREFILL_LOST = "prefill_lost"
    DECODE_LOST = "decode_lost"
    BOOTSTRAP_LOST = "bootstrap_lost"
    CONNECT_FAILED = "connect_failed"
    TRANSFER_FAILED = "transfer_failed"
    RECORD_CORRUPT = "record_corrupt"
    PAGES_CORRUPT = "pages_corrupt"
    """Reason: the pages that arrived at decode differ from those that prefill computed."""
    RECEIVER_CLOSED = "receiver_closed"
    MEMORY_REVOKED = "memory_revoked"
    """Reason: the decode worker took its exposed memory back, because another sender did not answer."""
    ENGINE_FAILED = "engine_failed"
    GRAMMAR_FAILED = "grammar_failed"
    """Reason: a worker could not constrain the output by the request's grammar, at the beginning or later."""
    GROUP_BROKEN = "group_broken"
    """Reason: a rank of the worker died, did not answer in time, or disagreed with the other ranks."""
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
    """Error: this process broke a rule of its own. It has to stop, because its state may be wrong."""


class IllegalMove(LocalBug):
    """Error: the verdict of a turn demands a move that the room's transition table does not list
    (`moves-listed`)."""


class RostersDiverged(LocalBug):
    """Error: the ranks of a worker disagree about which rooms exist (`divergence-detected`)."""


class PeerFault(RoomError):
    """Error: another worker sent a message that does not fit this worker's state. It ends at most the room
    that the message names."""


class StaleGeneration(PeerFault):
    """Error: a message named an earlier use (generation) of a metadata slot than the present one."""


class Refusal(RoomError):
    """Error: a caller's request cannot be granted. The text is for the caller."""


class UnknownRoom(Refusal):
    """Error: this process does not know the room. It was never opened, or is retired
    (`unknown-has-one-meaning`)."""


class RoomExists(Refusal):
    """Error: there is, or was, already a room with this id (`room-unique`)."""


class NotOrphaned(Refusal):
    """Error: a room cannot be adopted, because it has a router, or is ending."""


class RosterFull(Refusal):
    """Error: the worker has as many rooms as its roster has entries."""


class NotGone(Refusal):
    """Error: a worker was reported to have exited, but it answers."""


class UnknownWorker(Refusal):
    """Error: no worker with the given incarnation (id of one run of a process) has a lease."""


class DeclaredGone(UnknownWorker):
    """Error: the worker's incarnation was declared gone, so other workers may have reused its memory. If its
    process still runs, it has to end."""


class TurnStalled(Refusal):
    """Error: a worker takes no more turns (iterations of its loop), so none of its rooms would make
    progress."""


class NotConnected(Refusal):
    """Error: the sender is not connected to the memory that a message of the decode worker names."""


class WorkerRefused(Refusal):
    """Error: a worker's registration differs from the other workers of the stack, in the value that `field`
    names."""

    def __init__(self, field: str, want: str, got: str) -> None:
        super().__init__(f"{field} differs: this stack has {want}, the worker has {got}")
        self.field = field


class NameInUse(Refusal):
    """Error: another live process is registered under the worker's name."""


class NoCapacity(Refusal):
    """Error: workers of a side exist, but none has space for the request now. Waiting can help."""

    def __init__(self, text: str, side: Side | None = None) -> None:
        """Make the error. `side`: the side without space. None if it is not one side alone."""
        super().__init__(text)
        self.side = side


class NoSuchWorker(Refusal):
    """Error: no worker of a side can take the request, and waiting in the queue does not help. The text names
    the side."""


class NoneReady(NoSuchWorker):
    """Error: no worker of a side is ready, so not even the smallest request can be served."""

    def __init__(self, side: Side) -> None:
        super().__init__(f"no {side.value} worker is ready")
        self.side = side


class TooLarge(NoSuchWorker):
    """Error: the request has more tokens than any worker of a side can ever hold."""
