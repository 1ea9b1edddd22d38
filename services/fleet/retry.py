"""A room ended early. May its request go on in a new room, and which worker is it better off without?

Only a worker's failure is retried (`reasons.py`): the client, or whoever acts for it, does not change its
mind because a worker dies. No load feeds itself (`failure-adds-no-load`): one room follows another, and each
after a longer pause.

A room that was retracted has not failed (`retracted-is-no-failure`): another follows it as often as that
happens, at once, and on whichever workers have space for what it had and for a margin.
"""

from dataclasses import dataclass
from typing import Final
from zlib import crc32

from baton.rooms.errors import Reason
from baton.rooms.phases import Side
from baton.rooms.reasons import REASONS, Fault

LEFT_S_MIN: Final = 0.5
"""A request with less time left than this is not worth another room."""


PAUSE_S: Final = 0.02
"""Before the room that follows a lost worker's: another one may be ready. Four times as long for each further
room, and for each other reason."""
PAUSE_S_MAX: Final = 5.0
MARGIN_TOKENS: Final = 64
"""Tokens that each choice of a retracted room is to have space for at least, when it goes on."""
MARGIN_SHARE: Final = 0.25
"""The same as a share of what is computed again for it, so that it gets further than that costs."""
RETRIED: Final = frozenset(reason for reason, facts in REASONS.items() if facts.is_retried)


@dataclass(frozen=True, slots=True)
class RetryBounds:
    """How far one request is carried."""

    rooms_max: int = 6
    """Rooms in a row that one request may have without getting any further."""
    wait_s: float | None = None
    """How long a request whose room failed waits for a worker of a side that has none ready: a restarted one
    may be on its way. None: as long as the request may take."""


def avoided_sides(reason: Reason, teller: Side | None) -> frozenset[Side]:
    """The sides whose workers the next room avoids. `teller`: who told of the failure, if one of them did."""
    match REASONS[reason].fault:
        case Fault.PREFILL:
            return frozenset({Side.PREFILL})
        case Fault.DECODE:
            return frozenset({Side.DECODE})
        case Fault.TELLER if teller is not None:
            return frozenset({teller})
        case Fault.EITHER | Fault.TELLER:
            return frozenset(Side)
        case Fault.NOBODY | Fault.CALLER | Fault.REQUEST | Fault.BOOTSTRAP:
            return frozenset()


def pause_s(reason: Reason, rooms: int, seed: int, request_id: str) -> float:
    """How long a request that had `rooms` rooms, the last of which failed, waits before it asks for the next:
    from half of what its rooms say to one and a half, so that those which failed together do not come back
    together. The same for the same request, whenever and wherever it is asked."""
    if not REASONS[reason].is_attempt:
        return 0.0
    steps = rooms - 1 if REASONS[reason].fault in (Fault.PREFILL, Fault.DECODE) else rooms
    whole_s = min(PAUSE_S * 4.0 ** min(steps, 9), PAUSE_S_MAX)
    return whole_s * (0.5 + crc32(f"{request_id}/{seed}/{rooms}".encode()) / 2**32)


def made_progress(tokens: int) -> bool:
    """A room brought its request further: both its workers did, since the first token is prefill's alone. A
    request that breaks its workers as soon as they compute it does not get further, and so has an end."""
    return tokens > 1


def may_retry(reason: Reason, rooms: int, left_s: float, bounds: RetryBounds) -> bool:
    """Whether a request that had `rooms` rooms since it last went on, all of which failed, gets another."""
    if not REASONS[reason].is_attempt:
        return left_s > 0
    return reason in RETRIED and rooms < bounds.rooms_max and left_s >= LEFT_S_MIN


def margin_tokens(reason: Reason, had: int, left: int, choices: int) -> int:
    """KV positions that decode is to have free, beside those that the next room begins with, before it is
    opened. `had`: KV positions of the last one's output and prompt; `left`: tokens that each of its `choices`
    may yet draw. Without it a room that is retracted would come back into the first pages that are free, only
    to be retracted again, or to drive out others."""
    if REASONS[reason].is_attempt:
        return 0
    return min(max(MARGIN_TOKENS, int(had * MARGIN_SHARE)), left) * choices
