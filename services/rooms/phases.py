"""Which phases does a room go through on one rank, and which moves exist?

The phases keep the field's names. Both sides share them and their table; what a move asks of the
world differs by side. A rank never moves by itself: it votes, and the minimum over ranks decides.
"""

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Final


class Side(Enum):
    __hash__ = object.__hash__  # of the name, as it would be, is made anew at each look into a table
    PREFILL = "prefill"
    DECODE = "decode"


class Phase(Enum):
    __hash__ = object.__hash__
    BOOTSTRAPPING = "bootstrapping"
    """Sender: no destination yet. Receiver: not yet connected to the sender."""
    WAITING_FOR_INPUT = "waiting_for_input"
    """Sender: destination known, waiting for pages to compute into. Receiver: waiting for pages."""
    TRANSFERRING = "transferring"
    """Sender: computing and pushing. Receiver: destination exposed, not yet ready on every rank."""
    SEALING = "sealing"
    """Sender: every rank's pages are written; the elected rank writes the record and the seal."""
    SUCCESS = "success"
    """Sender: sealed. Receiver: admitted to the batch."""
    FAILED = "failed"
    """A cause is known; what the room held is not yet proven safe to re-use."""
    RETIRED = "retired"
    """Everything was given back; the room is gone from the roster."""


class Vote(IntEnum):
    """One rank's wish. The verdict is the minimum over ranks, so one ABORT aborts all."""

    ABORT = 0
    STAY = 1
    ADVANCE = 2


class Effect(Enum):
    """What a move asks of the world."""

    QUEUE = "queue"
    """Wait for capacity; nothing is held yet."""
    GRANT = "grant"
    """Receiver: reserve pages and a zeroed slot, expose them, send the destination."""
    COMPUTE = "compute"
    """Sender: reserve pages and start computing."""
    SEAL = "seal"
    """Sender: all pages of all ranks are written; the elected rank may say so."""
    ADMIT = "admit"
    """Receiver: the pages are ours for good; join the batch."""
    REPORT = "report"
    """Sender: the record is sealed; tell whoever asked."""
    STOP = "stop"
    """A room in SUCCESS is to end early, on every rank: take it out of the batch."""
    FENCE = "fence"
    """Stop, quarantine what a peer may still write to, and seek the proof that it no longer will."""
    RELEASE = "release"
    """Give back everything the room held."""


Moves = Mapping[tuple[Phase, Vote], tuple[Phase, Effect]]

_ENDINGS: Final[Moves] = {
    (Phase.BOOTSTRAPPING, Vote.ABORT): (Phase.FAILED, Effect.FENCE),
    (Phase.WAITING_FOR_INPUT, Vote.ABORT): (Phase.FAILED, Effect.FENCE),
    (Phase.TRANSFERRING, Vote.ABORT): (Phase.FAILED, Effect.FENCE),
    (Phase.FAILED, Vote.ADVANCE): (Phase.RETIRED, Effect.RELEASE),
    (Phase.SUCCESS, Vote.ABORT): (Phase.SUCCESS, Effect.STOP),
    (Phase.SUCCESS, Vote.ADVANCE): (Phase.RETIRED, Effect.RELEASE),
}

SENDER_MOVES: Final[Moves] = {
    (Phase.BOOTSTRAPPING, Vote.ADVANCE): (Phase.WAITING_FOR_INPUT, Effect.QUEUE),
    (Phase.WAITING_FOR_INPUT, Vote.ADVANCE): (Phase.TRANSFERRING, Effect.COMPUTE),
    (Phase.TRANSFERRING, Vote.ADVANCE): (Phase.SEALING, Effect.SEAL),
    (Phase.SEALING, Vote.ADVANCE): (Phase.SUCCESS, Effect.REPORT),
    (Phase.SEALING, Vote.ABORT): (Phase.FAILED, Effect.FENCE),
    **_ENDINGS,
}

RECEIVER_MOVES: Final[Moves] = {
    (Phase.BOOTSTRAPPING, Vote.ADVANCE): (Phase.WAITING_FOR_INPUT, Effect.QUEUE),
    (Phase.WAITING_FOR_INPUT, Vote.ADVANCE): (Phase.TRANSFERRING, Effect.GRANT),
    (Phase.TRANSFERRING, Vote.ADVANCE): (Phase.SUCCESS, Effect.ADMIT),
    **_ENDINGS,
}

LIVE: Final = frozenset({Phase.BOOTSTRAPPING, Phase.WAITING_FOR_INPUT, Phase.TRANSFERRING, Phase.SEALING})
"""Phases in which a room can still fail. The others are terminal and absorb (`terminal-absorbs`)."""

GATED: Final = frozenset({Phase.TRANSFERRING, Phase.SEALING})
"""Phases that a rank which is not ready cannot be voted out of but by ABORT (`gate-before-agree`)."""
