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
    """Bootstrap: no pair of workers has space for the request yet."""
    OPENED = "opened"
    """Bootstrap: the room has its two workers, and both are about to be asked for it."""
    FIRST_TOKEN_PASSED_ON = "first token passed on"  # noqa: S105 - no password
    """Bootstrap: the client can read its first token."""
    PREFILL_OUTCOME = "prefill outcome"
    """Bootstrap: the prefill worker's stream ended with this outcome."""
    DECODE_OUTCOME = "decode outcome"
    """Bootstrap: the decode worker's stream ended with this outcome."""
    BROKEN_OFF = "broken off"
    """Bootstrap: the room ends before its answer is whole; the detail counts what was passed on."""
    ANSWERED = "answered"
    """Bootstrap: the client has all that it asked for."""
    RETRACTED = "retracted"
    """Decode and the bootstrap: the room's pages are needed by rooms that are older; it is no failure."""
    GOES_ON = "goes on"
    """Bootstrap: the room was retracted, and its request goes on in the room that is named."""
    RETRIED = "retried"
    """Bootstrap: the room failed, and its request goes on in the room that is named."""
    NOT_RETRIED = "not retried"
    """Bootstrap: no other room follows this one, and the detail says why."""
    GIVEN_UP = "given up"
    """Bootstrap: nobody waits here for the room that was to follow; the detail says why."""
    FILED = "filed"
    """Bootstrap: the room is put away although a worker never reported it retired."""
    REFUSED = "refused"
    """Bootstrap: the request got no room. The line stands in the request's story alone."""
    ASKED = "asked"
    """Bootstrap: somebody asks for the story. It is only a time to compare with, and is not shown."""

    ACCEPTED = "accepted"
    """Both workers: the room is in the worker's roster."""
    VOTED = "voted"
    """Every rank: its wish, where another rank does not wish the same yet."""
    STOPPED = "stopped"
    """Prefill: the room was to end early, after its outcome was reported."""
    FAILED = "failed"
    """Both workers and the bootstrap: the room ends before it is answered; the detail is its first cause."""
    RETIRED = "retired"
    """Both workers: everything that the room held is given back."""

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
    """Decode: it has reached the prefill worker."""
    LOCAL = "local"
    """Decode: it computes the prompt itself; the detail says how much of it is missing there, and why."""
    GRANTED = "granted"
    """Decode: pages and a slot are reserved and exposed, and the sender is told where they are."""
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
    """Nobody: a line came that cannot be read."""


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
