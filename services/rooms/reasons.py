"""Consequences of the reason for which a room ended, in one table for all decisions."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from baton.rooms.errors import Reason
from baton.rooms.phases import Side


class Fault(Enum):
    """Party at fault for the end of a room. If a worker is at fault, the request goes on in another room, on
    other workers if possible."""

    CALLER = "caller"
    """Fault of the room's opener, which ended the room, such as for a client that hung up. No worker is
    avoided."""
    REQUEST = "request"
    """Fault of the request itself: it would fail on every worker."""
    NOBODY = "nobody"
    """No fault: the end of the room was no failure. The request continues, and no worker is avoided."""
    BOOTSTRAP = "bootstrap"
    """Fault of the router, which therefore cannot open another room for the request."""
    PREFILL = "prefill"
    DECODE = "decode"
    EITHER = "either"
    """Fault of one of the two workers: the failure lay between them."""
    TELLER = "teller"
    """Fault of the worker that reported the failure."""


@dataclass(frozen=True, slots=True)
class ReasonFacts:
    fault: Fault
    meaning: str
    """Explanation of the reason for operators, with advice on where to look."""
    is_failure: bool = True
    """Whether a room that ended for this reason counts as failed in the router's store of rooms, in traces
    and in its log."""
    is_counted: bool = True
    """Whether rooms that ended for this reason count in `baton_rooms_failed_total`. Rooms whose client hung
    up do, though they have not failed."""
    ends_room: bool = True
    """Whether the reason ends the whole room. If not, only one worker's part ends, and the room continues on
    the other worker."""

    @property
    def is_retried(self) -> bool:
        """Whether the request of a room that ended for this reason may continue in another room."""
        return self.ends_room and self.fault not in (Fault.CALLER, Fault.REQUEST, Fault.BOOTSTRAP)

    @property
    def is_attempt(self) -> bool:
        """Whether the ended room counts as an attempt, so that the next room comes after a pause
        (`retracted-is-no-failure`, `full-is-no-failure`)."""
        return self.fault is not Fault.NOBODY


REASONS: Final[Mapping[Reason, ReasonFacts]] = {
    Reason.RETRACTED: ReasonFacts(
        Fault.NOBODY,
        "Nothing is wrong here: the decode worker needed the room's KV pages for older rooms. The request"
        " continues in another room, after the tokens that it already has.",
        is_failure=False,
        is_counted=False,
    ),
    Reason.LOCAL: ReasonFacts(
        Fault.NOBODY,
        "Nothing is wrong here: the decode worker computed the prompt itself, because that was expected to be"
        " sooner. Its lines say how much of the prompt was not cached there. Prefill kept nothing of it.",
        is_failure=False,
        is_counted=False,
        ends_room=False,
    ),
    Reason.WORKER_FULL: ReasonFacts(
        Fault.NOBODY,
        "Nothing is wrong here: all places of the worker were taken, by rooms of other bootstraps that this"
        " one did not know of yet. The request waits for a place again.",
        is_failure=False,
        is_counted=False,
    ),
    Reason.NOT_ADOPTED: ReasonFacts(
        Fault.CALLER,
        "Nothing is wrong here: the room of another bootstrap was over, or that bootstrap still reads it. The"
        " answer is computed again.",
        is_failure=False,
        is_counted=False,
    ),
    Reason.ANSWERED: ReasonFacts(
        Fault.CALLER,
        "The client had all that it asked for, and the workers stopped.",
        is_failure=False,
        is_counted=False,
    ),
    Reason.CLIENT_GONE: ReasonFacts(
        Fault.CALLER,
        "Nothing is wrong here: the client closed its connection, and both workers stopped.",
        is_failure=False,
    ),
    # A failure all the same: where another prompt of the request failed, the client is told so.
    Reason.CANCELLED: ReasonFacts(
        Fault.CALLER, "The room was cancelled by its opener, or another prompt of its request failed."
    ),
    Reason.ORPHANED: ReasonFacts(
        Fault.BOOTSTRAP,
        "The connection of the room's bootstrap broke, and no bootstrap adopted the room within the worker's"
        " `--orphan-ms`. Look for the exit of that bootstrap, or for a client that did not come back.",
    ),
    Reason.DEADLINE: ReasonFacts(
        Fault.EITHER,
        "A phase made no progress within its time limit. The longest bar before the failure shows which"
        " phase, and the text says what it waited for.",
    ),
    Reason.PREFILL_LOST: ReasonFacts(
        Fault.PREFILL,
        "The prefill process died, left, or was silent for longer than its lease. Look for its exit in the"
        " platform's events, and at the end of its log.",
    ),
    Reason.DECODE_LOST: ReasonFacts(
        Fault.DECODE,
        "The decode process died, left, or was silent for longer than its lease. Look for its exit in the"
        " platform's events, and at the end of its log.",
    ),
    Reason.BOOTSTRAP_LOST: ReasonFacts(
        Fault.BOOTSTRAP, "The bootstrap stopped, or lost the room, before the room had ended."
    ),
    Reason.CONNECT_FAILED: ReasonFacts(
        Fault.EITHER,
        "The decode and the prefill worker could not connect (addresses, network policy, KV layouts that do"
        " not fit), or prefill rejected the destination pages that decode sent. The text says which.",
    ),
    Reason.TRANSFER_FAILED: ReasonFacts(
        Fault.EITHER,
        "A write of KV pages between the two workers failed, or its end was signalled too early.",
    ),
    Reason.RECORD_CORRUPT: ReasonFacts(
        Fault.EITHER,
        "The metadata that arrived (first token, room number) is not what this room's prefill worker should"
        " have written. It was not used. The memory stays reserved until no write can reach it any more.",
    ),
    Reason.PAGES_CORRUPT: ReasonFacts(
        Fault.EITHER,
        "The KV pages that arrived differ from those that were computed. They were not used. Check the"
        " network between the two hosts, and their memory.",
    ),
    Reason.RECEIVER_CLOSED: ReasonFacts(
        Fault.DECODE, "The decode worker ended the room first; its lines say why."
    ),
    Reason.MEMORY_REVOKED: ReasonFacts(
        Fault.DECODE,
        "The decode worker took back the memory that prefill workers could write to, because another one"
        " neither answered nor was known to be dead. Look for a prefill worker that is stopped or cut off.",
    ),
    Reason.ENGINE_FAILED: ReasonFacts(
        Fault.TELLER, "A step of the model raised an error. The worker's log has its traceback."
    ),
    Reason.GRAMMAR_FAILED: ReasonFacts(
        Fault.REQUEST,
        "The worker could not constrain the answer as its request asked (grammar, JSON schema, tool call)."
        " The text says why. Another worker would fail in the same way.",
    ),
    Reason.GROUP_BROKEN: ReasonFacts(
        Fault.TELLER,
        "A rank of the worker died, did not answer in time, or disagreed with the others. The text names the"
        " rank and the turn of the worker's loop. The whole worker is restarted.",
    ),
    Reason.DRAINING: ReasonFacts(
        Fault.TELLER, "The worker was draining: it was about to stop, and took no new rooms."
    ),
    Reason.REFUSED: ReasonFacts(Fault.TELLER, "The worker rejected the room; the text says why."),
}

LOST: Final[Mapping[Side, Reason]] = {Side.PREFILL: Reason.PREFILL_LOST, Side.DECODE: Reason.DECODE_LOST}
