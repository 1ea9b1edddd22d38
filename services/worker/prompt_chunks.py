"""Choice of the prompt chunks that the next step computes.

Several prompts share a step, up to a budget of tokens. Half of the budget goes to the oldest rooms, so that
every room makes progress. The other half goes to the prompts that need least, so that a short prompt does not
wait for a very long one. The remainder goes to the oldest again. Prompts of equal length are computed one
after the other, because each then ends as early as possible.

First tokens come when their step ends. So a step that ends a prompt is not much longer than that prompt needs
(`_lot`).

A token that is scored (for prompt log-probabilities) takes longer than another, and counts for more of the
budget (`counted-work`). So a step with scored prompts takes about as long as any other, and has room for
other prompts.

The KV of a prompt's last chunk is the only part that a sender cannot write while another step runs. So the
last chunk of a prompt of several steps is a small one.

The choice is pure: equal tables give the same step on every rank.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isqrt
from operator import eq
from typing import Final, Generic, Protocol, TypeVar

from baton.engine_interface import Row
from baton.pages.transfer_plan import POSITIONS_MAX
from baton.rooms.request import Request

STEPS_MIN: Final = 4
"""Fewest steps of a prompt whose last chunk is made small. For shorter prompts the additional step costs more
than it gains."""
LAST_SHARE: Final = 4
"""Divisor of a step's token budget. The quotient, a fourth of the budget, is the length of a small last
chunk."""
LOT_MIN: Final = 64
"""Fewest tokens to which a step is cut short so that first tokens come earlier. Smaller steps are not known
to be quicker."""


class PromptRoom(Protocol):
    """Room whose known tokens, its prompt and earlier output, still have to be computed."""

    @property
    def request(self) -> Request: ...
    @property
    def cached(self) -> int:
        """Number of the room's leading tokens whose KV was in the prefix cache when the room began."""

    @property
    def computed(self) -> int:
        """Number of the room's leading tokens whose KV is in its pages."""

    def prompt_row(self, start: int, stop: int) -> Row:
        """Return the engine row that computes positions [start, stop) of the room. If `stop` is the end of
        the known tokens, the row samples the first output token."""


P = TypeVar("P", bound=PromptRoom)


@dataclass(frozen=True, slots=True)
class PromptChunk(Generic[P]):
    """Part of one room's prompt that one step computes: positions [start, stop) of the prompt and the earlier
    output."""

    room: P
    start: int
    stop: int

    @property
    def row(self) -> Row:
        return self.room.prompt_row(self.start, self.stop)

    @property
    def scored(self) -> int:
        """Number of prompt tokens in the chunk whose log-probabilities are computed."""
        return max(min(self.stop, self.room.request.scores) - self.start, 0)

    @property
    def last(self) -> bool:
        """Whether the chunk ends with the last known token. If so, the step samples the first output
        token."""
        return self.stop == self.room.request.prefill_tokens


def next_chunks(
    rooms: Iterable[P],
    budget_tokens: int,
    scored_tokens: int = 0,
    *,
    sent: bool = True,
    fixed_tokens: int | None = None,
    score_price: int = 0,
    whole: bool = False,
    ends: Callable[[P], Iterable[int]] | None = None,
) -> list[PromptChunk[P]]:
    """Return the prompt chunks of the next step.

    `rooms`: rooms that may be computed, oldest first. `scored_tokens`: most tokens of the budget for scored
    prompts, whose logits take memory. `sent`: whether the KV is written to a receiver. `fixed_tokens`: number
    of prompt tokens that take as long as an empty step. None: unknown, and the whole budget is used.
    `score_price`: additional cost of a scored token, in thousandths of a token. `whole`: prompts have one
    chunk, whatever the budget, and one of them is computed in a step. `ends`: returns positions of a room's
    prompt at which a chunk has to end.
    """
    waiting = [room for room in rooms if room.computed < room.request.prefill_tokens]
    if not waiting:
        return []
    if whole:
        return [PromptChunk(waiting[0], waiting[0].computed, waiting[0].request.prefill_tokens)]
    rest = [room.request.prefill_tokens - room.computed for room in waiting]
    left = [_before_the_last(room, budget_tokens) for room in waiting] if sent else list(rest)
    if ends is not None:
        nexts = (next_end(room.computed, ends(room)) for room in waiting)
        left = [min(count, end) for count, end in zip(left, nexts, strict=True)]
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
    """Return the cost of each prompt's tokens, rounded up. The unit is a token that is not scored. `prices`:
    cost of one token of each prompt, in thousandths."""
    return [-(-count * price // 1000) for count, price in zip(tokens, prices, strict=True)]


def _bought(left: Sequence[int], prices: Sequence[int], budget_tokens: int) -> list[int]:
    """Return how many tokens of each prompt the next step computes within the budget.

    The oldest prompt gets at least one token, whatever it costs. Otherwise an endless stream of cheaper
    prompts would block it. `left`: remaining tokens of each prompt. `prices`: cost of a token of each prompt,
    in thousandths.
    """
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
    """Return the step length, in tokens, that nearly minimises the mean wait for first tokens.

    `left`: remaining cost of each prompt, oldest first. `waits`: cost of all waiting prompts. In steps of s
    tokens, each prompt waits for the s / 2 tokens that its own step computes for others. It also waits for
    the fixed cost of half of the waits / s steps. The sum is least if s is the square root of waits *
    fixed_tokens (Harris's economic order quantity). The result is twice that. It costs present prompts a
    quarter more of both, and later ones half of the fixed cost. It is never shorter than one prompt needs.
    """
    ends = 2 * min((each for each in left if each), default=0)
    return max(isqrt(4 * waits * fixed_tokens), LOT_MIN, min(ends, left[0]) if left[0] else ends)


def _shared(wanted: Sequence[int], budget_tokens: int) -> list[int]:
    """Divide a budget of tokens among prompts. Return how many tokens each prompt gets. `wanted`: how many
    tokens each prompt could use, oldest prompt first."""
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


def next_end(computed: int, ends: Iterable[int]) -> int:
    """Return how many tokens there are from position `computed` to the next of the positions `ends`, or a
    very large number."""
    return min((end - computed for end in ends if end > computed), default=POSITIONS_MAX)


def _before_the_last(room: PromptRoom, budget_tokens: int) -> int:
    """Return how many tokens of a prompt the next step may compute, so that a small last chunk is left."""
    left, last = room.request.prefill_tokens - room.computed, budget_tokens // LAST_SHARE
    short = room.request.prefill_tokens - room.cached <= (STEPS_MIN - 1) * budget_tokens
    return left if short or left <= last else max(left - last, left // 2)
