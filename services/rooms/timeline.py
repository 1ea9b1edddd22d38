"""Lines of a room's timeline, and the closed set of event names with which a line begins.

The writer and the reader of a line use the same member of `Moment`. A worker of another version may use a
name that is not here. Its line is stored as text, and shown as a note.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

BOOTSTRAP: Final = "bootstrap"
"""Source of the lines that the router writes itself. A line of a worker has the worker's name as its source,
or that of one of its ranks."""


class Moment(StrEnum):
    """Event of a room, as a line of its timeline names it. The docstring of each event begins with the
    process that writes the line."""

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
    """Router: the client has its complete answer."""
    RETRACTED = "retracted"
    """Decode and the router: the room is retracted, since older rooms need its pages. This is no failure."""
    WORKER_FULL = "worker full"
    """Router: a worker has no place for the room, and its request waits for one again. This is no failure."""
    GOES_ON = "goes on"
    """Router: the room did not fail, and its request goes on in another room. The detail names that room."""
    RETRIED = "retried"
    """Router: the room failed, and its request goes on in another room. The detail names that room."""
    NOT_RETRIED = "not retried"
    """Router: the request gets no other room. The detail has the reason."""
    GIVEN_UP = "given up"
    """Router: the request no longer waits for another room after this one. The detail has the reason."""
    FILED = "filed"
    """Router: the ended room moves to the stored ones, although a worker never reported it retired."""
    REFUSED = "refused"
    """Router: the request got no room. Only the request's own timeline has the line."""
    ASKED = "asked"
    """Router: the timeline is being read now. The line only gives the present time, and is not shown."""

    ORPHANED = "orphaned"
    """Both workers: the stream of the room's router broke. The room goes on for a while."""
    ADOPTED = "adopted"
    """Both workers and the router: another router reads the room from now on."""
    NOT_ADOPTED = "not adopted"
    """Router: the room of another router was over, or has a reader. The answer is computed again."""
    ACCEPTED = "accepted"
    """Both workers: the worker has taken the room into its roster."""
    VOTED = "voted"
    """Every rank: the vote of this rank, if another rank votes differently."""
    STOPPED = "stopped"
    """Prefill: the room ends early, after its outcome was reported."""
    FAILED = "failed"
    """Both workers and the router: the room ends before it is answered. The detail is its first cause."""
    RETIRED = "retired"
    """Both workers: all memory and slots of the room are given back."""

    DESTINATION_KNOWN = "destination known"
    """Prefill: the decode worker's pages and slot are known on every rank."""
    COMPUTING = "computing"
    """Both workers: pages are reserved, and the first step begins. Decode: only where it computes prompts."""
    CHUNK_COMPUTED = "chunk computed"
    """Prefill: a step has computed a part of the prompt that is not the last."""
    FIRST_TOKEN = "first token"  # noqa: S105 - no password
    """Prefill: the prompt is computed, and its first token is sampled."""
    WRITTEN = "written"
    """Prefill, every rank: all pages that this rank sends are written to decode."""
    SEALED = "sealed"
    """Prefill: the record in decode's metadata slot is sealed."""

    CONNECTED = "connected"
    """Decode: the prefill worker is connected to this worker's memory."""
    LOCAL = "local"
    """Decode: the worker computes the prompt itself. The detail has the uncached tokens and the reason."""
    GRANTED = "granted"
    """Decode: pages and a slot are reserved and exposed, and their addresses are sent to prefill."""
    LANDED = "landed"
    """Decode, every rank: all pages for this rank have arrived, and the seal."""
    ADMITTED = "admitted"
    """Decode: the room has joined the batch."""
    FORKED = "forked"
    """Decode: the request's other choices begin, after the same prompt."""
    CHOICE_ENDED = "choice ended"
    """Decode: the last token of one of several choices is sampled."""
    FINISHED = "finished"
    """Decode: the last token of the room is sampled."""
    QUARANTINED = "quarantined"
    """Decode: the room's memory is kept until nothing can be written to it any more."""

    UNREADABLE = "unreadable"
    """No process: it stands for a line that cannot be decoded."""


class Event(NamedTuple):
    """One line of a room's timeline."""

    wall_ms: int
    source: str
    name: str
    """Name of the event: a `Moment`, or a name that a worker of another version uses."""
    detail: str = ""
    host_us: int = 0
    """Time on the monotonic clock of the writer's host, in microseconds. It is compared only with times of
    the same host."""


Line: TypeAlias = Event | Callable[[], Event]
"""Line of a timeline as it is stored: decoded, or a function that decodes it. Most lines are never read."""
