"""Phases of a room on one rank, and the moves between them. Theory of operation.

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
    any: -> FAILED (FENCE)            Exposed pages and the holding become quarantined. Others wait.
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
    __hash__ = object.__hash__  # of the name, as it would be, is made anew at each look into a table
    PREFILL = "prefill"
    DECODE = "decode"


class Phase(Enum):
    __hash__ = object.__hash__
    BOOTSTRAPPING = "bootstrapping"
    """Sender: it has no destination yet. Receiver: it is not connected to the sender yet."""
    WAITING_FOR_INPUT = "waiting_for_input"
    """Sender: it has a destination, and waits for pages to compute into. Receiver: it waits for pages."""
    TRANSFERRING = "transferring"
    """Sender: it computes and pushes. Receiver: its memory is exposed, and not ready on every rank."""
    COMPUTING = "computing"
    """Receiver of a local room: it computes the prompt itself, and exposes nothing."""
    SEALING = "sealing"
    """Sender: every rank's pages are written; the elected rank writes the record and the seal."""
    SUCCESS = "success"
    """Sender: the record is sealed. Receiver: the room has joined the batch."""
    FAILED = "failed"
    """A cause is known. It is not proven yet that the room's memory is safe to reuse."""
    RETIRED = "retired"
    """Everything was given back. The room has left the roster."""


class Vote(IntEnum):
    """Vote of one rank. The verdict is the minimum over ranks, so one ABORT aborts all."""

    ABORT = 0
    STAY = 1
    ADVANCE = 2


class Effect(Enum):
    """Effect of a move of either side on the world."""

    QUEUE = "queue"
    """Wait for capacity. The room has no memory yet."""
    STOP = "stop"
    """A room in SUCCESS is to end early, on every rank: take it out of the batch."""
    FENCE = "fence"
    """Stop, quarantine what a peer may still write to, and seek the proof that it no longer can."""
    RELEASE = "release"
    """Give back the room's pages and slot."""


class SenderEffect(Enum):
    """Effects of the sender's own moves."""

    COMPUTE = "compute"
    """Reserve pages and start computing."""
    SEAL = "seal"
    """All pages of all ranks are written. The elected rank may write the seal."""
    REPORT = "report"
    """The record is sealed. Report that to the caller."""


class ReceiverEffect(Enum):
    """Effects of the receiver's own moves."""

    GRANT = "grant"
    """Reserve pages and a zeroed slot, expose them, and send the destination."""
    COMPUTE = "compute"
    """Reserve pages and start to compute the prompt of a local room."""
    ADMIT = "admit"
    """The pages are this room's for good. Join the batch."""


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
"""Moves of a receiver that computes the prompt itself."""

GATED: Final = frozenset({Phase.TRANSFERRING, Phase.COMPUTING, Phase.SEALING})
"""Phases that only an ABORT ends while a rank is not ready (`gate-before-agree`)."""
