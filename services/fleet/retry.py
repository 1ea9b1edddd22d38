"""Rules for continuing a request in a new room after its room ended early.

Only a failure of a worker is retried (`baton.rooms.reasons`). The room of a client that hung up is not.
Retries do not add to an overload (`failure-adds-no-load`): a room is opened only after another has ended, and
after a longer pause each time.

A retracted room has not failed (`retracted-is-no-failure`). Another room follows it at once, however often
that happens. Its workers need space for the request's tokens and for a margin.

A room that a full worker refused has not failed either (`full-is-no-failure`). Its request waits for a place
as it did before that room.
"""

from dataclasses import dataclass
from typing import Final
from zlib import crc32

from baton.rooms.errors import Reason
from baton.rooms.phases import Side
from baton.rooms.reasons import REASONS, Fault

LEFT_S_MIN: Final = 0.5
"""Least time that a request must have left for another room to be opened, in seconds."""


PAUSE_S: Final = 0.02
"""Pause before the room that follows a lost worker's, in seconds. It is four times as long for each further
room, and if the room failed for another reason."""
PAUSE_S_MAX: Final = 5.0
MARGIN_TOKENS: Final = 64
"""Fewest KV positions that must be free for each choice of a retracted request before it goes on."""
MARGIN_SHARE: Final = 0.25
"""Least free space before a retracted request continues, as a share of the tokens that have to be computed
again. With less space, it would gain less than it costs."""
RETRIED: Final = frozenset(reason for reason, facts in REASONS.items() if facts.is_retried)


@dataclass(frozen=True, slots=True)
class RetryBounds:
    """Bounds on the number of rooms of one request, and on its waits."""

    rooms_max: int = 6
    """Most consecutive rooms of one request that end without progress."""
    wait_s: float | None = None
    """Longest time in seconds for which a request whose room failed waits for a side to have a ready worker,
    which may be restarting. None: as long as the request may take."""


def avoided_sides(reason: Reason, teller: Side | None) -> frozenset[Side]:
    """Return the sides whose workers the next room avoids after a failure. `teller`: side that reported the
    failure, None if no worker did."""
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
    """Return the pause before the next room of a request is placed, in seconds. `rooms`: number of rooms it
    had, the last of which failed.

    The pause is varied between half and one and a half of its length. So requests that failed together do not
    return together. The result depends on the arguments alone.
    """
    if not REASONS[reason].is_attempt:
        return 0.0
    steps = rooms - 1 if REASONS[reason].fault in (Fault.PREFILL, Fault.DECODE) else rooms
    whole_s = min(PAUSE_S * 4.0 ** min(steps, 9), PAUSE_S_MAX)
    return whole_s * (0.5 + crc32(f"{request_id}/{seed}/{rooms}".encode()) / 2**32)


def made_progress(tokens: int) -> bool:
    """Return whether a room with `tokens` output tokens advanced its request.

    Prefill alone can give the first token, so only a second token proves that both workers served the
    request. A request that breaks its workers makes no progress, so its retries end.
    """
    return tokens > 1


def may_retry(reason: Reason, rooms: int, left_s: float, bounds: RetryBounds) -> bool:
    """Return whether a request gets another room. `rooms`: number of consecutive rooms that failed without
    progress. `left_s`: time left to the request, in seconds."""
    if not REASONS[reason].is_attempt:
        return left_s > 0
    return reason in RETRIED and rooms < bounds.rooms_max and left_s >= LEFT_S_MIN


def margin_tokens(reason: Reason, had: int, left: int, choices: int) -> int:
    """Return how many KV positions have to be free on decode, in addition to those with which the next room
    begins.

    `had`: number of KV positions of the last room's prompt and output. `left`: most tokens that each of its
    `choices` may yet draw. Without a margin, a retracted room would take the first free pages. It would then
    be retracted again, or other rooms would be.
    """
    if reason is not Reason.RETRACTED:
        return 0
    return min(max(MARGIN_TOKENS, int(had * MARGIN_SHARE)), left) * choices
