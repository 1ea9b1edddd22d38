"""Phases of a room on one rank, and the table of moves between them.

Seven state machines take part in a hand-over. This module has the first, once as a table for each side.

    machine    where                            states
    room       one rank: `Room.phase`           BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING or COMPUTING,
                                                SEALING, SUCCESS, FAILED, RETIRED
    page       one rank: `PagePool`             free, reserved, exposed, committed, quarantined, cached
    holding    one room on one rank:            held, exposed, committed, quarantined, given back
               `Holdings`
    exposure   one receiver rank: `Exposure`    current, revoked; each has an id of its own
    route      one sender rank, for each        unknown, connected, broken
               exposure: `Route`
    lease      the router: `Worker.state`       joining, ready, suspect, draining, gone
    request    the router: `RequestStream`      queued, in a room, paused or retrying, answered, failed

A holding is all that one room has of a rank's memory: its pages and its metadata slot. An exposure is one
registration of a rank's memory, whose addresses senders get. A route is a sender's connection to it.

A rank never moves a room by itself. It adds evidence to the room and votes. The minimum over all ranks is the
verdict, and every rank makes the same move in the same turn (`apply-verdict`). The move's effect tells the
rank what to do to the other machines:

    move of the room                  coupled moves
    receiver: -> TRANSFERRING (GRANT) The pages become reserved, then exposed. The holding is exposed with the
                                      generation of its slot. When every rank has exposed, the grant leaves.
    sender: -> WAITING_FOR_INPUT      The grant has come on a connected route.
    sender: -> TRANSFERRING (COMPUTE) Its own pages become reserved. Windows of them are written on the route.
    sender: -> SEALING (SEAL)         The writes of every rank are done. The elected rank writes the seal.
    receiver: -> SUCCESS (ADMIT)      Pages and seal are there on every rank. Pages and holding become
                                      committed.
    any: -> FAILED (FENCE)            Exposed pages and the holding become quarantined.
    any: -> RETIRED (RELEASE)         The holding is given back. Pages become free, or cached.

Three moves of other machines act on rooms, and all of them arrive as evidence or as a cause:

* A route that breaks, or an exposure that is revoked, fails the rooms on it. A revoked exposure is also the
  proof that no write can land (`Proof.REVOKED`), so it ends their quarantine.
* A lease that ends fails the rooms of its worker at the router, which cancels them at the other worker. If
  the process is known to be gone, that is a proof, too (`Proof.DEAD`). Silence is none (`proof-not-time`).
* A room that ends early ends no request. `REASONS` says whether the request gets another room.

The names of the phases are SGLang's.
"""

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Final, TypeAlias


class Side(Enum):
    __hash__ = object.__hash__  # Enum's own would hash the name at each look-up in a table
    PREFILL = "prefill"
    DECODE = "decode"


class Phase(Enum):
    __hash__ = object.__hash__
    BOOTSTRAPPING = "bootstrapping"
    """On prefill: the room has no destination pages yet. On decode: it is not connected to the prefill worker
    yet."""
    WAITING_FOR_INPUT = "waiting_for_input"
    """On prefill: the room has a destination, and waits for pages to compute into. On decode: it waits for
    pages."""
    TRANSFERRING = "transferring"
    """On prefill: the prompt is computed and its pages are sent. On decode: the room's memory is exposed to
    the sender, and pages and seal have not arrived on every rank."""
    COMPUTING = "computing"
    """On decode, for a local room: this worker computes the prompt itself, and exposes no memory."""
    SEALING = "sealing"
    """On prefill: the pages of every rank are written. The elected rank writes the record and the seal."""
    SUCCESS = "success"
    """On prefill: the record is sealed. On decode: the room has joined the batch."""
    FAILED = "failed"
    """Phase of a room that has failed. Its cause is known, but there is no proof yet that its memory can be
    reused safely."""
    RETIRED = "retired"
    """Phase of a room that has given back all its memory and has left the roster."""


class Vote(IntEnum):
    """Vote of one rank on one room in a turn. The minimum over all ranks is the verdict, so one ABORT aborts
    the room on every rank."""

    ABORT = 0
    STAY = 1
    ADVANCE = 2


class Effect(Enum):
    """Action that a rank carries out after a move of a room. These actions are the same on prefill and
    decode."""

    QUEUE = "queue"
    """Effect: the room waits for pages and a slot from now on. It has no memory yet."""
    STOP = "stop"
    """Effect: end a room in SUCCESS early, on every rank, by taking it out of the batch."""
    FENCE = "fence"
    """Effect: stop the room's work, and quarantine the memory that a peer may still write to. Then seek the
    proof that the peer no longer can."""
    RELEASE = "release"
    """Effect: give the room's pages and slot back."""


