"""Number of drafted tokens that a step checks for each of its sequences.

A drafted token costs its position in the step, and yields a token if it is accepted. Its chance is estimated
from the sequence's earlier drafts. Drafts that the grammar forces are certain. The most promising drafts are
checked first, as long as one yields more tokens for its time than the step does without it. A sequence whose
drafts are rejected soon gets none. One is tried from time to time, ever less often, since texts change.

All of it is a function of outputs and of numbers that all ranks share, so all ranks choose alike
(`drafts-agreed`).
"""

import heapq
from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

DRAFTS_MAX: Final = 16
"""Most drafted tokens of one sequence in a step."""
POSITIONS_MAX: Final = 64
"""Most drafted tokens of a step."""
WORTH: Final = 1.2
"""Least ratio of a draft's expected gain to its cost. Above 1, because both are estimates."""
KEPT: Final = 0.85
"""Decay of the weight of earlier steps, per step."""
DOUBT: Final = 0.25
"""Prior weight of an accepted draft, and of a rejected one."""
PAUSE_MIN: Final = 16
PAUSE_MAX: Final = 256
"""Steps without a draft before one is tried: the first time, and after many rejections."""


class DraftSource(Enum):
    """Source of drafted tokens."""

    GRAMMAR = "grammar"
    """The grammar allows no other token."""
    NGRAM = "ngram"
    """The tokens followed the same n-gram earlier in the sequence."""
    MODEL = "model"
    """A draft model drew them."""


class Acceptance:
    """Acceptance of one sequence's drafts."""

    __slots__ = ("_idle", "_missed", "_pause", "_taken")

    def __init__(self) -> None:
        self._taken = 0.75
        self._missed = 0.75
        self._idle = 0
        self._pause = PAUSE_MIN

    @property
    def chance(self) -> float:
        """Chance that a draft is accepted, if all before it were."""
        return (self._taken + DOUBT) / (self._taken + self._missed + 2 * DOUBT)

    @property
    def due(self) -> bool:
        """Whether it had no draft for so long that one is tried."""
        return self._idle >= self._pause

    def note(self, drafted: int, taken: int) -> None:
        """Note a step that checked `drafted` drafts and accepted the first `taken`."""
        if not drafted:
            self._idle += 1
            return
        if self.due:
            self._pause = PAUSE_MIN if taken else min(2 * self._pause, PAUSE_MAX)
        self._idle = 0
        self._taken = KEPT * self._taken + taken
        self._missed = KEPT * self._missed + (taken < drafted)


class Drafts(NamedTuple):
    """Drafts of one sequence for its next step."""

    acceptance: Acceptance
    available: int
    """Number of drafted tokens."""
    certain: int = 0
    """Number of leading drafts that are known to be accepted."""

    def chance(self, place: int) -> float:
        """Return the chance that draft number `place`, from 0 on, is accepted if all before it were."""
        return 1.0 if place < self.certain else self.acceptance.chance


def allocate_drafts(drafts: Sequence[Drafts], rows: int, positions: int, per_mille: int) -> list[int]:
    """Return how many drafts are checked, by sequence.

    `rows`: rows of the step, each of which draws a token in any case. `positions`: positions that it computes
    for them. `per_mille`: cost of one more position, in thousandths of the time of an empty step.
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
