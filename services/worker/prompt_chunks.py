"""Which parts of which prompts does the next step compute?

Several prompts share a step, up to a budget of tokens. Half of it goes to the oldest rooms, so that each
room's turn comes; of the other half, those that need least are done, so that a short prompt does not wait for
a very long one; what is left over goes to the oldest again. Prompts of one length are computed one after the
other, since each is soonest done so.

First tokens come when their step ends. So a step that ends some prompt is no longer than is worth it to the
others: see `_lot`.

A token that is scored takes longer than one that is not, so it counts for more of the budget
(`counted-work`). A step with scored prompts is about as long as any other, and has room for others.

What the last step of a prompt computed is the one part of its KV that a sender does not write beside a step.
So the last part of a sender's prompt of several steps is a small one.

Pure: the same tables give the same step on every rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isqrt
from operator import eq
from typing import Final, Generic, Protocol, TypeVar

from baton.engine_interface import Row
from baton.rooms.request import Request

STEPS_MIN: Final = 4
"""Of a prompt whose last part is a small one: shorter ones pay a step more for too little."""
LAST_SHARE: Final = 4
"""Of the budget: a fourth."""
LOT_MIN: Final = 64
"""Tokens of a step that spares others a wait: of fewer none is known to be quicker."""


class PromptRoom(Protocol):
    """Of which a prompt is to be computed, and the output it goes on behind."""

    @property
    def request(self) -> Request: ...
    @property
    def cached(self) -> int:
        """Leading tokens whose KV was there when it began."""

    @property
    def computed(self) -> int:
        """Leading tokens whose KV is in its pages."""

    def prompt_row(self, start: int, stop: int) -> Row:
        """Of these positions; behind all that is known the first token is drawn."""


P = TypeVar("P", bound=PromptRoom)


@dataclass(frozen=True, slots=True)
class PromptChunk(Generic[P]):
    """Positions [start, stop) of one room's prompt, and of the output it goes on behind."""

    room: P
    start: int
    stop: int

    @property
    def row(self) -> Row:
        return self.room.prompt_row(self.start, self.stop)

    @property
    def scored(self) -> int:
        """How many of the prompt's tokens it scores."""
        return max(min(self.stop, self.room.request.scores) - self.start, 0)

    @property
    def last(self) -> bool:
        """The end of what is known: the room's first token is drawn with it."""
        return self.stop == self.room.request.prefill_tokens


def next_chunks(
    rooms: Iterable[P],
    budget_tokens: int,
    scored_tokens: int = 0,
    *,
    sent: bool = True,
    fixed_tokens: int | None = None,
    score_price: int = 0,
) -> list[PromptChunk[P]]:
    """Fill one step. `rooms`: that may be computed, oldest first. `scored_tokens`: most of the budget
    that goes to prompts that are scored, whose logits take memory; they share that in the same way. `sent`:
    what is computed is to be written to a receiver. `fixed_tokens`: of a prompt, which take as long as a step
    of none; None: it is not known, and the whole budget is used. `score_price`: thousandths of a token that a
    scored token takes of the budget beside its own."""
    waiting = [room for room in rooms if room.computed < room.request.prefill_tokens]
    if not waiting:
        return []
    rest = [room.request.prefill_tokens - room.computed for room in waiting]
    left = [_before_the_last(room, budget_tokens) for room in waiting] if sent else list(rest)
    scored = [place for place, room in enumerate(waiting) if room.computed < room.request.scores]
    for place, count in zip(scored, _shared([left[each] for each in scored], scored_tokens), strict=True):
        left[place] = count
    prices = [1000] * len(waiting)
    for place in scored:
        prices[place] += score_price
    costs, waits = _costs(left, prices), sum(_costs(rest, prices))
    lot = budget_tokens if fixed_tokens is None else _lot(costs, waits, fixed_tokens)
    takes = _bought(left, prices, min(lot, budget_tokens))
    if lot < budget_tokens and not any(map(eq, takes, rest)):
        takes = _bought(left, prices, budget_tokens)
    return [
        PromptChunk(room, room.computed, room.computed + count)
        for room, count in zip(waiting, takes, strict=True)
        if count
    ]


def _costs(tokens: Sequence[int], prices: Sequence[int]) -> list[int]:
    """What each would take of a budget, in tokens that are not scored, rounded up. `prices`: thousandths."""
    return [-(-count * price // 1000) for count, price in zip(tokens, prices, strict=True)]


def _bought(left: Sequence[int], prices: Sequence[int], budget_tokens: int) -> list[int]:
    """How many tokens of each the budget has room for. The oldest gets one at least, whatever it costs: else
    cheaper ones that come without end would keep it waiting."""
    costs = _costs(left, prices)
    shares = _shared(costs, budget_tokens)
    takes = [
        count if share == cost else min(share * 1000 // price, count)
        for count, cost, share, price in zip(left, costs, shares, prices, strict=True)
    ]
    oldest = next((place for place, count in enumerate(left) if count), None)
    if oldest is not None:
        takes[oldest] = max(takes[oldest], 1)
    return takes


def _lot(left: Sequence[int], waits: int, fixed_tokens: int) -> int:
    """Tokens of a step by which those that wait have their first tokens soon, in the mean. `left`: what each
    wants, the oldest first. `waits`: tokens of all.

    In steps of s tokens each waits for s / 2 that its own step computes beside it, and for what is fixed of
    half of the waits / s steps: least where s is the root of waits * fixed_tokens (Harris's economic order
    quantity). Twice that costs these a quarter more of both, and those that come next half of what is fixed.
    It is long enough for one prompt. All tokens are what they cost.
    """
    ends = 2 * min((each for each in left if each), default=0)
    return max(isqrt(4 * waits * fixed_tokens), LOT_MIN, min(ends, left[0]) if left[0] else ends)


def _shared(wanted: Sequence[int], budget_tokens: int) -> list[int]:
    """How many tokens each gets that wants so many, the oldest first."""
    left, takes = list(wanted), [0] * len(wanted)

    def take(order: Iterable[int], tokens: int, *, whole: bool = False) -> None:
        for place in order:
            count = min(left[place], tokens)
            if count == left[place] or not whole:
                takes[place] += count
                left[place] -= count
                tokens -= count

    by_age = range(len(wanted))
    take(by_age, budget_tokens - budget_tokens // 2)
    take(sorted(by_age, key=left.__getitem__), budget_tokens - sum(takes), whole=True)
    take(by_age, budget_tokens - sum(takes))
    return takes


def _before_the_last(room: PromptRoom, budget_tokens: int) -> int:
    """Most tokens of it that may be computed next, so that its last part is a small one."""
    left, last = room.request.prefill_tokens - room.computed, budget_tokens // LAST_SHARE
    short = room.request.prefill_tokens - room.cached <= (STEPS_MIN - 1) * budget_tokens
    return left if short or left <= last else max(left - last, left // 2)
