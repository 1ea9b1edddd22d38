"""Lines of a room's timeline, and the closed set of words that a line begins with.

The writer and the reader of a line name the same member. A worker of another version may use a word that is
not here. It is stored as text, and shown as a note.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

BOOTSTRAP: Final = "bootstrap"
"""Source of the router's own lines. A worker's lines have its name, or that of one of its ranks."""


class Moment(StrEnum):
    """Event of a room, as a line of its timeline names it. The docstring names the writer first."""

    QUEUED = "queued"
    """Router: no pair of workers has space for the request yet."""
    OPENED = "opened"
    """Router: the room has its two workers, and both are about to be called."""
    FIRST_TOKEN_PASSED_ON = "first token passed on"  # noqa: S105 - no password
    """Router: the client can read its first token."""
    PREFILL_OUTCOME = "prefill outcome"
    """Router: the prefill worker's stream ended with this outcome."""
    DECODE_OUTCOME = "decode outcome"
    """Router: the decode worker's stream ended with this outcome."""
    BROKEN_OFF = "broken off"
    """Router: the room ends before its answer is complete. The detail counts the tokens passed on."""
    ANSWERED = "answered"
    """Router: the client has all that it asked for."""
    RETRACTED = "retracted"
    """Decode and the router: older rooms need the room's pages. It is no failure."""
    GOES_ON = "goes on"
    """Router: the room was retracted, and its request goes on in the room that is named."""
    RETRIED = "retried"
    """Router: the room failed, and its request goes on in the room that is named."""
    NOT_RETRIED = "not retried"
    """Router: the request gets no other room. The detail has the reason."""
    GIVEN_UP = "given up"
    """Router: the request waits for no next room any more. The detail has the reason."""
    FILED = "filed"
    """Router: the ended room is filed although a worker never reported it retired."""
    REFUSED = "refused"
    """Router: the request got no room. Only the request's own timeline has the line."""
    ASKED = "asked"
    """Router: somebody reads the timeline. It is only a time to compare with, and is not shown."""

    ACCEPTED = "accepted"
    """Both workers: the room is in the worker's roster."""
    VOTED = "voted"
    """Every rank: its vote, while another rank votes differently."""
    STOPPED = "stopped"
    """Prefill: the room was to end early, after its outcome was reported."""
    FAILED = "failed"
    """Both workers and the router: the room ends before it is answered. The detail is its first cause."""
    RETIRED = "retired"
    """Both workers: all memory and slots of the room are given back."""

    DESTINATION_KNOWN = "destination known"
    """Prefill: the decode worker's pages and slot are known on every rank."""
    COMPUTING = "computing"
    """Both workers: pages are reserved, and the first step begins. Decode computes local rooms alone."""
    CHUNK_COMPUTED = "chunk computed"
    """Prefill: a step ended that was not the prompt's last."""
    FIRST_TOKEN = "first token"  # noqa: S105 - no password
    """Prefill: the prompt is computed, and its first token is drawn."""
    WRITTEN = "written"
    """Prefill, every rank: all that this rank sends is written."""
    SEALED = "sealed"
    """Prefill: the record is sealed in the receiver's slot."""

    CONNECTED = "connected"
    """Decode: the prefill worker is connected to this worker's memory."""
    LOCAL = "local"
    """Decode: it computes the prompt itself. The detail has the uncached tokens and the reason."""
    GRANTED = "granted"
    """Decode: pages and a slot are reserved and exposed, and their addresses are sent to prefill."""
    LANDED = "landed"
    """Decode, every rank: this rank has all of its pages, and the seal."""
    ADMITTED = "admitted"
    """Decode: the room joined the batch."""
    FORKED = "forked"
    """Decode: further choices of the request begin behind the same prompt."""
    CHOICE_ENDED = "choice ended"
    """Decode: one of several choices has its last token."""
    FINISHED = "finished"
    """Decode: the last token is drawn."""
    QUARANTINED = "quarantined"
    """Decode: the room's memory is kept until nothing can be written to it any more."""

    UNREADABLE = "unreadable"
    """No writer: a line arrived that cannot be decoded."""


class Event(NamedTuple):
    """One line of a room's timeline."""

    wall_ms: int
    source: str
    name: str
    """A `Moment`, or a word of another version."""
    detail: str = ""
    host_us: int = 0
    """Monotonic clock of the writer's host, in microseconds, for comparison within one host."""


Line: TypeAlias = Event | Callable[[], Event]
"""A line as it is stored: decoded, or as it came with its decoder. Most are never read."""