class SenderEffect(Enum):
    """Actions that a prefill rank alone carries out after a move of a room."""

    COMPUTE = "compute"
    """Effect: reserve pages, and start to compute the prompt."""
    SEAL = "seal"
    """Effect: the elected rank writes the seal. The pages of all ranks are written by now."""
    REPORT = "report"
    """Effect: report the room's outcome to the router, because the record is sealed."""


class ReceiverEffect(Enum):
    """Actions that a decode rank alone carries out after a move of a room."""

    GRANT = "grant"
    """Effect: reserve pages and a zeroed metadata slot, expose them, and send their addresses to prefill."""
    COMPUTE = "compute"
    """Effect: reserve pages, and start to compute the prompt of a local room. Such a room has no prefill
    worker."""
    ADMIT = "admit"
    """Effect: let the room join the batch. No other worker writes to its pages from now on."""


AnyEffect: TypeAlias = Effect | SenderEffect | ReceiverEffect
Moves: TypeAlias = Mapping[tuple[Phase, Vote], tuple[Phase, AnyEffect]]

_ENDINGS: Final[Mapping[tuple[Phase, Vote], tuple[Phase, Effect]]] = {
    (Phase.BOOTSTRAPPING, Vote.ABORT): (Phase.FAILED, Effect.FENCE),
    (Phase.WAITING_FOR_INPUT, Vote.ABORT): (Phase.FAILED, Effect.FENCE),
    (Phase.TRANSFERRING, Vote.ABORT): (Phase.FAILED, Effect.FENCE),
    (Phase.FAILED, Vote.ADVANCE): (Phase.RETIRED, Effect.RELEASE),
    (Phase.SUCCESS, Vote.ABORT): (Phase.SUCCESS, Effect.STOP),
    (Phase.SUCCESS, Vote.ADVANCE): (Phase.RETIRED, Effect.RELEASE),
}

SENDER_MOVES: Final[Mapping[tuple[Phase, Vote], tuple[Phase, Effect | SenderEffect]]] = {
    (Phase.BOOTSTRAPPING, Vote.ADVANCE): (Phase.WAITING_FOR_INPUT, Effect.QUEUE),
    (Phase.WAITING_FOR_INPUT, Vote.ADVANCE): (Phase.TRANSFERRING, SenderEffect.COMPUTE),
    (Phase.TRANSFERRING, Vote.ADVANCE): (Phase.SEALING, SenderEffect.SEAL),
    (Phase.SEALING, Vote.ADVANCE): (Phase.SUCCESS, SenderEffect.REPORT),
    (Phase.SEALING, Vote.ABORT): (Phase.FAILED, Effect.FENCE),
    **_ENDINGS,
}

RECEIVER_MOVES: Final[Mapping[tuple[Phase, Vote], tuple[Phase, Effect | ReceiverEffect]]] = {
    (Phase.BOOTSTRAPPING, Vote.ADVANCE): (Phase.WAITING_FOR_INPUT, Effect.QUEUE),
    (Phase.WAITING_FOR_INPUT, Vote.ADVANCE): (Phase.TRANSFERRING, ReceiverEffect.GRANT),
    (Phase.TRANSFERRING, Vote.ADVANCE): (Phase.SUCCESS, ReceiverEffect.ADMIT),
    **_ENDINGS,
}

LOCAL_MOVES: Final[Mapping[tuple[Phase, Vote], tuple[Phase, Effect | ReceiverEffect]]] = {
    (Phase.BOOTSTRAPPING, Vote.ADVANCE): (Phase.WAITING_FOR_INPUT, Effect.QUEUE),
    (Phase.WAITING_FOR_INPUT, Vote.ADVANCE): (Phase.COMPUTING, ReceiverEffect.COMPUTE),
    (Phase.COMPUTING, Vote.ADVANCE): (Phase.SUCCESS, ReceiverEffect.ADMIT),
    (Phase.COMPUTING, Vote.ABORT): (Phase.FAILED, Effect.FENCE),
    **{way: move for way, move in _ENDINGS.items() if way[0] is not Phase.TRANSFERRING},
}
"""Moves of a local room, whose prompt the decode worker computes itself: next phase and effect, by phase and
verdict."""

GATED: Final = frozenset({Phase.TRANSFERRING, Phase.COMPUTING, Phase.SEALING})
"""Phases that a room leaves only when every rank is ready, or by an ABORT (`gate-before-agree`)."""
