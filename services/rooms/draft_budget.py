"""How many drafts does a step check for each of its sequences?

A drafted token costs its position in the step, and brings a token where it is taken. How likely that is, the
sequence's earlier drafts say, or its grammar, which leaves no other token. So the most promising drafts are
checked first, as long as one brings more tokens for its time than the step has without it. A sequence whose
drafts are not taken soon gets none. One is tried now and then, ever less often, since texts change.

Everything is a function of outputs and of numbers that all ranks of a worker share: all choose alike
(`drafts-agreed`).
"""

import heapq
from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

DRAFTS_MAX: Final = 16
"""Of one sequence in a step."""
POSITIONS_MAX: Final = 64
"""Drafted ones of a step."""
WORTH: Final = 1.2
"""How much more than it costs a draft has to promise: chances and costs are estimates."""
KEPT: Final = 0.85
"""What a step leaves of the weight of those before it."""
DOUBT: Final = 0.25
"""Of a draft taken and of one that was not, that count whatever was seen."""
PAUSE_MIN: Final = 16
PAUSE_MAX: Final = 256
"""Steps without a draft, before one is tried: at first, and after many that were not taken."""


class DraftSource(Enum):
    """Whence drafts come."""

    GRAMMAR = "grammar"
    """It leaves no other token."""
    NGRAM = "ngram"
    """They came behind the same tokens before."""
    MODEL = "model"
    """A smaller model drew them."""


class Acceptance:
    """How the drafts of one sequence fared."""

    __slots__ = ("_idle", "_missed", "_pause", "_taken")

    def __init__(self) -> None:
        self._taken = 0.75
        self._missed = 0.75
        self._idle = 0
        self._pause = PAUSE_MIN

    @property
    def chance(self) -> float:
        """That a draft is taken, where all before it were."""
        return (self._taken + DOUBT) / (self._taken + self._missed + 2 * DOUBT)

    @property
    def due(self) -> bool:
        """It was given none for so long that one is tried."""
        return self._idle >= self._pause

    def note(self, drafted: int, taken: int) -> None:
        """A step checked so many of its drafts, and took the first `taken`."""
        if not drafted:
            self._idle += 1
            return
        if self.due:
            self._pause = PAUSE_MIN if taken else min(2 * self._pause, PAUSE_MAX)
        self._idle = 0
        self._taken = KEPT * self._taken + taken
        self._missed = KEPT * self._missed + (taken < drafted)


class Drafts(NamedTuple):
    """Of one sequence, for its next step."""

    acceptance: Acceptance
    available: int
    """Tokens that are drafted."""
    certain: int = 0
    """How many of them are known to be taken, from the first one on."""

    def chance(self, place: int) -> float:
        """That draft `place`, from 0 on, is taken, where all before it were."""
        return 1.0 if place < self.certain else self.acceptance.chance


def allocate_drafts(drafts: Sequence[Drafts], rows: int, positions: int, per_mille: int) -> list[int]:
    """How many of each one's drafts are checked. `rows`: of the step, each of which draws a token whatever is
    drafted. `positions`: that it computes for them. `per_mille`: what one more takes, of the time of a
    step of none."""
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
