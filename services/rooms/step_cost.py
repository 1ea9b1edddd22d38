"""What does one more position take of a step's time?

Machines differ, and so do the ranks of a worker. So the numbers are agreed: the leader reads them off its own
steps, and all ranks go by that. `StepCost.ms` is for the leader's own use.
"""

from typing import Final, NamedTuple


class Costs(NamedTuple):
    """In thousandths of the time of a step of no position."""

    position: int
    """Of one more position."""
    draft: int
    """Of a token that a draft model says, beside its position."""

    @property
    def fixed_tokens(self) -> int:
        """So many positions take as long as a step of none."""
        return 1000 // max(self.position, 1)


BEFORE: Final = Costs(150, 150)
"""Until it was measured: what CPUs and small models show."""
PROMPTS: Final = Costs(1, 1)
"""The same of steps that compute prompts: nothing is spared by small ones."""
PROMPTS_ALIKE: Final = 0.125
"""Of their mean. Steps of prompts that differ by less are alike: their times tell of all but lengths."""
SENT_STEPS: Final = 16
"""Between two times that it is told."""
SHARE_MIN: Final = 0.02
"""Of the last step, in all that is remembered."""
OUTLIER: Final = 3
"""Times what it takes by the line: whatever held a step up for longer, it was not its positions
(`stall-is-no-work`)."""
MOST: Final = 10_000


class StepCost:
    """A straight line through the leader's steps, of which the last ones weigh most. Where all were alike it
    is held to what was believed before."""

    def __init__(self, before: Costs = BEFORE, alike: float = 0.0) -> None:
        """`before`: what is believed until it was measured. `alike`: steps that differ in positions by less
        of their mean say nothing."""
        self.told = before
        """Agreed: what all ranks go by."""
        self._sent = before
        self._alike = alike
        self._steps = 0
        self._positions = 0.0
        self._ms = 0.0
        self._spread = 0.0
        self._joint = 0.0
        self._since = 0
        self._draft_ms: float | None = None

    def note(self, positions: int, ms: float) -> None:
        """A step of so many positions took so long, without what a draft model took."""
        self._steps += 1
        self._since += 1
        share = max(1 / self._steps, SHARE_MIN)
        wide = positions - self._positions
        if self._steps > 1:
            ms = min(ms, OUTLIER * (self._ms + max(wide, 0) * self._each))
        long = ms - self._ms
        self._positions += share * wide
        self._ms += share * long
        self._spread = (1 - share) * (self._spread + share * wide * wide)
        self._joint = (1 - share) * (self._joint + share * wide * long)

    def drafted(self, ms: float) -> None:
        """A draft model took so long for each token that it said."""
        before = ms if self._draft_ms is None else self._draft_ms
        self._draft_ms = before + SHARE_MIN * (min(ms, OUTLIER * before) - before)

    @property
    def costs(self) -> Costs:
        if not self._ms:
            return self._sent
        each = self._each
        rest = max(self._ms - each * self._positions, 0.05 * self._ms)
        draft = self._sent.draft if self._draft_ms is None else _share(self._draft_ms, rest)
        return Costs(_share(each, rest), draft)

    @property
    def _each(self) -> float:
        """Milliseconds of one more position."""
        believed = self._sent.position / 1000
        before = believed * self._ms / (1 + believed * self._positions)
        weight = max((self._alike * self._positions) ** 2, 1.0)
        return max((self._joint + weight * before) / (self._spread + weight), 0.0)

    def ms(self, positions: int) -> float:
        """Of a step of so many positions; 0 until one was measured."""
        if not self._ms:
            return 0.0
        return max(self._ms + self._each * (positions - self._positions), 0.05 * self._ms)

    def believe(self) -> None:
        """What was measured is what holds from now on where steps are alike. For who tells nobody."""
        self.news()

    def news(self) -> Costs | None:
        """What all ranks are to go by from now on, where it is something else; said once."""
        if self._since < SENT_STEPS:
            return None
        self._since = 0
        now = self.costs
        if all(abs(one - other) * 8 < other for one, other in zip(now, self._sent, strict=True)):
            return None
        self._sent = now
        return now


def _share(ms: float, of_ms: float) -> int:
    return min(max(round(1000 * ms / of_ms), 1), MOST)
