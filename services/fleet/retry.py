"""Rules for continuing a request in a new room after its room ended early.

Only a failure of a worker is retried (`baton.rooms.reasons`): a client does not change its mind because a
worker dies. No load feeds itself (`failure-adds-no-load`): one room follows another, each after a longer
pause.

A retracted room has not failed (`retracted-is-no-failure`). Another follows it at once, as often as that
happens, on workers with space for what it had and for a margin.
"""

from dataclasses import dataclass
from typing import Final
from zlib import crc32

from baton.rooms.errors import Reason
from baton.rooms.phases import Side
from baton.rooms.reasons import REASONS, Fault

LEFT_S_MIN: Final = 0.5
"""Least time left for which another room is worth opening, in seconds."""


PAUSE_S: Final = 0.02
"""Pause before the room that follows a lost worker's, in seconds, since another worker may be ready. It is
four times as long for each further room, and for each other reason."""
PAUSE_S_MAX: Final = 5.0
MARGIN_TOKENS: Final = 64
"""Least tokens that each choice of a retracted room needs space for when it goes on."""
MARGIN_SHARE: Final = 0.25
"""Least space when it goes on, as a share of the tokens that are computed again. So it gets further than that
costs."""
RETRIED: Final = frozenset(reason for reason, facts in REASONS.items() if facts.is_retried)


@dataclass(frozen=True, slots=True)
class RetryBounds:
    """Bounds on the rooms of one request."""

    rooms_max: int = 6
    """Most consecutive rooms of one request without progress."""
    wait_s: float | None = None
    """Time for which a request whose room failed waits for a worker of a side that has none ready, in
    seconds. One may be restarting. None: as long as the request may take."""


def avoided_sides(reason: Reason, teller: Side | None) -> frozenset[Side]:
    """Return the sides whose workers the next room avoids. `teller`: side that reported the failure, if one
    did."""
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
    """Return the pause of a request before its next room is placed, in seconds. `rooms`: number of rooms
    it had, the last of which failed.

    The pause is spread from half to one and a half of its length, so that requests that failed together do
    not return together. It is a function of its arguments.
    """
    if not REASONS[reason].is_attempt:
        return 0.0
    steps = rooms - 1 if REASONS[reason].fault in (Fault.PREFILL, Fault.DECODE) else rooms
    whole_s = min(PAUSE_S * 4.0 ** min(steps, 9), PAUSE_S_MAX)
    return whole_s * (0.5 + crc32(f"{request_id}/{seed}/{rooms}".encode()) / 2**32)


def made_progress(tokens: int) -> bool:
    """Return whether a room of `tokens` output tokens advanced its request. The first token is prefill's
    alone, so a second one proves that both workers served it. A request that breaks its workers makes no
    progress, and so has an end."""
    return tokens > 1


def may_retry(reason: Reason, rooms: int, left_s: float, bounds: RetryBounds) -> bool:
    """Return whether a request gets another room. `rooms`: consecutive rooms that failed without progress."""
    if not REASONS[reason].is_attempt:
        return left_s > 0
    return reason in RETRIED and rooms < bounds.rooms_max and left_s >= LEFT_S_MIN


def margin_tokens(reason: Reason, had: int, left: int, choices: int) -> int:
    """Return the KV positions that have to be free on decode besides those that the next room begins with.

    `had`: KV positions of the last room's prompt and output. `left`: tokens that each of its `choices` may
    yet draw. Without a margin, a retracted room would take the first free pages, and be retracted again or
    drive out others.
    """
    if REASONS[reason].is_attempt:
        return 0
    return min(max(MARGIN_TOKENS, int(had * MARGIN_SHARE)), left) * choices
