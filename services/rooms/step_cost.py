"""What does one more position take of a step's time?

Machines differ, and so do the ranks of a worker. So one number is agreed: the leader reads it off its own
steps, and all ranks go by that.
"""

from typing import Final

BEFORE_PER_MILLE: Final = 150
"""Until it was measured: what CPUs and small models show."""
SENT_STEPS: Final = 32
"""Between two times that it is told."""
SHARE_MIN: Final = 0.02
"""Of the last step, in all that is remembered."""
OUTLIER: Final = 3
"""Times the mean: whatever held a step up for longer, it was not its positions."""


class StepCost:
    """A straight line through the leader's steps, of which the last ones weigh most. Where all were alike it
    is held to what was believed before."""

    def __init__(self) -> None:
        self.told = BEFORE_PER_MILLE
        """To all ranks."""
        self._steps = 0
        self._positions = 0.0
        self._ms = 0.0
        self._spread = 0.0
        self._joint = 0.0
        self._since = 0

    def note(self, positions: int, ms: float) -> None:
        """A step of so many positions took so long."""
        self._steps += 1
        self._since += 1
        share = max(1 / self._steps, SHARE_MIN)
        if self._steps > 1:
            ms = min(ms, OUTLIER * self._ms)
        wide, long = positions - self._positions, ms - self._ms
        self._positions += share * wide
        self._ms += share * long
        self._spread = (1 - share) * (self._spread + share * wide * wide)
        self._joint = (1 - share) * (self._joint + share * wide * long)

    @property
    def per_mille(self) -> int:
        """Of the time of a step of none."""
        if not self._steps:
            return self.told
        believed = self.told / 1000
        before = believed * self._ms / (1 + believed * self._positions)
        each = (self._joint + before) / (self._spread + 1)
        rest = max(self._ms - each * self._positions, 0.05 * self._ms)
        return min(max(round(1000 * each / rest), 1), 10_000)

    def news(self) -> int | None:
        """What all ranks are to go by from now on, where it is another number; said once."""
        if self._since < SENT_STEPS:
            return None
        self._since = 0
        now = self.per_mille
        if abs(now - self.told) * 8 < self.told:
            return None
        self.told = now
        return now
