"""Which phases does a room go through on one rank, and which moves exist?

The phases keep the field's names. Both sides share them and their table; what a move asks of the
world differs by side. A rank never moves by itself: it votes, and the minimum over ranks decides.
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
    """Sender: no destination yet. Receiver: not yet connected to the sender."""
    WAITING_FOR_INPUT = "waiting_for_input"
    """Sender: destination known, waiting for pages to compute into. Receiver: waiting for pages."""
    TRANSFERRING = "transferring"
    """Sender: computing and pushing. Receiver: destination exposed, not yet ready on every rank."""
    COMPUTING = "computing"
    """Receiver of a local room: it computes the prompt itself; nothing is exposed."""
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
    """What a move of either side asks of the world."""

    QUEUE = "queue"
    """Wait for capacity; nothing is held yet."""
    STOP = "stop"
    """A room in SUCCESS is to end early, on every rank: take it out of the batch."""
    FENCE = "fence"
    """Stop, quarantine what a peer may still write to, and seek the proof that it no longer will."""
    RELEASE = "release"
    """Give back everything the room held."""


class SenderEffect(Enum):
    """What the sender's own moves ask beside those."""

    COMPUTE = "compute"
    """Reserve pages and start computing."""
    SEAL = "seal"
    """All pages of all ranks are written; the elected rank may say so."""
    REPORT = "report"
    """The record is sealed; tell whoever asked."""


class ReceiverEffect(Enum):
    """What the receiver's own moves ask beside those."""

    GRANT = "grant"
    """Reserve pages and a zeroed slot, expose them, send the destination."""
    COMPUTE = "compute"
    """Reserve pages and start computing: a local room's."""
    ADMIT = "admit"
    """The pages are ours for good; join the batch."""


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
"""A receiver's that computes the prompt itself."""

GATED: Final = frozenset({Phase.TRANSFERRING, Phase.COMPUTING, Phase.SEALING})
"""Phases that a rank which is not ready cannot be voted out of but by ABORT (`gate-before-agree`)."""
