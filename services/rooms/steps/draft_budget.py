"""Number of draft tokens that a step checks for each of its sequences (speculative decoding).

A draft token costs one position in the step, and yields a token if it is accepted. The chance of that is
estimated from the sequence's earlier drafts. Drafts that the grammar forces are certain. The most promising
drafts are checked first. Further drafts are added while each yields more tokens for its time than the step
does without it. A sequence whose drafts are rejected soon gets none. Then one draft is tried from time to
time, less and less often, since texts change.

All of this is a function of outputs and of numbers that all ranks share, so all ranks choose alike
(`drafts-agreed`).
"""

import heapq
from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

DRAFTS_MAX: Final = 16
"""Most draft tokens that a step checks for one sequence."""
POSITIONS_MAX: Final = 64
"""Most draft tokens that a step checks for all sequences together."""
WORTH: Final = 1.2
"""Least ratio of a draft's expected gain to its cost for the draft to be checked. It is above 1, because both
are estimates."""
KEPT: Final = 0.85
"""Factor by which each further step reduces the weight of earlier steps in the acceptance rate of draft
tokens."""
DOUBT: Final = 0.25
"""Weight, in draft tokens, of one accepted and of one rejected token that are assumed before the first
measurement."""
PAUSE_MIN: Final = 16
PAUSE_MAX: Final = 256
"""Most steps without a draft before one is tried again, after many rejections. PAUSE_MIN is the number after
the first."""


class DraftSource(Enum):
    """Source of draft tokens."""

    GRAMMAR = "grammar"
    """Source of draft tokens: the grammar forces them, because it allows no other token at their
    positions."""
    NGRAM = "ngram"
    """Source of draft tokens: the tokens that followed the same n-gram earlier in the sequence."""
    MODEL = "model"
    """Source of draft tokens: a draft model sampled them."""


class Acceptance:
    """Acceptance rate of one sequence's draft tokens, as measured so far. Recent steps count most."""

    __slots__ = ("_idle", "_missed", "_pause", "_taken")

    def __init__(self) -> None:
        self._taken = 0.75
        self._missed = 0.75
        self._idle = 0
        self._pause = PAUSE_MIN

    @property
    def chance(self) -> float:
        """Chance that a draft token is accepted, if all draft tokens before it were."""
        return (self._taken + DOUBT) / (self._taken + self._missed + 2 * DOUBT)

    @property
    def due(self) -> bool:
        """Whether the sequence has had no draft token for so long that one is to be tried again."""
        return self._idle >= self._pause

    def note(self, drafted: int, taken: int) -> None:
        """Record a step that checked `drafted` draft tokens and accepted the first `taken` of them."""
        if not drafted:
            self._idle += 1
            return
        if self.due:
            self._pause = PAUSE_MIN if taken else min(2 * self._pause, PAUSE_MAX)
        self._idle = 0
        self._taken = KEPT * self._taken + taken
        self._missed = KEPT * self._missed + (taken < drafted)


class Drafts(NamedTuple):
    """Draft tokens that are available for one sequence's next step."""

    acceptance: Acceptance
    available: int
    """Number of draft tokens that were made for the sequence."""
    certain: int = 0
    """Number of leading draft tokens that are known to be accepted, since the grammar forces them."""

    def chance(self, place: int) -> float:
        """Return the chance that draft token number `place` (from 0) is accepted, if all before it were."""
        return 1.0 if place < self.certain else self.acceptance.chance


def allocate_drafts(drafts: Sequence[Drafts], rows: int, positions: int, per_mille: int) -> list[int]:
    """Return how many draft tokens the step checks, for each sequence in `drafts`.

    `rows`: number of rows of the step, each of which samples a token in any case. `positions`: number of
    positions that the step computes for these rows. `per_mille`: cost of one more position, in thousandths of
    the time of an empty step.
    """
    cost = per_mille / 1000
    counts = [0] * len(drafts)
    tokens, time = float(rows), 1 + cost * positions
    left = POSITIONS_MAX
    promising = [(-each.chance(0), place) for place, each in enumerate(drafts) if each.available > 0]
    heapq.heapify(promising)
    while promising and left:
        promise, place = promising[0]
        each = drafts[place]
        if counts[place] >= each.certain and -promise * time <= WORTH * cost * tokens:
            break
        counts[place] += 1
        left -= 1
        tokens -= promise
        time += cost
        if counts[place] < min(each.available, DRAFTS_MAX):
            heapq.heapreplace(promising, (promise * each.chance(counts[place]), place))
        else:
            heapq.heappop(promising)
    for place, each in enumerate(drafts):
        if left and not counts[place] and each.available and each.acceptance.due:
            counts[place] = 1
            left -= 1
    return counts
